# SPDX-License-Identifier: Apache-2.0
"""The parts of the documentation that are made from the code, so that neither can be forgotten."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# The package of this checkout, whatever else is installed.
sys.path.insert(0, str(ROOT / "python"))
