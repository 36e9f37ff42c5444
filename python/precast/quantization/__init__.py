# SPDX-License-Identifier: Apache-2.0
"""Quantisation and dequantisation, with the scales that engines and GEMMs use."""

from __future__ import annotations

from precast.quantization.dequantize import dequantize_fp8 as dequantize_fp8
from precast.quantization.per_block import per_block_cast_to_fp8 as per_block_cast_to_fp8
from precast.quantization.per_block import quantize_fp8 as quantize_fp8
from precast.quantization.per_tensor import per_tensor_quant_fp8 as per_tensor_quant_fp8
from precast.quantization.per_tensor import scaled_fp8_quant as scaled_fp8_quant
from precast.quantization.per_tensor import static_quant_fp8 as static_quant_fp8
from precast.quantization.per_token import per_token_quant_fp8 as per_token_quant_fp8
from precast.quantization.per_token_group import per_token_cast_to_fp8 as per_token_cast_to_fp8
from precast.quantization.per_token_group import (
    per_token_group_quant_8bit as per_token_group_quant_8bit,
)
from precast.quantization.silu_and_mul import (
    silu_and_mul_per_token_quant as silu_and_mul_per_token_quant,
)
from precast.quantization.silu_and_mul import silu_and_mul_quant as silu_and_mul_quant
from precast.quantization.silu_and_mul_group import (
    silu_and_mul_per_token_group_quant as silu_and_mul_per_token_group_quant,
)
