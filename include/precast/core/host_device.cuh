// SPDX-License-Identifier: Apache-2.0
// Marks functions that host and device code call. A host compiler sees plain functions.
#pragma once

#if defined(__CUDACC__)
#define PRECAST_HOST_DEVICE __host__ __device__
#else
#define PRECAST_HOST_DEVICE
#endif
