# SPDX-License-Identifier: Apache-2.0
"""Decode attention over a block table, with the arguments of FlashInfer's ``xqa``.

Sources: Ye et al., FlashInfer, arXiv:2501.01005; NVIDIA, TensorRT-LLM, XQA (the arguments); Kwon et
al., arXiv:2309.06180 (pages).
"""

from __future__ import annotations

import math

from precast._base.rounding import saturated
from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import op
from precast._op.ranges import POSITIVE
from precast._op.scalars import check_integer, check_number
from precast._ops.attention.functional._docs import FUNCTIONAL, TABLES
from precast._ops.attention.functional.call import (
    Factors,
    Outputs,
    Real,
    attend_table,
    mask_of,
)
from precast._ops.attention.functional.calls import Words
from precast._ops.attention.functional.checks import check_unread, refuse
from precast._ops.attention.functional.decode import xqa_batch_decode_with_kv_cache
from precast._ops.attention.functional.exports import paged_export
from precast._ops.attention.functional.reference import caches_of, table_attention
from precast._ops.attention.functional.trace import BATCH, HEADS, PAGES, WORKSPACE, fill_table
from precast._ops.attention.run import split_scale
from precast._ops.attention.trace import LAYOUTS, by_form, entries_axes
from precast._ops.paged._cache import check_layout
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var

_WORDS = Words(
    "xqa",
    query="q",
    out="output",
    cache="k_cache",
    keys="k_cache",
    values="v_cache",
    tables="page_table",
    q_len="q_seq_len",
    bmm1="q_scale",
    bmm2="kv_scale",
)


def _with_requests(
    rows: torch.Tensor, seq_lens: torch.Tensor, q_cu_seq_lens: torch.Tensor | None, q_seq_len: int
) -> torch.Tensor:
    """Return rows in the shape in which callers give them, with a beam of 1."""
    if q_cu_seq_lens is not None or rows.shape[0] != seq_lens.shape[0] * q_seq_len:
        return rows
    drafts = [q_seq_len] if q_seq_len > 1 else []
    return rows.view(seq_lens.shape[0], 1, *drafts, *rows.shape[1:])


def _by_kv_head(sinks: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return ``[num_kv_heads, group]`` of the logits of all heads."""
    return sinks.view(kv_heads, -1) if kv_heads and sinks.numel() % kv_heads == 0 else sinks


_EXPORT = paged_export(
    _WORDS,
    {
        "q": lambda q, seq_lens, q_cu_seq_lens, q_seq_len: _with_requests(
            q, seq_lens, q_cu_seq_lens, q_seq_len
        ),
        "output": lambda output, seq_lens, q_cu_seq_lens, q_seq_len: _with_requests(
            output, seq_lens, q_cu_seq_lens, q_seq_len
        ),
        "seq_lens": lambda seq_lens: seq_lens.view(-1, 1),
        "sinks": lambda sinks, k_cache, kv_layout: (
            sinks if sinks is None else _by_kv_head(sinks, _sizes(k_cache, kv_layout)[0])
        ),
        "num_kv_heads": lambda k_cache, kv_layout: _sizes(k_cache, kv_layout)[0],
        "page_size": lambda k_cache, kv_layout: _sizes(k_cache, kv_layout)[1],
        "q_scale": lambda q, sm_scale, qk_scale, causal, logits_soft_cap, is_alibi: (
            sm_scale * math.sqrt(q.shape[-1]) if qk_scale is None else qk_scale
        ),
        "kv_scale": lambda out_scale, v_scale: out_scale if v_scale is None else v_scale,
        "sliding_win_size": lambda window_left: window_left + 1,
    },
)


def _sizes(k_cache: torch.Tensor, kv_layout: str) -> tuple[int, int]:
    """Return KV heads and page size."""
    outer, inner = k_cache.shape[-3:-1]
    return (outer, inner) if kv_layout == "HND" else (inner, outer)


def xqa_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    workspace_buffer: torch.Tensor,
    semaphores: torch.Tensor,
    num_kv_heads: int,
    page_size: int,
    sinks: torch.Tensor | None = None,
    q_scale: float = 1.0,
    kv_scale: float = 1.0,
    sliding_win_size: int = 0,
    kv_layout: str = "NHD",
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: torch.Tensor | None = None,
    q_cu_seq_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`xqa` in plain PyTorch on any device, out of place.

    Parameters
    ----------
    output : torch.Tensor
        Says the shape and the dtype of the output.
    workspace_buffer, semaphores : torch.Tensor
        Not read.

    Returns
    -------
    torch.Tensor
        The output.
    """
    scale = kv_scale if k_cache.dtype.itemsize == 1 else 1.0
    out, _, _ = table_attention(
        q.flatten(0, -3),
        caches_of((k_cache, v_cache), kv_layout),
        page_table,
        seq_lens.flatten(),
        q_cu_seq_lens,
        q_seq_len,
        causal=q_seq_len > 1,
        window_left=sliding_win_size - 1,
        sm_scale=q_scale * scale / math.sqrt(q.shape[-1]),
        out_scale=scale * (rcp_out_scale if output.dtype.itemsize == 1 else 1.0),
        draft_mask=mask if q_seq_len > 1 else None,
        sinks=None if sinks is None else sinks.flatten(),
    )
    return saturated(out, output.dtype).view(output.shape)


# -- the trace ------------------------------------------------------------------------------------


def _template(layout: str) -> TraceTemplate:
    entries = entries_axes(layout, "page_size")
    beam: dict[str, Var | Const] = {"beam": Const("", "Beams.", value="1")}
    rows = ["batch_size", "beam", "num_qo_heads", "head_dim"]
    return TraceTemplate(
        op_type="gqa_paged",
        name_prefix="xqa" + ("_hnd" if layout == "HND" else ""),
        description="Attention of the newest token of each request over the pages of a table.",
        axes={**BATCH, **beam, **HEADS, **PAGES, **WORKSPACE, "num_semaphores": Var("Not read.")},
        inputs={
            "q": Tensor(rows),
            "k_cache": Tensor(["num_pages", *entries]),
            "v_cache": Tensor(["num_pages", *entries]),
            "page_table": Tensor(["batch_size", "max_pages"], dtype="int32"),
            "seq_lens": Tensor(["batch_size", "beam"], dtype="int32"),
            "out": Tensor(rows, param="output", description="Says the shape of the output."),
            "workspace_buffer": Tensor(["workspace_bytes"], dtype="uint8"),
            "semaphores": Tensor(["num_semaphores"], dtype="uint8"),
            "kv_heads": Scalar("int32", param="num_kv_heads"),
            "page_entries": Scalar("int32", param="page_size"),
            "q_scale": Scalar("float32"),
            "kv_scale": Scalar("float32"),
            "sliding_win_size": Scalar("int32"),
        },
        outputs={"output": Tensor(rows, param="output", dtype_from="q")},
        constraints=["num_qo_heads % num_kv_heads == 0"],
        reference=xqa_reference,
        fixed={"kv_layout": layout},
        fill=lambda call: fill_table(call, "page_table"),
    )


# -- the op ---------------------------------------------------------------------------------------


@precast_api(
    trace=by_form(
        _template,
        lambda kv_layout="NHD", **others: ("HND" if kv_layout == "HND" else "NHD",),
        LAYOUTS,
    )
)
@op("attention", explain=lambda export, kv_layout: check_layout(export, kv_layout))
@documented(xqa_batch_decode_with_kv_cache, FUNCTIONAL, TABLES)
def xqa(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    workspace_buffer: torch.Tensor,
    semaphores: torch.Tensor,
    num_kv_heads: int,
    page_size: int,
    sinks: torch.Tensor | None = None,
    q_scale: Real = 1.0,
    kv_scale: Real = 1.0,
    sliding_win_size: int = 0,
    kv_layout: str = "NHD",
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: torch.Tensor | None = None,
    *,
    q_cu_seq_lens: torch.Tensor | None = None,
    k_sf_cache: torch.Tensor | None = None,
    v_sf_cache: torch.Tensor | None = None,
) -> None:
    r"""Compute attention of the newest tokens of a batch over a block table, into ``output``.

    .. math::

        O_{i, h} = kv\_scale \sum_j \mathrm{softmax}_j\left(\frac{q\_scale \cdot kv\_scale}
        {\sqrt{head\_dim}} Q_{i, h} \cdot K_{j, h'}\right) V_{j, h'}

    This is :func:`xqa_batch_decode_with_kv_cache` with scales for queries and for the cache.

    Parameters
    ----------
    q : torch.Tensor
        ``[batch_size, 1, num_qo_heads, head_dim]``, with ``q_seq_len > 1``
        ``[batch_size, 1, q_seq_len, num_qo_heads, head_dim]``, with ``q_cu_seq_lens``
        ``[tokens, num_qo_heads, head_dim]``; float16 or bfloat16, or of 8 bits. The dimension of 1
        is the beam. ``head_dim`` is 64, 80, 96, 128, 256 or 512.
    k_cache, v_cache : torch.Tensor
        ``[pages, page_size, num_kv_heads, head_dim]`` in layout ``NHD``,
        ``[pages, num_kv_heads, page_size, head_dim]`` in ``HND``; of the dtype of ``q``,
        float8_e4m3fn or float8_e5m2. Any page size; stride 1 in the last dimension, any in the
        others.
    page_table : torch.Tensor
        ``[batch_size, max_pages]``, int32, on the device: the pages of each request.
    seq_lens : torch.Tensor
        ``[batch_size, 1]`` or ``[batch_size]``, int32 or uint32, on the device: tokens of each
        request in the cache, those of its queries among them.
    output : torch.Tensor
        Where to write: the shape of ``q``, whose dimensions before the heads can be viewed as one;
        of the dtype of ``q``, or of 8 bits.
    semaphores : torch.Tensor
        For other kernels; not read.
    num_kv_heads, page_size : int
        Those of ``k_cache``.
    sinks : torch.Tensor, optional
        ``[num_kv_heads, num_qo_heads // num_kv_heads]``, float32: a logit (base e, not scaled) that
        takes its share of each softmax and has no value.
    q_scale, kv_scale : float or torch.Tensor
        The scales of queries, and of keys and values of 8 bits; those of 16 bits have none, and
        ``kv_scale`` is not read. A tensor is one positive float32 on the device and is read there;
        the product of two tensors takes one more launch.
    sliding_win_size : int
        A query sees so many tokens, its own among them; 0 is all.
    sm_count : int, optional
        Not read: the kernels use all multiprocessors.
    rcp_out_scale : float
        Multiplies an output of 8 bits.
    q_seq_len : int
        Queries of each request, its newest tokens; with ``q_cu_seq_lens`` the most of a request.
    mask : torch.Tensor, optional
        The draft mask of speculative decoding, uint16, contiguous,
        ``[batch_size, q_seq_len, words]`` or ``[tokens, words]``, as for
        :func:`xqa_batch_decode_with_kv_cache`.
    k_sf_cache, v_sf_cache : None
        Scales of NVFP4 keys and values, which no kernel here reads.

    Examples
    --------
    >>> import torch, precast
    >>> q, k = torch.zeros(1, 1, 2, 64), torch.ones(2, 4, 1, 64)
    >>> table, lens = torch.tensor([[1, 0]]).int(), torch.tensor([[5]]).int()
    >>> workspace, output = torch.zeros(1 << 20).byte(), torch.empty_like(q)
    >>> with precast.reference_mode():
    ...     precast.xqa.xqa(q, k, k, table, lens, output, workspace, workspace, 1, 4)
    >>> output.unique()
    tensor([1.])
    """
    name = _WORDS.function
    check_unread(name, semaphores=semaphores)
    if sm_count is not None:
        check_integer(name, "sm_count", sm_count)
    if not k_sf_cache is v_sf_cache is None:
        refuse(name, None, k_sf_cache=k_sf_cache, v_sf_cache=v_sf_cache)
    _check_sizes(k_cache, num_kv_heads, page_size, kv_layout)
    rows = q if q_cu_seq_lens is not None else _rows_of("q", q, q_seq_len)
    into = output if q_cu_seq_lens is not None else _rows_of("output", output, q_seq_len)
    tensors = Outputs(_WORDS, rows, v_cache, into, workspace_buffer)
    attend_table(
        _WORDS,
        _EXPORT,
        tensors,
        k_cache,
        v_cache,
        None,
        page_table,
        seq_lens.view(-1),
        q_cu_seq_lens,
        mask_of(_WORDS, mask, seq_lens.shape[0], q_seq_len),
        None if sinks is None else sinks.reshape(-1),
        kv_layout,
        q_seq_len,
        q_seq_len > 1,
        sliding_win_size - 1,
        _factors(rows, k_cache, tensors, q_scale, kv_scale, rcp_out_scale),
        enable_pdl,
    )


def _check_sizes(k_cache: torch.Tensor, num_kv_heads: int, page_size: int, kv_layout: str) -> None:
    sizes = num_kv_heads, page_size
    if _sizes(k_cache, kv_layout) != sizes:
        check_layout("xqa", kv_layout)
        for argument, got, held in zip(
            ("num_kv_heads", "page_size"), sizes, _sizes(k_cache, kv_layout), strict=True
        ):
            check_integer("xqa", argument, got)
            if got != held:
                raise ValueError(
                    f"xqa: {argument} must be {held}, that of k_cache in layout {kv_layout}, got "
                    f"{got}"
                )


def _rows_of(argument: str, tensor: torch.Tensor, q_seq_len: int) -> torch.Tensor:
    """Return ``[tokens, heads, head_dim]`` of a tensor with requests and a beam."""
    rank = 5 if q_seq_len > 1 else 4
    if tensor.dim() != rank or tensor.shape[1] != 1 or (rank == 5 and tensor.shape[2] != q_seq_len):
        drafts = f"{q_seq_len}, " if rank == 5 else ""
        raise ValueError(
            f"xqa: {argument} must have shape [batch_size, 1, {drafts}num_qo_heads, head_dim], got "
            f"{[*tensor.shape]}"
        )
    try:
        return tensor.view(-1, *tensor.shape[-2:])
    except RuntimeError:
        raise ValueError(
            f"xqa: {argument} must have dimensions before the heads that can be viewed as one, got "
            f"strides {[*tensor.stride()]}. Fix: pass a contiguous tensor"
        ) from None


def _factors(
    rows: torch.Tensor,
    k_cache: torch.Tensor,
    tensors: Outputs,
    q_scale: Real,
    kv_scale: Real,
    rcp_out_scale: float,
) -> Factors:
    """Return the factors of logits and outputs."""
    if q_scale is None or kv_scale is None:
        raise TypeError("no scale")  # The check of types names it.
    sm_scale, qk_factor = split_scale("xqa", "q_scale", q_scale, "")
    out_scale, v_factor = split_scale("xqa", "kv_scale", kv_scale, "")
    check_number("xqa", "rcp_out_scale", rcp_out_scale, POSITIVE)
    if k_cache.dtype.itemsize > 1:
        out_scale, v_factor = 1.0, None
    sm_scale *= out_scale
    if v_factor is not None:
        qk_factor = v_factor if qk_factor is None else qk_factor * v_factor
    if tensors.is_8_bit:
        out_scale *= rcp_out_scale
    return sm_scale / math.sqrt(rows.shape[-1]), out_scale, qk_factor, v_factor
