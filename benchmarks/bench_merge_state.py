# SPDX-License-Identifier: Apache-2.0
"""Merges of attention states: each read once, the result written once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _harness import Case
from _script import script

HEADS, DIM = 32, 128
TOKENS = (1, 64, 1024, 16384)
#: Tokens and states: parts of long keys, and the levels of a cascade.
STATES = ((1, 64), (64, 2), (64, 8), (1024, 8), (2048, 32))


def _moved(tokens: int, states: int, dtype: torch.dtype) -> int:
    return (states + 1) * tokens * HEADS * (DIM * dtype.itemsize + 4)


def _eager_pair(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> Any:
    s = torch.logaddexp2(s_a, s_b)
    weighted = v_a * torch.exp2(s_a - s)[..., None] + v_b * torch.exp2(s_b - s)[..., None]
    return weighted.to(v_a.dtype), s


def _eager_in_place(v: Any, s: Any, v_other: Any, s_other: Any) -> None:
    for to, merged in zip((v, s), _eager_pair(v, s, v_other, s_other), strict=True):
        to.copy_(merged)


def _eager_states(v: Any, s: Any) -> Any:
    total = torch.logsumexp(s * 0.6931471805599453, 1) / 0.6931471805599453
    weights = torch.exp2(s - total[:, None])
    return (v * weights[..., None]).sum(1).to(v.dtype), total


def cases(dtype: torch.dtype) -> Iterator[Case]:
    def state(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        v = torch.randn(*shape, DIM, device="cuda").to(dtype)
        return v, torch.randn(*shape, device="cuda")

    for tokens in TOKENS:
        shape = f"{tokens} x {HEADS} x {DIM}"
        yield Case(
            "merge_state",
            shape,
            _moved(tokens, 2, dtype),
            lambda tokens=tokens: (*state(tokens, HEADS), *state(tokens, HEADS)),
            lambda merge: lambda *pair: merge(*pair),
            _eager_pair,
        )
        yield Case(
            "merge_state_in_place",
            shape,
            _moved(tokens, 2, dtype),
            lambda tokens=tokens: (*state(tokens, HEADS), *state(tokens, HEADS)),
            lambda merge: lambda *pair: merge(*pair),
            _eager_in_place,
        )
    for tokens, states in STATES:
        yield Case(
            "merge_states",
            f"{tokens} x {states} states x {HEADS} x {DIM}",
            _moved(tokens, states, dtype),
            lambda tokens=tokens, states=states: state(tokens, states, HEADS),
            lambda merge: lambda v, s: merge(v, s),
            _eager_states,
        )


if __name__ == "__main__":
    script(__file__)
