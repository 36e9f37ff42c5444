# SPDX-License-Identifier: Apache-2.0
"""Trace templates of prefill."""

from __future__ import annotations

SINGLE_PREFILL = None
