# SPDX-License-Identifier: Apache-2.0
"""benchmarks/bench_micro_*.py: which cases they measure, and what they make of clocks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_support import BENCHMARKS, ROOT, benchmarks

from precast._plan import wgmma
from precast.testing.results import load_run

__all__ = ["benchmarks"]
NAMES = sorted(path.stem for path in BENCHMARKS.glob("bench_micro_*.py"))
CLOCKS, SECONDS = 1_500_000.0, 1e-3  # of every launch, at 1500 MHz
SMS = 132


@pytest.fixture
def device(benchmarks: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU that takes the same time for everything, and what it was asked for."""
    micro, asked = benchmarks("_micro"), []

    def pool(size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.arange(256, dtype=torch.uint8).repeat(256)[:size].view(dtype)

    def measure(export: str, data: torch.Tensor, *how: Any, roles: int = 1) -> Any:
        asked.append((export, *how))
        if export.endswith("conversion_rate"):
            convert(data.view(torch.uint8), *how)
        return micro.Launch(torch.full((SMS, roles), CLOCKS, dtype=torch.float64), SECONDS)

    def convert(codes: torch.Tensor, out: torch.Tensor, *how: Any) -> None:
        codes = codes.flatten()
        if out.numel() == 128 * 128:  # swizzled panels
            rows, columns = torch.arange(128)[:, None], torch.arange(8)[None]
            panels = codes[: out.numel()].view(128, 2, 8, 8).transpose(0, 1)
            codes = panels[:, rows, columns ^ rows % 8].flatten()
        wide = codes[: out.numel()].view(torch.float8_e4m3fn).float()
        if out.numel() != 128 * 128:
            conversions = benchmarks("bench_micro_conversion").CONVERSIONS
            wide /= conversions[how[0]].factor
        out.copy_(wide)

    real_empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *args, **more: real_empty(*args, **{**more, "device": "cpu"})
    )
    for name in NAMES:
        module = benchmarks(name)
        for made in (pool, measure):
            if hasattr(module, made.__name__):
                monkeypatch.setattr(module, made.__name__, made)
        if hasattr(module, "sms"):
            monkeypatch.setattr(module, "sms", lambda: SMS)
        if hasattr(module, "kernel"):
            monkeypatch.setattr(module, "kernel", lambda export: lambda *args: 60.0)
    return SimpleNamespace(asked=asked, micro=micro, monkeypatch=monkeypatch)


def figures_of(module: Any) -> dict[str, dict[str, float]]:
    rows = [row.record() for row in module.rows()]
    found = {row["name"]: row["figures"] for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_routine_writes_its_cases(
    name: str, device: Any, benchmarks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device.monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    device.monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    here = {"gpu": "Test GPU", "commit": "abcdef0123", "date": "2026-11-24 06:00 UTC"}
    device.monkeypatch.setattr(device.micro, "environment", lambda *args: here)
    files = [f"--{kind}={tmp_path / name}.{kind}" for kind in ("json", "csv")]
    benchmarks(name).main(files)
    run = load_run(tmp_path / f"{name}.json")
    assert run.measures_primitives
    assert not run.measures_ops
    assert len(run.records) == len((tmp_path / f"{name}.csv").read_text().splitlines()) - 1
    assert run.records[0]["name"] in capsys.readouterr().out
    assert json.dumps(run.records, allow_nan=False)


@pytest.mark.parametrize("capability", [None, (10, 0)])
def test_another_gpu_is_an_error(capability: Any, device: Any, benchmarks: Any) -> None:
    device.monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    device.monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(SystemExit, match=r"need a GPU of compute capability 9\.0"):
        benchmarks("bench_micro_copies").main([])


def test_copies(device: Any, benchmarks: Any) -> None:
    module = benchmarks("bench_micro_copies")
    found = figures_of(module)
    assert len(found) == 2 * (1 + 3 + 3)
    figures = found["HBM, atoms of 8 rows, warps 4"]
    assert figures["clk/tile"] == CLOCKS / module.TILES == 1000
    assert figures["B/clk/SM"] == pytest.approx(32.77)
    assert figures["GB/s"] == pytest.approx(32768 * 1500 * SMS / 1e-3 * 1e-9, rel=1e-3)
    assert figures["MHz"] == 1500


def test_rates_of_wgmma(device: Any, benchmarks: Any) -> None:
    """Every instance of FP8, and what a clock is worth."""
    module = benchmarks("bench_micro_wgmma")
    found = figures_of(module)
    asked = {(how[1], *how[2:4]) for how in device.asked if how[0] == "wgmma_rate"}
    fp8 = {
        (columns, how == "new", form == "rs")
        for (how, form), row in wgmma.COLUMNS["e4m3"].items()
        for columns in row
    }
    assert asked == fp8
    rounds = {how[-2] for how in device.asked if how[:2] == ("wgmma_rate", 128) and how[4] == 2}
    assert rounds == {1_000_000 // (4 * 2 * 64)}
    count = rounds.pop() * 4 * 2
    figures = found["e4m3 m64n128k32 RS, warpgroups 2, copies unpaced"]
    assert figures["clk/wgmma"] == pytest.approx(CLOCKS / count, rel=1e-3)
    assert figures["of peak"] == pytest.approx(64 * count / CLOCKS, rel=1e-3)
    flops = 2 * 64 * 128 * 32 * count * SMS / SECONDS
    assert figures["TFLOP/s"] == pytest.approx(flops * 1e-12, rel=1e-3)
    assert "fill B/clk/SM" in figures
    assert "fill B/clk/SM" not in found["bf16 m64n128k16 SS, warpgroups 3"]


def test_what_is_hidden(device: Any, benchmarks: Any) -> None:
    """Of a work of 200 clocks beside one of 300: all, or what 400 clocks for both leave."""
    module = benchmarks("bench_micro_wgmma")
    rounds = module.CLOCKS // 256

    def measure(export: str, data: Any, *how: Any, roles: int) -> Any:
        together = 300 if how[0] else 400
        mma, other = how[-2:]
        times = [together, 200] if mma and other else [300 * bool(mma), 200 * bool(other)]
        return SimpleNamespace(clocks=torch.tensor([times]).double() * rounds)

    device.monkeypatch.setattr(module, "measure", measure)
    found = {row.name: row.figures["hidden"] for row in module.overlaps()}
    assert found["bf16 m64n128k16 RS and exp2"] == 1.0
    assert found["bf16 m64n128k16 SS and softmax"] == 0.5


def test_conversions_are_checked(device: Any, benchmarks: Any) -> None:
    module = benchmarks("bench_micro_conversion")
    found = figures_of(module)
    assert len(found) == 2 * len(module.CONVERSIONS) + 2 * 2 * 2
    rate = 16 * 4 * 128 * module.ROUNDS / CLOCKS
    assert found["to f16, threads 128"] == {"elements/clk/SM": pytest.approx(rate, rel=1e-3)}
    right = module.measure

    def wrong(export: str, data: torch.Tensor, out: torch.Tensor, *how: Any) -> Any:
        launch = right(export, data, out, *how)
        out[9] = 77.0
        return launch

    device.monkeypatch.setattr(module, "measure", wrong)
    for rows in (module.in_registers, module.to_shared_memory):
        with pytest.raises(AssertionError, match=r"f16: 1 of \d+ numbers are wrong"):
            next(iter(rows()))


def test_the_names_of_conversions_are_in_the_order_of_the_kernels(benchmarks: Any) -> None:
    text = (BENCHMARKS / "micro" / "conversion.cu").read_text()
    kernels = text.split("kKernels[] = {")[1].split("};")[0].split(",\n")
    names = [conversion.name for conversion in benchmarks("bench_micro_conversion").CONVERSIONS]
    assert len(kernels) == len(names)
    for kernel, name in zip(kernels, names):
        assert f"To{name.split()[0].capitalize()}" in kernel
        assert ("ByBits" in kernel) == ("by bits" in name)
    assert ["<false>" in kernel for kernel in kernels].index(True) == len(names) - 1


def test_the_page_has_a_table_of_each(device: Any, benchmarks: Any, tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    import performance

    from precast.testing import report
    from precast.testing.results import newest

    here = {"date": "2026-11-24 06:00 UTC", "commit": "abc", "gpu": "Test GPU", "driver": "580"}
    records: Sequence[Any] = [row.record() for row in benchmarks("bench_micro_tensor_map").rows()]
    path = tmp_path / "test-gpu" / "abc" / "micro_tensor_map.json"
    report.write_json(path, report.document(here, records))
    page = performance.page(newest(tmp_path))
    assert "### Primitives: tensor map\n" in page
    assert "| dimensions 5 | 60 |" in page
    assert performance.readme_block(newest(tmp_path)) == ""
