# SPDX-License-Identifier: Apache-2.0
"""What vLLM's attention backend imports of ``flashinfer.page``, and precast lacks."""

from __future__ import annotations

from precast.shim.names._unsupported import unsupported

nvfp4_quantize_append_paged_kv_cache_with_slot_mapping = unsupported(
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "vLLM calls it for a KV cache in NVFP4.",
    "--kv-cache-dtype fp8, or auto",
)
