// SPDX-License-Identifier: Apache-2.0
// Checks of numbers that kernels take as fp32.
#pragma once

#include <cmath>

#include "core/tvm_ffi_utils.h"

namespace precast {

PRECAST_ONE_COPY void check_at_least(const char* op, const char* name, double value, double least) {
  PRECAST_CHECK(value >= least && std::isfinite(static_cast<float>(value)), ValueError)
      << op << ": " << name << " must be a finite number of at least " << least << ", got "
      << value;
}

PRECAST_ONE_COPY void check_not_nan(const char* op, const char* name, double value) {
  PRECAST_CHECK(!std::isnan(value), ValueError)
      << op << ": " << name << " must be a number, not NaN, got nan";
}

}  // namespace precast
