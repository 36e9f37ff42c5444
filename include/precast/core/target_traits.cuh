// SPDX-License-Identifier: Apache-2.0
// Generated from aot_configs/build.toml by `make generate`; do not edit.
// What the target of this compilation has.
#pragma once

namespace precast {

#if defined(PRECAST_SM)

// The shared memory that one CTA may have, in KiB.
#if PRECAST_SM == 80
constexpr int kSharedKibPerCta = 163;
#elif PRECAST_SM == 86
constexpr int kSharedKibPerCta = 99;
#elif PRECAST_SM == 89
constexpr int kSharedKibPerCta = 99;
#elif PRECAST_SM == 90
constexpr int kSharedKibPerCta = 227;
#elif PRECAST_SM == 100
constexpr int kSharedKibPerCta = 227;
#elif PRECAST_SM == 110
constexpr int kSharedKibPerCta = 227;
#elif PRECAST_SM == 120
constexpr int kSharedKibPerCta = 99;
#else
#error "precast/core/target_traits.cuh: PRECAST_SM is the number of no target"
#endif

#endif  // PRECAST_SM

}  // namespace precast
