# SPDX-License-Identifier: Apache-2.0
"""Decode attention over a block table, planned and run in one call.

Sources: Ye et al., FlashInfer, arXiv:2501.01005; Kwon et al., arXiv:2309.06180 (pages); Miao et
al., SpecInfer, arXiv:2305.09781 (draft masks).
"""

from __future__ import annotations

from precast._base.rounding import saturated
from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import op
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
    check_unread_integer,
    refuse,
)
from precast._ops.attention.functional.exports import paged_export
from precast._ops.attention.functional.reference import caches_of, table_attention
from precast._ops.attention.functional.trace import fill_table, table_trace
from precast._ops.paged._cache import Cache
from precast.api_logging import precast_api
from precast.trace import Scalar

_WORDS = Words("xqa_batch_decode_with_kv_cache")
_EXPORT = paged_export(_WORDS)


def xqa_batch_decode_with_kv_cache_reference(
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
    kv_layout: str = "NHD",
    q_len_per_req: int = 1,
    o_scale: float = 1.0,
    mask: torch.Tensor | None = None,
    q_cu_seq_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`xqa_batch_decode_with_kv_cache` in plain PyTorch on any device.

    Parameters
    ----------
    workspace_buffer : torch.Tensor
        Not read.
    """
    out, _, _ = table_attention(
        query,
        caches_of(kv_cache, kv_layout),
        block_tables,
        seq_lens,
        q_cu_seq_lens,
        q_len_per_req,
        causal=q_len_per_req > 1,
        window_left=window_left,
        sm_scale=bmm1_scale,
        out_scale=bmm2_scale * o_scale,
        draft_mask=mask if q_len_per_req > 1 else None,
        sinks=sinks,
    )
    return saturated(out, query.dtype)


@precast_api(
    trace=table_trace(
        "xqa_batch_decode",
        "Attention of the newest tokens of a batch over the pages of a block table.",
        xqa_batch_decode_with_kv_cache_reference,
        {},
        "batch_size",
        {"max_seq_len": Scalar("int32")},
        fill_table,
    )
)
@op("attention", explain=explain_cache)
@documented(FUNCTIONAL, TABLES)
def xqa_batch_decode_with_kv_cache(
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
    sinks: torch.Tensor | None = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int = 1,
    o_scale: float = 1.0,
    mask: torch.Tensor | None = None,
    kv_cache_sf: Cache | None = None,
    q_cu_seq_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""Compute attention of the newest tokens of a batch over a block table.

    .. math::

        O_{i, h} = bmm2 \sum_j \mathrm{softmax}_j(bmm1 \cdot Q_{i, h} \cdot K_{j, h'}) V_{j, h'}

    where :math:`j` runs over the tokens of the request of query :math:`i` and
    :math:`h' = \lfloor h / (H_{qo} / H_{kv}) \rfloor`. There is no plan to make before: lengths and
    tables are read on the device.

    Parameters
    ----------
    query : torch.Tensor
        ``[batch_size * q_len_per_req, num_qo_heads, head_dim]``, float16 or bfloat16, or of 8 bits;
        with ``q_cu_seq_lens`` the queries of all requests one after the other. ``num_qo_heads`` is
        a multiple of ``num_kv_heads``; ``head_dim`` is 64, 80, 96, 128, 256 or 512. Stride 1 in
        the last dimension, any in the others.
    q_len_per_req : int
        Queries of each request, its newest tokens; with ``q_cu_seq_lens`` the most of a request.
    o_scale : float
        The scale of an output of 8 bits, by which ``bmm2_scale`` has been divided. It multiplies
        an output of 16 bits, which needs none.
    mask : torch.Tensor, optional
        The draft mask of speculative decoding, uint16, contiguous,
        ``[batch_size, q_len_per_req, words]`` or ``[tokens, words]`` with 2 words for each 32
        queries: bit ``j % 16`` of word ``j // 16`` says whether a query sees query ``j`` of its
        request. It sees every token before them that is in its window. Default: a query sees
        itself and those before it. Not read where ``q_len_per_req`` is 1.
    q_cu_seq_lens : torch.Tensor, optional
        ``[batch_size + 1]``, int32, on the device: where the queries of each request start.
        Default: each has ``q_len_per_req``.

    Returns
    -------
    torch.Tensor
        The output, ``out`` if it is given.

    Examples
    --------
    >>> import torch, precast
    >>> cache, workspace = torch.full((2, 2, 4, 1, 64), 3.0), torch.zeros(1 << 20).byte()
    >>> table, lens = torch.tensor([[1, 0]]).int(), torch.tensor([5]).int()
    >>> with precast.reference_mode():
    ...     precast.xqa_batch_decode_with_kv_cache(
    ...         torch.ones(1, 2, 64), cache, workspace, table, lens, 8, bmm1_scale=0.125
    ...     ).unique()
    tensor([3.])
    """
    name = _WORDS.function
    check_unread_integer(name, "max_seq_len", max_seq_len)
    if kv_cache_sf is not None:
        refuse(name, None, kv_cache_sf=kv_cache_sf)
    k_cache, v_cache = parts_of(kv_cache)
    values = k_cache if v_cache is None else v_cache
    tensors = Outputs(_WORDS, query, values, out, workspace_buffer)
    return attend_table(
        _WORDS,
        _EXPORT,
        tensors,
        k_cache,
        v_cache,
        None,
        block_tables,
        seq_lens,
        q_cu_seq_lens,
        mask_of(_WORDS, mask, seq_lens.shape[0], q_len_per_req),
        sinks,
        kv_layout,
        q_len_per_req,
        q_len_per_req > 1,
        window_left,
        factors_of(_WORDS, bmm1_scale, bmm2_scale, tensors, o_scale),
        enable_pdl,
    )
