# SPDX-License-Identifier: Apache-2.0
"""Every public name, one line an op; each is imported at its first use."""

from precast import loader as loader
from precast._base.version import __version__ as __version__
from precast._jit.policy import freeze as freeze
from precast._op.mode import reference_mode as reference_mode
from precast._ops.elementwise.scale import scale as scale
from precast._runtime.preload import preload as preload
from precast.activation import gelu_and_mul as gelu_and_mul
from precast.activation import gelu_tanh_and_mul as gelu_tanh_and_mul
from precast.activation import silu_and_mul as silu_and_mul
from precast.cascade import merge_state as merge_state
from precast.cascade import merge_state_in_place as merge_state_in_place
from precast.cascade import merge_states as merge_states
from precast.concat_ops import concat_mla_k as concat_mla_k
from precast.decode import (
    BatchDecodeWithPagedKVCacheWrapper as BatchDecodeWithPagedKVCacheWrapper,
)
from precast.decode import (
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper as CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
)
from precast.decode import fast_decode_plan as fast_decode_plan
from precast.decode import single_decode_with_kv_cache as single_decode_with_kv_cache
from precast.norm import fused_add_rmsnorm as fused_add_rmsnorm
from precast.norm import fused_add_rmsnorm_fp8_block_quant as fused_add_rmsnorm_fp8_block_quant
from precast.norm import fused_add_rmsnorm_quant as fused_add_rmsnorm_quant
from precast.norm import fused_rmsnorm_silu as fused_rmsnorm_silu
from precast.norm import gemma_fused_add_rmsnorm as gemma_fused_add_rmsnorm
from precast.norm import gemma_rmsnorm as gemma_rmsnorm
from precast.norm import layernorm as layernorm
from precast.norm import layernorm_quant as layernorm_quant
from precast.norm import rmsnorm as rmsnorm
from precast.norm import rmsnorm_quant as rmsnorm_quant
from precast.norm import rmsnorm_sigmoid_gate as rmsnorm_sigmoid_gate
from precast.page import append_paged_kv_cache as append_paged_kv_cache
from precast.page import (
    append_paged_kv_cache_with_slot_mapping as append_paged_kv_cache_with_slot_mapping,
)
from precast.page import append_paged_mla_kv_cache as append_paged_mla_kv_cache
from precast.page import (
    append_paged_mla_kv_cache_with_slot_mapping as append_paged_mla_kv_cache_with_slot_mapping,
)
from precast.page import (
    fp8_quantize_append_paged_kv_cache_with_slot_mapping as fp8_quantize_append_paged_kv_cache_with_slot_mapping,  # noqa: E501
)
from precast.page import (
    fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping as fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping,  # noqa: E501
)
from precast.page import get_batch_indices_positions as get_batch_indices_positions
from precast.page import get_seq_lens as get_seq_lens
from precast.prefill import (
    BatchPrefillWithPagedKVCacheWrapper as BatchPrefillWithPagedKVCacheWrapper,
)
from precast.prefill import (
    BatchPrefillWithRaggedKVCacheWrapper as BatchPrefillWithRaggedKVCacheWrapper,
)
from precast.prefill import single_prefill_with_kv_cache as single_prefill_with_kv_cache
from precast.prefill import (
    single_prefill_with_kv_cache_return_lse as single_prefill_with_kv_cache_return_lse,
)
from precast.quantization import SfLayout as SfLayout
from precast.quantization import block_scale_interleave as block_scale_interleave
from precast.quantization import dequantize_fp8 as dequantize_fp8
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
from precast.quantization import nvfp4_kv_dequantize_paged as nvfp4_kv_dequantize_paged
from precast.quantization import nvfp4_quantize as nvfp4_quantize
from precast.quantization import packbits as packbits
from precast.quantization import per_block_cast_to_fp8 as per_block_cast_to_fp8
from precast.quantization import per_tensor_quant_fp8 as per_tensor_quant_fp8
from precast.quantization import per_token_cast_to_fp8 as per_token_cast_to_fp8
from precast.quantization import per_token_group_quant_8bit as per_token_group_quant_8bit
from precast.quantization import per_token_quant_fp8 as per_token_quant_fp8
from precast.quantization import quantize_fp8 as quantize_fp8
from precast.quantization import scaled_fp8_quant as scaled_fp8_quant
from precast.quantization import segment_packbits as segment_packbits
from precast.quantization import shuffle_matrix_a as shuffle_matrix_a
from precast.quantization import shuffle_matrix_sf_a as shuffle_matrix_sf_a
from precast.quantization import (
    silu_and_mul_per_token_group_quant as silu_and_mul_per_token_group_quant,
)
from precast.quantization import silu_and_mul_per_token_quant as silu_and_mul_per_token_quant
from precast.quantization import silu_and_mul_quant as silu_and_mul_quant
from precast.quantization import static_quant_fp8 as static_quant_fp8
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
from precast.sampling import Sampled as Sampled
from precast.sampling import chain_speculative_sampling as chain_speculative_sampling
from precast.sampling import min_p_sampling_from_probs as min_p_sampling_from_probs
from precast.sampling import sample as sample
from precast.sampling import sampling_from_logits as sampling_from_logits
from precast.sampling import sampling_from_probs as sampling_from_probs
from precast.sampling import softmax as softmax
from precast.sampling import top_k_mask_logits as top_k_mask_logits
from precast.sampling import top_k_renorm_probs as top_k_renorm_probs
from precast.sampling import top_k_sampling_from_probs as top_k_sampling_from_probs
from precast.sampling import top_k_top_p_sampling_from_logits as top_k_top_p_sampling_from_logits
from precast.sampling import top_k_top_p_sampling_from_probs as top_k_top_p_sampling_from_probs
from precast.sampling import top_p_renorm_probs as top_p_renorm_probs
from precast.sampling import top_p_sampling_from_probs as top_p_sampling_from_probs
from precast.topk import TopKTieBreak as TopKTieBreak
from precast.topk import top_k as top_k
from precast.topk import top_k_page_table_transform as top_k_page_table_transform
from precast.topk import top_k_ragged_transform as top_k_ragged_transform
from precast.trace import fi_trace as fi_trace
