# SPDX-License-Identifier: Apache-2.0
"""What makes ``bench_<name>.py`` a script of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import run


def script(file: str) -> None:
    """Run ``bench_<name>.py`` alone: ``run.py --routine <name>`` and the command line."""
    name = Path(file).stem.removeprefix(run.PREFIX)
    raise SystemExit(run.main(["--routine", name, *sys.argv[1:]]))
