// SPDX-License-Identifier: Apache-2.0
// tvm-ffi entry points of attention over paged and ragged keys and values, by a plan.
#include "attention/attention_kv.h"
#include "core/ffi_export.h"

namespace precast {

PRECAST_EXPORT(run_paged, run_paged<false>)
PRECAST_EXPORT(run_ragged, run_ragged<false>)

}  // namespace precast
