# SPDX-License-Identifier: Apache-2.0
"""Routing on the GPU: what float64 would choose, ties, odd sizes, graphs, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from block_calls import Buffer

import precast
from precast.fused_moe import fused_topk_deepseek_reference, hash_topk_reference
from precast.testing import assert_close

DEVICE = "cuda"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SLACK = 1e-6  # of a biased sigmoid in float32: experts closer than that may change places

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "f16", "bf16"])
# Experts, groups, groups that are kept, experts of a token.
SHAPES = [
    (256, 8, 4, 8),  # DeepSeek-V3
    (160, 8, 3, 6),  # DeepSeek-V2
    (384, 1, 1, 8),  # Kimi K2
    *[(experts, 1, 1, min(experts, 32)) for experts in (1, 2, 31, 33, 60, 64, 128, 500, 512)],
    (512, 2, 1, 8),
    (512, 8, 8, 32),
    (441, 7, 3, 5),
    (255, 15, 7, 9),
    (32, 32, 9, 9),
    (96, 32, 3, 8),
    (6, 3, 2, 3),
]


class Routing:
    """One call in guarded buffers."""

    def __init__(
        self,
        scores: torch.Tensor,
        bias: torch.Tensor,
        n_group: int,
        topk_group: int,
        topk: int,
        replay: int = 0,
    ) -> None:
        rows = len(scores)
        self.numbers = (n_group, topk_group, topk, 2.5)
        self.scores, self.bias = scores, bias
        self.values = Buffer(rows, topk, dtype=scores.dtype)
        self.indices = Buffer(rows, topk, dtype=torch.int32)
        self.replay = Buffer(rows + replay, topk, dtype=torch.int16)

    def run(self, **keywords: Any) -> None:
        precast.fused_topk_deepseek(
            *(self.scores, self.bias, *self.numbers, self.values.view, self.indices.view),
            routing_replay_out=self.replay.view,
            **keywords,
        )

    def check(self) -> None:
        """By float64, with room for what float32 cannot tell apart."""
        n_group, topk_group, _, scale = self.numbers
        values, indices = self.values.view, self.indices.view.long()
        rows, experts = self.scores.shape
        assert torch.equal(self.replay.view[:rows].long(), indices)
        assert (self.replay.view[rows:].contiguous().view(torch.uint8) == 0xA5).all()
        assert ((indices >= 0) & (indices < experts)).all()
        assert (indices.sort(dim=1).values.diff(dim=1) > 0).all()
        weights = self.scores.double().sigmoid()
        keys = weights + self.bias.double()
        taken = keys.gather(1, indices)
        assert (taken.diff(dim=1) <= SLACK).all()
        groups = keys.unflatten(1, (n_group, -1))
        sums = groups.topk(min(2, groups.shape[2]), dim=2).values.sum(dim=2)
        last = sums.topk(topk_group, dim=1).values[:, -1:]
        each = experts // n_group
        assert (sums.gather(1, indices // each) >= last - 2 * SLACK).all()
        surely = (sums > last + 2 * SLACK).repeat_interleave(each, dim=1)
        left = keys.where(surely, -torch.inf).scatter(1, indices, -torch.inf)
        assert (left.amax(dim=1) <= taken[:, -1] + SLACK).all()
        own = weights.gather(1, indices)
        assert_close(values, scale * own / (own.sum(dim=1, keepdim=True) + 1e-20))
        for buffer in (self.values, self.indices, self.replay):
            buffer.check()


def draw(
    rows: int, experts: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = 2 * torch.randn(rows, experts, device=DEVICE, generator=generator)
    bias = 0.3 * torch.randn(experts, device=DEVICE, generator=generator)
    return scores.to(dtype), bias


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_experts_and_weights(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> None:
    experts, *numbers = shape
    for rows in (1, 3, 130, 4097):
        scores, bias = draw(rows, experts, dtype, generator)
        call = Routing(scores, bias.to(dtype), *numbers, replay=2)
        call.run()
        call.check()


@pytest.mark.jit
@dtypes
@pytest.mark.parametrize("bias_dtype", DTYPES, ids=["f32", "f16", "bf16"])
def test_every_pair_of_dtypes(
    dtype: torch.dtype, bias_dtype: torch.dtype, generator: torch.Generator
) -> None:
    scores, bias = draw(33, 256, dtype, generator)
    call = Routing(scores, bias.to(bias_dtype), 8, 4, 8)
    call.run(launch_with_pdl=False)
    call.check()


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("gap", [0, 1, 4])
def test_rows_at_any_address(offset: int, gap: int, generator: torch.Generator) -> None:
    for experts, *numbers in ((256, 8, 4, 8), (384, 1, 1, 8), (30, 3, 2, 4)):
        wide, bias = draw(37, experts + gap, torch.float32, generator)
        memory = torch.empty(wide.numel() + 4, device=DEVICE)[offset : offset + wide.numel()]
        rows = memory.view(wide.shape).copy_(wide)
        odd = torch.empty(experts + 4, device=DEVICE)[offset:][:experts].copy_(bias[:experts])
        call = Routing(rows[:, :experts], odd, *numbers)
        call.run()
        call.check()


def test_of_equal_ones_the_first(generator: torch.Generator) -> None:
    """Three values whose pairs have different sums; bit for bit what the reference chooses."""
    levels = torch.tensor([0.0, 1.0, 3.0], device=DEVICE)
    for experts, *numbers in SHAPES:
        drawn = torch.randint(0, 3, (257, experts), device=DEVICE, generator=generator)
        call = Routing(levels[drawn], torch.zeros(experts, device=DEVICE), *numbers)
        call.run()
        want = fused_topk_deepseek_reference(call.scores.cpu(), call.bias.cpu(), *call.numbers)
        assert torch.equal(call.indices.view.cpu(), want[1])
        call.check()


def test_numbers_that_are_not_finite() -> None:
    scores = torch.zeros(3, 64, device=DEVICE)
    scores[0, 9], scores[1] = torch.nan, -torch.inf
    bias = torch.zeros(64, device=DEVICE)
    bias[[40, 41]] = torch.inf
    bias[:8] = -torch.inf
    for n_group, topk_group, topk in ((1, 1, 32), (8, 2, 8), (8, 8, 32)):
        call = Routing(scores, bias, n_group, topk_group, topk)
        call.run()
        want = fused_topk_deepseek_reference(scores.cpu(), bias.cpu(), *call.numbers)
        assert torch.equal(call.indices.view.cpu(), want[1])
        assert torch.equal(call.values.view.cpu().isnan(), want[0].isnan())
        assert (call.values.view[1] == 0).all()


def test_no_tokens() -> None:
    call = Routing(torch.empty(0, 256, device=DEVICE), torch.zeros(256, device=DEVICE), 8, 4, 8, 3)
    call.run()
    assert (call.replay.bytes == 0xA5).all()


def test_errors_leave_outputs_alone(generator: torch.Generator) -> None:
    scores, bias = draw(5, 64, torch.float32, generator)
    call = Routing(scores, bias, 8, 4, 8)
    good = (scores, bias, *call.numbers, call.values.view, call.indices.view)
    wrong: list[tuple[int, Any, str]] = [
        (0, scores.cpu(), "scores must be a CUDA tensor"),
        (0, scores.T.contiguous().T, "scores must have stride 1 in its last dimension"),
        (1, bias[1:], r"bias must have shape \[64\], got \[63\]"),
        (1, bias.cpu(), "bias must be on cuda:0 as scores, got cpu"),
        (2, 5, "n_group must be from 1 to 32 and divide the 64 experts, got 5"),
        (3, 9, "topk_group must be from 1 to n_group, 8, got 9"),
        (5, float("nan"), "routed_scaling_factor must be a number, not NaN"),
        (6, call.values.view[1:], r"topk_values must have shape \[5, 8\], got \[4, 8\]"),
        (6, scores[:, :8], "topk_values must be contiguous"),
        (7, call.indices.view.long(), "topk_indices must be int32, got int64"),
        (7, call.values.view.view(torch.int32), "topk_indices must not overlap topk_values"),
    ]
    function: Any = precast.fused_topk_deepseek
    for place, value, words in wrong:
        arguments = [*good]
        arguments[place] = value
        with pytest.raises(ValueError, match=f"fused_topk_deepseek: {words}"):
            function(*arguments)
    with pytest.raises(ValueError, match=r"routing_replay_out must have shape \[5 or more, 8\]"):
        function(*good, routing_replay_out=call.replay.view[:4])
    with pytest.raises(ValueError, match="backend must be 'default', got 'cake'"):
        function(*good, backend="cake")
    for buffer in (call.values, call.indices, call.replay):
        assert (buffer.bytes == 0xA5).all()


# -- by a table -----------------------------------------------------------------------------------


def hashed(
    rows: int, experts: int, vocabulary: int, topk: int, generator: torch.Generator
) -> tuple[torch.Tensor, ...]:
    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, device=DEVICE, generator=generator)

    logits = 10 * torch.randn(rows, experts, device=DEVICE, generator=generator)
    return logits, integers(vocabulary, rows), integers(experts, vocabulary, topk).int()


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("topk", [1, 2, 3, 6, 7, 8, 15, 16, 31])
def test_experts_of_the_table(topk: int, shared: int, generator: torch.Generator) -> None:
    for rows in (1, 5, 64, 4099):
        logits, ids, table = hashed(rows, 257, 1000, topk, generator)
        for given in (logits, logits[:, 1:]):  # Rows at another distance, too.
            table.clamp_(max=given.shape[1] - 1)
            weights, experts = precast.hash_topk(given, ids, table, shared, 2.5)
            assert torch.equal(experts[:, :topk], table[ids])
            raw = torch.nn.functional.softplus(given.double(), threshold=1e9)
            own = raw.gather(1, table[ids].long()).sqrt()
            assert_close(weights[:, :topk], own / own.sum(dim=1, keepdim=True))
            assert (weights[:, topk:] == torch.tensor(0.4)).all()
            assert (experts[:, topk:] == given.shape[1]).all()


def test_what_is_in_no_table_reads_nothing(generator: torch.Generator) -> None:
    logits, ids, table = hashed(131, 64, 50, 6, generator)
    ids[::3] = torch.tensor([-1, 50, 2**62, -(2**62)], device=DEVICE).repeat(11)
    table[::2, 1::2] = torch.tensor([64, -1, 2**31 - 1], device=DEVICE).int()
    got = precast.hash_topk(logits, ids, table, 1, 2.0)
    want = hash_topk_reference(logits.cpu(), ids.cpu(), table.cpu(), 1, 2.0)
    assert torch.equal(got[1].cpu(), want[1])
    assert_close(got[0].cpu(), want[0].double())


def test_the_table_refuses(generator: torch.Generator) -> None:
    logits, ids, table = hashed(4, 64, 50, 6, generator)
    call: Any = precast.hash_topk
    for arguments, words in (
        ((logits.cpu(), ids, table), "router_logits must be a CUDA tensor"),
        ((logits.half(), ids, table), "router_logits must be float32, got float16"),
        ((logits, ids.int(), table), "input_ids must be int64, got int32"),
        ((logits, ids, table.T.contiguous().T), "tid2eid must be contiguous"),
        ((logits, ids, table, 2), "num_fused_shared_experts must be from 0 to 1, got 2"),
        ((logits, ids, table, 1, 0.0), "routed_scaling_factor must be positive and finite"),
    ):
        with pytest.raises(ValueError, match=f"hash_topk: {words}"):
            call(*arguments)
    assert call(logits[:0], ids[:0], table)[0].shape == (0, 6)


def test_graph_and_compile(generator: torch.Generator) -> None:
    call = Routing(*draw(67, 256, torch.float32, generator), 8, 4, 8)
    given = hashed(67, 64, 100, 6, generator)

    def both() -> tuple[torch.Tensor, ...]:
        call.run()
        return precast.hash_topk(*given, 1, 2.5)

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = both()
    torch._dynamo.reset()
    for again in (graph.replay, torch.compile(both, fullgraph=True)):
        for buffer in (call.values, call.indices, call.replay):
            buffer.bytes.fill_(0xA5)
        found = again() or results
        call.check()
        for got, want in zip(found, precast.hash_topk(*given, 1, 2.5), strict=True):
            assert torch.equal(got, want)
        call.scores.copy_(call.scores.flip(0))
        given[0].copy_(given[0].flip(0))


def test_a_chain_is_the_same_with_and_without_pdl(generator: torch.Generator) -> None:
    """The routing reads what the kernel before it wrote; a missing wait shows as a difference."""
    source, bias = draw(4096, 256, torch.float32, generator)
    scores = torch.empty_like(source)
    call = Routing(scores, bias, 8, 4, 8)

    def chain(pdl: bool) -> torch.Tensor:
        for factor in (1.0, -1.0, 0.5):
            precast.scale(source, factor, out=scores, enable_pdl=pdl)
            call.run(launch_with_pdl=pdl)
        return call.indices.view.clone()

    want = chain(False)
    assert all(torch.equal(chain(True), want) for _ in range(50))
