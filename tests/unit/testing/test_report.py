# SPDX-License-Identifier: Apache-2.0
"""The one printer and the result files: written, read back, of both schemas."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from bench_support import ceiling, rewrite, timing, write_run

import precast
from precast.testing import environment, report
from precast.testing.results import load_run, newest

MIB = 1 << 20


def _results() -> list[report.Result]:
    return [
        report.Result(
            "rmsnorm",
            "[16384, 4096]",
            "bf16",
            256 * MIB,
            {"precast": timing(80.0), "flashinfer": timing(92.0)},
            {"precast": timing(3.9)},
            ceiling(best=4042.6),
        ),
        report.Result("scale", "[1]", "f32", 8, {"precast": timing(1.5)}, {}),
    ]


def _with_flops() -> report.Result:
    # 100 TFLOP in 0.25 s are 400 TFLOP/s
    matmul = ceiling("matmul", 800.0, "TFLOP/s")
    timings = {"precast": timing(250_000.0)}
    return report.Result("attend", "[9]", "bf16", MIB, timings, {}, matmul, 100 * 10**12)


def _records() -> list[dict]:
    return [result.record() for result in _results()]


def test_table_and_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    rows = report.table(_records())
    assert rows[0][3:] == ["us", "p20-p80", "GB/s", "of ceiling", "CPU us", "x flashinfer"]
    assert rows[1][3:] == ["80.00", "75.20-84.80", "3355.4", "0.830", "3.90", "1.15"]
    assert rows[2][-3:] == ["-", "-", "-"]
    report.print_table(rows)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].index("80.00") + 5 == lines[2].index("1.50") + 4


def test_what_the_bytes_promise_stands_beside_what_was_measured() -> None:
    fused = _results()[0]._replace(
        timings={"precast": timing(80.0), "parts": timing(120.0)}, expected={"parts": 1.8}
    )
    rows = report.table([fused.record(), *_records()])
    column = rows[0].index("x parts by bytes")
    assert [row[column] for row in rows[1:]] == ["1.80", "-", "-"]
    assert rows[1][rows[0].index("x parts")] == "1.50"
    old = {k: v for k, v in fused.record().items() if k != "expected"}  # older files have none
    assert "x parts by bytes" not in report.table([old])[0]


def test_whole_calls_have_columns_of_their_own() -> None:
    plain = _results()[0]._replace(timings={"precast": timing(80.0), "torch": timing(120.0)})
    called = plain._replace(whole={"precast": timing(90.0), "torch": timing(180.0)})
    rows = report.table([called.record(), plain.record()])
    at = rows[0].index("whole us")
    assert [row[at : at + 2] for row in rows] == [
        ["whole us", "x torch whole"],
        ["90.00", "2.00"],
        ["-", "-"],
    ]
    assert "whole_us" not in plain.record()
    assert "whole us" not in report.table([plain.record()])[0]


def test_matrix_products_have_their_own_column_and_ceiling() -> None:
    rows = report.table([*_records(), _with_flops().record()])
    column = rows[0].index("TFLOP/s")
    assert [row[column] for row in rows[1:]] == ["-", "-", "400.0"]
    assert rows[3][column + 1] == "0.500"
    assert len({len(row) for row in rows}) == 1


@pytest.mark.parametrize(
    ("moved", "flops", "name"),
    # 4000 GB/s and 800 TFLOP/s meet at 200 FLOPs a byte.
    [(10**9, 0, "memory"), (10**9, 199 * 10**9, "memory"), (10**9, 201 * 10**9, "matmul")],
)
def test_the_ceiling_that_is_met_first_judges(moved: int, flops: int, name: str) -> None:
    memory, matmul = ceiling("memory", 4000.0), ceiling("matmul", 800.0, "TFLOP/s")
    assert report.limit(moved, flops, memory, matmul).name == name
    assert report.limit(moved, flops, memory, None).name == "memory"


def test_json_comes_back_as_it_was(tmp_path: Path) -> None:
    here = environment("abc123def456", tmp_path)
    path = tmp_path / "deep" / "rms_bf16.json"
    ceilings = [ceiling(best=4200.0401), ceiling("launch", 1.2, "us")]
    failures = [{"op": "scale", "shape": "[2]", "error": "ValueError: no"}]
    report.write_json(path, report.document(here, _records(), ceilings, failures))
    run = load_run(path)
    assert run.name == "rms_bf16"
    assert run.commit == "abc123d"
    assert run.environment["precast"] == precast.__version__
    assert run.ceilings["elementwise"] == {
        "unit": "GB/s",
        "best": 4200.04,
        "kernel": "copy",
        "all": {"copy": 4200.04},
    }
    assert run.ceilings["launch"]["unit"] == "us"
    assert run.records == _records()
    assert run.failures == failures
    assert run.measures_ops
    first = run.records[0]
    assert first["ratio"] == {"flashinfer": 1.15}
    assert first["gpu_us"]["precast"]["median"] == 80.0
    assert (first["share"], first["ceiling"]) == (0.83, "elementwise")


def test_csv_repeats_the_circumstances(tmp_path: Path) -> None:
    here = environment("abc123", tmp_path)
    report.write_csv(tmp_path / "r.csv", report.table(_records()), here)
    with (tmp_path / "r.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["us"] == "80.00"
    assert rows[1]["commit"] == "abc123"


def test_circumstances_state_every_ceiling(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_circumstances({"gpu": "X"}, [ceiling(), ceiling("matmul", 790.4, "TFLOP/s")])
    assert capsys.readouterr().out.splitlines() == [
        "gpu X",
        "ceiling elementwise: 4000 GB/s (copy 4000)",
        "ceiling matmul: 790.4 TFLOP/s (copy 790.4)",
    ]


def test_schema_1_is_read_as_if_it_were_new(tmp_path: Path) -> None:
    spread = {"median": 1.198, "p20": 1.197, "p80": 1.198, "std": 0.001, "samples": 10}
    record = {
        "op": "rmsnorm",
        "shape": "[1, 4096]",
        "dtype": "bf16",
        "bytes_moved": 16384,
        "gbps": 13.7,
        "share_of_elementwise": 0.0031,
        "gpu_us": {"precast": spread},
        "ratio": {},
        "cpu_us": {},
    }
    environment = {"date": "2026-11-21 06:27 UTC", "gpu": "Test GPU", "commit": "abc"}
    ceilings = {"elementwise": {"best": 4389.6, "kernel": "gated product", "all": {}}}
    path = tmp_path / "norm_bf16.json"
    old = {"schema": 1, "environment": environment, "ceilings_gbps": ceilings, "results": [record]}
    path.write_text(json.dumps(old))
    run = load_run(path)
    assert run.ceilings["elementwise"]["unit"] == "GB/s"
    assert run.ceilings["elementwise"]["best"] == 4389.6
    first = run.records[0]
    assert (first["share"], first["ceiling"]) == (0.0031, "elementwise")
    rows = report.table(run.records)
    assert rows[1][:5] == ["rmsnorm", "[1, 4096]", "bf16", "1.20", "1.20-1.20"]
    startup = {"name": "import, without torch", "seconds": 0.03, "flashinfer": None, "note": ""}
    path.write_text(json.dumps({"schema": 1, "environment": environment, "results": [startup]}))
    assert not load_run(path).measures_ops


def test_a_foreign_file_is_rejected(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a.json", {"scale [1]": 1.0})
    rewrite(path, schema=report.SCHEMA + 1)
    with pytest.raises(ValueError, match=r"has schema 3; this version reads 1 to 2"):
        load_run(path)
    for text in ("[]", "{}", "no json", '{"schema": "x"}', '{"schema": 1}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"a\.json is no result file"):
            load_run(path)


def test_newest_goes_by_the_date_inside_for_each_file(tmp_path: Path) -> None:
    dates = {"aaa": "2026-11-22 06:00 UTC", "bbb": "2026-11-21 23:59 UTC"}
    for commit, date in dates.items():
        for name in ("norm_bf16", *["scale_bf16"] * (commit == "bbb")):
            path = tmp_path / "gpu" / commit / f"{name}.json"
            write_run(path, {"scale [1]": 1.0}, date=date, commit=commit)
    found = newest(tmp_path)
    assert list(found) == ["gpu"]
    assert {name: run.commit for name, run in found["gpu"].items()} == {
        "norm_bf16": "aaa",
        "scale_bf16": "bbb",
    }
