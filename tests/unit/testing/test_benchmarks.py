# SPDX-License-Identifier: Apache-2.0
"""benchmarks/: routines and peers are found by being there, and measured as asked for."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_support import BENCHMARKS, RESULTS, benchmarks, ceiling, on_cpu, timing
from fake_device import FakeDevice

import precast
from precast._op.dispatch import kernels
from precast._ops.moe._backends import CUTE_DSL
from precast.testing import Ceilings, Tolerance, report, rotation, tolerance

__all__ = ["benchmarks", "on_cpu"]
#: Several processes measure these, in a program for each: bench_allreduce.py and
#: bench_custom_all_reduce.py. The cases of e4m3 on Hopper are in bench_attention_sm90.py;
#: bench_mla.py, bench_gemm.py, bench_scaled_gemm.py and bench_fp8_gemm.py run on Hopper's kernels
#: there, and so do bench_fused_moe.py, bench_int4_gemm.py and bench_mxfp4_gemm.py.
ELSEWHERE = {
    *("allreduce_fusion", "custom_all_reduce", "attention_sm90_fp8", "mla_sm90", "fp8_gemm_sm90"),
    "fp8_gemm_gated_sm90",
    *("gemm_gated_sm90", "gemm_sm90", "int4_gemm_sm90", "mxfp4_gemm_sm90", "scaled_gemm_sm90"),
    # The benchmark of the kernel in CUDA measures that in CuTe DSL, too.
    *(kernel.op for kernel in kernels().values() if kernel.op.endswith(CUTE_DSL)),
}
#: What is made of ops of several families has a routine of its own.
COMPOSED = {"cutlass_fused_moe": "fused_moe"}
FAMILIES = sorted({kernel.op for kernel in kernels().values()} - ELSEWHERE | {*COMPOSED.values()})
#: A function with kernels of two families is measured with the one that has its name, or the first.
FUNCTIONS = {k.function: kernels().get(k.function, k).op for k in reversed(kernels().values())}
FUNCTIONS = {function: op for function, op in FUNCTIONS.items() if op not in ELSEWHERE}
#: Their kernels are those of a wrapper of prefill.
WRAPPERS = {
    **dict.fromkeys(
        (
            "BatchAttention",
            "BatchAttentionWithAttentionSinkWrapper",
            "BatchPODWithPagedKVCacheWrapper",
            "BlockSparseAttentionWrapper",
            "MultiLevelCascadeAttentionWrapper",
            "PODWithPagedKVCacheWrapper",
            "VariableBlockSparseAttentionWrapper",
        ),
        "attention",
    ),
    "BatchDecodeWithPagedKVCacheWrapper": "attention",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper": "attention_plan",
}
MEASURED = {**FUNCTIONS, **WRAPPERS, **COMPOSED}


@pytest.fixture
def run(benchmarks: Any) -> Any:
    return benchmarks("run")


def few_rows(op: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Less to compute; other ops than those on rows have tensors that must fit each other."""
    family = FUNCTIONS.get(op, "")
    if not family.startswith(("activation", "norm")) and family != "scale":
        return args
    rows = args[0].shape[0]  # column-major scales have columns for them, and stay as they are
    return tuple(
        a[:3] if isinstance(a, torch.Tensor) and a.dim() > 1 and a.shape[0] == rows else a
        for a in args
    )


@pytest.fixture
def measured(run: Any, benchmarks: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """run.py with a GPU that takes 2 us for everything; what it was asked to measure."""
    import precast.testing

    harness, asked = benchmarks("_harness"), []

    def measure(case: Any, family: str, ceilings: Any, settings: Any) -> report.Result:
        asked.append((family, case.op, case.shape, *settings.peers))
        if (family, case.op) == ("activation", "gelu_and_mul"):
            raise ValueError("made up")
        times = {name: timing(2.0) for name in ("precast", *settings.peers)}
        moved = case.bytes_moved
        return report.Result(case.op, case.shape, "bf16", moved, times, times, ceilings[0])

    monkeypatch.setattr(harness, "measure", measure)
    monkeypatch.setattr(precast.testing, "measure_ceilings", lambda: (ceiling(),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    here = {"gpu": "Test GPU", "commit": "abcdef0123", "date": "2026-11-21 06:00 UTC"}
    monkeypatch.setattr(precast.testing, "environment", lambda *args: here)
    return asked


# -- the cases ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_function_is_measured_and_checked(
    family: str, benchmarks: Any, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each public function of a family, against its reference, which can also fail."""
    harness = benchmarks("_harness")
    cases = list(benchmarks(f"bench_{family}").cases(torch.bfloat16))
    named = {case.op for case in cases} - {*WRAPPERS, *COMPOSED}
    own = [k for k in kernels().values() if kernels().get(k.function, k).op == k.op == family]
    assert named == {k.function for k in own} - {*COMPOSED}
    assert len({(case.op, case.shape) for case in cases}) == len(cases)
    smallest = min((c for c in cases if c.op == cases[0].op), key=lambda c: c.bytes_moved)
    args = few_rows(smallest.op, smallest.make())
    with precast.reference_mode():
        harness.refcheck(smallest, args)
        calls = 0

        def wrong(*values: object) -> object:
            nonlocal calls
            calls += 1
            result = smallest.ours(*values)
            if calls == 2:
                return result
            if result is None:  # In place: what else is written is wrong, then.
                written = [v for v in values if isinstance(v, torch.Tensor)]
                spoilt = max(written, key=torch.Tensor.numel)
                spoilt.copy_(spoilt.float() + 1)
                return None
            results = tuple(_spoilt(tensor) for tensor in _flat(result))
            return results if isinstance(result, tuple) else results[0]

        words = rf"{smallest.op}: (result|argument \d+): .* elements differ"
        with pytest.raises(AssertionError, match=words):
            harness.refcheck(smallest, args, wrong)


def _spoilt(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.float()
    return (wide * 1.05 + wide.flatten()[0].ne(0)).to(tensor.dtype)


def _flat(returned: Any) -> tuple[Any, ...]:
    if returned is None:
        return ()
    return returned if isinstance(returned, tuple) else (returned,)


@pytest.mark.parametrize("op", sorted(MEASURED))
def test_eager_torch_computes_the_same(op: str, benchmarks: Any, on_cpu: None) -> None:
    """Otherwise the peers `torch` and `compile` would be measured at something else."""
    cases = benchmarks(f"bench_{MEASURED[op]}").cases(torch.bfloat16)
    case = min((c for c in cases if c.op == op), key=lambda c: c.bytes_moved)
    args = few_rows(op, case.make())
    ours, theirs = (rotation.rotate(args, copies=2)[1].args for _ in range(2))
    with precast.reference_mode():
        want = case.tidy(case.ours(*ours))
    got = case.tidy(case.eager(*theirs))
    if case.draws:  # Other random numbers.
        for other, mine in zip(_flat(got), _flat(want), strict=True):
            assert other.shape == mine.shape
            assert min(other.min(), mine.min()) >= -1
        return
    outputs = list(zip(_flat(got), _flat(want), strict=True))
    for other, mine in zip(theirs, ours, strict=True):  # What is written in place.
        if not any(mine is result for result in _flat(want)):
            outputs.append((other, mine))
    for other, mine in outputs:
        if not isinstance(mine, torch.Tensor):
            continue
        # PyTorch rounds between its operators: scores of attention, too, so that weights, and
        # with them whole values, are off.
        largest = max(1.0, mine.float().abs().max().item())
        close = tolerance(mine.dtype) if mine.itemsize == 1 else Tolerance(3e-2, 3e-2 * largest)
        torch.testing.assert_close(other.float(), mine.float(), **close._asdict())


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_compute_the_same(family: str, benchmarks: Any, on_cpu: None) -> None:
    """What ours changes, what it replaces changes as well, by more bytes."""
    cases = [c for c in benchmarks(f"bench_{family}").cases(torch.bfloat16) if c.parts is not None]
    for op in sorted({case.op for case in cases}):
        case = min((c for c in cases if c.op == op), key=lambda c: c.bytes_moved)
        assert case.parts.bytes_moved > case.bytes_moved
        before = few_rows(op, case.make())
        ours, theirs = (rotation.rotate(before, copies=2)[1].args for _ in range(2))
        with precast.reference_mode():
            outputs = list(zip(_flat(case.parts.run(*theirs)), _flat(case.ours(*ours))))
        for old, mine, other in zip(before, ours, theirs, strict=True):
            if isinstance(mine, torch.Tensor) and not torch.equal(mine.float(), old.float()):
                outputs.append((other, mine))
        assert outputs
        for other, mine in outputs:
            close = tolerance(mine.dtype) if mine.itemsize == 1 else Tolerance(3e-2, 3e-2)
            got, want = other.float(), mine.float()
            torch.testing.assert_close(got, want, **close._asdict(), equal_nan=True)


def test_a_script_alone_is_its_routine() -> None:
    """Without a GPU it gets as far as saying so."""
    if torch.cuda.is_available():
        pytest.skip("would measure")
    command = [sys.executable, str(BENCHMARKS / "bench_scale.py"), "--dtype", "f32"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "benchmarks need a CUDA device" in done.stderr


@pytest.mark.parametrize("flops", [0, 2 * 10**9])
def test_a_case_is_measured_beside_its_peers_and_judged(
    flops: int,
    benchmarks: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a device that only keeps time: ours takes 10 us, torch's 25."""
    harness, device = benchmarks("_harness"), FakeDevice(monkeypatch)
    matmul = ceiling("matmul", 800.0, "TFLOP/s")
    monkeypatch.setattr(harness, "measure_matmul_ceiling", lambda dtype: matmul)
    monkeypatch.setattr(harness, "bench_cpu_time", lambda fn, args, **effort: timing(3.0))
    case = harness.Case(
        "scale",
        "[8]",
        20_000_000,  # in 10 us 2000 GB/s, half of the ceiling
        lambda: (torch.ones(8, dtype=torch.bfloat16),),
        bind=lambda scale: device.kernel(0.01),
        eager=device.kernel(0.025),
        flops=flops,  # in 10 us 200 TFLOP/s, a quarter; 100 FLOPs a byte are below the corner
    )
    settings = harness.Settings(["torch"], refcheck=False)
    ceilings = Ceilings(ceiling(), ceiling("read"), ceiling("launch", 1.2, "us"))
    record = harness.measure(case, "scale", ceilings, settings).record()
    assert record["gpu_us"]["precast"]["median"] == pytest.approx(10.0)
    assert record["ratio"] == {"torch": 2.5}
    assert record["expected"] == {}

    def rejects(tensor: torch.Tensor) -> None:
        raise TypeError("no such argument")

    record = harness.measure(case._replace(eager=rejects), "scale", ceilings, settings).record()
    assert set(record["gpu_us"]) == {"precast"}
    assert "scale [8]: without torch, TypeError: no such argument" in capsys.readouterr().err
    assert record["dtype"] == "bf16"
    assert (record["ceiling"], record["share"]) == ("elementwise", 0.5)
    assert record["tflops"] == (200.0 if flops else None)
    heavy = case._replace(flops=6 * 10**9)
    record = harness.measure(heavy, "scale", ceilings, settings).record()
    assert (record["ceiling"], record["share"]) == ("matmul", 0.75)
    read = ceilings._replace(read=ceiling("read", 5000.0))
    record = harness.measure(case._replace(reads=True), "scale", read, settings).record()
    assert (record["ceiling"], record["share"]) == ("read", 0.4)
    truths = case._replace(make=lambda: (torch.ones(8, dtype=torch.bool),))
    record = harness.measure(truths, "scale", ceilings, settings).record()
    assert record["dtype"] == "bool"  # no axis of a module has this type
    fused = case._replace(parts=harness.Parts(device.kernel(0.03), 36_000_000))
    settings = harness.Settings(["parts"], refcheck=False)
    record = harness.measure(fused, "scale", ceilings, settings).record()
    assert record["ratio"] == {"parts": 3.0}
    assert record["expected"] == {"parts": 1.8}


def test_copies_of_a_case_that_touches_a_part(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, device = benchmarks("_harness"), FakeDevice(monkeypatch)
    monkeypatch.setattr(harness, "bench_cpu_time", lambda fn, args, **effort: timing(3.0))
    settings = harness.Settings([], refcheck=False, rounds=2)
    ceilings = Ceilings(ceiling(), ceiling("read"), ceiling("launch", 1.2, "us"))
    for touches_part, copies in ((False, 20), (True, 200)):  # twice a cache of 1000
        seen: set[int] = set()
        case = harness.Case(
            *("scale", "[25]", 10, lambda: (torch.ones(25),)),
            bind=lambda scale, seen=seen: device.kernel(0.01, seen),
            touches_part=touches_part,
        )
        harness.measure(case, "scale", ceilings, settings)
        assert len(seen) == copies


def test_whole_calls_are_timed_in_turn(benchmarks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of ours takes 10 us, one of torch 25, and none in between is left out."""
    harness, device = benchmarks("_harness"), FakeDevice(monkeypatch)
    monkeypatch.setattr(harness.time, "perf_counter_ns", lambda: round(device.now * 1e6))
    case = harness.Case(
        "scale",
        "[8]",
        32,
        lambda: (torch.ones(8),),
        bind=lambda scale: None,
        eager=device.kernel(0.025),
        whole=lambda scale: device.kernel(0.01),
    )
    settings = harness.Settings(["torch"], rounds=3)
    found = harness.whole_times(case, "scale", settings, case.make())
    assert {name: t.samples for name, t in found.items()} == {"precast": 3, "torch": 3}
    assert found["precast"].median == pytest.approx(10e-6)
    assert found["torch"].median == pytest.approx(25e-6)
    assert harness.whole_times(case._replace(whole=None), "scale", settings, case.make()) == {}


# -- run.py ---------------------------------------------------------------------------------------


def test_list_names_every_file(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    named = {line.split()[0] for line in lines if line.startswith("  ")}
    files = {path.stem.removeprefix("bench_") for path in BENCHMARKS.glob("bench_*.py")}
    peers = {path.stem for path in (BENCHMARKS / "peers").glob("*.py")} - {"__init__"}
    assert named == files | peers
    assert {"norm", "startup", "flashinfer", "torch", "compile"} <= named


def test_everything_by_default_and_a_failure_stops_nothing(
    run: Any,
    benchmarks: Any,
    measured: list[tuple[str, ...]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run.main(["--json", str(tmp_path), "--csv", str(tmp_path), "--peers", "torch"]) == 1
    assert {family for family, *_ in measured} == set(FAMILIES)
    assert {op for _, op, *_ in measured} == set(MEASURED)
    first = {f: getattr(benchmarks(f"bench_{f}"), "DTYPES", run.DTYPES)[0] for f in FAMILIES}
    names = {f"{family}_{dtype}.json" for family, dtype in first.items()}
    assert {path.name for path in tmp_path.glob("*.json")} == names
    data = json.loads((tmp_path / "activation_bf16.json").read_text())
    failed = {"op": "gelu_and_mul", "shape": "[1024, 2x14336]", "error": "ValueError: made up"}
    assert failed in data["failures"]
    assert "gelu_tanh_and_mul" in {record["op"] for record in data["results"]}
    assert data["ceilings"]["elementwise"]["best"] == 4000.0
    with (tmp_path / "norm_bf16.csv").open() as file:
        assert {row["x torch"] for row in csv.DictReader(file)} == {"1.00"}
    assert "FAILED gelu_and_mul [1024, 2x14336]: ValueError: made up" in capsys.readouterr().out


def test_what_is_measured_is_written_if_the_program_is_stopped(
    run: Any, measured: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import _harness

    measure = _harness.measure

    def until_the_third(*given: Any) -> Any:
        if len(measured) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(*given)

    monkeypatch.setattr(_harness, "measure", until_the_third)
    before = signal.getsignal(signal.SIGTERM)
    try:
        words = ["--routine", "scale", "--routine", "norm", "--json", str(tmp_path)]
        assert run.main([*words, "--peers", "none"]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    (path,) = tmp_path.glob("*.json")  # Nothing of the next routine.
    data = json.loads(path.read_text())
    assert [record["op"] for record in data["results"]] == [op for _, op, *_ in measured]
    assert [failure["error"] for failure in data["failures"]] == ["stopped here"]


def test_ops_and_shapes_select(run: Any, measured: list[tuple[str, ...]]) -> None:
    command = ["--op", "rmsnorm", "--op", "scale", "--shape", "[64, 4096]", "--peers", "none"]
    assert run.main(command) == 0
    assert measured == [("norm", "rmsnorm", "[64, 4096]"), ("scale", "scale", "[64, 4096]")]


def test_test_list(run: Any, measured: list[tuple[str, ...]], tmp_path: Path) -> None:
    tests = tmp_path / "tests.txt"
    tests.write_text(
        "# a comment\n\n"
        '--routine norm --shape "[64, 4096]"   # and one behind\n'
        "--routine norm --op layernorm --peers none\n"
        "--routine scale\n"
    )
    out = tmp_path / "out"
    options = ["--routine", "activation", "--peers", "torch", "--json", str(out)]
    assert run.main(["--testlist", str(tests), *options]) == 0
    assert [(a[0], a[1], *a[3:]) for a in measured] == [
        ("norm", "rmsnorm", "torch"),
        ("norm", "layernorm"),
        ("norm", "layernorm"),
        *[("scale", "scale", "torch")] * 5,
    ]
    names = {path.name: len(json.loads(path.read_text())["results"]) for path in out.iterdir()}
    assert names == {"norm_bf16.json": 3, "scale_bf16.json": 5}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ["--routine", "nope"],
            "--routine: unknown nope; legal: activation, ",
        ),
        (
            ["--peers", "nope"],
            "--peers: unknown nope; legal: deepgemm, fa3, flashinfer, flashinfer_auto, "
            "flashinfer_cuda_cores, flashmla, parts, sglang, without, compile, cublas, cudnn, "
            "torch, none",
        ),
        (["--routine", "norm", "--op", "scale"], "--op: unknown scale; legal: rmsnorm; "),
        (["--op", "nope"], "no case matches --op and --shape"),
        (["--routine", "norm", "--dtype", "f32"], "--dtype: norm has no f32; legal: bf16, f16"),
        (["--json", "one.json"], "--json: several routines need a folder, got one.json"),
        (["--testlist", "/nowhere"], "--testlist: "),
    ],
)
def test_wrong_options_are_said_before_anything_is_measured(
    run: Any,
    measured: list[tuple[str, ...]],
    command: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as raised:
        run.main(command)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err
    assert not measured


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--routine scale\n--rooutine norm", ", line 2: unrecognized arguments: --rooutine"),
        ("--routine scale --json x", ", line 1: only the command line may have json"),
        ("--routine nope", ", line 1: --routine: unknown nope"),
        ("# nothing", "has no command line"),
    ],
)
def test_a_wrong_line_of_a_test_list_is_named(
    run: Any,
    measured: list[tuple[str, ...]],
    line: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tests = tmp_path / "tests.txt"
    tests.write_text(line)
    with pytest.raises(SystemExit):
        run.main(["--testlist", str(tests)])
    assert message in capsys.readouterr().err
    assert not measured


def test_a_plot_is_a_picture(run: Any, measured: list[tuple[str, ...]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out.png"
    assert run.main(["--routine", "scale", "--plot", str(out), "--peers", "torch"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_result_file_is_drawn_without_a_gpu(benchmarks: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot, out = benchmarks("plot"), tmp_path / "deep" / "out.svg"
    (scale,), (startup,) = (RESULTS.glob(f"*/{n}.json") for n in ("scale_bf16", "startup"))
    assert plot.main([str(scale), str(out)]) == 0
    text = out.read_text()
    for words in ("scale [65536, 8192]", "share of the ceiling", "bytes moved", "NVIDIA H200"):
        assert words in text
    for wrong in (startup, tmp_path / "none.json"):
        with pytest.raises(SystemExit):
            plot.main([str(wrong), str(out)])


def test_startup_is_a_routine_with_a_command_of_its_own(
    run: Any, measured: list[tuple[str, ...]], benchmarks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(benchmarks("bench_startup"), "main", given.append)
    assert run.main(["--routine", "startup", "--json", "out", "--commit", "abc"]) == 0
    assert given == [["--commit", "abc", "--json", str(Path("out") / "startup.json")]]


# -- peers ----------------------------------------------------------------------------------------


def test_a_peer_is_found_when_its_adapter_and_its_package_are_there(
    benchmarks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers, harness = benchmarks("peers"), benchmarks("_harness")
    adapter = (BENCHMARKS / "peers" / "flashinfer.py").read_text()
    (tmp_path / "made_up.py").write_text(adapter.replace("flashinfer", "made_up_kernels"))
    monkeypatch.setattr(peers, "__path__", [*peers.__path__, str(tmp_path)])
    peers.names.cache_clear()
    libraries = ["deepgemm", "fa3", "flashinfer", "flashinfer_auto", "flashinfer_cuda_cores"]
    libraries += ["flashmla", "made_up", "parts", "sglang", "without"]
    assert peers.names() == (*libraries, "compile", "cublas", "cudnn", "torch")
    case = harness.Case("scale", "[2]", 8, tuple, lambda fn: lambda x: fn(x, 3.0), None)
    wanted = ["made_up", "torch"]
    assert not peers.is_installed("made_up")
    assert peers.functions(case, "scale", wanted) == {}

    package = tmp_path / "site" / "made_up_kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "scale.py").write_text("def scale(x, factor):\n    return x * factor\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert peers.is_installed("made_up")
    found = peers.functions(case, "scale", wanted)
    assert list(found) == ["made_up"]
    assert found["made_up"](2.0) == 6.0
    assert peers.functions(case._replace(op="other"), "scale", wanted) == {}
    assert peers.functions(case, "scale", ["torch"]) == {}
    peers.names.cache_clear()


def test_a_broken_peer_is_not_taken_for_an_absent_one(
    benchmarks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers, harness = benchmarks("peers"), benchmarks("_harness")
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    case = harness.Case("scale", "[2]", 8, tuple, lambda fn: fn)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        peers.functions(case, "scale", ["flashinfer"])
