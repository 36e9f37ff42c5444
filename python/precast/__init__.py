# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's operators as finished parts: CUDA kernels that are compiled ahead of time."""

from __future__ import annotations

from precast import loader as loader  # Reads the manifests and binds the plan to them.
from precast._mode import reference_mode as reference_mode
from precast._version import __version__ as __version__
from precast.activation import gelu_and_mul as gelu_and_mul
from precast.activation import gelu_tanh_and_mul as gelu_tanh_and_mul
from precast.activation import silu_and_mul as silu_and_mul
from precast.jit.policy import freeze as freeze
from precast.norm import fused_add_rmsnorm as fused_add_rmsnorm
from precast.norm import gemma_fused_add_rmsnorm as gemma_fused_add_rmsnorm
from precast.norm import gemma_rmsnorm as gemma_rmsnorm
from precast.norm import layernorm as layernorm
from precast.norm import rmsnorm as rmsnorm
from precast.preload import preload as preload
from precast.quantization import dequantize_fp8 as dequantize_fp8
from precast.quantization import per_block_cast_to_fp8 as per_block_cast_to_fp8
from precast.quantization import per_tensor_quant_fp8 as per_tensor_quant_fp8
from precast.quantization import per_token_cast_to_fp8 as per_token_cast_to_fp8
from precast.quantization import per_token_group_quant_8bit as per_token_group_quant_8bit
from precast.quantization import per_token_quant_fp8 as per_token_quant_fp8
from precast.quantization import quantize_fp8 as quantize_fp8
from precast.quantization import scaled_fp8_quant as scaled_fp8_quant
from precast.quantization import (
    silu_and_mul_per_token_group_quant as silu_and_mul_per_token_group_quant,
)
from precast.quantization import silu_and_mul_per_token_quant as silu_and_mul_per_token_quant
from precast.quantization import silu_and_mul_quant as silu_and_mul_quant
from precast.quantization import static_quant_fp8 as static_quant_fp8
from precast.scale import scale as scale
from precast.trace import fi_trace as fi_trace
