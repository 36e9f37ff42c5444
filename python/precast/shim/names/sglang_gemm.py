# SPDX-License-Identifier: Apache-2.0
"""GEMMs that SGLang imports when it starts."""

from __future__ import annotations

from precast.shim.names._unsupported import unsupported

bmm_fp8 = unsupported(
    "bmm_fp8",
    "SGLang calls it for the linear layers of ModelOpt's FP8 checkpoints, and for MLA whose "
    "weights are FP8.",
    "SGLANG_FORCE_FP8_MARLIN=1 for linear layers. MLA with FP8 weights needs FlashInfer itself: "
    "precast shim uninstall; pip install flashinfer-python",
)
fp8_blockscale_gemm_sm90 = unsupported(
    "fp8_blockscale_gemm_sm90",
    "SGLang calls it with --fp8-gemm-backend flashinfer_deepgemm.",
    "--fp8-gemm-backend deep_gemm, or triton",
)
mm_mxfp8 = unsupported(
    "mm_mxfp8",
    "SGLang calls it on Blackwell for MXFP8 weights.",
    "--fp8-gemm-backend deep_gemm",
)
