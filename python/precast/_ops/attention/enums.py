# SPDX-License-Identifier: Apache-2.0
"""Words that engines pass, and what they mean; refusals that name them."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum

from precast._base.dtypes import dtype_word
from precast._base.errors import BackendSupportedError, CacheLayoutError, UnsupportedConfigError
from precast._base.torch import torch


class MaskMode(Enum):
    """Which keys a query may see, before the window."""

    NON_CAUSAL = 0
    CAUSAL = 1
    CUSTOM = 2
    MULTIITEMSCORING = 3


class PosEncodingMode(Enum):
    """What attention itself does with positions."""

    NONE = 0
    ROPE_LLAMA = 1
    ALIBI = 2


class TensorLayout(Enum):
    """Whether tokens or heads come first in keys and values."""

    NHD = 0
    HND = 1


POS_ENCODINGS = {mode.name: mode.value for mode in PosEncodingMode}
ALIBI = PosEncodingMode.ALIBI.value

#: ``head_dim_qk`` and ``head_dim_vo`` that there are kernels for.
HEAD_DIMS = (
    (64, 64),
    (80, 80),
    (96, 96),
    (128, 128),
    (192, 128),
    (256, 256),
    (512, 512),
)

#: Bytes of the workspace for integers that every wrapper makes for itself.
INT_WORKSPACE_BYTES = 8 * 1024 * 1024

_OTHER_BACKENDS = (
    "cudnn",
    "cutlass",
    "cute-dsl",
    "cute-dsl-prims",
    "cutile",
    "fmha_v2",
    "prims-ts",
    "trtllm-gen",
)


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


def check_kv_layout(name: str, kv_layout: object) -> bool:
    """Whether heads come first; raise for a layout that is none."""
    if kv_layout == "NHD":
        return False
    if kv_layout == "HND":
        return True
    raise CacheLayoutError(f"{name}: kv_layout must be NHD or HND, got {kv_layout!r}")


def pos_encoding(name: str, pos_encoding_mode: str) -> int:
    """The number that kernels know a mode by."""
    number = POS_ENCODINGS.get(pos_encoding_mode)
    if number is None:
        raise CacheLayoutError(
            f"{name}: pos_encoding_mode must be {', '.join(POS_ENCODINGS)}, got "
            f"{pos_encoding_mode!r}"
        )
    return number


def check_backend(name: str, backend: str) -> None:
    """Raise for a backend that is not here."""
    if backend in ("auto", "fa2"):
        return
    if backend == "fa3":
        raise BackendSupportedError(
            f"{name}: backend='fa3' (Hopper's own tensor cores) does not exist yet. Fix: pass "
            f"backend='auto' or 'fa2', which run on every GPU from compute capability 8.0 on"
        )
    known = "is not part of precast" if backend in _OTHER_BACKENDS else "is unknown"
    raise BackendSupportedError(
        f"{name}: backend={backend!r} {known}. Fix: pass backend='auto' or 'fa2'"
    )


def check_no_jit(name: str, jit_args: object, jit_kwargs: object = None) -> None:
    """Raise for code of the caller that would have to be compiled into the kernels."""
    if jit_args is not None or jit_kwargs is not None:
        raise NotImplementedError(
            f"{name}: jit_args must be None: kernels are compiled ahead of time, so no code can be "
            f"added to them. Fix: a kernel of your own with precast.jit.gen_jit_spec"
        )


def check_no_variant(name: str, variant_owns_mask: bool) -> None:
    """Raise for a mask that code of the caller would make."""
    if variant_owns_mask:
        raise ValueError(
            f"{name}: variant_owns_mask requires jit_args, which must be None. Fix: pass the mask "
            f"to plan() as custom_mask"
        )


def check_dtypes(name: str, q: torch.dtype, kv: torch.dtype, o: torch.dtype) -> None:
    """Raise for dtypes that no module has; those of a mode that needs none pass."""
    fp8 = (torch.float8_e4m3fn, torch.float8_e5m2)
    if q in fp8:
        raise UnsupportedConfigError(
            f"{name}: q_data_type must be float16 or bfloat16, got {dtype_word(q)}: only keys and "
            f"values may be of 8 bits"
        )
    if kv != q and kv not in fp8:
        raise UnsupportedConfigError(
            f"{name}: kv_data_type must be {dtype_word(q)} as q_data_type, float8_e4m3fn or "
            f"float8_e5m2, got {dtype_word(kv)}"
        )
    if not o.is_floating_point or o.itemsize == 1:
        raise UnsupportedConfigError(
            f"{name}: o_data_type must be float16, bfloat16 or float32, got {dtype_word(o)}"
        )


def check_workspace(name: str, argument: str, workspace: torch.Tensor) -> None:
    """Raise unless a workspace starts at a multiple of 16 bytes."""
    offset = workspace.data_ptr() % 16 if workspace.numel() else 0
    if offset:
        raise ValueError(
            f"{name}: {argument} must be 16-byte aligned, got an address {offset} bytes behind "
            f"such a boundary; a new tensor of torch.empty is aligned"
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


def check_rope(name: str, rope_scale: float | None, rope_theta: float | None) -> None:
    """Raise unless both are positive, where they are given."""
    for option, value in (("rope_scale", rope_scale), ("rope_theta", rope_theta)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}: {option} must be positive, got {value}")


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


# -- buffers of the process -----------------------------------------------------------------------

#: Buffers that are made once a process, by name and device.
_cache_buf: dict[tuple[str, torch.device], torch.Tensor] = {}


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched now becomes a part of a CUDA graph."""
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


def _kept(name: str, device: torch.device, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A buffer that is made once, but for those of a CUDA graph: their memory is the graph's.

    Compiled code may become one.
    """
    key = (name, device)
    buffer = _cache_buf.get(key)
    if buffer is None:
        buffer = make()
        if not (torch.compiler.is_compiling() or is_capturing(device)):
            _cache_buf[key] = buffer
    return buffer


def _ceil_pow2(x: int) -> int:
    """The least power of two that is not below ``x``."""
    return 1 << (x - 1).bit_length()


def _get_range_buf(seq_len: int, device: torch.device | str) -> torch.Tensor:
    """``0, 1, ..., seq_len - 1`` as int32, a part of a buffer that is made once."""
    size, device = _ceil_pow2(seq_len), torch.device(device)
    return _kept(
        f"range_{size}", device, lambda: torch.arange(size, device=device, dtype=torch.int32)
    )[:seq_len]


def get_alibi_slopes(n_heads: int, device: torch.device | str | None = None) -> torch.Tensor:
    r"""The slope of each head for ALiBi.

    .. math:: m_h = 2^{-8 (h + 1) / n}

    for the largest power of two :math:`n` that is not above ``n_heads``; the heads behind it have
    every other slope of :math:`2n` heads.

    Parameters
    ----------
    n_heads : int
        Heads, at least 1.
    device : torch.device, optional
        Where the result is made.

    Returns
    -------
    torch.Tensor
        ``[n_heads]``, float32.

    Notes
    -----
    Source: Press et al., Train Short, Test Long, arXiv:2108.12409.

    Examples
    --------
    >>> get_alibi_slopes(3)
    tensor([0.0625, 0.0039, 0.2500])
    """
    n = 1 << (n_heads.bit_length() - 1)
    # Made on the device: a CUDA graph that is captured takes no copy from the host.
    heads = torch.arange(n_heads, dtype=torch.float64, device=device)
    exponents = torch.where(heads < n, -8.0 * (heads + 1) / n, -4.0 * (2 * (heads - n) + 1) / n)
    return torch.exp2(exponents).float()


def alibi_slopes(num_qo_heads: int, device: torch.device) -> torch.Tensor:
    """The slopes, kept for the process."""
    return _kept(
        f"alibi_slopes_{num_qo_heads}", device, lambda: get_alibi_slopes(num_qo_heads, device)
    )


def softmax_scale(sm_scale: float | None, head_dim: int) -> float:
    """What logits are multiplied by; by default one over the root of ``head_dim``."""
    return 1.0 / math.sqrt(head_dim) if sm_scale is None else float(sm_scale)
