# SPDX-License-Identifier: Apache-2.0
"""The function between the two products of an expert, with biases and quantisation.

Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202; So et al., Primer,
arXiv:2109.08668; OpenAI, gpt-oss model card, arXiv:2508.10925; scales of groups: DeepSeek-AI,
DeepSeek-V3 Technical Report, arXiv:2412.19437.
"""

from __future__ import annotations

from typing import Any

from precast._base.errors import BackendSupportedError
from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import op
from precast._op.validation import check_contiguous, check_elements_apart
from precast._ops.moe._activation_reference import (
    moe_activation_reference,
    rows_of_experts,
)
from precast._ops.moe._backends import BACKEND, Both, backends
from precast._ops.moe._rows import EPS, GROUP, ROWS, VECTOR, check_matrix
from precast._ops.moe.enums import ActivationType
from precast.api_logging import precast_api
from precast.trace import Const, Dtype, Scalar, Tensor, TraceTemplate, Var
from precast.trace.registry import by_form

_ACT = ActivationType
#: The functions that there are.
COMPUTED = frozenset(
    {
        *(_ACT.Swiglu, _ACT.SwigluBias, _ACT.Geglu, _ACT.GegluTanh),
        *(_ACT.Silu, _ACT.Gelu, _ACT.Relu, _ACT.Relu2, _ACT.Identity),
    }
)
_GATED = frozenset(function for function in COMPUTED if function.is_gated)


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
    input: torch.Tensor,
    row_experts: torch.Tensor | None,
    expert_offsets: torch.Tensor | None,
    activation_type: int,
    bias: torch.Tensor | None,
    swiglu_alpha: torch.Tensor | None,
    swiglu_beta: torch.Tensor | None,
    swiglu_limit: torch.Tensor | None,
    scale: torch.Tensor | None,
    quant_scale: torch.Tensor | None,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
) -> None:
    parts = 2 if known_function(export, activation_type).is_gated else 1
    multiple = VECTOR if out_scale is None else GROUP
    check_matrix(export, "input", input, parts * multiple)
    rows, inputs = input.shape
    columns = inputs // parts
    if expert_offsets is not None and len(expert_offsets) == 0:
        raise ValueError(f"{export}: expert_offsets must have shape [experts + 1], got [0]")
    given = {
        "bias": bias,
        "swiglu_alpha": swiglu_alpha,
        "swiglu_beta": swiglu_beta,
        "swiglu_limit": swiglu_limit,
        "scale": scale,
        "quant_scale": None if quant_scale is None or quant_scale.numel() == 1 else quant_scale,
    }
    each = {name: tensor for name, tensor in given.items() if tensor is not None}
    experts = [len(tensor) for tensor in each.values()]
    if expert_offsets is not None:
        experts = [len(expert_offsets) - 1]
    for name, tensor in each.items():
        shape = [experts[0], inputs] if name == "bias" else [experts[0]]
        if list(tensor.shape) != shape:
            raise ValueError(f"{export}: {name} must have shape {shape}, got {[*tensor.shape]}")
    if quant_scale is not None and out_scale is not None:
        raise ValueError(
            f"{export}: out_scale must not be given with quant_scale; pass one of them"
        )
    if each and row_experts is None:
        raise ValueError(
            f"{export}: row_experts must be given with numbers or biases of experts, got None"
        )
    has_codes = quant_scale is not None or out_scale is not None
    dtype = torch.float8_e4m3fn if has_codes else input.dtype
    if out.dtype is not dtype:
        wanted, got = (str(d).removeprefix("torch.") for d in (dtype, out.dtype))
        raise ValueError(f"{export}: out must be {wanted}, got {got}")
    check_matrix(export, "out", out, multiple)
    wanted_shapes = [
        ("out", out, [rows, columns]),
        ("out_scale", out_scale, [columns // GROUP, rows]),
    ]
    for name, output, shape in wanted_shapes:
        if output is None:
            continue
        if [*output.shape] != shape:
            raise ValueError(f"{export}: {name} must have shape {shape}, got {[*output.shape]}")
        check_elements_apart(export, name, output)
    check_contiguous(export, row_experts=row_experts, expert_offsets=expert_offsets, **each)


def _write(
    out: torch.Tensor, out_scale: torch.Tensor | None, enable_pdl: bool, **given: Any
) -> None:
    """The rows of experts; not every device can copy to parts of every dtype."""
    results = moe_activation_reference(**given)
    codes, scales = results if isinstance(results, tuple) else (results, None)
    each = [given[name] for name in ("bias", "swiglu_alpha", "swiglu_beta", "swiglu_limit")]
    each += [given["scale"], given["quant_scale"]]
    places = given["row_experts"], given["expert_offsets"]
    rows, _ = rows_of_experts(given["input"], *places, tuple(each))
    out.view(torch.uint8)[rows] = codes.view(torch.uint8)[rows]
    if scales is not None:
        assert out_scale is not None
        out_scale[:, rows] = scales[:, rows]


_BOTH = Both.of(
    "moe_activation",
    "input:T=bf16|f16[rows,inputs] row_experts?:i32[rows] expert_offsets?:i32[starts] "
    "activation_type:int bias?:bf16|f16[experts,inputs] swiglu_alpha?:f32[experts] "
    "swiglu_beta?:f32[experts] swiglu_limit?:f32[experts] scale?:f32[experts] quant_scale?:f32 "
    "gate_first:bool eps:float(1e-30-) out!:bf16|f16|e4m3 out_scale!?:f32 enable_pdl:pdl",
    check=_check,
    write=_write,
    derived={"out_dtype": lambda out: out.dtype},
)
#: For the fused mixture of experts.
ACTIVATION = _BOTH.cuda


#: What the output is, whether the function is gated, and whether it has biases and numbers.
_Form = tuple[str, bool, bool]


def _form(
    activation_type: int = ActivationType.Swiglu,
    bias: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **others: object,
) -> _Form:
    output = "quant" if quant_scale is not None else "groups"
    dtype = _dtype_of(out, out_dtype)
    if output == "groups" and dtype is not torch.float8_e4m3fn:
        output = str(dtype).removeprefix("torch.")
    return output, ActivationType(activation_type).is_gated, bias is not None


def _fill(made: dict[str, Any]) -> None:
    experts = made["row_experts"]
    count = len(made["bias"]) if "bias" in made else 4
    numbers = torch.arange(len(experts), device=experts.device)
    experts.copy_(numbers * count // len(experts))


def _template(form: _Form) -> TraceTemplate:
    output, gated, has_numbers = form
    axes: dict[str, Var | Const] = {
        "num_rows": Var("Rows of all experts, padding included.", sample=20),
        "num_inputs": Const("i", multiple=2 * GROUP),
        "num_columns": Const("", value="num_inputs // 2" if gated else "num_inputs"),
    }
    inputs: dict[str, Tensor | Scalar] = {
        "input": Tensor(["num_rows", "num_inputs"]),
        "row_experts": Tensor(
            ["num_rows"], dtype="int32", description="The expert of each row; -1 for none."
        ),
    }
    fixed: dict[str, Any] = {} if gated else {"activation_type": int(_ACT.Relu2)}
    if has_numbers:
        axes["num_experts"] = Const("e", sample=4)
        inputs["bias"] = Tensor(["num_experts", "num_inputs"])
        if gated:
            fixed["activation_type"] = int(_ACT.SwigluBias)
            for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit"):
                inputs[name] = Tensor(["num_experts"], dtype="float32")
    if output == "quant":
        inputs["quant_scale"] = Tensor([], dtype="float32")
    outputs = {"output": Tensor(["num_rows", "num_columns"], param="out", dtype="float8_e4m3fn")}
    if output == "groups":
        axes["num_groups"] = Const("", value=f"num_columns // {GROUP}")
        outputs["scale"] = Tensor(["num_groups", "num_rows"], param="out_scale", dtype="float32")
    elif output != "quant":
        inputs["input"] = Tensor(["num_rows", "num_inputs"], dtype=output)
        outputs = {"output": Tensor(["num_rows", "num_columns"], param="out", dtype=output)}
        fixed["out_dtype"] = Dtype(output)
    return TraceTemplate(
        op_type="moe_activation",
        name_prefix=f"moe_activation_{output}" + "_plain" * (not gated) + "_bias" * has_numbers,
        description="Computes the function between the two products of an expert.",
        axes=axes,
        inputs=inputs,
        outputs=outputs,
        reference=moe_activation_reference,
        tags=["moe"],
        fixed=fixed,
        fill=_fill,
    )


_FORMS = [
    *(("groups", True, False), ("groups", True, True), ("quant", True, False)),
    *(("bfloat16", True, False), ("bfloat16", True, True), ("bfloat16", False, False)),
    ("float16", True, False),
]


def _dtype_of(out: torch.Tensor | None, out_dtype: torch.dtype | None) -> torch.dtype:
    if out_dtype is not None:
        return out_dtype
    return torch.float8_e4m3fn if out is None else out.dtype


@precast_api(trace=by_form(_form, _template, _FORMS))
@op("moe_activation", backends=backends("moe_activation"), chosen_by_body=True)
@documented(BACKEND, ROWS)
def moe_activation(
    input: torch.Tensor,
    row_experts: torch.Tensor | None = None,
    expert_offsets: torch.Tensor | None = None,
    activation_type: int = ActivationType.Swiglu,
    bias: torch.Tensor | None = None,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    gate_first: bool = True,
    eps: float = EPS,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Compute the function between the two products of an expert, and quantise its results.

    ``input`` is what the first grouped product returns, and the results are what the second one
    takes: e4m3 codes with a scale for 128 columns of a row, as DeepSeek-V3 has them, codes by a
    given scale, or 16-bit numbers.

    .. math::

        y_{r,c} &= scale_e \cdot input_{r,c} + bias_{e,c}, \quad e = row\_experts_r \\
        h_{r,c} &= act(y_{r,n+c}) \cdot y_{r,c} \quad \text{with a gate,} \qquad
        h_{r,c} = act(y_{r,c}) \quad \text{otherwise} \\
        s_{j,r} &= \max(\max_{c \in j} |h_{r,c}|, eps) / 448, \quad
        out_{r,c} = \mathrm{sat}(h_{r,c} \cdot (1 / s_{j,r}))

    where the gate :math:`y_{r,n+c}` and the other factor :math:`y_{r,c}` are the other way around
    with ``gate_first``. ``SwigluBias`` is, with :math:`g = \min(gate, limit_e)`,

    .. math::

        h = g \cdot \sigma(alpha_e \cdot g) \cdot
        (\min(\max(up, -limit_e), limit_e) + beta_e)

    Parameters
    ----------
    input : torch.Tensor
        ``[rows, 2 n]`` with a gate, otherwise ``[rows, n]``; bfloat16 or float16, on a CUDA device.
        ``n`` is a multiple of 128 with scales of groups, else of 8; the last dimension has stride
        1, rows start at multiples of 16 bytes.
    row_experts : torch.Tensor, optional
        ``[rows]``, int32, contiguous: the expert of each row, as :func:`moe_sort` makes it, or as
        :func:`~precast.gemm.group_deepgemm_fp8_nt_groupwise` takes it. Rows with a negative number
        belong to none, such as the padding between experts: they are not read, and what they have
        in the outputs stays as it is. Default: no row differs from another.
    expert_offsets : torch.Tensor, optional
        ``[experts + 1]``, int32, contiguous, as :func:`moe_sort` makes it. Only its last element is
        read: rows from there on belong to no expert. Default: all rows belong to one.
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
    quant_scale : torch.Tensor, optional
        Float32, contiguous: one number, or ``[experts]``; what numbers are multiplied by before
        they are rounded to e4m3. Default: codes have scales of groups.
    gate_first : bool
        Whether the gate is the first half of the columns, as in :func:`~precast.silu_and_mul`, or
        the second, as in :func:`cutlass_fused_moe`. Default: True.
    eps : float
        The smallest magnitude that a scale of a group stands for; at least 1e-30. Default: 1e-10.
    out : torch.Tensor, optional
        ``[rows, n]``, float8_e4m3fn or the dtype of ``input``; strides as there. Default: a new
        tensor, in which rows of no expert are undefined.
    out_scale : torch.Tensor, optional
        *Dequantisation* scales ``[n / 128, rows]``, float32; the last dimension has stride 1. It is
        the layout that :func:`~precast.gemm.gemm_fp8_nt_groupwise` calls ``"MN"``; others take its
        transpose. Default: a new tensor if codes have scales of groups, else none.
    out_dtype : torch.dtype, optional
        The dtype of a new ``out``: float8_e4m3fn, or that of ``input``, whose numbers have no
        scale. Default: float8_e4m3fn.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        ``out`` and ``out_scale``; ``out`` alone with ``quant_scale`` or with 16-bit numbers.

    Raises
    ------
    BackendSupportedError
        An ``activation_type`` that no kernel computes; another backend, or one that the GPU has no
        kernel for; ``"cute_dsl"`` for another function than Swiglu, without scales of groups, or
        with ``bias`` or ``scale``.

    Notes
    -----
    All arithmetic is float32 with one rounding at the end; the exponential and the division are
    exact to about 2e-5. NaN stays NaN; NaN and infinity with scales of groups are those of
    :func:`~precast.quantization.static_quant_fp8`. A number that is no expert stands for the first
    one. One launch; allocates only what is missing; nothing is read by the host, so that a CUDA
    graph may be replayed with other experts; not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> x = torch.ones(2, 256).bfloat16()
    >>> with precast.reference_mode():
    ...     codes, scale = precast.moe_activation(x, torch.tensor([0, -1], dtype=torch.int32))
    ...     numbers = precast.moe_activation(x, out_dtype=x.dtype)
    >>> codes.shape, scale.shape, codes[0, 0].float() * scale[0, 0]
    (torch.Size([2, 128]), torch.Size([1, 2]), tensor(0.7311))
    >>> numbers[:, 0]
    tensor([0.7305, 0.7305], dtype=torch.bfloat16)
    """
    if activation_type not in COMPUTED:
        known_function("moe_activation", activation_type)
    dtype = _dtype_of(out, out_dtype)
    if out is None:
        columns = input.shape[1] // 2 if activation_type in _GATED else input.shape[1]
        out = input.new_empty(input.shape[0], columns, dtype=dtype)
    elif out.dtype is not dtype:
        raise ValueError(f"moe_activation: out must be {dtype}, as out_dtype says, got {out.dtype}")
    if out_scale is None and quant_scale is None and dtype is torch.float8_e4m3fn:
        groups, rows = out.shape[1] // GROUP, input.shape[0]
        out_scale = input.new_empty(groups, rows, dtype=torch.float32)
    export = _BOTH.cuda
    if backend != "auto" and backend != "cuda":
        export = _BOTH.other(backend)
        differs = bias is not None or scale is not None
        if activation_type != ActivationType.Swiglu or out_scale is None or differs:
            raise BackendSupportedError(
                "moe_activation: backend 'cute_dsl' computes Swiglu with scales of groups, without "
                "bias and scale. Fix: backend='cuda'"
            )
    export.launch(
        *(input, row_experts, expert_offsets, int(activation_type), bias, swiglu_alpha),
        *(swiglu_beta, swiglu_limit, scale, quant_scale, gate_first, eps, out, out_scale),
        enable_pdl,
    )
    return out if out_scale is None else (out, out_scale)
