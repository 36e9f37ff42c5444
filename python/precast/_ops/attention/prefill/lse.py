# SPDX-License-Identifier: Apache-2.0
"""Convert log-sum-exps to another base, or to heads first."""

from __future__ import annotations

import math

from precast._base.torch import torch
from precast._ops.attention.validation import check_shape_dtype_device

_FACTORS = {"log2": 1.0, "ln": math.log(2.0)}


class Lse:
    """Where kernels write, ``[tokens, heads]`` in base 2, and what is made of it."""

    __slots__ = ("_factor", "_into", "buffer")

    def __init__(
        self, lse_base: str, lse_layout: str, lse: torch.Tensor | None, q: torch.Tensor
    ) -> None:
        if lse_base not in _FACTORS:
            raise ValueError(f"lse_base must be 'log2' or 'ln', got {lse_base!r}")
        if lse_layout not in ("NH", "HN"):
            raise ValueError(f"lse_layout must be 'NH' or 'HN', got {lse_layout!r}")
        self._factor = _FACTORS[lse_base]
        self._into: torch.Tensor | None = None
        self.buffer = lse
        if lse_layout == "HN":
            shape = (q.shape[1], q.shape[0])
            if lse is None:
                lse = q.new_empty(shape, dtype=torch.float32)
            check_shape_dtype_device(lse, shape, torch.float32, q.device, "lse")
            self._into, self.buffer = lse, None

    def __call__(self, sums: torch.Tensor) -> torch.Tensor:
        if self._into is not None:
            return torch.mul(sums.t(), self._factor, out=self._into)
        return sums if self._factor == 1.0 else sums.mul_(self._factor)
