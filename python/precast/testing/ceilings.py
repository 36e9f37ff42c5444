# SPDX-License-Identifier: Apache-2.0
"""What this GPU can reach, measured in the same run as the kernels that are judged by it.

Each ceiling is the best of a fixed set of torch's kernels on 1 GiB tensors of random data:

- ``elementwise``, reading and writing: copy, negate, scale by a scalar, product of two tensors;
- ``read``: sum in float32 and bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from precast.testing.rotation import tensor_bytes
from precast.testing.stats import Timing
from precast.testing.timing import bench_gpu_time_with_cudagraph


class Ceiling(NamedTuple):
    """The best of several kernels, and what each of them reached."""

    name: str
    gbps: float
    kernel: str
    all_gbps: dict[str, float]


class Ceilings(NamedTuple):
    """Bandwidths in GB/s (1e9 bytes a second)."""

    elementwise: Ceiling
    read: Ceiling


@functools.cache
def measure_ceilings(bytes_per_tensor: int = 1 << 30) -> Ceilings:
    """Measure both ceilings on the current device; once a process.

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
    elementwise = _best(
        "elementwise",
        {
            "copy": (lambda a, o: o.copy_(a), (x, out)),
            "negate": (lambda a, o: torch.neg(a, out=o), (x, out)),
            "scale": (lambda a, o: torch.mul(a, 1.25, out=o), (x, out)),
            "gated product": (lambda a, b, o: torch.mul(a, b, out=o), (x, y, out)),
        },
    )
    read = _best(
        "read",
        {
            "sum f32": (lambda a, o: torch.sum(a, 0, out=o), (wide, total)),
            "sum bf16": (lambda a, o: torch.sum(a, 0, out=o), (x, total16)),
        },
    )
    return Ceilings(elementwise, read)


def _best(name: str, kernels: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]) -> Ceiling:
    reached = {}
    for kernel, (fn, tensors) in kernels.items():
        samples = bench_gpu_time_with_cudagraph(fn, tensors)
        reached[kernel] = Timing.of_milliseconds(samples).bandwidth(tensor_bytes(tensors))
    best = max(reached, key=reached.__getitem__)
    return Ceiling(name, reached[best], best, reached)
