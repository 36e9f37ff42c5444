# SPDX-License-Identifier: Apache-2.0
"""Every public name, one line an op; each is imported at its first use."""

from precast import comm as comm
from precast import loader as loader
from precast._base.version import __version__ as __version__
from precast._jit.policy import freeze as freeze
from precast._op.mode import reference_mode as reference_mode
from precast._ops.activation.activation import gelu_and_mul as gelu_and_mul
from precast._ops.activation.activation import gelu_tanh_and_mul as gelu_tanh_and_mul
from precast._ops.activation.activation import silu_and_mul as silu_and_mul
from precast._ops.attention.cascade.merge import merge_state as merge_state
from precast._ops.attention.cascade.merge import merge_state_in_place as merge_state_in_place
from precast._ops.attention.cascade.merge import merge_states as merge_states
from precast._ops.attention.cascade.shared_prefix import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper as BatchDecodeWithSharedPrefixPagedKVCacheWrapper,  # noqa: E501
)
from precast._ops.attention.cascade.shared_prefix import (
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper as BatchPrefillWithSharedPrefixPagedKVCacheWrapper,  # noqa: E501
)
from precast._ops.attention.cascade.wrapper import (
    MultiLevelCascadeAttentionWrapper as MultiLevelCascadeAttentionWrapper,
)
from precast._ops.attention.decode.graphs import (
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper as CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
)
from precast._ops.attention.decode.graphs import fast_decode_plan as fast_decode_plan
from precast._ops.attention.decode.single import (
    single_decode_with_kv_cache as single_decode_with_kv_cache,
)
from precast._ops.attention.decode.wrapper import (
    BatchDecodeWithPagedKVCacheWrapper as BatchDecodeWithPagedKVCacheWrapper,
)
from precast._ops.attention.functional.context import (
    trtllm_batch_context_with_kv_cache as trtllm_batch_context_with_kv_cache,
)
from precast._ops.attention.functional.decode import (
    xqa_batch_decode_with_kv_cache as xqa_batch_decode_with_kv_cache,
)
from precast._ops.attention.functional.fmha_v2 import (
    trtllm_fmha_v2_prefill as trtllm_fmha_v2_prefill,
)
from precast._ops.attention.functional.trtllm_decode import (
    trtllm_batch_decode_with_kv_cache as trtllm_batch_decode_with_kv_cache,
)
from precast._ops.attention.functional.xqa import xqa as xqa
from precast._ops.attention.pod.batch import (
    BatchPODWithPagedKVCacheWrapper as BatchPODWithPagedKVCacheWrapper,
)
from precast._ops.attention.pod.wrapper import (
    PODWithPagedKVCacheWrapper as PODWithPagedKVCacheWrapper,
)
from precast._ops.attention.prefill.mixed import BatchAttention as BatchAttention
from precast._ops.attention.prefill.paged import (
    BatchPrefillWithPagedKVCacheWrapper as BatchPrefillWithPagedKVCacheWrapper,
)
from precast._ops.attention.prefill.ragged import (
    BatchPrefillWithRaggedKVCacheWrapper as BatchPrefillWithRaggedKVCacheWrapper,
)
from precast._ops.attention.prefill.single import (
    single_prefill_with_kv_cache as single_prefill_with_kv_cache,
)
from precast._ops.attention.prefill.single import (
    single_prefill_with_kv_cache_return_lse as single_prefill_with_kv_cache_return_lse,
)
from precast._ops.attention.prefill.sinks import (
    BatchAttentionWithAttentionSinkWrapper as BatchAttentionWithAttentionSinkWrapper,
)
from precast._ops.attention.sparse.bsr import (
    BlockSparseAttentionWrapper as BlockSparseAttentionWrapper,
)
from precast._ops.attention.sparse.variable import (
    VariableBlockSparseAttentionWrapper as VariableBlockSparseAttentionWrapper,
)
from precast._ops.elementwise.concat_mla_kv_quant_fp8 import (
    concat_mla_kv_quant_fp8 as concat_mla_kv_quant_fp8,
)
from precast._ops.elementwise.concat_ops import concat_mla_k as concat_mla_k
from precast._ops.elementwise.scale import scale as scale
from precast._ops.gemm.fp8_gemm import gemm_fp8_nt_groupwise as gemm_fp8_nt_groupwise
from precast._ops.gemm.fp8_grouped import (
    batch_deepgemm_fp8_nt_groupwise as batch_deepgemm_fp8_nt_groupwise,
)
from precast._ops.gemm.fp8_grouped import (
    group_deepgemm_fp8_nt_groupwise as group_deepgemm_fp8_nt_groupwise,
)
from precast._ops.gemm.fp8_grouped import (
    group_gemm_fp8_nt_groupwise as group_gemm_fp8_nt_groupwise,
)
from precast._ops.gemm.grouped_mm import grouped_mm_bf16 as grouped_mm_bf16
from precast._ops.gemm.int4 import grouped_mm_int4 as grouped_mm_int4
from precast._ops.gemm.mm_bf16 import bmm_bf16 as bmm_bf16
from precast._ops.gemm.mm_bf16 import mm_bf16 as mm_bf16
from precast._ops.gemm.mxfp4 import grouped_mm_mxfp4 as grouped_mm_mxfp4
from precast._ops.gemm.router import mm_M1_16_K7168_N128 as mm_M1_16_K7168_N128
from precast._ops.gemm.router import mm_M1_16_K7168_N256 as mm_M1_16_K7168_N256
from precast._ops.gemm.scaled_mm import bmm_fp8 as bmm_fp8
from precast._ops.gemm.scaled_mm import grouped_mm_fp8 as grouped_mm_fp8
from precast._ops.gemm.scaled_mm import mm_fp8 as mm_fp8
from precast._ops.gemm.scaled_mm import scaled_mm as scaled_mm
from precast._ops.gemm.segment_gemm import segment_gemm as segment_gemm
from precast._ops.gemm.segment_wrapper import SegmentGEMMWrapper as SegmentGEMMWrapper
from precast._ops.gemm.tinygemm import tinygemm_bf16 as tinygemm_bf16
from precast._ops.mhc.post import mhc_post as mhc_post
from precast._ops.mhc.pre import mhc_pre_big_fuse as mhc_pre_big_fuse
from precast._ops.mhc.pre import mhc_pre_big_fuse_with_prenorm as mhc_pre_big_fuse_with_prenorm
from precast._ops.mla.decode import (
    trtllm_batch_decode_with_kv_cache_mla as trtllm_batch_decode_with_kv_cache_mla,
)
from precast._ops.mla.decode import (
    xqa_batch_decode_with_kv_cache_mla as xqa_batch_decode_with_kv_cache_mla,
)
from precast._ops.mla.wrapper import (
    BatchMLAPagedAttentionWrapper as BatchMLAPagedAttentionWrapper,
)
from precast._ops.moe.bgmv_moe import bgmv_moe as bgmv_moe
from precast._ops.moe.bgmv_moe_expand import bgmv_moe_expand as bgmv_moe_expand
from precast._ops.moe.bgmv_moe_shrink import bgmv_moe_shrink as bgmv_moe_shrink
from precast._ops.moe.cutlass_fused_moe import cutlass_fused_moe as cutlass_fused_moe
from precast._ops.moe.cutlass_fused_moe import (
    cutlass_fused_moe_workspace_size as cutlass_fused_moe_workspace_size,
)
from precast._ops.moe.fused_topk_deepseek import fused_topk_deepseek as fused_topk_deepseek
from precast._ops.moe.hash_topk import hash_topk as hash_topk
from precast._ops.moe.mixed_gemm import (
    interleave_moe_scales_for_sm90_mixed_gemm as interleave_moe_scales_for_sm90_mixed_gemm,
)
from precast._ops.moe.mixed_gemm import (
    interleave_moe_weights_for_sm90_mixed_gemm as interleave_moe_weights_for_sm90_mixed_gemm,
)
from precast._ops.moe.moe_activation import moe_activation as moe_activation
from precast._ops.moe.moe_finalize import moe_finalize as moe_finalize
from precast._ops.moe.moe_permute import moe_permute as moe_permute
from precast._ops.moe.moe_permute import moe_permute_quant as moe_permute_quant
from precast._ops.moe.moe_scale_columns import moe_scale_columns as moe_scale_columns
from precast._ops.moe.moe_sort import moe_sort as moe_sort
from precast._ops.moe.mono_moe import mono_moe as mono_moe
from precast._ops.norm.fused_add_rmsnorm import fused_add_rmsnorm as fused_add_rmsnorm
from precast._ops.norm.fused_add_rmsnorm import gemma_fused_add_rmsnorm as gemma_fused_add_rmsnorm
from precast._ops.norm.fused_add_rmsnorm_fp8_block_quant import (
    fused_add_rmsnorm_fp8_block_quant as fused_add_rmsnorm_fp8_block_quant,
)
from precast._ops.norm.gated_residual import (
    gated_residual_next_rmsnorm as gated_residual_next_rmsnorm,
)
from precast._ops.norm.gated_residual import gated_residual_rmsnorm as gated_residual_rmsnorm
from precast._ops.norm.layernorm import layernorm as layernorm
from precast._ops.norm.norm_gate import fused_rmsnorm_silu as fused_rmsnorm_silu
from precast._ops.norm.norm_gate import rmsnorm_sigmoid_gate as rmsnorm_sigmoid_gate
from precast._ops.norm.norm_quant import fused_add_rmsnorm_quant as fused_add_rmsnorm_quant
from precast._ops.norm.norm_quant import layernorm_quant as layernorm_quant
from precast._ops.norm.norm_quant import rmsnorm_quant as rmsnorm_quant
from precast._ops.norm.rmsnorm import gemma_rmsnorm as gemma_rmsnorm
from precast._ops.norm.rmsnorm import rmsnorm as rmsnorm
from precast._ops.norm.supports import (
    supports_gated_residual_next_rmsnorm as supports_gated_residual_next_rmsnorm,
)
from precast._ops.norm.supports import (
    supports_gated_residual_rmsnorm as supports_gated_residual_rmsnorm,
)
from precast._ops.norm.supports import (
    supports_rmsnorm_sigmoid_gate as supports_rmsnorm_sigmoid_gate,
)
from precast._ops.paged.append import append_paged_kv_cache as append_paged_kv_cache
from precast._ops.paged.append import (
    append_paged_kv_cache_with_slot_mapping as append_paged_kv_cache_with_slot_mapping,
)
from precast._ops.paged.append import append_paged_mla_kv_cache as append_paged_mla_kv_cache
from precast._ops.paged.append import (
    append_paged_mla_kv_cache_with_slot_mapping as append_paged_mla_kv_cache_with_slot_mapping,
)
from precast._ops.paged.fp8 import (
    fp8_quantize_append_paged_kv_cache_with_slot_mapping as fp8_quantize_append_paged_kv_cache_with_slot_mapping,  # noqa: E501
)
from precast._ops.paged.fp8 import (
    fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping as fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping,  # noqa: E501
)
from precast._ops.paged.positions import get_batch_indices_positions as get_batch_indices_positions
from precast._ops.paged.positions import get_seq_lens as get_seq_lens
from precast._ops.quantize.block_dequantize import (
    e2m1_and_ufp8sf_scale_to_float as e2m1_and_ufp8sf_scale_to_float,
)
from precast._ops.quantize.block_dequantize import mxfp4_dequantize as mxfp4_dequantize
from precast._ops.quantize.block_dequantize import mxfp4_dequantize_host as mxfp4_dequantize_host
from precast._ops.quantize.block_dequantize import nvfp4_kv_dequantize as nvfp4_kv_dequantize
from precast._ops.quantize.block_quantize import fp4_quantize as fp4_quantize
from precast._ops.quantize.block_quantize import mxfp4_quantize as mxfp4_quantize
from precast._ops.quantize.block_quantize import nvfp4_quantize as nvfp4_quantize
from precast._ops.quantize.dequantize import dequantize_fp8 as dequantize_fp8
from precast._ops.quantize.mxfp8 import mxfp8_dequantize as mxfp8_dequantize
from precast._ops.quantize.mxfp8 import mxfp8_dequantize_host as mxfp8_dequantize_host
from precast._ops.quantize.mxfp8 import mxfp8_quantize as mxfp8_quantize
from precast._ops.quantize.nvfp4_append import (
    nvfp4_quantize_append_paged_kv_cache as nvfp4_quantize_append_paged_kv_cache,
)
from precast._ops.quantize.nvfp4_append import (
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping as nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,  # noqa: E501
)
from precast._ops.quantize.nvfp4_kv_dequantize_paged import (
    nvfp4_kv_dequantize_paged as nvfp4_kv_dequantize_paged,
)
from precast._ops.quantize.nvfp4_kv_quantize import nvfp4_kv_quantize as nvfp4_kv_quantize
from precast._ops.quantize.packbits import packbits as packbits
from precast._ops.quantize.packbits import segment_packbits as segment_packbits
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
from precast._ops.quantize.shuffle_matrix import block_scale_interleave as block_scale_interleave
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
from precast._ops.rope.apply_llama31_rope import apply_llama31_rope as apply_llama31_rope
from precast._ops.rope.apply_llama31_rope import (
    apply_llama31_rope_inplace as apply_llama31_rope_inplace,
)
from precast._ops.rope.apply_llama31_rope import (
    apply_llama31_rope_pos_ids as apply_llama31_rope_pos_ids,
)
from precast._ops.rope.apply_llama31_rope import (
    apply_llama31_rope_pos_ids_inplace as apply_llama31_rope_pos_ids_inplace,
)
from precast._ops.rope.apply_rope import apply_rope as apply_rope
from precast._ops.rope.apply_rope import apply_rope_inplace as apply_rope_inplace
from precast._ops.rope.apply_rope import apply_rope_pos_ids as apply_rope_pos_ids
from precast._ops.rope.apply_rope import apply_rope_pos_ids_inplace as apply_rope_pos_ids_inplace
from precast._ops.rope.cos_sin_cache import (
    apply_rope_with_cos_sin_cache as apply_rope_with_cos_sin_cache,
)
from precast._ops.rope.cos_sin_cache import (
    apply_rope_with_cos_sin_cache_inplace as apply_rope_with_cos_sin_cache_inplace,
)
from precast._ops.rope.fused_qk_rmsnorm_rope import (
    fused_qk_rmsnorm_rope as fused_qk_rmsnorm_rope,
)
from precast._ops.rope.qk_rmsnorm_rope import qk_rmsnorm_rope as qk_rmsnorm_rope
from precast._ops.rope.quantize import mla_rope_quantize_fp8 as mla_rope_quantize_fp8
from precast._ops.rope.quantize import rope_quantize_fp8 as rope_quantize_fp8
from precast._ops.rope.quantize_append import (
    rope_quantize_fp8_append_paged_kv_cache as rope_quantize_fp8_append_paged_kv_cache,
)
from precast._ops.sampling.from_rows import min_p_sampling_from_probs as min_p_sampling_from_probs
from precast._ops.sampling.from_rows import sampling_from_logits as sampling_from_logits
from precast._ops.sampling.from_rows import sampling_from_probs as sampling_from_probs
from precast._ops.sampling.from_rows import top_k_sampling_from_probs as top_k_sampling_from_probs
from precast._ops.sampling.from_rows import (
    top_k_top_p_sampling_from_logits as top_k_top_p_sampling_from_logits,
)
from precast._ops.sampling.from_rows import (
    top_k_top_p_sampling_from_probs as top_k_top_p_sampling_from_probs,
)
from precast._ops.sampling.from_rows import top_p_sampling_from_probs as top_p_sampling_from_probs
from precast._ops.sampling.fused import Sampled as Sampled
from precast._ops.sampling.fused import sample as sample
from precast._ops.sampling.rows import softmax as softmax
from precast._ops.sampling.rows import top_k_mask_logits as top_k_mask_logits
from precast._ops.sampling.rows import top_k_renorm_probs as top_k_renorm_probs
from precast._ops.sampling.rows import top_p_renorm_probs as top_p_renorm_probs
from precast._ops.sampling.speculative import (
    chain_speculative_sampling as chain_speculative_sampling,
)
from precast._ops.topk.top_k import TopKTieBreak as TopKTieBreak
from precast._ops.topk.top_k import top_k as top_k
from precast._ops.topk.transforms import top_k_page_table_transform as top_k_page_table_transform
from precast._ops.topk.transforms import top_k_ragged_transform as top_k_ragged_transform
from precast._ops.topk.varlen import top_k_varlen as top_k_varlen
from precast._runtime.preload import preload as preload
from precast.trace import fi_trace as fi_trace
