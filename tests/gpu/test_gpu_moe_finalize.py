# SPDX-License-Identifier: Apache-2.0
"""The weighted sum of the experts' rows on the GPU: both kernels, and their agreement."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from block_calls import FILL, Buffer
from moe_backends import BACKENDS, usable

import precast
from precast.errors import UnsupportedConfigError
from precast.fused_moe import moe_finalize_reference
from precast.testing import assert_close

DTYPES = (torch.bfloat16, torch.float16)

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "f16"])


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    rows = torch.ones(1, 8, device="cuda").bfloat16()
    given = rows, torch.zeros(1, 1, device="cuda").int(), torch.ones(1, 1, device="cuda")
    op = precast.moe_finalize
    return usable(op, request.param, lambda: op(*given, backend=request.param))


Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def draw(
    tokens: int, topk: int, columns: int, dtype: torch.dtype, generator: torch.Generator
) -> Given:
    """Every row once, in a random order, and a fifth of the experts without one."""
    count = max(tokens * topk, 1)
    rows = torch.randn(count, columns, device="cuda", generator=generator).to(dtype)
    places = torch.randperm(count, device="cuda", generator=generator)[: tokens * topk]
    absent = torch.rand(tokens * topk, device="cuda", generator=generator) < 0.2
    odd = torch.tensor([-1, count, 2**31 - 1, -(2**31)], device="cuda")
    places = torch.where(absent, odd[places % 4], places)
    weights = torch.rand(tokens, topk, device="cuda", generator=generator)
    return rows, places.view(tokens, topk).int(), weights


def expected(rows: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    exists = (indices >= 0) & (indices < len(rows))
    gathered = rows.double()[indices.where(exists, 0).long()].where(exists[..., None], 0.0)
    return (gathered * weights.double().where(exists, 0.0)[..., None]).sum(dim=1)


@dtypes
@pytest.mark.parametrize("topk", [1, 2, 3, 4, 5, 6, 7, 8, 10, 64])
def test_numbers(topk: int, dtype: torch.dtype, backend: str, generator: torch.Generator) -> None:
    for tokens, columns in ((1, 8), (3, 4096), (130, 2056), (1025, 264)):
        given = draw(tokens, topk, columns, dtype, generator)
        out = Buffer(tokens, columns, dtype=dtype)
        precast.moe_finalize(*given, out=out.view, backend=backend)
        out.check()
        assert_close(out.view, expected(*given))
        assert_close(out.view, moe_finalize_reference(*given).double())
        assert torch.equal(out.view, precast.moe_finalize(*given, backend="cuda"))


@dtypes
@pytest.mark.parametrize("topk, ranks", [(1, 1), (2, 1), (3, 1), (3, 2), (8, 4), (11, 8), (17, 16)])
def test_many_items(topk: int, ranks: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    """A thread computes four of 2^20 items where few rows of a token are here: equal bits."""
    for tokens, columns in ((4101, 2080), (4101, 2056)):  # Rows of 257 items have no fourths.
        rows, indices, weights = draw(tokens, topk, columns, dtype, generator)
        for given in ((rows, indices, weights), (rows, indices, None)):
            out = Buffer(tokens, columns, dtype=dtype)
            precast.moe_finalize(*given, out=out.view, ranks=ranks)
            out.check()
            for begin in range(0, tokens, 512):
                part = slice(begin, begin + 512)
                some = None if given[2] is None else weights[part]
                few = precast.moe_finalize(rows, indices[part], some)
                assert torch.equal(out.view[part], few)
        part = slice(1000, 1200)
        want = expected(rows, indices[part], torch.ones_like(weights[part]))
        assert_close(out.view[part], want)


def test_what_no_token_has_matters_to_none(backend: str, generator: torch.Generator) -> None:
    rows, indices, weights = draw(200, 4, 512, torch.bfloat16, generator)
    exists = (indices >= 0) & (indices < len(rows))
    unused = torch.ones(len(rows), dtype=torch.bool, device="cuda")
    unused[indices[exists].long()] = False
    want = precast.moe_finalize(rows, indices, weights, backend=backend)
    rows[unused], weights[~exists] = torch.nan, torch.inf
    assert torch.equal(precast.moe_finalize(rows, indices, weights, backend=backend), want)


@pytest.mark.parametrize("pair", [(0, 0), (1, 1), (0, 1)], ids=["bf16", "f16", "bf16-f16"])
def test_scales_and_biases(pair: tuple[int, int], backend: str, generator: torch.Generator) -> None:
    dtype, out_dtype = (DTYPES[i] for i in pair)
    for tokens, slots, columns in ((1, 1, 8), (33, 10, 264), (300, 8, 2048), (5, 20, 64)):
        count = tokens * slots
        x = torch.randn(count, columns, generator=generator, device="cuda").to(dtype)
        rows = torch.randperm(count, generator=generator, device="cuda").int().view(tokens, slots)
        x[rows[:, 0].long()[::2]] = torch.nan  # Rows that no slot names.
        rows[::2, 0] = -1
        rows[1::4, slots - 1] = count
        weights = torch.rand(tokens, slots, generator=generator, device="cuda")
        of = torch.randint(0, 3, (count,), generator=generator, device="cuda").int()
        scale = torch.rand(3, generator=generator, device="cuda")
        bias = torch.randn(3, columns, generator=generator, device="cuda").to(out_dtype)
        for more in (
            {},
            {"weights": weights},
            {"weights": weights, "row_experts": of, "scale": scale, "bias": bias},
            {"row_experts": of, "bias": bias},
        ):
            out = Buffer(tokens, columns, dtype=out_dtype)
            precast.moe_finalize(
                x, rows, out=out.view, out_dtype=out_dtype, backend=backend, **more
            )
            want = torch.zeros(tokens, columns, dtype=torch.float64, device="cuda")
            for slot in range(slots):
                row = rows[:, slot].long()
                here = (row >= 0) & (row < count)
                term = x[row[here]].double()
                if "scale" in more:
                    term = term * scale.double()[of.long()[row[here]], None]
                if "bias" in more:
                    term = term + bias.double()[of.long()[row[here]]]
                if "weights" in more:
                    term = term * weights[here, slot, None].double()
                want[here] += term
            error = (out.view.double() - want).abs()
            eps = torch.finfo(out_dtype).eps
            assert (error <= eps * want.abs() + 1e-4).all()
            out.check()
            again = precast.moe_finalize(x, rows, out_dtype=out_dtype, backend="cuda", **more)
            assert torch.equal(out.view, again), "the two kernels differ"


def test_experts_that_share_a_row_and_no_rows(backend: str) -> None:
    rows = torch.full((1, 16), 2.0, device="cuda").half()
    indices = torch.zeros(5, 6, device="cuda").int()
    weights = torch.full((5, 6), 0.5, device="cuda")
    assert (precast.moe_finalize(rows, indices, weights, backend=backend) == 6).all()
    for empty in (rows[:0], rows[:, :0]):
        got = precast.moe_finalize(empty, indices, weights, backend=backend)
        assert got.shape == (5, empty.shape[1]) and (got == 0).all()
    assert precast.moe_finalize(rows, indices[:0], weights[:0], backend=backend).shape == (0, 16)


def test_numbers_that_are_not_finite(backend: str) -> None:
    rows = torch.ones(3, 8, device="cuda").bfloat16()
    rows[0, 0], rows[1, 1], rows[2, 1] = torch.nan, torch.inf, -torch.inf
    indices = torch.tensor([[0, 1], [1, 2], [1, -1]], device="cuda").int()
    weights = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]], device="cuda")
    got = precast.moe_finalize(rows, indices, weights, backend=backend)
    want = expected(rows, indices, weights)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())


def test_strides(backend: str, generator: torch.Generator) -> None:
    rows, indices, weights = draw(67, 3, 520, torch.bfloat16, generator)
    wide = torch.zeros(67, 1024, device="cuda").bfloat16()
    precast.moe_finalize(rows[:, 8:264], indices, weights, out=wide[:, 512:768], backend=backend)
    want = precast.moe_finalize(rows[:, 8:264].contiguous(), indices, weights, backend=backend)
    assert torch.equal(wide[:, 512:768], want)
    assert (wide[:, :512] == 0).all() and (wide[:, 768:] == 0).all()
    one = rows[:1].expand(len(rows), -1)
    got = precast.moe_finalize(one, indices, weights, backend=backend)
    assert torch.equal(got, precast.moe_finalize(one.clone(), indices, weights, backend=backend))


def test_errors_leave_the_output_alone(backend: str, generator: torch.Generator) -> None:
    rows, indices, weights = draw(6, 4, 64, torch.bfloat16, generator)
    out = Buffer(6, 64, dtype=torch.bfloat16)
    good = {"input": rows, "permuted_rows": indices, "weights": weights, "out": out.view}
    function: Any = precast.moe_finalize
    for change, words in (
        ({"input": rows.cpu()}, "input must be a CUDA tensor"),
        ({"input": rows[:, :60]}, "input must have a multiple of 8 columns"),
        (
            {"input": rows.flatten()[1:65].view(1, 64)},
            "input must start at a multiple of 16 bytes",
        ),
        ({"permuted_rows": indices[0]}, "permuted_rows must have 2 dimensions"),
        ({"permuted_rows": indices.long()}, "permuted_rows must be int32, got int64"),
        ({"bias": rows[:2].contiguous()}, "row_experts must be given with scale or bias, got None"),
        ({"weights": weights[:, 1:]}, r"weights must have shape \[6, 4\], got \[6, 3\]"),
        ({"weights": weights.half()}, "weights must be float32, got float16"),
        ({"out": out.view[1:]}, r"out must have shape \[6, 64\], got \[5, 64\]"),
        ({"out": rows[:6]}, "out must not overlap input's memory"),
    ):
        with pytest.raises(ValueError, match=f"moe_finalize: {words}"):
            function(**{**good, **change}, backend=backend)
    with pytest.raises(UnsupportedConfigError, match="dtype,dtype_o=bf16,f32 is not supported"):
        function(**{**good, "out": out.view.float()}, backend=backend)
    assert (out.bytes == FILL).all()


def test_graph_whose_routing_changes(backend: str, generator: torch.Generator) -> None:
    rows, indices, weights = draw(257, 8, 768, torch.bfloat16, generator)
    out = torch.empty(257, 768, device="cuda", dtype=torch.bfloat16)
    precast.moe_finalize(rows, indices, weights, out=out, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        precast.moe_finalize(rows, indices, weights, out=out, backend=backend)
    for _ in range(3):
        indices.copy_(indices.flip(0))
        weights.copy_(weights.flip(1))
        graph.replay()
        assert torch.equal(out, precast.moe_finalize(rows, indices, weights, backend=backend))


def test_first_call_is_captured(backend: str) -> None:
    program = (
        "import torch, precast\n"
        "rows = torch.ones(4, 64, device='cuda').bfloat16()\n"
        "indices = torch.zeros(3, 2, device='cuda').int()\n"
        "weights = torch.ones(3, 2, device='cuda')\n"
        "torch.cuda.synchronize()\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph):\n"
        f"    out = precast.moe_finalize(rows, indices, weights, backend={backend!r})\n"
        "out.zero_()\n"
        "graph.replay()\n"
        "assert (out == 2).all()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_compile(backend: str, generator: torch.Generator) -> None:
    rows, indices, weights = draw(33, 4, 256, torch.bfloat16, generator)
    torch._dynamo.reset()
    call = torch.compile(precast.moe_finalize, fullgraph=True)
    for tokens in (33, 17):
        given = rows, indices[:tokens].contiguous(), weights[:tokens].contiguous()
        want = precast.moe_finalize(*given, backend=backend)
        assert torch.equal(call(*given, backend=backend), want)


def test_a_chain_is_the_same_with_and_without_pdl(backend: str, generator: torch.Generator) -> None:
    source, indices, weights = draw(1024, 8, 1024, torch.bfloat16, generator)
    rows = torch.empty_like(source)

    def chain(pdl: bool) -> torch.Tensor:
        for factor in (1.0, -1.0, 0.5):
            precast.scale(source, factor, out=rows, enable_pdl=pdl)
            out = precast.moe_finalize(rows, indices, weights, enable_pdl=pdl, backend=backend)
        return out

    want = chain(False)
    assert all(torch.equal(chain(True), want) for _ in range(30))
