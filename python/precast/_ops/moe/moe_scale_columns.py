# SPDX-License-Identifier: Apache-2.0
"""Rows as experts with weights of int4 and activations of 8 bits multiply them.

Source: Xiao et al., SmoothQuant, arXiv:2211.10438 (scales of the channels of activations).
"""

from __future__ import annotations

from precast._base.rounding import saturated
from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, op
from precast._op.validation import check_contiguous, check_elements_apart
from precast._ops.moe._rows import ROWS, VECTOR, check_matrix
from precast.api_logging import precast_api
from precast.trace import Const, Tensor, TraceTemplate, Var


def moe_scale_columns_reference(
    input: torch.Tensor, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """:func:`moe_scale_columns` in plain PyTorch on any device, of all rows."""
    x = input.float() if scale is None else input.float() * scale.float()
    return saturated(x, torch.float8_e4m3fn).to(input.dtype)


def _write(
    input: torch.Tensor,
    scale: torch.Tensor | None,
    expert_offsets: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    rows = len(input)
    if expert_offsets is not None:
        rows = min(max(int(expert_offsets[-1]), 0), rows)
    out[:rows] = moe_scale_columns_reference(input[:rows], scale)


def _check(
    export: str,
    input: torch.Tensor,
    scale: torch.Tensor | None,
    expert_offsets: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    check_matrix(export, "input", input, VECTOR)
    if expert_offsets is not None and len(expert_offsets) == 0:
        raise ValueError(f"{export}: expert_offsets must have shape [experts + 1], got [0]")
    check_matrix(export, "out", out, VECTOR)
    check_elements_apart(export, "out", out)
    check_contiguous(export, scale=scale, expert_offsets=expert_offsets)


SCALE_COLUMNS = Export(
    "moe_scale_columns",
    "moe_scale_columns",
    "input:bf16[rows,columns] scale?:bf16[columns] expert_offsets?:i32[starts] out!:like(input) "
    "enable_pdl:pdl",
    check=_check,
    write=_write,
)


@precast_api(
    trace=TraceTemplate(
        op_type="moe_scale_columns",
        name_prefix="moe_scale_columns",
        description="Multiplies columns by scales and rounds them to e4m3, as bfloat16.",
        axes={
            "num_rows": Var("Rows of experts.", sample=20),
            "hidden_size": Const("h", multiple=VECTOR),
        },
        inputs={
            "input": Tensor(["num_rows", "hidden_size"], dtype="bfloat16"),
            "scale": Tensor(["hidden_size"], dtype="bfloat16"),
        },
        outputs={
            "output": Tensor(["num_rows", "hidden_size"], param="out", dtype="bfloat16"),
        },
        reference=moe_scale_columns_reference,
        tags=["moe"],
    )
)
@op("moe_scale_columns")
@documented(ROWS)
def moe_scale_columns(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    expert_offsets: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    r"""Multiply columns by scales and round them to e4m3, as bfloat16.

    .. math:: out_{r,c} = \mathrm{sat}_{e4m3}(input_{r,c} \cdot scale_c)

    Parameters
    ----------
    input : torch.Tensor
        ``[rows, columns]``, bfloat16, on a CUDA device; ``columns`` is a multiple of 8, the last
        dimension has stride 1, rows start at multiples of 16 bytes.
    scale : torch.Tensor, optional
        ``[columns]``, bfloat16, contiguous, at a multiple of 16 bytes. Default: 1.
    expert_offsets : torch.Tensor, optional
        ``[experts + 1]``, int32, contiguous, as :func:`moe_sort` makes it. Only its last element is
        read: rows from there on are neither read nor written. Default: all rows are.
    out : torch.Tensor, optional
        ``[rows, columns]``, bfloat16; strides as above. May be ``input``. Default: a new tensor.

    Returns
    -------
    torch.Tensor
        ``[rows, columns]``; ``out`` if it is given.

    Notes
    -----
    The product is float32, rounded once to the nearest even e4m3, which bfloat16 holds exactly;
    numbers beyond 448 become 448, and NaN stays NaN. One launch; allocates only a missing ``out``;
    safe in CUDA graphs; not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> x = torch.tensor([[1.03, 500.0] * 4]).bfloat16()
    >>> with precast.reference_mode():
    ...     precast.fused_moe.moe_scale_columns(x)[0, :2]
    tensor([  1., 448.], dtype=torch.bfloat16)
    """
    if out is None:
        out = torch.empty_like(input, memory_format=torch.contiguous_format)
    SCALE_COLUMNS.launch(input, scale, expert_offsets, out, enable_pdl)
    return out
