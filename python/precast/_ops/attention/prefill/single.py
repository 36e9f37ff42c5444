# SPDX-License-Identifier: Apache-2.0
"""Prefill attention of one request.

Sources: Ye et al., FlashInfer, arXiv:2501.01005; Dao, FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from precast._base.torch import torch
from precast._op.decorators import served_by, supported_compute_capability
from precast._op.docs import documented
from precast._op.export import op
from precast._ops.attention._docs import PLAN, RUN
from precast._ops.attention.backends import FA3_CAPABILITY, check_backend
from precast._ops.attention.plan import Scores
from precast._ops.attention.reference import reference_outputs
from precast._ops.attention.run import Scale, split_scale
from precast._ops.attention.single import run_single, single_prefill
from precast._ops.attention.trace import single_trace
from precast._ops.attention.validation import check_flags, check_mask_size
from precast._ops.quantize.packbits import packbits
from precast.api_logging import precast_api


def single_prefill_with_kv_cache_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
    k_scale: float | None = None,
    v_scale: float | None = None,
    o_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`single_prefill_with_kv_cache` in plain PyTorch on any device."""
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    n, m = q.shape[0], k.shape[0]
    request = 0, slice(0, n), k, v
    return reference_outputs(
        q,
        iter([request]),
        v.shape[-1],
        torch.tensor([n * m]),
        causal=causal,
        custom_mask=custom_mask,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=return_lse,
        o_dtype=o_dtype,
    )


def _check_mask(
    qo_len: int,
    kv_len: int,
    custom_mask: torch.Tensor | None,
    packed_custom_mask: torch.Tensor | None,
) -> None:
    """Raise unless a mask has a bit for every pair of a query and a key."""
    name, pairs = "single_prefill_with_kv_cache", qo_len * kv_len
    if packed_custom_mask is not None:
        check_mask_size(name, "packed_custom_mask", packed_custom_mask, (pairs + 7) // 8)
    elif custom_mask is not None and custom_mask.numel() != pairs:
        raise ValueError(
            f"{name}: custom_mask must have {pairs} elements, {qo_len} queries by {kv_len} keys, "
            f"got shape {[*custom_mask.shape]}"
        )


def _product(option: str, of_heads: torch.Tensor | None, scale: Scale) -> Scale:
    """Return both scales as one; ``option`` is the name of the second one."""
    if of_heads is None or scale is None:
        return scale if of_heads is None else of_heads
    number, on_device = split_scale("single_prefill_with_kv_cache", option, scale, "")
    return of_heads * (number if on_device is None else on_device)


@supported_compute_capability([10 * FA3_CAPABILITY[0] + FA3_CAPABILITY[1]])
def _fa3(backend: str, **others: Any) -> bool:
    return True


def _order(suitable: Sequence[str], **arguments: Any) -> Sequence[str]:
    return [name for name in suitable if name == "fa2"]


@precast_api(
    trace=single_trace(
        "single_prefill",
        "Attention of some tokens over the keys and values of their request.",
        single_prefill_with_kv_cache_reference,
        ["qo_len"],
    )
)
@op("attention", backends={"fa2": served_by("attention"), "fa3": _fa3}, heuristic=_order)
@documented(PLAN, RUN)
def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Compute attention of some tokens over the keys and values of their request.

    .. math::

        O_{i, h} = \sum_j \mathrm{softmax}_j(s_{i, h, j}) V_{j, h'}, \quad
        s_{i, h, j} = \mathrm{cap}(sm\_scale \cdot Q_{i, h} \cdot K_{j, h'} + bias) + mask_{i, j}

    with :math:`h' = \lfloor h / (H_{qo} / H_{kv}) \rfloor`. Query :math:`i` is at position
    ``kv_len - qo_len + i`` of the keys.

    Parameters
    ----------
    q : torch.Tensor
        ``[qo_len, num_qo_heads, head_dim_qk]``, float16 or bfloat16, or with an ``o_dtype``
        float8_e4m3fn or float8_e5m2, on a CUDA device; stride 1 in the last dimension, any in the
        others.
    k : torch.Tensor
        ``[kv_len, num_kv_heads, head_dim_qk]`` in layout ``NHD``,
        ``[num_kv_heads, kv_len, head_dim_qk]`` in ``HND``; of the dtype of ``q``, float8_e4m3fn or
        float8_e5m2; strides likewise. ``num_qo_heads`` is a multiple of ``num_kv_heads``.
    v : torch.Tensor
        The same with ``head_dim_vo``. Both dimensions are 64, 80, 96, 128, 256 or 512, or they are
        192 and 128.
    scale_q, scale_k, scale_v : torch.Tensor, optional
        Of queries of 8 bits and their keys and values: one positive number, or one for each head,
        ``[num_qo_heads]`` and ``[num_kv_heads]``, float32 on the device. Default: 1.
    o_dtype : torch.dtype, optional
        Of the output. Default: that of ``q``; another one costs a kernel of its own.
    custom_mask : torch.Tensor, optional
        ``[qo_len, kv_len]``, bool, or flat: True where a query attends to a key. Takes the place of
        ``causal``.
    packed_custom_mask : torch.Tensor, optional
        The same as bits, uint8 ``[ceil(qo_len * kv_len / 8)]``, the lowest of a byte first.
    kv_cache_sf : None
        Of keys and values of 4 bits, which are not supported.
    k_scale : float or torch.Tensor, optional
        Multiplies ``sm_scale``. A tensor on the device is one positive float32 and is read there.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        ``[qo_len, num_qo_heads, head_dim_vo]``, and ``[qo_len, num_qo_heads]``, float32, if asked
        for. A query that sees nothing has 0 and minus infinity.

    Raises
    ------
    precast.errors.BackendSupportedError
        Another backend, or ``fa3`` on a GPU that is not of compute capability 9.0.
    precast.errors.CacheLayoutError
        Another layout or mode (a ``KeyError`` and a ``ValueError``).
    precast.errors.UnsupportedConfigError
        A head dimension or dtype that no kernel is for (a ``ValueError``).
    NotImplementedError
        An argument for formats that are not supported.
    ValueError
        A tensor that is not on a CUDA device; heads that do not divide; shapes or strides other
        than above.

    Notes
    -----
    Plans and runs, so many requests are better served by
    :class:`BatchPrefillWithPagedKVCacheWrapper`. Allocates workspaces and outputs; safe in CUDA
    graphs; not differentiable. Sources: arXiv:2501.01005, arXiv:2307.08691.

    Examples
    --------
    >>> import torch, precast
    >>> q, k = torch.zeros(2, 2, 64), torch.arange(2.0).view(2, 1, 1).expand(2, 1, 64)
    >>> with precast.reference_mode():
    ...     precast.single_prefill_with_kv_cache(q, k, k, causal=True)[:, 0, 0]
    tensor([0.0000, 0.5000])
    """
    name = "single_prefill_with_kv_cache"
    check_backend(name, backend, q.device)
    check_flags(name, use_fp16_qk_reduction=use_fp16_qk_reduction)
    if kv_cache_sf is not None:
        raise NotImplementedError(f"{name}: kv_cache_sf must be None: no kernel here has it")
    for option, value in (("scale_q", scale_q), ("scale_k", scale_k), ("scale_v", scale_v)):
        if value is not None and q.dtype.itemsize > 1:
            raise ValueError(
                f"{name}: {option} must be None for queries of {q.dtype}: it is of queries of 8 "
                f"bits. Fix: pass k_scale or v_scale, or multiply sm_scale"
            )
    k_scale = _product("k_scale", scale_k, k_scale)
    v_scale = _product("v_scale", scale_v, v_scale)
    masked = custom_mask is not None or packed_custom_mask is not None
    if masked and q.dim() == k.dim() == 3:
        _check_mask(q.shape[0], k.shape[kv_layout == "HND"], custom_mask, packed_custom_mask)
    if custom_mask is not None and packed_custom_mask is None:
        packed_custom_mask = packbits(custom_mask.contiguous().view(-1), "little")
    mask, cap, scales = packed_custom_mask, logits_soft_cap, (scale_q, k_scale, v_scale)
    scores = Scores(causal, window_left, cap, sm_scale, pos_encoding_mode, rope_scale, rope_theta)
    o_dtype = q.dtype if o_dtype is None else o_dtype
    out, lse = run_single(
        single_prefill, q, k, v, kv_layout, scores, mask, scales, o_dtype, return_lse
    )
    return out if lse is None else (out, lse)


#: :func:`single_prefill_with_kv_cache` with ``return_lse=True``.
single_prefill_with_kv_cache_return_lse = functools.partial(
    single_prefill_with_kv_cache, return_lse=True
)
