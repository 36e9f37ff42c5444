# SPDX-License-Identifier: Apache-2.0
"""A batch of MLA whose tokens can be put into pages of any size; all other memory is NaN."""

from __future__ import annotations

import math
from typing import Any

import torch
from attention_dense import I32, causal, dense, indptr

from precast.mla import BatchMLAPagedAttentionWrapper

E4M3 = torch.float8_e4m3fn
#: Numbers of this byte alone are NaN in each type.
NAN_BYTE = 0xFF
#: A page that no cache has.
GARBAGE = 0x7FFFFFF0
SM_SCALE = 1 / math.sqrt(192)
#: Of caches of e4m3.
CKV_SCALE, KPE_SCALE = 0.75, 1.5


class Batch:
    """Queries ``[tokens, heads, ckv + kpe]`` and the rows ``[tokens, ckv + kpe]`` of a cache."""

    def __init__(
        self,
        q_lens: list[int],
        kv_lens: list[int],
        generator: torch.Generator,
        heads: int = 16,
        head_dims: tuple[int, int] = (512, 64),
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        has_scales: bool = False,
    ) -> None:
        self.q_lens, self.kv_lens, self.heads, self.head_dims = q_lens, kv_lens, heads, head_dims
        self.dtype, self.kv_dtype = dtype, kv_dtype or dtype
        self.device = generator.device

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=self.device)

        self.query = random(sum(q_lens), heads, sum(head_dims)).to(dtype)
        self.rows = random(sum(kv_lens), sum(head_dims)).to(self.kv_dtype)
        self.scales = None
        if has_scales:
            self.scales = random(sum(kv_lens), head_dims[0] // 128).abs() + 0.1
        self.bounds = indptr(kv_lens).tolist()

    def pages(self, size: int, generator: torch.Generator) -> dict[str, Any]:
        """The cache, its table and the scales; the table goes on with pages that do not exist."""
        counts = [-(-n // size) for n in self.kv_lens]
        total = sum(counts)
        places = torch.randperm(total + 3, generator=generator, device=self.device)[:total]
        garbage = torch.full((70,), GARBAGE, dtype=I32, device=self.device)
        columns = self.rows.shape[1]
        cache = self._spread(self.rows.view(torch.uint8).view(-1, columns, self._bytes()), size)
        starts = indptr(counts).tolist()
        found: dict[str, Any] = {}
        for name, parts in (("cache", cache), ("scales", self._spread(self.scales, size))):
            if parts is None:
                found[name] = None
                continue
            fill = NAN_BYTE if name == "cache" else math.nan
            pool = parts[0].new_full((total + 3, size, *parts[0].shape[1:]), fill)
            for i, part in enumerate(parts):
                shape = counts[i], size, *part.shape[1:]
                pool[places[starts[i] : starts[i + 1]]] = part.view(shape)
            found[name] = pool
        cache = found["cache"].view(total + 3, size, -1).view(self.kv_dtype)
        return {
            "table": (indptr(counts), torch.cat([places.to(I32), garbage])),
            "cache": cache,
            "scales": found["scales"],
        }

    def _bytes(self) -> int:
        return self.rows.element_size()

    def _spread(self, tokens: torch.Tensor | None, size: int) -> list[torch.Tensor] | None:
        """The tokens of each request, with NaN up to the end of its last page."""
        if tokens is None:
            return None
        fill = NAN_BYTE if tokens.dtype == torch.uint8 else math.nan
        parts = []
        for i, n in enumerate(self.kv_lens):
            part = tokens.new_full((-(-n // size) * size, *tokens.shape[1:]), fill)
            part[:n] = tokens[self.bounds[i] : self.bounds[i + 1]]
            parts.append(part)
        return parts

    def wrapper(
        self, size: int, generator: torch.Generator, backend: str, is_causal: bool
    ) -> tuple[BatchMLAPagedAttentionWrapper, dict[str, Any]]:
        """A wrapper with a plan, and the arguments of its run."""
        pages = self.pages(size, generator)
        workspace = torch.full((256 << 20,), 0xFF, dtype=torch.uint8, device=self.device)
        wrapper = BatchMLAPagedAttentionWrapper(workspace, backend=backend)
        lens = torch.tensor(self.kv_lens, dtype=I32)
        wrapper.plan(
            indptr(self.q_lens),
            *pages["table"],
            lens,
            self.heads,
            *self.head_dims,
            size,
            is_causal,
            SM_SCALE,
            self.dtype,
            self.kv_dtype,
        )
        ckv = self.head_dims[0]
        arguments = {
            "q_nope": self.query[..., :ckv],
            "q_pe": self.query[..., ckv:],
            "ckv_cache": pages["cache"][..., :ckv],
            "kpe_cache": pages["cache"][..., ckv:],
            "ckv_scale_arr": pages["scales"],
        }
        if self.kv_dtype == E4M3:
            arguments["ckv_scale"] = None if pages["scales"] is not None else CKV_SCALE
            arguments["kpe_scale"] = KPE_SCALE
        return wrapper, arguments

    def expected(self, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and base-2 log-sum-exps in float64."""
        ckv = self.head_dims[0]
        keys = self.rows.float()
        if self.kv_dtype == E4M3:
            scales = self.scales
            keys[:, :ckv] *= CKV_SCALE if scales is None else scales.repeat_interleave(128, -1)
            keys[:, ckv:] *= KPE_SCALE
        outs, sums, begin = [], [], 0
        for i, n in enumerate(self.q_lens):
            k = keys[self.bounds[i] : self.bounds[i + 1], None]
            mask = causal(n, len(k)).to(self.device) if is_causal else None
            out, lse = dense(self.query[begin : begin + n], k, k[..., :ckv], mask, SM_SCALE)
            outs.append(out)
            sums.append(lse)
            begin += n
        return torch.cat(outs), torch.cat(sums)
