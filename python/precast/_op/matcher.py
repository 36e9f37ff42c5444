# SPDX-License-Identifier: Apache-2.0
"""Check the tensors of a call against a declaration, as the bindings do and in their words.

Only reference mode uses it: the compiled bindings check for themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from precast._base.errors import UnsupportedConfigError
from precast._base.torch import torch
from precast._op.declaration import Declaration, Kind, Leading, Parameter, TensorKind
from precast._op.validation import (
    check_dtype,
    check_elements_apart,
    check_memory_apart,
    check_peer,
    check_rank,
    check_same_device,
    memory_of,
)

_DTYPES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u16": "uint16",
    "u8": "uint8",
    "bool": "bool",
}


def check_arguments(export: str, declaration: Declaration, values: Mapping[str, Any]) -> None:
    """Raise ValueError for the first tensor that the declaration does not allow."""
    tensors = declaration.tensors
    first = declaration.first
    matcher = _Matcher(export, declaration, values)
    for parameter in (first, *(p for p in tensors if p is not first)):
        if values[parameter.name] is not None:
            matcher.match(parameter)


def check_memory(export: str, declaration: Declaration, values: Mapping[str, Any]) -> None:
    """Raise ValueError for a tensor that is written in memory of another tensor of the call.

    A tensor may be the one that it is like, which :func:`check_arguments` compares. The op's own
    check comes before this one, as its errors say more. Where a declaration says no sizes, errors
    have the name of the public argument, which ``values`` may hold besides the declared ones.
    """
    declared = {parameter.name: parameter for parameter in declaration.parameters}
    public = [
        named
        for key, value in values.items()
        if key not in declared
        for named in _tensors_of(key, value)
    ]
    tensors = []
    for parameter in declared.values():
        for name, tensor in _tensors_of(parameter.name, values[parameter.name]):
            kind = parameter.kind
            if isinstance(kind, Kind) or (kind.dims is None and not kind.like):
                name = next((alias for alias, other in public if other is tensor), name)
            tensors.append((parameter, name, tensor, memory_of(tensor)))
    for i, (parameter, name, tensor, (begin, end)) in enumerate(tensors):
        if not parameter.written or _is_replaced(parameter, declared, values):
            continue
        for j, (other_parameter, other_name, other, memory) in enumerate(tensors):
            if begin >= memory[1] or memory[0] >= end or i == j:
                continue
            # Of two tensors that are written, the error is about the second.
            if other_parameter.written and i < j:
                continue
            alike = (_likeness(each, declared) for each in (parameter, other_parameter))
            # Items of one tuple are apart, such as both parts of a cache.
            if parameter is other_parameter or next(alike) != next(alike):
                check_memory_apart(export, name, tensor, other, other_name)
            else:
                check_peer(export, name, tensor, other, other_name)


def _tensors_of(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an argument: itself, or the items of a tuple that has no fields."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif type(value) is tuple:
        for i, item in enumerate(value):
            yield from _tensors_of(f"{name}[{i}]", item)


def _likeness(parameter: Parameter, declared: Mapping[str, Parameter]) -> str:
    """Return the tensor that ``parameter`` may be, or its own name: those that agree may be one."""
    kind = parameter.kind
    if isinstance(kind, TensorKind) and kind.like and not kind.apart:
        return _likeness(declared[kind.like], declared)
    return parameter.name


def _is_replaced(
    parameter: Parameter, declared: Mapping[str, Parameter], values: Mapping[str, Any]
) -> bool:
    """Whether an optional output is given, so that the tensor it is like is not written."""
    return any(
        other.written and other.optional and other.kind.like == parameter.name
        for name, other in declared.items()
        if isinstance(other.kind, TensorKind) and values[name] is not None
    )


class _Matcher:
    """What the names of sizes and the letters of dtypes mean in one call."""

    def __init__(self, export: str, declaration: Declaration, values: Mapping[str, Any]) -> None:
        self.export = export
        self.first_name = declaration.first.name
        self.first: torch.Tensor = values[self.first_name]
        self.values = values
        self.declared = {parameter.name: parameter for parameter in declaration.parameters}
        self.sizes: dict[str, Any] = {}
        self.dtypes: dict[str, torch.dtype] = {}

    def match(self, parameter: Parameter) -> None:
        kind, name = parameter.kind, parameter.name
        assert isinstance(kind, TensorKind)
        if not kind.checked:
            return
        tensor: torch.Tensor = self.values[name]
        is_first = name == self.first_name
        if not is_first:
            check_same_device(self.export, name, tensor, self.first, self.first_name)
        self._match_dtype(kind, name, tensor)
        if kind.like:
            self._match_like(kind, parameter)
            return
        if kind.dims is None:
            return
        self._match_shape(kind.dims, name, tensor)
        if parameter.written and not _is_replaced(parameter, self.declared, self.values):
            check_elements_apart(self.export, name, tensor)
            if not is_first:
                check_memory_apart(self.export, name, tensor, self.first, self.first_name)

    def _match_dtype(self, kind: TensorKind, name: str, tensor: torch.Tensor) -> None:
        same = kind.dtypes and self.dtypes.get(kind.dtypes[-1]) == tensor.dtype
        if kind.dtypes and not same:
            legal = (getattr(torch, _DTYPES[word]) for word in kind.dtypes if word in _DTYPES)
            try:
                check_dtype(self.export, name, tensor, *legal)
            except ValueError as error:
                # An axis of the module: the loader says the same where it looks for one.
                raise (UnsupportedConfigError(str(error)) if kind.axis else error) from None
        if kind.axis:
            check_dtype(self.export, name, tensor, self.dtypes.setdefault(kind.axis, tensor.dtype))
        elif kind.like and not kind.dtypes:
            check_dtype(self.export, name, tensor, self.values[kind.like].dtype)

    def _match_like(self, kind: TensorKind, parameter: Parameter) -> None:
        name, tensor, peer = parameter.name, self.values[parameter.name], self.values[kind.like]
        if parameter.written:
            check_peer(self.export, name, tensor, peer, kind.like, not kind.apart)
        elif tensor.shape != peer.shape:
            raise ValueError(
                f"{self.export}: {name} must have {kind.like}'s shape {[*peer.shape]}, got "
                f"{[*tensor.shape]}"
            )

    def _match_shape(
        self, dims: tuple[Leading | str, ...], name: str, tensor: torch.Tensor
    ) -> None:
        if dims == (".",):
            if tensor.numel() != 1:
                raise ValueError(
                    f"{self.export}: {name} must hold one number, got shape {[*tensor.shape]}"
                )
            return
        leading = dims[0] if dims and isinstance(dims[0], Leading) else None
        last = [dim for dim in dims if isinstance(dim, str)]
        if leading is None:
            if tensor.dim() != len(last) and any(self._size(dim) is None for dim in last):
                check_rank(self.export, name, tensor, len(last), len(last))
        else:
            high = None if leading.most is None else leading.most + len(last)
            check_rank(self.export, name, tensor, leading.least + len(last), high)
        split = tensor.dim() - len(last)
        want: list[int] = []
        if leading is not None:
            want += self.sizes.setdefault(leading.name, tuple(tensor.shape[: max(split, 0)]))
        for position, dim in enumerate(last):
            size = self._size(dim)
            if size is None:
                size = self.sizes[dim] = tensor.shape[split + position]
            want.append(size)
        if list(tensor.shape) != want:
            raise ValueError(f"{self.export}: {name} must have shape {want}, got {[*tensor.shape]}")

    def _size(self, dim: str) -> int | None:
        """The size that ``dim`` means, or None for a name that no tensor has said yet."""
        if dim.isidentifier():
            size = self.sizes.get(dim, self.values.get(dim))
            return size if isinstance(size, int) else None
        return int(eval(dim, {}, {**self.values, **self.sizes}))
