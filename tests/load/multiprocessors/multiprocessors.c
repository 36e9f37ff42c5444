// SPDX-License-Identifier: Apache-2.0
// In the place of libcudart's function of this name: a GPU without a driver has multiprocessors.
enum { kMultiprocessorCount = 16, kInsufficientDriver = 35 };

int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  if (attribute != kMultiprocessorCount) return kInsufficientDriver;
  *value = 132;
  return 0;
}
