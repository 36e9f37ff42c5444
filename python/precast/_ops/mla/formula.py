# SPDX-License-Identifier: Apache-2.0
"""Compute multi-head latent attention of a batch in plain PyTorch, in float32.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1: attention over compressed keys and values, with
the up-projections absorbed into queries and outputs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from precast._base.torch import torch
from precast._ops.attention.formula import attention
from precast._ops.attention.reference import gathered


class Pages(NamedTuple):
    """The caches of a batch, and which of their pages and tokens a request has."""

    ckv: torch.Tensor  # [pages, page_size, head_dim_ckv]
    kpe: torch.Tensor | None  # [pages, page_size, head_dim_kpe]
    indptr: torch.Tensor | None  # where the pages of a request begin; None: one row of a table each
    indices: torch.Tensor  # [pages in use], or [batch, width]
    lens: torch.Tensor
    #: What groups of columns of each token's ckv are multiplied by, ``[pages, page_size, groups]``.
    ckv_scales: torch.Tensor | None = None

    def tokens_of(self, request: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the ckv of a request's tokens, dequantised, and their kpe as float32."""
        if self.indptr is None:
            pages = self.indices[request]
        else:
            begin, end = self.indptr[request : request + 2].tolist()
            pages = self.indices[begin:end]
        page_size = self.ckv.shape[1]
        count = max(0, min(int(self.lens[request]), pages.numel() * page_size))
        pages = pages[: -(-count // page_size)].long()
        ckv = gathered(self.ckv, pages, count).float()
        if self.ckv_scales is not None:
            scales = gathered(self.ckv_scales, pages, count)
            ckv = (ckv.unflatten(-1, (scales.shape[-1], -1)) * scales.unsqueeze(-1)).flatten(-2)
        return ckv, None if self.kpe is None else gathered(self.kpe, pages, count).float()


def attend_pages(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor | None,
    cache: Pages,
    bounds: list[int],
    sm_scale: float | torch.Tensor,
    causal: bool,
    kpe_factor: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | None = None,
    lse_base_e: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return outputs and log-sum-exps in float32, and which rows a request has; others are zeros.

    ``bounds`` are those of each request's queries, ``kpe_factor`` multiplies kpe.
    """
    out = q_nope.new_zeros(q_nope.shape, dtype=torch.float32)
    lse = q_nope.new_zeros(q_nope.shape[:2], dtype=torch.float32)
    used = torch.zeros(q_nope.shape[0], dtype=torch.bool, device=q_nope.device)
    for request in range(len(bounds) - 1):
        rows = slice(bounds[request], bounds[request + 1])
        if rows.stop <= rows.start:
            continue
        values, kpe = cache.tokens_of(request)
        queries, keys = q_nope[rows].float(), values
        if kpe is not None:
            assert q_pe is not None
            queries = torch.cat([queries, q_pe[rows].float()], -1)
            keys = torch.cat([keys, kpe * kpe_factor], -1)
        out[rows], lse[rows] = attention(
            queries, keys.unsqueeze(1), values.unsqueeze(1), sm_scale, causal=causal, sinks=sinks
        )
        used[rows] = True
    return out, lse * math.log(2.0) if lse_base_e else lse, used
