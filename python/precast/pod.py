# SPDX-License-Identifier: Apache-2.0
"""Attention of a prefill beside a decode, in tensors or caches of their own."""

from __future__ import annotations

from precast._ops.attention.pod.batch import BatchPODWithPagedKVCacheWrapper
from precast._ops.attention.pod.wrapper import PODWithPagedKVCacheWrapper

__all__ = ["BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"]
