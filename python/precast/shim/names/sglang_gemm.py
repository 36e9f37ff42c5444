# SPDX-License-Identifier: Apache-2.0
"""GEMMs that SGLang imports when it starts."""

from __future__ import annotations

from precast.shim.names._unsupported import unsupported

mm_mxfp8 = unsupported(
    "mm_mxfp8",
    "SGLang calls it on Blackwell for MXFP8 weights.",
    "--fp8-gemm-backend deep_gemm",
)
