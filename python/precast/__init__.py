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
from precast.quantization import SfLayout as SfLayout
from precast.quantization import block_scale_interleave as block_scale_interleave
from precast.quantization import (
    e2m1_and_ufp8sf_scale_to_float as e2m1_and_ufp8sf_scale_to_float,
)
from precast.quantization import fp4_quantize as fp4_quantize
from precast.quantization import mxfp4_dequantize as mxfp4_dequantize
from precast.quantization import mxfp4_dequantize_host as mxfp4_dequantize_host
from precast.quantization import mxfp4_quantize as mxfp4_quantize
from precast.quantization import mxfp8_dequantize as mxfp8_dequantize
from precast.quantization import mxfp8_dequantize_host as mxfp8_dequantize_host
from precast.quantization import mxfp8_quantize as mxfp8_quantize
from precast.quantization import nvfp4_block_scale_interleave as nvfp4_block_scale_interleave
from precast.quantization import nvfp4_kv_dequantize as nvfp4_kv_dequantize
from precast.quantization import nvfp4_quantize as nvfp4_quantize
from precast.quantization import packbits as packbits
from precast.quantization import segment_packbits as segment_packbits
from precast.scale import scale as scale
from precast.trace import fi_trace as fi_trace
