# SPDX-License-Identifier: Apache-2.0
"""Quantisation in blocks: 16-bit rows read once, 4 or 8 bits and a scale a block written once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _harness import Case
from _script import script

from precast.quantization import (
    SfLayout,
    fp4_quantize_reference,
    mxfp4_quantize_reference,
    mxfp8_quantize_reference,
    nvfp4_kv_quantize_reference,
    nvfp4_quantize_reference,
)

COLUMNS = 7168  # the hidden size of DeepSeek-V3
ROWS = (1, 64, 1024, 16384)
LAYOUTS = {"128x4": SfLayout.layout_128x4, "linear": SfLayout.layout_linear}


def _calls(layout: SfLayout) -> dict[str, tuple[float, Callable[..., Any], Callable[..., Any]]]:
    """Bytes written a number, the call of a library's function, the same in plain PyTorch."""
    tiled = layout != SfLayout.layout_linear
    return {
        "nvfp4_quantize": (
            1 / 2 + 1 / 16,
            lambda f: lambda x, g: f(x, g, layout),
            lambda x, g: nvfp4_quantize_reference(x, g, layout),
        ),
        "fp4_quantize": (
            1 / 2 + 1 / 16,
            lambda f: lambda x, g: f(x, g, 16, False, tiled),
            lambda x, g: fp4_quantize_reference(x, g, 16, False, layout < 2, layout == 1),
        ),
        "mxfp4_quantize": (
            1 / 2 + 1 / 32,
            lambda f: lambda x, g: f(x, sfLayout=layout),
            lambda x, g: mxfp4_quantize_reference(x, layout),
        ),
        "mxfp8_quantize": (
            1 + 1 / 32,
            lambda f: lambda x, g: f(x, tiled),
            lambda x, g: mxfp8_quantize_reference(x, sf_swizzle_layout=layout),
        ),
    }


def cases(dtype: torch.dtype) -> Iterator[Case]:
    if dtype.itemsize != 2:
        return
    for word, layout in LAYOUTS.items():
        for op, (written, bind, eager) in _calls(layout).items():
            for rows in ROWS if op != "fp4_quantize" else (ROWS[0], ROWS[-1]):

                def make(rows: int = rows) -> tuple[torch.Tensor, torch.Tensor]:
                    x = torch.randn((rows, COLUMNS), dtype=dtype, device="cuda")
                    return x, (448 * 6 / x.abs().amax().float()).reshape(1)

                moved = int(rows * COLUMNS * (dtype.itemsize + written))
                yield Case(op, f"[{rows}, {COLUMNS}] {word}", moved, make, bind, eager)
    for rows in ROWS:

        def make_kv(rows: int = rows) -> tuple[torch.Tensor, torch.Tensor]:
            x = torch.randn((rows, COLUMNS), dtype=dtype, device="cuda")
            return x, (x.abs().amax().float() / (448 * 6)).reshape(1)

        yield Case(
            "nvfp4_kv_quantize",
            f"[{rows}, {COLUMNS}]",
            int(rows * COLUMNS * (dtype.itemsize + 1 / 2 + 1 / 16)),
            make_kv,
            bind=lambda f: lambda x, g: f(x, g),
            eager=nvfp4_kv_quantize_reference,
        )


if __name__ == "__main__":
    script(__file__)
