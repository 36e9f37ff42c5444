# SPDX-License-Identifier: Apache-2.0
"""Tokens of the kernels are distributed as the definition says: a million draws a case."""

from __future__ import annotations

import pytest
import torch
from sampling_support import CASES, DRAWS, LEAST_P_VALUE, Case, distribution, kept, p_value, shares

import precast
from precast.testing import random_tensor

#: At sizes that a cluster holds, and one that it reads again.
_P, _KP = "top_p_sampling_from_probs", "top_k_top_p_sampling_from_probs"
LARGE = [
    Case("zipf", 128256, "sampling_from_probs", {}),
    Case("zipf", 262145, "sampling_from_probs", {}),
    Case("zipf", 128256, _P, {"top_p": 0.3}),
    Case("peaked", 128256, _P, {"top_p": 0.9}),
    Case("zipf", 262145, _P, {"top_p": 0.3}),
    Case("zipf", 151936, _KP, {"top_k": 1000, "top_p": 0.6}),
    Case("ties", 128256, "top_k_sampling_from_probs", {"top_k": 100}),
    Case("zipf", 128256, "top_k_top_p_sampling_from_logits", {"top_k": 30, "top_p": 0.9}),
    Case("zipf", 128256, "sample", {"top_k": 300, "top_p": 0.9, "min_p": 0.01}),
]


def drawn(case: Case, seed: int) -> torch.Tensor:
    """Tokens of one distribution: by indices, or of a batch of the same rows."""
    function, rows = getattr(precast, case.function), case.rows().cuda()
    if case.function == "sample":
        return function(rows.expand(DRAWS, -1), **case.arguments(), seed=seed, offset=8).tokens
    indices = torch.zeros(DRAWS, dtype=torch.int32, device="cuda")
    return function(rows, indices=indices, **case.arguments(), seed=seed, offset=8)


@pytest.mark.parametrize("case", CASES + LARGE, ids=lambda case: case.name)
def test_tokens_are_distributed_as_the_definition_says(case: Case) -> None:
    """With a seed that is known to pass, small ones with a fresh one, too."""
    seeds = (5,) if case in LARGE else (5, int(torch.randint(2**40, (1,))))
    for seed in seeds:
        assert p_value(drawn(case, seed), case.expected()) > LEAST_P_VALUE, seed


def test_a_batch_of_offsets_is_distributed_as_well() -> None:
    """Successive calls of one generator, as an engine makes them."""
    case = Case("zipf", 3000, _KP, {"top_k": 60, "top_p": 0.8})
    x = case.rows().cuda().expand(1024, -1)
    own = torch.Generator("cuda").manual_seed(4)
    tokens = [
        precast.top_k_top_p_sampling_from_probs(x, 60, 0.8, generator=own) for _ in range(512)
    ]
    assert p_value(torch.cat(tokens), case.expected()) > LEAST_P_VALUE


def test_seeds_by_row_are_distributed_as_well() -> None:
    """Neighbouring seeds are as good as any."""
    case = Case("peaked", 2000, _P, {"top_p": 0.9})
    seeds = torch.arange(DRAWS, device="cuda")
    indices = torch.zeros(DRAWS, dtype=torch.int32, device="cuda")
    tokens = precast.top_p_sampling_from_probs(
        case.rows().cuda(), 0.9, indices=indices, seed=seeds, offset=torch.zeros_like(seeds)
    )
    assert p_value(tokens, case.expected()) > LEAST_P_VALUE


@pytest.mark.parametrize("kind", ["flat", "random", "peaked", "zipf", "ties", "sparse"])
@pytest.mark.parametrize("size", [50, 4000, 128256])
def test_no_token_outside_the_exact_sets(kind: str, size: int) -> None:
    weights = distribution(kind, size, seed=2)
    rows = weights.cuda()[None]
    indices = torch.zeros(1 << 15, dtype=torch.int32, device="cuda")
    for k in (1, 3, 40, 1000):
        for p in (0.0, 0.2, 0.9, 1.0):
            for order in ("top_k_first", "joint"):
                tokens = precast.top_k_top_p_sampling_from_probs(
                    rows, k, p, indices, filter_apply_order=order
                )
                inside = kept(weights, top_k=k, top_p=p, joint=order == "joint").cuda()
                assert inside[tokens.long()].all(), (k, p, order)
    for m in (0.1, 0.9, 1.0):
        tokens = precast.min_p_sampling_from_probs(rows, m, indices)
        assert kept(weights, min_p=m).cuda()[tokens.long()].all()


def test_ties_at_the_threshold_are_all_drawn() -> None:
    probs = torch.tensor([[0.1, 0.2, 0.2, 0.2, 0.3]], device="cuda")
    many = torch.zeros(1 << 14, dtype=torch.int32, device="cuda")
    by_k = precast.top_k_sampling_from_probs(probs, 2, many)
    by_p = precast.top_p_sampling_from_probs(probs, 0.4, many)
    assert by_k.unique().tolist() == by_p.unique().tolist() == [1, 2, 3, 4]
    equal = torch.full((1, 40000), 0.5, device="cuda")
    many = torch.zeros(DRAWS, dtype=torch.int32, device="cuda")
    for tokens in (
        precast.top_k_sampling_from_probs(equal, 1, many),
        precast.top_p_sampling_from_probs(equal, 0.01, many),
        precast.min_p_sampling_from_probs(equal, 1.0, many),
    ):
        assert p_value(tokens, torch.full((40000,), 1 / 40000).double()) > LEAST_P_VALUE


def test_a_speculative_chain_is_distributed_as_the_target() -> None:
    """The first token whatever the draft was, and the second where the first one stood."""
    size, batch = 300, 1 << 14
    generator = torch.Generator("cuda").manual_seed(3)
    target = random_tensor(1, 3, size, dtype=torch.float32, generator=generator).softmax(-1)
    draft = random_tensor(1, 2, size, dtype=torch.float32, generator=generator).softmax(-1)
    first, second = [], []
    for step in range(64):
        drafted = draft[0].multinomial(batch, replacement=True, generator=generator)
        tokens, accepted, emitted = precast.chain_speculative_sampling(
            draft.expand(batch, -1, -1),
            drafted.t().contiguous().int(),
            target.expand(batch, -1, -1),
            seed=11,
            offset=4 * step,
        )
        assert (accepted >= emitted).all()
        first.append(tokens[:, 0])
        second.append(tokens[emitted > 0, 1])
    assert p_value(torch.cat(first), shares(target[0, 0].cpu())) > LEAST_P_VALUE
    assert p_value(torch.cat(second), shares(target[0, 1].cpu())) > LEAST_P_VALUE
    assert p_value(torch.cat(first), shares(draft[0, 0].cpu())) < LEAST_P_VALUE
