# SPDX-License-Identifier: Apache-2.0
"""Make the arguments of a call from a template, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from precast.trace.fields import Const, Dtype, Scalar, products, spread
from precast.trace.template import TraceTemplate

if TYPE_CHECKING:
    import torch


def make_inputs(
    function: Callable[..., Any],
    template: TraceTemplate,
    axes: Mapping[str, int | Sequence[int]] | None = None,
    *,
    dtype: torch.dtype | str = "bfloat16",
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Make the arguments of a call that the template describes: ``function(**make_inputs(...))``.

    Parameters
    ----------
    function, template
        A pair of :func:`registered`.
    axes : mapping of str to int, optional
        Sizes by axis. A starred axis is named without its star and takes a size or a sequence of
        sizes. Default for each axis: a small size that no other axis has.
    dtype : torch.dtype or str
        The dtype of the tensors whose dtype the template leaves open.
    device : torch.device or str
        The device of the tensors.
    seed : int
        The same seed gives the same values on the same device.

    Returns
    -------
    dict
        The arguments by parameter. Floating-point tensors are normally distributed. Other tensors
        are zero, which is a valid index, unless the template fills them. Numbers are the defaults
        of the function; without a default they are 0.5, 1 or True.

    Raises
    ------
    ValueError
        If ``axes`` has a name that is not an axis, or an axis that is computed from others.

    Examples
    --------
    >>> import precast
    >>> from precast.trace import make_inputs, registered
    >>> template = next(t for f, t in registered() if t.name_prefix == "scale")
    >>> call = make_inputs(precast.scale, template, {"size": (2, 3)}, dtype="float32")
    >>> call["input"].shape, call["factor"]
    (torch.Size([2, 3]), 0.5)
    """
    import inspect

    import torch

    parameters = inspect.signature(function).parameters
    sizes, spans = _sizes(template, dict(axes or {}))
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    samples = {
        spec.param or name: spec.sample
        for name, spec in template.inputs.items()
        if isinstance(spec, Scalar) and spec.sample is not None
    }
    known = template.whole_numbers({**defaults, **samples})
    for computed, axis in template.axes.items():
        if axis.value is not None:
            names = {**known, **products(sizes, spans)}
            if computed.startswith("*"):
                spans[computed] = 1
            sizes[computed.lstrip("*")] = eval(axis.value, {"__builtins__": {}}, names)
    generator = None
    place = torch.device(device)
    if place.type != "meta":
        generator = torch.Generator(place).manual_seed(seed)
    open_dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    made: dict[str, Any] = {}
    for name, spec in template.input_tensors().items():
        shape = [sizes[axis] for axis in spread(spec.axes, spans)]
        kind = open_dtype if spec.dtype is None else getattr(torch, spec.dtype)
        if kind.is_floating_point:
            # torch has no random numbers of 8-bit types.
            wide = torch.randn(shape, generator=generator, device=place)
            _put(made, spec.param or name, spec.item, wide.to(kind))
        else:
            tensor = torch.zeros(shape, dtype=kind, device=place)
            _put(made, spec.param or name, spec.item, tensor)
    for name, const in template.consts():
        param = const.param or name
        if const.value is None and param in parameters and param not in made:
            made[param] = sizes[name]
    for name, param in template.input_params().items():
        if "." in param and isinstance(template.inputs[name], Scalar):
            _put(made, param, None, _number(str(template.inputs[name].dtype)))
        elif "." not in param and param not in made:
            number = template.inputs[name]
            sample = number.sample if isinstance(number, Scalar) else None
            default = defaults[param] if sample is None else sample
            empty = default is inspect.Parameter.empty or default is None
            made[param] = _number(number.dtype) if empty else default
    for name, value in template.fixed.items():
        made[name] = getattr(torch, value) if isinstance(value, Dtype) else value
    if template.fill is not None:
        template.fill(made)
    return made


def _put(made: dict[str, Any], param: str, item: int | None, value: object) -> None:
    """Put a value where the template reads it: an argument, or an attribute of an attribute of it.

    Items of a tuple come in their order.
    """
    owner, *attributes = param.split(".")
    held, name = made, owner
    for attribute in attributes:
        held, name = vars(_owned(held, name)), attribute
    held[name] = value if item is None else (*held.get(name, ()), value)


def _owned(held: dict[str, Any], name: str) -> SimpleNamespace:
    owned: SimpleNamespace = held.setdefault(name, SimpleNamespace())
    return owned


def _sizes(
    template: TraceTemplate, given: dict[str, int | Sequence[int]]
) -> tuple[dict[str, int], dict[str, int]]:
    free = [name for name, axis in template.axes.items() if not axis.value]
    unknown = sorted(set(given) - {name.lstrip("*") for name in free})
    if unknown:
        raise ValueError(
            f"{template!r}: axes has {', '.join(unknown)}; the axes that can be given are "
            f"{', '.join(name.lstrip('*') for name in free)}"
        )
    sizes: dict[str, int] = {}
    spans: dict[str, int] = {}
    for i, name in enumerate(free):
        # Small sizes, multiples where kernels need them, and all different, so that a test notices
        # exchanged axes.
        axis = template.axes[name]
        usual = axis.multiple * (i + 4) if isinstance(axis, Const) else 2 * i + 3
        usual = axis.sample or usual
        value = given.get(name.lstrip("*"), usual)
        values = [value] if isinstance(value, int) else [*value]
        if name.startswith("*"):
            spans[name] = len(values)
        elif len(values) != 1:
            raise ValueError(f"{template!r}: axis {name!r} takes one size, got {values}")
        sizes.update(zip(spread([name], spans), values))
    return sizes, spans


def _number(dtype: str | None) -> float | int | bool:
    if dtype == "bool":
        return True
    return 0.5 if str(dtype).startswith("float") else 1
