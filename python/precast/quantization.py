# SPDX-License-Identifier: Apache-2.0
"""Quantisation and dequantisation, with the scales that engines and GEMMs use."""

from __future__ import annotations

from precast._ops.quantize.block_dequantize import (
    e2m1_and_ufp8sf_scale_to_float as e2m1_and_ufp8sf_scale_to_float,
)
from precast._ops.quantize.block_dequantize import (
    e2m1_and_ufp8sf_scale_to_float_reference as e2m1_and_ufp8sf_scale_to_float_reference,
)
from precast._ops.quantize.block_dequantize import mxfp4_dequantize as mxfp4_dequantize
from precast._ops.quantize.block_dequantize import mxfp4_dequantize_host as mxfp4_dequantize_host
from precast._ops.quantize.block_dequantize import (
    mxfp4_dequantize_reference as mxfp4_dequantize_reference,
)
from precast._ops.quantize.block_dequantize import nvfp4_kv_dequantize as nvfp4_kv_dequantize
from precast._ops.quantize.block_dequantize import (
    nvfp4_kv_dequantize_reference as nvfp4_kv_dequantize_reference,
)
from precast._ops.quantize.block_quantize import fp4_quantize as fp4_quantize
from precast._ops.quantize.block_quantize import fp4_quantize_reference as fp4_quantize_reference
from precast._ops.quantize.block_quantize import mxfp4_quantize as mxfp4_quantize
from precast._ops.quantize.block_quantize import (
    mxfp4_quantize_reference as mxfp4_quantize_reference,
)
from precast._ops.quantize.block_quantize import nvfp4_quantize as nvfp4_quantize
from precast._ops.quantize.block_quantize import (
    nvfp4_quantize_reference as nvfp4_quantize_reference,
)
from precast._ops.quantize.dequantize import dequantize_fp8 as dequantize_fp8
from precast._ops.quantize.mxfp8 import mxfp8_dequantize as mxfp8_dequantize
from precast._ops.quantize.mxfp8 import mxfp8_dequantize_host as mxfp8_dequantize_host
from precast._ops.quantize.mxfp8 import mxfp8_dequantize_reference as mxfp8_dequantize_reference
from precast._ops.quantize.mxfp8 import mxfp8_quantize as mxfp8_quantize
from precast._ops.quantize.mxfp8 import (
    mxfp8_quantize_reference as mxfp8_quantize_reference,
)
from precast._ops.quantize.nvfp4_kv_dequantize_paged import (
    nvfp4_kv_dequantize_paged as nvfp4_kv_dequantize_paged,
)
from precast._ops.quantize.nvfp4_kv_dequantize_paged import (
    nvfp4_kv_dequantize_paged_reference as nvfp4_kv_dequantize_paged_reference,
)
from precast._ops.quantize.nvfp4_kv_quantize import nvfp4_kv_quantize as nvfp4_kv_quantize
from precast._ops.quantize.nvfp4_kv_quantize import (
    nvfp4_kv_quantize_reference as nvfp4_kv_quantize_reference,
)
from precast._ops.quantize.packbits import packbits as packbits
from precast._ops.quantize.packbits import packbits_reference as packbits_reference
from precast._ops.quantize.packbits import segment_packbits as segment_packbits
from precast._ops.quantize.packbits import segment_packbits_reference as segment_packbits_reference
from precast._ops.quantize.per_block import per_block_cast_to_fp8 as per_block_cast_to_fp8
from precast._ops.quantize.per_block import quantize_fp8 as quantize_fp8
from precast._ops.quantize.per_tensor import per_tensor_quant_fp8 as per_tensor_quant_fp8
from precast._ops.quantize.per_tensor import per_token_quant_fp8 as per_token_quant_fp8
from precast._ops.quantize.per_tensor import scaled_fp8_quant as scaled_fp8_quant
from precast._ops.quantize.per_tensor import static_quant_fp8 as static_quant_fp8
from precast._ops.quantize.per_token_group import per_token_cast_to_fp8 as per_token_cast_to_fp8
from precast._ops.quantize.per_token_group import (
    per_token_group_quant_8bit as per_token_group_quant_8bit,
)
from precast._ops.quantize.sf_layout import SfLayout as SfLayout
from precast._ops.quantize.shuffle_matrix import (
    block_scale_interleave as block_scale_interleave,
)
from precast._ops.quantize.shuffle_matrix import (
    block_scale_interleave_reference as block_scale_interleave_reference,
)
from precast._ops.quantize.shuffle_matrix import (
    nvfp4_block_scale_interleave as nvfp4_block_scale_interleave,
)
from precast._ops.quantize.shuffle_matrix import shuffle_matrix_a as shuffle_matrix_a
from precast._ops.quantize.shuffle_matrix import shuffle_matrix_sf_a as shuffle_matrix_sf_a
from precast._ops.quantize.silu_and_mul import (
    silu_and_mul_per_token_group_quant as silu_and_mul_per_token_group_quant,
)
from precast._ops.quantize.silu_and_mul import (
    silu_and_mul_per_token_quant as silu_and_mul_per_token_quant,
)
from precast._ops.quantize.silu_and_mul import silu_and_mul_quant as silu_and_mul_quant
