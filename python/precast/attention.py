# SPDX-License-Identifier: Apache-2.0
"""Attention wrappers for prefill and decode at once."""

from __future__ import annotations

from precast._ops.attention.prefill.mixed import BatchAttention
from precast._ops.attention.prefill.sinks import BatchAttentionWithAttentionSinkWrapper

__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"]
