# SPDX-License-Identifier: Apache-2.0
"""Which definition describes a call that quantises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precast._base.torch import torch
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var, dispatch


def of_e4m3(
    usual: TraceTemplate, packed: TraceTemplate | None = None
) -> Callable[..., TraceTemplate]:
    """A dispatch function: ``packed`` where the scales are words of exponents, else ``usual``.

    A definition holds one reference, and those of the library write e4m3 unless they are told
    otherwise, which a definition cannot: calls with other codes have none.
    """
    templates = (usual,) if packed is None else (usual, packed)

    @dispatch(*templates)
    def choose(
        dst_dtype: Any = None,
        out: Any = None,
        out_scale: Any = None,
        use_packed_ue8m0: bool = False,
        **others: Any,
    ) -> TraceTemplate:
        dtype = dst_dtype if out is None else out.dtype
        if dtype not in (None, torch.float8_e4m3fn):
            raise ValueError(f"{usual!r}: only calls with float8_e4m3fn have a definition")
        words = getattr(out_scale, "dtype", None) == torch.int32
        return packed if packed is not None and (use_packed_ue8m0 or words) else usual

    return choose


def group_trace(
    name: str, description: str, reference: Callable[..., Any], *, param: str, gated: bool = False
) -> Callable[..., TraceTemplate]:
    """The definitions of a quantisation by groups, for ``[*num_tokens, hidden_size]``."""

    def template(packed: bool) -> TraceTemplate:
        first = "gate_up_size" if gated else "hidden_size"
        axes: dict[str, Var | Const] = {
            "*num_tokens": Var(),
            first: Const(abbrev="" if gated else "h", sample=512),
            "group_size": Const(abbrev="g", sample=128),
        }
        if gated:
            axes["hidden_size"] = Const(abbrev="h", value="gate_up_size // 2")
        groups = "hidden_size // group_size"
        value = f"({groups} + 3) // 4" if packed else groups
        axes["num_scales"] = Const(abbrev="", value=value)
        inputs: dict[str, Tensor | Scalar] = {
            "x": Tensor(["*num_tokens", first], param=param),
            "group_size": Scalar("int32"),
            "eps": Scalar("float32"),
            "scale_ue8m0": Scalar("bool", sample=packed),
        }
        if packed:
            inputs["use_packed_ue8m0"] = Scalar("bool", sample=True)
        scales = "Biased exponents, four a word." if packed else "Multiplies the codes."
        return TraceTemplate(
            op_type="quantization",
            name_prefix=name + ("_packed" if packed else ""),
            description=description,
            axes=axes,
            inputs=inputs,
            outputs={
                "x_q": Tensor(["*num_tokens", "hidden_size"], "out", "float8_e4m3fn"),
                "x_s": Tensor(
                    ["*num_tokens", "num_scales"],
                    "out_scale",
                    "int32" if packed else "float32",
                    description=scales,
                ),
            },
            reference=reference,
            constraints=("hidden_size % group_size == 0",),
        )

    return of_e4m3(template(False), template(True))


def token_trace(
    name: str, description: str, reference: Callable[..., Any], *, param: str, gated: bool = False
) -> Callable[..., TraceTemplate]:
    """The definition of a quantisation by tokens."""
    first = "gate_up_size" if gated else "hidden_size"
    axes: dict[str, Var | Const] = {
        "*num_tokens": Var(),
        first: Const(abbrev="" if gated else "h"),
        "one": Const(abbrev="", value="1"),
    }
    if gated:
        axes["hidden_size"] = Const(abbrev="h", value="gate_up_size // 2")
    template = TraceTemplate(
        op_type="quantization",
        name_prefix=name,
        description=description,
        axes=axes,
        inputs={"x": Tensor(["*num_tokens", first], param=param), "eps": Scalar("float32")},
        outputs={
            "x_q": Tensor(["*num_tokens", "hidden_size"], "out", "float8_e4m3fn"),
            "x_s": Tensor(["*num_tokens", "one"], "out_scale", "float32"),
        },
        reference=reference,
    )
    return of_e4m3(template)
