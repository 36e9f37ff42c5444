# SPDX-License-Identifier: Apache-2.0
"""Attention by its definition, one logit after the other, in Python's own floating point.

Shares nothing with the library: lengths, pages, masks, positions and scales are worked out anew.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch
from attention_calls import Batch
from attention_cases import FP8, Case

Vector = list[float]
HALVES = (torch.float16, torch.bfloat16)


def attention(case: Case, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and base-2 log-sum-exps, float64."""
    tokens = sum(case.q_lens)
    out = torch.zeros(tokens, case.num_qo_heads, case.head_dim_vo, dtype=torch.float64)
    lse = torch.zeros(tokens, case.num_qo_heads, dtype=torch.float64)
    row = mask_at = 0
    for number, (n, m) in enumerate(zip(case.q_lens, case.kv_lens)):
        keys, values = (_gathered(case, batch, number, part) for part in range(2))
        if case.pos_encoding_mode == "ROPE_LLAMA":
            kind = torch.float16 if case.kv_dtype in FP8 and case.dtype in HALVES else case.dtype
            keys = [[_turned(case, key, j, kind) for key in heads] for j, heads in enumerate(keys)]
        for i in range(n):
            see = _seen(case, batch, number, i, n, m, mask_at)
            seen = [see(j) for j in range(m)]
            for head in range(case.num_qo_heads):
                query = batch.q[row + i, head].tolist()
                sink = None if batch.sinks is None else float(batch.sinks[head])
                kv_head = head // case.group
                logits = _logits(case, batch, query, keys, kv_head, head, i, n, m, seen)
                result, total = _softmax(
                    logits, [value[kv_head] for value in values], sink, case.head_dim_vo
                )
                out[row + i, head] = torch.tensor(result, dtype=torch.float64)
                lse[row + i, head] = total
        row += n
        mask_at += n * m
    return out * batch.scales[2], lse


def _gathered(case: Case, batch: Batch, number: int, part: int) -> list[list[Vector]]:
    """``[token][head]`` of one request."""
    if case.kind in ("decode", "paged"):
        cache = batch.kv[part] if isinstance(batch.kv, tuple) else batch.kv[:, part]
        first = sum(-(-kv // case.page_size) for kv in case.kv_lens[:number])
        rows = []
        for token in range(case.kv_lens[number]):
            page = cache[int(batch.indices[first + token // case.page_size])]
            entry = token % case.page_size
            rows.append(page[:, entry] if case.kv_layout == "HND" else page[entry])
    else:
        tensor = batch.kv[part]
        start = sum(case.kv_lens[:number])
        places = range(start, start + case.kv_lens[number])
        rows = [tensor[:, t] if case.kv_layout == "HND" else tensor[t] for t in places]
    return [r.float().tolist() for r in rows]


def _seen(
    case: Case, batch: Batch, number: int, i: int, n: int, m: int, mask_at: int
) -> Callable[[int], bool]:
    position = m - n + i

    def seen(j: int) -> bool:
        if case.window_left >= 0 and j < position - case.window_left:
            return False
        if case.mask == "items":
            return _seen_item(case.items[number], position, j)
        if case.mask:
            assert batch.mask is not None
            return bool(batch.mask[mask_at + i * m + j])
        causal = case.causal or (case.kind == "decode" and n > 1)
        return not causal or j <= position

    return seen


def _seen_item(items: list[int], position: int, j: int) -> bool:
    """By which item a token is in: its number, or None for the prefix and for delimiters."""
    prefix, *sizes = items
    owner: list[int | None] = [None]  # The delimiter behind the prefix.
    for number, size in enumerate(sizes):
        owner += [number] * size + [None]
    if j > position:
        return False
    if position < prefix or j < prefix:
        return True
    mine, other = owner[position - prefix], owner[j - prefix]
    return mine is not None and mine == other


def _logits(
    case: Case,
    batch: Batch,
    query: Vector,
    keys: list[list[Vector]],
    kv_head: int,
    head: int,
    i: int,
    n: int,
    m: int,
    seen: list[bool],
) -> list[float | None]:
    scale = 1 / math.sqrt(case.head_dim_qk) if case.sm_scale is None else case.sm_scale
    scale *= batch.scales[1] * (1.0 if case.kind == "single_prefill" else batch.scales[0])
    if case.pos_encoding_mode == "ROPE_LLAMA":
        query = _turned(case, query, m - n + i, case.dtype)
    logits: list[float | None] = []
    for j in range(m):
        if not seen[j]:
            logits.append(None)
            continue
        logit = scale * sum(map(operator.mul, query, keys[j][kv_head]))
        if case.pos_encoding_mode == "ALIBI":
            logit += _slope(head, case.num_qo_heads) * (j - i)
        if case.logits_soft_cap:
            logit = case.logits_soft_cap * math.tanh(logit / case.logits_soft_cap)
        logits.append(logit)
    return logits


def _turned(case: Case, x: Vector, position: int, kind: torch.dtype) -> Vector:
    """Rounded once, for the products."""
    half = len(x) // 2
    scale, theta = case.rope_scale or 1.0, case.rope_theta or 1e4
    angles = [position / scale / theta ** (2 * d / len(x)) for d in range(half)]
    first = [x[d] * math.cos(a) - x[d + half] * math.sin(a) for d, a in enumerate(angles)]
    second = [x[d + half] * math.cos(a) + x[d] * math.sin(a) for d, a in enumerate(angles)]
    turned: Vector = torch.tensor(first + second).to(kind).tolist()
    return turned


def _slope(head: int, heads: int) -> float:
    """Of the paper's own recursion."""
    power = 1
    while 2 * power <= heads:
        power *= 2
    if head < power:
        return float(2 ** (-8 * (head + 1) / power))
    return _slope(2 * (head - power), 2 * power)


def _softmax(
    logits: list[float | None], values: list[Vector], sink: float | None, size: int
) -> tuple[Vector, float]:
    known = [logit for logit in logits if logit is not None] + ([] if sink is None else [sink])
    if not known:
        return [0.0] * size, -math.inf
    top = max(known)
    total = sum(math.exp(logit - top) for logit in known)
    seen = [(math.exp(s - top) / total, v) for s, v in zip(logits, values) if s is not None]
    weights = [weight for weight, _ in seen]
    columns = zip(*(value for _, value in seen))
    result = [sum(map(operator.mul, weights, column)) for column in columns]
    return result or [0.0] * size, (top + math.log(total)) / math.log(2)
