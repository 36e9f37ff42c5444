# SPDX-License-Identifier: Apache-2.0
"""Decode attention over a block table, with the arguments of FlashInfer's ``xqa``."""

from __future__ import annotations

from precast._ops.attention.functional.xqa import xqa, xqa_reference

__all__ = ["xqa", "xqa_reference"]
