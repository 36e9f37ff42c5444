# SPDX-License-Identifier: Apache-2.0
"""Tokens of the references are distributed as they must be: a million draws a case, fixed seeds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from sampling_support import CASES, DRAWS, LEAST_P_VALUE, Case, p_value, shares

import precast
from precast._ops.sampling._formula import draw, weights_of_logits


@pytest.fixture(autouse=True)
def _one_thread(reference_mode: None) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # Small steps: threads would wait for each other.
    yield
    torch.set_num_threads(threads)


def drawn(case: Case) -> torch.Tensor:
    indices = torch.zeros(DRAWS, dtype=torch.int32)
    if case.function == "sample":  # It takes no indices; the formula behind it does.
        weights = weights_of_logits(case.rows(), 1.0)
        return draw(weights, indices, **case.filters, seed=5, offset=8)[0]
    function = getattr(precast, case.function)
    tokens: torch.Tensor = function(
        case.rows(), indices=indices, **case.arguments(), seed=5, offset=8
    )
    return tokens


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_are_distributed_as_the_definition_says(case: Case) -> None:
    assert p_value(drawn(case), case.expected()) > LEAST_P_VALUE


def test_a_wrong_distribution_is_noticed() -> None:
    tokens = drawn(CASES[0])
    weights = CASES[0].weights()
    nearly = weights * torch.linspace(0.9, 1.1, len(weights))
    assert p_value(tokens, shares(weights)) > LEAST_P_VALUE > p_value(tokens, shares(nearly))
    assert p_value(tokens, shares(weights, top_k=4000)) == 0


@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.4, 0.9])
def test_a_token_outside_the_nucleus_is_drawn_again_from_above(top_p: float) -> None:
    """And stays where it is inside: a filter changes the tokens that it has to."""
    generator = torch.Generator().manual_seed(6)
    weights = (3 * torch.randn(500, 3000, generator=generator)).softmax(-1)
    free, _ = draw(weights, seed=5)
    tokens, _ = draw(weights, top_p=top_p, seed=5)
    least = torch.stack([row[shares(row, top_p=top_p) > 0].min() for row in weights])
    got, had = (weights.gather(1, at[:, None])[:, 0] for at in (tokens, free))
    inside = had >= least
    assert torch.equal(tokens[inside], free[inside])
    assert (got >= least).all()
    assert (got[~inside] > had[~inside]).all()
    assert 0 < (~inside).sum() < 500 or top_p == 0


def test_speculative_tokens_are_distributed_as_the_target_says() -> None:
    """The first token, whatever the draft was, and the second where the first one stood."""
    size, batch = 12, 1 << 11
    generator = torch.Generator().manual_seed(3)
    target = torch.rand(1, 3, size, generator=generator).softmax(-1)
    draft = torch.rand(1, 2, size, generator=generator).pow(3)
    draft /= draft.sum(-1, keepdim=True)
    first, second = [], []
    for step in range(24):
        ids = draft[0].multinomial(batch, replacement=True, generator=generator).t().contiguous()
        tokens, accepted, emitted = precast.chain_speculative_sampling(
            draft.expand(batch, -1, -1),
            ids.int(),
            target.expand(batch, -1, -1),
            seed=11,
            offset=4 * step,
        )
        assert (accepted >= emitted).all()
        first.append(tokens[:, 0])
        second.append(tokens[emitted > 0, 1])
    assert p_value(torch.cat(first), shares(target[0, 0])) > LEAST_P_VALUE
    assert p_value(torch.cat(second), shares(target[0, 1])) > LEAST_P_VALUE
    assert p_value(torch.cat(first), shares(draft[0, 0])) < LEAST_P_VALUE
