# SPDX-License-Identifier: Apache-2.0
"""Prefill attention over queries, keys and values in five layouts, planned and run in one call.

Sources: Ye et al., FlashInfer, arXiv:2501.01005; NVIDIA, TensorRT-LLM, FMHA v2 (the layouts); Dao,
FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

import math
from typing import Any

from precast._base.errors import CacheLayoutError
from precast._base.rounding import saturated
from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import op
from precast._op.ranges import FINITE
from precast._op.scalars import check_integer, check_number
from precast._ops.attention.functional._docs import FUNCTIONAL
from precast._ops.attention.functional.call import (
    Outputs,
    Real,
    attend_rows,
    attend_table,
    factors_of,
)
from precast._ops.attention.functional.checks import (
    check_batch,
    check_unread,
    check_unread_integer,
    refuse,
)
from precast._ops.attention.functional.fmha_v2_layouts import (
    EXPORTS,
    PAGED,
    WORDS,
    Tensors,
    parts_of,
    table_of,
)
from precast._ops.attention.functional.fmha_v2_trace import fmha_v2_trace
from precast._ops.attention.functional.reference import caches_of, row_attention, table_attention
from precast._ops.attention.plan import Dtype
from precast._ops.attention.validation import check_flags
from precast.api_logging import precast_api

#: Whether a query sees only what is before it, by mask mode; the window is an argument of its own.
_CAUSAL = {"causal": True, "sliding_window": True, "padding": False}


def trtllm_fmha_v2_prefill_reference(
    qkv: Tensors,
    input_layout: str,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    block_tables: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    pos_encoding_mode: str | None = None,
    logits_soft_cap_scale: float | None = None,
    mask_mode: str = "causal",
    window_left: int = -1,
) -> torch.Tensor:
    """:func:`trtllm_fmha_v2_prefill` in plain PyTorch on any device.

    Parameters
    ----------
    workspace_buffer : torch.Tensor
        Not read.

    Returns
    -------
    torch.Tensor
        ``[tokens, num_qo_heads, head_dim_vo]``, of the dtype of the queries.
    """
    if input_layout == "PACKED_QKV":
        query, k, v = qkv.unbind(1)  # type: ignore[union-attr]
    elif input_layout == "SEPARATE_Q_K_V":
        query, k, v = qkv
    else:
        query, parts = qkv
        k, v = parts if isinstance(parts, tuple) else parts.unbind(1)
    features: dict[str, Any] = {
        "causal": mask_mode != "padding",
        "window_left": window_left,
        "logits_soft_cap": logits_soft_cap_scale,
        "pos_encoding_mode": "ALIBI" if pos_encoding_mode else "NONE",
        "sm_scale": bmm1_scale,
        "out_scale": bmm2_scale,
        "sinks": sinks,
    }
    if block_tables is not None and "PAGED" in input_layout:
        caches = caches_of((k, v), input_layout[-3:])
        table = block_tables[:, 0] if block_tables.dim() == 3 else block_tables
        out = table_attention(query, caches, table, seq_lens, cum_seq_lens_q, 1, **features)[0]
    else:
        out = row_attention(query, k, v, cum_seq_lens_q, cum_seq_lens_kv, **features)[0]
    return saturated(out, query.dtype)


@precast_api(trace=fmha_v2_trace(trtllm_fmha_v2_prefill_reference))
@op("attention")
@documented(FUNCTIONAL)
def trtllm_fmha_v2_prefill(
    qkv: Tensors,
    input_layout: str,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Real,
    bmm2_scale: Real,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    block_tables: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: Dtype = None,
    sinks: torch.Tensor | None = None,
    pos_encoding_mode: str | None = None,
    logits_soft_cap_scale: float | None = None,
    mask_mode: str = "causal",
    window_left: int = -1,
    chunked_attention_size: int = 0,
    save_softmax_stats: bool = False,
    skip_softmax_threshold_scale_factor: float | None = 0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Compute attention of a ragged batch, with queries, keys and values in one of five layouts.

    .. math::

        O_{i, h} = bmm2 \sum_j \mathrm{softmax}_j(\mathrm{cap}(bmm1 \cdot Q_{i, h} \cdot K_{j, h'})
        + bias) V_{j, h'}

    where :math:`j` runs over the tokens of the request of query :math:`i` and
    :math:`h' = \lfloor h / (H_{qo} / H_{kv}) \rfloor`. The last query of a request is its last
    token. There is no plan to make before: lengths are read on the device.

    Parameters
    ----------
    qkv : torch.Tensor or tuple of torch.Tensor
        What ``input_layout`` says; float16 or bfloat16, keys and values also of 8 bits, and queries
        then, too. ``num_qo_heads`` is a multiple of ``num_kv_heads``; ``head_dim`` is 64, 80, 96,
        128, 256 or 512, or 192 with values of 128. Stride 1 in the last dimension, any in the
        others.
    input_layout : str
        ``PACKED_QKV``: a tensor ``[tokens, 3, num_heads, head_dim]``. ``CONTIGUOUS_Q_KV``: queries
        ``[tokens, num_qo_heads, head_dim]`` and ``[tokens, 2, num_kv_heads, head_dim]``.
        ``SEPARATE_Q_K_V``: queries, keys and values ``[tokens, heads, head_dim]``.
        ``Q_PAGED_KV_NHD``: queries, and a cache ``[pages, 2, page_size, num_kv_heads, head_dim]``
        or a tuple of keys and values without the dimension of 2; ``Q_PAGED_KV_HND``: the same with
        ``num_kv_heads`` before ``page_size``.
    seq_lens : torch.Tensor
        ``[batch_size]``, int32 or uint32, on the device: tokens of each request in the cache, those
        of its queries among them. Read where there are pages.
    max_q_len : int
        The most queries of a request. A wrong number costs time, not results.
    max_kv_len : int
        Not read.
    batch_size : int
        The number of requests, that of ``seq_lens``.
    cum_seq_lens_q, cum_seq_lens_kv : torch.Tensor
        ``[batch_size + 1]``, int32, on the device: where the queries, and the keys and values, of
        each request start. The second is read where there are no pages.
    block_tables : torch.Tensor, optional
        The pages of each request, int32, on the device: ``[batch_size, max_pages]``. Where values
        are a tensor of their own, ``[batch_size, 2, max_pages]``, too: pages of keys, and those of
        values relative to the first page of keys. The second are not read: they are the first,
        moved by the distance of both tensors.
    pos_encoding_mode : str, optional
        ``alibi``, or none.
    logits_soft_cap_scale : float, optional
        Logits ``s`` become ``cap * tanh(s / cap)``; None or 0 is off.
    mask_mode : str
        ``causal`` or ``sliding_window``: a query sees itself and what is before it; ``padding``: it
        sees all tokens of its request.
    window_left : int
        A query sees its own token and this many before it; -1 is all. Not with ``padding``.
    chunked_attention_size : int
        0: there is no kernel for chunks.
    save_softmax_stats : bool
        Whether to return the statistics of the softmax, too.
    skip_softmax_threshold_scale_factor : float, optional
        0: there is no kernel that leaves out small parts of the softmax.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        The output, ``out`` if it is given, and if ``save_softmax_stats`` a new tensor
        ``[tokens, num_qo_heads, 2]``, float32: numbers ``m`` and ``s`` whose ``m + ln(s)`` is the
        log-sum-exp of the logits. Here ``s`` is 1; another library may give a maximum and a sum.

    Raises
    ------
    precast.errors.CacheLayoutError
        Another layout, or ``qkv`` that is not of the layout (a ``KeyError`` and a ``ValueError``).
    precast.errors.UnsupportedConfigError
        A head dimension or dtype that no kernel is for (a ``ValueError``).
    NotImplementedError
        An option that no kernel here has.
    ValueError
        A tensor that is not on a CUDA device; heads that do not divide; shapes, dtypes or strides
        other than above; a workspace that is too small or not aligned.

    Notes
    -----
    As for :func:`trtllm_batch_context_with_kv_cache`; statistics take two more launches. Sources:
    arXiv:2501.01005, arXiv:2307.08691.

    Examples
    --------
    >>> import torch, precast
    >>> qkv, workspace = torch.zeros(2, 3, 1, 64), torch.zeros(1 << 20).byte()
    >>> qkv[:, 2] = torch.arange(2.0).view(2, 1, 1)
    >>> lens, bounds = torch.tensor([2]).int(), torch.tensor([0, 2]).int()
    >>> with precast.reference_mode():
    ...     precast.trtllm_fmha_v2_prefill(
    ...         qkv, "PACKED_QKV", workspace, lens, 2, 2, 0.125, 1.0, 1, bounds, bounds
    ...     )[:, 0, 0]
    tensor([0.0000, 0.5000])
    """
    name = WORDS.function
    query, k, v = parts_of(qkv, input_layout)
    causal = _is_causal(mask_mode, window_left)
    is_alibi, cap = _score_options(pos_encoding_mode, logits_soft_cap_scale)
    check_unread_integer(name, "max_q_len", max_q_len)
    check_unread_integer(name, "max_kv_len", max_kv_len)
    check_batch(name, batch_size, seq_lens)
    check_unread(name, cum_seq_lens_kv=cum_seq_lens_kv)
    check_flags(name, save_softmax_stats=save_softmax_stats)
    if chunked_attention_size != 0 or type(chunked_attention_size) is not int:
        check_integer(name, "chunked_attention_size", chunked_attention_size)
        refuse(name, 0, chunked_attention_size=chunked_attention_size)
    factor = skip_softmax_threshold_scale_factor
    if type(factor) is not int or factor != 0:
        refuse(name, 0, None, skip_softmax_threshold_scale_factor=factor)
    if cum_seq_lens_q is None:
        raise TypeError("no bounds")  # The check of types names it.
    tensors = Outputs(WORDS, query, v, out, workspace_buffer, out_dtype)
    lse = None
    if save_softmax_stats:
        lse = tensors.taken(WORDS, tuple(query.shape[:2]), torch.float32)
    factors = factors_of(WORDS, bmm1_scale, bmm2_scale, tensors)
    export = EXPORTS[input_layout]
    scores = window_left, factors
    if input_layout in PAGED:
        result = attend_table(
            WORDS,
            export,
            tensors,
            k,
            v,
            lse,
            table_of(block_tables, qkv),
            seq_lens,
            cum_seq_lens_q,
            None,
            sinks,
            PAGED[input_layout],
            max_q_len,
            causal,
            *scores,
            None,
            cap,
            is_alibi,
        )
    else:
        if block_tables is not None:
            check_unread(name, block_tables=block_tables)
        bounds = cum_seq_lens_q, cum_seq_lens_kv
        result = attend_rows(
            WORDS,
            export,
            tensors,
            k,
            v,
            lse,
            *bounds,
            sinks,
            max_q_len,
            causal,
            *scores,
            cap,
            is_alibi,
        )
    return result if lse is None else (result, _statistics(lse))


def _is_causal(mask_mode: str, window_left: int) -> bool:
    word = mask_mode.lower() if isinstance(mask_mode, str) else ""
    mode = _CAUSAL.get(word)
    if word == "chunked":
        raise NotImplementedError(
            f"{WORDS.function}: mask_mode must not be chunked: no kernel here has chunks"
        )
    if mode is None:
        raise ValueError(
            f"{WORDS.function}: mask_mode must be {', '.join(_CAUSAL)}, got {mask_mode!r:.40}"
        )
    if not mode and window_left >= 0:
        raise ValueError(
            f"{WORDS.function}: window_left must be -1 with mask_mode='padding', got {window_left}"
        )
    return mode


def _score_options(
    pos_encoding_mode: str | None, logits_soft_cap_scale: float | None
) -> tuple[bool, float]:
    """Return whether there is a bias by distance, and the cap."""
    is_alibi = False
    if pos_encoding_mode is not None:
        is_alibi = isinstance(pos_encoding_mode, str) and pos_encoding_mode.lower() == "alibi"
        if not is_alibi:
            raise CacheLayoutError(
                f"{WORDS.function}: pos_encoding_mode must be alibi or None, got "
                f"{pos_encoding_mode!r:.40}"
            )
    if logits_soft_cap_scale is None:
        return is_alibi, 0.0
    check_number(WORDS.function, "logits_soft_cap_scale", logits_soft_cap_scale, FINITE)
    return is_alibi, float(logits_soft_cap_scale)


def _statistics(lse: torch.Tensor) -> torch.Tensor:
    """Return ``m`` and ``s`` of base-2 log-sum-exps, ``m + ln(s)`` in base e."""
    made = lse.new_empty((*lse.shape, 2))
    torch.mul(lse, math.log(2.0), out=made[..., 0])
    made[..., 1].fill_(1.0)
    return made
