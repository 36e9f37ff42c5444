# SPDX-License-Identifier: Apache-2.0
"""Trace templates of decode."""

from __future__ import annotations

SINGLE_DECODE = None
