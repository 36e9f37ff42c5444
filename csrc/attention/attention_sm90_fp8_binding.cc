// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of attention for sm_90a with queries, keys and values of e4m3, by a plan.
#include "attention/attention_kv.h"
#include "core/ffi_export.h"

namespace precast {

PRECAST_EXPORT(run_paged_sm90_fp8, run_paged<true>)
PRECAST_EXPORT(run_ragged_sm90_fp8, run_ragged<true>)

}  // namespace precast
