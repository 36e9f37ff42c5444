# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections in reference mode, by plain Python: weights, splits, shapes, errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import precast

pytestmark = pytest.mark.usefixtures("reference_mode")

EPS = 1e-6


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def sinkhorn(logits: list[list[float]], repeat: int) -> list[list[float]]:
    m = []
    for row in logits:
        exps = [math.exp(x - max(row)) for x in row]
        m.append([e / sum(exps) + EPS for e in exps])
    for i in range(repeat):
        if i:
            m = [[x / (sum(row) + EPS) for x in row] for row in m]
        sums = [sum(row[c] for row in m) + EPS for c in range(4)]
        m = [[x / sums[c] for c, x in enumerate(row)] for row in m]
    return m


def call(tokens: tuple[int, ...] = (3,), hidden: int = 8, splits: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(hidden)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    split = (splits,) if splits > 1 else ()
    return {
        "dot_mix": 3 * randn(*split, *tokens, 24),
        "sqrsum": 30 * randn(*split, *tokens).abs() + 1,
        "residual": randn(*tokens, 4, hidden).bfloat16(),
        "mhc_scale": randn(3),
        "mhc_base": randn(24),
        "k": 4 * hidden,
        "num_splits": splits,
    }


@pytest.mark.parametrize("splits", [1, 2, 16])
@pytest.mark.parametrize("repeat", [1, 2, 20])
def test_weights_and_the_input_of_the_layer(repeat: int, splits: int) -> None:
    given = call(splits=splits)
    post, comb, x = precast.mhc_pre_big_fuse(
        **given, sinkhorn_repeat=repeat, mhc_post_mult_value=2.0
    )
    assert (post.dtype, comb.dtype, x.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    assert (post.shape, comb.shape, x.shape) == ((3, 4, 1), (3, 4, 4), (3, 8))
    scale, base = given["mhc_scale"].tolist(), given["mhc_base"].tolist()
    dots = given["dot_mix"].double().view(splits, 3, 24).sum(0).tolist()
    squares = given["sqrsum"].double().view(splits, 3).sum(0).tolist()
    for t in range(3):
        rstd = (squares[t] / given["k"] + EPS) ** -0.5
        m = [d * rstd * scale[min(i // 4, 2)] + b for i, (d, b) in enumerate(zip(dots[t], base))]
        pre = [sigmoid(v) + EPS for v in m[:4]]
        assert post[t].flatten().tolist() == pytest.approx([2 * sigmoid(v) for v in m[4:8]], 1e-4)
        want = sinkhorn([m[8 + 4 * r : 12 + 4 * r] for r in range(4)], repeat)
        for got, row in zip(comb[t].tolist(), want):
            assert got == pytest.approx(row, rel=1e-3, abs=1e-6)
        streams = given["residual"][t].double().tolist()
        mixed = [sum(w * row[h] for w, row in zip(pre, streams)) for h in range(8)]
        assert x[t].tolist() == pytest.approx(mixed, rel=1e-2, abs=1e-2)


def test_the_squares_of_the_streams() -> None:
    given = call((2, 3), 24)
    squares = given["residual"].float().square().sum((-2, -1))
    want = precast.mhc_pre_big_fuse(**{**given, "sqrsum": squares})
    own = {k: v for k, v in given.items() if k not in ("sqrsum", "k", "num_splits")}
    for dots in (given["dot_mix"], given["dot_mix"][None]):
        got = precast.mhc_pre_big_fuse_with_prenorm(**{**own, "dot_mix": dots})
        for mine, other in zip(got, want):
            assert mine.shape == other.shape
            torch.testing.assert_close(mine, other)


def test_doubly_stochastic() -> None:
    comb = precast.mhc_pre_big_fuse(**call(), sinkhorn_repeat=200)[1]
    assert torch.allclose(comb.sum(-1), torch.ones(()), atol=1e-4)
    assert torch.allclose(comb.sum(-2), torch.ones(()), atol=1e-4)


@pytest.mark.parametrize("tokens", [(3,), (2, 3), (1, 2, 2)])
def test_behind_a_layer(tokens: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(len(tokens))
    x = torch.randn(*tokens, 6, generator=generator).half()
    streams = torch.randn(*tokens, 4, 6, generator=generator).half()
    post = torch.rand(*tokens, 4, generator=generator)
    comb = torch.rand(*tokens, 4, 4, generator=generator)
    want = torch.einsum("...oh,...on->...nh", streams.double(), comb.double())
    want += x.double()[..., None, :] * post.double()[..., None]
    got = precast.mhc_post(x, streams, post, comb)
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-3)
    assert torch.equal(precast.mhc_post(x, streams, post[..., None], comb), got)
    assert precast.mhc_post(x, streams, post, comb, out=streams) is streams
    assert torch.equal(streams, got)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(3, 8)}, "x must be float16 or bfloat16, got float32"),
        ({"x": torch.zeros(8).half()}, r"x must have at least 2 dimensions, got shape \[8\]"),
        ({"residual": torch.zeros(3, 5, 8).half()}, r"residual must have shape \[3, 4, 8\], got"),
        ({"residual": torch.zeros(3, 4, 8)}, "residual must be float16, got float32"),
        ({"post_layer_mix": torch.zeros(3, 5)}, r"post_layer_mix must have shape \[..., 4\] or"),
        ({"post_layer_mix": torch.zeros(3, 4).half()}, "post_layer_mix must be float32, got"),
        ({"comb_res_mix": torch.zeros(3, 16)}, r"comb_res_mix must have shape \[3, 4, 4\], got"),
        ({"out": torch.zeros(3, 8).half()}, "out must have residual's shape"),
    ],
)
def test_what_is_refused_behind_a_layer(change: dict[str, Any], words: str) -> None:
    given = {
        "x": torch.zeros(3, 8).half(),
        "residual": torch.zeros(3, 4, 8).half(),
        "post_layer_mix": torch.zeros(3, 4),
        "comb_res_mix": torch.zeros(3, 4, 4),
    }
    with pytest.raises(ValueError, match=f"^mhc_post: {words}"):
        precast.mhc_post(**{**given, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dot_mix": torch.zeros(3, 23)}, r"dot_mix must have shape \[3, 24\], got \[3, 23\]"),
        ({"num_splits": 2}, r"dot_mix must have shape \[2, 3, 24\], got \[3, 24\]"),
        ({"num_splits": 0}, "num_splits must be from 1 to 1024, got 0"),
        ({"sqrsum": torch.zeros(4)}, r"sqrsum must have shape \[3\], got \[4\]"),
        ({"residual": torch.zeros(3, 3, 8).half()}, r"residual must have shape \[3, 4, 8\], got"),
        ({"residual": torch.zeros(3, 4, 8)}, "residual must be float16 or bfloat16, got float32"),
        ({"mhc_scale": torch.zeros(4)}, r"mhc_scale must have shape \[3\], got \[4\]"),
        ({"mhc_base": torch.zeros(24).half()}, "mhc_base must be float32, got float16"),
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"rms_eps": 0.0}, "rms_eps must be positive and finite, got 0.0"),
        ({"mhc_sinkhorn_eps": float("nan")}, "mhc_sinkhorn_eps must be positive and finite, got"),
        ({"sinkhorn_repeat": 0}, "sinkhorn_repeat must be from 1 to 10000, got 0"),
    ],
)
def test_what_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^mhc_pre_big_fuse: {words}"):
        precast.mhc_pre_big_fuse(**{**call(), **change})
