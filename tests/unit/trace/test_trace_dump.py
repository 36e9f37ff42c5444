# SPDX-License-Identifier: Apache-2.0
"""``PRECAST_TRACE_DUMP=1``: one JSON file for each distinct definition, and no call disturbed."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import PACKAGES
from trace_support import definition_model

import precast
from precast import trace
from precast.api_logging import precast_api
from precast.trace import Tensor, TraceTemplate, Var, dump, on_call, registry


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where this process dumps, with nothing written so far."""
    folder = tmp_path / "traces"
    monkeypatch.setenv("PRECAST_TRACE_DUMP", "1")
    monkeypatch.setenv("PRECAST_TRACE_DUMP_DIR", str(folder))
    monkeypatch.setattr(dump, "_written", {})
    monkeypatch.setattr(dump, "_names", {})
    return folder


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the definitions that are written, one for each time."""
    names: list[str] = []
    write = dump._write

    def counted(definition: dict[str, Any]) -> None:
        names.append(definition["name"])
        write(definition)

    monkeypatch.setattr(dump, "_write", counted)
    return names


def run(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", ""),
        "PYTHONPATH": PACKAGES,
        "PRECAST_REFERENCE": "1",
        "PRECAST_TRACE_DUMP": "1",
        "PRECAST_TRACE_DUMP_DIR": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "inductor"),
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-c", f"import torch, precast\n{code}"],
        env=env,
        cwd=folder.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def names(folder: Path) -> set[str]:
    """Every file below ``folder``, without its ending."""
    return {str(p.relative_to(folder))[:-5] for p in folder.rglob("*") if p.is_file()}


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def test_a_distinct_definition_is_written_once(folder: Path, written: list[str]) -> None:
    for _ in range(3):
        for batch in (1, 5):
            on_call(precast.rmsnorm, (rows(batch, 64), rows(64)), {})
            on_call(precast.rmsnorm, (), {"input": rows(batch, 32), "weight": rows(32)})
            on_call(precast.rmsnorm, (rows(batch, 4, 32), rows(32)), {"eps": 1e-5})
            half = torch.float16
            on_call(precast.rmsnorm, (rows(batch, 64, dtype=half), rows(64, dtype=half)), {})
    want = ["rmsnorm_h64", "rmsnorm_h32", "rmsnorm_heads_n4_d32", "rmsnorm_h64_f16"]
    assert written == want
    assert names(folder) == {f"definitions/rmsnorm/{name}" for name in want}
    for path in folder.rglob("*.json"):
        content = json.loads(path.read_text())
        assert content["name"] == path.stem
        definition_model().Definition.model_validate(content)
    (folder / "definitions/rmsnorm/rmsnorm_h64.json").unlink()
    on_call(precast.rmsnorm, (rows(1, 64), rows(64)), {})
    assert not (folder / "definitions/rmsnorm/rmsnorm_h64.json").exists()


def test_nothing_is_written_unless_asked_for(
    folder: Path, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PRECAST_TRACE_DUMP")
    on_call(precast.scale, (rows(2), 1.0), {})
    assert written == []
    assert not folder.exists()


def test_threads_write_it_once(folder: Path, written: list[str]) -> None:
    start = threading.Barrier(8)

    def call() -> None:
        start.wait()
        for size in (16, 32, 48, 64):
            on_call(precast.rmsnorm, (rows(2, size), rows(size)), {})

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = [f"rmsnorm_h{size}" for size in (16, 32, 48, 64)]
    assert sorted(written) == want
    assert names(folder) == {f"definitions/rmsnorm/{name}" for name in want}


def test_calls_of_a_process_and_of_several_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    code = """
x, w = torch.ones(3, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
for _ in range(20):
    assert (precast.rmsnorm(x, w) == 1).all()
    precast.fused_add_rmsnorm(x.clone(), x.clone(), w, eps=1e-5)
    precast.layernorm(x, w.float(), w.float())
    precast.silu_and_mul(x)
    precast.scale(x, 0.5)
"""
    processes = [threading.Thread(target=run, args=(folder, code)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert names(folder) == {
        "definitions/activation/silu_and_mul_i32",
        "definitions/elementwise/scale_2d",
        "definitions/layernorm/layernorm_h64",
        "definitions/rmsnorm/fused_add_rmsnorm_h64",
        "definitions/rmsnorm/rmsnorm_h64",
    }
    for path in folder.rglob("*.json"):
        definition_model().Definition.model_validate_json(path.read_text())


def test_a_rejected_call_is_not_written(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    code = """
try:
    precast.rmsnorm(torch.ones(3, 64), torch.ones(32))
except ValueError as error:
    print(error)
"""
    done = run(folder, code)
    assert "weight must have shape [64]" in done.stdout
    assert done.stderr == ""
    assert not folder.exists()


def test_signatures_and_names_stay(tmp_path: Path) -> None:
    code = """
import inspect
print(inspect.signature(precast.rmsnorm))
print(precast.rmsnorm.__name__, precast.rmsnorm.__qualname__)
print(precast.rmsnorm.fi_trace(torch.ones(1, 2), torch.ones(2))["name"])
"""
    done = run(tmp_path / "traces", code)
    off = run(tmp_path / "traces", code, PRECAST_TRACE_DUMP="0")
    assert done.stdout == off.stdout
    assert done.stdout.endswith("rmsnorm rmsnorm\nrmsnorm_h2_f32\n")


def test_torch_compile_traces_through_and_is_dumped(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    code = """
@torch.compile(fullgraph=True, backend="eager", dynamic=None)
def block(x, w):
    return precast.silu_and_mul(precast.rmsnorm(x, w))

w = torch.ones(64, dtype=torch.bfloat16)
for batch in (2, 3, 4, 5):
    out = block(torch.ones(batch, 64, dtype=torch.bfloat16), w)
    assert out.shape == (batch, 32) and (out - 0.7311).abs().max() < 1e-2, out
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
"""
    done = run(folder, code)
    assert "is not written" not in done.stderr
    assert names(folder) == {
        "definitions/rmsnorm/rmsnorm_h64",
        "definitions/activation/silu_and_mul_i32",
    }


def test_torch_compile_keeps_a_dynamic_size_dynamic(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    code = """
@torch.compile(fullgraph=True, backend="eager", dynamic=True)
def double(x):
    return precast.silu_and_mul(x)

for size in (32, 48, 64):
    assert double(torch.ones(3, size, dtype=torch.bfloat16)).shape == (3, size // 2)
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
"""
    done = run(folder, code)
    assert "is not written" not in done.stderr
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_a_warning_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file")
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        on_call(precast.scale, (rows(2), 1.0), {})
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("the trace of a call of scale is not written: ")
    assert str(folder) in caplog.messages[0]
    folder.unlink()
    on_call(precast.scale, (rows(2), 1.0), {})
    assert len(names(folder)) == 1, "a later call writes what the disk rejected"


def test_a_failed_write_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", no)
    on_call(precast.scale, (rows(2), 1.0), {})
    assert names(folder) == set()
    assert "OSError: disk full" in caplog.text


def scaled_reference(x: torch.Tensor) -> torch.Tensor:
    return x


TEMPLATE = TraceTemplate(
    op_type="elementwise",
    name_prefix="scaled",
    description="Nothing.",
    axes={"*size": Var()},
    inputs={"x": Tensor(["*size"])},
    outputs={"output": Tensor(["*size"], dtype_from="x")},
    reference=scaled_reference,
)


@pytest.fixture
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_traced", dict(registry._traced))
    yield


@pytest.mark.usefixtures("_own_registry")
def test_without_a_dump_the_decorator_returns_the_function_itself() -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x

    assert precast_api(trace=TEMPLATE)(scaled) is scaled
    assert [t for function, t in trace.registered() if function is scaled] == [TEMPLATE]
    assert precast_api()(scaled) is scaled


@pytest.mark.usefixtures("_own_registry")
def test_two_functions_of_one_name_are_a_warning(
    folder: Path, written: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    @precast_api(trace=TEMPLATE)
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x

    @precast_api(trace=TEMPLATE)
    def scaled_again(x: torch.Tensor) -> torch.Tensor:
        return x

    for _ in range(2):
        scaled(rows(1))
        scaled_again(rows(1))
    assert written == ["scaled"]
    assert len(caplog.messages) == 1
    assert "another definition of this process is called scaled: that of" in caplog.text
    assert "give <TraceTemplate scaled> another name_prefix" in caplog.text


@pytest.mark.usefixtures("_own_registry")
def test_with_a_dump_an_error_of_the_op_goes_through(folder: Path, written: list[str]) -> None:
    @precast_api(trace=TEMPLATE)
    def scaled(x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0:
            raise KeyError("empty")
        return x + 1

    with pytest.raises(KeyError, match="empty"):
        scaled(rows(0))
    assert written == []
    assert scaled(x=rows(1)).item() == 2
    assert written == ["scaled"]
