# SPDX-License-Identifier: Apache-2.0
"""What engines do with an operator: graphs, torch.compile, parameters, streams, devices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_cases import CASES, OpCase, grid, grid_id
from op_case import same_bits

from precast.testing import assert_close, poison
from precast.testing.rotation import clone

every = pytest.mark.parametrize(("case", "dtype"), grid(), ids=grid_id)
by_name = pytest.mark.parametrize("name", sorted(CASES))


def copy(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(clone(a) if isinstance(a, torch.Tensor) else a for a in args)


def with_out(case: OpCase, x: torch.Tensor) -> dict[str, torch.Tensor]:
    if not case.takes_out:
        return {}
    dtype = case.out_dtype(x.dtype)
    return {"out": poison(torch.empty(case.out_shape(x.shape), dtype=dtype, device=x.device))}


@every
def test_graph_replays_with_new_data(
    case: OpCase, dtype: torch.dtype, generator: torch.Generator
) -> None:
    args = case.arguments(case.input_shape(65, 1024), dtype, generator)
    case.run(copy(args))  # loads the module
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = case.run(args)
    for _ in range(3):
        fresh = case.arguments(case.input_shape(65, 1024), dtype, generator)
        want = case.expected(*fresh)
        for mine, new in zip(args, fresh, strict=True):
            if isinstance(mine, torch.Tensor):
                mine.copy_(new)
        if not case.in_place:
            poison(outputs[0])
        graph.replay()
        for got, expected in zip(outputs, want, strict=True):
            assert_close(got, expected, name=case.name)


def test_first_call_after_preload_is_captured() -> None:
    """No warm-up in the process: preload alone must make a module ready for capture."""
    script = Path(__file__).with_name("capture_first_call.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for case in CASES.values():
        for word in case.dtypes:
            assert f"captured {case.name} {word}" in done.stdout


@by_name
def test_torch_compile(name: str, generator: torch.Generator) -> None:
    case = CASES[name]
    args = case.arguments(case.input_shape(33, 512), torch.bfloat16, generator)

    function, call = case.function, case.call

    def block(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        x = x * 2
        if call is not None:
            return tuple(result.float() + 1 for result in call(function, (x, *rest), None))
        result = function(x, *rest)
        if result is None:
            return x + 1, rest[0] + 1
        return (result + 1,)

    torch._dynamo.reset()
    mine, theirs = copy(args), copy(args)
    want = block(*theirs)
    got = torch.compile(block, fullgraph=True)(*mine)
    for left, right in zip(got, want, strict=True):
        assert_close(left, right, name=f"{name} compiled")
    for left, right in zip(mine, theirs, strict=True):  # what was written in place
        if isinstance(left, torch.Tensor):
            assert same_bits(left, right)


@by_name
def test_torch_compile_with_out_and_dynamic_rows(name: str, generator: torch.Generator) -> None:
    case = CASES[name]
    if not case.takes_out:
        pytest.skip(f"{name} takes no out")

    function, call = case.function, case.call

    def block(out: torch.Tensor, *args: Any) -> torch.Tensor:
        result = function(*args, out=out) if call is None else call(function, args, out)[0]
        return result.float() * 3

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for rows in (5, 64):
        args = case.arguments(case.input_shape(rows, 512), torch.bfloat16, generator)
        mine, theirs = (with_out(case, args[0])["out"] for _ in range(2))
        got, want = compiled(mine, *copy(args)), block(theirs, *copy(args))
        assert_close(got, want, name=name)
        assert same_bits(mine, theirs)


@by_name
def test_parameters_do_not_make_results_require_grad(name: str, generator: torch.Generator) -> None:
    case = CASES[name]
    args = case.arguments(case.input_shape(9, 512), torch.bfloat16, generator)
    weights = tuple(
        torch.nn.Parameter(a) if not case.is_written(i) and isinstance(a, torch.Tensor) else a
        for i, a in enumerate(args)
    )
    want = case.expected(*args)
    for got, expected in zip(case.run(weights), want, strict=True):
        assert not got.requires_grad
        assert_close(got, expected, name=name)


@by_name
def test_runs_on_the_current_stream(name: str, generator: torch.Generator) -> None:
    case = CASES[name]
    args = case.arguments(case.input_shape(512, 4096), torch.bfloat16, generator)
    fresh = copy(args)
    case.run(copy(args))
    want = case.expected(*fresh)
    args[0].zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms, so that work on another stream comes too early
        args[0].copy_(fresh[0])
        outputs = case.run(args)
        assert not stream.query(), "the call waited for the GPU"
    stream.synchronize()
    for got, expected in zip(outputs, want, strict=True):
        assert_close(got, expected, name=name)


@by_name
def test_no_synchronisation_and_no_allocation(name: str, generator: torch.Generator) -> None:
    case = CASES[name]
    args = case.arguments(case.input_shape(64, 1024), torch.bfloat16, generator)
    keywords = with_out(case, args[0])
    case.run(args, **keywords)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            case.run(args, **keywords)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    grown = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    # An operator without `out` allocates its result and nothing else.
    assert grown == (0 if keywords or case.in_place else 10)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
@by_name
def test_second_device(name: str, generator: torch.Generator) -> None:
    case = CASES[name]
    other = torch.Generator("cuda:1").manual_seed(generator.initial_seed())
    assert torch.cuda.current_device() == 0
    args = case.arguments(case.input_shape(65, 1024), torch.bfloat16, other, "cuda:1")
    case.check(args)
    assert torch.cuda.current_device() == 0, "the call changed the current device"
    args = case.arguments(case.input_shape(65, 1024), torch.bfloat16, generator, "cuda:0")
    case.check(args)
    if len(args) > 1 and isinstance(args[1], torch.Tensor):
        with pytest.raises(ValueError, match=f"{name}: .* must be on cuda:0"):
            case.run((args[0], args[1].to("cuda:1"), *args[2:]))
