# SPDX-License-Identifier: Apache-2.0
"""Names of torch dtypes: those of the axes of ``aot_configs/``, and those of error messages."""

from __future__ import annotations

from precast._base.torch import torch

#: The axis value of each torch dtype. Keyed by text, because torch is not imported here.
DTYPE_WORDS = {
    "torch.float32": "f32",
    "torch.float16": "f16",
    "torch.bfloat16": "bf16",
    "torch.float8_e4m3fn": "e4m3",
    "torch.float8_e5m2": "e5m2",
    "torch.int32": "i32",
    "torch.uint8": "u8",
    "torch.int8": "i8",
}


def dtype_word(dtype: torch.dtype) -> str:
    """The name of a dtype without its module: ``float16`` of ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def canonicalize_torch_dtype(dtype: torch.dtype | str, name: str = "dtype") -> torch.dtype:
    """The dtype of a name such as ``"float16"``; a dtype is itself.

    Raises
    ------
    TypeError
        If it is neither.
    ValueError
        If torch has no dtype of that name.

    Examples
    --------
    >>> canonicalize_torch_dtype("bfloat16")
    torch.bfloat16
    """
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
        if isinstance(found, torch.dtype):
            return found
        raise ValueError(f"{name} must be the name of a torch dtype, got {dtype!r}")
    if isinstance(dtype, torch.dtype):
        return dtype
    raise TypeError(f"{name} must be a string or torch.dtype, got {type(dtype).__name__}")
