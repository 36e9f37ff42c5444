# SPDX-License-Identifier: Apache-2.0
"""Dumps of calls: what is in them, and precast replay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_support import PACKAGES

import precast
import precast.cli
from precast.api_logging import precast_api
from precast.api_logging.replay import Replay, find_dumps, replay
from precast.errors import DumpError

pytest.importorskip("safetensors")
HERE = str(Path(__file__).parents[1])  # where logged_ops lies


def only(dumps: Callable[[], list[Path]], **options: Any) -> Replay:
    (dump,) = dumps()
    return replay(dump, **options)


def stored(dump: Path, name: str = "inputs") -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    with safe_open(dump / f"{name}.safetensors", framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


# -- round trips ----------------------------------------------------------------------------------


def test_a_call_is_stored_by_name_and_replayed_bit_for_bit(ops, dumps):
    x = torch.randn(3, 5).bfloat16()
    want = ops.plain(x, 0.3)
    (dump,) = dumps()
    assert set(stored(dump)) == {"x"}
    assert torch.equal(stored(dump)["x"], x)
    assert torch.equal(stored(dump, "outputs")["result"], want)
    found = replay(dump)
    assert (found.verdict, found.ok, found.function) == ("bitwise", True, "logged_ops.plain")
    assert [(o.name, o.dtype, o.shape, o.max_error) for o in found.outputs] == [
        ("result", "bfloat16", (3, 5), 0.0)
    ]


def strided() -> dict[str, torch.Tensor]:
    base = torch.arange(4000, dtype=torch.float32)
    return {
        "transposed": base[:60].view(6, 10).t(),
        "rows of a wider tensor": base[:96].view(8, 12)[:, 3:8],
        "expanded": base[5:9].expand(3, 4),
        "overlapping windows": base[7:40].as_strided((5, 4), (3, 2)),
        "channels last": base[:240].view(2, 3, 5, 8).to(memory_format=torch.channels_last),
        "unaligned": base[1:10],
        "scalar": base[3],
        "empty": base[:0].view(0, 4),
        "fp8": base[:32].to(torch.float8_e4m3fn).view(4, 8)[:, ::2],
        "bool": base[:9] > 4,
        "int64": base[:9].long()[::2],
        "parameter": torch.nn.Parameter(base[:9].clone()),
        "not a number": torch.tensor([float("nan"), float("-inf"), -0.0]),
    }


@pytest.mark.parametrize("name", list(strided()))
def test_strides_alignment_and_bits_of_a_tensor_come_back(dumps, name):
    tensor = strided()[name]
    seen = []

    def look(x):
        seen.append((x.stride(), x.shape, x.dtype, x.data_ptr() % 512))
        flat = x.contiguous().reshape(-1).view(torch.uint8)
        return flat.clone()

    precast_api(look)(tensor)
    assert only(dumps, function=look).verdict == "bitwise"
    if tensor.numel():
        assert seen[0] == seen[1]
    assert seen[0][:3] == seen[1][:3]


def test_arguments_that_share_memory_share_it_again(ops, dumps):
    packed = torch.arange(64.0).view(4, 16)
    ops.in_place(packed[:, :8], packed[:, 8:])  # interleaved, without a common byte
    assert only(dumps).verdict == "bitwise"
    for tensor in stored(dumps()[0]).values():
        assert (tensor.dtype, tensor.shape) == (torch.uint8, (packed.numel() * 4,))


def test_an_output_that_is_an_input_is_stored_once(ops, dumps):
    x = torch.ones(3)
    ops.plain(x, 3.0, out=x)
    (dump,) = dumps()
    assert set(stored(dump)) == {"x"}
    found = replay(dump)
    assert [row.name for row in found.outputs] == ["x", "out", "result"]
    assert found.verdict == "bitwise"
    assert x.tolist() == [3, 3, 3]  # of the first call alone


def test_keys_with_dots_do_not_stand_for_one_another(dumps):
    first = lambda d: d["a"]["b"].clone()  # noqa: E731
    precast_api(first)({"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)})
    assert only(dumps, function=first).verdict == "bitwise"
    assert set(stored(dumps()[0])) == {"d.a.b", "d['a.b']"}


def test_far_slices_of_one_big_tensor_do_not_bring_all_of_it(ops, dumps):
    pool = torch.zeros(10_000_000)
    ops.in_place(pool[:16], pool[-16:])
    assert (dumps()[0] / "inputs.safetensors").stat().st_size < 1000
    assert only(dumps).verdict == "bitwise"


def test_arguments_of_every_kind(ops, dumps):
    first, second = torch.ones(2), torch.zeros(2)
    result = ops.everything(
        (first, second), kind=ops.Kind.MINUS, dtype=torch.float64, device=torch.device("cpu"),
        sizes=[1, 2], scale=float("inf"), bias=torch.ones(3), name={"a": None, "b": "text"},
    )  # fmt: skip
    assert first.tolist() == [-5, -5]
    found = only(dumps)
    assert found.verdict == "bitwise"
    assert [row.name for row in found.outputs] == [
        "caches.0.0", "result.low", "result.all.0", "result.all.1",
    ]  # fmt: skip
    assert torch.equal(stored(dumps()[0], "outputs")["result.all.1"], result["all"][1])


def test_an_op_of_the_library_replays_in_reference_mode_without_a_gpu(dumps):
    op = precast_api(precast.fused_add_rmsnorm)
    x, residual = torch.randn(4, 64).bfloat16(), torch.randn(4, 64).bfloat16()
    with precast.reference_mode():
        op(x, residual, torch.randn(64).bfloat16())
    found = only(dumps)
    assert (found.verdict, found.device) == ("bitwise", "cpu, reference")
    assert {row.name for row in found.outputs} == {"input", "residual"}


# -- what replay finds ----------------------------------------------------------------------------


def test_a_small_difference_is_close_and_a_large_one_is_different(ops, dumps, monkeypatch):
    ops.plain(torch.tensor([1000.0, 2000.0]))
    monkeypatch.setenv("FAULT", "0.001")
    found = only(dumps)
    assert (found.verdict, found.ok) == ("close", True)
    assert 0 < found.outputs[0].max_error < 2e-3
    monkeypatch.setenv("FAULT", "1")
    found = only(dumps)
    assert (found.verdict, found.ok) == ("different", False)
    assert found.outputs[0].max_error == 1.0
    assert "result: 2 of 2 elements differ" in found.outputs[0].problem


def test_other_shapes_dtypes_and_missing_outputs_are_different(ops, dumps):
    ops.plain(torch.ones(3))
    for function, words in (
        (lambda x, factor, out: x[:2], "is torch.float32 of shape (2,)"),
        (lambda x, factor, out: x.half(), "is torch.float16 of shape (3,)"),
        (lambda x, factor, out: None, "the replayed call has no such output"),
    ):
        found = only(dumps, function=function)
        assert (found.verdict, found.outputs[0].problem) == ("different", words)


def test_a_nan_in_the_same_place_is_the_same(ops, dumps, monkeypatch):
    ops.plain(torch.tensor([float("nan"), 5000.0]))
    monkeypatch.setenv("FAULT", "0.001")
    assert only(dumps).verdict == "close"


def test_a_dtype_without_a_tolerance_must_have_the_same_bits(dumps):
    def op(x):
        return x.to(torch.float8_e4m3fnuz)

    precast_api(op)(torch.ones(2))
    assert only(dumps, function=op).verdict == "bitwise"
    found = only(dumps, function=lambda x: (x * 2).to(torch.float8_e4m3fnuz))
    assert (found.verdict, found.outputs[0].max_error) == ("different", 1.0)
    assert "no tolerance is known for its dtype" in found.outputs[0].problem


def test_fp8_is_close_within_a_place(dumps):
    def times(factor):
        return lambda x: torch.cat([x * factor, x * torch.nan]).to(torch.float8_e4m3fn)

    def op(x):
        return times(1.0)(x)

    precast_api(op)(torch.ones(2))
    assert only(dumps, function=op).verdict == "bitwise"
    assert only(dumps, function=times(1.125)).verdict == "close"
    assert only(dumps, function=times(1.5)).verdict == "different"


def test_exceptions(ops, dumps, monkeypatch):
    monkeypatch.setenv("FAULT", "raise")
    with pytest.raises(RuntimeError, match="no luck"):
        ops.plain(torch.ones(2))
    found = only(dumps)
    assert (found.verdict, found.ok, found.note) == ("as recorded", True, "RuntimeError: no luck")
    monkeypatch.delenv("FAULT")
    found = only(dumps)
    assert (found.verdict, found.note) == (
        "different",
        "the dumped call raised RuntimeError: no luck",
    )


def test_a_call_that_only_now_raises(ops, dumps, monkeypatch):
    ops.plain(torch.ones(2))
    monkeypatch.setenv("FAULT", "raise")
    found = only(dumps)
    assert (found.verdict, found.ok) == ("raised", False)


def test_a_call_that_did_not_return_has_nothing_to_compare_with(ops, dumps):
    ops.plain(torch.ones(2))
    for name in ("outcome.json", "outputs.safetensors"):
        (dumps()[0] / name).unlink()
    found = only(dumps)
    assert (found.verdict, found.ok) == ("ran", True)
    assert "did not return" in found.note


def test_what_cannot_be_dumped_is_said_by_name(ops, dumps):
    ops.takes_an_object(torch.ones(2), SimpleNamespace())
    with pytest.raises(
        DumpError, match=r"the argument thing is <class '.*SimpleNamespace'>, which"
    ):
        only(dumps)


def test_a_dump_can_call_no_function_but_of_the_public_api(ops, dumps):
    ops.plain(torch.ones(2))
    path = dumps()[0] / "call.json"
    for name in ("os.system", "logged_ops.torch.save", "no_such_package.f"):
        path.write_text(path.read_text().replace("logged_ops.plain", name))
        with pytest.raises(DumpError, match=f"{name} is not a function of the public API"):
            only(dumps)
        path.write_text(path.read_text().replace(name, "logged_ops.plain"))
    assert only(dumps).ok


@pytest.mark.parametrize("named", ["function", "enum"])
def test_a_dump_imports_no_module_of_its_own_choice(ops, dumps, tmp_path, monkeypatch, named):
    ops.plain(torch.ones(2))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "unknown_module.py").write_text("raise SystemExit(0)")
    path = dumps()[0] / "call.json"
    data = json.loads(path.read_text())
    if named == "function":
        data["function"] = "unknown_module.f"
    else:
        data["arguments"]["x"] = {"enum": ["unknown_module", "Color", "RED"]}
    path.write_text(json.dumps(data))
    with pytest.raises(DumpError, match="a dump does not decide what is imported"):
        only(dumps)
    assert "unknown_module" not in sys.modules


def test_a_dump_that_is_nested_too_deeply(ops, dumps):
    ops.plain(torch.ones(2))
    (dumps()[0] / "call.json").write_text("[" * 100_000)
    with pytest.raises(DumpError, match=r"call\.json cannot be read"):
        only(dumps)


@pytest.mark.parametrize("name", ["call.json", "inputs.safetensors", "outcome.json"])
def test_a_pipe_in_a_dump_is_not_waited_for(ops, dumps, name):
    ops.plain(torch.ones(2))
    (dump,) = dumps()
    (dump / name).unlink()
    os.mkfifo(dump / name)
    if name == "outcome.json":  # As if the call had not returned.
        assert only(dumps).verdict == "ran"
    else:
        with pytest.raises(DumpError, match="not a regular file"):
            only(dumps)


def test_a_damaged_dump_is_an_error_that_names_the_file(ops, dumps, tmp_path):
    ops.plain(torch.ones(2))
    (dump,) = dumps()
    whole = (dump / "inputs.safetensors").read_bytes()
    for data in (b"", whole[:-4], whole[: len(whole) // 2]):
        (dump / "inputs.safetensors").write_bytes(data)
        with pytest.raises(DumpError, match=r"inputs\.safetensors cannot be read"):
            replay(dump)
    (dump / "call.json").write_text("{")
    with pytest.raises(DumpError, match=r"call\.json cannot be read"):
        replay(dump)
    with pytest.raises(DumpError, match=r"is not a dump: neither it nor .* has a call\.json"):
        find_dumps(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("file", "keys", "value"),
    [
        ("call", ["function"], None),
        ("call", ["tensors", "x", "shape"], [9]),  # beyond its block
        ("call", ["tensors", "x", "offset"], -4),
        ("call", ["blocks", "x", "device"], "junk:0"),
        ("call", ["blocks", "x", "device"], 0.5),
        ("call", ["tensors", "x", "dtype"], "int99"),
        ("call", ["arguments", "x"], {"enum": ["no_such_package", "Color", "RED"]}),
        ("outcome", ["raised"], None),
        ("outcome", ["outputs", "result"], "y"),
    ],
)
def test_a_dump_that_was_changed_is_said_to_be_damaged(ops, dumps, file, keys, value):
    ops.plain(torch.ones(2))
    path = dumps()[0] / f"{file}.json"
    data = row = json.loads(path.read_text())
    for key in keys[:-1]:
        row = row[key]
    row.pop(keys[-1])
    if value is not None:
        row[keys[-1]] = value
    path.write_text(json.dumps(data))
    with pytest.raises(DumpError, match=r"is damaged: |cannot be run again"):
        only(dumps)


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def three(ops, dumps, monkeypatch, tmp_path) -> Path:
    """Dumps of three calls; the second one is of a function that is different since."""
    ops.plain(torch.ones(2, 2))
    ops.in_place(torch.ones(2), torch.ones(2))
    monkeypatch.setenv("FAULT", "1")
    ops.plain(torch.ones(3))
    return tmp_path / "dumps"


@pytest.fixture
def command(capsys) -> Callable[..., tuple[int, str, str]]:
    """``precast replay`` in this process: exit code, output, errors."""

    def run(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = precast.cli.main(["replay", *argv])
        return code, *capsys.readouterr()

    return run


def test_command_prints_each_output_and_exits_with_1(three, command, monkeypatch):
    monkeypatch.delenv("FAULT")
    code, out, _ = command(str(three))
    assert code == 1
    lines = out.splitlines()
    assert lines[0].endswith(": logged_ops.plain on cpu, reference: bitwise")
    assert lines[1].split() == ["result", "float32[2,", "2]", "bitwise", "ok"]
    assert [line.split()[0] for line in lines[3:5]] == ["x", "residual"]
    assert lines[5].endswith(": different")
    assert "max error 1 " in lines[6]
    assert "3 of 3 elements differ" in lines[6]
    assert lines[-1] == "3 calls: 2 as dumped, 1 different"


def test_command_for_machines(three, command):
    code, out, _ = command(str(three), "--json")
    rows = json.loads(out)["calls"]
    assert code == 1
    assert [(row["function"], row["verdict"], row["ok"]) for row in rows] == [
        ("logged_ops.plain", "different", False),
        ("logged_ops.in_place", "bitwise", True),
        ("logged_ops.plain", "bitwise", True),
    ]
    assert rows[2]["outputs"] == [
        {"name": "result", "dtype": "float32", "shape": [3], "bitwise": True, "max_error": 0.0,
         "problem": ""}
    ]  # fmt: skip


def test_command_for_one_call_that_is_as_dumped_in_another_process(three):
    argv = [str(find_dumps(three)[0]), "--reference", "--device", "cpu", "--import", "logged_ops"]
    done = subprocess.run(
        [sys.executable, "-m", "precast", "replay", *argv],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([PACKAGES, HERE])},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1 calls: 1 as dumped, 0 different"


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["nowhere"], 2, "error: nowhere is not a dump"),
        (["DUMP", "--import", "no_such_module"], 2, "error: --import no_such_module: No module"),
        (["DUMP", "--import", ""], 2, "error: --import : "),
        (["DUMP", "--import", "../../x"], 2, "error: --import ../../x: "),
        (
            ["DUMP", "--device", "gpu"],
            2,
            "error: --device gpu: legal: cpu, or a GPU such as cuda:1",
        ),
        (["DUMP", "--device", "cuda:9"], 3, "error: --device cuda:9: torch sees no CUDA devices"),
    ],
)
def test_command_rejects(three, command, monkeypatch, argv, code, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    got, _, err = command(*(str(three) if word == "DUMP" else word for word in argv))
    assert message in err
    assert got == code
