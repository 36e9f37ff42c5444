# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections on the GPU against float64: odd sizes, splits, in place, graphs, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from block_calls import Buffer

import precast
from precast.mhc import mhc_pre_big_fuse_with_prenorm_reference
from precast.testing import Guarded, assert_close

DEVICE = "cuda"
BF16 = torch.bfloat16
HIDDEN = [1, 7, 8, 64, 1000, 1001, 2048, 4096, 7168, 8192, 8200, 16384, 16391]

#: The ci profile has bf16 alone.
dtypes = pytest.mark.parametrize(
    "dtype", [BF16, pytest.param(torch.float16, marks=pytest.mark.jit)], ids=["bf16", "f16"]
)


def behind(tokens: int, hidden: int, dtype: torch.dtype, generator: torch.Generator) -> Any:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, generator=generator)

    x, residual = randn(tokens, hidden).to(dtype), randn(tokens, 4, hidden).to(dtype)
    return x, residual, randn(tokens, 4), randn(tokens, 4, 4)


def mixed(x: Any, residual: Any, post: Any, comb: Any) -> torch.Tensor:
    streams = torch.einsum("toh,ton->tnh", residual.double(), comb.double())
    return streams + x.double()[:, None] * post.double()[..., None]


@dtypes
@pytest.mark.parametrize("hidden", HIDDEN)
def test_behind_a_layer(hidden: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    for tokens in (1, 3, 131):
        given = behind(tokens, hidden, dtype, generator)
        want = mixed(*given)
        guard = Guarded((tokens, 4, hidden), dtype, DEVICE, gap=0)
        precast.mhc_post(*given, out=guard.view)
        assert_close(guard.view, want)
        guard.check()
        assert torch.equal(precast.mhc_post(*given), guard.view)
        precast.mhc_post(*given, out=given[1])
        assert torch.equal(given[1], guard.view)


def test_any_address_and_shape(generator: torch.Generator) -> None:
    x, residual, post, comb = behind(6, 64, BF16, generator)
    want = precast.mhc_post(x, residual, post, comb)
    memory = torch.empty(residual.numel() + 1, dtype=BF16, device=DEVICE)[1:]
    odd = memory.view(residual.shape).copy_(residual)
    assert torch.equal(precast.mhc_post(x, odd, post, comb), want)
    shaped = (t.unflatten(0, (2, 3)) for t in (x, residual, post[..., None], comb))
    assert torch.equal(precast.mhc_post(*shaped).flatten(0, 1), want)


def before(
    tokens: int, hidden: int, splits: int, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, generator=generator)

    split = (splits,) if splits > 1 else ()
    residual = randn(tokens, 4, hidden).to(dtype)
    squares = residual.float().square().sum((1, 2))
    parts = torch.rand(splits, 1, device=DEVICE, generator=generator).softmax(0)
    return {
        "dot_mix": 2 * randn(*split, tokens, 24),
        "sqrsum": (parts * squares).view(*split, tokens).contiguous(),
        "residual": residual,
        "mhc_scale": randn(3),
        "mhc_base": randn(24),
        "k": 4 * hidden,
        "num_splits": splits,
    }


def exact(given: dict[str, Any], factor: float, repeat: int) -> tuple[torch.Tensor, ...]:
    """In float64, from the sums that were given."""
    tokens, splits = len(given["residual"]), given["num_splits"]
    dots = given["dot_mix"].double().view(splits, tokens, 24).sum(0)
    squares = given["sqrsum"].double().view(splits, tokens).sum(0)
    x = dots * (squares / given["k"] + 1e-6).rsqrt()[:, None]
    scale = given["mhc_scale"].double().repeat_interleave(torch.tensor([4, 4, 16], device=DEVICE))
    x = x * scale + given["mhc_base"].double()
    pre, post = x[:, :4].sigmoid() + 1e-6, x[:, 4:8].sigmoid() * factor
    comb = x[:, 8:].view(tokens, 4, 4).softmax(-1) + 1e-6
    for i in range(repeat):
        if i:
            comb = comb / (comb.sum(-1, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    layer = (pre[..., None] * given["residual"].double()).sum(1)
    return post[..., None], comb, layer


def check(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for mine, exactly in zip(got, want, strict=True):
        assert mine.shape == exactly.shape
    for mine, exactly in zip(got[:2], want[:2]):
        torch.testing.assert_close(mine.double(), exactly, rtol=1e-4, atol=1e-6)
    assert_close(got[2], want[2])


@dtypes
@pytest.mark.parametrize("hidden", HIDDEN)
def test_before_a_layer(hidden: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    for tokens in (1, 3, 131):
        given = before(tokens, hidden, 1, dtype, generator)
        want = exact(given, 2.0, 20)
        check(precast.mhc_pre_big_fuse(**given, mhc_post_mult_value=2.0), want)
        own = {k: v for k, v in given.items() if k not in ("sqrsum", "k", "num_splits")}
        call = precast.mhc_pre_big_fuse_with_prenorm
        check(call(**own, mhc_post_mult_value=2.0, enable_pdl=False), want)


@pytest.mark.parametrize("splits", [2, 3, 4, 8, 16, 100])
@pytest.mark.parametrize("repeat", [1, 2, 20, 100])
def test_splits_and_repeats(repeat: int, splits: int, generator: torch.Generator) -> None:
    given = before(37, 4096, splits, BF16, generator)
    got = precast.mhc_pre_big_fuse(**given, sinkhorn_repeat=repeat, block_size=128)
    check(got, exact(given, 1.0, repeat))


def test_any_address(generator: torch.Generator) -> None:
    given = before(9, 64, 1, BF16, generator)
    want = precast.mhc_pre_big_fuse(**given)
    for name in ("dot_mix", "sqrsum", "residual", "mhc_scale", "mhc_base"):
        tensor = given[name]
        memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=DEVICE)[1:]
        given[name] = memory.view(tensor.shape).copy_(tensor)
    assert all(map(torch.equal, precast.mhc_pre_big_fuse(**given), want))


def test_nothing_else_is_written(generator: torch.Generator) -> None:
    """Through the export, into guarded buffers."""
    from precast._op.dispatch import kernels

    given = before(33, 1000, 1, BF16, generator)
    buffers = (
        Buffer(33, 4, 1, dtype=torch.float32),
        Buffer(33, 4, 4, dtype=torch.float32),
        Buffer(33, 1000, dtype=BF16),
    )
    numbers = (given.pop("k"), 1e-6, 1e-6, 1e-6, 1.0, 20, given.pop("num_splits"))
    export = kernels()["mhc_pre_big_fuse"][(BF16, 0)]
    export(*given.values(), *numbers, *(buffer.view for buffer in buffers), True)
    check(
        tuple(buffer.view for buffer in buffers),
        exact({**given, "k": 4000, "num_splits": 1}, 1.0, 20),
    )
    for buffer in buffers:
        buffer.check()


def test_large_logits_are_finite(generator: torch.Generator) -> None:
    given = before(5, 64, 1, BF16, generator)
    given["dot_mix"] *= 1e4
    got = precast.mhc_pre_big_fuse(**given)
    assert all(t.isfinite().all() for t in got)
    check(got[:1] + got[:1] + got[2:], exact(given, 1.0, 20)[:1] * 2 + exact(given, 1.0, 20)[2:])


def test_no_tokens(generator: torch.Generator) -> None:
    post, comb, x = precast.mhc_pre_big_fuse(**before(0, 64, 1, BF16, generator))
    assert (post.shape, comb.shape, x.shape) == ((0, 4, 1), (0, 4, 4), (0, 64))
    assert precast.mhc_post(*behind(0, 64, BF16, generator)).shape == (0, 4, 64)


def test_errors(generator: torch.Generator) -> None:
    given = behind(5, 64, BF16, generator)
    x, residual, post, comb = given
    out = torch.full_like(residual, 7.0)
    function: Any = precast.mhc_post
    wrong: list[tuple[int, Any, str]] = [
        (0, x.cpu(), "x must be a CUDA tensor"),
        (0, x.T.contiguous().T, "x must be contiguous"),
        (1, residual[:, :3], r"residual must have shape \[5, 4, 64\], got \[5, 3, 64\]"),
        (1, residual.half(), "residual must be bfloat16, got float16"),
        (2, post.double(), "post_layer_mix must be float32, got float64"),
        (3, comb.mT, "comb_res_mix must be contiguous"),
        (4, out[1:], "out must have residual's shape"),
        (4, x[:, None].expand(5, 4, 64), "out must be contiguous"),
    ]
    for place, value, words in wrong:
        arguments = [*given, out]
        arguments[place] = value
        with pytest.raises(ValueError, match=f"mhc_post: {words}"):
            function(*arguments)
    assert (out == 7).all()
    given = before(5, 64, 1, BF16, generator)
    call: Any = precast.mhc_pre_big_fuse
    for change, words in (
        ({"residual": given["residual"].mT.contiguous().mT}, "residual must be contiguous"),
        ({"dot_mix": given["dot_mix"].cpu()}, "dot_mix must be a CUDA tensor"),
        ({"sqrsum": given["sqrsum"][1:]}, r"sqrsum must have shape \[5\], got \[4\]"),
        ({"num_splits": 4}, r"dot_mix must have shape \[4, 5, 24\], got \[5, 24\]"),
        ({"mhc_pre_eps": -1.0}, "mhc_pre_eps must be positive and finite, got -1"),
        ({"sinkhorn_repeat": 0}, "sinkhorn_repeat must be from 1 to 10000, got 0"),
    ):
        with pytest.raises(ValueError, match=f"mhc_pre_big_fuse: {words}"):
            call(**{**given, **change})


def test_graph_and_compile(generator: torch.Generator) -> None:
    given = before(67, 4096, 4, BF16, generator)
    layer = torch.randn(67, 4096, device=DEVICE, generator=generator).to(BF16)

    def block() -> tuple[torch.Tensor, ...]:
        post, comb, x = precast.mhc_pre_big_fuse(**given)
        return post, comb, x, precast.mhc_post(layer, given["residual"], post, comb)

    want = block()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = block()
    for tensor in results:
        tensor.fill_(7.0)
    graph.replay()
    assert all(map(torch.equal, results, want))
    torch._dynamo.reset()
    assert all(map(torch.equal, torch.compile(block, fullgraph=True)(), want))


def test_a_chain_is_the_same_with_and_without_pdl(generator: torch.Generator) -> None:
    """Each reads what the one before wrote; a missing wait shows as a rare difference."""
    start = before(257, 4096, 1, BF16, generator)
    given = [start[name] for name in ("dot_mix", "residual", "mhc_scale", "mhc_base")]

    def chain(pdl: bool) -> torch.Tensor:
        streams = given[1].clone()
        for _ in range(4):
            post, comb, x = precast.mhc_pre_big_fuse_with_prenorm(
                given[0], streams, *given[2:], enable_pdl=pdl
            )
            precast.mhc_post(x, streams, post, comb, out=streams, enable_pdl=pdl)
        return streams

    want = chain(False)
    assert want.isfinite().all()
    assert all(torch.equal(chain(True), want) for _ in range(50))


def test_the_reference_on_the_gpu_agrees(generator: torch.Generator) -> None:
    start = before(65, 7168, 1, BF16, generator)
    given = [start[name] for name in ("dot_mix", "residual", "mhc_scale", "mhc_base")]
    got = precast.mhc_pre_big_fuse_with_prenorm(*given)
    check(got, tuple(t.double() for t in mhc_pre_big_fuse_with_prenorm_reference(*given)))
