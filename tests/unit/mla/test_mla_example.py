# SPDX-License-Identifier: Apache-2.0
"""examples/mla_layer.py: a layer of DeepSeek-V2-Lite in reference mode."""

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


def test_the_example_of_a_layer() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(EXAMPLES / "mla_layer.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("): ok") == 2 * 5
    assert "every output is that of the plain form" in done.stdout


@pytest.mark.parametrize("broken", ["scale", "order", "merge"])
def test_the_example_would_notice(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong scale of the cache, a mask that is wrong, and a state that is left out."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import mla_layer

    wrapper = precast.mla.BatchMLAPagedAttentionWrapper
    real_run, real_plan = wrapper.run, wrapper.plan

    def run(self: Any, *args: Any, **options: Any) -> Any:
        return real_run(self, *args, **{**options, "kpe_scale": 0.01})

    def plan(self: Any, *args: Any) -> None:
        real_plan(self, *args[:8], not args[8], *args[9:])

    if broken == "scale":
        monkeypatch.setattr(wrapper, "run", run)
    elif broken == "order":
        monkeypatch.setattr(wrapper, "plan", plan)
    else:
        monkeypatch.setattr(precast, "merge_state", lambda v, s, *other: (v, s))
    kv_dtype = torch.float8_e4m3fn if broken == "scale" else torch.bfloat16
    with precast.reference_mode():
        steps = mla_layer.errors(kv_dtype, torch.device("cpu"), 0)
        found = [next(steps)[1] for _ in range(3 if broken == "scale" else 2)]
    assert found[0] <= mla_layer.TOLERANCES[kv_dtype]
    assert found[-1] > 2 * mla_layer.TOLERANCES[kv_dtype]
