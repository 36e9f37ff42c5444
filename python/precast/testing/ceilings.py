# SPDX-License-Identifier: Apache-2.0
"""The ceilings of this GPU, measured in the same run as the kernels that are compared with them.

Each ceiling is the best of a fixed set of torch's kernels on large tensors of random data:

- ``elementwise``, reading and writing 1 GiB: copy, negate, scale by a scalar, product of two;
- ``read``: sum in float32 and bfloat16, of 1 GiB;
- ``matmul``: square and rectangular products in one dtype;
- ``launch``: one tiny kernel as a node of a graph, the least that any call takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from precast.testing.gpu_time import bench_gpu_time_with_cudagraph
from precast.testing.rotation import tensor_bytes
from precast.testing.stats import Timing

# [m, n, k]: large enough for every SM, of 0.5 to 4 TFLOP.
_PRODUCTS = ((8192, 8192, 8192), (16384, 8192, 4096), (8192, 16384, 8192), (16384, 16384, 8192))


class Ceiling(NamedTuple):
    """The best of several kernels, in ``unit``, and the result of each of them."""

    name: str
    best: float
    kernel: str
    all: dict[str, float]
    unit: str = "GB/s"


class Ceilings(NamedTuple):
    """Limits of a memory-bound call: two bandwidths, and the time of an empty call."""

    elementwise: Ceiling
    read: Ceiling
    launch: Ceiling


@functools.cache
def measure_ceilings(bytes_per_tensor: int = 1 << 30) -> Ceilings:
    """Measure the ceilings of the current device, once a process.

    Parameters
    ----------
    bytes_per_tensor : int
        Size of each tensor; 1 GiB or more is far beyond L2 and long against a launch.
    """
    count = bytes_per_tensor // 2
    x, y = (torch.randn(count, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(x)
    wide = torch.randn(count // 2, dtype=torch.float32, device="cuda")
    total, total16 = wide.new_empty(()), x.new_empty(())
    elementwise = _bandwidth(
        "elementwise",
        {
            "copy": (lambda a, o: o.copy_(a), (x, out)),
            "negate": (lambda a, o: torch.neg(a, out=o), (x, out)),
            "scale": (lambda a, o: torch.mul(a, 1.25, out=o), (x, out)),
            "gated product": (lambda a, b, o: torch.mul(a, b, out=o), (x, y, out)),
        },
    )
    read = _bandwidth(
        "read",
        {
            "sum f32": (lambda a, o: torch.sum(a, 0, out=o), (wide, total)),
            "sum bf16": (lambda a, o: torch.sum(a, 0, out=o), (x, total16)),
        },
    )
    one = x[:1].clone()
    seconds = _seconds(lambda a: torch.neg(a, out=a), (one,), cold=False)
    launch = Ceiling("launch", seconds * 1e6, "negate", {"negate": seconds * 1e6}, "us")
    return Ceilings(elementwise, read, launch)


@functools.cache
def measure_matmul_ceiling(dtype: torch.dtype) -> Ceiling:
    """TFLOP/s of torch's matrix product in one dtype; once a process."""
    reached = {}
    for m, n, k in _PRODUCTS:
        a = torch.randn((m, k), dtype=torch.float32, device="cuda").to(dtype)
        b = torch.randn((n, k), dtype=torch.float32, device="cuda").to(dtype)
        if dtype.itemsize == 1:
            one = torch.ones((), device="cuda")
            out = torch.empty((m, n), dtype=torch.bfloat16, device="cuda")
            seconds = _seconds(_product_of_8_bits, (a, b, one, out))
        else:
            out = torch.empty((m, n), dtype=dtype, device="cuda")
            seconds = _seconds(lambda a, b, o: torch.mm(a, b.t(), out=o), (a, b, out))
        reached[f"{m}x{n}x{k}"] = 2 * m * n * k / seconds * 1e-12
    return _best("matmul", reached, "TFLOP/s")


def _product_of_8_bits(
    a: torch.Tensor, b: torch.Tensor, one: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    product: torch.Tensor = torch._scaled_mm(a, b.t(), one, one, out_dtype=out.dtype, out=out)
    return product


def _bandwidth(
    name: str, kernels: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]
) -> Ceiling:
    reached = {
        kernel: tensor_bytes(tensors) / _seconds(fn, tensors) * 1e-9
        for kernel, (fn, tensors) in kernels.items()
    }
    return _best(name, reached, "GB/s")


def _seconds(fn: Callable[..., Any], tensors: tuple[Any, ...], cold: bool = True) -> float:
    samples = bench_gpu_time_with_cudagraph(
        fn, dry_run_iters=3, num_iters_within_graph=1, input_args=tensors, cold_l2_cache=cold
    )
    return Timing.of_milliseconds(samples).median


def _best(name: str, reached: dict[str, float], unit: str) -> Ceiling:
    best = max(reached, key=reached.__getitem__)
    return Ceiling(name, reached[best], best, reached, unit)
