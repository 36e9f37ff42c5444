# SPDX-License-Identifier: Apache-2.0
"""RoPE in 16 bits against its formula: layouts, sizes, positions, empty and huge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rope_case import (
    DEVICE,
    DTYPES,
    LAYOUTS,
    Llama31,
    exact_rope,
    frequencies,
    heads_in,
    make_cache,
    phases,
    phases_of_cache,
    same_bits,
)

import precast
from precast.testing import assert_close, poison, random_tensor
from precast.testing.rotation import clone

#: What angles are computed from, by the function's name.
FREQUENCIES: dict[str, dict[str, Any]] = {
    "apply_rope": {"scale": 1.0, "theta": 1e4},
    "apply_llama31_rope": {"scale": 8.0, "theta": 5e5, "llama31": Llama31()},
}
sizes = pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [
        (64, 64),
        (80, 80),
        (96, 96),
        (128, 128),
        (256, 256),
        (512, 512),
        (128, 64),
        (80, 32),
        (96, 72),
        (72, 72),
        (40, 6),
        (8, 2),
    ],
)
both_kinds = pytest.mark.parametrize("interleave", [False, True], ids=["neox", "interleaved"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "f16"])
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def index(values: Any, wide: bool = False) -> torch.Tensor:
    return torch.as_tensor(values).to(DEVICE, torch.int64 if wide else torch.int32)


def draw_positions(tokens: int, rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(rows, (tokens,), generator=generator, device=generator.device).to(DEVICE)


def check_pair(
    got: tuple[torch.Tensor, torch.Tensor],
    before: tuple[torch.Tensor, torch.Tensor],
    phase: torch.Tensor,
    interleave: bool,
    name: str,
) -> None:
    rotary_dim = 2 * phase.shape[-1]
    for word, mine, old in zip("qk", got, before, strict=True):
        assert_close(mine, exact_rope(old, phase, interleave), name=f"{name}: {word}")
        assert same_bits(mine[..., rotary_dim:], old[..., rotary_dim:]), f"{name}: {word}'s tail"


# -- by a cache -----------------------------------------------------------------------------------


def run_cached(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor, interleave: bool
) -> None:
    """Out of place and in place: the formula, the same bits, and nothing else changed."""
    size = q.shape[-1]
    before = q.clone(), k.clone()
    phase = phases_of_cache(positions, cache)
    new = precast.apply_rope_with_cos_sin_cache(positions, q, k, size, cache, not interleave)
    assert same_bits(q, before[0]) and same_bits(k, before[1]), "an input was written"
    check_pair(new, before, phase, interleave, "cos_sin_cache")
    result = precast.apply_rope_with_cos_sin_cache_inplace(
        positions, q, k, size, cache, not interleave
    )
    assert result is None
    assert same_bits(q, new[0]) and same_bits(k, new[1]), "in place differs"


@sizes
@both_kinds
@every_dtype
def test_sizes(
    head_dim: int,
    rotary_dim: int,
    interleave: bool,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    cache = make_cache(300, rotary_dim)
    for tokens, heads in ((1, (4, 2, 2)), (7, (5, 1, 1)), (61, (3, 3, 0))):
        parts = heads_in("packed", tokens, heads, head_dim, dtype=dtype, generator=generator)
        positions = draw_positions(tokens, 300, generator)
        value = parts[2].clone()
        run_cached(parts[0], parts[1], positions, cache, interleave)
        assert same_bits(parts[2], value), "the values were written"


@every_layout
@both_kinds
@pytest.mark.parametrize("wide", [False, True], ids=["i32", "i64"])
def test_layouts(layout: str, interleave: bool, wide: bool, generator: torch.Generator) -> None:
    cache = make_cache(100, 64)
    for head_dim in (64, 96):
        q, k, _ = heads_in(
            layout, 33, (8, 2, 2), head_dim, dtype=torch.bfloat16, generator=generator
        )
        run_cached(q, k, index(draw_positions(33, 100, generator), wide), cache, interleave)


@every_dtype
def test_packed_heads_of_two_dimensions(dtype: torch.dtype, generator: torch.Generator) -> None:
    """As engines call it: slices ``[tokens, heads * head_size]`` of a projection."""
    tokens, heads, dim = 21, (6, 1, 1), 128
    qkv = random_tensor(tokens, sum(heads) * dim, dtype=dtype, device=DEVICE, generator=generator)
    q, k, _ = qkv.split([h * dim for h in heads], dim=-1)
    cache, positions = make_cache(64, dim), draw_positions(tokens, 64, generator)
    phase = phases_of_cache(positions, cache)
    before = qkv.clone()
    new = precast.apply_rope_with_cos_sin_cache(positions, q, k, dim, cache)
    precast.apply_rope_with_cos_sin_cache_inplace(positions, q, k, dim, cache)
    for mine, other, old in zip(new, (q, k), before.split([h * dim for h in heads], dim=-1)):
        assert same_bits(mine, other)
        want = exact_rope(old.unflatten(-1, (-1, dim)), phase, False).flatten(1)
        assert_close(mine, want)
    assert same_bits(qkv[:, 7 * dim :], before[:, 7 * dim :])


@pytest.mark.parametrize("heads", [(32, 8), (33, 7), (1, 1)])
@both_kinds
def test_many_tokens(heads: tuple[int, int], interleave: bool, generator: torch.Generator) -> None:
    """Enough for several heads a thread, with a head left over."""
    tokens, dim = 2**19 // (sum(heads) * 6) + 77, 128
    q, k = heads_in("contiguous", tokens, heads, dim, dtype=torch.bfloat16, generator=generator)
    run_cached(q, k, draw_positions(tokens, 4096, generator), make_cache(4096, 96), interleave)


@both_kinds
def test_positions_that_the_cache_does_not_have(
    interleave: bool, generator: torch.Generator
) -> None:
    """Padding: the token keeps its bits, those of a NaN too."""
    cache = make_cache(16, 64)
    positions = index([3, -1, 16, 2**31 - 1, -(2**31), 15])
    q, k = heads_in("packed", 6, (4, 2), 64, dtype=torch.bfloat16, generator=generator)
    poison(q[1:5])
    before = q.clone(), k.clone()
    new = precast.apply_rope_with_cos_sin_cache(positions, q, k, 64, cache, not interleave)
    precast.apply_rope_with_cos_sin_cache_inplace(positions, q, k, 64, cache, not interleave)
    for mine, other, old in zip(new, (q, k), before):
        assert same_bits(mine[1:5], old[1:5])
        assert same_bits(mine, other)
        phase = phases_of_cache(positions[[0, 5]], cache)
        assert_close(mine[[0, 5]], exact_rope(old[[0, 5]], phase, interleave))


def test_a_strided_cache(generator: torch.Generator) -> None:
    wide = torch.full((40, 200), float("nan"), device=DEVICE)
    wide[:, 3:131] = make_cache(40, 128)
    positions = draw_positions(9, 40, generator)
    for cache in (wide[:, 3:131], wide[::2, 3:131]):
        q, k = heads_in("contiguous", 9, (4, 2), 128, dtype=torch.bfloat16, generator=generator)
        run_cached(q, k, positions % cache.shape[0], cache, False)


# -- by frequencies -------------------------------------------------------------------------------

Functions = tuple[Callable[..., Any], Callable[..., Any]]  # with new results, and in place
BY_IDS = (precast.apply_rope_pos_ids, precast.apply_rope_pos_ids_inplace)
LLAMA31_BY_IDS = (precast.apply_llama31_rope_pos_ids, precast.apply_llama31_rope_pos_ids_inplace)


def run_computed(
    function: Callable[..., Any],
    in_place: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    where: tuple[torch.Tensor, ...],
    positions: torch.Tensor,
    rotary_dim: int | None,
    interleave: bool,
    **keywords: Any,
) -> None:
    name = function.__name__
    stem = name.removesuffix("_pos_ids")
    given = {**FREQUENCIES[stem], **keywords}
    frequency = frequencies(rotary_dim or q.shape[-1], **given)
    options: dict[str, Any] = {"rotary_dim": rotary_dim, "interleave": interleave}
    if keywords:
        options |= {"rope_scale": given["scale"], "rope_theta": given["theta"]}
        if "llama31" in keywords:
            low, high, length = given["llama31"]
            options |= {
                "low_freq_factor": low,
                "high_freq_factor": high,
                "old_context_len": length,
            }
    before = q.clone(), k.clone()
    new = function(q, k, *where, **options)
    assert same_bits(q, before[0]) and same_bits(k, before[1]), "an input was written"
    check_pair(new, before, phases(positions, frequency), interleave, name)
    assert in_place(q, k, *where, **options) is None
    assert same_bits(q, new[0]) and same_bits(k, new[1]), "in place differs"


@pytest.mark.parametrize("forms", [BY_IDS, LLAMA31_BY_IDS])
@sizes
@both_kinds
def test_position_ids(
    forms: Functions, head_dim: int, rotary_dim: int, interleave: bool, generator: torch.Generator
) -> None:
    for dtype in DTYPES:
        q, k = heads_in("packed", 19, (4, 2), head_dim, dtype=dtype, generator=generator)
        ids = draw_positions(19, 9000, generator)
        size = None if rotary_dim == head_dim else rotary_dim
        run_computed(*forms, q, k, (ids,), ids, size, interleave)


@pytest.mark.parametrize(
    "forms",
    [
        (precast.apply_rope, precast.apply_rope_inplace),
        (precast.apply_llama31_rope, precast.apply_llama31_rope_inplace),
    ],
)
@every_layout
@pytest.mark.parametrize("wide", [False, True], ids=["i32", "i64"])
def test_requests(forms: Functions, layout: str, wide: bool, generator: torch.Generator) -> None:
    """Requests without tokens, and tokens before, between and behind that no request holds."""
    q, k = heads_in(layout, 30, (4, 1), 64, dtype=torch.bfloat16, generator=generator)
    indptr, offsets = [2, 2, 7, 8, 8, 27], [5, 1000, 0, 77, 31000]
    positions = torch.zeros(30, dtype=torch.int64)
    for start, end, offset in zip(indptr, indptr[1:], offsets):
        positions[start:end] = offset + torch.arange(end - start)
    where = index(indptr, wide), index(offsets, wide)
    run_computed(*forms, q, k, where, positions.to(DEVICE), None, False)


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 65, 1100, 3000])
def test_many_requests(count: int, generator: torch.Generator) -> None:
    """Short ones, so that a warp has several, some of them without tokens; two tokens are free."""
    lengths = torch.randint(4, (count,), device=DEVICE, generator=generator).cpu()
    indptr = torch.cat([torch.tensor([1]), 1 + lengths.cumsum(0)])
    tokens = int(indptr[-1]) + 1
    offsets = torch.randint(30000, (count,), device=DEVICE, generator=generator).cpu()
    positions = torch.zeros(tokens, dtype=torch.int64)
    first = torch.repeat_interleave(offsets - indptr[:-1], lengths)
    positions[1:-1] = first + torch.arange(1, tokens - 1)
    q, k = heads_in("packed", tokens, (1, 1), 64, dtype=torch.bfloat16, generator=generator)
    where = index(indptr.tolist(), False), index(offsets.tolist(), False)
    run_computed(
        precast.apply_rope,
        precast.apply_rope_inplace,
        q,
        k,
        where,
        positions.to(DEVICE),
        None,
        False,
    )


def test_no_requests(generator: torch.Generator) -> None:
    q, k = heads_in("packed", 5, (4, 1), 64, dtype=torch.bfloat16, generator=generator)
    before = q.clone()
    precast.apply_rope_inplace(q, k, index([0]), index([]))
    assert_close(q, before)


@pytest.mark.parametrize("forms", [BY_IDS, LLAMA31_BY_IDS])
@both_kinds
def test_positions_far_out(forms: Functions, interleave: bool, generator: torch.Generator) -> None:
    """An angle in plain fp32 would be off by more than a radian at the last of them."""
    ids = index([0, 1, -1, -500, 131071, 10**6, 2**20 + 1, 2**24 - 1])
    for dtype in DTYPES:
        q, k = heads_in("contiguous", 8, (8, 8), 128, dtype=dtype, generator=generator)
        run_computed(*forms, q, k, (ids,), ids, None, interleave)


@pytest.mark.parametrize(
    ("scale", "theta", "llama31"),
    [(1.0, 1e4, None), (4.0, 1e6, None), (0.5, 2.0, None), (32.0, 5e5, Llama31(2.0, 3.0, 4096))],
)
def test_other_frequencies(
    scale: float, theta: float, llama31: Llama31 | None, generator: torch.Generator
) -> None:
    forms = BY_IDS if llama31 is None else LLAMA31_BY_IDS
    ids = draw_positions(40, 100_000, generator)
    q, k = heads_in("contiguous", 40, (2, 2), 128, dtype=torch.float16, generator=generator)
    keywords: dict[str, Any] = {"scale": scale, "theta": theta}
    if llama31 is not None:
        keywords["llama31"] = llama31
    run_computed(*forms, q, k, (ids,), ids, None, False, **keywords)


# -- empty and huge -------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "heads"), [(0, (4, 2)), (5, (4, 0)), (5, (0, 2)), (0, (0, 0))])
def test_empty(tokens: int, heads: tuple[int, int], generator: torch.Generator) -> None:
    q, k = heads_in("contiguous", tokens, heads, 64, dtype=torch.bfloat16, generator=generator)
    ids, cache = index(torch.arange(tokens)), make_cache(8, 64)
    run_cached(q, k, ids, cache, False)
    new = precast.apply_rope_pos_ids(q, k, ids)
    assert new[0].shape == q.shape and new[1].shape == k.shape


Shape = Callable[[int], torch.Tensor]
needs_memory = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 24 << 30,
    reason="needs 24 GiB of free GPU memory",
)


@needs_memory
def test_token_stride_beyond_32_bits(generator: torch.Generator, free_memory: None) -> None:
    stride = (1 << 30) + 8
    memory = poison(torch.empty(3 * stride, dtype=torch.bfloat16, device=DEVICE))
    qkv = memory.as_strided((3, 6, 128), (stride, 128, 1))
    qkv.copy_(random_tensor(3, 6, 128, dtype=torch.bfloat16, generator=generator))
    q, k = qkv[:, :4], qkv[:, 4:]
    run_cached(q, k, index([3, 0, 7]), make_cache(8, 128), False)


@needs_memory
def test_more_than_2_to_31_elements(generator: torch.Generator, free_memory: None) -> None:
    dim, heads = 128, 32
    tokens = 2**31 // (heads * dim) + 9
    q = torch.empty(tokens, heads, dim, dtype=torch.bfloat16, device=DEVICE)
    q.normal_(generator=generator)
    k = torch.empty(tokens, 1, dim, dtype=torch.bfloat16, device=DEVICE).normal_()
    cache, positions = make_cache(512, dim), draw_positions(tokens, 512, generator)
    sample = [0, 1, 2**30 // (heads * dim), 2**31 // (heads * dim), tokens - 1]
    want = exact_rope(q[sample], phases_of_cache(positions[sample], cache), False)
    precast.apply_rope_with_cos_sin_cache_inplace(positions, q, k, dim, cache)
    assert_close(q[sample], want)


# -- what engines do ------------------------------------------------------------------------------


@both_kinds
def test_graph_replays_with_new_data(interleave: bool, generator: torch.Generator) -> None:
    cache = make_cache(64, 128)

    def fresh() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k = heads_in("packed", 17, (4, 2), 128, dtype=torch.bfloat16, generator=generator)
        return q, k, draw_positions(17, 64, generator)

    q, k, positions = fresh()
    precast.apply_rope_with_cos_sin_cache(positions, q, k, 128, cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        new = precast.apply_rope_with_cos_sin_cache(positions, q, k, 128, cache, not interleave)
        precast.apply_rope_with_cos_sin_cache_inplace(positions, q, k, 128, cache, not interleave)
    for _ in range(3):
        args = fresh()
        for mine, other in zip((q, k, positions), args):
            mine.copy_(other)
        graph.replay()
        check_pair(new, args[:2], phases_of_cache(args[2], cache), interleave, "replay")
        assert same_bits(q, new[0]) and same_bits(k, new[1])


def test_no_synchronisation_and_no_allocation(generator: torch.Generator) -> None:
    q, k = heads_in("packed", 17, (4, 2), 128, dtype=torch.bfloat16, generator=generator)
    cache, positions = make_cache(64, 128), draw_positions(17, 64, generator)
    precast.apply_rope_with_cos_sin_cache_inplace(positions, q, k, 128, cache)
    precast.apply_rope_pos_ids_inplace(q, k, positions)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            precast.apply_rope_with_cos_sin_cache_inplace(positions, q, k, 128, cache)
            precast.apply_rope_pos_ids_inplace(q, k, positions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile(dynamic: bool, generator: torch.Generator) -> None:
    cache = make_cache(64, 64)

    def block(qkv: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        qkv = qkv * 2
        q, k, v = qkv.split([256, 128, 128], dim=-1)
        precast.apply_rope_with_cos_sin_cache_inplace(positions, q, k, 64, cache)
        q2, k2 = precast.apply_rope_with_cos_sin_cache(positions, q, k, 64, cache, False)
        heads = q2.unflatten(-1, (4, 64)), k2.unflatten(-1, (2, 64))
        q3, k3 = precast.apply_llama31_rope_pos_ids(*heads, positions)
        return torch.cat([q3.flatten(1), k3.flatten(1), v, qkv], dim=-1) + 1

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic)
    for tokens in (5, 64):
        qkv = random_tensor(tokens, 512, dtype=torch.bfloat16, device=DEVICE, generator=generator)
        positions = draw_positions(tokens, 64, generator)
        assert_close(compiled(qkv, positions), block(qkv, positions))


def run_chain(
    q: torch.Tensor, k: torch.Tensor, ids: torch.Tensor, cache: torch.Tensor, wait: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.ones(128, dtype=torch.bfloat16, device=DEVICE)
    steps = (
        lambda: precast.apply_rope_with_cos_sin_cache_inplace(ids, q, k, 128, cache),
        lambda: precast.rmsnorm(q, weight, out=q),
        lambda: precast.apply_rope_pos_ids_inplace(q, k, ids),
    )
    for step in 20 * steps:
        step()
        if wait:
            torch.cuda.synchronize()
    return q, k


@pytest.mark.parametrize("tokens", [1, 64, 3000])
def test_a_chain_sees_its_predecessors_writes(tokens: int, generator: torch.Generator) -> None:
    """Kernels that start early must wait: many rounds, each reading what the one before wrote."""
    cache, ids = make_cache(64, 128), draw_positions(tokens, 64, generator)
    q, k = heads_in("contiguous", tokens, (4, 2), 128, dtype=torch.bfloat16, generator=generator)
    want = run_chain(clone(q), clone(k), ids, cache, wait=True)
    for _ in range(20):
        got = run_chain(clone(q), clone(k), ids, cache, wait=False)
        assert same_bits(got[0], want[0]) and same_bits(got[1], want[1])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_second_device(generator: torch.Generator) -> None:
    q, k = heads_in("packed", 9, (4, 2), 64, dtype=torch.bfloat16, generator=generator)
    cache, ids = make_cache(64, 64), draw_positions(9, 64, generator)
    want = precast.apply_rope_with_cos_sin_cache(ids, q, k, 64, cache)
    there = [x.to("cuda:1") for x in (ids, q, k, cache)]
    got = precast.apply_rope_with_cos_sin_cache(there[0], there[1], there[2], 64, there[3])
    assert torch.cuda.current_device() == 0
    assert all(same_bits(a.cpu(), b.cpu()) for a, b in zip(got, want))
    with pytest.raises(ValueError, match="key must be on cuda:1 as query, got cuda:0"):
        precast.apply_rope_with_cos_sin_cache(there[0], there[1], k, 64, there[3])
