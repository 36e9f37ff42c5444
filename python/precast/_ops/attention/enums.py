# SPDX-License-Identifier: Apache-2.0
"""Enums that engines pass; their values are those of the C++ enums in ``attention/params.cuh``."""

from __future__ import annotations

from enum import IntEnum


class MaskMode(IntEnum):
    """Which keys a query may see, before the window."""

    NON_CAUSAL = 0
    CAUSAL = 1
    CUSTOM = 2
    MULTIITEMSCORING = 3


class PosEncodingMode(IntEnum):
    """What attention itself does with positions."""

    NONE = 0
    ROPE_LLAMA = 1
    ALIBI = 2


class TensorLayout(IntEnum):
    """Whether tokens or heads come first in keys and values."""

    NHD = 0
    HND = 1
