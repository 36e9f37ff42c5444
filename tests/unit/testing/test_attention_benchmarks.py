# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of attention: wrappers of every library plan once, and what the harness has for it."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NoReturn

import pytest
import torch
from bench_support import BENCHMARKS, benchmarks, on_cpu

import precast
from precast.testing import Tolerance

__all__ = ["benchmarks", "on_cpu"]


# -- the harness ----------------------------------------------------------------------------------


def test_results_may_have_a_tolerance_of_their_own(benchmarks: Any) -> None:
    harness = benchmarks("_harness")
    x = torch.tensor([1.0, 0.001], dtype=torch.bfloat16)
    case = harness.Case("scale", "[2]", 8, tuple, lambda fn: lambda x: fn(x, 3.0))
    errors = iter([0.005, 0.0] * 2)

    def off(x: torch.Tensor) -> torch.Tensor:
        return 3.0 * x + next(errors)

    with pytest.raises(AssertionError, match="scale: result: 1 of 2 elements differ"):
        harness.refcheck(case, (x,), off)
    harness.refcheck(case._replace(close=Tolerance(0.01, 0.01)), (x,), off)


@pytest.mark.parametrize(
    ("seconds", "effort"),
    [(2e-6, (50, 200)), (1e-4, (10, 200)), (1e-3, (4, 50)), (25e-3, (3, 3))],
)
def test_slow_kernels_are_called_less_often(
    seconds: float, effort: tuple[int, int], benchmarks: Any
) -> None:
    found = benchmarks("_harness").cpu_effort(seconds)
    assert (found["blocks"], found["calls"]) == effort


# -- peers ----------------------------------------------------------------------------------------


class Planned:
    """A wrapper of a library that keeps what it is given."""

    made: ClassVar[list[Any]] = []

    def __init__(self, workspace: torch.Tensor, *layout: Any, **options: Any) -> None:
        self.options, self.plans, self.runs = options, 0, 0
        self.made.append(self)

    def plan(self, *args: Any, **options: Any) -> None:
        self.plans += 1

    def run(self, q: torch.Tensor, *cache: Any, **options: Any) -> torch.Tensor:
        self.runs += 1
        return q


def _first(benchmarks: Any, family: str, op: str, shape: str = "") -> Any:
    cases = benchmarks(f"bench_{family}").cases(torch.bfloat16)
    return next(case for case in cases if case.op == op and shape in case.shape)


@pytest.mark.parametrize(
    ("family", "op", "peer", "options"),
    [
        ("attention", "BatchDecodeWithPagedKVCacheWrapper", "", {"use_tensor_cores": True}),
        (
            "attention",
            "BatchDecodeWithPagedKVCacheWrapper",
            "_cuda_cores",
            {"use_tensor_cores": False},
        ),
        ("attention", "BatchPrefillWithRaggedKVCacheWrapper", "", {"backend": "fa2"}),
        ("attention", "BatchPrefillWithPagedKVCacheWrapper", "", {"backend": "fa2"}),
        ("attention_plan", "BatchPrefillWithPagedKVCacheWrapper", "", {"backend": "fa2"}),
        ("attention", "BlockSparseAttentionWrapper", "", {"backend": "fa2"}),
        ("attention", "BlockSparseAttentionWrapper", "_auto", {"backend": "auto"}),
        ("attention", "VariableBlockSparseAttentionWrapper", "_auto", {"backend": "auto"}),
    ],
)
def test_wrappers_of_flashinfer_have_options_and_plan_once(
    family: str,
    op: str,
    peer: str,
    options: dict[str, Any],
    benchmarks: Any,
    on_cpu: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But where the plan is what is measured: then each time, and outside of graphs."""
    module = ModuleType("flashinfer")
    setattr(module, op, Planned)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    Planned.made.clear()
    case = _first(benchmarks, family, op)
    adapt = benchmarks(f"peers.flashinfer{peer}").adapt
    if family == "attention_plan":
        assert adapt(case, family) is None
        case = case._replace(bind=case.whole)
    call, args = adapt(case, family), case.make()
    for _ in range(3):
        assert call(*args) is args[0]
    (wrapper,) = Planned.made
    assert wrapper.options == options
    assert (wrapper.plans, wrapper.runs) == (3 if family == "attention_plan" else 1, 3)


def test_functions_of_flashinfer_are_found_in_their_module(
    benchmarks: Any, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, given = "xqa_batch_decode_with_kv_cache", []

    def function(*args: Any, **options: Any) -> torch.Tensor:
        given.append((args, options))
        return args[0]  # type: ignore[no-any-return]

    home = ModuleType("flashinfer.decode")
    setattr(home, name, function)
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.decode", home)
    for shape, has_mask in (("b8 x 4 4096", False), ("b8 x 4 4096 mask", True)):
        case = _first(benchmarks, "attention", name, shape)
        call = benchmarks("peers.flashinfer").adapt(case, "attention")
        args = case.make()
        assert call(*args) is call(*args) is args[0]
        (first, options), (second, _) = given[-2:]
        assert first[2] is second[2], "one workspace"
        assert not first[2].any(), "FlashInfer's is zero at first"
        assert (options["mask"] is not None) == has_mask
        assert options["q_len_per_req"] == 4


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        ("BatchAttentionWithAttentionSinkWrapper", "2 x 128"),
        ("xqa_batch_decode_with_kv_cache", "sinks"),
    ],
)
def test_sinks_are_measured_beside_the_same_call_without_them(
    op: str, shape: str, benchmarks: Any, on_cpu: None
) -> None:
    """A sink of minus infinity is none."""
    case = _first(benchmarks, "attention", op, shape)
    without = benchmarks("peers.without").adapt(case, "attention")
    assert benchmarks("peers.without").adapt(_first(benchmarks, "scale", "scale"), "scale") is None
    *args, sinks = case.make()
    if op.startswith("xqa"):  # Fewer tokens: the table's other columns are not read.
        args[4].fill_(3)
    with precast.reference_mode():
        plain, none, some = (
            call(*args, given)
            for call, given in (
                (without, sinks),
                (case.ours, torch.full_like(sinks, -torch.inf)),
                (case.ours, sinks + 3),
            )
        )
    torch.testing.assert_close(plain, none)
    assert (some.float().abs().sum() < 0.9 * plain.float().abs().sum()).item()


def test_decodes_without_a_plan_have_rows_of_the_wrapper_beside_them(benchmarks: Any) -> None:
    rows: dict[str, set[str]] = {}
    for case in benchmarks("bench_attention").cases(torch.bfloat16):
        rows.setdefault(case.op, set()).add(case.shape)
    own = rows["xqa_batch_decode_with_kv_cache"]
    plain = {shape for shape in own if not re.search(" x | sinks$", shape)}
    assert len(plain) > 10
    assert plain <= rows["BatchDecodeWithPagedKVCacheWrapper"]


def test_a_shared_prefix_is_merged_by_the_library_of_the_wrapper(benchmarks: Any) -> None:
    shared = _first(benchmarks, "attention", "BatchPrefillWithPagedKVCacheWrapper", "shared")
    library = benchmarks("bench_attention").library
    wrapper = precast.BatchPrefillWithPagedKVCacheWrapper
    assert library(wrapper) is library(partial(wrapper, backend="fa2")) is precast
    assert shared.bind(wrapper)
    assert shared.reads


def test_fa3_and_cudnn_take_what_they_can(
    benchmarks: Any, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: dict[str, Any] = {}
    module = ModuleType("fa3_fwd_interface")

    def with_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        called.update(options, shapes=[tuple(x.shape) for x in (q, k, v)])
        return q

    module.flash_attn_with_kvcache = with_cache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module)
    adapt = benchmarks("peers.fa3").adapt
    op = "BatchDecodeWithPagedKVCacheWrapper"
    case = _first(benchmarks, "attention", op, "b16 1024")
    adapt(case, "attention")(*case.make())
    assert called["shapes"] == [(16, 1, 32, 128), *[(16, 1024, 8, 128)] * 2]
    assert called["cache_seqlens"].tolist() == [1024] * 16
    case = _first(benchmarks, "attention", op, "Zipf")
    case = case._replace(make=benchmarks("_attention").Batch([1, 1], [16, 32]).decode)
    with pytest.raises(ValueError, match="no dense cache has these lengths"):
        adapt(case, "attention")(*case.make())

    cudnn = benchmarks("peers.cudnn").adapt
    assert cudnn(case, "attention") is None
    assert cudnn(_first(benchmarks, "attention", "BatchPrefillWithRaggedKVCacheWrapper"), "x")
    assert adapt(_first(benchmarks, "scale", "scale"), "scale") is None


def test_flashmla_gets_whole_rows_and_a_block_table(
    benchmarks: Any, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In reference mode ours computes the same from the halves."""
    called: dict[str, Any] = {}
    module = ModuleType("flash_mla")

    def with_cache(q: torch.Tensor, cache: torch.Tensor, *given: Any, **options: Any) -> Any:
        called.update(options, q=q, cache=cache, given=given)
        return q[..., :512], None

    module.get_mla_metadata = lambda: ("metadata", None)  # type: ignore[attr-defined]
    module.flash_mla_with_kvcache = with_cache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    adapt, op = benchmarks("peers.flashmla").adapt, "BatchMLAPagedAttentionWrapper"
    batch = benchmarks("bench_mla").Batch(16, 2, 128, *[torch.bfloat16] * 2, queries=4)
    case = _first(benchmarks, "mla", op)._replace(make=batch.make, bind=batch.run)
    q, cache, _, _, pages, lens = args = case.make()
    out = adapt(case, "mla")(*args)
    assert out.shape == (8, 16, 512)
    assert torch.equal(called["q"], q.view(2, 4, 16, 576))
    assert torch.equal(called["cache"], cache.unsqueeze(2))
    table, lengths, *rest = called["given"]
    assert torch.equal(table, pages.view(2, 2))
    assert lengths is lens
    assert rest == [512, "metadata", None]
    assert (called["causal"], called["use_legacy"]) == (True, True)
    for other in (batch._replace(page=16), batch._replace(kv_dtype=torch.float8_e4m3fn)):
        args = other.make()
        with pytest.raises(ValueError, match="no kernel for this page size, or for this cache"):
            adapt(case._replace(bind=other.run), "mla")(*args)
    assert adapt(_first(benchmarks, "scale", "scale"), "scale") is None


@pytest.mark.parametrize(
    "path", sorted((BENCHMARKS / "testlists").glob("*.txt")), ids=lambda path: path.stem
)
def test_lists_name_what_is_there(path: Path, benchmarks: Any) -> None:
    run = benchmarks("run")

    def error(message: str) -> NoReturn:
        raise AssertionError(message)

    options = run.parser().parse_args(["--testlist", str(path)])
    jobs = [job for line in run.command_lines(options, error) for job in run.jobs_of(line, error)]
    assert all(job.cases for job in jobs)
    if path.stem == "attention":
        assert {job.routine for job in jobs} == {"attention", "attention_plan", "merge_state"}
