# SPDX-License-Identifier: Apache-2.0
"""The function between the two products of an expert, with biases and quantisation.

Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202; So et al., Primer,
arXiv:2109.08668; OpenAI, gpt-oss model card, arXiv:2508.10925.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from precast._base.errors import BackendSupportedError
from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, op
from precast._op.validation import check_contiguous
from precast._ops.moe._activation_reference import (
    expert_activation_block_quant_reference,
    expert_activation_quant_reference,
    expert_activation_reference,
)
from precast._ops.moe._rows import (
    GROUP,
    ROWS,
    VECTOR,
    check_matrix,
    check_scales,
    new_scales,
)
from precast._ops.moe.enums import ActivationType
from precast.api_logging import precast_api
from precast.trace import Const, Tensor, TraceTemplate, Var
from precast.trace.registry import by_form

_ACT = ActivationType
#: The functions that there are.
COMPUTED = frozenset(
    {
        *(_ACT.Swiglu, _ACT.SwigluBias, _ACT.Geglu, _ACT.GegluTanh),
        *(_ACT.Silu, _ACT.Gelu, _ACT.Relu, _ACT.Relu2, _ACT.Identity),
    }
)


def known_function(export: str, activation_type: int) -> ActivationType:
    """Return the function of a number; raise for one that is none, or that no kernel computes."""
    try:
        function = _ACT(activation_type)
    except ValueError:
        raise ValueError(
            f"{export}: activation_type must be that of an ActivationType, got {activation_type!r}"
        ) from None
    if function not in COMPUTED:
        names = ", ".join(member.name for member in _ACT if member in COMPUTED)
        raise BackendSupportedError(
            f"{export}: no kernel computes the activation_type {function.name}; there are {names}"
        )
    return function


def _check(
    export: str,
    x: torch.Tensor,
    expert_offsets: torch.Tensor,
    row_experts: torch.Tensor,
    activation_type: int,
    bias: torch.Tensor | None,
    swiglu_alpha: torch.Tensor | None,
    swiglu_beta: torch.Tensor | None,
    swiglu_limit: torch.Tensor | None,
    scale: torch.Tensor | None,
    out: torch.Tensor,
    quant_scale: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> None:
    parts = 2 if known_function(export, activation_type).is_gated else 1
    multiple = VECTOR if out_scale is None else GROUP
    check_matrix(export, "x", x, parts * multiple)
    rows, inputs = x.shape
    columns = inputs // parts
    if len(expert_offsets) == 0:
        raise ValueError(f"{export}: expert_offsets must have at least one element, got shape [0]")
    experts = len(expert_offsets) - 1
    of_experts = {
        "bias": (bias, [experts, inputs]),
        "swiglu_alpha": (swiglu_alpha, [experts]),
        "swiglu_beta": (swiglu_beta, [experts]),
        "swiglu_limit": (swiglu_limit, [experts]),
        "scale": (scale, [experts]),
    }
    if quant_scale is not None and quant_scale.numel() != 1:
        of_experts["quant_scale"] = quant_scale, [experts]
    for name, (tensor, shape) in of_experts.items():
        if tensor is not None and list(tensor.shape) != shape:
            raise ValueError(f"{export}: {name} must have shape {shape}, got {[*tensor.shape]}")
    check_matrix(export, "out", out, multiple)
    if list(out.shape) != [rows, columns]:
        raise ValueError(f"{export}: out must have shape {[rows, columns]}, got {[*out.shape]}")
    if out_scale is not None:
        check_scales(export, out_scale, rows, columns)
    numbers = {name: tensor for name, (tensor, _) in of_experts.items()}
    check_contiguous(export, expert_offsets=expert_offsets, row_experts=row_experts, **numbers)


def _copy_rows(expert_offsets: torch.Tensor, out: torch.Tensor, result: torch.Tensor) -> None:
    """Write the rows of experts; not every device can copy to parts of every dtype."""
    rows = int(expert_offsets[-1])
    one_byte = out.element_size() == 1
    target, source = (t.view(torch.uint8) if one_byte else t for t in (out, result))
    target[:rows] = source[:rows]


def _write(expert_offsets: torch.Tensor, out: torch.Tensor, **given: Any) -> None:
    inputs = {"expert_offsets": expert_offsets, **given}
    _copy_rows(expert_offsets, out, expert_activation_reference(**inputs))


def _write_quant(expert_offsets: torch.Tensor, out: torch.Tensor, **given: Any) -> None:
    inputs = {"expert_offsets": expert_offsets, **given}
    _copy_rows(expert_offsets, out, expert_activation_quant_reference(**inputs))


def _write_block_quant(
    expert_offsets: torch.Tensor, out: torch.Tensor, out_scale: torch.Tensor, **given: Any
) -> None:
    inputs = {"expert_offsets": expert_offsets, **given}
    codes, scales = expert_activation_block_quant_reference(**inputs)
    _copy_rows(expert_offsets, out, codes)
    _copy_rows(expert_offsets, out_scale, scales)


def _without_pdl(write: Callable[..., None]) -> Callable[..., None]:
    """The function, without the arguments that say how kernels are launched."""
    return lambda enable_pdl, **given: write(**given)


_ROWS_OF = "x:T=bf16|f16[rows,inputs] expert_offsets:i32[starts] row_experts:i32[rows] "
_NUMBERS_OF = (
    "activation_type:int bias?:bf16|f16[experts,inputs] swiglu_alpha?:f32[experts] "
    "swiglu_beta?:f32[experts] swiglu_limit?:f32[experts] scale?:f32[experts] "
)
ACTIVATION = Export(
    "expert_activation",
    "expert_activation",
    f"{_ROWS_OF}{_NUMBERS_OF}out!:T[rows,columns] enable_pdl:pdl",
    check=_check,
    write=_without_pdl(_write),
)
ACTIVATION_QUANT = Export(
    "expert_activation",
    "expert_activation_quant",
    f"{_ROWS_OF}quant_scale:f32 {_NUMBERS_OF}out!:e4m3[rows,columns] enable_pdl:pdl",
    check=_check,
    write=_without_pdl(_write_quant),
)
ACTIVATION_BLOCK_QUANT = Export(
    "expert_activation",
    "expert_activation_block_quant",
    f"{_ROWS_OF}{_NUMBERS_OF}out!:e4m3[rows,columns] out_scale!:f32[rows,groups] enable_pdl:pdl",
    check=_check,
    write=_without_pdl(_write_block_quant),
)


#: Whether the function is gated, and whether it has biases and numbers of SwigluBias.
_Form = tuple[bool, bool]


def _form(
    activation_type: int = ActivationType.Swiglu,
    bias: torch.Tensor | None = None,
    **others: object,
) -> _Form:
    return ActivationType(activation_type).is_gated, bias is not None


def _fill(made: dict[str, Any]) -> None:
    offsets, experts = made["expert_offsets"], made["row_experts"]
    count, rows = len(offsets) - 1, len(experts)
    offsets.copy_(torch.arange(count + 1, device=offsets.device) * rows // count)
    experts.copy_(torch.arange(rows, device=experts.device) * count // rows)


def _trace(
    function: str,
    description: str,
    reference: Callable[..., Any],
    outputs: Mapping[str, Tensor],
    has_quant_scale: bool = False,
) -> Any:
    """The templates of one of the functions."""

    def template(form: _Form) -> TraceTemplate:
        gated, has_numbers = form
        axes: dict[str, Var | Const] = {
            "num_rows": Var("Rows of experts.", sample=20),
            "num_starts": Const("s", "One more than experts.", sample=5),
            "num_inputs": Const("i", multiple=2 * GROUP),
            "num_columns": Const("", value="num_inputs // 2" if gated else "num_inputs"),
        }
        if len(outputs) > 1:
            axes["num_groups"] = Const("", value=f"num_columns // {GROUP}")
        inputs = {
            "x": Tensor(["num_rows", "num_inputs"]),
            "expert_offsets": Tensor(["num_starts"], dtype="int32"),
            "row_experts": Tensor(["num_rows"], dtype="int32"),
        }
        if has_quant_scale:
            inputs["quant_scale"] = Tensor([], dtype="float32")
        fixed = {} if gated else {"activation_type": int(_ACT.Relu2)}
        if has_numbers:
            axes["num_experts"] = Const("", value="num_starts - 1")
            inputs["bias"] = Tensor(["num_experts", "num_inputs"])
            if gated:
                fixed = {"activation_type": int(_ACT.SwigluBias)}
                for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit"):
                    inputs[name] = Tensor(["num_experts"], dtype="float32")
        return TraceTemplate(
            op_type="expert_activation",
            name_prefix=function + "_plain" * (not gated) + "_bias" * has_numbers,
            description=description,
            axes=axes,
            inputs=inputs,
            outputs=outputs,
            reference=reference,
            tags=["moe"],
            fixed=fixed,
            fill=_fill,
        )

    return by_form(_form, template, [(True, False), (True, True), (False, False)])


_CODES = {"output": Tensor(["num_rows", "num_columns"], param="out", dtype="float8_e4m3fn")}

#: What the quantising functions do not say again.
_QUANTISED = """
Parameters
----------
out : torch.Tensor, optional
    ``[rows, n]``, float8_e4m3fn; strides as ``x``. Rows of no expert are not written. Default: a
    new tensor.
"""


def _output_of(x: torch.Tensor, activation_type: int, dtype: torch.dtype) -> torch.Tensor:
    """A new output; an activation that is none is left for the checks."""
    gated = known_function("expert_activation", activation_type).is_gated
    return x.new_empty(x.shape[0], x.shape[1] // 2 if gated else x.shape[1], dtype=dtype)


@precast_api(
    trace=_trace(
        "expert_activation",
        "Computes the function between the two products of an expert.",
        expert_activation_reference,
        {"output": Tensor(["num_rows", "num_columns"], param="out", dtype_from="x")},
    )
)
@op("expert_activation")
@documented(ROWS)
def expert_activation(
    x: torch.Tensor,
    expert_offsets: torch.Tensor,
    row_experts: torch.Tensor,
    activation_type: int = ActivationType.Swiglu,
    bias: torch.Tensor | None = None,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    r"""Compute the function between the two products of an expert, row by row.

    .. math::

        y_{r,c} &= scale_e \cdot x_{r,c} + bias_{e,c}, \quad e = row\_experts_r \\
        h_{r,c} &= act(y_{r,n+c}) \cdot y_{r,c} \quad \text{with a gate,} \qquad
        h_{r,c} = act(y_{r,c}) \quad \text{otherwise}

    and ``SwigluBias`` is, with :math:`g = \min(y_{r,n+c}, limit_e)`,

    .. math::

        h_{r,c} = g \cdot \sigma(alpha_e \cdot g) \cdot
        (\min(\max(y_{r,c}, -limit_e), limit_e) + beta_e)

    Parameters
    ----------
    x : torch.Tensor
        ``[rows, 2 n]`` with a gate, whose first half is the linear part and the second the gate,
        otherwise ``[rows, n]``; bfloat16 or float16, on a CUDA device. ``n`` is a multiple of 8;
        the last dimension has stride 1, rows start at multiples of 16 bytes.
    expert_offsets : torch.Tensor
        ``[experts + 1]``, int32, contiguous, as :func:`moe_sort` makes it. Only its last element is
        read: rows from there on are skipped.
    row_experts : torch.Tensor
        ``[rows]``, int32, contiguous: the expert of each row; read where experts differ.
    activation_type : int
        An :class:`ActivationType`: Swiglu, SwigluBias, Geglu or GegluTanh, which have a gate, or
        Silu, Gelu, Relu, Relu2 or Identity. Default: Swiglu.
    bias : torch.Tensor, optional
        ``[experts, 2 n]`` or ``[experts, n]``, bfloat16 or float16, contiguous. Default: none.
    swiglu_alpha, swiglu_beta, swiglu_limit : torch.Tensor, optional
        ``[experts]``, float32, contiguous: the numbers of SwigluBias; other functions ignore them.
        Default: 1, 0 and infinity.
    scale : torch.Tensor, optional
        ``[experts]``, float32, contiguous. Default: 1.
    out : torch.Tensor, optional
        ``[rows, n]`` of the dtype of ``x``; strides as ``x``. Rows of no expert are not written.
        Default: a new tensor.

    Returns
    -------
    torch.Tensor
        ``[rows, n]``; ``out`` if it is given.

    Raises
    ------
    BackendSupportedError
        An ``activation_type`` that no kernel computes.
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device, strides or alignment other
        than above; outputs that overlap another argument or each other.

    Notes
    -----
    All arithmetic is float32, with one rounding at the end. NaN stays NaN. One launch; allocates
    only what is missing; nothing is read by the host, so that a CUDA graph may be replayed with
    other experts; not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> x = torch.tensor([[2.0] * 8 + [0.0, 1.0] * 4]).half()
    >>> offsets, experts = (torch.tensor(n, dtype=torch.int32) for n in ([0, 1], [0]))
    >>> with precast.reference_mode():
    ...     precast.fused_moe.expert_activation(x, offsets, experts)[0, :2]
    tensor([0.0000, 1.4619], dtype=torch.float16)
    """
    if out is None:
        out = _output_of(x, activation_type, x.dtype)
    known_function("expert_activation", activation_type)
    ACTIVATION.launch(
        *(x, expert_offsets, row_experts, int(activation_type), bias),
        *(swiglu_alpha, swiglu_beta, swiglu_limit, scale, out, enable_pdl),
    )
    return out


@precast_api(
    trace=_trace(
        "expert_activation_quant",
        "Computes the function between the two products of an expert, and e4m3 codes of it.",
        expert_activation_quant_reference,
        _CODES,
        has_quant_scale=True,
    )
)
@op("expert_activation")
@documented(_QUANTISED, expert_activation)
def expert_activation_quant(
    x: torch.Tensor,
    expert_offsets: torch.Tensor,
    row_experts: torch.Tensor,
    quant_scale: torch.Tensor,
    activation_type: int = ActivationType.Swiglu,
    bias: torch.Tensor | None = None,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    r"""Compute :func:`expert_activation`, quantised to e4m3 by a given scale.

    .. math:: out_{r,c} = \mathrm{sat}(h_{r,c} \cdot quant\_scale_e)

    Parameters
    ----------
    quant_scale : torch.Tensor
        Float32, contiguous: one number, or ``[experts]``; what numbers are multiplied by before
        they are rounded.

    Returns
    -------
    torch.Tensor
        ``[rows, n]``; ``out`` if it is given.

    Examples
    --------
    >>> import torch, precast
    >>> x = torch.tensor([[2.0] * 8 + [0.0, 1.0] * 4]).half()
    >>> offsets, experts = (torch.tensor(n, dtype=torch.int32) for n in ([0, 1], [0]))
    >>> by = torch.tensor(4.0)
    >>> with precast.reference_mode():
    ...     codes = precast.fused_moe.expert_activation_quant(x, offsets, experts, by)
    >>> codes[0, :2].float()
    tensor([0., 6.])
    """
    if out is None:
        out = _output_of(x, activation_type, torch.float8_e4m3fn)
    known_function("expert_activation_quant", activation_type)
    ACTIVATION_QUANT.launch(
        *(x, expert_offsets, row_experts, quant_scale, int(activation_type), bias),
        *(swiglu_alpha, swiglu_beta, swiglu_limit, scale, out, enable_pdl),
    )
    return out


@precast_api(
    trace=_trace(
        "expert_activation_block_quant",
        "Computes the function between the two products of an expert, and e4m3 codes of it with a "
        "scale for 128 columns.",
        expert_activation_block_quant_reference,
        {
            **_CODES,
            "scale": Tensor(["num_rows", "num_groups"], param="out_scale", dtype="float32"),
        },
    )
)
@op("expert_activation")
@documented(_QUANTISED, expert_activation)
def expert_activation_block_quant(
    x: torch.Tensor,
    expert_offsets: torch.Tensor,
    row_experts: torch.Tensor,
    activation_type: int = ActivationType.Swiglu,
    bias: torch.Tensor | None = None,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Compute :func:`expert_activation`, quantised to e4m3 with a scale for 128 columns.

    The scale of a group and its codes are those of :func:`moe_permute_quant`, of :math:`h` in
    float32.

    Parameters
    ----------
    x : torch.Tensor
        As :func:`expert_activation` takes it, with an ``n`` that is a multiple of 128.
    out_scale : torch.Tensor, optional
        ``[rows, n / 128]``, float32, at any strides: *dequantisation* scales; rows of no expert are
        not written. Default: a new tensor with stride 1 along the rows.

    Returns
    -------
    tuple of torch.Tensor
        ``out`` and ``out_scale``.

    Examples
    --------
    >>> import torch, precast
    >>> x = torch.ones(1, 256).half()
    >>> offsets, experts = (torch.tensor(n, dtype=torch.int32) for n in ([0, 1], [0]))
    >>> with precast.reference_mode():
    ...     codes, scale = precast.fused_moe.expert_activation_block_quant(x, offsets, experts)
    >>> (codes.float() * scale)[0, :1]
    tensor([0.7311])
    """
    if out is None:
        out = _output_of(x, activation_type, torch.float8_e4m3fn)
    if out_scale is None:
        out_scale = new_scales(x, *out.shape)
    known_function("expert_activation_block_quant", activation_type)
    ACTIVATION_BLOCK_QUANT.launch(
        *(x, expert_offsets, row_experts, int(activation_type), bias, swiglu_alpha, swiglu_beta),
        *(swiglu_limit, scale, out, out_scale, enable_pdl),
    )
    return out, out_scale
