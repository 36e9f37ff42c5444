# SPDX-License-Identifier: Apache-2.0
"""Prefill attention over a block table, planned and run in one call.

Sources: Ye et al., FlashInfer, arXiv:2501.01005; Dao, FlashAttention-2, arXiv:2307.08691; Kwon et
al., arXiv:2309.06180 (pages).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from precast._base.rounding import saturated
from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import op
from precast._ops.attention import sm90
from precast._ops.attention.functional._docs import FUNCTIONAL, TABLES
from precast._ops.attention.functional.call import (
    Outputs,
    Real,
    attend_table,
    explain_cache,
    factors_of,
    parts_of,
)
from precast._ops.attention.functional.calls import Words
from precast._ops.attention.functional.checks import (
    check_backend,
    check_batch,
    check_unread,
    check_unread_integer,
    refuse,
    refuse_flags,
)
from precast._ops.attention.functional.exports import DERIVED, paged_export
from precast._ops.attention.functional.reference import caches_of, table_attention
from precast._ops.attention.functional.trace import fill_bounds, fill_table, table_trace
from precast._ops.attention.plan import Dtype
from precast._ops.attention.validation import check_flags
from precast._ops.paged._cache import Cache
from precast.api_logging import precast_api
from precast.trace import Scalar, Tensor, Var

_WORDS = Words("trtllm_batch_context_with_kv_cache", q_bounds="cum_seq_lens_q", q_len="max_q_len")
_DERIVED: dict[str, Callable[..., Any]] = {
    **DERIVED,
    "bmm1_scale": lambda sm_scale, qk_scale, logits_soft_cap, is_alibi: (
        sm_scale if qk_scale is None else qk_scale
    ),
    "batch_size": lambda seq_lens, mask: seq_lens.shape[0],
    "return_lse": lambda lse: lse is not None,
}
_EXPORT = paged_export(_WORDS, _DERIVED)
_EXPORT_FP8 = paged_export(_WORDS, _DERIVED, is_fp8=True)


def trtllm_batch_context_with_kv_cache_reference(
    query: torch.Tensor,
    kv_cache: Cache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    window_left: int = -1,
    kv_layout: str = "HND",
    sinks: torch.Tensor | None = None,
    causal: bool = True,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`trtllm_batch_context_with_kv_cache` in plain PyTorch on any device.

    Parameters
    ----------
    workspace_buffer : torch.Tensor
        Not read.
    """
    out, lse, _ = table_attention(
        query,
        caches_of(kv_cache, kv_layout),
        block_tables,
        seq_lens,
        cum_seq_lens_q,
        max_q_len,
        causal=causal,
        window_left=window_left,
        sm_scale=bmm1_scale,
        out_scale=bmm2_scale,
        sinks=sinks,
    )
    out = saturated(out, query.dtype)
    return (out, lse) if return_lse else out


def _fill(call: dict[str, Any]) -> None:
    """Divide the queries among the requests."""
    call["batch_size"] = call["seq_lens"].shape[0]
    call["max_q_len"] = call["query"].shape[0]
    if not call["query"].is_meta:
        fill_table(call)
        fill_bounds(call["cum_seq_lens_q"], call["query"].shape[0])
        call["cum_seq_lens_kv"][1:] = call["seq_lens"].cumsum(0)


@precast_api(
    trace=table_trace(
        "trtllm_batch_context",
        "Attention of a ragged batch of queries over the pages of a block table.",
        trtllm_batch_context_with_kv_cache_reference,
        {
            "num_queries": Var("Queries of all requests.", sample=9),
            "len_indptr": Var("One more than requests.", sample=3),
        },
        "num_queries",
        {
            "cum_seq_lens_q": Tensor(["len_indptr"], dtype="int32"),
            "cum_seq_lens_kv": Tensor(["len_indptr"], dtype="int32"),
            "batch_size": Scalar("int32"),
            "max_q_len": Scalar("int32"),
            "max_kv_len": Scalar("int32"),
            "causal": Scalar("bool"),
        },
        _fill,
    )
)
@op("attention", explain=explain_cache)
@documented(FUNCTIONAL, TABLES)
def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor,
    kv_cache: Cache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Real,
    bmm2_scale: Real,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    out_dtype: Dtype = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: torch.Tensor | None = None,
    kv_cache_sf: Cache | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    backend: str = "trtllm-gen",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Compute attention of a ragged batch of queries over a block table.

    .. math::

        O_{i, h} = bmm2 \sum_j \mathrm{softmax}_j(bmm1 \cdot Q_{i, h} \cdot K_{j, h'}) V_{j, h'}

    where :math:`j` runs over the tokens of the request of query :math:`i` and
    :math:`h' = \lfloor h / (H_{qo} / H_{kv}) \rfloor`. The last query of a request is its last
    token. There is no plan to make before: lengths and tables are read on the device.

    Parameters
    ----------
    query : torch.Tensor
        ``[tokens, num_qo_heads, head_dim]``, float16 or bfloat16, or of 8 bits: the queries of all
        requests one after the other. ``num_qo_heads`` is a multiple of ``num_kv_heads``;
        ``head_dim`` is 64, 80, 96, 128, 256 or 512, or 192 with values of 128. Stride 1 in the last
        dimension, any in the others.
    max_q_len : int
        The most queries of a request. A wrong number costs time, not results.
    max_kv_len : int
        Not read: the width of ``block_tables`` is the bound.
    batch_size : int
        The number of requests, that of ``seq_lens``.
    cum_seq_lens_q : torch.Tensor
        ``[batch_size + 1]``, int32, on the device: where the queries of each request start.
    cum_seq_lens_kv : torch.Tensor
        Not read: ``seq_lens`` says the same.
    causal : bool
        Whether a query sees only itself and what is before it.
    use_fp16_softmax, uses_spcompress : None
        For other kernels.
    backend : str
        ``trtllm-gen``, ``xqa`` or ``auto``, which are the same.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        The output, ``out`` if it is given, and the log-sum-exp if ``return_lse``.

    Examples
    --------
    >>> import torch, precast
    >>> cache = torch.arange(2.0).view(2, 1, 1, 1, 1).expand(2, 2, 1, 1, 64)
    >>> table, lens = torch.tensor([[0, 1]]).int(), torch.tensor([2]).int()
    >>> q, bounds = torch.zeros(2, 2, 64), torch.tensor([0, 2]).int()
    >>> call = q, cache, torch.zeros(1 << 20).byte(), table, lens, 2, 2, 1.0, 1.0, 1, bounds, bounds
    >>> with precast.reference_mode():
    ...     precast.trtllm_batch_context_with_kv_cache(*call)[:, 0, 0]
    tensor([0.0000, 0.5000])
    """
    name = _WORDS.function
    check_unread_integer(name, "max_q_len", max_q_len)
    check_unread_integer(name, "max_kv_len", max_kv_len)
    check_backend(name, backend)
    check_flags(name, causal=causal, return_lse=return_lse)
    check_unread(name, cum_seq_lens_kv=cum_seq_lens_kv)
    check_batch(name, batch_size, seq_lens)
    if not (
        o_sf_scale
        is o_sf_vec_size
        is kv_cache_sf
        is skip_softmax_threshold_scale_factor
        is use_fp16_softmax
        is uses_spcompress
        is None
    ):
        refuse(
            name,
            None,
            o_sf_scale=o_sf_scale,
            o_sf_vec_size=o_sf_vec_size,
            kv_cache_sf=kv_cache_sf,
        )
        switches = {"use_fp16_softmax": use_fp16_softmax, "uses_spcompress": uses_spcompress}
        refuse_flags(name, False, **{k: v for k, v in switches.items() if v is not None})
        skipped = {"skip_softmax_threshold_scale_factor": skip_softmax_threshold_scale_factor}
        refuse(name, None, 0, **skipped)
    if uses_shared_paged_kv_idx is not True:
        refuse_flags(name, True, uses_shared_paged_kv_idx=uses_shared_paged_kv_idx)
    if multi_ctas_kv_counter_buffer is not None:
        check_unread(name, multi_ctas_kv_counter_buffer=multi_ctas_kv_counter_buffer)
    if cum_seq_lens_q is None:
        raise TypeError("no bounds")  # The check of types names it.
    k_cache, v_cache = parts_of(kv_cache)
    if return_lse and lse is None:
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    values = k_cache if v_cache is None else v_cache
    multiplies_fp8 = None
    if query.dtype.itemsize == 1 and query.dim() == 3:
        multiplies_fp8 = functools.partial(
            sm90.takes_fp8, query, values, values.shape[-3 if kv_layout == "HND" else -2], max_q_len
        )
    tensors = Outputs(_WORDS, query, values, out, workspace_buffer, out_dtype, multiplies_fp8)
    result = attend_table(
        _WORDS,
        _EXPORT_FP8 if tensors.is_fp8 else _EXPORT,
        tensors,
        k_cache,
        v_cache,
        lse,
        block_tables,
        seq_lens,
        cum_seq_lens_q,
        None,
        sinks,
        kv_layout,
        max_q_len,
        causal,
        window_left,
        factors_of(_WORDS, bmm1_scale, bmm2_scale, tensors),
        enable_pdl,
    )
    if lse is not None and return_lse:
        return result, lse
    return result
