# SPDX-License-Identifier: Apache-2.0
"""The order in which the fused mixture of experts loads weights of 4 bits and their scales.

Engines call these functions when they load a model. The shapes are FlashInfer's; what order a
weight has in its bytes is a matter of the kernels that read it, and is precast's own.
"""

from __future__ import annotations

from precast._base.errors import BackendSupportedError
from precast._base.torch import torch
from precast._ops.gemm._w4 import COLUMNS, DEPTH, INT4, MXFP4, fold_scales, interleave_weight
from precast.api_logging import precast_api


@precast_api
def interleave_moe_weights_for_sm90_mixed_gemm(
    weight: torch.Tensor, quant_type: str = "fp4"
) -> torch.Tensor:
    """Bring weights of 4 bits in the order in which the kernels load them.

    Parameters
    ----------
    weight : torch.Tensor
        ``[experts, n, k / 2]``, uint8, on any device: two numbers in a byte, the first one in the
        lower 4 bits. ``n`` is a multiple of 16, ``k`` of 64.
    quant_type : str
        ``"fp4"``, e2m1 numbers of MXFP4 with activations of 16 bits; or ``"int4"``, numbers from -8
        to 7 with activations of e4m3.

    Returns
    -------
    torch.Tensor
        A new tensor of the same shape, for :func:`cutlass_fused_moe` with ``use_w4_group_scaling``
        and for :func:`~precast.gemm.grouped_mm_mxfp4` or :func:`~precast.gemm.grouped_mm_int4`, on
        every GPU.

    Raises
    ------
    BackendSupportedError
        ``quant_type`` is ``"fp4_fp8"``, which no kernel reads.
    ValueError
        Another ``quant_type``, or a dtype or shape other than above.

    Notes
    -----
    The order is that of ``include/precast/gemm/w4_weight.cuh`` and no other library's: weights
    that another one interleaved must be loaded again. It is made by PyTorch, expert by expert, and
    takes about 16 times the memory of an expert.

    Examples
    --------
    >>> import torch, precast
    >>> weight = torch.arange(16 * 32).view(1, 16, 32).byte()
    >>> precast.fused_moe.interleave_moe_weights_for_sm90_mixed_gemm(weight).shape
    torch.Size([1, 16, 32])
    """
    name = "interleave_moe_weights_for_sm90_mixed_gemm"
    if quant_type == "fp4_fp8":
        raise BackendSupportedError(
            f"{name}: no kernel reads weights of quant_type 'fp4_fp8'; there are kernels for 'fp4' "
            f"and 'int4'"
        )
    if quant_type not in ("fp4", "int4"):
        raise ValueError(f"{name}: quant_type must be 'fp4' or 'int4', got {quant_type!r}")
    if weight.dtype != torch.uint8:
        raise ValueError(f"{name}: weight must be uint8, got {weight.dtype}")
    if weight.dim() != 3 or weight.shape[1] % 16 or weight.shape[2] % 32:
        raise ValueError(
            f"{name}: weight must have shape [experts, n, k / 2] with n a multiple of 16 and k of "
            f"64, got {[*weight.shape]}"
        )
    return interleave_weight(weight, INT4 if quant_type == "int4" else MXFP4)


@precast_api
def interleave_moe_scales_for_sm90_mixed_gemm(
    scales: torch.Tensor, group_size: int = 32
) -> torch.Tensor:
    """Bring the scales of weights of 4 bits in the order in which the kernels load them.

    Parameters
    ----------
    scales : torch.Tensor
        ``[experts, n, k / group_size]``, on any device: for MXFP4 ue8m0 numbers in uint8, for int4
        bfloat16. ``n`` is a multiple of 64, ``k`` of 128.
    group_size : int
        The numbers that a scale has; 32 for MXFP4, 128 for int4.

    Returns
    -------
    torch.Tensor
        A new tensor ``[experts, n / 64, k / 128, r, c]`` with ``c`` scales in 16 bytes and as many
        rows as 64 x 128 numbers have: of bytes with groups of 32, ``r`` and ``c`` are 16, of
        bfloat16 with groups of 128 they are 8. Byte ``4 s + j`` of row ``r`` is scale ``j`` of 128
        numbers of row ``16 s + r`` of 64; of bfloat16, scale ``s`` of row ``r`` is that of row ``8
        s + r``.

    Raises
    ------
    ValueError
        A shape other than above, or a ``group_size`` that 16 bytes of scales do not fit.

    Examples
    --------
    >>> import torch, precast
    >>> scales = torch.full((2, 128, 8), 127, dtype=torch.uint8)
    >>> precast.fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(scales).shape
    torch.Size([2, 2, 2, 16, 16])
    """
    name = "interleave_moe_scales_for_sm90_mixed_gemm"
    if group_size <= 0 or DEPTH % group_size:
        raise ValueError(f"{name}: group_size must divide {DEPTH}, got {group_size}")
    of_depth, of_row = DEPTH // group_size, 16 // scales.element_size()
    if of_row % of_depth:
        raise ValueError(
            f"{name}: {of_depth} scales of {scales.dtype}, those of {DEPTH} numbers with "
            f"group_size {group_size}, must divide 16 bytes"
        )
    if scales.dim() != 3 or scales.shape[1] % COLUMNS or scales.shape[2] % of_depth:
        raise ValueError(
            f"{name}: scales must have shape [experts, n, k / {group_size}] with n a multiple of "
            f"{COLUMNS} and k of {DEPTH}, got {[*scales.shape]}"
        )
    return fold_scales(scales, group_size)
