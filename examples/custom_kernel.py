# SPDX-License-Identifier: Apache-2.0
"""A kernel of your own that precast compiles, caches and loads, as an op of PyTorch.

Without a GPU it is compiled for ``--arch``, and its check of arguments refuses a CPU tensor.
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from precast.jit import JitSpec, gen_jit_spec

SOURCE = Path(__file__).with_suffix(".cu")


def spec(arch: str) -> JitSpec:
    return gen_jit_spec("squared_relu", [SOURCE], exports=["squared_relu"], arch=arch)


@functools.cache
def kernel(arch: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """The function of the library, which is compiled at the first call of a machine."""
    return spec(arch).build_and_load().get_function("squared_relu")


@torch.library.custom_op("custom_kernel::squared_relu", mutates_args=(), device_types="cuda")
def squared_relu(input: torch.Tensor) -> torch.Tensor:
    """Compute ``max(input, 0)**2``; the output is contiguous."""
    out = torch.empty_like(input, memory_format=torch.contiguous_format)
    major, minor = torch.cuda.get_device_capability(input.device)
    with torch.cuda.device(input.device):  # The launch is on the current device.
        kernel(f"{major}.{minor}")(input.contiguous(), out)
    return out


@squared_relu.register_fake
def _(input: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@squared_relu.register_kernel("cpu")
def reference(input: torch.Tensor) -> torch.Tensor:
    """Compute the same in plain PyTorch, for CPU tensors and for tests."""
    return input.contiguous().float().relu().square().to(input.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", default="9.0", help="without a GPU (default: 9.0)")
    arch = parser.parse_args().arch
    x = torch.randn(1000, 33, dtype=torch.bfloat16)
    if torch.cuda.is_available():
        torch.testing.assert_close(squared_relu(x.cuda()).cpu(), reference(x))
        print("the kernel agrees with the reference")
        return
    function = kernel(arch)
    print(f"compiled for {arch}: {spec(arch).get_library_path()}")
    try:
        function(x, torch.empty_like(x))
    except ValueError as error:
        print(f"it refuses a CPU tensor: {error}")


if __name__ == "__main__":
    main()
