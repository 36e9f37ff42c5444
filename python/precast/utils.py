# SPDX-License-Identifier: Apache-2.0
"""Questions about devices, and the orders of rows that GEMM kernels of capability 10.0 want.

An answer about a device is kept per device, and is False without a GPU. The decorators of ops,
their error and enums of attention can be imported from here too, because engines expect them here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from precast._base.device import device_index as device_index
from precast._base.device import (
    device_support_pdl,
    get_compute_capability,
    get_device_sm_count,
    is_sm12x_supported,
    is_sm90a_supported,
    is_sm100a_supported,
)
from precast._base.dtypes import canonicalize_torch_dtype as canonicalize_torch_dtype
from precast._base.errors import BackendSupportedError as BackendSupportedError
from precast._op.decorators import backend_requirement as backend_requirement
from precast._op.decorators import supported_compute_capability as supported_compute_capability
from precast._ops.attention.buffers import _cache_buf as _cache_buf
from precast._ops.attention.buffers import _ceil_pow2 as _ceil_pow2
from precast._ops.attention.buffers import _get_range_buf as _get_range_buf
from precast._ops.attention.buffers import get_alibi_slopes as get_alibi_slopes
from precast._ops.attention.enums import MaskMode as MaskMode
from precast._ops.attention.enums import PosEncodingMode as PosEncodingMode
from precast._ops.attention.enums import TensorLayout as TensorLayout
from precast._ops.quantize.shuffle_matrix import (
    get_shuffle_matrix_a_row_indices,
    get_shuffle_matrix_sf_a_row_indices,
)

if TYPE_CHECKING:
    from precast._base.device import Device as Device

__all__ = [
    "device_support_pdl",
    "get_compute_capability",
    "get_device_sm_count",
    "get_shuffle_matrix_a_row_indices",
    "get_shuffle_matrix_sf_a_row_indices",
    "is_sm12x_supported",
    "is_sm90a_supported",
    "is_sm100a_supported",
]
