# SPDX-License-Identifier: Apache-2.0
"""The parts of the documentation that are generated from the code, so that both always agree."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Import the package of this checkout, not an installed one.
sys.path.insert(0, str(ROOT / "python"))
