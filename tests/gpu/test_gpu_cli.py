# SPDX-License-Identifier: Apache-2.0
"""The command line sees the GPUs as torch does, and chooses modules that serve them."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from precast._ops.gemm import _tuning
from precast._plan.gemm_model import FAMILIES, Choice, ranking
from precast._plan.gemm_table import Shape
from precast._plan.installed import plan


def _json(*words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "precast", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def _capabilities() -> list[str]:
    devices = range(torch.cuda.device_count())
    return ["{}.{}".format(*torch.cuda.get_device_capability(device)) for device in devices]


def test_collect_env_counts_the_gpus_as_torch_does() -> None:
    report = _json("collect-env")
    assert [gpu["capability"] for gpu in report["gpus"]] == _capabilities()
    for gpu in report["gpus"]:
        properties = torch.cuda.get_device_properties(gpu["index"])
        assert gpu["name"] == properties.name
        assert gpu["memory"] >= properties.total_memory * 0.9
    driver = report["driver"]
    assert driver["version"] is not None
    assert driver["cuda"][0] >= int(str(torch.version.cuda).partition(".")[0])
    torch_row = next(row for row in report["packages"] if row["name"] == "torch")
    assert torch_row["cuda"] == torch.version.cuda


def test_install_chooses_the_target_of_every_gpu() -> None:
    report = _json("install", "--dry-run")
    targets = [extra.partition("-")[2] for extra in report["extras"]]
    assert set(targets) == {plan().arch(capability).name for capability in _capabilities()}
    own = int(str(torch.version.cuda).partition(".")[0])
    majors = {int(extra.partition("-")[0].removeprefix("cu")) for extra in report["extras"]}
    assert all(major == own or own not in plan().build.cuda for major in majors)
    for command in report["commands"]:
        pinned = f"torch=={importlib.metadata.version('torch')}"
        assert pinned in command or "--no-deps" in command


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs compute capability 9.0",
)
@pytest.mark.parametrize("operands", FAMILIES)
def test_tune_writes_a_table_that_explain_reads(
    operands: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, table = tmp_path / "shapes", tmp_path / "table.json"
    word = f"operands={operands}"
    shapes.write_text(f"m=16 n=256 k=512 {word}\n")
    (row,) = _json("tune", "gemm", "--shapes", str(shapes), "--out", str(table))["choices"]
    assert (row["m"], row["n"], row["k"]) == (16, 256, 512)
    assert 0 < row["us"] <= row["model_us"]
    monkeypatch.setenv("PRECAST_GEMM_TABLE", str(table))
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    words = "m=16", "n=256", "k=512", word, f"sms={sms}"
    (product,) = _json("explain", "gemm", *words)["products"]
    assert (product["source"], product["choice"]) == ("table", row["choice"])


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs compute capability 9.0",
)
@pytest.mark.parametrize(
    ("operands", "kind"),
    [(operands, kind) for operands, family in FAMILIES.items() for kind in family.kinds],
)
def test_every_product_that_is_tuned_takes_its_choice(operands: str, kind: str) -> None:
    """Two choices give the same product, and a third one, which does not exist, is refused."""
    shape = Shape(kind, 1 if kind == "plain" else 2, 128, 256, 512, operands)
    given = _tuning.arguments(shape, torch.device("cuda"))
    results = []
    for choice in [c for c, _ in ranking(shape.problem(132), operands)][:2]:
        given[-1].fill_(float("nan"))
        _tuning.call(shape, choice)(*given)
        results.append(given[-1].clone())
    assert results[0].isfinite().all()
    torch.testing.assert_close(*results, rtol=2.0**-7, atol=1e-2)
    with pytest.raises(ValueError, match="must be -1 or"):
        _tuning.call(shape, Choice(10**6, operands))(*given)
