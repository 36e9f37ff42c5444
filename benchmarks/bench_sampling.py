# SPDX-License-Identifier: Apache-2.0
"""Draws from probabilities and logits, softmax, renormalisation, speculative chains.

Each op is measured twice: its kernels in a graph with a seed and an offset, and many consecutive
whole calls that take both from the generator of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from _harness import Case
from _script import script
from torch.nn import functional

DTYPES = ("f32", "bf16", "f16")
BATCHES = (1, 16, 64, 256)
VOCABULARIES = (32000, 128256, 151936, 262144)
TOP_K, TOP_P, MIN_P, HEAT = 50, 0.9, 0.1, 0.8
DRAFT = 4  # tokens of a speculative chain
SEED = {"seed": 1, "offset": 0}

Function = Callable[..., Any]


def _draw(weights: torch.Tensor) -> torch.Tensor:
    return weights.multinomial(1)[:, 0]


def _nucleus(probs: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted, what is outside set to 0."""
    order = probs.sort(dim=1, descending=True)
    above = order.values.float().cumsum(1) - order.values
    return order.values.masked_fill(above >= top_p, 0), order.indices


def _of_order(weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return indices.gather(1, weights.multinomial(1))[:, 0]


def _eager_top_p(x: torch.Tensor) -> torch.Tensor:
    return _of_order(*_nucleus(x, TOP_P))


def _eager_top_k(x: torch.Tensor) -> torch.Tensor:
    return _of_order(*x.topk(TOP_K))


def _eager_min_p(x: torch.Tensor) -> torch.Tensor:
    return _draw(x.where(x >= MIN_P * x.amax(1, keepdim=True), 0))


def _eager_top_k_top_p(x: torch.Tensor) -> torch.Tensor:
    top = x.topk(TOP_K)
    share = top.values.float() / top.values.float().sum(1, keepdim=True)
    weights = share.masked_fill(share.cumsum(1) - share >= TOP_P, 0)
    return _of_order(weights, top.indices)


def _eager_renorm_k(x: torch.Tensor) -> torch.Tensor:
    kept = x.float().where(x >= x.topk(TOP_K).values[:, -1:], 0)
    return (kept / kept.sum(1, keepdim=True)).to(x.dtype)


def _eager_renorm_p(x: torch.Tensor) -> torch.Tensor:
    weights, indices = _nucleus(x, TOP_P)
    kept = weights.float() / weights.float().sum(1, keepdim=True)
    return torch.zeros_like(x).scatter_(1, indices, kept.to(x.dtype))


def _eager_mask(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(x < x.topk(TOP_K).values[:, -1:], -torch.inf)


def _eager_softmax(x: torch.Tensor) -> torch.Tensor:
    return functional.softmax(x / HEAT, dim=1, dtype=torch.float32)


def _shares(x: torch.Tensor) -> torch.Tensor:
    return functional.softmax(x, dim=1, dtype=torch.float32)


class _Op(NamedTuple):
    """A function of rows, with what follows them."""

    name: str
    more: tuple[Any, ...]
    eager: Function
    of_logits: bool = False
    draws: bool = True


OPS = (
    _Op("sampling_from_probs", (), _draw),
    _Op("top_p_sampling_from_probs", (TOP_P,), _eager_top_p),
    _Op("min_p_sampling_from_probs", (MIN_P,), _eager_min_p),
    _Op("top_k_sampling_from_probs", (TOP_K,), _eager_top_k),
    _Op("top_k_top_p_sampling_from_probs", (TOP_K, TOP_P), _eager_top_k_top_p),
    _Op("sampling_from_logits", (), lambda x: _draw(_shares(x)), True),
    _Op(
        "top_k_top_p_sampling_from_logits",
        (TOP_K, TOP_P),
        lambda x: _eager_top_k_top_p(_shares(x)),
        True,
    ),
    _Op("softmax", (HEAT,), _eager_softmax, True, False),
    _Op("top_p_renorm_probs", (TOP_P,), _eager_renorm_p, False, False),
    _Op("top_k_renorm_probs", (TOP_K,), _eager_renorm_k, False, False),
    _Op("top_k_mask_logits", (TOP_K,), _eager_mask, True, False),
)


def rows(batch: int, vocabulary: int, dtype: torch.dtype, of_logits: bool) -> torch.Tensor:
    """Logits like those of a model: a normal distribution, some tokens far ahead."""
    x = torch.randn(batch, vocabulary, device="cuda") * 2.5
    return (x if of_logits else x.softmax(1)).to(dtype)


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Rows of ``dtype``."""
    for op in OPS:
        for vocabulary in VOCABULARIES:
            for batch in BATCHES:
                yield _case(op, batch, vocabulary, dtype)
    for batch in BATCHES:
        yield _chain(batch, 32000, dtype)


def _case(op: _Op, batch: int, vocabulary: int, dtype: torch.dtype) -> Case:
    def whole(function: Function) -> Function:
        return lambda x: function(x, *op.more)

    def bind(function: Function) -> Function:
        return lambda x: function(x, *op.more, **SEED)

    written = 4 if op.name == "softmax" else 0 if op.draws else dtype.itemsize
    return Case(
        op.name,
        f"[{batch}, {vocabulary}]",
        batch * vocabulary * (dtype.itemsize + written),
        lambda: (rows(batch, vocabulary, dtype, op.of_logits),),
        bind=bind if op.draws else whole,
        eager=op.eager,
        whole=whole,
        draws=op.draws,
    )


def _eager_chain(
    draft: torch.Tensor, ids: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, count, _ = draft.shape
    at = ids.long()[:, :, None]
    q, p = draft.gather(2, at)[:, :, 0], target[:, :count].gather(2, at)[:, :, 0]
    passes = torch.rand_like(q) * q < p
    emitted = passes.int().cumprod(1).sum(1)
    rows = torch.arange(batch, device=draft.device)
    left = target[rows, emitted] - draft[rows, emitted.clamp(max=count - 1)].where(
        (emitted < count)[:, None], 0
    )
    token = _draw(left.float().clamp(min=0))
    places = torch.arange(count + 1, device=draft.device)
    tokens = functional.pad(ids, (0, 1)).where(places < emitted[:, None], -1)
    tokens = tokens.where(places != emitted[:, None], token[:, None].to(ids.dtype))
    return tokens, passes.sum(1).int(), emitted.int()


def _chain(batch: int, vocabulary: int, dtype: torch.dtype) -> Case:
    def make() -> tuple[torch.Tensor, ...]:
        target = rows(batch * (DRAFT + 1), vocabulary, torch.float32, False)
        target = target.view(batch, DRAFT + 1, vocabulary)
        other = rows(batch * DRAFT, vocabulary, torch.float32, False)
        draft = (0.5 * target[:, :DRAFT] + 0.5 * other.view(batch, DRAFT, vocabulary)).to(dtype)
        ids = draft.float().flatten(0, 1).multinomial(1).view(batch, DRAFT).int()
        return draft, ids, target.to(dtype)

    # Of each request two numbers a position, and two rows at the end.
    moved = batch * 2 * vocabulary * dtype.itemsize
    return Case(
        "chain_speculative_sampling",
        f"[{batch}, {DRAFT}, {vocabulary}]",
        moved,
        make,
        bind=lambda f: lambda draft, ids, target: f(draft, ids, target, **SEED),
        eager=_eager_chain,
        whole=lambda f: lambda draft, ids, target: f(draft, ids, target),
        draws=True,
    )


if __name__ == "__main__":
    script(__file__)
