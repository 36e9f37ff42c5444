# SPDX-License-Identifier: Apache-2.0
"""Logging on a GPU: under graph capture, statistics, dumps that replay, and kernels that fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faulting_op
import pytest
import torch
from gpu_cases import CASES, OpCase

from precast.api_logging import _calls, _describe, _destination, precast_api, public_api
from precast.api_logging._dump import Recorder
from precast.api_logging.replay import find_dumps, replay
from precast.testing import assert_close
from precast.testing.rotation import clone

pytest.importorskip("safetensors")
HERE = Path(__file__).parent
# Calls with the arguments of the cases as they stand.
by_name = pytest.mark.parametrize("name", [n for n, c in sorted(CASES.items()) if c.call is None])


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], str]]:
    """Level 10 for what is decorated from now on; the call reads the log."""
    public_api()  # An op that is imported from here on would be logged for good.
    path = tmp_path / "log.txt"
    monkeypatch.setenv("PRECAST_LOGLEVEL", "10")
    monkeypatch.setenv("PRECAST_LOGDEST", str(path))
    monkeypatch.setenv("PRECAST_DUMP_DIR", str(tmp_path / "dumps"))
    monkeypatch.setattr(_calls, "_recorder", Recorder())
    _destination.close()
    yield path.read_text
    _destination.close()


def logged(case: OpCase) -> Callable[..., Any]:
    return precast_api(case.function)


def outputs(case: OpCase, args: tuple[Any, ...], result: Any) -> tuple[torch.Tensor, ...]:
    return args[:2] if case.in_place else (result,)


@by_name
def test_a_logged_call_is_captured_and_replayed(
    name: str, log: Callable[[], str], tmp_path: Path, generator: torch.Generator
) -> None:
    case = CASES[name]
    function = logged(case)
    args = case.arguments(case.input_shape(33, 512), torch.bfloat16, generator)
    case.run(tuple(clone(a) if isinstance(a, torch.Tensor) else a for a in args))  # loads
    want = case.expected(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = outputs(case, args, function(*args))
    graph.replay()
    torch.cuda.synchronize()
    for mine, expected in zip(got, want, strict=True):
        assert_close(mine, expected, name=name)
    assert ": [statistics and dump skipped: a CUDA graph is being captured]\n" in log()
    assert "nan" not in log()
    assert not (tmp_path / "dumps").exists()


def test_a_capture_is_seen_on_the_devices_of_the_tensors() -> None:
    x = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    assert not _describe.is_capturing([x])
    with torch.cuda.graph(graph):
        y = x + 1
        assert _describe.is_capturing([x])
        assert not _describe.is_capturing([torch.ones(2)])
    assert not _describe.is_capturing([x])
    graph.replay()
    assert y.sum().item() == 8


def test_statistics_are_those_of_the_cpu(generator: torch.Generator) -> None:
    x = torch.randn(513, 1027, device="cuda", generator=generator)
    x[3, 5], x[4, 6], x[5, 7] = float("nan"), float("inf"), float("-inf")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for view in (x.to(dtype), x.to(dtype).t(), x.to(dtype)[:, 3:900:2]):
            text = _describe.statistics(view)
            want = _describe.statistics(view.cpu())
            mean, expected = (float(t.split("mean ")[1].split(",")[0]) for t in (text, want))
            assert text.split("mean ")[0] == want.split("mean ")[0]
            assert text.split(", nan")[1] == want.split(", nan")[1]
            assert mean == pytest.approx(expected, rel=1e-4, abs=1e-7)


@by_name
def test_statistics_and_dump_do_not_change_the_result(
    name: str, log: Callable[[], str], generator: torch.Generator
) -> None:
    case = CASES[name]
    args = case.arguments(case.input_shape(65, 1024), torch.bfloat16, generator)
    mine = tuple(clone(a) if isinstance(a, torch.Tensor) else a for a in args)
    want = case.run(args)
    got = outputs(case, mine, logged(case)(*mine))
    for left, right in zip(got, want, strict=True):
        assert torch.equal(left, right)
    assert "  in  input: min " in log()


@by_name
@pytest.mark.parametrize("layout", ["contiguous", "strided", "unaligned"])
def test_a_dump_replays_bit_for_bit(
    name: str,
    layout: str,
    log: Callable[[], str],
    tmp_path: Path,
    generator: torch.Generator,
) -> None:
    case = CASES[name]
    if layout != "contiguous" and case.contiguous:
        pytest.skip(f"{name} takes contiguous tensors")
    if layout == "unaligned" and case.gated:
        pytest.skip(f"{name} takes aligned rows")
    columns = 512 if layout != "unaligned" else 509
    x, *rest = case.arguments(case.input_shape(33, columns), torch.bfloat16, generator)
    if layout != "contiguous":
        start = 0 if layout == "strided" else 3
        wide = x.new_zeros(x.shape[0], x.shape[1] + 64)
        x = wide[:, start : start + x.shape[1]].copy_(x)
    logged(case)(x, *rest)
    (dump,) = find_dumps(tmp_path / "dumps")
    found = replay(dump)
    assert (found.verdict, found.note) == ("bitwise", "")
    assert found.device.startswith("cuda")
    assert len(found.outputs) == (2 if case.in_place else 1)
    assert "dump has the outputs" in log()


def test_the_reference_is_close_to_what_the_kernel_dumped(
    log: Callable[[], str], tmp_path: Path, generator: torch.Generator
) -> None:
    case = CASES["rmsnorm"]
    logged(case)(*case.arguments((33, 4096), torch.bfloat16, generator))
    (dump,) = find_dumps(tmp_path / "dumps")
    for options in ({"reference": True}, {"device": "cpu"}):
        found = replay(dump, **options)
        assert found.verdict in ("close", "bitwise"), found
        assert "reference" in found.device


# -- kernels that fault ---------------------------------------------------------------------------


def script(tmp_path: Path, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: a fault ends the CUDA context that it happens in."""
    environment = {
        **os.environ,
        "PRECAST_DUMP_DIR": str(tmp_path / "dumps"),
        "PRECAST_LOGDEST": str(tmp_path / "log.txt"),
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        **variables,
    }
    return subprocess.run(
        [sys.executable, *argv],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )


@pytest.mark.jit
@pytest.mark.parametrize("fault", ["illegal address", "trap"])
def test_a_kernel_that_faults_leaves_its_inputs_and_its_name(tmp_path: Path, fault: str) -> None:
    from safetensors import safe_open

    program = str(HERE / "faulting_op.py")
    done = script(tmp_path, program, fault, PRECAST_LOGLEVEL="10")
    assert done.returncode != 0
    assert "returned" not in done.stdout, "the failure was not put down to its own call"
    assert "CUDA error" in done.stderr

    _, dump = find_dumps(tmp_path / "dumps")
    assert sorted(p.name for p in dump.iterdir()) == ["call.json", "inputs.safetensors"]
    call = json.loads((dump / "call.json").read_text())
    assert call["function"] == "faulting_op.faulting"
    assert call["arguments"]["fault"] == fault
    with safe_open(dump / "inputs.safetensors", framework="pt") as file:
        for name, want in zip(("x", "out"), faulting_op.inputs(), strict=True):
            got = file.get_tensor(name)
            assert torch.equal(got.view(torch.int32), want.view(torch.int32)), name

    lines = (tmp_path / "log.txt").read_text().splitlines()
    (failed,) = [line for line in lines if "failed on the GPU: CUDA error" in line]
    title = failed.partition("] ")[2].partition(":")[0]
    assert any(line.endswith(f"{title}: faulting_op.faulting") for line in lines)
    assert f"  in  fault: {fault!r}" in lines
    assert f"  dump {dump}" in lines

    # The dump has the fault in it: a replay meets it again, and says so.
    again = script(
        tmp_path, "-m", "precast", "replay", str(dump), "--import", "faulting_op", "--json"
    )
    assert again.returncode == 1, again.stderr
    (row,) = json.loads(again.stdout)["calls"]
    assert row["verdict"] == "raised"
    assert "CUDA error" in row["note"]


@pytest.mark.jit
def test_without_statistics_the_log_still_names_the_call(tmp_path: Path) -> None:
    """At level 1 nothing waits: the call returns, and the fault surfaces later."""
    program = str(HERE / "faulting_op.py")
    done = script(tmp_path, program, "trap", PRECAST_LOGLEVEL="1")
    assert done.returncode != 0
    assert done.stdout == "returned\n"
    text = (tmp_path / "log.txt").read_text()
    assert text.count("faulting_op.faulting\n") == 2


@pytest.mark.jit
def test_a_call_that_works_replays(tmp_path: Path) -> None:
    code = "import faulting_op as f; x, out = f.inputs(); f.faulting(x.cuda(), out.cuda())"
    done = script(tmp_path, "-c", code, PRECAST_LOGLEVEL="10")
    assert done.returncode == 0, done.stderr
    dumps = str(tmp_path / "dumps")
    again = script(tmp_path, "-m", "precast", "replay", dumps, "--import", "faulting_op")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "faulting_op.faulting on cuda:0: bitwise" in again.stdout
