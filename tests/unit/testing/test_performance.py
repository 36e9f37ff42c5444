# SPDX-License-Identifier: Apache-2.0
"""docs/performance.md, README's table and the pictures are made from the committed results."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from bench_support import ROOT, ceiling, timing, write_run, write_startup

from precast.testing import report
from precast.testing.results import load_run, newest

sys.path.insert(0, str(ROOT / "docs"))
import performance

COMMITTED = newest(ROOT / performance.RESULTS)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small tree with results of two commits."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(
        "before\n<!-- performance:begin (x) -->\nold\n<!-- performance:end -->\nafter\n"
    )
    folder = tmp_path / performance.RESULTS / "test-gpu"
    times = {"f [1]": 1.5, "f [2]": 2.5, "f [3]": 3.5}
    write_run(folder / "aaa" / "f_bf16.json", {"f [1]": 9.0}, commit="aaaaaaaaaa")
    newer = "2026-11-22 06:00 UTC"
    write_run(folder / "bbb" / "f_bf16.json", times, commit="bbbbbbbbbb", date=newer)
    write_startup(folder / "bbb" / "startup.json", 4.0, {"rmsnorm(x, w, out=o)": 3.0})
    return tmp_path


def pictures_of(root: Path) -> list:
    wanted = performance.pictures(newest(root / performance.RESULTS))
    return [picture for pictures in wanted.values() for picture in pictures]


# -- what is committed ----------------------------------------------------------------------------


def test_page_and_readme_are_made_from_the_newest_results() -> None:
    page = (ROOT / performance.PAGE).read_text(encoding="utf-8")
    assert page == performance.page(COMMITTED), "Fix: make generate"
    readme = (ROOT / performance.README).read_text(encoding="utf-8")
    block = performance.readme_block(COMMITTED)
    assert readme == performance.with_block(readme, block), "Fix: make generate"


def test_only_the_newest_results_are_kept() -> None:
    old = performance.superseded(ROOT, COMMITTED)
    assert not old, "Fix: make generate"


def test_page_shows_the_pictures_of_every_run_and_no_other() -> None:
    page = (ROOT / performance.PAGE).read_text(encoding="utf-8")
    marks = re.findall(r"^<!-- generated: pictures (\S+) -->$", page, re.MULTILINE)
    wanted = performance.pictures(COMMITTED)
    assert marks == list(wanted)
    assert len(marks) > 20
    assert "![" not in page
    names = [picture.name for pictures in wanted.values() for picture in pictures]
    assert len(set(names)) == len(names) == 2 * len(marks)


def test_runs_of_very_many_shapes_have_the_bars_of_one_model() -> None:
    runs = [run for run in COMMITTED["nvidia-h200"].values() if run.measures_ops]
    for run in runs:
        few = performance.with_few_bars(run).records
        assert len(few) <= performance.MOST_BARS, run.name
        assert [record for record in run.records if record in few] == few
        assert {record["op"] for record in few} == {record["op"] for record in run.records}
    assert any(performance.with_few_bars(run) is not run for run in runs)


# -- the generator --------------------------------------------------------------------------------


def test_of_two_commits_the_newer_one_counts(root: Path) -> None:
    page = performance.page(newest(root / performance.RESULTS))
    assert "Commit bbbbbbb, 2026-11-22; driver 580, CUDA 13.0." in page
    assert "aaaaaaa" not in page
    assert "| f | [2] | bf16 | 2.50 |" in page
    assert "elementwise 4000 GB/s (copy)" in page
    assert "| CPU time of `rmsnorm(x, w, out=o)` | 3 us |" in page
    assert "| import, without torch | 20 ms | - |" in page


def test_page_has_a_row_for_each_engine(root: Path) -> None:
    record = {
        "name": "KV cache auto, decode by xqa",
        "engine": "vllm 0.25.0",
        "other": "FLASH_ATTN",
        "seconds": 21.0,
        "other_seconds": 23.5,
        "tokens_per_second": 9000.4,
        "other_tokens_per_second": 8000.0,
        "tokens": 2048,
        "equal": 1900,
        "ties": 7,
    }
    here = {"date": "2026-11-22 06:00 UTC", "commit": "abc", "gpu": "Test GPU"}
    path = root / performance.RESULTS / "test-gpu" / "bbb" / "vllm.json"
    report.write_json(path, report.document(here, [record]))
    page = performance.page(newest(root / performance.RESULTS))
    assert (
        "| vllm 0.25.0, KV cache auto, decode by xqa | FLASH_ATTN | 1900 of 2048 | 7 "
        "| 21 s | 23.5 s | 9000 | 8000 |" in page
    )
    assert "### Start-up and CPU time" in page


def test_readme_has_one_row_for_each_headline_also_where_a_peer_is_faster() -> None:
    block = performance.readme_block(COMMITTED)
    rows = [line.strip("| ").split(" | ") for line in block.splitlines() if line.startswith("| ")]
    head, _, *rows = rows
    assert [row[0] for row in rows] == [headline.text for headline in performance.HEADLINES]
    assert len(rows) == 8
    cells = [dict(zip(head, row, strict=True)) for row in rows]
    prefill = next(row for row in cells if "prefill" in row["what"])
    assert float(prefill["x best"]) < 1 < float(prefill["x FlashInfer"])
    assert "-" not in (prefill["FlashAttention 3"], prefill["cuDNN"])
    versions = block.partition("\n")[0]
    assert "flashinfer-python " in versions and "fa3_fwd " in versions


def test_a_headline_takes_its_numbers_from_the_results(root: Path, monkeypatch) -> None:
    import_, call = "import, without torch", "CPU time of rmsnorm(x, w, out=o)"
    wanted = [
        performance.Headline("an op", "f", "[2]", "bf16"),
        performance.Headline("a sum", figures=(import_, call)),
        performance.Headline("not measured", "g", "[2]", "bf16"),
    ]
    monkeypatch.setattr(performance, "HEADLINES", wanted)
    block = performance.readme_block(newest(root / performance.RESULTS))
    assert "| an op | bf16 | 2.5 us | 5 us | - | - | 2.00 | 2.00 | bbbbbbb |" in block
    assert "| a sum | - | 20 ms | - | - | - | - | - | abc |" in block
    assert "not measured" not in block
    assert performance.with_block((root / "README.md").read_text(), block).endswith("-->\nafter\n")
    with pytest.raises(ValueError, match="needs one block"):
        performance.with_block("no block", block)


def test_it_makes_what_is_missing_deletes_what_is_old_and_then_nothing(root: Path) -> None:
    old = root / performance.RESULTS / "test-gpu" / "aaa" / "f_bf16.json"
    assert performance.superseded(root, newest(root / performance.RESULTS)) == [old]
    made = performance.make(root)
    assert made == [old, root / performance.PAGE, root / performance.README]
    assert not old.exists()
    assert not performance.make(root)
    page = (root / performance.PAGE).read_text()
    assert "<!-- generated: pictures test-gpu/f_bf16 -->" in page
    assert "startup -->" not in page


def test_pictures_are_drawn_where_they_are_missing_and_then_not_again(root: Path) -> None:
    pytest.importorskip("matplotlib")
    folder, wanted = root / "pictures", pictures_of(root)
    names = {"test-gpu-f-bf16-bars.svg", "test-gpu-f-bf16-roofline.svg"}
    assert {path.name for path in performance.draw_pictures(folder, wanted)} == names
    drawn = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert drawn.keys() == names
    assert all(b"f_bf16: Test GPU, commit bbbbbbb, 2026-11-22" in svg for svg in drawn.values())
    assert performance.draw_pictures(folder, wanted) == []
    shutil.rmtree(folder)
    performance.draw_pictures(folder, wanted)
    assert drawn == {path.name: path.read_bytes() for path in folder.iterdir()}  # the same bytes


def test_a_sample_of_the_pictures_can_be_drawn(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, wanted = root / "pictures", pictures_of(root)
    numbers = iter([1, 0])
    monkeypatch.setattr(performance.random, "randrange", lambda stop: next(numbers) % stop)
    assert len(wanted) == 2
    (path,) = performance.draw_pictures(folder, wanted, one_of=8)
    assert [*folder.iterdir()] == [path] == [folder / wanted[1].name]
    # Those that are there and fresh are kept.
    numbers = iter([1])
    assert performance.draw_pictures(folder, wanted, one_of=8) == []
    assert [*folder.iterdir()] == [path]
    assert performance.draw_pictures(folder, wanted) == [folder / wanted[0].name]


def test_a_changed_number_makes_page_and_pictures_stale(root: Path) -> None:
    pytest.importorskip("matplotlib")
    performance.make(root)
    folder = root / "pictures"
    performance.draw_pictures(folder, pictures_of(root))
    left = folder / "gone-bars.svg"
    left.write_text("of a routine that is no more")
    path = root / performance.RESULTS / "test-gpu" / "bbb" / "f_bf16.json"
    path.write_text(path.read_text().replace('"median": 2.5', '"median": 2.6'))
    assert performance.make(root) == [root / performance.PAGE]
    assert len(performance.draw_pictures(folder, pictures_of(root))) == 3
    assert not left.exists()
    assert performance.draw_pictures(folder, pictures_of(root)) == []


# -- pictures -------------------------------------------------------------------------------------


def test_a_run_with_matrix_products_has_the_classic_roofline(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from precast.testing import plots

    matmul = ceiling("matmul", 800.0, "TFLOP/s")
    timings = {"precast": timing(250_000.0)}
    result = report.Result("attend", "[9]", "bf16", 1 << 20, timings, {}, matmul, 10**14)
    here = {"date": "2026-11-21 06:00 UTC", "commit": "abc", "gpu": "Test GPU"}
    path = tmp_path / "attention_bf16.json"
    report.write_json(path, report.document(here, [result.record()], [ceiling(), matmul]))
    plots.save_roofline(load_run(path), tmp_path / "r.svg")
    text = (tmp_path / "r.svg").read_text()
    assert "matmul ceiling 800 TFLOP/s" in text
    assert "FLOPs a byte moved" in text


def test_colours_differ_and_stay_with_their_peer() -> None:
    from precast.testing import plots

    colours = plots._colours(["flashinfer", "torch", "compile"])
    assert len(set(colours.values())) == 4
    assert len({plots.OURS, *plots.OTHERS}) == 1 + len(plots.OTHERS)
