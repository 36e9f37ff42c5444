// SPDX-License-Identifier: Apache-2.0
// The mark of functions that both sides call. A host compiler sees plain functions.
#pragma once

#if defined(__CUDACC__)
#define PRECAST_HOST_DEVICE __host__ __device__
#else
#define PRECAST_HOST_DEVICE
#endif
