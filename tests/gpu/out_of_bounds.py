# SPDX-License-Identifier: Apache-2.0
"""Reads past the end of a tensor: what ci/sanitize.sh must report, or it would report nothing."""

from __future__ import annotations

import torch

import precast


class Longer:
    """A tensor's memory, said to hold ``more`` elements than it has."""

    def __init__(self, tensor: torch.Tensor, more: int) -> None:
        self.__cuda_array_interface__ = {
            **tensor.__cuda_array_interface__,
            "shape": (tensor.numel() + more,),
            "strides": None,
        }


if __name__ == "__main__":
    # Large, so that it does not lie behind the short one: the op would reject the overlap.
    out = torch.empty(1 << 24, dtype=torch.bfloat16, device="cuda")
    short = torch.zeros(1024, dtype=torch.float16, device="cuda")
    long = torch.as_tensor(Longer(short, 16), device="cuda")
    assert long.data_ptr() == short.data_ptr()
    precast.silu_and_mul(long.view(torch.bfloat16).view(1, -1), out=out[:520].view(1, -1))
    torch.cuda.synchronize()
