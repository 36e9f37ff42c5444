# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens in one launch.

``bench_sampling.py`` measures its parts at the same shapes; the most expensive one from logits is
``top_k_top_p_sampling_from_logits``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _harness import Case
from _script import script
from bench_sampling import BATCHES, MIN_P, SEED, TOP_K, TOP_P, VOCABULARIES, rows

DTYPES = ("f32", "bf16", "f16")
HEAT = 0.8
PENALTIES = (1.1, 0.1, 0.2)

Function = Callable[..., Any]


def _bits(mask: torch.Tensor, vocabulary: int) -> torch.Tensor:
    places = torch.arange(32, dtype=torch.int32, device=mask.device)
    return (mask[:, :, None] >> places & 1).flatten(1)[:, :vocabulary].bool()


def _filtered(x: torch.Tensor) -> torch.Tensor:
    top = x.softmax(1, dtype=torch.float32).topk(TOP_K)
    share = top.values / top.values.sum(1, keepdim=True)
    share = share.masked_fill(share.cumsum(1) - share >= TOP_P, 0)
    share = share.where(share >= MIN_P * share[:, :1], 0)
    return top.indices.gather(1, share.multinomial(1))[:, 0]


def _eager(x: torch.Tensor) -> torch.Tensor:
    return _filtered(x.float() / HEAT)


def _eager_request(
    x: torch.Tensor, prompt: torch.Tensor, counts: torch.Tensor, allowed: torch.Tensor
) -> torch.Tensor:
    repetition, frequency, presence = PENALTIES
    y = x.float()
    there = counts > 0
    seen = _bits(prompt, x.shape[1]) | there
    y = torch.where(seen, torch.where(y > 0, y / repetition, y * repetition), y)
    y = y - frequency * counts - presence * there
    y = y.masked_fill(~_bits(allowed, x.shape[1]), -torch.inf)
    return _filtered(y / HEAT)


def _bound(**more: Any) -> Callable[[Function], Function]:
    def bind(function: Function) -> Function:
        return lambda x: function(x, HEAT, TOP_K, TOP_P, MIN_P, **more).tokens

    return bind


def _bound_request(**more: Any) -> Callable[[Function], Function]:
    def bind(function: Function) -> Function:
        return lambda x, prompt, counts, allowed: (
            function(
                x, HEAT, TOP_K, TOP_P, MIN_P, *PENALTIES, prompt, counts, allowed, **more
            ).tokens
        )

    return bind


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Logits of ``dtype``: with filters alone, then with penalties and masks."""
    for vocabulary in VOCABULARIES:
        for batch in BATCHES:
            yield _plain(batch, vocabulary, dtype)
            yield _request(batch, vocabulary, dtype)


def _plain(batch: int, vocabulary: int, dtype: torch.dtype) -> Case:
    return Case(
        "sample",
        f"[{batch}, {vocabulary}]",
        batch * vocabulary * dtype.itemsize,
        lambda: (rows(batch, vocabulary, dtype, True),),
        bind=_bound(**SEED),
        eager=_eager,
        whole=_bound(),
        draws=True,
    )


def _request(batch: int, vocabulary: int, dtype: torch.dtype) -> Case:
    words = -(-vocabulary // 32)

    def make() -> tuple[torch.Tensor, ...]:
        x = rows(batch, vocabulary, dtype, True)
        masks = torch.randint(-(2**31), 2**31 - 1, (4, batch, words), device=x.device)
        prompt, allowed = masks[0] & masks[1], masks[2] | masks[3]
        counts = (torch.rand(batch, vocabulary, device=x.device) - 0.95).mul(60).clamp(min=0)
        return x, prompt.int(), counts.int(), allowed.int()

    return Case(
        "sample",
        f"[{batch}, {vocabulary}] request",
        batch * (vocabulary * (dtype.itemsize + 4) + 8 * words),
        make,
        bind=_bound_request(**SEED),
        eager=_eager_request,
        whole=_bound_request(),
        draws=True,
    )


if __name__ == "__main__":
    script(__file__)
