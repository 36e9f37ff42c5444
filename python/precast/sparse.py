# SPDX-License-Identifier: Apache-2.0
"""Attention between blocks of queries and blocks of keys."""

from __future__ import annotations

from precast._ops.attention.sparse.bsr import BlockSparseAttentionWrapper
from precast._ops.attention.sparse.layout import convert_bsr_mask_layout
from precast._ops.attention.sparse.variable import VariableBlockSparseAttentionWrapper

__all__ = [
    "BlockSparseAttentionWrapper",
    "VariableBlockSparseAttentionWrapper",
    "convert_bsr_mask_layout",
]
