# SPDX-License-Identifier: Apache-2.0
"""Dequantisation of blocks: 4 or 8 bits and a scale a block read once, numbers written once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _harness import Case
from _script import script

from precast.quantization import (
    SfLayout,
    e2m1_and_ufp8sf_scale_to_float_reference,
    mxfp4_dequantize_reference,
    mxfp8_dequantize_reference,
    nvfp4_kv_dequantize_reference,
)

COLUMNS = 7168
ROWS = (64, 1024, 8192)
LINEAR = SfLayout.layout_linear


def _bytes_of(rows: int, columns: int) -> torch.Tensor:
    return (torch.randn((rows, columns), device="cuda") * 40 + 128).clamp(0, 255).to(torch.uint8)


def _ue8m0(rows: int, columns: int) -> torch.Tensor:
    return (torch.randn((rows, columns), device="cuda") * 3 + 127).to(torch.uint8)


def _e4m3(rows: int, columns: int) -> torch.Tensor:
    return torch.randn((rows, columns), device="cuda").abs().to(torch.float8_e4m3fn)


def _mxfp8(rows: int) -> tuple[torch.Tensor, ...]:
    return _e4m3(rows, COLUMNS), _ue8m0(rows, COLUMNS // 32)


def _mxfp4(rows: int) -> tuple[torch.Tensor, ...]:
    return _bytes_of(rows, COLUMNS // 2), _ue8m0(rows, COLUMNS // 32)


def _nvfp4(rows: int) -> tuple[torch.Tensor, ...]:
    scales = _e4m3(rows, COLUMNS // 16).view(torch.uint8)
    return _bytes_of(rows, COLUMNS // 2), scales, torch.randn(1, device="cuda").abs()


# Bytes moved a number, the arguments, the call of a library's function, the same in plain PyTorch.
CALLS: dict[str, tuple[float, Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "nvfp4_kv_dequantize": (
        2 + 1 / 2 + 1 / 16,
        _nvfp4,
        lambda f: lambda q, s, g: f(q, s, g),
        nvfp4_kv_dequantize_reference,
    ),
    "e2m1_and_ufp8sf_scale_to_float": (
        4 + 1 / 2 + 1 / 16,
        _nvfp4,
        lambda f: lambda q, s, g: f(q, s, g, is_sf_swizzled_layout=False),
        lambda q, s, g: e2m1_and_ufp8sf_scale_to_float_reference(
            q, s, g, is_sf_swizzled_layout=False
        ),
    ),
    "mxfp4_dequantize": (
        4 + 1 / 2 + 1 / 32,
        _mxfp4,
        lambda f: lambda q, s: f(q, s, LINEAR),
        lambda q, s: mxfp4_dequantize_reference(q, s, 2),
    ),
    "mxfp8_dequantize": (
        2 + 1 + 1 / 32,
        _mxfp8,
        lambda f: lambda q, s: f(q, s, LINEAR, torch.bfloat16),
        lambda q, s: mxfp8_dequantize_reference(q, s, 2, torch.bfloat16),
    ),
}


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Of the dtypes that each function has by default, whatever ``dtype`` is."""
    for op, (moved, arguments, bind, eager) in CALLS.items():
        for rows in ROWS:

            def make(
                rows: int = rows, arguments: Callable[..., Any] = arguments
            ) -> tuple[torch.Tensor, ...]:
                made: tuple[torch.Tensor, ...] = arguments(rows)
                return made

            yield Case(
                op, f"[{rows}, {COLUMNS}] linear", int(rows * COLUMNS * moved), make, bind, eager
            )


if __name__ == "__main__":
    script(__file__)
