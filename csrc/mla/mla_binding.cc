// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry point of MLA over pages, by a plan.
#include "core/ffi_export.h"
#include "mla/mla_run.h"

namespace precast {

PRECAST_EXPORT(run_mla, run_mla<false>)

}  // namespace precast
