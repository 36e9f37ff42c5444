# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's name for precast in one process, or precast's ops in an installed FlashInfer."""

from __future__ import annotations

from precast.shim.in_process import install, uninstall
from precast.shim.overlay import overlay, remove_overlay

__all__ = ["install", "overlay", "remove_overlay", "uninstall"]
