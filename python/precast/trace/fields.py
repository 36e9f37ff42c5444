# SPDX-License-Identifier: Apache-2.0
"""The parts of a template: axes, tensors and numbers, and the names of starred axes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: Element types of the schema, by their names in torch.
DTYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "float4_e2m1fn_x2": "float4_e2m1",
    "int64": "int64",
    "int32": "int32",
    "int16": "int16",
    "int8": "int8",
    "uint8": "uint8",  # Not in flashinfer-bench's schema yet; FlashInfer's own traces have it.
    "bool": "bool",
}


class Var(NamedTuple):
    """An axis whose size varies from call to call: batch, tokens, pages.

    Its size is not part of a definition. An axis whose name starts with ``*`` stands for any number
    of leading dimensions: ``"*rows"`` becomes ``rows`` for one dimension, otherwise ``rows_0``,
    ``rows_1`` and so on. In expressions, ``rows`` is the product of their sizes.

    Parameters
    ----------
    description : str
        A text for readers of the definition.
    value : str, optional
        The size in generated calls, as an expression of the axes before it.
    sample : int, optional
        The size in generated calls, if not every size is legal.
    in_data : bool
        Whether only values of tensors determine the size: an axis that only outputs have.
    """

    description: str = ""
    value: str | None = None
    sample: int | None = None
    in_data: bool = False


class Const(NamedTuple):
    """An axis whose size belongs to the model, such as hidden size. Each size is a definition.

    Parameters
    ----------
    abbrev : str, optional
        The letters before the size in a definition's name: ``"h"`` makes ``rmsnorm_h4096``.
        Default: the axis's name. Empty: the name has no size, because it follows from others.
    description : str
        A text for readers of the definition.
    param : str, optional
        The parameter with the size, if no tensor has the axis. Default: the parameter with the
        axis's name.
    value : str, optional
        The size as an expression of other axes and of scalar inputs, such as
        ``"gate_up_size // 2"``, if no input has the axis. It is also one of the constraints of the
        definition.
    multiple : int
        Sizes in generated calls are multiples of this.
    sample : int, optional
        The size in generated calls, if a small size is not legal.
    """

    abbrev: str | None = None
    description: str = ""
    param: str | None = None
    value: str | None = None
    multiple: int = 16
    sample: int | None = None


class Tensor(NamedTuple):
    """An input or output tensor.

    Parameters
    ----------
    axes : sequence of str
        The axis of each dimension.
    param : str, optional
        The op's parameter. Default for an input: the one with the same name. For an output: the
        parameter that it is written to, if there is one. An input of a method may also be
        ``self.attribute``, which was set before the call, or an attribute of that.
    dtype : str, optional
        The element type, if it is always the same. Default for an input: that of the argument.
    dtype_from : str, optional
        For an output: the input with the same element type.
    description : str
        A text for readers of the definition.
    item : int, optional
        The position, if the parameter or the attribute is a tuple or a list of tensors. The
        reference then gets a tuple, by the name of the parameter, or of the attribute without
        underscores in front.
    """

    axes: Sequence[str]
    param: str | None = None
    dtype: str | None = None
    dtype_from: str | None = None
    description: str = ""
    item: int | None = None

    def of(self, value: Any) -> Any:
        """The tensor in the value of its parameter; any other value is returned unchanged."""
        in_tuple = (
            isinstance(value, tuple | list) and self.item is not None and self.item < len(value)
        )
        return value[self.item] if in_tuple else value


class Scalar(NamedTuple):
    """An input that is a number, whose value a definition does not contain.

    ``param`` is as for :class:`Tensor`. ``sample`` is the value in generated calls; without it,
    they take the default of the parameter.
    """

    dtype: str
    param: str | None = None
    description: str = ""
    sample: float | None = None


class Dtype(str):
    """The name of a torch dtype as a value in ``fixed``, because templates do not import torch."""

    def __repr__(self) -> str:
        return f"torch.{self}"


def spread(axes: Sequence[str], spans: Mapping[str, int]) -> list[str]:
    """The axes of a tensor as they stand in a definition, without stars."""
    return [name for axis in axes for name in axis_names(axis, spans)]


def axis_names(axis: str, spans: Mapping[str, int]) -> list[str]:
    """The names of one axis in a definition: several for a starred axis of several dimensions."""
    if not axis.startswith("*"):
        return [axis]
    span = spans[axis]
    return [axis[1:]] if span == 1 else [f"{axis[1:]}_{i}" for i in range(span)]


def products(sizes: Mapping[str, int], spans: Mapping[str, int]) -> dict[str, int]:
    """The names in an expression: every axis, and each starred axis as the product of its sizes."""
    whole = {axis[1:]: math.prod(sizes[name] for name in axis_names(axis, spans)) for axis in spans}
    return {**whole, **sizes}


def written_out(expression: str, spans: Mapping[str, int]) -> str:
    """An expression as it stands in a definition, whose axes have no stars."""
    for axis, span in spans.items():
        if span != 1:
            product = " * ".join(axis_names(axis, spans)) or "1"
            expression = re.sub(rf"\b{axis[1:]}\b", f"({product})", expression)
    return expression
