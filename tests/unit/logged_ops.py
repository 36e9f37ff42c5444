# SPDX-License-Identifier: Apache-2.0
"""Public functions for the tests of logging; importable, so that their dumps can be replayed."""

from __future__ import annotations

import enum
import os

import torch

from precast.api_logging import precast_api


class Kind(enum.Enum):
    PLUS = 1
    MINUS = 2


@precast_api
def plain(x: torch.Tensor, factor: float = 2.0, out: torch.Tensor | None = None) -> torch.Tensor:
    """``x * factor``; ``FAULT`` in the environment makes it wrong, or the end of the process."""
    fault = os.environ.get("FAULT")
    if fault == "abort":
        os.abort()
    if fault == "raise":
        raise RuntimeError("no luck")
    result = x * factor + (float(fault) if fault else 0.0)
    return result if out is None else out.copy_(result)


@precast_api()
def everything(*caches, kind, dtype, device, sizes, scale, mode="a", **more):
    """Arguments of every kind; adds to the first tensor of ``caches`` in place."""
    first, second = caches[0]
    sign = 1 if kind is Kind.PLUS else -1
    first.add_(sign * sizes[1] * more["bias"].to(device, dtype).sum())
    return {"low": second.amin(), "all": [second, first * scale]}


@precast_api
def in_place(x: torch.Tensor, residual: torch.Tensor) -> None:
    residual += x
    x.copy_(residual * 2)


@precast_api
def takes_an_object(x: torch.Tensor, thing: object) -> torch.Tensor:
    return x + 1
