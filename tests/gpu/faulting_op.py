# SPDX-License-Identifier: Apache-2.0
"""A user's own op on the kernel of ``faulting.cu``; run as a script, it makes one call that fails.

Imported by the test that expects the failure, and by ``precast replay --import faulting_op``.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch

from precast.api_logging import precast_api
from precast.jit import gen_jit_spec

#: Two of them, because they end a process in different ways.
FAULTS = {"none": 0, "illegal address": 1, "trap": 2}


@functools.cache
def kernel() -> Any:
    source = Path(__file__).with_name("faulting.cu")
    spec = gen_jit_spec("faulting", [source], exports=["faulting"])
    return spec.build_and_load().get_function("faulting")


@precast_api
def faulting(x: torch.Tensor, out: torch.Tensor, fault: str = "none") -> torch.Tensor:
    """Copy ``x`` to ``out``, or fail on the GPU."""
    kernel()(x, out, x.numel(), FAULTS[fault])
    return out


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """The same in every process; ``out`` holds what no kernel writes."""
    x = torch.arange(1000, dtype=torch.float32) * 1.25 - 300
    x[7], x[8] = float("nan"), float("-inf")
    return x, torch.full((1000,), -7.0)


def main() -> None:
    x, out = (tensor.cuda() for tensor in inputs())
    faulting(x, out)  # compiles, and works
    assert torch.equal(out[9:], x[9:])
    out.fill_(-7.0)
    torch.cuda.synchronize()
    faulting(x, out, sys.argv[1])
    print("returned", flush=True)
    torch.cuda.synchronize()
    print("survived", flush=True)


if __name__ == "__main__":
    # Under its own name, by which a replay finds it.
    import faulting_op

    faulting_op.main()
