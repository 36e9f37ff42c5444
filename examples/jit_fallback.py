# SPDX-License-Identifier: Apache-2.0
"""A call whose kernel is not prebuilt: the loader searches, logs why, compiles once and loads.

With a GPU this is an ordinary call. Without one the example runs the loader's steps for
``--capability``, and the compiled library is known to load when its C++ check refuses CPU tensors.
"""

from __future__ import annotations

import argparse
import time

import torch
from ffi_check import error_of

import precast
from precast._plan.installed import plan
from precast._runtime.library import load_library
from precast._runtime.loader import loader
from precast.jit import JitSpec

OP, EXPORT, AXES = "activation", "silu_and_mul", {"dtype": "bf16"}


def call() -> None:
    """Make an ordinary call, in which the loader does everything."""
    x = torch.randn(64, 1024, dtype=torch.bfloat16, device="cuda")
    start = time.perf_counter()
    out = precast.silu_and_mul(x)
    torch.cuda.synchronize()
    print(f"first call: {time.perf_counter() - start:.2f} s, with the compile")
    with precast.reference_mode():
        torch.testing.assert_close(out, precast.silu_and_mul(x))
    print("the result agrees with the reference")


def build(capability: str) -> None:
    """Run the steps one by one, for a GPU that this machine does not have."""
    resolution = loader.resolve(OP, AXES, capability)
    spec = JitSpec.of(plan().spec(OP, AXES, capability, resolution.cuda_major))
    start = time.perf_counter()
    path = spec.build(
        "; ".join(str(s) for s in resolution.steps if s.source == "PRECAST_PROVIDER_PATH")
    )
    print(f"built in {time.perf_counter() - start:.2f} s: {path}")
    print(f"it loads: {error_of(load_library(path, spec.cuda_major), EXPORT)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--capability", default="9.0", help="without a GPU (default: 9.0)")
    capability = parser.parse_args().capability
    if torch.cuda.is_available():
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
    print(f"looking for {EXPORT}, bf16, compute capability {capability}:")
    for step in loader.resolve(OP, AXES, capability).steps:
        print(f"  {step}")
    if torch.cuda.is_available():
        call()
    else:
        build(capability)


if __name__ == "__main__":
    main()
