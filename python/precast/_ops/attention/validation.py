# SPDX-License-Identifier: Apache-2.0
"""Checks of the public arguments of attention; each error names the argument."""

from __future__ import annotations

import math
from typing import Any

from precast._base.dtypes import DTYPE_WORDS, dtype_word
from precast._base.errors import CacheLayoutError, UnsupportedConfigError
from precast._base.torch import torch
from precast._op.declaration import Declaration
from precast._op.ranges import FINITE
from precast._op.scalars import check_flag, check_number
from precast._ops.attention.enums import PosEncodingMode
from precast._plan.installed import plan_document

POS_ENCODINGS = {mode.name: mode.value for mode in PosEncodingMode}

_AXES = plan_document()["ops"]["attention"]["axes"]

#: ``head_dim_qk`` and ``head_dim_vo`` that there are kernels for.
HEAD_DIMS: tuple[tuple[int, int], ...] = tuple(map(tuple, _AXES["head_dim_qk,head_dim_vo"]))

# Names of dtypes that there are kernels for. Not dtypes, because this imports no torch.
_NAMES = {word: name.removeprefix("torch.") for name, word in DTYPE_WORDS.items()}
_Q_DTYPES = list(dict.fromkeys(_NAMES[q] for q, _ in _AXES["dtype_q,dtype_kv"]))
_8_BIT_DTYPES = list(dict.fromkeys(_NAMES[kv] for q, kv in _AXES["dtype_q,dtype_kv"] if kv != q))

_PACKED_AXES = plan_document()["ops"]["attention_nvfp4"]["axes"]
_PACKED_HEAD_DIMS = [tuple(dims) for dims in _PACKED_AXES["head_dim_qk,head_dim_vo"]]
_PACKED_Q_DTYPES = [_NAMES[word] for word in _PACKED_AXES["dtype_q"]]

#: The numbers of plans and runs. Exports get some of them in another form.
NUMBERS = Declaration(
    "sm_scale:float(finite) logits_soft_cap:float(finite) rope_scale:float(positive) "
    "rope_theta:float(positive) q_scale:float(finite) k_scale:float(finite) v_scale:float(finite)"
)

#: Those that may be a tensor, too.
SCALES = Declaration("q_scale:f32[.] k_scale:f32[.] v_scale:f32[.]")
_RANGES = NUMBERS.ranges

#: Bytes of the workspace for integers that every wrapper makes for itself.
INT_WORKSPACE_BYTES = 8 * 1024 * 1024


def check_head_dims(name: str, head_dim_qk: int, head_dim_vo: int) -> None:
    """Raise unless there is a kernel for this pair."""
    if (head_dim_qk, head_dim_vo) not in HEAD_DIMS:
        legal = ", ".join(f"{qk}" if qk == vo else f"{qk}/{vo}" for qk, vo in HEAD_DIMS)
        raise UnsupportedConfigError(
            f"{name}: head_dim_qk/head_dim_vo must be one of {legal}, got "
            f"{head_dim_qk}/{head_dim_vo}"
        )


def check_heads(name: str, num_qo_heads: int, num_kv_heads: int) -> None:
    """Raise unless every KV head serves the same number of query heads."""
    if num_kv_heads < 1 or num_qo_heads < 1 or num_qo_heads % num_kv_heads:
        raise ValueError(
            f"{name}: num_qo_heads must be a positive multiple of num_kv_heads, got "
            f"{num_qo_heads} and {num_kv_heads}"
        )


def check_page_size(name: str, page_size: int) -> None:
    """Raise unless a page has an entry."""
    if page_size < 1:
        raise ValueError(f"{name}: page_size must be >= 1, got {page_size}")


def check_kv_layout(name: str, kv_layout: object) -> bool:
    """Whether heads come first; raise for a layout that is none."""
    if isinstance(kv_layout, str) and kv_layout in ("NHD", "HND"):
        return kv_layout == "HND"
    raise CacheLayoutError(f"{name}: kv_layout must be NHD or HND, got {kv_layout!r}")


def pos_encoding(name: str, pos_encoding_mode: str) -> int:
    """Return the number of a mode in kernels."""
    number = POS_ENCODINGS.get(pos_encoding_mode) if isinstance(pos_encoding_mode, str) else None
    if number is None:
        raise CacheLayoutError(
            f"{name}: pos_encoding_mode must be {', '.join(POS_ENCODINGS)}, got "
            f"{pos_encoding_mode!r}"
        )
    return number


def check_dtypes(name: str, q: torch.dtype, kv: torch.dtype, o: torch.dtype) -> None:
    """Raise for dtypes that no module has; those of a mode that needs none pass."""
    if q.itemsize == 1:
        raise UnsupportedConfigError(
            f"{name}: q_data_type must be {' or '.join(_Q_DTYPES)}, got {dtype_word(q)}: only keys "
            f"and values may be of 8 bits"
        )
    if kv != q and dtype_word(kv) not in _8_BIT_DTYPES:
        raise UnsupportedConfigError(
            f"{name}: kv_data_type must be {dtype_word(q)} as q_data_type, "
            f"{' or '.join(_8_BIT_DTYPES)}, got {dtype_word(kv)}"
        )
    if not o.is_floating_point or o.itemsize == 1:
        raise UnsupportedConfigError(
            f"{name}: o_data_type must be float16, bfloat16 or float32, got {dtype_word(o)}"
        )


def check_packed(name: str, q: torch.dtype, head_dim_qk: int, head_dim_vo: int) -> None:
    """Raise unless there is a kernel for keys and values in NVFP4."""
    if dtype_word(q) not in _PACKED_Q_DTYPES:
        raise UnsupportedConfigError(
            f"{name}: q_data_type must be {' or '.join(_PACKED_Q_DTYPES)} with kv_data_type uint8 "
            f"(NVFP4), got {dtype_word(q)}"
        )
    if (head_dim_qk, head_dim_vo) not in _PACKED_HEAD_DIMS:
        legal = ", ".join(str(qk) for qk, _ in _PACKED_HEAD_DIMS)
        raise UnsupportedConfigError(
            f"{name}: head_dim_qk/head_dim_vo must be one of {legal} with kv_data_type uint8 "
            f"(NVFP4), got {head_dim_qk}/{head_dim_vo}"
        )


def refuse_packed(name: str) -> None:
    """Raise the error of a wrapper without a kernel for keys and values in NVFP4."""
    raise UnsupportedConfigError(
        f"{name}: kv_data_type must not be uint8 (NVFP4), which only "
        f"BatchDecodeWithPagedKVCacheWrapper and BatchPrefillWithPagedKVCacheWrapper take. Fix: "
        f"use one of them, or nvfp4_kv_dequantize_paged"
    )


def computed_dtype(q: torch.dtype, kv: torch.dtype, o: torch.dtype) -> torch.dtype:
    """Return the dtype of queries that kernels take: those of 8 bits become one of 16."""
    if dtype_word(q) not in _8_BIT_DTYPES:
        return q
    return next((dtype for dtype in (kv, o) if dtype.itemsize == 2), torch.bfloat16)


def check_workspace(name: str, argument: str, workspace: torch.Tensor) -> None:
    """Raise unless a workspace is bytes without gaps that start at a multiple of 16."""
    if workspace.dtype not in (torch.uint8, torch.int8) or not workspace.is_contiguous():
        gaps = "" if workspace.is_contiguous() else f" with strides {[*workspace.stride()]}"
        raise ValueError(
            f"{name}: {argument} must be uint8 or int8 and contiguous, got "
            f"{dtype_word(workspace.dtype)}{gaps}"
        )
    offset = workspace.data_ptr() % 16 if workspace.numel() else 0
    if offset:
        raise ValueError(
            f"{name}: {argument} must be 16-byte aligned, got an address {offset} bytes behind "
            f"such a boundary; a new tensor of torch.empty is aligned"
        )


def check_buffers(
    name: str, device: torch.device, mode: str, **buffers: torch.Tensor | None
) -> None:
    """Raise for a buffer of CUDA graphs that is missing, or that no plan can use."""
    for option, buffer in buffers.items():
        if buffer is None:
            raise ValueError(f"{option} should be a torch.Tensor in {mode} mode")
        check_buffer(name, device, option, buffer, torch.int32)


def check_buffer(
    name: str, device: torch.device, option: str, buffer: torch.Tensor, dtype: torch.dtype
) -> None:
    """Raise unless a buffer of CUDA graphs has one dimension, and this dtype and device."""
    if buffer.dim() != 1 or buffer.dtype != dtype or buffer.device != device:
        raise ValueError(
            f"{name}: {option} must be {dtype_word(dtype)} of one dimension on {device} as "
            f"float_workspace_buffer, got {dtype_word(buffer.dtype)} of shape {[*buffer.shape]} on "
            f"{buffer.device}"
        )


def check_workspaces_apart(name: str, floats: torch.Tensor, ints: torch.Tensor) -> None:
    """Raise if both share memory: partial results would be written over the plan."""
    starts = floats.data_ptr(), ints.data_ptr()
    if (
        floats.device == ints.device
        and starts[0] < starts[1] + ints.nbytes
        and starts[1] < starts[0] + floats.nbytes
    ):
        raise ValueError(
            f"{name}: int_workspace_buffer must not overlap float_workspace_buffer's memory. Fix: "
            f"pass two buffers"
        )


def check_mask_size(name: str, argument: str, mask: torch.Tensor, needed: int) -> None:
    """Raise for a mask, or a buffer of one, that ends before the last pair."""
    if mask.numel() < needed:
        raise ValueError(
            f"{name}: {argument} must have at least {needed} elements for all queries and keys, "
            f"got {mask.numel()}"
        )


def check_rope(name: str, rope_scale: float | None, rope_theta: float | None) -> None:
    """Raise unless both are positive, where they are given."""
    for option, value in (("rope_scale", rope_scale), ("rope_theta", rope_theta)):
        if value is not None:
            check_number(name, option, value, _RANGES[option])


def number(name: str, option: str, value: Any) -> float:
    """Return a finite number as a float, or raise an error that names it."""
    check_number(name, option, value, FINITE)
    return float(value)


def check_flags(name: str, **flags: object) -> None:
    """Raise for the first flag that is none."""
    for option, value in flags.items():
        if value is not True and value is not False:
            check_flag(name, option, value)


def check_shape_dtype_device(
    x: torch.Tensor,
    expected_shape: tuple[int, ...],
    expected_dtype: torch.dtype,
    expected_device: torch.device,
    name: str,
) -> None:
    """Raise a ValueError that says which of the three is not as expected."""
    for what, expected, got in (
        ("shape", tuple(expected_shape), tuple(x.shape)),
        ("dtype", expected_dtype, x.dtype),
        ("device", expected_device, x.device),
    ):
        if got != expected:
            raise ValueError(f"Invalid {what} of {name}: expected {expected}, got {got}")


def softmax_scale(sm_scale: float | None, head_dim: int) -> float:
    """Return what multiplies logits, by default one over the root of ``head_dim``."""
    return 1.0 / math.sqrt(head_dim) if sm_scale is None else float(sm_scale)
