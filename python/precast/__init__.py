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
from precast.rope import apply_llama31_rope as apply_llama31_rope
from precast.rope import apply_llama31_rope_inplace as apply_llama31_rope_inplace
from precast.rope import apply_llama31_rope_pos_ids as apply_llama31_rope_pos_ids
from precast.rope import apply_llama31_rope_pos_ids_inplace as apply_llama31_rope_pos_ids_inplace
from precast.rope import apply_rope as apply_rope
from precast.rope import apply_rope_inplace as apply_rope_inplace
from precast.rope import apply_rope_pos_ids as apply_rope_pos_ids
from precast.rope import apply_rope_pos_ids_inplace as apply_rope_pos_ids_inplace
from precast.rope import apply_rope_with_cos_sin_cache as apply_rope_with_cos_sin_cache
from precast.rope import (
    apply_rope_with_cos_sin_cache_inplace as apply_rope_with_cos_sin_cache_inplace,
)
from precast.rope import mla_rope_quantize_fp8 as mla_rope_quantize_fp8
from precast.rope import qk_rmsnorm_rope as qk_rmsnorm_rope
from precast.rope import rope_quantize_fp8 as rope_quantize_fp8
from precast.rope import (
    rope_quantize_fp8_append_paged_kv_cache as rope_quantize_fp8_append_paged_kv_cache,
)
from precast.scale import scale as scale
from precast.trace import fi_trace as fi_trace
