# SPDX-License-Identifier: Apache-2.0
"""Compute attention of one request in plain PyTorch, with everything that changes scores.

Sources: Vaswani et al., arXiv:1706.03762; Milakov and Gimelshein, Online normalizer calculation for
softmax, arXiv:1805.02867 (the log-sum-exp); Press et al., arXiv:2108.12409 (ALiBi); Su et al.,
arXiv:2104.09864 (RoPE); Xiao et al., arXiv:2309.17453 (sinks); Gemma 2, arXiv:2408.00118 (the cap).
"""

from __future__ import annotations

import math

from precast._base.torch import torch

#: Scores that a block of rows may have, so that a long request fits into memory.
_BLOCK = 2**26


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float | torch.Tensor,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    rope: tuple[float, float] | None = None,
    sinks: torch.Tensor | None = None,
    items: tuple[int, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute outputs ``[n, heads, head_dim_vo]`` and base-2 log-sum-exps of one request.

    ``q`` is ``[n, heads, head_dim_qk]``, ``k`` and ``v`` are ``[m, kv_heads, ...]``. Row ``i`` is
    at position ``m - n + i`` of the keys. ``mask`` is ``[n, m]``, True where a row attends, and
    takes the place of ``causal``. ``rope`` is scale and theta; rotated queries and keys
    are rounded once, to the dtype of queries, or keys of 8 bits to float16. ``items`` is the length
    of the prefix and the position in its item of each token behind it. Computed and returned in
    float32.
    """
    n, heads, _ = q.shape
    m, kv_heads, _ = k.shape
    keys, values = k.float(), v.float()
    if rope is not None:
        keys = rotated_llama(keys, torch.arange(m, device=k.device), *rope)
        in_f16 = q.element_size() == 2 and k.dtype != q.dtype
        keys = rounded(keys, torch.float16 if in_f16 else q.dtype)
    rows = max(1, _BLOCK // max(1, heads * m))
    outs, lses = [], []
    for begin in range(0, n, rows):
        index = torch.arange(begin, min(begin + rows, n), device=q.device)
        queries = q[begin : begin + rows].float()
        if rope is not None:
            queries = rounded(rotated_llama(queries, index + (m - n), *rope), q.dtype)
        grouped = queries.unflatten(1, (kv_heads, heads // kv_heads))
        scores = torch.einsum("nhgd,mhd->hgnm", grouped, keys).flatten(0, 1) * sm_scale
        if alibi_slopes is not None:
            distance = torch.arange(m, device=q.device) - index.unsqueeze(-1)
            scores = scores + alibi_slopes.view(-1, 1, 1) * distance
        if logits_soft_cap > 0:
            scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        seen = visible(index, n, m, causal, mask, window_left, items)
        scores = scores.masked_fill(~seen, -math.inf)
        out, lse = softmax_of_values(scores.unflatten(0, (kv_heads, -1)), values, sinks)
        outs.append(out)
        lses.append(lse)
    if not outs:
        return values.new_empty((0, heads, v.shape[-1])), values.new_empty((0, heads))
    return torch.cat(outs), torch.cat(lses)


def softmax_of_values(
    scores: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduce scores ``[kv_heads, group, n, m]`` to outputs, 0 without keys, and log-sum-exps."""
    heads, no_score = scores.shape[0] * scores.shape[1], -math.inf
    row_max = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((1,), no_score)
    row_max = row_max.expand(*scores.shape[:3], 1)
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(*scores.shape[:2], 1, 1)
        row_max = torch.maximum(row_max, sink)
    row_max = row_max.where(row_max > no_score, 0.0)
    weights = torch.exp(scores - row_max)
    row_sum = weights.sum(-1, keepdim=True)
    if sinks is not None:
        row_sum = row_sum + torch.exp(sink - row_max)
    out = torch.einsum("hgnm,mhd->nhgd", weights / row_sum.where(row_sum > 0, 1.0), values)
    lse = (row_max + row_sum.log()).squeeze(-1) * math.log2(math.e)
    return out.flatten(1, 2), lse.reshape(heads, -1).transpose(0, 1)


def visible(
    index: torch.Tensor,
    n: int,
    m: int,
    causal: bool,
    mask: torch.Tensor | None,
    window_left: int,
    items: tuple[int, torch.Tensor] | None,
) -> torch.Tensor:
    """Make ``[len(index), m]``, True where the rows ``index`` of ``n`` attend to the keys."""
    key = torch.arange(m, device=index.device)
    position = (index + (m - n)).unsqueeze(-1)
    seen = torch.ones((index.numel(), m), dtype=torch.bool, device=index.device)
    if items is not None:
        prefix, places = items
        at = position - prefix
        known = (at >= 0) & (at < places.numel())
        padded = torch.nn.functional.pad(places.long(), (0, 1))
        place = padded[at.where(known, places.numel())]
        own = (position < prefix) | (key < prefix) | (position < key + place)
        seen = (key <= position) & own
    elif mask is not None:
        seen = mask[index]
    elif causal:
        seen = key <= position
    if window_left >= 0:
        seen = seen & (key >= position - window_left)
    return seen


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round ``x`` to what products of 16 bits get, in its own dtype."""
    return x.to(dtype).to(x.dtype)


def rotated_llama(
    x: torch.Tensor, positions: torch.Tensor, rope_scale: float, rope_theta: float
) -> torch.Tensor:
    """Rotate ``[tokens, heads, head_dim]`` by its positions, the two halves as pairs."""
    half = x.shape[-1] // 2
    pairs = torch.arange(half, dtype=torch.float64, device=x.device)
    frequencies = torch.pow(rope_theta, pairs * (-1.0 / half)) / rope_scale
    angles = positions.double().unsqueeze(-1) * frequencies
    cos, sin = angles.cos().to(x.dtype).unsqueeze(1), angles.sin().to(x.dtype).unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def unpacked_mask(packed: torch.Tensor, n: int, m: int) -> torch.Tensor:
    """Unpack the bytes of one request to ``[n, m]``, the lowest bit of a byte first."""
    bits = packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (bits & 1).flatten()[: n * m].view(n, m).bool()


def drafts_seen(packed: torch.Tensor, m: int) -> torch.Tensor:
    """Unpack the draft mask of one request to ``[n, m]``: its ``n`` drafts are the newest tokens.

    ``packed`` is ``[n, words]``, 16 bits of a row in each, the lowest first. Every draft sees what
    is before the drafts.
    """
    n = packed.shape[0]
    bits = packed.view(torch.int16).int().unsqueeze(-1)
    bits = bits >> torch.arange(16, dtype=torch.int32, device=packed.device)
    drafts = (bits & 1).flatten(1)[:, :n].bool()
    return torch.nn.functional.pad(drafts, (m - n, 0), value=True)
