# SPDX-License-Identifier: Apache-2.0
"""Dequantisation on the CPU, for loaders of weights and tests.

Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.dispatch import check_tensors
from precast._op.validation import check_dtype, check_rank
from precast._ops.quantize._block_validation import check_dequantized_blocks
from precast._ops.quantize._reference_blocks import dequantize_e2m1, dequantize_mxfp8
from precast._ops.quantize.sf_layout import SfLayout, layout_of_flags
from precast.api_logging import precast_api


def _check_host(export: str, **tensors: torch.Tensor) -> None:
    check_tensors(export, tensors)
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            raise ValueError(f"{export}: {name} must be a CPU tensor, got {tensor.device}")


@precast_api
def mxfp4_dequantize_host(
    weight: torch.Tensor, scale: torch.Tensor, group_size: int = 32
) -> torch.Tensor:
    r"""Dequantise MXFP4 to float32 on the CPU.

    .. math:: out = q \cdot 2^{s - 127}

    Parameters
    ----------
    weight : torch.Tensor
        ``[rows, columns // 2]``, uint8, a CPU tensor; the first number is in the lower 4 bits.
    scale : torch.Tensor
        ``[rows, columns // group_size]``, uint8, linear, a CPU tensor.
    group_size : int
        Elements of a block, an even number.

    Returns
    -------
    torch.Tensor
        ``[rows, columns]``, float32.

    Raises
    ------
    ValueError
        A tensor that is not on the CPU; a dtype or shape other than above.

    Examples
    --------
    >>> import torch, precast
    >>> packed = torch.full((1, 16), 0x72, dtype=torch.uint8)
    >>> precast.mxfp4_dequantize_host(packed, torch.tensor([[128]]).byte())[0, :2]
    tensor([ 2., 12.])
    """
    export = "mxfp4_dequantize_host"
    _check_host(export, weight=weight, scale=scale)
    if group_size <= 0 or group_size % 2:
        raise ValueError(f"{export}: group_size must be positive and even, got {group_size}")
    check_dtype(export, "weight", weight, torch.uint8)
    check_dtype(export, "scale", scale, torch.uint8)
    check_rank(export, "weight", weight, 2, None)
    check_dequantized_blocks(export, "weight", weight, "scale", scale, group_size, 2)
    if weight.dim() != 2 or scale.dim() != 2 or weight.shape[0] != scale.shape[0]:
        raise ValueError(
            f"{export}: weight and scale must be 2-D with as many rows, got shapes "
            f"{[*weight.shape]} and {[*scale.shape]}"
        )
    with torch.no_grad():
        return dequantize_e2m1(weight, scale, None, group_size, False, 2)


@precast_api
def mxfp8_dequantize_host(
    input: torch.Tensor,
    scale_tensor: torch.Tensor,
    is_sf_swizzled_layout: bool = True,
    sf_swizzle_layout: SfLayout | None = None,
) -> torch.Tensor:
    r"""Dequantise MXFP8 to float32 on the CPU.

    .. math:: out = q \cdot 2^{s - 127}

    Parameters
    ----------
    input : torch.Tensor
        ``[rows, columns]``, float8_e4m3fn or its bytes as uint8, a CPU tensor; columns are a
        multiple of 32.
    scale_tensor : torch.Tensor
        Scales of the rows and ``columns // 32`` blocks with the layout's padding, in any shape,
        uint8, a CPU tensor.
    is_sf_swizzled_layout : bool
        Scales in tiles of 128x4, otherwise linear.
    sf_swizzle_layout : SfLayout, optional
        Where the scales lie, in place of ``is_sf_swizzled_layout``.

    Returns
    -------
    torch.Tensor
        ``[rows, columns]``, float32.

    Raises
    ------
    ValueError
        A tensor that is not on the CPU; a dtype or shape other than above.

    Examples
    --------
    >>> import torch, precast
    >>> q = torch.full((1, 32), 1.5).to(torch.float8_e4m3fn)
    >>> precast.mxfp8_dequantize_host(q, torch.tensor([130]).byte(), False)[0, 0].item()
    12.0
    """
    export = "mxfp8_dequantize_host"
    _check_host(export, input=input, scale_tensor=scale_tensor)
    check_dtype(export, "input", input, torch.float8_e4m3fn, torch.uint8)
    check_dtype(export, "scale_tensor", scale_tensor, torch.uint8)
    check_rank(export, "input", input, 2, None)
    if sf_swizzle_layout is None:
        layout = layout_of_flags(is_sf_swizzled_layout)
    else:
        layout = int(sf_swizzle_layout)
    input = input.view(torch.float8_e4m3fn)
    check_dequantized_blocks(export, "input", input, "scale_tensor", scale_tensor, 32, layout)
    with torch.no_grad():
        return dequantize_mxfp8(input, scale_tensor, layout)
