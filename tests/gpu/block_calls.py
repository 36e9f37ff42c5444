# SPDX-License-Identifier: Apache-2.0
"""The block-scaled ops as their GPU tests call them: through the public function or the export.

The public functions allocate their results. Through the export the results are buffers of the
test's own, filled with a byte and with margins, so that a byte that is not written shows, and one
too many.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import precast
from precast import SfLayout
from precast._op.dispatch import kernels
from precast._ops.quantize._reference_blocks import scale_shape
from precast.quantization import (
    fp4_quantize_reference,
    mxfp4_quantize_reference,
    mxfp8_quantize_reference,
    nvfp4_kv_quantize_reference,
    nvfp4_quantize_reference,
)

LAYOUTS = list(SfLayout)
FILL = 0xA5
MARGIN = 256


class Buffer:
    """Bytes with a margin on both sides."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.uint8) -> None:
        size = math.prod(shape) * dtype.itemsize
        self.bytes = torch.full((size + 2 * MARGIN,), FILL, dtype=torch.uint8, device="cuda")
        self.view = self.bytes[MARGIN : MARGIN + size].view(dtype).view(shape)

    def check(self) -> None:
        margins = torch.cat([self.bytes[:MARGIN], self.bytes[-MARGIN:]])
        assert (margins == FILL).all(), "written outside of the tensor"


def same_bits(got: torch.Tensor, want: torch.Tensor, name: str = "") -> None:
    """Both have one dtype and shape, and the same bytes; shows where they differ."""
    assert got.dtype == want.dtype, name
    assert got.shape == want.shape, name
    left = got.contiguous().view(-1).view(torch.uint8)
    right = want.to(got.device).contiguous().view(-1).view(torch.uint8)
    if not torch.equal(left, right):
        wrong = (left != right).nonzero().flatten()
        rows = [f"[{i}] {left[i]:#04x} != {right[i]:#04x}" for i in wrong[:8].tolist()]
        raise AssertionError(f"{name}: {len(wrong)} of {len(left)} bytes differ: {'; '.join(rows)}")


@dataclass(frozen=True)
class Quantize:
    """One quantisation: its block, and how to call it and its reference."""

    name: str
    block: int
    public: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    reference: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    scaled: bool = False  # by a global scale

    def call(self, x: torch.Tensor, g: torch.Tensor, layout: SfLayout, **keywords: Any) -> Any:
        return self.public(x, g, layout, **keywords)

    def check(self, x: torch.Tensor, g: torch.Tensor, layout: SfLayout) -> None:
        """Through the export, into guarded buffers, against the reference on the CPU."""
        rows = math.prod(x.shape[:-1])
        e4m3 = self.name == "mxfp8_quantize"
        columns = x.shape[-1] if e4m3 else x.shape[-1] // 2
        dtype = torch.float8_e4m3fn if e4m3 else torch.uint8
        out = Buffer(*x.shape[:-1], columns, dtype=dtype)
        shape = scale_shape(rows, x.shape[-1] // self.block, layout)
        scales = Buffer(math.prod(shape)) if e4m3 else Buffer(*shape)
        tail = (32, True) if e4m3 else (True,)
        middle: tuple[Any, ...] = (int(layout),)
        if self.name == "fp4_quantize":
            middle = (False, int(layout), False)
        given = (x, g) if self.scaled else (x,)
        kernel = kernels()[self.name]
        kernel[x.dtype, x.get_device()](*given, out.view, scales.view, *middle, *tail)
        want = self.reference(x.cpu(), g.cpu(), int(layout))
        same_bits(scales.view, want[1], f"{self.name}: scales")
        same_bits(out.view, want[0], self.name)
        out.check()
        scales.check()


QUANTIZE = [
    Quantize(
        "nvfp4_quantize",
        16,
        lambda x, g, layout, **keywords: precast.nvfp4_quantize(x, g, layout, **keywords),
        nvfp4_quantize_reference,
        True,
    ),
    Quantize(
        "fp4_quantize",
        16,
        lambda x, g, layout, **keywords: precast.fp4_quantize(
            x,
            g,
            is_sf_swizzled_layout=layout != SfLayout.layout_linear,
            is_sf_8x4_layout=layout == SfLayout.layout_8x4,
            **keywords,
        ),
        lambda x, g, layout: fp4_quantize_reference(x, g, 16, False, layout < 2, layout == 1),
        True,
    ),
    Quantize(
        "mxfp4_quantize",
        32,
        lambda x, g, layout, **keywords: precast.mxfp4_quantize(x, sfLayout=layout, **keywords),
        lambda x, g, layout: mxfp4_quantize_reference(x, layout),
    ),
    Quantize(
        "mxfp8_quantize",
        32,
        lambda x, g, layout, **keywords: precast.mxfp8_quantize(
            x, sf_swizzle_layout=layout, **keywords
        ),
        lambda x, g, layout: mxfp8_quantize_reference(x, sf_swizzle_layout=layout),
    ),
]


def check_kv(x: torch.Tensor, g: torch.Tensor) -> None:
    """Call ``nvfp4_kv_quantize`` as :meth:`Quantize.check` does."""
    *leading, columns = x.shape
    out, scales = Buffer(*leading, columns // 2), Buffer(*leading, columns // 16)
    kernels()["nvfp4_kv_quantize"][x.dtype, x.get_device()](x, g, out.view, scales.view, True)
    want = nvfp4_kv_quantize_reference(x.cpu(), g.cpu())
    same_bits(scales.view, want[1], "nvfp4_kv_quantize: scales")
    same_bits(out.view, want[0], "nvfp4_kv_quantize")
    out.check()
    scales.check()


def numbers(
    *shape: int, dtype: torch.dtype, generator: torch.Generator, spread: float = 4.0
) -> torch.Tensor:
    """Normal numbers times powers of two that differ from row to row."""
    x = torch.randn(shape, device="cuda", generator=generator)
    powers = torch.randn((*shape[:-1], 1), device="cuda", generator=generator) * spread
    return (x * torch.exp2(powers.round())).to(dtype)


def global_scale(x: torch.Tensor) -> torch.Tensor:
    most = x.abs().amax().float() if x.numel() else torch.ones((), device=x.device)
    return (448 * 6 / most).reshape(1)
