// SPDX-License-Identifier: Apache-2.0
// PRECAST_EXPORT(name, function) makes a function an entry point of the module.
//
// It does what TVM_FFI_DLL_EXPORT_TYPED_FUNC does for functions without a result, with the same ABI
// and errors. Why: that macro expands the conversion of every argument, error text included, at
// each entry point, 2 KB an argument. Here the conversion to a type exists once a module.
#pragma once

#include <optional>
#include <utility>

#include "core/tvm_ffi_utils.h"

namespace precast {

template <typename T>
[[gnu::noinline]] T argument_of(const char* function, const tvm::ffi::AnyView* args, int index) {
  std::optional<T> value = args[index].try_cast<T>();
  if (!value.has_value()) {
    const TVMFFIAny got = args[index].CopyToTVMFFIAny();
    TVM_FFI_THROW(TypeError) << "Mismatched type on argument #" << index << " when calling: `"
                             << function << "`. Expected `" << tvm::ffi::TypeTraits<T>::TypeStr()
                             << "` but got `" << tvm::ffi::TypeTraits<T>::GetMismatchTypeInfo(&got)
                             << '`';
  }
  return *std::move(value);
}

PRECAST_ONE_COPY void check_argument_count(const char* function, int expected, int got) {
  PRECAST_CHECK(expected == got, TypeError)
      << "Mismatched number of arguments when calling: `" << function << "`. Expected " << expected
      << " but got " << got << " arguments";
}

template <typename... Args, size_t... kIndex>
void call_with(void (*target)(Args...), const char* function, const tvm::ffi::AnyView* args,
               int count, std::index_sequence<kIndex...>) {
  check_argument_count(function, sizeof...(Args), count);
  target(argument_of<Args>(function, args, kIndex)...);
}

// Passes the exception that is being handled to the caller of the entry point.
PRECAST_ONE_COPY int report_exception() {
  TVM_FFI_SAFE_CALL_BEGIN();
  throw;
  TVM_FFI_SAFE_CALL_END();
}

template <typename... Args>
int entry_point(void (*target)(Args...), const char* function, const TVMFFIAny* args, int count) {
  try {
    call_with(target, function, reinterpret_cast<const tvm::ffi::AnyView*>(args), count,
              std::index_sequence_for<Args...>());
    return 0;
  } catch (...) {
    return report_exception();
  }
}

}  // namespace precast

#define PRECAST_EXPORT(name, function)                                                            \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* args, int32_t count, \
                                                     TVMFFIAny*) {                                \
    return ::precast::entry_point(function, #name, args, count);                                  \
  }
