# SPDX-License-Identifier: Apache-2.0
"""What engines do with every function of RoPE: graphs, torch.compile, devices; padding, empty."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rope_calls import APPEND, BY_IDS, BY_REQUESTS, CACHED, QUANTIZE, Call, good, tensors_of
from rope_case import DEVICE, make_cache, same_bits

import precast
from precast.testing import random_tensor

NAMES = [*CACHED, *BY_IDS, *BY_REQUESTS, "qk_rmsnorm_rope", *QUANTIZE, APPEND]
every_function = pytest.mark.parametrize("name", NAMES)
#: Where a token's position is read from, by the function.
POSITIONS = {
    **dict.fromkeys([*CACHED, "qk_rmsnorm_rope"], "positions"),
    **dict.fromkeys([*BY_IDS, *QUANTIZE, APPEND], "pos_ids"),
}


def drawn(name: str, generator: torch.Generator, device: str = DEVICE) -> Call:
    """Good arguments with random numbers."""
    call = good(name, device)
    for key, x in call.items():
        if torch.is_tensor(x) and x.dtype == torch.bfloat16:
            drawn = random_tensor(*x.shape, dtype=x.dtype, device=DEVICE, generator=generator)
            call[key] = drawn.to(device)
    if "cos_sin_cache" in call:
        call["cos_sin_cache"] = make_cache(*call["cos_sin_cache"].shape).to(device)
    return call


def copied(call: Call, device: str = DEVICE) -> Call:
    def copy(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(copy, x))
        return x.to(device, copy=True) if torch.is_tensor(x) else x

    return {key: copy(x) for key, x in call.items()}


def run(name: str, call: Call) -> list[torch.Tensor]:
    """What it returns, and its arguments, some of which it writes."""
    result = getattr(precast, name)(**call)
    return [*(result or ()), *tensors_of(call)]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor], what: str) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert same_bits(a.to(b.device), b), f"{what}: tensor {i}"


@every_function
def test_graph_replays_with_new_data(name: str, generator: torch.Generator) -> None:
    fixed = drawn(name, generator)
    run(name, copied(fixed))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = getattr(precast, name)(**fixed)
    for _ in range(3):
        fresh = drawn(name, generator)
        for mine, other in zip(tensors_of(fixed), tensors_of(fresh), strict=True):
            mine.copy_(other)
        graph.replay()
        assert_same([*(result or ()), *tensors_of(fixed)], run(name, fresh), "replay")


@every_function
def test_torch_compile(name: str, generator: torch.Generator) -> None:
    function = getattr(precast, name)
    call = drawn(name, generator)
    want = run(name, copied(call))

    def block(call: Call) -> Any:
        return function(**call)

    torch._dynamo.reset()
    result = torch.compile(block, fullgraph=True)(call)
    assert_same([*(result or ()), *tensors_of(call)], want, "compiled")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
@every_function
def test_second_device(name: str, generator: torch.Generator) -> None:
    call = drawn(name, generator)
    there = copied(call, "cuda:1")
    want = run(name, call)
    assert_same(run(name, there), want, "cuda:1")
    assert torch.cuda.current_device() == 0, "the call changed the current device"


@pytest.mark.parametrize("name", [*POSITIONS])
@pytest.mark.parametrize("far", [-1, 2**32 + 1, 2**40, -(2**40)])
def test_positions_without_a_row(name: str, far: int, generator: torch.Generator) -> None:
    """Padding, and what has a row by its low word alone: as position 2^31 - 1, or as -1."""
    call, key = drawn(name, generator), POSITIONS[name]
    beyond = {-1: -1, -(2**40): -(2**31)}.get(far, 2**31 - 1)
    ids = torch.tensor([0, far, 2], device=DEVICE)
    near = torch.tensor([0, beyond, 2], dtype=torch.int32, device=DEVICE)
    want = run(name, {**copied(call), key: near})
    got = run(name, {**copied(call), key: ids})
    drop = [i for i, x in enumerate(want) if x is near]
    assert len(drop) == 1
    del got[drop[0]], want[drop[0]]
    assert_same(got, want, name)
    if "cos_sin_cache" in call and name != "qk_rmsnorm_rope":
        source = call["query" if name in CACHED else "q_rope"]
        result = run(name, {**copied(call), key: ids})[0 if name not in CACHED[1:] else 1]
        assert same_bits(result[1], source[1].to(result.dtype)), "it was rotated"


@pytest.mark.parametrize("name", BY_REQUESTS)
@pytest.mark.parametrize("far", [2**32, 2**40])
def test_requests_beyond_32_bits(name: str, far: int, generator: torch.Generator) -> None:
    """A request that ends there holds all tokens; one that begins there holds none."""
    call = drawn(name, generator)
    wide, narrow = copied(call), copied(call)
    wide["indptr"] = torch.tensor([0, 2, far + 2], device=DEVICE)
    wide["offsets"] = torch.tensor([3, 1], device=DEVICE)
    narrow["indptr"] = torch.tensor([0, 2, 3], device=DEVICE)
    narrow["offsets"] = torch.tensor([3, 1], device=DEVICE)
    got, want = run(name, wide)[:2], run(name, narrow)[:2]
    assert_same(got, want, "ends")
    wide, narrow = copied(call), copied(call)
    wide["indptr"] = torch.tensor([0, 2 + far, 3 + far], device=DEVICE)
    narrow["indptr"] = torch.tensor([0, 3, 3], device=DEVICE)
    assert_same(run(name, wide)[:2], run(name, narrow)[:2], "begins")


@every_function
def test_no_tokens(name: str, generator: torch.Generator) -> None:
    """Caches stay as they are; results have no elements."""
    call = drawn(name, generator)
    left = ("cos_sin_cache", "kv_indices", "kv_indptr", "q_weight", "k_weight")
    for key, x in call.items():
        if torch.is_tensor(x) and key not in left:
            call[key] = x[:0]
    if name in BY_REQUESTS:
        call["indptr"] = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    before = [x.clone() for x in tensors_of(call)]
    result = getattr(precast, name)(**call)
    assert all(x.numel() == 0 for x in result or ())
    assert_same(tensors_of(call), before, name)
