# SPDX-License-Identifier: Apache-2.0
"""precast_api: what each level writes, where, and what never changes for the caller."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import PACKAGES

import precast
from precast._base.lazy import public_object
from precast._op.dispatch import kernels
from precast.api_logging import _destination, precast_api, public_api
from precast.errors import EnvironmentVariableError

HERE = str(Path(__file__).parents[1])  # where logged_ops lies
LEVELS = ("1", "3", "5", "10")
X = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, 6.0]])


@pytest.fixture
def log(monkeypatch, tmp_path) -> Callable[[], str]:
    """Log into a file; the call reads what is in it."""
    path = tmp_path / "log.txt"
    monkeypatch.setenv("PRECAST_LOGDEST", str(path))
    monkeypatch.setenv("PRECAST_DUMP_DIR", str(tmp_path / "dumps"))
    _destination.close()
    yield lambda: path.read_text() if path.exists() else ""
    _destination.close()


@pytest.fixture
def at(monkeypatch, log) -> Callable[[str, Callable[..., Any]], Callable[..., Any]]:
    """A function decorated at a level."""

    def decorate(level: str, function: Callable[..., Any]) -> Callable[..., Any]:
        monkeypatch.setenv("PRECAST_LOGLEVEL", level)
        if level == "10":
            pytest.importorskip("safetensors")
        return precast_api(function)

    return decorate


def scaled(x: torch.Tensor, factor: float = 2.0, out: Any = None) -> torch.Tensor:
    """x * factor"""
    return x * factor if out is None else out.copy_(x * factor)


def bodies(text: str) -> list[str]:
    """The lines without time, process id and call number."""
    text = re.sub(r"^\[.*?\] precast call \d+ of process \d+", "CALL", text, flags=re.MULTILINE)
    return text.splitlines()


# -- the public API -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({kernel.function for kernel in kernels().values()}))
def test_every_public_op_is_marked(name):
    function = public_object(name)
    function = function.run if inspect.isclass(function) else function
    assert any(function is public for public in public_api().values()), name


def test_at_level_0_the_function_itself_comes_back(monkeypatch):
    for level in ("", "0"):
        monkeypatch.setenv("PRECAST_LOGLEVEL", level)
        assert precast_api(scaled) is scaled
        assert precast_api()(scaled) is scaled
        assert public_api()[f"{__name__}.scaled"] is scaled


@pytest.mark.parametrize("level", LEVELS)
def test_signature_name_and_attributes_stay(at, level):
    def op(x, *, y: int = 3): ...

    op.is_backend_supported = object()
    logged = at(level, op)
    assert logged is not op
    assert inspect.signature(logged) == inspect.signature(op)
    assert (logged.__name__, logged.__wrapped__) == ("op", op)
    assert logged.is_backend_supported is op.is_backend_supported
    assert public_api()[f"{__name__}.{op.__qualname__}"] is logged


def test_a_level_without_meaning_is_an_error_of_the_call_not_of_the_import(at):
    logged = at("2", scaled)
    with pytest.raises(
        EnvironmentVariableError,
        match=r"^PRECAST_LOGLEVEL='2' is not a level; legal: 0, 1, 3, 5, 10$",
    ):
        logged(X)


def test_a_trace_is_registered_with_the_function_that_users_call(monkeypatch):
    registered, called = [], []
    fake = types.ModuleType("precast.trace")
    fake.register = lambda function, trace: registered.append((function, trace))
    fake.fi_trace = lambda function, *args, **kwargs: (function, args, kwargs)
    fake.on_call = lambda function, args, kwargs: called.append((function, args, kwargs))
    monkeypatch.setitem(sys.modules, "precast.trace", fake)
    op = precast_api(trace="template")(lambda x: x + 1)
    assert registered == [(op, "template")]
    assert op.fi_trace(1, a=2) == (op, (1,), {"a": 2})
    assert (op(1), called) == (2, [])

    monkeypatch.setattr("precast.api_logging._tracing", lambda: True)
    op = precast_api(trace="template")(lambda x: 1 // x)
    assert (op(1), called) == (1, [(op, (1,), {})])
    with pytest.raises(ZeroDivisionError):  # a call that fails has no definition
        op(0)
    assert len(called) == 1
    assert registered[-1] == (op, "template")


# -- levels ---------------------------------------------------------------------------------------


def test_level_1_names_the_call(at, log):
    logged = at("1", scaled)
    assert torch.equal(logged(X, 3.0), X * 3)
    assert bodies(log()) == [f"CALL: {__name__}.scaled"]
    assert f"of process {os.getpid()}:" in log()


def test_a_function_that_is_decorated_twice_logs_a_call_once(at, log):
    """At the level of the latest decoration: an op may be imported while logging is on."""
    twice = at("1", at("10", scaled))
    assert torch.equal(twice(X, 3.0), X * 3)
    assert bodies(log()) == [f"CALL: {__name__}.scaled"]
    assert twice.__wrapped__ is scaled


def test_an_op_that_is_imported_while_logging_is_on_logs_a_call_once(tmp_path):
    code = (
        "import torch, precast\n"
        "from precast.api_logging import precast_api\n"
        "with precast.reference_mode():\n"
        "    precast_api(precast.scale)(torch.ones(2), 3.0)\n"
    )
    for traced in ("0", "1"):
        done = python(
            "-c",
            code,
            PRECAST_LOGLEVEL="1",
            PRECAST_TRACE_DUMP=traced,
            PRECAST_TRACE_DUMP_DIR=str(tmp_path),
        )
        assert bodies(done.stdout) == ["CALL: precast.scale"], done.stderr


def test_level_3_describes_inputs_and_outputs(at, log):
    out = torch.empty(3, 2).t()
    at("3", scaled)(X, out=out)
    assert bodies(log()) == [
        f"CALL: {__name__}.scaled",
        "  in  x: float32[2, 3] on cpu, strides [3, 1]",
        "  in  factor: 2.0",
        "  in  out: float32[2, 3] on cpu, strides [1, 2]",
        "CALL: returned",
        "  out result: float32[2, 3] on cpu, strides [1, 2], is out",
    ]


def test_level_3_describes_values_of_every_kind(at, log):
    def op(*args, **kwargs):
        return [X, 1]

    at("3", op)([X, 2], {"k": X[0]}, dtype=torch.float16, thing=_destination, text="a\nb", n=None)
    text = log()
    row = "float32[2, 3] on cpu, strides [3, 1]"
    assert f"  in  args: ([{row}, 2], {{k: float32[3] on cpu, strides [1]}})\n" in text
    assert "dtype: torch.float16, thing: a builtins.module, text: 'a\\nb', n: None" in text
    assert f"  out result: [{row}, 1]\n  out result.0: {row}, is args.0.0\n" in text


def test_arguments_that_share_memory_are_noted(at, log):
    packed = torch.zeros(4, 8)
    x = packed[:, :4]

    def op(x, same, other, far):
        return None

    at("3", op)(x, x, packed[:, 4:], torch.ones(2))
    assert "  in  same is x\n  in  other overlaps the address range of x\nCALL" in "\n".join(
        bodies(log())
    )


def test_an_op_that_writes_its_arguments_logs_them_afterwards(at, log):
    fused = at("5", precast.fused_add_rmsnorm)
    x, residual = torch.ones(2, 4).bfloat16(), torch.full((2, 4), 3.0).bfloat16()
    with precast.reference_mode():
        fused(x, residual, torch.ones(4).bfloat16())
    after = log().split(": returned\n")[1]
    assert "  out result: None\n" in after
    assert "  out residual: bfloat16[2, 4] on cpu, strides [4, 1], written in place\n" in after
    assert "  out residual, written in place: min 4, max 4, mean 4, nan 0, inf 0\n" in after
    assert "  out input, written in place: min 1, max 1, mean 1, nan 0, inf 0\n" in after
    assert "weight" not in after


def test_level_5_counts_and_measures(at, log):
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([1.0, nan, -inf, inf, nan, 6.0, -4.0])
    at("5", lambda x: torch.full((2,), nan))(x)
    assert "  in  x: min -4, max 6, mean 1, nan 2, inf 2\n" in log()
    assert "  out result: no finite element, nan 2, inf 0\n" in log()


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.empty(0, 3), "empty"),
        (torch.tensor(True), "min 1, max 1, mean 1, nan 0, inf 0"),
        (torch.tensor([2**40, 2**40 + 2]), f"mean {2**40 + 1:.6g}, nan 0, inf 0"),
        (torch.tensor([1.0, 3.0]).to(torch.float8_e4m3fn), "min 1, max 3, mean 2, nan 0, inf 0"),
        (torch.tensor([1 + 5j]), "min 1, max 5, mean 3, nan 0, inf 0"),
        (torch.ones(2, device="meta"), "[statistics skipped: the tensor is on the device meta]"),
        (torch.eye(2).to_sparse(), "[statistics skipped: the tensor has the layout torch.sparse_"),
    ],
    ids=["empty", "bool", "int64", "fp8", "complex", "meta", "sparse"],
)
def test_statistics_of_every_kind_of_tensor(at, log, tensor, words):
    at("5", lambda x: None)(tensor)
    assert words in log().split("  in  x: ")[-1]


def test_statistics_go_over_large_tensors_in_pieces(monkeypatch):
    from precast.api_logging import _describe

    x = torch.arange(5000, dtype=torch.float32).view(50, 100)
    x[7, 7] = float("nan")
    whole = [_describe.statistics(view) for view in (x, x.t(), x[:, ::3], x.view(2, 25, 100))]
    for limit in (7, 64, 1000):
        monkeypatch.setattr(_describe, "_CHUNK", limit)
        views = (x, x.t(), x[:, ::3], x.view(2, 25, 100))
        assert [_describe.statistics(view) for view in views] == whole
        assert all(chunk.numel() <= limit for view in views for chunk in _describe._chunks(view))
    assert "min 0, max 4999" in whole[0]


def test_statistics_that_fail_do_not_stop_the_call(at, log, monkeypatch):
    from precast.api_logging import _calls

    def fail(tensor):
        raise torch.OutOfMemoryError("no memory\nmore words")

    monkeypatch.setattr(_calls, "statistics", fail)
    assert torch.equal(at("5", scaled)(X), X * 2)
    assert "  in  x: [statistics skipped: no memory]\n" in log()


@pytest.mark.parametrize("level", LEVELS)
def test_what_the_function_raises_is_what_the_caller_sees(at, log, level):
    def op(x):
        raise KeyError("lost")

    logged = at(level, op)
    with pytest.raises(KeyError, match="lost"):
        logged(X)
    with pytest.raises(TypeError, match=r"op\(\) got an unexpected keyword argument 'y'"):
        logged(X, y=1)
    if level != "1":
        assert ": raised KeyError: 'lost'\n" in log()


def test_the_keyword_of_another_decorator_is_passed_on(at, log):
    from precast.decorators import backend_requirement

    def check(x, factor, out):
        raise ValueError("rejected")

    logged = at("3", backend_requirement({}, common_check=check)(scaled))
    assert torch.equal(logged(X, skip_check=True), X * 2)
    assert "  in  skip_check: True\n" in log()
    with pytest.raises(ValueError, match="rejected"):
        logged(X)


# -- safety ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_compiled_code_logs_nothing_and_has_no_graph_break(at, log, level):
    logged = at(level, precast.scale)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: logged(x, 2.0) + 1, fullgraph=True, backend="eager")
    with precast.reference_mode():
        assert torch.equal(compiled(X), X * 2 + 1)
    assert log() == ""


def test_fake_tensors_have_no_statistics_and_no_dump(at, log):
    from torch._subclasses.fake_tensor import FakeTensorMode

    logged = at("10", scaled)
    with FakeTensorMode() as mode:
        result = logged(mode.from_tensor(X))
    assert result.shape == X.shape
    assert "  in  x: FakeTensor float32[2, 3] on cpu, strides [3, 1]\n" in log()
    assert "[statistics skipped: the tensor is a FakeTensor]" in log()


def test_function_transforms_work(at):
    logged = at("10", scaled)
    assert torch.equal(torch.func.vmap(logged)(X), X * 2)


def test_while_a_graph_is_captured_nothing_waits(at, log, monkeypatch):
    """What the GPU test proves for real, here with the question answered for a CPU tensor."""
    from precast.api_logging import _calls

    monkeypatch.setattr(_calls, "is_capturing", lambda tensors: True)
    monkeypatch.setattr(_calls, "statistics", lambda tensor: pytest.fail("waited"))
    assert torch.equal(at("10", scaled)(X), X * 2)
    assert ": [statistics and dump skipped: a CUDA graph is being captured]\n" in log()
    assert torch.equal(at("5", scaled)(X), X * 2)
    assert ": [statistics skipped: a CUDA graph is being captured]\n" in log()
    assert ": returned\n  out result: float32[2, 3] on cpu, strides [3, 1]\n" in log()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failure_of_the_gpu_is_put_where_it_belongs(at, log, monkeypatch, when):
    from precast.api_logging import _calls

    asked = []

    def statistics(tensor):
        asked.append(tensor)
        if when == "before" or len(asked) > 1:
            raise torch.AcceleratorError("CUDA error: an illegal memory access\nmore words")
        return "fine"

    monkeypatch.setattr(_calls, "statistics", statistics)
    with pytest.raises(torch.AcceleratorError):
        at("5", scaled)(X)
    words = {
        "before": "its inputs cannot be read, because an earlier kernel has failed",
        "after": "failed on the GPU",
    }
    assert f": {words[when]}: CUDA error: an illegal memory access\n" in log()
    assert f"{__name__}.scaled\n" in log()


# -- destinations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_standard_streams(at, monkeypatch, capsys, name):
    monkeypatch.setenv("PRECAST_LOGDEST", name)
    at("1", scaled)(X)
    captured = capsys.readouterr()._asdict()
    assert captured.pop(name[3:]).endswith(f": {__name__}.scaled\n")
    assert list(captured.values()) == [""]


def test_stdout_is_the_default(at, monkeypatch, capsys):
    monkeypatch.delenv("PRECAST_LOGDEST")
    at("1", scaled)(X)
    assert "scaled" in capsys.readouterr().out


def test_a_file_is_appended_to_and_its_folder_is_made(at, monkeypatch, tmp_path):
    place = tmp_path / "new" / "log_%i.txt"
    monkeypatch.setenv("PRECAST_LOGDEST", str(place))
    for _ in range(2):
        at("1", scaled)(X)
        _destination.close()
    text = Path(str(place).replace("%i", str(os.getpid()))).read_text()
    assert text.count("scaled\n") == 2


def test_a_forked_child_has_a_file_of_its_own(tmp_path):
    code = (
        "import os, torch\n"
        "from logged_ops import plain\n"
        "x = torch.ones(2); plain(x)\n"
        "child = os.fork()\n"
        "plain(x)\n"
        "if child: os.waitpid(child, 0); print(os.getpid(), child)\n"
    )
    place = tmp_path / "%i"
    done = python("-c", code, PRECAST_LOGLEVEL="1", PRECAST_LOGDEST=str(place))
    parent, child = done.stdout.split()
    assert (tmp_path / parent).read_text().count("logged_ops.plain\n") == 2
    assert (tmp_path / child).read_text().count("logged_ops.plain\n") == 1


def test_a_place_that_cannot_be_written_is_named(at, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PRECAST_LOGDEST", str(tmp_path / "file" / "log"))
    with pytest.raises(
        EnvironmentVariableError, match=r"PRECAST_LOGDEST='.*/file/log' cannot be written"
    ):
        at("1", scaled)(X)


def test_no_configuration_of_logging_drops_a_line(at, log):
    import logging

    logging.disable(logging.CRITICAL)
    try:
        at("1", scaled)(X)
    finally:
        logging.disable(logging.NOTSET)
    assert "scaled" in log()


def test_lines_are_written_where_handlers_take_no_type_argument(tmp_path):
    """Python 3.10 has no ``logging.StreamHandler[...]``."""
    code = (
        "import logging\n"
        "if hasattr(logging.StreamHandler, '__class_getitem__'):\n"
        "    del logging.StreamHandler.__class_getitem__\n"
        "import torch\n"
        "from logged_ops import plain\n"
        "plain(torch.ones(2))\n"
    )
    done = python("-c", code, PRECAST_LOGLEVEL="1")
    assert "logged_ops.plain\n" in done.stdout, done.stderr


def test_a_key_cannot_look_like_a_line(at, log):
    at("3", lambda options: None)({"a\nCALL": 1, "b": 2, 3: 4})
    assert "  in  options: {'a\\nCALL': 1, b: 2, 3: 4}\n" in log()


# -- a process that dies --------------------------------------------------------------------------


def python(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([PACKAGES, HERE])}
    return subprocess.run(
        [sys.executable, *argv],
        capture_output=True,
        text=True,
        env={**env, **environment},
        timeout=120,
        check=False,
    )


def test_a_process_that_dies_in_a_call_leaves_its_name_and_inputs(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    code = (
        "import torch\n"
        "from logged_ops import plain\n"
        "plain(torch.arange(6).view(2, 3).float(), factor=7.0)\n"
        "print('survived')\n"
    )
    done = python(
        "-c", code, PRECAST_LOGLEVEL="10", PRECAST_LOGDEST=str(tmp_path / "log"), FAULT="abort",
        PRECAST_DUMP_DIR=str(tmp_path / "dumps"),
    )  # fmt: skip
    assert done.returncode == -6
    assert done.stdout == ""
    (dump,) = (tmp_path / "dumps").iterdir()
    assert sorted(p.name for p in dump.iterdir()) == ["call.json", "inputs.safetensors"]
    call = json.loads((dump / "call.json").read_text())
    assert call["function"] == "logged_ops.plain"
    assert call["arguments"] == {"x": {"tensor": "x"}, "factor": 7.0, "out": None}
    with safetensors.safe_open(dump / "inputs.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("x"), torch.arange(6).view(2, 3).float())
    text = (tmp_path / "log").read_text()
    assert "logged_ops.plain\n  in  x: float32[2, 3] on cpu, strides [3, 1]\n" in text
    assert text.rstrip().endswith(f"dump {dump}")
