# SPDX-License-Identifier: Apache-2.0
"""The code of docs/trace.md runs, and the page names what there is."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from precast import trace
from precast._base import env as _env
from precast.trace import registry

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "trace.md").read_text(encoding="utf-8")


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(code) >= 4
    # A module, because references are functions of one.
    (tmp_path / "trace_page.py").write_text("\n".join(code))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_traced", dict(registry._traced))
    try:
        page = importlib.import_module("trace_page")
        assert trace.fi_trace(page.scaled_rows, page.row, page.index)["name"].endswith("_w2_f32")
    finally:
        sys.modules.pop("trace_page", None)


def test_the_variables_are_named() -> None:
    assert {_env.TRACE_DUMP.name, _env.TRACE_DUMP_DIR.name} <= set(re.findall(r"PRECAST_\w+", PAGE))
