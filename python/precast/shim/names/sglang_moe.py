# SPDX-License-Identifier: Apache-2.0
"""The mixture of experts that SGLang imports when it starts."""

from __future__ import annotations

from precast.shim.names._unsupported import unsupported

trtllm_mxint4_block_scale_moe = unsupported(
    "trtllm_mxint4_block_scale_moe",
    "SGLang calls it for experts in MXINT4 with --moe-runner-backend flashinfer_trtllm.",
    "--moe-runner-backend auto",
)
