# SPDX-License-Identifier: Apache-2.0
"""Per-head norm and RoPE in one pass, against its formula in float64."""

from __future__ import annotations

import pytest
import torch
from rope_case import DEVICE, DTYPES, exact_rope, make_cache, phases_of_cache, same_bits

import precast
from precast.testing import Guarded, assert_close, poison, random_tensor


def exact(
    qkv: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    phase: torch.Tensor,
    heads: tuple[int, int],
    interleave: bool,
    eps: float = 1e-6,
    bias: float = 0.0,
) -> list[torch.Tensor]:
    """Queries and keys in float64."""
    dim = weights[0].shape[0]
    parts = qkv.double().unflatten(-1, (-1, dim))
    wanted, start = [], 0
    for count, weight in zip(heads, weights, strict=True):
        x = parts[:, start : start + count]
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + bias)
        wanted.append(exact_rope(x, phase, interleave))
        start += count
    return wanted


def draw(
    tokens: int, heads: int, dim: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def random(*shape: int) -> torch.Tensor:
        return random_tensor(*shape, dtype=dtype, device=DEVICE, generator=generator)

    return random(tokens, heads * dim), random(dim), random(dim)


def check(
    qkv: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    cache: torch.Tensor,
    heads: tuple[int, int],
    interleave: bool = False,
    **keywords: float,
) -> None:
    dim, before = weights[0].shape[0], qkv.clone()
    phase = phases_of_cache(positions, cache)
    eps, bias = keywords.get("eps", 1e-6), keywords.get("weight_bias", 0.0)
    want = exact(before, weights, phase, heads, interleave, eps, bias)
    result = precast.qk_rmsnorm_rope(
        qkv, *weights, positions, cache, *heads, is_neox=not interleave, **keywords
    )
    assert result is None
    parts = qkv.unflatten(-1, (-1, dim))
    start = 0
    for word, wanted in zip("qk", want, strict=True):
        got = parts[:, start : start + wanted.shape[1]]
        assert_close(got, wanted, name=f"qk_rmsnorm_rope: {word}")
        start += wanted.shape[1]
    assert same_bits(qkv[:, start * dim :], before[:, start * dim :]), "values were written"


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [
        (64, 64),
        (80, 80),
        (96, 96),
        (128, 128),
        (256, 256),
        (512, 512),
        (128, 64),
        (72, 32),
        (504, 496),
        (256, 16),
        (16, 16),
        (64, 24),
        (80, 2),
        (96, 90),
        (496, 488),
        (8, 4),
    ],
)
@pytest.mark.parametrize("interleave", [False, True], ids=["neox", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "f16"])
def test_sizes(
    head_dim: int,
    rotary_dim: int,
    interleave: bool,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    cache = make_cache(50, rotary_dim)
    for tokens, heads in ((1, (4, 2)), (13, (5, 1))):
        qkv, *weights = draw(tokens, sum(heads) + heads[1], head_dim, dtype, generator)
        positions = torch.arange(tokens, device=DEVICE) * 3 % 50
        check(qkv, (weights[0], weights[1]), positions, cache, heads, interleave)


@pytest.mark.parametrize("bias", [0.0, 1.0], ids=["qwen", "gemma"])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_weight_bias_and_eps(bias: float, eps: float, generator: torch.Generator) -> None:
    qkv, *weights = draw(9, 8, 128, torch.bfloat16, generator)
    positions = torch.arange(9, device=DEVICE, dtype=torch.int32)
    qkv.mul_(0.25)
    pair = (weights[0], weights[1])
    check(qkv, pair, positions, make_cache(9, 128), (4, 2), eps=eps, weight_bias=bias)


@pytest.mark.parametrize(("gap", "offset"), [(64, 0), (3, 0), (0, 1)])
def test_strides_and_alignment(gap: int, offset: int, generator: torch.Generator) -> None:
    qkv, *weights = draw(7, 8, 96, torch.bfloat16, generator)
    guard = Guarded(qkv.shape, qkv.dtype, qkv.device, gap=gap, offset=offset)
    guard.view.copy_(qkv)
    positions = torch.tensor([0, 5, -1, 99, 30, 31, 32], device=DEVICE)
    pair = (weights[0], weights[1])
    check(guard.view, pair, positions, make_cache(32, 64), (4, 2))
    guard.check()


@pytest.mark.parametrize("heads", [(0, 0), (3, 0), (0, 2), (4, 4)])
@pytest.mark.parametrize("tokens", [0, 3])
def test_no_heads_and_no_tokens(
    heads: tuple[int, int], tokens: int, generator: torch.Generator
) -> None:
    qkv, *weights = draw(tokens, 8, 64, torch.bfloat16, generator)
    positions = torch.arange(tokens, device=DEVICE)
    check(qkv, (weights[0], weights[1]), positions, make_cache(8, 64), heads)


def test_zero_heads_stay_finite(generator: torch.Generator) -> None:
    qkv, *weights = draw(4, 6, 128, torch.float16, generator)
    positions = torch.arange(4, device=DEVICE)
    check(qkv.zero_(), (weights[0], weights[1]), positions, make_cache(8, 128), (4, 1))


def test_rows_far_apart(generator: torch.Generator) -> None:
    if not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    qkv, *weights = draw(3, 8, 128, torch.bfloat16, generator)
    stride = (1 << 30) + 8
    memory = poison(torch.empty(3 * stride, dtype=torch.bfloat16, device=DEVICE))
    far = memory.as_strided((3, 1024), (stride, 1)).copy_(qkv)
    positions = torch.arange(3, device=DEVICE)
    check(far, (weights[0], weights[1]), positions, make_cache(3, 128), (4, 2))


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(64, 64), (128, 128), (256, 256), (128, 64), (64, 40)]
)
@pytest.mark.parametrize("interleave", [False, True], ids=["neox", "interleaved"])
def test_many_tokens(
    head_dim: int, rotary_dim: int, interleave: bool, generator: torch.Generator
) -> None:
    """Enough for several heads a thread, with heads left over and positions without a row."""
    tokens, heads = 6007, (7, 5)
    qkv, *weights = draw(tokens, 17, head_dim, torch.bfloat16, generator)
    positions = torch.randint(-1, 5001, (tokens,), device=DEVICE, generator=generator)
    cache = make_cache(5000, rotary_dim)
    check(qkv, (weights[0], weights[1]), positions, cache, heads, interleave)


def test_graph_and_compile(generator: torch.Generator) -> None:
    qkv, *weights = draw(33, 8, 128, torch.bfloat16, generator)
    cache, positions = make_cache(64, 128), torch.arange(33, device=DEVICE)
    want = qkv * 2
    precast.qk_rmsnorm_rope(want, *weights, positions, cache, 4, 2)

    def block(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        precast.qk_rmsnorm_rope(x, *weights, positions, cache, 4, 2)
        return x

    torch._dynamo.reset()
    assert same_bits(torch.compile(block, fullgraph=True)(qkv), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = block(qkv)
    poison(captured)
    graph.replay()
    assert same_bits(captured, want)
