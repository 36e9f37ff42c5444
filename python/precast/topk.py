# SPDX-License-Identifier: Apache-2.0
"""The k largest elements of rows, and what sparse attention makes of them."""

from __future__ import annotations

from precast._ops.topk.top_k import TopKTieBreak as TopKTieBreak
from precast._ops.topk.top_k import can_implement_filtered_topk as can_implement_filtered_topk
from precast._ops.topk.top_k import top_k as top_k
from precast._ops.topk.top_k import top_k_reference as top_k_reference
from precast._ops.topk.transforms import (
    top_k_page_table_transform as top_k_page_table_transform,
)
from precast._ops.topk.transforms import (
    top_k_page_table_transform_reference as top_k_page_table_transform_reference,
)
from precast._ops.topk.transforms import top_k_ragged_transform as top_k_ragged_transform
from precast._ops.topk.transforms import (
    top_k_ragged_transform_reference as top_k_ragged_transform_reference,
)
from precast._ops.topk.varlen import top_k_varlen as top_k_varlen
from precast._ops.topk.varlen import top_k_varlen_reference as top_k_varlen_reference

#: FlashInfer's other name.
topk = top_k
