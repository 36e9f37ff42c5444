# SPDX-License-Identifier: Apache-2.0
"""From the arguments of ``run()`` to those of the kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

from precast._base.errors import CacheLayoutError, PlanMismatchError
from precast._base.torch import torch
from precast._op.torch_ops import torch_ops
from precast._ops.attention import enums as words
from precast._ops.attention import kernels
from precast._ops.attention.reference import CUSTOM

if TYPE_CHECKING:
    from precast._ops.attention.wrapper import AttentionWrapper

    Scale: TypeAlias = "float | torch.Tensor | None"
    Cache: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
    Result: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"


def run_paged(
    wrapper: AttentionWrapper,
    q: torch.Tensor,
    paged_kv_cache: Cache,
    qo_indptr: torch.Tensor | None,
    q_len_per_req: int,
    mask_mode: int,
    q_scale: Scale,
    k_scale: Scale,
    v_scale: Scale,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
    sinks: torch.Tensor | None,
    enable_pdl: bool | None,
) -> Result:
    """Attention over the pages that the wrapper has planned for."""
    w: Any = wrapper
    if isinstance(paged_kv_cache, tuple):
        k_cache, v_cache = pair(w, paged_kv_cache)
    else:
        k_cache, v_cache = paged_kv_cache, None
    try:
        if k_cache.dim() == (4 if v_cache is None else 3):  # Page size 1, left out of the shape.
            page = -2 if w._hnd else -3
            k_cache = k_cache.unsqueeze(page)
            v_cache = None if v_cache is None else v_cache.unsqueeze(page)
        if q.dtype is not w._cached_q_data_type or k_cache.dtype is not w._cached_kv_data_type:
            raise_dtype(w, q, k_cache)
        shape, entries = q.shape, k_cache.shape
        if w._planned_rows is not None and shape[0] != w._planned_rows:
            w._check_rows(shape[0])
        if entries[w._head_at] != w._num_kv_heads or entries[w._entry_at] != w._page_size:
            raise_cache(w, k_cache)
        if shape[1] != w._num_qo_heads:
            raise_heads(w, "q", q, w._num_qo_heads)
    except (AttributeError, IndexError):
        check_tensors(w, q, k_cache, v_cache)
        raise
    result, lse = outputs(w, q, out, lse, return_lse)
    into = result if result.dtype is q.dtype else torch.empty_like(result, dtype=q.dtype)
    run: Any = (
        torch_ops.run_paged if torch.compiler.is_compiling() else kernels.run_paged[w._run_key]
    )
    run(
        q,
        k_cache,
        v_cache,
        w._hnd,
        qo_indptr,
        w._paged_kv_indptr_buf,
        w._paged_kv_indices_buf,
        w._paged_kv_last_page_len_buf,
        None,
        w._int_workspace_buffer,
        w._float_workspace_buffer,
        into,
        lse,
        *w._plan_info,
        q_len_per_req,
        *scores(w, q, mask_mode, q_scale, k_scale, v_scale, sinks),
        enable_pdl is not False,
    )
    if into is not result:
        result.copy_(into)
    return result, lse


def run_ragged(
    wrapper: AttentionWrapper,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    mask_mode: int,
    q_scale: Scale,
    k_scale: Scale,
    v_scale: Scale,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
    sinks: torch.Tensor | None,
    enable_pdl: bool | None,
) -> Result:
    """Attention over keys and values of requests one behind the other."""
    w: Any = wrapper
    try:
        if q.dtype is not w._cached_q_data_type or k.dtype is not w._cached_kv_data_type:
            raise_dtype(w, q, k)
        if w._planned_rows is not None and q.shape[0] != w._planned_rows:
            w._check_rows(q.shape[0])
        if k.shape[0 if w._hnd else 1] != w._num_kv_heads:
            raise_heads(w, "k", k, w._num_kv_heads)
        if q.shape[1] != w._num_qo_heads:
            raise_heads(w, "q", q, w._num_qo_heads)
    except (AttributeError, IndexError):
        check_tensors(w, q, k, v)
        raise
    if w._hnd:
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    result, lse = outputs(w, q, out, lse, return_lse)
    into = result if result.dtype is q.dtype else torch.empty_like(result, dtype=q.dtype)
    run: Any = (
        torch_ops.run_ragged if torch.compiler.is_compiling() else kernels.run_ragged[w._run_key]
    )
    run(
        q,
        k,
        v,
        qo_indptr,
        kv_indptr,
        w._int_workspace_buffer,
        w._float_workspace_buffer,
        into,
        lse,
        *w._plan_info,
        0,
        *scores(w, q, mask_mode, q_scale, k_scale, v_scale, sinks),
        enable_pdl is not False,
    )
    if into is not result:
        result.copy_(into)
    return result, lse


def scores(
    w: Any,
    q: torch.Tensor,
    mask_mode: int,
    q_scale: Scale,
    k_scale: Scale,
    v_scale: Scale,
    sinks: torch.Tensor | None,
) -> tuple[Any, ...]:
    """The arguments that both exports end with, but for the last."""
    sm_scale = w._sm_scale
    if sm_scale is None:
        sm_scale = 1.0 / math.sqrt(q.shape[-1])
    out_scale, qk_factor, v_factor = 1.0, None, None
    if q_scale is not None or k_scale is not None or v_scale is not None:
        sm_scale, qk_factor, out_scale, v_factor = scales_of(
            w._name, sm_scale, q_scale, k_scale, v_scale
        )
    positions = words.POS_ENCODINGS.get(w._pos_encoding_mode)
    if positions is None:
        positions = words.pos_encoding(w._name, w._pos_encoding_mode)  # Which refuses it.
    return (
        mask_mode,
        w._custom_mask_buf if mask_mode == CUSTOM else None,
        w._mask_indptr_buf if mask_mode == CUSTOM else None,
        w._window_left,
        positions,
        words.alibi_slopes(q.shape[1], q.device) if positions == words.ALIBI else None,
        w._rope_scale or 1.0,
        w._rope_theta or 1e4,
        w._logits_soft_cap or 0.0,
        sm_scale,
        out_scale,
        qk_factor,
        v_factor,
        w._sinks if sinks is None else sinks,
        w._prefix_len_ptr,
        w._token_pos_in_items_ptr,
        w._token_pos_in_items_len,
        w._max_item_len_ptr,
    )


# -- arguments ------------------------------------------------------------------------------------


def pair(w: Any, paged_kv_cache: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a tuple."""
    if len(paged_kv_cache) != 2:
        raise CacheLayoutError(
            f"{w._name}.run: paged_kv_cache must be a torch.Tensor or a tuple of two, got a tuple "
            f"of {len(paged_kv_cache)}"
        )
    k, v = paged_kv_cache
    if k is None or v is None:
        raise CacheLayoutError(
            f"{w._name}.run: paged_kv_cache must be a torch.Tensor or a tuple of two, got NoneType "
            f"in a tuple"
        )
    return k, v


def check_tensors(w: Any, q: object, k: object, v: object) -> None:
    """Say what is no tensor, or that there is no plan; called when a call has failed already."""
    check_planned(w)
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"{w._name}.run: q must be a torch.Tensor, got {type(q).__name__}")
    for part in (k,) if v is None else (k, v):
        if not isinstance(part, torch.Tensor):
            raise CacheLayoutError(
                f"{w._name}.run: keys and values must be a torch.Tensor or a tuple of two, got "
                f"{type(part).__name__}"
            )
    for name, tensor in (("q", q), ("paged_kv_cache" if w._page_size else "k", k)):
        assert isinstance(tensor, torch.Tensor)
        if tensor.dim() < 3:
            raise ValueError(
                f"{w._name}.run: {name} must have at least 3 dimensions, got shape "
                f"{[*tensor.shape]}"
            )


def check_planned(w: Any) -> None:
    """Say that there is no plan, if there is none."""
    if w._plan_info is None:
        raise PlanMismatchError(f"{w._name}.run: there is no plan. Fix: call plan() first")


def raise_heads(w: Any, name: str, tensor: torch.Tensor, planned: int) -> None:
    """Say that a number of heads is not that of the plan."""
    raise ValueError(
        f"{w._name}.run: {name} must have {planned} heads as in plan(), got shape {[*tensor.shape]}"
    )


def raise_cache(w: Any, k_cache: torch.Tensor) -> None:
    """Say that heads or the size of pages are not those of the plan."""
    raise ValueError(
        f"{w._name}.run: paged_kv_cache must have {w._num_kv_heads} heads and pages of "
        f"{w._page_size} tokens as in plan(), in layout {w._kv_layout}, got shape "
        f"{[*k_cache.shape]}"
    )


def raise_dtype(w: Any, q: torch.Tensor, k: torch.Tensor) -> None:
    """Say which dtype is not that of the plan."""
    check_planned(w)
    for name, tensor, option, planned in (
        ("q", q, "q_data_type", w._cached_q_data_type),
        ("k", k, "kv_data_type", w._cached_kv_data_type),
    ):
        if tensor.dtype != planned:
            raise ValueError(
                f"{w._name}.run: the dtype of {name}, {tensor.dtype}, does not match the "
                f"{option} {planned} of plan()"
            )


def outputs(
    w: Any,
    q: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
) -> Result:
    """The caller's outputs, checked, or new ones."""
    dtype, dim = w._cached_o_data_type, w._head_dim_vo
    shape = (*q.shape[:-1], dim)
    if out is not None:
        words.check_shape_dtype_device(out, shape, dtype, q.device, "out")
    elif w._pads:
        out = q.new_zeros(shape, dtype=dtype)
    elif q.dtype is dtype and q.shape[-1] == dim and q.is_contiguous():
        out = torch.empty_like(q)  # Why: half as long as new_empty, of all that run() takes.
    else:
        out = q.new_empty(shape, dtype=dtype)
    if not return_lse:
        return out, None
    if lse is None:
        return out, q.new_empty(shape[:-1], dtype=torch.float32)
    words.check_shape_dtype_device(lse, shape[:-1], torch.float32, q.device, "lse")
    return out, lse


def scales_of(
    name: str, sm_scale: float, q_scale: Scale, k_scale: Scale, v_scale: Scale
) -> tuple[float, torch.Tensor | None, float, torch.Tensor | None]:
    """What multiplies logits, as a number and on the device, and what multiplies outputs."""
    factor = None
    for option, scale in (("q_scale", q_scale), ("k_scale", k_scale)):
        number, on_device = _split(name, option, scale)
        sm_scale *= number
        if on_device is not None:
            factor = on_device if factor is None else factor * on_device
    out_scale, v_factor = _split(name, "v_scale", v_scale)
    return sm_scale, factor, out_scale, v_factor


def _split(name: str, option: str, scale: Scale) -> tuple[float, torch.Tensor | None]:
    """A number, or 1 and one float32 on the device."""
    if scale is None:
        return 1.0, None
    if not isinstance(scale, torch.Tensor):
        return float(scale), None
    if scale.numel() != 1:
        raise ValueError(
            f"{name}.run: {option} must be one number, got a tensor of shape {[*scale.shape]}"
        )
    return (1.0, scale.reshape(1).float()) if scale.is_cuda else (float(scale), None)


def check_window(w: Any, window_left: int | None) -> None:
    """A run has the window of its plan."""
    if window_left is not None:
        check_planned(w)
    if window_left is not None and window_left != w._window_left:
        raise PlanMismatchError(
            f"{w._name}.run: window_left must be {w._window_left} as in plan(), got {window_left}"
        )


def check_other_options(w: Any, args: tuple[object, ...], **options: object) -> None:
    """Raise for what only other backends know; nothing of it may be left out in silence."""
    if args:
        raise TypeError(
            f"{w._name}.run: takes no further arguments by position, got {len(args)}: they are for "
            f"code that is compiled into the kernels"
        )
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(
                f"{w._name}.run: {name} must be None, got {value!r}: no kernel here has it"
            )
