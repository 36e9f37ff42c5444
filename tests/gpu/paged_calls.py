# SPDX-License-Identifier: Apache-2.0
"""Paged caches in NVFP4 for tests, and the numbers in them by float64 arithmetic.

Outputs lie in buffers with margins, filled with a byte, so that a byte that is not written shows,
and one too many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from block_calls import Buffer

import precast

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FORMS = ("pair", "packed", "joined", "unaligned")


@dataclass
class Paged:
    """One call: sizes, and how the cache lies in memory.

    Attributes
    ----------
    form : str
        ``pair``: two tensors. ``packed``: one with both in dimension 1. ``joined``: codes and
        scales of an entry side by side in one buffer. ``unaligned``: rows at odd addresses.
    """

    lens: tuple[int, ...] = (5, 0, 33, 17)
    length: int = 33
    heads: int = 3
    dims: tuple[int, int] = (64, 64)
    page_size: int = 8
    layout: str = "NHD"
    form: str = "pair"
    dtype: torch.dtype = torch.bfloat16
    index: torch.dtype = torch.int32
    scale_dtype: torch.dtype = torch.float8_e4m3fn
    device: str = "cuda"
    finite: bool = False
    keywords: dict[str, Any] = field(default_factory=dict)

    def make(self, generator: torch.Generator) -> PagedCall:
        each = -(-self.length // self.page_size)
        pages = len(self.lens) * each + 3

        def data(*shape: int) -> torch.Tensor:
            made = torch.randint(0, 256, shape, generator=generator, device=generator.device)
            return made.to(torch.uint8).to(self.device)

        def scales(*shape: int) -> torch.Tensor:
            made = data(*shape)
            return made.remainder(0x7E) if self.finite else made  # 0x7f and 0xff are NaN.

        def in_layout(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.transpose(-3, -2).contiguous() if self.layout == "HND" else tensor

        inner = (self.page_size, self.heads)
        codes, factors = [], []
        for dim in self.dims:
            codes.append(in_layout(data(pages, *inner, dim // 2)))
            factors.append(in_layout(scales(pages, *inner, dim // 16)))
        if self.form == "packed":
            codes = [torch.stack(codes, 1)]
            factors = [torch.stack(factors, 1)]
        elif self.form == "joined":
            joined = [torch.cat(both, -1) for both in zip(codes, factors)]
            codes = [both[..., : dim // 2] for both, dim in zip(joined, self.dims)]
            factors = [both[..., dim // 2 :] for both, dim in zip(joined, self.dims)]
        elif self.form == "unaligned":
            codes = [torch.cat([t, t[..., :3]], -1)[..., 1:-2] for t in codes]
            factors = [torch.cat([t, t], -1)[..., : t.shape[-1]] for t in factors]
        factors = [t.view(self.scale_dtype) for t in factors]
        table = torch.randperm(pages, generator=generator, device=generator.device)
        table = table[: len(self.lens) * each].view(len(self.lens), each)
        numbers = torch.rand(2, 1, generator=generator, device=generator.device) + 0.1
        shape = (len(self.lens), self.length, self.heads)
        return PagedCall(
            self,
            codes[0] if len(codes) == 1 else (codes[0], codes[1]),
            factors[0] if len(factors) == 1 else (factors[0], factors[1]),
            table.to(self.device, self.index),
            torch.tensor(self.lens, dtype=torch.int32, device=self.device),
            numbers[0].to(self.device),
            numbers[1].to(self.device),
            tuple(Buffer(*shape, dim, dtype=self.dtype) for dim in self.dims),
        )


@dataclass
class PagedCall:
    """Arguments, and the buffers around the outputs."""

    sizes: Paged
    cache: Any
    factors: Any
    table: torch.Tensor
    lens: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    buffers: tuple[Buffer, ...]

    @property
    def arguments(self) -> tuple[Any, ...]:
        tables = (self.table, self.lens, self.k_scale, self.v_scale)
        outputs = (buffer.view for buffer in self.buffers)
        return (self.cache, self.factors, *tables, *outputs, self.sizes.layout)

    def run(self, function: Callable[..., Any] = precast.nvfp4_kv_dequantize_paged) -> None:
        function(*self.arguments, **self.sizes.keywords)

    def expected(self, part: int) -> torch.Tensor:
        """Keys or values token by token, NaN bits and all, on the CPU."""
        sizes = self.sizes
        codes, factors = (
            t[part] if isinstance(t, tuple) else t[:, part] for t in (self.cache, self.factors)
        )
        if sizes.layout == "HND":
            codes, factors = codes.transpose(1, 2), factors.transpose(1, 2)
        codes, factors = codes.cpu(), factors.cpu().view(torch.uint8).contiguous()
        values = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float64)
        number = (self.k_scale, self.v_scale)[part].cpu().double()
        out = torch.empty_like(self.buffers[part].view, device="cpu")
        out.view(torch.uint8).fill_(0xA5)
        table, pages = self.table.cpu(), codes.shape[0]
        for request, tokens in enumerate(self.lens.cpu().tolist()):
            for token in range(min(tokens, sizes.length)):
                page = int(table[request, token // sizes.page_size])
                if not 0 <= page < pages:
                    continue
                row = codes[page, token % sizes.page_size].long()  # [heads, dim / 2]
                both = torch.stack([row & 15, row >> 4], -1).flatten(1)
                factor = factors[page, token % sizes.page_size].view(torch.float8_e4m3fn).double()
                product = values[both] * factor.repeat_interleave(16, -1) * number
                out[request, token] = product.float().to(sizes.dtype)
        return out

    def check(self) -> None:
        for part, buffer in enumerate(self.buffers):
            got, want = buffer.view.cpu(), self.expected(part)
            assert torch.equal(got.isnan(), want.isnan())
            bits = torch.int16
            assert torch.equal(
                got.masked_fill(got.isnan(), 0.0).view(bits),
                want.masked_fill(want.isnan(), 0.0).view(bits),
            )
            buffer.check()
