# SPDX-License-Identifier: Apache-2.0
"""RMSNorm fused with a residual, in fp8 with a scale for each 128 columns of a row.

Sources: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467; scaling by
groups: DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.3.
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, launches
from precast._op.validation import check_memory_apart
from precast._ops.norm.fused_add_rmsnorm import fused_add_rmsnorm
from precast._ops.norm.rmsnorm import normalized
from precast._ops.quantize._reference_8bit import group_quant
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var, dispatch

GROUP = 128


def fused_add_rmsnorm_fp8_block_quant_reference(
    out: torch.Tensor,
    block_scale: torch.Tensor,
    normed_out: torch.Tensor | None,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    column_major_scales: bool = True,
    scale_ue8m0: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`fused_add_rmsnorm_fp8_block_quant` in plain PyTorch on any device, out of place.

    Parameters
    ----------
    out, normed_out : torch.Tensor or None
        Not read.
    block_scale : torch.Tensor
        What lies behind the last row of column-major scales is taken from it.

    Returns
    -------
    tuple of torch.Tensor
        The codes, their scales in the layout of ``block_scale``, the norm and the sum in the dtype
        of ``input``.
    """
    x = input.float() + residual.float()
    normed = normalized(x, weight.float(), eps).to(input.dtype)
    codes, scale = group_quant(normed.float(), 128, 1e-10, torch.float8_e4m3fn, scale_ue8m0)
    scale = scale.flatten(0, -2)
    if column_major_scales:
        scale = torch.cat([scale.T, block_scale[:, scale.shape[0] :]], dim=1)
    return codes, scale, normed, x.to(input.dtype)


def _check(
    export: str,
    out: torch.Tensor,
    block_scale: torch.Tensor,
    normed_out: torch.Tensor | None,
    input: torch.Tensor,
    residual: torch.Tensor,
    column_major_scales: bool,
) -> None:
    if input.shape[-1] % GROUP:
        raise ValueError(
            f"{export}: input's last dimension must be a multiple of {GROUP}, got {input.shape[-1]}"
        )
    check_memory_apart(export, "out", out, residual, "residual")
    rows, groups = input.shape[:-1].numel(), input.shape[-1] // GROUP
    shape, layout = [rows, groups], "column_major_scales=False (rows, groups)"
    if column_major_scales:
        shape = [groups, -(-rows // 4) * 4]
        layout = "column_major_scales (groups, rows rounded up to 4)"
    if [*block_scale.shape] != shape:
        raise ValueError(
            f"{export}: block_scale must have shape {shape} with {layout}, got "
            f"{[*block_scale.shape]}"
        )
    if not block_scale.is_contiguous():
        raise ValueError(
            f"{export}: block_scale must be contiguous, got strides {[*block_scale.stride()]} for "
            f"shape {[*block_scale.shape]}; call .contiguous()"
        )
    others = {"residual": residual, "out": out}
    if normed_out is not None:
        for name, tensor in others.items():
            check_memory_apart(export, "normed_out", normed_out, tensor, name)
        others["normed_out"] = normed_out
    for name, tensor in others.items():
        check_memory_apart(export, "block_scale", block_scale, tensor, name)


_BLOCK_QUANT = Export(
    "norm_block_quant",
    "fused_add_rmsnorm_fp8_block_quant",
    "out!:like(input,e4m3,apart) block_scale!:f32 normed_out!?:like(input) "
    "input:T[*rows(1-2),hidden] residual!:like(input,apart) weight:T[hidden] eps:float(0-) "
    "enable_pdl:pdl column_major_scales:bool scale_ue8m0:bool",
    reference=fused_add_rmsnorm_fp8_block_quant_reference,
    check=_check,
)


def _template(column_major: bool) -> TraceTemplate:
    rows, scales = ["batch_size", "hidden_size"], ["batch_size", "num_groups"]
    axes: dict[str, Var | Const] = {
        "batch_size": Var("Rows: tokens of all requests."),
        "hidden_size": Const("h", "A multiple of 128.", multiple=128),
        "num_groups": Const(
            "", "Groups of 128 columns, which share a scale.", value="hidden_size // 128"
        ),
    }
    if column_major:
        scales = ["num_groups", "padded_batch_size"]
        axes["padded_batch_size"] = Var(
            "batch_size rounded up to a multiple of 4.", value="(batch_size + 3) // 4 * 4"
        )
    return TraceTemplate(
        op_type="rmsnorm",
        name_prefix="fused_add_rmsnorm_fp8_block_quant"
        + ("" if column_major else "_row_major_scales"),
        description="The sum of two tensors, and the norm of each row of it in fp8, with a "
        "scale for each 128 columns.",
        axes=axes,
        inputs={
            "out": Tensor(rows, dtype="float8_e4m3fn", description="Not read."),
            "block_scale": Tensor(scales, dtype="float32", description="Its padding is kept."),
            "normed_out": Tensor(rows, description="Not read."),
            "hidden_states": Tensor(rows, param="input"),
            "residual": Tensor(rows),
            "weight": Tensor(["hidden_size"]),
            "eps": Scalar("float32"),
            "column_major_scales": Scalar("bool", sample=column_major),
            "scale_ue8m0": Scalar("bool"),
        },
        outputs={
            "output": Tensor(rows, param="out", dtype="float8_e4m3fn"),
            "scale": Tensor(scales, param="block_scale", dtype="float32"),
            "normed": Tensor(rows, param="normed_out", dtype_from="hidden_states"),
            "residual_out": Tensor(rows, param="residual", dtype_from="hidden_states"),
        },
        reference=fused_add_rmsnorm_fp8_block_quant_reference,
    )


_TEMPLATES = {True: _template(True), False: _template(False)}


@dispatch(*_TEMPLATES.values())
def _trace(column_major_scales: Any, **others: Any) -> TraceTemplate:
    return _TEMPLATES[bool(column_major_scales)]


@precast_api(trace=_trace)
@launches(_BLOCK_QUANT)
@documented(fused_add_rmsnorm)
def fused_add_rmsnorm_fp8_block_quant(
    out: torch.Tensor,
    block_scale: torch.Tensor,
    normed_out: torch.Tensor | None,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
    column_major_scales: bool = True,
    scale_ue8m0: bool = False,
) -> None:
    r"""Add ``input`` to ``residual`` in place, and write the RMSNorm of the sum in scaled fp8.

    .. math::

        x_{r,c} &= input_{r,c} + residual_{r,c}, \quad residual_{r,c} = \mathrm{round}(x_{r,c}) \\
        y_{r,c} &= \mathrm{round}\left(\frac{x_{r,c}}{\sqrt{\frac{1}{n} \sum_k x_{r,k}^2
        + eps}} \cdot w_c\right) \\
        s_{r,g} &= \max\left(\max_{c \in g} |y_{r,c}|, 10^{-10}\right) / 448 \\
        out_{r,c} &= \mathrm{sat}(y_{r,c} \cdot (1 / s_{r,g}))

    Groups :math:`g` are 128 columns. A consumer multiplies ``out`` by :math:`s`.

    Parameters
    ----------
    out : torch.Tensor
        Shape and device of ``input``, float8_e4m3fn, memory of its own; stride 1 in the last
        dimension, any in the others. Overwritten.
    block_scale : torch.Tensor
        The scales, float32, contiguous, overwritten. ``[hidden / 128, rows rounded up to 4]``, as a
        GEMM loads them column by column with TMA (``block_scale.T[:rows]`` is the logical tensor;
        what is behind the last row is left as it is), or ``[rows, hidden / 128]`` with
        ``column_major_scales=False``. Heads count as rows.
    normed_out : torch.Tensor or None
        The norm before its quantisation: shape, dtype and device of ``input``, strides as ``out``.
        May be ``input``. Overwritten. None: not wanted, which saves writing it.
    input : torch.Tensor
        ``[rows, hidden]`` or ``[batch, heads, head_dim]``, float16 or bfloat16, on a CUDA device;
        the last dimension a multiple of 128 with stride 1, the others of any stride. Left as it is.
    column_major_scales : bool
        The layout of ``block_scale``.
    scale_ue8m0 : bool
        Round each scale up to a power of two, still stored as float32.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device or strides other than above;
        tensors that are written and overlap others.

    Notes
    -----
    The norm takes the float32 sum. It is rounded to the dtype of ``input`` before it is quantised,
    so that ``out`` and ``block_scale`` are those of :func:`fused_add_rmsnorm` followed by a
    quantisation of its result. Quotient and reciprocal are correctly rounded float32, ``out`` is
    rounded to nearest even. A NaN makes the scales of its row NaN. ``column_major_scales`` and
    ``scale_ue8m0`` are additions to FlashInfer's signature, as is a ``normed_out`` of None. No
    allocation; safe in CUDA graphs; not differentiable. Sources: arXiv:1910.07467,
    arXiv:2412.19437.

    Examples
    --------
    >>> import torch, precast
    >>> x, residual, weight = torch.full((1, 128), 2.0), torch.full((1, 128), 2.0), torch.ones(128)
    >>> out, scale = torch.empty(1, 128, dtype=torch.float8_e4m3fn), torch.zeros(1, 4)
    >>> with precast.reference_mode():
    ...     precast.fused_add_rmsnorm_fp8_block_quant(out, scale, None, x, residual, weight)
    >>> out[0, 0].item(), (scale * 448)[0].tolist(), residual[0, 0].item()
    (448.0, [1.0, 0.0, 0.0, 0.0], 4.0)
    """
