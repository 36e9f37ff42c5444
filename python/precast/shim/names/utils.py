# SPDX-License-Identifier: Apache-2.0
"""What vLLM's attention backend imports of ``flashinfer.utils``, for outputs in NVFP4."""

from __future__ import annotations

from collections.abc import Sequence

from precast._base.dtypes import dtype_word
from precast._base.torch import torch


class FP4Tensor:
    """Numbers of 4 bits, two in a byte, and their scales: a name for an attention output in NVFP4.

    No function of precast takes one: attention outputs have 16 or 8 bits.

    Parameters
    ----------
    data : torch.Tensor
        ``[tokens, ..., columns / 2]`` uint8, rounded up.
    scale : torch.Tensor
        ``[rows, ...]`` e4m3, rows a multiple of 128.
    scale_start_index : int
        The row of ``scale`` of the first token: several calls may write into one tensor of scales.
    original_shape : sequence of int, optional
        The shape of the numbers: that of ``data`` with ``columns`` in the last place.

    Raises
    ------
    ValueError
        A dtype or shape other than above, or tokens beyond the last row of ``scale``.
    """

    dtype = "nvfp4"

    def __init__(
        self,
        data: torch.Tensor,
        scale: torch.Tensor,
        scale_start_index: int = 0,
        original_shape: Sequence[int] | None = None,
    ) -> None:
        if data.dtype != torch.uint8:
            raise ValueError(f"FP4Tensor: data must be uint8, got {dtype_word(data.dtype)}")
        if scale.dtype != torch.float8_e4m3fn:
            raise ValueError(f"FP4Tensor: scale must be e4m3, got {dtype_word(scale.dtype)}")
        tokens, rows = data.shape[0], scale.shape[0]
        if rows % 128:
            raise ValueError(f"FP4Tensor: scale must have a multiple of 128 rows, got {rows}")
        if not 0 <= scale_start_index < rows or scale_start_index + tokens > rows:
            raise ValueError(
                f"FP4Tensor: scale must have a row for each of {tokens} tokens from "
                f"scale_start_index={scale_start_index} on, got {rows} rows"
            )
        if original_shape is not None:
            packed = (*original_shape[:-1], -(-original_shape[-1] // 2))
            if packed != tuple(data.shape):
                raise ValueError(
                    f"FP4Tensor: data must have shape {[*packed]} for original_shape "
                    f"{[*original_shape]}, got {[*data.shape]}"
                )
        self.data = data
        self.scale = scale
        self.scale_start_index = scale_start_index
        self.original_shape = original_shape


def get_trtllm_gen_multi_ctas_kv_counter_bytes(
    batch_size: int, num_qo_heads: int, sm_count: int
) -> int:
    """Return the size of the counters of TensorRT-LLM's attention kernels, which engines allocate.

    A counter of 4 bytes for each request and query head, and at least one for each multiprocessor;
    their number is rounded up to a multiple of 8. precast's kernels need none.

    Examples
    --------
    >>> get_trtllm_gen_multi_ctas_kv_counter_bytes(3, 3, 4)
    64
    """
    return -(-max(batch_size * num_qo_heads, sm_count) // 8) * 32
