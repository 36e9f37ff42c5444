# SPDX-License-Identifier: Apache-2.0
"""Routing in reference mode, by plain Python: groups, ties, the table, errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import precast
from precast._ops.moe.fused_topk_deepseek import MAX_GROUPS, MAX_TOPK

pytestmark = pytest.mark.usefixtures("reference_mode")


def routed(
    scores: list[float], bias: list[float], n_group: int, topk_group: int, topk: int, scale: float
) -> tuple[list[int], list[float]]:
    """Experts and weights of one token, step by step."""
    weights = [1 / (1 + math.exp(-x)) for x in scores]
    keys = [w + b for w, b in zip(weights, bias)]
    each = len(keys) // n_group
    sums = [sum(sorted(keys[g * each : (g + 1) * each])[-2:]) for g in range(n_group)]
    kept = sorted(range(n_group), key=lambda g: (-sums[g], g))[:topk_group]
    candidates = [e for e in range(len(keys)) if e // each in kept]
    experts = sorted(candidates, key=lambda e: (-keys[e], e))[:topk]
    total = sum(weights[e] for e in experts) + 1e-20
    return experts, [scale * weights[e] / total for e in experts]


def call(rows: int, experts: int, topk: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(experts)
    return {
        "scores": torch.randn(rows, experts, generator=generator).to(dtype),
        "bias": torch.randn(experts, generator=generator),
        "n_group": 1,
        "topk_group": 1,
        "topk": topk,
        "routed_scaling_factor": 2.5,
        "topk_values": torch.full((rows, topk), -7.0, dtype=dtype),
        "topk_indices": torch.full((rows, topk), -7, dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("experts", "n_group", "topk_group", "topk"),
    [(256, 8, 4, 8), (384, 1, 1, 8), (6, 3, 2, 3), (12, 12, 5, 5), (160, 8, 3, 6), (30, 2, 2, 30)],
)
def test_experts_and_weights(experts: int, n_group: int, topk_group: int, topk: int) -> None:
    given = {**call(5, experts, topk), "n_group": n_group, "topk_group": topk_group}
    replay = torch.full((7, topk), -7, dtype=torch.int16)
    assert precast.fused_topk_deepseek(**given, routing_replay_out=replay) is None
    for i, row in enumerate(given["scores"].double().tolist()):
        bias = given["bias"].double().tolist()
        want, weights = routed(row, bias, n_group, topk_group, topk, 2.5)
        assert given["topk_indices"][i].tolist() == want
        assert given["topk_values"][i].tolist() == pytest.approx(weights, rel=1e-5)
    assert torch.equal(replay[:5].int(), given["topk_indices"])
    assert (replay[5:] == -7).all()


def test_of_equal_ones_the_first() -> None:
    given = {**call(1, 16, 4), "n_group": 4, "topk_group": 2}
    given["scores"].zero_()
    given["bias"].zero_()
    precast.fused_topk_deepseek(**given)
    assert given["topk_indices"].tolist() == [[0, 1, 2, 3]]
    assert given["topk_values"].tolist() == [[0.625] * 4]
    given["bias"][[5, 6, 14]] = torch.tensor([1.0, 1.0, 2.0])
    precast.fused_topk_deepseek(**given)
    assert given["topk_indices"].tolist() == [[14, 5, 6, 4]]
    given["scores"][0, 9] = float("nan")
    precast.fused_topk_deepseek(**given)
    assert given["topk_indices"][0, 0] == 9


def test_experts_of_other_groups_stay_behind_those_without_a_chance() -> None:
    given = {**call(1, 8, 4), "n_group": 2, "topk_group": 1}
    given["scores"].zero_()
    given["bias"].zero_()
    given["bias"][[0, 1]] = -torch.inf
    given["bias"][[2, 3]] = 9.0
    precast.fused_topk_deepseek(**given)
    assert given["topk_indices"].tolist() == [[2, 3, 0, 1]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_have_the_dtype_of_the_scores(dtype: torch.dtype) -> None:
    given = call(9, 64, 6, dtype)
    precast.fused_topk_deepseek(**given)
    assert given["topk_values"].dtype == dtype
    assert torch.allclose(given["topk_values"].float().sum(1), torch.tensor(2.5), rtol=2e-2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_group": 0}, "n_group must be from 1 to 32 and divide the 64 experts, got 0"),
        ({"n_group": 64}, "n_group must be from 1 to 32 and divide the 64 experts, got 64"),
        ({"n_group": 5}, "n_group must be from 1 to 32 and divide the 64 experts, got 5"),
        ({"topk_group": 2}, "topk_group must be from 1 to n_group, 1, got 2"),
        ({"topk": 33}, "topk must be from 1 to 32 for 1 groups of 64 experts, got 33"),
        (
            {"n_group": 16, "topk": 6},
            "topk must be from 1 to 4 for 1 groups of 4 experts, got 6",
        ),
        ({"topk": 0}, "topk must be from 1 to 32 for"),
        (
            {"scores": torch.zeros(5, 640), "bias": torch.zeros(640)},
            "scores must have at most 512 experts in each of 1 groups, got 640",
        ),
        ({"scores": torch.zeros(64)}, r"scores must have 2 dimensions, got shape \[64\]"),
        ({"scores": torch.zeros(5, 64).double()}, "scores must be float32 or float16 or bfloat16"),
        ({"bias": torch.zeros(63)}, r"bias must have shape \[64\], got \[63\]"),
        ({"topk_values": torch.zeros(5, 5)}, r"topk_values must have shape \[5, 4\], got"),
        ({"topk_values": torch.zeros(5, 4).half()}, "topk_values must be float32, got float16"),
        ({"topk_indices": torch.zeros(5, 4).long()}, "topk_indices must be int32, got int64"),
        (
            {"routing_replay_out": torch.zeros(5, 4, dtype=torch.int32)},
            "routing_replay_out must be int16, got int32",
        ),
        (
            {"routing_replay_out": torch.zeros(4, 4, dtype=torch.int16)},
            r"routing_replay_out must have shape \[5 or more, 4\], got \[4, 4\]",
        ),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor must be a number, not"),
        ({"backend": "cake"}, "backend must be 'default', got 'cake'"),
    ],
)
def test_what_is_refused(change: dict[str, Any], words: str) -> None:
    given = call(5, 64, change.get("topk", 4))
    with pytest.raises(ValueError, match=f"^fused_topk_deepseek: {words}"):
        precast.fused_topk_deepseek(**{**given, **change})
    assert (given["topk_values"] == -7).all() and (given["topk_indices"] == -7).all()


def test_limits_are_those_of_the_kernel() -> None:
    headers = Path(__file__).resolve().parents[3] / "include" / "precast"
    text = (headers / "moe" / "fused_topk_deepseek.cuh").read_text()
    assert MAX_GROUPS == MAX_TOPK == 32
    assert "constexpr int kMaxRoutingTopK = kWarpSize;" in text
    assert "constexpr int kMaxRoutingGroups = kWarpSize;" in text
    for quads in ("kRoutingQuad", "kMaxRoutingQuads"):
        assert f"constexpr int {quads} = 4;" in text


# -- by a table -----------------------------------------------------------------------------------


def hashed(rows: int, experts: int, vocabulary: int, topk: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(topk)
    table = [torch.randperm(experts, generator=generator)[:topk] for _ in range(vocabulary)]
    return {
        "router_logits": 20 * torch.randn(rows, experts, generator=generator),
        "input_ids": torch.randint(0, vocabulary, (rows,), generator=generator),
        "tid2eid": torch.stack(table).int(),
    }


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("topk", [1, 6, 8, 31])
def test_experts_of_the_table(topk: int, shared: int) -> None:
    given = hashed(4, 40, 9, topk)
    weights, experts = precast.hash_topk(**given, num_fused_shared_experts=shared)
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int32)
    assert weights.shape == experts.shape == (4, topk + shared)
    for i, row in enumerate(given["router_logits"].double().tolist()):
        want = given["tid2eid"][given["input_ids"][i]].tolist()
        assert experts[i].tolist() == want + [40] * shared
        raw = [math.sqrt(max(row[e], 0) + math.log1p(math.exp(-abs(row[e])))) for e in want]
        ratios = [w / sum(raw) for w in raw] + [1.0] * shared
        assert weights[i].tolist() == pytest.approx(ratios, rel=1e-5)


def test_the_weight_of_the_shared_expert() -> None:
    given = hashed(2, 8, 4, 2)
    weights, experts = precast.hash_topk(
        **given, num_fused_shared_experts=1, routed_scaling_factor=4
    )
    assert weights[:, 2].tolist() == [0.25] * 2 and experts[:, 2].tolist() == [8] * 2
    # Without one the factor means nothing.
    assert precast.hash_topk(**given, routed_scaling_factor=-1.0)[0].shape == (2, 2)


def test_what_is_in_no_table() -> None:
    given = hashed(4, 8, 5, 3)
    given["router_logits"][:] = 0
    given["input_ids"][:] = torch.tensor([0, 5, -1, 1])
    given["tid2eid"][:2] = torch.tensor([[0, 8, 2], [-3, 9, -1]])
    weights, experts = precast.hash_topk(**given)
    assert experts.tolist() == [[0, -1, 2], [-1] * 3, [-1] * 3, [-1] * 3]
    assert weights.tolist() == [[0.5, 0.0, 0.5], [0.0] * 3, [0.0] * 3, [0.0] * 3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_fused_shared_experts": 2}, "num_fused_shared_experts must be from 0 to 1, got 2"),
        (
            {"num_fused_shared_experts": 1, "routed_scaling_factor": 0.0},
            "routed_scaling_factor must be positive and finite with a shared expert, got 0.0",
        ),
        ({"router_logits": torch.zeros(4, 8).half()}, "router_logits must be float32, got float16"),
        ({"input_ids": torch.zeros(4).int()}, "input_ids must be int64, got int32"),
        ({"input_ids": torch.zeros(3).long()}, r"input_ids must have shape \[4\], got \[3\]"),
        ({"tid2eid": torch.zeros(5, 2).long()}, "tid2eid must be int32, got int64"),
        ({"tid2eid": torch.zeros(5, 33).int()}, "tid2eid must have 1 to 32 columns, got shape"),
        ({"tid2eid": torch.zeros(5, 0).int()}, "tid2eid must have 1 to 32 columns, got shape"),
    ],
)
def test_what_the_table_refuses(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^hash_topk: {words}"):
        precast.hash_topk(**{**hashed(4, 8, 5, 2), **change})


def test_torch_compile_without_a_graph_break() -> None:
    given, other = ({**call(5, 64, 4), "n_group": 4, "topk_group": 2} for _ in range(2))
    precast.fused_topk_deepseek(**given)
    table = hashed(5, 8, 5, 2)
    want = precast.hash_topk(**table, num_fused_shared_experts=1)

    def both(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
        precast.fused_topk_deepseek(**a)
        return precast.hash_topk(**b, num_fused_shared_experts=1)

    torch._dynamo.reset()
    got = torch.compile(both, fullgraph=True, backend="aot_eager")(other, table)
    assert all(map(torch.equal, got, want))
    assert torch.equal(other["topk_indices"], given["topk_indices"])
    assert torch.equal(other["topk_values"], given["topk_values"])
