# SPDX-License-Identifier: Apache-2.0
"""examples/moe_block.py: mixtures of experts of three models in reference mode."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import precast

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"


def test_the_example_of_three_models() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(EXAMPLES / "moe_block.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("): ok") >= 8
    assert "every output is that of the plain form in fp32" in done.stdout


@pytest.mark.parametrize("broken", ["halves", "rank", "weights", "biases"])
def test_the_example_would_notice(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up in the wrong order, another rank's experts, and weights that are left out."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import moe_block

    real = precast.cutlass_fused_moe

    def run(x: Any, experts: Any, weights: Any, fc1: Any, *others: Any, **options: Any) -> Any:
        if broken == "halves":
            fc1 = fc1.view(torch.uint8).roll(fc1.shape[1] // 2, 1).view(fc1.dtype)
        elif broken == "rank":
            options["ep_rank"] = (options["ep_rank"] + 1) % options["ep_size"]
        elif broken == "biases":
            del options["fc2_expert_biases"]
        else:
            weights = None
        return real(x, experts, weights, fc1, *others, **options)

    which = {"rank": 1, "biases": 2}.get(broken, 0)
    shape = moe_block.FEW[which]._replace(hidden=128, inter=128)
    with precast.reference_mode():
        good = next(moe_block.errors(shape, torch.device("cpu"), 0))[1]
        monkeypatch.setattr(precast, "cutlass_fused_moe", run)
        bad = next(moe_block.errors(shape, torch.device("cpu"), 0))[1]
    limit = moe_block.TOLERANCES[shape.name]
    assert good <= limit
    assert bad > 2 * limit
