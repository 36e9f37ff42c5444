# SPDX-License-Identifier: Apache-2.0
"""Tuning tables: what a file may say, and which calls take its choices."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from precast._base.errors import EnvironmentVariableError
from precast._ops.gemm import _tuned
from precast._ops.gemm.fp8_gemm import _GEMM, _GEMM_SM90
from precast._ops.gemm.fp8_grouped import _COUNTED, _INDEXED, _RANGES
from precast._ops.gemm.grouped_mm import _GROUPED_SM90
from precast._ops.gemm.mm_bf16 import _BMM_SM90, _MM_BOTH, _MM_SM90
from precast._ops.gemm.scaled_mm import _BMM_SM90 as _SCALED_BMM_SM90
from precast._ops.gemm.scaled_mm import _GROUPED_SM90 as _SCALED_GROUPED_SM90
from precast._ops.gemm.scaled_mm import _MM_SM90 as _FP8_MM_SM90
from precast._ops.gemm.scaled_mm import _SCALED_MM_SM90
from precast._plan import gemm_table
from precast._plan.gemm_model import FAMILIES, Problem, by_name, choices, ranking
from precast._plan.gemm_table import Shape

PLAIN = Shape("plain", 1, 64, 256, 512)


def row(shape: Shape = PLAIN, choice: str = "64x64swapped", **others: Any) -> dict[str, Any]:
    return {**shape._asdict(), "choice": choice, "us": 1.0, **others}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write rows to a table that is in use."""
    path = tmp_path / "table.json"
    monkeypatch.setenv("PRECAST_GEMM_TABLE", str(path))

    def write(*rows: dict[str, Any], sms: int = 132) -> Path:
        gemm_table.write(path, "a GPU", sms, rows)
        gemm_table._read.cache_clear()
        return path

    yield write
    gemm_table._read.cache_clear()


def test_a_table_is_read_as_it_was_written(table: Any) -> None:
    grouped = Shape("masked", 8, 16, 256, 512)
    sixteen = PLAIN._replace(operands="bf16")
    path = table(row(), row(grouped, "256x128+shares_a"), row(sixteen, "16x64swapped@3"))
    found = gemm_table.current()
    assert found is not None
    assert (found.path, found.gpu, found.sms) == (path, "a GPU", 132)
    assert {shape: choice.name for shape, choice in found.choices.items()} == {
        PLAIN: "64x64swapped",
        grouped: "256x128+shares_a",
        sixteen: "16x64swapped@3",
    }
    assert f"3 shapes, measured on a GPU with 132 multiprocessors, sha256 {found.digest}" in str(
        found
    )


def test_no_table_is_in_use_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRECAST_GEMM_TABLE", raising=False)
    assert gemm_table.current() is None

    def launch() -> None: ...

    assert _tuned.by_table("gemm_fp8_nt_groupwise", launch, 0) is launch


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "is not a table of gemm with schema 2"),
        ('{"schema": 1, "op": "fp8_gemm_sm90"}', "is not a table of gemm with schema 2"),
        ({"sms": "132"}, "must have gpu"),
        ({"choices": {}}, "must have gpu"),
        ({"choices": [1]}, r"choices\[0\] must have operands \(fp8_block, "),
        ({"choices": [row(kind="odd")]}, r"choices\[0\] must have kind \(plain, masked"),
        ({"choices": [row(m=True)]}, r"choices\[0\] must have"),
        ({"choices": [row(k=-1)]}, r"choices\[0\] must have"),
        ({"choices": [row(operands="e5m2")]}, r"choices\[0\] must have operands \(fp8_block, "),
        ({"choices": [row(operands=["bf16"])]}, r"choices\[0\] must have operands \(fp8_block, "),
        ({"choices": [row(operands="bf16", kind="masked")]}, r"kind \(plain, batched, ranges\)"),
        ({"choices": [row(choice="1x1")]}, "choice '1x1' is unknown; legal: 128x192, "),
        (
            {"choices": [row(Shape("contiguous", 2, 256, 256, 512), "256x128")]},
            "choice '256x128' is unknown; legal: 128x192, ",
        ),
        ({"choices": [row(), row(choice="128x64")]}, r"choices\[1\] has the shape of another"),
    ],
)
def test_a_file_that_is_no_table_is_an_error_with_its_fix(
    text: Any, message: str, table: Any
) -> None:
    path = table()
    if isinstance(text, dict):
        text = json.dumps({**json.loads(path.read_text()), **text})
    path.write_text(text)
    with pytest.raises(EnvironmentVariableError, match=f"PRECAST_GEMM_TABLE=.*: .*{message}") as e:
        gemm_table.current()
    assert "Fix: write it again with `precast tune gemm`" in str(e.value)


def test_a_missing_file_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRECAST_GEMM_TABLE", str(tmp_path / "none.json"))
    with pytest.raises(EnvironmentVariableError, match=r"none\.json: cannot be read"):
        gemm_table.current()


def calls() -> dict[str, tuple[Any, Shape, tuple[Any, ...]]]:
    """For each kind: its exports, a shape, and what the launch gets before the choice."""
    a, b = torch.empty(64, 512), torch.empty(256, 512)
    grouped = torch.empty(8, 256, 512)
    return {
        "plain": (_GEMM_SM90, PLAIN, (a, b, None, None, None, True, True, 1)),
        "masked": (
            _COUNTED[1],
            Shape("masked", 8, 16, 256, 512),
            (torch.empty(8, 64, 512), grouped, None, None, None, None, 16),
        ),
        "contiguous": (
            _INDEXED[1],
            Shape("contiguous", 8, 1024, 256, 512),
            (torch.empty(1024, 512), grouped, None, None, None, None),
        ),
        "ranges": (
            _RANGES[1],
            Shape("ranges", 8, 13, 256, 512),
            (torch.empty(100, 512), grouped, None, None, None, None, True),
        ),
        "mm_bf16": (_MM_SM90, PLAIN._replace(operands="bf16"), (a, b.T, None, None)),
        "bmm_bf16": (
            _BMM_SM90,
            Shape("batched", 8, 64, 256, 512, "bf16"),
            (torch.empty(8, 64, 512), grouped.mT, None),
        ),
        "grouped_mm_bf16": (
            _GROUPED_SM90,
            Shape("ranges", 8, 13, 256, 512, "bf16"),
            (torch.empty(100, 512), grouped, None, None),
        ),
        "scaled_mm": (
            _SCALED_MM_SM90,
            PLAIN._replace(operands="fp8_row"),
            (a, b.T, None, None, None, None),
        ),
        "mm_fp8": (_FP8_MM_SM90, PLAIN._replace(operands="fp8_row"), (a, b, None, None)),
        "bmm_fp8": (
            _SCALED_BMM_SM90,
            Shape("batched", 8, 64, 256, 512, "fp8_row"),
            (torch.empty(8, 64, 512), grouped.mT, None, None, None),
        ),
        "grouped_mm_fp8": (
            _SCALED_GROUPED_SM90,
            Shape("ranges", 8, 13, 256, 512, "fp8_row"),
            (torch.empty(100, 512), grouped, None, None, None),
        ),
    }


@pytest.mark.parametrize("kind", calls())
def test_a_call_takes_the_choice_of_its_shape(
    kind: str, table: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    export, shape, given = calls()[kind]
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(_tuned, "_said", set())
    table(row(shape, "128x128"))
    taken: list[tuple[Any, ...]] = []
    with caplog.at_level(logging.INFO, logger="precast"):
        launch = export.adapt(lambda *args: taken.append(args), 0)
    assert "products of cuda:0 choose their tiles by " in caplog.text
    number = by_name(shape.operands)["128x128"].number
    launch(*given, -1, True)
    launch(*given, 5, False)  # What the caller chooses stays.
    other = (given[0][..., :256], *given[1:])
    launch(*other, -1, True)
    assert [args[-2:] for args in taken] == [(number, True), (5, False), (-1, True)]
    assert all(args[0] is x for args, x in zip(taken, (given[0], given[0], other[0])))


def test_a_table_of_another_gpu_is_not_used_and_says_so(
    table: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    properties = SimpleNamespace(multi_processor_count=114)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(_tuned, "_said", set())
    table(row())

    def launch() -> None: ...

    with caplog.at_level(logging.WARNING, logger="precast"):
        assert _tuned.by_table("gemm_fp8_nt_groupwise", launch, 0) is launch
        assert _tuned.by_table("gemm_fp8_nt_groupwise", launch, 0) is launch
    (record,) = caplog.records
    assert "not used for cuda:0, which has 114 multiprocessors" in record.getMessage()


def test_kernels_for_every_gpu_have_no_table() -> None:
    assert _GEMM.adapt is None and _COUNTED[0].adapt is None and _MM_BOTH[0].adapt is None


@pytest.mark.parametrize("operands", FAMILIES)
def test_names_are_those_of_one_choice_each(operands: str) -> None:
    names, found = by_name(operands), choices(operands)
    assert len(names) == len(found)
    assert [names[choice.name] for choice in found] == [*found]
    best = ranking(Problem("plain", 1, 4096, 4096, 7168), operands)
    assert [e.clocks for _, e in best] == sorted(e.clocks for _, e in best)
