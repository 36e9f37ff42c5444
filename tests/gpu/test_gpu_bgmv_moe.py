# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters in a mixture of experts on the GPU: numbers, order, limits, graphs, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from block_calls import FILL, Buffer
from lora_support import Lora, accepted, draw

import precast
from precast.fused_moe import bgmv_moe, bgmv_moe_expand, bgmv_moe_shrink, has_bgmv_moe
from precast.testing import assert_close

DTYPES = (torch.bfloat16, torch.float16)
RANKS = (8, 16, 24, 32, 64, 72, 256, 520)

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "f16"])


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Sums of float32 products: errors are those of the largest of their terms."""
    scale = want.abs().max().clamp(min=1.0)
    eps = 0.0 if got.dtype is torch.float32 else torch.finfo(got.dtype).eps
    error = (got.double() - want).abs()
    assert not got.isnan().any()
    assert (error <= eps * want.abs() + 1e-5 * scale).all(), error.max()


@dtypes
@pytest.mark.parametrize("rank", RANKS)
def test_both_products(rank: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    for tokens, topk, hidden, sizes in (
        (1, 8, 2048, (768, 768)),
        (5, 3, 8, (1,)),
        (33, 8, 264, (33, 33)),
        (64, 1, 1032, (520,)),
    ):
        for order in ("tokens", "experts", "random"):
            call = draw(*(tokens, topk, hidden, sizes, rank, dtype, generator), order=order)
            y = Buffer(len(sizes), tokens * topk, rank, dtype=dtype)
            y.view.zero_()
            call.shrink(y.view)
            y.check()
            near(y.view, call.shrunk())
            out = Buffer(tokens, sum(sizes), dtype=torch.float32)
            out.view.zero_()
            call.expand(out.view, y.view)
            out.check()
            near(out.view, call.expanded(y.view))
            each = Buffer(tokens * topk, sum(sizes), dtype=torch.float32)
            each.view.zero_()
            call.expand(each.view, y.view, finalize=False)
            each.check()
            near(each.view, call.expanded(y.view, finalize=False))
            assert torch.equal(call.run(), out.view.to(dtype)), "one call is not both steps"


def test_sums_are_added_to_what_is_there(generator: torch.Generator) -> None:
    call = draw(40, 4, 512, (96,), 16, torch.bfloat16, generator)
    assert accepted(call)
    before = torch.randn(1, 160, 16, device="cuda", generator=generator).bfloat16()
    y = before.clone()
    call.shrink(y)
    near(y, before.double() + call.shrunk())
    exists = call.chosen()[0]
    assert torch.equal(y[:, ~exists], before[:, ~exists])
    rows = torch.randn(40, 96, device="cuda", generator=generator)
    out = rows.clone()
    call.expand(out, y)
    near(out, rows.double() + call.expanded(y))
    each = torch.full((160, 96), 7.0, device="cuda")
    call.expand(each, y, finalize=False)
    assert (each[~exists] == 7).all()
    near(each[exists], call.expanded(y, finalize=False)[exists])


def test_an_input_for_each_pair(generator: torch.Generator) -> None:
    call = draw(19, 6, 776, (40,), 32, torch.float16, generator, order="experts")
    wide = torch.randn(19 * 6, 1024, device="cuda", generator=generator).half()
    x = wide[:, 128:904]  # Rows at a distance.
    y = torch.zeros(1, 19 * 6, 32, device="cuda").half()
    call.shrink(y, x)
    near(y, call.shrunk(x))


@pytest.mark.parametrize("order", ["tokens", "experts", "random"])
def test_many_pairs(order: str, generator: torch.Generator) -> None:
    """More pairs than a CTA reads: they are listed by token first."""
    for tokens, topk, rank in ((1000, 8, 16), (2049, 1, 8), (300, 31, 32)):
        call = draw(tokens, topk, 256, (264,), rank, torch.bfloat16, generator, order=order)
        y = torch.zeros(1, tokens * topk, rank, device="cuda").bfloat16()
        call.shrink(y)
        out = torch.zeros(tokens, 264, device="cuda")
        call.expand(out, y)
        near(out, call.expanded(y))
        assert torch.equal(call.run(), out.bfloat16())


@pytest.mark.parametrize("pairs", [31, 32, 33, 100, 1025, 3000])
def test_tokens_with_many_pairs(pairs: int, generator: torch.Generator) -> None:
    """More pairs of a token than its list holds."""
    call = draw(4, pairs, 64, (200,), 16, torch.bfloat16, generator, order="random")
    call.loras[:] = torch.tensor([0, -1, 2, 1], device="cuda")
    call.tokens = torch.where(call.tokens == 3, 0, call.tokens)
    y = torch.zeros(1, 4 * pairs, 16, device="cuda").bfloat16()
    call.shrink(y)
    out = torch.zeros(4, 200, device="cuda")
    call.expand(out, y)
    near(out, call.expanded(y))
    again = torch.zeros(4, 200, device="cuda")
    call.expand(again, y)
    assert torch.equal(out, again)
    assert torch.equal(call.run(), out.bfloat16())


def test_equal_bits_whatever_else_there_is(generator: torch.Generator) -> None:
    """The rows of a token do not depend on others, nor on how its pairs are found."""
    call = draw(700, 4, 512, (512,), 32, torch.bfloat16, generator)
    want = call.run()
    assert all(torch.equal(call.run(), want) for _ in range(20))
    for tokens in (1, 3, 100):
        own = call.tokens < tokens  # Those without a token, too.
        part = Lora(
            *(call.x[:tokens].contiguous(), call.a, call.b, call.tokens[own], call.experts[own]),
            *(call.loras[:tokens].contiguous(), call.weights[own]),
        )
        assert torch.equal(part.run(), want[:tokens])


def test_what_no_pair_uses_matters_to_none(generator: torch.Generator) -> None:
    call = draw(50, 4, 256, (128,), 16, torch.bfloat16, generator)
    want, exists = call.run(), call.chosen()[0]
    call.weights[~exists] = torch.nan
    call.x[call.loras < 0] = torch.nan
    used = torch.zeros(3, 5, dtype=torch.bool, device="cuda")
    _, _, expert, lora = call.chosen()
    used[lora, expert] = True
    for weights in (*call.a, *call.b):
        weights[~used] = torch.nan
    assert torch.equal(call.run(), want)
    y = torch.full((1, 200, 16), torch.nan, device="cuda").bfloat16()
    y[:, exists] = 0
    call.shrink(y)
    out = torch.zeros(50, 128, device="cuda")
    call.expand(out, y)
    assert torch.equal(out.bfloat16(), want)


def test_experts_without_an_address(generator: torch.Generator) -> None:
    call = draw(9, 3, 64, (24,), 8, torch.float16, generator)
    table, stride = call.tables(call.a)
    table[0, 2] = 0
    y = torch.zeros(1, 27, 8, device="cuda").half()
    bgmv_moe_shrink(y, call.x, table, *call.pairs, stride)
    call.experts = call.experts.where(call.experts != 2, -1)
    near(y, call.shrunk())


def test_adapters_that_do_not_exist(generator: torch.Generator) -> None:
    call = draw(12, 3, 64, (24,), 8, torch.bfloat16, generator)
    call.loras[::2] = 3
    got = call.run()
    call.loras[::2] = -1
    assert torch.equal(got, call.run())


def test_slices_of_different_sizes_and_strides(generator: torch.Generator) -> None:
    call = draw(21, 4, 128, (40, 24), 16, torch.bfloat16, generator)
    one, other = (torch.zeros(3, 5, 40, 16, device="cuda").bfloat16() for _ in range(2))
    one.copy_(call.b[0])
    other[:, :, :24] = call.b[1]
    call.b = [one, other[:, :, :24]]  # Both at the same strides of adapters.
    y = torch.zeros(2, 84, 16, device="cuda").bfloat16()
    call.shrink(y)
    wide = torch.zeros(21, 100, device="cuda")
    call.expand(wide[:, :64], y)
    near(wide[:, :64], call.expanded(y))
    assert (wide[:, 64:] == 0).all()
    got = call.run(output_dim=70)
    assert torch.equal(got[:, :64], wide[:, :64].bfloat16())
    assert (got[:, 64:] == 0).all()


def test_slices_of_different_shapes(generator: torch.Generator) -> None:
    """Each has launches of its own; two that are alike share them."""
    one = draw(50, 4, 256, (96, 96), 16, torch.bfloat16, generator)
    other = draw(50, 4, 256, (40,), 32, torch.bfloat16, generator, adapters=4)
    weights = [*zip(one.a, one.b), *zip(other.a, other.b)]
    want = []
    for a, b in weights:
        part = Lora(one.x, [a], [b], *one.pairs, one.weights)
        want.append(part.run())
    assert torch.equal(one.run(), torch.cat(want[:2], dim=1))
    one.a, one.b = ([*several] for several in zip(*weights))
    assert torch.equal(one.run(), torch.cat(want, dim=1))


def test_columns_that_are_not_there(generator: torch.Generator) -> None:
    call = draw(6, 2, 64, (24,), 8, torch.bfloat16, generator)
    x = torch.randn(1, 12, 8, device="cuda", generator=generator).bfloat16()
    table, stride = call.tables(call.b)
    given = call.tokens, call.experts, call.weights, call.loras
    want = call.expanded(x)
    for start in (-4, 10, 2**40, -(2**40)):
        y = Buffer(6, 30, dtype=torch.float32)
        y.view.zero_()
        at = torch.tensor([start], device="cuda")
        bgmv_moe_expand(y.view, x, table, *given, at, [24], stride)
        y.check()
        first, last = max(start, 0), max(min(start + 24, 30), 0)
        if first < last:
            near(y.view[:, first:last], want[:, first - start : last - start])
            y.view[:, first:last] = 0
        assert (y.view == 0).all()


def test_nothing_to_do(generator: torch.Generator) -> None:
    call = draw(4, 2, 64, (24,), 8, torch.bfloat16, generator)
    call.loras[:] = -1
    assert (call.run() == 0).all()
    empty = draw(4, 0, 64, (24,), 8, torch.bfloat16, generator)
    assert (empty.run() == 0).all()
    empty.shrink(torch.zeros(1, 0, 8, device="cuda").bfloat16())
    y = torch.ones(4, 24, device="cuda")
    empty.expand(y, torch.zeros(1, 0, 8, device="cuda").bfloat16())
    assert (y == 1).all()
    none = draw(0, 2, 64, (24,), 8, torch.bfloat16, generator)
    assert none.run().shape == (0, 24)
    assert has_bgmv_moe()


def test_offsets_beyond_32_bits(generator: torch.Generator) -> None:
    """The adapter 9 of weights of 5.4 GB."""
    call = draw(3, 2, 4096, (64,), 64, torch.bfloat16, generator, adapters=1, experts=1)
    large = torch.empty(10, 1024, 64, 4096, dtype=torch.bfloat16, device="cuda")
    large[9, 1023] = call.a[0][0, 0]
    b = torch.empty(10, 1024, 64, 64, dtype=torch.bfloat16, device="cuda")
    b[9, 1023] = call.b[0][0, 0]
    call.tokens[:] = torch.tensor([0, 0, 1, 1, 2, -1], device="cuda")
    call.experts[:], call.loras[:] = 0, 0
    want = call.run()
    call.a, call.b = [large], [b]
    call.experts[:], call.loras[:] = 1023, 9
    assert torch.equal(call.run(), want)


def test_errors_leave_outputs_alone(generator: torch.Generator) -> None:
    call = draw(5, 2, 64, (24,), 8, torch.bfloat16, generator)
    table, stride = call.tables(call.a)
    y, out = Buffer(1, 10, 8, dtype=torch.bfloat16), Buffer(5, 24, dtype=torch.float32)
    shrink: dict[str, Any] = {
        "y": y.view,
        "x": call.x,
        "w_ptr": table,
        "sorted_token_ids": call.tokens,
        "expert_ids": call.experts,
        "lora_indices": call.loras,
        "lora_stride": stride,
    }
    for change, words in (
        ({"y": y.view.cpu()}, "y must be a CUDA tensor"),
        ({"x": call.x[:, :60]}, "x must have a multiple of 8 columns"),
        ({"x": call.x.flatten()[1:257].view(4, 64)}, "x must start at a multiple of 16 bytes"),
        ({"x": call.x[:4]}, "x must have a row for each of the 5 tokens"),
        ({"x": call.x.half()}, "x must be bfloat16, got float16"),
        ({"w_ptr": table.int()}, "w_ptr must be int64, got int32"),
        ({"w_ptr": table.repeat(2, 1)}, r"w_ptr must have shape \[1, 5\], got \[2, 5\]"),
        ({"sorted_token_ids": call.tokens.int()}, "sorted_token_ids must be int64, got int32"),
        ({"expert_ids": call.experts[1:]}, r"expert_ids must have shape \[10\], got \[9\]"),
        ({"lora_indices": call.loras.cpu()}, "lora_indices must be on cuda:0 as y, got cpu"),
        ({"lora_stride": 12}, "lora_stride must be a multiple of 8 and at least 0, got 12"),
        ({"y": y.view[:, :, :4].contiguous()}, "y must have a rank that is a multiple of 8"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"bgmv_moe_shrink: {words}"):
            bgmv_moe_shrink(**{**shrink, **change})
    x = torch.zeros(1, 10, 8, device="cuda").bfloat16()
    table, stride = call.tables(call.b)
    expand: dict[str, Any] = {
        **shrink,
        "y": out.view,
        "x": x,
        "w_ptr": table,
        "topk_weights": call.weights,
        "slice_start_loc": call.starts(),
        "output_slices": [24],
        "lora_stride": stride,
    }
    for change, words in (
        ({"y": out.view.half()}, "y must be float32, got float16"),
        ({"y": out.view[:4]}, "y must have a row for each of the 5 tokens"),
        ({"y": out.view, "finalize": False}, "y must have a row for each of the 10 pairs"),
        ({"topk_weights": call.weights.half()}, "topk_weights must be float32, got float16"),
        ({"slice_start_loc": call.starts().int()}, "slice_start_loc must be int64, got int32"),
        ({"output_slices": [25]}, "output_slices must be from 1 to the 24 columns of y, got 25"),
        ({"output_slices": []}, "output_slices must have 1 elements, one for each slice, got 0"),
        ({"lora_stride": -8}, "lora_stride must be a multiple of 8 and at least 0, got -8"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"bgmv_moe_expand: {words}"):
            bgmv_moe_expand(**{**expand, **change})
    assert (y.bytes == FILL).all()
    assert (out.bytes == FILL).all()


def test_what_the_whole_refuses(generator: torch.Generator) -> None:
    call = draw(5, 2, 64, (24,), 8, torch.bfloat16, generator)
    good: dict[str, Any] = {
        "x": call.x,
        "lora_a_weights": call.a,
        "lora_b_weights": call.b,
        "sorted_token_ids": call.tokens,
        "expert_ids": call.experts,
        "lora_indices": call.loras,
        "topk_weights": call.weights,
        "num_experts": 5,
    }
    for change, words in (
        ({"x": call.x.cpu()}, "x must be a CUDA tensor"),
        ({"lora_a_weights": [call.a[0].cpu()]}, "lora_a_weights must be on cuda:0 as x, got cpu"),
        ({"lora_b_weights": [call.b[0].half()]}, "lora_b_weights must be bfloat16, got float16"),
        ({"lora_b_weights": []}, "lora_a_weights and lora_b_weights must have as many tensors"),
        ({"num_experts": 6}, r"num_experts must be from 0 to the 5 experts of lora_a_weights\[0\]"),
        ({"output_dim": 23}, "output_dim must be at least 24"),
        ({"lora_indices": call.loras.int()}, "lora_indices must be int64, got int32"),
        ({"topk_weights": call.weights[1:]}, r"topk_weights must have shape \[10\], got \[9\]"),
    ):
        with pytest.raises(ValueError, match=f"bgmv_moe: {words}"):
            bgmv_moe(**{**good, **change})


@pytest.mark.parametrize("tokens", [7, 400])
def test_graph_whose_routing_changes(tokens: int, generator: torch.Generator) -> None:
    call = draw(tokens, 4, 256, (96, 96), 16, torch.bfloat16, generator)
    call.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call.run()
    for _ in range(3):
        call.loras.copy_(call.loras.flip(0))
        call.experts.copy_(call.experts.flip(0))
        call.tokens.copy_(call.tokens.roll(1))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, call.run())
        y = torch.zeros(2, tokens * 4, 16, device="cuda").bfloat16()
        call.shrink(y)
        assert_close(out, call.expanded(y), atol=1e-2)


def test_compile(generator: torch.Generator) -> None:
    def steps(call: Lora, table: torch.Tensor, stride: int) -> torch.Tensor:
        y = torch.zeros(1, len(call.tokens), 16, device="cuda", dtype=torch.bfloat16)
        bgmv_moe_shrink(y, call.x, table, call.tokens, call.experts, call.loras, stride)
        return y

    torch._dynamo.reset()
    whole = torch.compile(bgmv_moe, fullgraph=True)
    part = torch.compile(steps, fullgraph=True)
    expand = torch.compile(bgmv_moe_expand, fullgraph=True)
    for tokens in (33, 17):
        call = draw(tokens, 4, 128, (48,), 16, torch.bfloat16, generator)
        want = call.run()
        given = call.x, call.a, call.b, *call.pairs, call.weights, 5
        assert torch.equal(whole(*given), want)
        y = part(call, *call.tables(call.a))
        table, stride = call.tables(call.b)
        out = torch.zeros(tokens, 48, device="cuda")
        routed = call.tokens, call.experts, call.weights, call.loras
        expand(out, y, table, *routed, call.starts(), [48], stride)
        assert torch.equal(out.bfloat16(), want)


def test_a_chain_reads_what_the_kernel_before_wrote(generator: torch.Generator) -> None:
    """The products follow each other by programmatic dependent launch.

    The second one reads the weights of pairs before the first one has ended.
    """
    for tokens in (3, 200, 512):
        call = draw(tokens, 4, 1024, (512, 512), 16, torch.bfloat16, generator)
        x, weights, want = call.x.clone(), call.weights.clone(), []
        factors = (1.0, -1.0, 0.5)
        for factor in factors:
            precast.scale(x, factor, out=call.x)
            precast.scale(weights, factor + 2.0, out=call.weights)
            torch.cuda.synchronize()
            want.append(call.run())
            torch.cuda.synchronize()
        for _ in range(20):
            for factor, expected in zip(factors, want):
                precast.scale(x, factor, out=call.x)
                precast.scale(weights, factor + 2.0, out=call.weights)
                assert torch.equal(call.run(), expected)
