# SPDX-License-Identifier: Apache-2.0
"""Which calls are dumped, and how much of them: choice, limits, disks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from precast.api_logging import precast_api
from precast.api_logging.replay import replay
from precast.errors import MissingPackageError

pytest.importorskip("safetensors")


def log(tmp_path: Path) -> str:
    return (tmp_path / "log.txt").read_text()


def test_other_users_cannot_read_a_dump(ops, dumps):
    ops.plain(torch.ones(2))
    assert dumps()[0].stat().st_mode & 0o777 == 0o700


def test_the_count_is_limited(ops, dumps, monkeypatch, tmp_path):
    monkeypatch.setenv("PRECAST_DUMP_MAX_COUNT", "2")
    for _ in range(4):
        ops.plain(torch.ones(2))
    assert len(dumps()) == 2
    assert log(tmp_path).count("[dump skipped: PRECAST_DUMP_MAX_COUNT=2 calls are dumped]") == 2


def test_the_size_is_limited_with_what_is_there_already(ops, dumps, monkeypatch, tmp_path):
    monkeypatch.setenv("PRECAST_DUMP_MAX_SIZE_GB", "1e-5")
    (tmp_path / "dumps").mkdir()
    (tmp_path / "dumps" / "earlier").write_bytes(bytes(4000))
    ops.plain(torch.ones(1600))  # 6.4 kB more
    assert dumps_of(tmp_path) == []
    assert "more would exceed PRECAST_DUMP_MAX_SIZE_GB=1e-05]" in log(tmp_path)
    ops.plain(torch.ones(1000))  # the inputs fit, the outputs do not
    (dump,) = dumps()
    assert not (dump / "outputs.safetensors").exists()
    assert "[outputs are not dumped: " in log(tmp_path)
    found = replay(dump)
    assert found.verdict == "ran"
    assert "would exceed" in found.note


def dumps_of(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "dumps").iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("include", "exclude", "names"),
    [
        ("plain", "", {"plain"}),
        ("logged_ops.*", "", {"plain", "in_place"}),
        ("other.*, in_*", "", {"in_place"}),
        ("", "pl*", {"in_place"}),
        ("logged_ops.*", "*.in_place", {"plain"}),
        ("Plain", "", set()),
    ],
)
def test_patterns_choose_functions(ops, dumps, monkeypatch, include, exclude, names):
    monkeypatch.setenv("PRECAST_DUMP_INCLUDE", include)
    monkeypatch.setenv("PRECAST_DUMP_EXCLUDE", exclude)
    ops.plain(torch.ones(2))
    ops.in_place(torch.ones(2), torch.ones(2))
    calls = [json.loads((dump / "call.json").read_text()) for dump in dumps()]
    assert {call["function"].rpartition(".")[2] for call in calls} == names


def test_a_function_is_chosen_by_any_name_that_users_know(monkeypatch):
    from precast.api_logging._dump import selected

    known = ("rmsnorm", "precast.rmsnorm", "precast.norm.rmsnorm")
    for pattern in known:
        monkeypatch.setenv("PRECAST_DUMP_INCLUDE", pattern)
        assert selected("precast.norm.rmsnorm"), pattern
        assert not selected("precast.norm.rmsnorm.gemma_rmsnorm"), pattern


def test_a_full_disk_stops_no_program(ops, dumps, monkeypatch, tmp_path):
    from precast.api_logging import _encoding

    def full(path, tensors):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_encoding, "write_tensors", full)
    assert ops.plain(torch.ones(2)).tolist() == [2, 2]
    assert "[dump failed: OSError: [Errno 28] No space left on device]" in log(tmp_path)


@pytest.mark.parametrize("after", [0, 1])
def test_a_disk_that_fills_up_within_a_file_stops_no_program(
    ops, dumps, monkeypatch, tmp_path, after
):
    import safetensors

    real, written = safetensors.serialize_file, []

    def serialize(specs, path):
        written.append(path)
        if len(written) > after:
            raise safetensors.SafetensorError("No space left on device (os error 28)")
        real(specs, path)

    monkeypatch.setattr(safetensors, "serialize_file", serialize)
    assert torch.equal(ops.plain(torch.ones(2)), ops.plain.__wrapped__(torch.ones(2)))
    assert "No space left on device" in log(tmp_path)


def test_without_safetensors_the_command_is_named(ops, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingPackageError, match=r'pip install "precast\[log\]"'):
        ops.plain(torch.ones(2))


def test_inputs_are_synchronised_before_the_function_is_called(dumps, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(_name(fd)) or real(fd))

    def op(x):
        return list(synced)

    before = precast_api(op)(torch.ones(2))
    assert [name for name in before if "." in name] == ["inputs.safetensors", "call.json"]
    assert before[-1] == "dumps"
    assert [name for name in synced if "." in name][2:] == ["outputs.safetensors", "outcome.json"]


def _name(descriptor: int) -> str:
    return Path(f"/proc/self/fd/{descriptor}").readlink().name
