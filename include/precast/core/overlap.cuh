// SPDX-License-Identifier: Apache-2.0
// Whether a kernel runs beside its neighbour in a stream; core/launch.cuh has what kernels call.
#pragma once

namespace precast {

// Two kernels that are launched one behind the other with PDL, and of which neither reads or writes
// what the other one writes, may run beside each other. The first lets the second start when all
// that comes before both has ended; the second ends behind the first, so that whoever waits for it
// has both.
enum class Overlap : int { none, with_next, with_previous };

}  // namespace precast
