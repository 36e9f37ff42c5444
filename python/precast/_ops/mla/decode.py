# SPDX-License-Identifier: Apache-2.0
"""MLA of the newest tokens of a batch over a block table, planned and run in one call.

Sources: DeepSeek-V2, arXiv:2405.04434, section 2.1; Ye et al., FlashInfer, arXiv:2501.01005; Kwon
et al., arXiv:2309.06180 (pages).
"""

from __future__ import annotations

from precast._base.errors import BackendSupportedError
from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import op
from precast._op.scalars import RAW_KINDS, check_integer
from precast._ops.attention.functional.call import Real
from precast._ops.attention.functional.checks import (
    check_unread,
    check_unread_integer,
    refuse,
    refuse_flags,
)
from precast._ops.attention.run import check_word, split_scale
from precast._ops.attention.validation import check_flags
from precast._ops.mla._docs import FUNCTIONAL
from precast._ops.mla.formula import attend_pages
from precast._ops.mla.table import table_export
from precast._ops.mla.trace import decode_trace
from precast.api_logging import precast_api

_TRTLLM, _XQA = "trtllm_batch_decode_with_kv_cache_mla", "xqa_batch_decode_with_kv_cache_mla"
_EXPORTS = {_TRTLLM: table_export(_TRTLLM, has_lse=True), _XQA: table_export(_XQA)}
#: FlashInfer's kernels for the same calls.
_BACKENDS = ("auto", "xqa", "trtllm-gen", "cute-dsl", "cake")


def _table_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_lora_rank: int,
    has_kpe: bool,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cum_seq_lens_q: torch.Tensor | None,
    bmm1_scale: float,
    bmm2_scale: float,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of a call and its base-2 log-sum-exp."""
    rows = query.flatten(0, -3)
    entries = kv_cache.flatten(1, -2) if kv_cache.dim() == 4 else kv_cache
    batch = seq_lens.shape[0]
    if cum_seq_lens_q is not None:
        bounds = cum_seq_lens_q.tolist()
    else:
        bounds = [i * (rows.shape[0] // max(batch, 1)) for i in range(batch + 1)]
    out, lse, _ = attend_pages(
        rows[..., :kv_lora_rank],
        rows[..., kv_lora_rank:] if has_kpe else None,
        entries[..., :kv_lora_rank],
        entries[..., kv_lora_rank:] if has_kpe else None,
        bounds,
        None,
        block_tables,
        seq_lens,
        bmm1_scale,
        causal=True,
        sinks=sinks,
    )
    return (out * bmm2_scale).to(query.dtype).view(*query.shape[:-1], kv_lora_rank), lse


def xqa_batch_decode_with_kv_cache_mla_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`xqa_batch_decode_with_kv_cache_mla` in plain PyTorch on any device.

    Parameters
    ----------
    workspace_buffer, qk_nope_head_dim, max_seq_len : torch.Tensor, int, int
        Not read.
    """
    has_kpe = qk_rope_head_dim > 0
    batch = block_tables, seq_lens, None
    factors = bmm1_scale, bmm2_scale, sinks
    return _table_reference(query, kv_cache, kv_lora_rank, has_kpe, *batch, *factors)[0]


@precast_api(trace=decode_trace(_XQA, xqa_batch_decode_with_kv_cache_mla_reference))
@op("mla")
@documented(FUNCTIONAL)
def xqa_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    bmm1_scale: Real = 1.0,
    bmm2_scale: Real = 1.0,
    sinks: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    r"""Compute multi-head latent attention of the newest tokens of a batch over a block table.

    .. math::

        O_{i, h} = bmm2 \cdot \sum_j \mathrm{softmax}_j(bmm1 \cdot Q_{i, h} \cdot K_j + mask_{i, j})
        K_{j, :rank}

    where a query sees its own token and what is before it. All heads read one row of a token, whose
    first ``kv_lora_rank`` columns are the value.

    Returns
    -------
    torch.Tensor
        The output; ``out`` if it is given.

    Examples
    --------
    >>> import torch, precast
    >>> cache, workspace = torch.full((2, 4, 576), 3.0), torch.zeros(1 << 20).byte()
    >>> table, lens = torch.tensor([[1, 0]]).int(), torch.tensor([8]).int()
    >>> with precast.reference_mode():
    ...     precast.xqa_batch_decode_with_kv_cache_mla(
    ...         torch.zeros(1, 1, 2, 576), cache, workspace, 128, 512, 64, table, lens, 8
    ...     )[..., 0]
    tensor([[[3., 3.]]])
    """
    return _attend(
        _XQA,
        query,
        kv_cache,
        workspace_buffer,
        qk_nope_head_dim,
        kv_lora_rank,
        qk_rope_head_dim,
        block_tables,
        seq_lens,
        max_seq_len,
        out,
        bmm1_scale,
        bmm2_scale,
        sinks,
        enable_pdl,
    )


def trtllm_batch_decode_with_kv_cache_mla_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    cum_seq_lens_q: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`trtllm_batch_decode_with_kv_cache_mla` in plain PyTorch on any device.

    Parameters
    ----------
    workspace_buffer, qk_nope_head_dim, max_seq_len : torch.Tensor, int, int
        Not read.
    cum_seq_lens_q : torch.Tensor, optional
        As for the function.
    return_lse : bool
        As for the function.
    """
    has_kpe = qk_rope_head_dim > 0
    batch = block_tables, seq_lens, cum_seq_lens_q
    factors = bmm1_scale, bmm2_scale, sinks
    out, lse = _table_reference(query, kv_cache, kv_lora_rank, has_kpe, *batch, *factors)
    return (out, lse) if return_lse else out


@precast_api(trace=decode_trace(_TRTLLM, trtllm_batch_decode_with_kv_cache_mla_reference))
@op("mla")
@documented(FUNCTIONAL)
def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: Real = 1.0,
    bmm2_scale: Real = 1.0,
    sinks: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    sparse_mla_top_k_lens: torch.Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute multi-head latent attention of the newest tokens of a batch over a block table.

    This is :func:`xqa_batch_decode_with_kv_cache_mla` with a log-sum-exp and requests of different
    numbers of queries.

    Parameters
    ----------
    sparse_mla_top_k, sparse_mla_top_k_lens : int, None
        0 and None. Chosen tokens are pages of one token for
        :class:`BatchMLAPagedAttentionWrapper`, with ``page_size=1``.
    skip_softmax_threshold_scale_factor, causal_seqlens_kv_global : None
        For other kernels.
    backend : str
        ``auto``, ``xqa``, ``trtllm-gen``, ``cute-dsl`` or ``cake``, which are the same.
    is_var_seq, cute_dsl_impl, kv_scale_format : bool, str, str
        For other kernels; not read.
    uses_shared_paged_kv_idx : bool
        True: keys and values are the same rows.
    lse : torch.Tensor, optional
        ``[tokens, num_heads]`` or ``[batch_size, q_len, num_heads]``, float32, contiguous: the
        log-sum-exp is written to it. Default: a new tensor, if ``return_lse``.
    return_lse : bool
        Whether to return it, too.
    cum_seq_lens_q : torch.Tensor, optional
        ``[batch_size + 1]``, int32, on the device: where the queries of each request start; then
        ``query`` is ``[tokens, num_heads, head_dim_qk]``.
    max_q_len : int, optional
        The most queries of a request, with ``cum_seq_lens_q``. It only saves time.
    multi_ctas_kv_counter_buffer : torch.Tensor, optional
        For other kernels; not read.
    enable_dcp, cp_world, cp_rank : bool, int, int
        False, 1 and 0: a request is not divided among GPUs.
    use_fp16_softmax : bool, optional
        None or False: the softmax is computed in float32.
    return_lse_base : str, optional
        ``base2``, which is the default, or ``basee``.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        The output, ``out`` if it is given, and the log-sum-exp if ``return_lse``.

    Examples
    --------
    >>> import torch, precast
    >>> cache, workspace = torch.full((2, 4, 576), 3.0), torch.zeros(1 << 20).byte()
    >>> table, lens = torch.tensor([[1, 0]]).int(), torch.tensor([8]).int()
    >>> with precast.reference_mode():
    ...     precast.trtllm_batch_decode_with_kv_cache_mla(
    ...         torch.zeros(1, 1, 2, 576), cache, workspace, 128, 512, 64, table, lens, 8,
    ...         return_lse=True,
    ...     )[1]
    tensor([[3., 3.]])
    """
    name = _TRTLLM
    # Why a type: a tensor compares oddly.
    if type(backend) is not str or backend not in _BACKENDS:
        raise BackendSupportedError(
            f"{name}: backend must be {', '.join(_BACKENDS)}, which are the same, got "
            f"{backend!r:.40}"
        )
    check_flags(name, return_lse=return_lse, is_var_seq=is_var_seq)
    for option, word, words in (
        ("cute_dsl_impl", cute_dsl_impl, ("auto", "modular", "monolithic")),
        ("kv_scale_format", kv_scale_format, ("auto", "pow2_fp32", "arbitrary_fp32")),
    ):
        check_word(f"{name}: {option}", word, words)
    refuse(
        name,
        None,
        sparse_mla_top_k_lens=sparse_mla_top_k_lens,
        causal_seqlens_kv_global=causal_seqlens_kv_global,
    )
    skipped = {"skip_softmax_threshold_scale_factor": skip_softmax_threshold_scale_factor}
    refuse(name, None, 0, **skipped)
    refuse(name, None, False, use_fp16_softmax=use_fp16_softmax)
    for option, value, legal in (
        ("sparse_mla_top_k", sparse_mla_top_k, 0),
        ("cp_world", cp_world, 1),
        ("cp_rank", cp_rank, 0),
    ):
        check_integer(name, option, value)
        refuse(name, legal, **{option: value})
    refuse_flags(name, True, uses_shared_paged_kv_idx=uses_shared_paged_kv_idx)
    refuse_flags(name, False, enable_dcp=enable_dcp)
    if multi_ctas_kv_counter_buffer is not None:
        check_unread(name, multi_ctas_kv_counter_buffer=multi_ctas_kv_counter_buffer)
    if return_lse_base is not None:
        check_word(f"{name}: return_lse_base", return_lse_base, ("base2", "basee"))
    if max_q_len is not None:
        check_integer(name, "max_q_len", max_q_len)
    if seq_lens is None:
        raise ValueError(f"{name}: seq_lens must be a torch.Tensor, got None")
    if return_lse and lse is None:
        rows = query.shape[0] if query.dim() == 3 else query.shape[0] * query.shape[1]
        lse = query.new_empty((rows, query.shape[-2]), dtype=torch.float32)
    result = _attend(
        name,
        query,
        kv_cache,
        workspace_buffer,
        qk_nope_head_dim,
        kv_lora_rank,
        qk_rope_head_dim,
        block_tables,
        seq_lens,
        max_seq_len,
        out,
        bmm1_scale,
        bmm2_scale,
        sinks,
        enable_pdl,
        lse,
        cum_seq_lens_q,
        max_q_len,
        return_lse_base == "basee",
    )
    if return_lse:
        assert lse is not None
        return result, lse
    return result


def _attend(
    name: str,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    out: torch.Tensor | None,
    bmm1_scale: Real,
    bmm2_scale: Real,
    sinks: torch.Tensor | None,
    enable_pdl: bool | None,
    lse: torch.Tensor | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    lse_base_e: bool = False,
) -> torch.Tensor:
    """Bring the arguments into the form of the export, and launch it."""
    check_unread_integer(name, "qk_nope_head_dim", qk_nope_head_dim)
    check_unread_integer(name, "max_seq_len", max_seq_len)
    for option, value in (
        ("kv_lora_rank", kv_lora_rank),
        ("qk_rope_head_dim", qk_rope_head_dim),
    ):
        check_integer(name, option, value)
    if bmm1_scale is None or bmm2_scale is None:
        raise TypeError("no scale")  # The check of types names it.
    if isinstance(sinks, list):  # FlashInfer's annotation; its kernels take a tensor.
        sinks = sinks[0] if sinks else None
    ragged = cum_seq_lens_q is not None
    if query.dim() != (3 if ragged else 4):
        words = "[tokens, heads, columns]" if ragged else "[batch_size, q_len, heads, columns]"
        raise ValueError(f"{name}: query must have shape {words}, got {[*query.shape]}")
    if max_q_len is not None and not ragged:
        raise ValueError(f"{name}: max_q_len belongs to cum_seq_lens_q, which is None")
    if query.shape[-1] != kv_lora_rank + qk_rope_head_dim:
        raise ValueError(
            f"{name}: query must have kv_lora_rank + qk_rope_head_dim = "
            f"{kv_lora_rank + qk_rope_head_dim} columns, got shape {[*query.shape]}"
        )
    if kv_cache.dim() == 4:
        if kv_cache.shape[1] != 1:
            raise ValueError(
                f"{name}: kv_cache must have shape [pages, 1, page_size, columns], got "
                f"{[*kv_cache.shape]}"
            )
        kv_cache = kv_cache.squeeze(1)
    q_len = max_q_len if ragged else query.shape[1]
    rows = query if ragged else _merged(name, "query", query)
    shape = *query.shape[:-1], kv_lora_rank
    if out is None:
        out = query.new_empty(shape)
    into = out
    if not ragged and out.dim() == 4:
        if out.shape != shape:
            raise ValueError(
                f"{name}: out must have shape {[*shape]}, that of query with kv_lora_rank "
                f"columns, got {[*out.shape]}"
            )
        into = _merged(name, "out", out)
    sums = _merged(name, "lse", lse) if lse is not None and lse.dim() == 3 else lse
    sm_scale, qk_scale = split_scale(name, "bmm1_scale", bmm1_scale, "")
    out_scale, v_scale = split_scale(name, "bmm2_scale", bmm2_scale, "")
    export = _EXPORTS[name]
    given = (
        rows,
        kv_cache,
        into,
        workspace_buffer,
        block_tables,
        seq_lens.view(torch.int32) if seq_lens.dtype is torch.uint32 else seq_lens,
        sinks,
        kv_lora_rank,
        0 if q_len is None else q_len,
        sm_scale,
        out_scale,
        qk_scale,
        v_scale,
        *((sums, cum_seq_lens_q, lse_base_e) if name == _TRTLLM else ()),
        enable_pdl,
    )
    try:
        export.launch(*given)
    except RAW_KINDS:
        export.explain(*given)
        raise
    return out


def _merged(name: str, argument: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose first two dimensions are one, without a copy."""
    try:
        return tensor.view(-1, *tensor.shape[2:])
    except RuntimeError:
        raise ValueError(
            f"{name}: {argument} must have first dimensions that are one with one stride, got "
            f"shape {[*tensor.shape]} and strides {[*tensor.stride()]}. Fix: call .contiguous()"
        ) from None
