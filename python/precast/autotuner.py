# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's autotuner for engines that call it: precast has nothing to tune."""

from __future__ import annotations

from precast._op.autotuner import (
    AutoTuner,
    autotune,
    get_autotune_process_group,
    set_autotune_process_group,
)
from precast._op.autotuner import _collect_metadata as _collect_metadata

__all__ = [
    "AutoTuner",
    "autotune",
    "get_autotune_process_group",
    "set_autotune_process_group",
]
