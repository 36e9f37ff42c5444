# SPDX-License-Identifier: Apache-2.0
"""Decode attention of one request.

Source: Ye et al., FlashInfer, arXiv:2501.01005.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import op
from precast._op.validation import check_rank
from precast._ops.attention import validation
from precast._ops.attention._docs import PLAN, RUN
from precast._ops.attention.plan import Scores
from precast._ops.attention.reference import reference_outputs
from precast._ops.attention.run import Scale
from precast._ops.attention.single import run_single, single_decode
from precast._ops.attention.trace import single_trace
from precast.api_logging import precast_api


def single_decode_with_kv_cache_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
    o_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`single_decode_with_kv_cache` in plain PyTorch on any device.

    Parameters
    ----------
    o_dtype : torch.dtype, optional
        Of the output. Default: that of ``q``.
    """
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    request = 0, slice(0, 1), k, v
    results = reference_outputs(
        q.unsqueeze(0),
        iter([request]),
        v.shape[-1],
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=return_lse,
        o_dtype=o_dtype,
    )
    if isinstance(results, tuple):
        return results[0].squeeze(0), results[1].squeeze(0)
    return results.squeeze(0)


@precast_api(
    trace=single_trace(
        "single_decode",
        "Attention of one token over the keys and values of its request.",
        single_decode_with_kv_cache_reference,
        [],
    )
)
@op("attention")
@documented(PLAN, RUN)
def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Scale = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Compute attention of one token over the keys and values of its request.

    .. math::

        O_h = \sum_j \mathrm{softmax}_j(sm\_scale \cdot Q_h \cdot K_{j, h'}) V_{j, h'}, \quad
        h' = \lfloor h / (H_{qo} / H_{kv}) \rfloor

    The query is at position ``kv_len - 1`` of the keys.

    Parameters
    ----------
    q : torch.Tensor
        ``[num_qo_heads, head_dim]``, float16 or bfloat16, on a CUDA device; stride 1 in the last
        dimension.
    k, v : torch.Tensor
        ``[kv_len, num_kv_heads, head_dim]`` in layout ``NHD``, ``[num_kv_heads, kv_len, head_dim]``
        in ``HND``; of the dtype of ``q``, float8_e4m3fn or float8_e5m2; stride 1 in the last
        dimension, any in the others. ``num_qo_heads`` is a multiple of ``num_kv_heads``;
        ``head_dim`` is 64, 80, 96, 128, 256 or 512.
    use_tensor_cores : bool
        Without effect: the kernel uses them.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        ``[num_qo_heads, head_dim]``, and ``[num_qo_heads]``, float32, if asked for. Without tokens
        0 and minus infinity.

    Raises
    ------
    precast.errors.CacheLayoutError
        Another layout or mode (a ``KeyError`` and a ``ValueError``).
    precast.errors.UnsupportedConfigError
        A ``head_dim`` or dtype that no kernel is for (a ``ValueError``).
    ValueError
        A tensor that is not on a CUDA device; heads that do not divide; shapes or strides other
        than above.

    Notes
    -----
    Plans and runs, so many requests are better served by
    :class:`BatchDecodeWithPagedKVCacheWrapper`. Allocates workspaces and outputs; safe in CUDA
    graphs; not differentiable. Source: arXiv:2501.01005.

    Examples
    --------
    >>> import torch, precast
    >>> q, k = torch.ones(2, 64), torch.zeros(3, 1, 64)
    >>> with precast.reference_mode():
    ...     precast.single_decode_with_kv_cache(q, k, k + 3.0, return_lse=True)[1]
    tensor([1.5850, 1.5850])
    """
    name = "single_decode_with_kv_cache"
    if q.dim() != 2:
        check_rank(name, "q", q, 2, 2)
    validation.check_flags(name, use_tensor_cores=use_tensor_cores)
    cap, scales, dtype = logits_soft_cap, (q_scale, k_scale, v_scale), q.dtype
    scores = Scores(False, window_left, cap, sm_scale, pos_encoding_mode, rope_scale, rope_theta)
    out, lse = run_single(
        single_decode, q.unsqueeze(0), k, v, kv_layout, scores, None, scales, dtype, return_lse
    )
    return out.squeeze(0) if lse is None else (out.squeeze(0), lse.squeeze(0))
