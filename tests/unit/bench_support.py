# SPDX-License-Identifier: Apache-2.0
"""Made-up results, and the benchmarks' folder on ``sys.path`` for a test."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from precast.testing import Ceiling, Timing, report

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results" / "nvidia-h200"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``import run`` and the like; the modules are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        where = getattr(sys.modules[name], "__file__", None) or ""
        if where.startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments of the cases are made on the CPU, where the references run."""
    for name in ("randn", "empty"):
        real = getattr(torch, name)

        def make(*args: Any, real: Callable = real, **keywords: Any) -> torch.Tensor:
            return real(*args, **{**keywords, "device": "cpu"})

        monkeypatch.setattr(torch, name, make)


def timing(us: float, spread: float = 0.1) -> Timing:
    return Timing.of_milliseconds([us * 1e-3 * f for f in (1 - spread, 1.0, 1 + spread)])


def ceiling(name: str = "elementwise", best: float = 4000.0, unit: str = "GB/s") -> Ceiling:
    return Ceiling(name, best, "copy", {"copy": best}, unit)


def write_run(
    path: Path,
    times: dict[str, float],
    *,
    roof: float = 4000.0,
    spread: float = 0.01,
    date: str = "2026-11-21 06:00 UTC",
    commit: str = "0123456789abcdef",
    peer: float | None = 2.0,
) -> Path:
    """A result file: microseconds by "op shape", the peer slower by a factor."""
    limit = ceiling(best=roof)
    results = []
    for name, us in times.items():
        op, shape = name.split(" ", 1)
        timings = {"precast": timing(us, spread)}
        if peer is not None:
            timings["flashinfer"] = timing(us * peer, spread)
        moved = int(us * 1e3 * roof * 0.5)  # half of the ceiling
        cpu = {"precast": timing(3.0)}
        results.append(report.Result(op, shape, "bf16", moved, timings, cpu, limit))
    here = {"date": date, "commit": commit, "gpu": "Test GPU", "driver": "580", "cuda": "13.0"}
    data = report.document(here, [r.record() for r in results], [limit])
    report.write_json(path, data)
    return path


def write_startup(path: Path, add: float, calls: dict[str, float]) -> Path:
    """A startup file: CPU microseconds of calls, and of the torch.add that they are judged by."""
    records: list[dict[str, Any]] = [
        {"name": "import, without torch", "seconds": 0.02, "flashinfer": None, "note": ""}
    ]
    for name, us in {**calls, "torch.add(x, x, out=o)": add}.items():
        t = timing(us, 0.02)
        spans = {"seconds": t.median, "p20": t.p20, "p80": t.p80}
        records.append({"name": f"CPU time of {name}", **spans})
    here = {"date": "2026-11-21 06:00 UTC", "commit": "abc", "gpu": "Test GPU"}
    report.write_json(path, report.document(here, records))
    return path


def rewrite(path: Path, **changes: Any) -> None:
    """Change keys of a result file."""
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, **changes}))
