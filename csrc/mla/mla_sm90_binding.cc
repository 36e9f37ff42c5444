// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of MLA for sm_90a, by a plan.
#include "core/ffi_export.h"
#include "mla/mla_run.h"

namespace precast {

PRECAST_EXPORT(run_mla_sm90, run_mla<true>)

}  // namespace precast
