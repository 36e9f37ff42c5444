// SPDX-License-Identifier: Apache-2.0
// What the programs of this folder check with. main() returns 1 if `failures` is not 0.
#pragma once

#include <cstdio>
#include <cstdlib>

inline int failures = 0;

#define CHECK(condition, ...)                             \
  do {                                                    \
    if (!(condition)) {                                   \
      std::printf("line %d: %s: ", __LINE__, #condition); \
      std::printf(__VA_ARGS__);                           \
      std::printf("\n");                                  \
      if (++failures > 20) std::exit(1);                  \
    }                                                     \
  } while (0)
