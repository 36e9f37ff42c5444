# SPDX-License-Identifier: Apache-2.0
"""MLA in ``flashinfer.decode``, where FlashInfer has it by another name of its module."""

from __future__ import annotations

from precast._ops.mla.decode import (
    trtllm_batch_decode_with_kv_cache_mla as trtllm_batch_decode_with_kv_cache_mla,
)
from precast._ops.mla.decode import (
    xqa_batch_decode_with_kv_cache_mla as xqa_batch_decode_with_kv_cache_mla,
)
