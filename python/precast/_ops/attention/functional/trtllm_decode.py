# SPDX-License-Identifier: Apache-2.0
"""Decode attention over a block table, with the options of TensorRT-LLM's kernels.

Source: Ye et al., FlashInfer, arXiv:2501.01005.
"""

from __future__ import annotations

from typing import Any

from precast._base.rounding import saturated
from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import op
from precast._op.scalars import check_integer
from precast._ops.attention.functional._docs import FUNCTIONAL, TABLES
from precast._ops.attention.functional.call import (
    Outputs,
    Real,
    attend_table,
    explain_cache,
    factors_of,
    mask_of,
    parts_of,
)
from precast._ops.attention.functional.calls import Words
from precast._ops.attention.functional.checks import (
    check_backend,
    check_unread,
    check_unread_integer,
    refuse,
    refuse_flags,
)
from precast._ops.attention.functional.decode import xqa_batch_decode_with_kv_cache
from precast._ops.attention.functional.exports import DERIVED, paged_export
from precast._ops.attention.functional.reference import caches_of, table_attention
from precast._ops.attention.functional.trace import fill_table, table_trace
from precast._ops.attention.plan import Dtype
from precast._ops.attention.validation import check_flags
from precast._ops.paged._cache import Cache
from precast.api_logging import precast_api
from precast.trace import Scalar

_WORDS = Words("trtllm_batch_decode_with_kv_cache", q_bounds="cum_seq_lens_q")
_EXPORT = paged_export(_WORDS, {**DERIVED, "return_lse": lambda lse: lse is not None})


def trtllm_batch_decode_with_kv_cache_reference(
    query: torch.Tensor,
    kv_cache: Cache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    kv_layout: str = "HND",
    q_len_per_req: int | None = 1,
    o_scale: float = 1.0,
    mask: torch.Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`trtllm_batch_decode_with_kv_cache` in plain PyTorch on any device.

    Parameters
    ----------
    workspace_buffer : torch.Tensor
        Not read.
    """
    q_len = max_q_len or q_len_per_req or 1
    out, lse, _ = table_attention(
        query,
        caches_of(kv_cache, kv_layout),
        block_tables,
        seq_lens,
        cum_seq_lens_q,
        q_len,
        causal=q_len > 1,
        window_left=window_left,
        sm_scale=bmm1_scale,
        out_scale=bmm2_scale * o_scale,
        draft_mask=mask if q_len > 1 else None,
        sinks=sinks,
    )
    out = saturated(out, query.dtype)
    return (out, lse) if return_lse else out


@precast_api(
    trace=table_trace(
        "trtllm_batch_decode",
        "Attention of the newest tokens of a batch over the pages of a block table.",
        trtllm_batch_decode_with_kv_cache_reference,
        {},
        "batch_size",
        {"max_seq_len": Scalar("int32")},
        fill_table,
    )
)
@op("attention", explain=explain_cache)
@documented(xqa_batch_decode_with_kv_cache, FUNCTIONAL, TABLES)
def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: Cache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: Real = 1.0,
    bmm2_scale: Real = 1.0,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    out_dtype: Dtype = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: torch.Tensor | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float = 1.0,
    mask: torch.Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: Cache | None = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: torch.Tensor | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    bf16q_fp8kv_transform_mode: str | None = None,
    request_order: torch.Tensor | None = None,
    request_order_plan: object = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of the newest tokens of a batch over a block table.

    This is :func:`xqa_batch_decode_with_kv_cache` with more options for outputs and, by default,
    the layout ``HND``.

    Parameters
    ----------
    backend : str
        ``auto``, ``xqa`` or ``trtllm-gen``, which are the same.
    q_len_per_req : int, optional
        Queries of each request, its newest tokens. Not read with ``cum_seq_lens_q``.
    max_q_len : int, optional
        The most queries of a request, with ``cum_seq_lens_q``. Default: ``q_len_per_req``.
    cum_seq_lens_q : torch.Tensor, optional
        ``[batch_size + 1]``, int32, on the device: where the queries of each request start.
    bmm1_scale_log2, bf16q_fp8kv_transform_mode, request_order, request_order_plan : None
        For other kernels.
    enable_block_sparse_attention : bool
        False: every head sees the same pages.
    cp_world, cp_rank, causal_seqlens_kv_global : int, int, None
        1, 0 and None: a request is not divided among GPUs.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        The output, ``out`` if it is given, and the log-sum-exp if ``return_lse``.

    Examples
    --------
    >>> import torch, precast
    >>> cache, workspace = torch.full((2, 2, 1, 4, 64), 3.0), torch.zeros(1 << 20).byte()
    >>> table, lens = torch.tensor([[1, 0]]).int(), torch.tensor([8]).int()
    >>> with precast.reference_mode():
    ...     precast.trtllm_batch_decode_with_kv_cache(
    ...         torch.zeros(1, 2, 64), cache, workspace, table, lens, 8, return_lse=True
    ...     )[1]
    tensor([[3., 3.]])
    """
    name = _WORDS.function
    check_unread_integer(name, "max_seq_len", max_seq_len)
    if backend != "auto":
        check_backend(name, backend)
    if return_lse is not False:
        check_flags(name, return_lse=return_lse)
    if not (
        o_sf_scale
        is o_sf_vec_size
        is kv_cache_sf
        is skip_softmax_threshold_scale_factor
        is bmm1_scale_log2
        is causal_seqlens_kv_global
        is bf16q_fp8kv_transform_mode
        is request_order
        is request_order_plan
        is None
    ):
        refuse(
            name,
            None,
            o_sf_scale=o_sf_scale,
            o_sf_vec_size=o_sf_vec_size,
            kv_cache_sf=kv_cache_sf,
            bmm1_scale_log2=bmm1_scale_log2,
            causal_seqlens_kv_global=causal_seqlens_kv_global,
            bf16q_fp8kv_transform_mode=bf16q_fp8kv_transform_mode,
            request_order=request_order,
            request_order_plan=request_order_plan,
        )
        skipped = {"skip_softmax_threshold_scale_factor": skip_softmax_threshold_scale_factor}
        refuse(name, None, 0, **skipped)
    if uses_shared_paged_kv_idx is not True or enable_block_sparse_attention is not False:
        shared, sparse = uses_shared_paged_kv_idx, enable_block_sparse_attention
        refuse_flags(name, True, uses_shared_paged_kv_idx=shared)
        refuse_flags(name, False, enable_block_sparse_attention=sparse)
    if not (type(cp_world) is type(cp_rank) is int and cp_world == 1 and cp_rank == 0):
        for option, value, legal in (("cp_world", cp_world, 1), ("cp_rank", cp_rank, 0)):
            check_integer(name, option, value)
            refuse(name, legal, **{option: value})
    if multi_ctas_kv_counter_buffer is not None:
        check_unread(name, multi_ctas_kv_counter_buffer=multi_ctas_kv_counter_buffer)
    q_len: Any = q_len_per_req
    if max_q_len is not None:
        check_integer(name, "max_q_len", max_q_len)
        q_len = q_len if cum_seq_lens_q is None else max_q_len
    if q_len is None:
        raise ValueError(f"{name}: q_len_per_req or max_q_len must be an integer, got None")
    k_cache, v_cache = parts_of(kv_cache)
    if return_lse and lse is None:
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    values = k_cache if v_cache is None else v_cache
    tensors = Outputs(_WORDS, query, values, out, workspace_buffer, out_dtype)
    result = attend_table(
        _WORDS,
        _EXPORT,
        tensors,
        k_cache,
        v_cache,
        lse,
        block_tables,
        seq_lens,
        cum_seq_lens_q,
        mask_of(_WORDS, mask, seq_lens.shape[0], q_len),
        sinks,
        kv_layout,
        q_len,
        q_len > 1,
        window_left,
        factors_of(_WORDS, bmm1_scale, bmm2_scale, tensors, o_scale),
        enable_pdl,
    )
    if lse is not None and return_lse:
        return result, lse
    return result
