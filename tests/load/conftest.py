# SPDX-License-Identifier: Apache-2.0
"""The load layer: needs built modules, no GPU."""

from __future__ import annotations

import os

from build_support import WHEEL, built

__all__ = ["built"]

#: Tests that need a GPU's number of multiprocessors: test_multiprocessors.py runs them.
collect_ignore = [] if "PRECAST_TEST_MULTIPROCESSORS" in os.environ else ["multiprocessors"]
if WHEEL:  # Their arguments are those of the one module that profile ci has of an op.
    collect_ignore += ["test_binding_overlaps.py", "test_multiprocessors.py"]
