# SPDX-License-Identifier: Apache-2.0
"""Merges of attention states against float64: sizes, strides, states without keys, frameworks."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import precast
from precast.testing import assert_close, poison

INF = math.inf
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))

Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _new_tensors_hold_nan() -> Iterator[None]:
    """So that what a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def merged(v: torch.Tensor, s: torch.Tensor) -> Pair:
    """In float64, of ``[tokens, states, heads, ...]``."""
    v, s = v.double(), s.double()
    top = s.amax(1, keepdim=True) if s.shape[1] else s.new_full((s.shape[0], 1, s.shape[2]), -INF)
    weights = torch.where(s == -INF, 0.0, torch.exp2(s - top))
    total = weights.sum(1)
    parts = torch.where((s == -INF)[..., None], 0.0, v) * weights[..., None]
    out = parts.sum(1) / torch.where(total == 0, 1.0, total)[..., None]
    return out, torch.where(total == 0, -INF, top[:, 0] + total.log2())


def check(got: Pair, v: torch.Tensor, s: torch.Tensor, words: str = "") -> None:
    want = merged(v, s)
    assert_close(got[0], want[0].to(got[0].dtype), name=f"v {words}")
    assert got[1].dtype == torch.float32
    assert_close(got[1], want[1].float(), name=f"s {words}", rtol=1e-6, atol=2e-6)


def rows(shape: tuple[int, ...], form: str, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Random numbers in a tensor of one of several layouts, NaN around them."""
    made = (2 * torch.randn(shape, device=g.device, generator=g)).to(dtype)
    *outer, last = shape
    if form == "contiguous":
        return made
    if form == "heads first":
        buffer = made.transpose(0, -2).contiguous()
        return buffer.transpose(0, -2)
    gap = 8 if form == "packed" else 1
    buffer = poison(torch.empty(*outer, last + gap, dtype=dtype, device=g.device))
    view = buffer[..., gap:] if form == "odd addresses" else buffer[..., :last]
    view.copy_(made)
    return view


def logarithms(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """Of all sizes, one of eight of a state without keys."""
    s = 4 * torch.randn(shape, device=g.device, generator=g)
    return torch.where(torch.rand(shape, device=g.device, generator=g) < 0.125, -INF, s)


def states(
    tokens: int, count: int, heads: int, dim: int, form: str, dtype: torch.dtype, g: torch.Generator
) -> Pair:
    v, s = rows((tokens, count, heads, dim), form, dtype, g), logarithms((tokens, count, heads), g)
    v[s == -INF] = math.nan  # They must count as nothing, whatever they hold.
    return v, s


@by_dtype
@pytest.mark.parametrize("form", ["contiguous", "heads first", "packed", "odd addresses"])
@pytest.mark.parametrize("dim", [1, 7, 64, 80, 96, 128, 192, 256, 512, 2304])
def test_pairs(dim: int, form: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    for tokens, heads in ((1, 1), (3, 5), (67, 32), (1, 300)):
        v, s = states(tokens, 2, heads, dim, form, dtype, generator)
        a, b = (v[:, 0], s[:, 0]), (v[:, 1], s[:, 1])
        got = precast.merge_state(*a, *b)
        check(got, v, s, f"{tokens} x {heads}")
        state = a[0].clone(memory_format=torch.preserve_format), a[1].clone()
        assert precast.merge_state_in_place(*state, *b) is None
        for mine, theirs in zip(state, got, strict=True):
            assert torch.equal(mine, theirs), "in place is another result"
        mask = torch.rand(tokens, device=v.device, generator=generator) < 0.5
        state = a[0].clone(), a[1].clone()
        precast.merge_state_in_place(*state, *b, mask)
        for mine, theirs, before in zip(state, got, a, strict=True):
            assert torch.equal(mine[mask], theirs[mask])
            assert torch.equal(mine[~mask].nan_to_num(), before[~mask].nan_to_num())


@by_dtype
@pytest.mark.parametrize("form", ["contiguous", "heads first", "packed", "odd addresses"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 9, 31, 32, 100])
def test_states(count: int, form: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    for tokens, heads, dim in ((1, 1, 128), (5, 3, 80), (33, 8, 64), (2, 7, 513), (1, 2, 2304)):
        v, s = states(tokens, count, heads, dim, form, dtype, generator)
        check(precast.merge_states(v, s), v, s, f"{tokens} x {heads} x {dim}")


def test_logarithms_may_be_strided(generator: torch.Generator) -> None:
    v, s = states(9, 4, 6, 64, "contiguous", torch.bfloat16, generator)
    wide = s.repeat_interleave(2, -1)[..., ::2]
    transposed = s.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    for other in (wide, transposed):
        assert not other.is_contiguous()
        check(precast.merge_states(v, other), v, s)
        check(precast.merge_state(v[:, 0], other[:, 0], v[:, 1], other[:, 1]), v[:, :2], s[:, :2])


@pytest.mark.parametrize("size", [-5e5, -1e30, 3e38, 5e4])
def test_large_logarithms(size: float, generator: torch.Generator) -> None:
    v, _ = states(8, 3, 4, 64, "contiguous", torch.float32, generator)
    v = v.nan_to_num(1.0)
    s = torch.full((8, 3, 4), size, device=v.device)
    s[:, 1, 1] = -INF
    check(precast.merge_states(v, s), v, s)
    check(precast.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1]), v[:, :2], s[:, :2])
    s[:] = -INF
    for got in (
        precast.merge_states(v, s),
        precast.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1]),
    ):
        assert got[0].eq(0).all()
        assert got[1].eq(-INF).all()


def test_nan_is_not_hidden(generator: torch.Generator) -> None:
    for count in (2, 8, 40):
        v = torch.ones(2, count, 2, 128, device=generator.device)
        s = torch.zeros(2, count, 2, device=generator.device)
        s[1, count // 2, 1] = math.nan
        out, sums = precast.merge_states(v, s)
        assert out.isnan().any(-1).tolist() == [[False, False], [False, True]]
        assert sums.isnan().tolist() == [[False, False], [False, True]]


@pytest.mark.parametrize("count", [3, 8, 64])
def test_a_token_does_not_depend_on_the_others(count: int, generator: torch.Generator) -> None:
    v, s = states(700, count, 4, 128, "contiguous", torch.float32, generator)
    whole = precast.merge_states(v, s)
    for token in (0, 13, 699):
        one = precast.merge_states(v[token : token + 1], s[token : token + 1])
        for mine, theirs in zip(one, whole, strict=True):
            assert torch.equal(mine[0], theirs[token])


def test_empty(generator: torch.Generator) -> None:
    for shape in ((0, 4, 64), (3, 0, 64), (3, 4, 0)):
        v = torch.empty(shape, device=generator.device, dtype=torch.float16)
        s = torch.zeros(shape[:-1], device=generator.device)
        assert precast.merge_state(v, s, v, s)[0].shape == shape
        precast.merge_state_in_place(v, s, v.clone(), s.clone())
        assert precast.merge_states(v[:, None], s[:, None])[0].shape == shape


def test_more_than_2_31_elements(generator: torch.Generator) -> None:
    tokens, heads, dim = 70_000, 64, 512
    if torch.cuda.mem_get_info()[0] < 4.2 * tokens * heads * dim * 2:
        pytest.skip("needs 20 GB of free memory")
    v = torch.ones(tokens, heads, dim, dtype=torch.float16, device=generator.device)
    s = torch.zeros(tokens, heads, device=generator.device)
    other = torch.full_like(v, 3.0)
    precast.merge_state_in_place(v, s, other, s.clone())
    assert v[:, :, 0].eq(2).all()
    assert v[:, :, -1].eq(2).all()
    assert s.eq(1).all()


def test_errors(generator: torch.Generator) -> None:
    v, s = states(4, 2, 3, 64, "contiguous", torch.float16, generator)
    a, b = (v[:, 0].clone(), s[:, 0].clone()), (v[:, 1].clone(), s[:, 1].clone())
    bad: list[tuple[str, tuple[Any, ...], str]] = [
        ("merge_state", (a[0], a[1], b[0].float(), b[1]), "v_b must be float16, got float32"),
        ("merge_state", (a[0], a[1], b[0][:2], b[1][:2]), "v_b must have v_a's shape"),
        ("merge_state", (a[0], a[1][:, :2], *b), "s_a must have the shape of v_a less its last"),
        ("merge_state", (a[0], a[1].cpu(), *b), "s_a must be on cuda"),
        ("merge_state", (a[0].mT.contiguous().mT, a[1], *b), "v_a must have stride 1"),
        ("merge_state_in_place", (*a, *b, torch.ones(4)), "mask must be on cuda"),
        (
            "merge_state_in_place",
            (*a, *b, torch.ones(4, device=v.device)),
            "mask must be bool or uint8, got float32",
        ),
        ("merge_state_in_place", (a[0][:1].expand(4, 3, 64), a[1], *b), "v must not hold"),
        (
            "merge_state_in_place",
            (v.flatten(0, 1)[1:5], a[1], v.flatten(0, 1)[:4], b[1]),
            "v must be v_other itself or not overlap its memory",
        ),
        ("merge_states", (v[0], s), "v must have 4 dimensions"),
        ("merge_states", (v, s[:, 0]), "s must have the shape of v less its last dimension"),
    ]
    for name, args, words in bad:
        before = a[0].clone()
        with pytest.raises(ValueError, match=f"{name}: {words}".replace("[", r"\[")):
            getattr(precast, name)(*args)
        assert torch.equal(a[0].nan_to_num(), before.nan_to_num())


# -- Frameworks ------------------------------------------------------------------------------------


def every_call(generator: torch.Generator) -> dict[str, Callable[[], object]]:
    v, s = states(64, 2, 8, 128, "contiguous", torch.bfloat16, generator)
    one, sums = v[:, 0].clone(), s[:, 0].clone()
    mask = torch.ones(64, dtype=torch.bool, device=v.device)
    return {
        "pair": lambda: precast.merge_state(one, sums, v[:, 1], s[:, 1]),
        "in place": lambda: precast.merge_state_in_place(one, sums, v[:, 1], s[:, 1]),
        "masked": lambda: precast.merge_state_in_place(one, sums, v[:, 1], s[:, 1], mask),
        "states": lambda: precast.merge_states(v, s),
    }


def test_graph_with_another_mask(generator: torch.Generator) -> None:
    v, s = states(64, 2, 8, 128, "contiguous", torch.float16, generator)
    state = v[:, 0].clone(), s[:, 0].clone()
    mask = torch.ones(64, dtype=torch.bool, device=v.device)
    precast.merge_state_in_place(state[0].clone(), state[1].clone(), v[:, 1], s[:, 1], mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        precast.merge_state_in_place(*state, v[:, 1], s[:, 1], mask)
    for seed in range(3):
        mask.copy_(torch.arange(64, device=v.device) % 3 == seed)
        state[0].copy_(v[:, 0])
        state[1].copy_(s[:, 0])
        graph.replay()
        want = v[:, 0].clone(), s[:, 0].clone()
        precast.merge_state_in_place(*want, v[:, 1], s[:, 1], mask)
        for mine, theirs in zip(state, want, strict=True):
            assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())


def test_no_synchronisation(generator: torch.Generator) -> None:
    calls = every_call(generator)
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for name in ("in place", "masked"):
            calls[name]()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        for call in calls.values():
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_torch_compile(generator: torch.Generator) -> None:
    def block(v: torch.Tensor, s: torch.Tensor) -> Any:
        out, sums = precast.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
        precast.merge_state_in_place(out, sums, v[:, 2], s[:, 2])
        return out, sums, *precast.merge_states(v, s)

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for tokens in (5, 19):
        v, s = states(tokens, 3, 4, 64, "contiguous", torch.bfloat16, generator)
        for mine, theirs in zip(compiled(v, s), block(v, s), strict=True):
            assert torch.equal(mine, theirs)


def test_first_call_after_preload_is_captured() -> None:
    """No warm-up in the process: preload alone must make the modules ready for capture."""
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch, precast
from test_gpu_cascade import every_call
precast.preload(["merge_state"])
precast.freeze()
calls = every_call(torch.Generator("cuda").manual_seed(1))
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for call in calls.values():
        call()
graph.replay()
torch.cuda.synchronize()
print("captured", len(calls))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip() == "captured 4", done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_second_device(generator: torch.Generator) -> None:
    other = torch.Generator("cuda:1").manual_seed(generator.initial_seed())
    v, s = states(9, 3, 4, 128, "contiguous", torch.float16, other)
    check(precast.merge_states(v, s), v, s)
    assert torch.cuda.current_device() == 0, "the call changed the current device"
    with pytest.raises(ValueError, match="s must be on cuda:1"):
        precast.merge_states(v, s.to("cuda:0"))
