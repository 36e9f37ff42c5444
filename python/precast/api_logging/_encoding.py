# SPDX-License-Identifier: Apache-2.0
"""Arguments as JSON, and tensors as safetensors that are synchronised to the disk."""

from __future__ import annotations

import enum
import importlib
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precast._base.errors import MissingPackageError
from precast._base.public_name import public_name
from precast._base.torch import torch


class UnknownValueError(ValueError):
    """A dump has only a description of an argument that cannot be encoded."""


def safetensors() -> Any:
    """The package.

    Raises
    ------
    MissingPackageError
        If it is not installed, or too old.
    """
    try:
        module = importlib.import_module("safetensors")
        module.TensorSpec  # noqa: B018 (0.8 and later)
    except (ImportError, AttributeError) as error:
        raise MissingPackageError(
            'dumps of calls need safetensors 0.8 or later. Fix: pip install "precast[log]"'
        ) from error
    return module


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write contiguous CPU tensors to one file, and synchronise it."""
    package = safetensors()
    specs = {
        name: package.TensorSpec(
            dtype=str(tensor.dtype).partition(".")[2],
            shape=list(tensor.shape),
            data_ptr=tensor.data_ptr(),
            data_len=tensor.numel() * tensor.element_size(),
        )
        for name, tensor in tensors.items()
    }
    try:
        package.serialize_file(specs, str(path))
    except package.SafetensorError as error:  # It is neither an OSError nor a RuntimeError.
        raise OSError(str(error)) from error
    with path.open("rb") as file:
        os.fsync(file.fileno())


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The CPU tensors of a file."""
    with safetensors().safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def sync_folder(folder: Path) -> None:
    """Synchronise the entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- arguments ------------------------------------------------------------------------------------


def item_path(path: str, key: object) -> str:
    """The path of an item of a dict, which is unique."""
    simple = isinstance(key, str) and key.isidentifier()
    return f"{path}.{key}" if simple else f"{path}[{key!r}]"


def encode(path: str, value: Any, unknown: set[str]) -> Any:
    """A value as JSON; a type that JSON lacks becomes an object with one key, its kind.

    ``unknown`` has the paths of tensors that are not in the dump.
    """
    # Exact types, because an enumeration may be an int or a str.
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, torch.Tensor):
        return {"unknown": repr(type(value))} if path in unknown else {"tensor": path}
    if type(value) in (list, tuple):
        items = [encode(f"{path}.{i}", item, unknown) for i, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {k: encode(item_path(path, k), item, unknown) for k, item in value.items()}}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).partition(".")[2]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, enum.Enum):
        kind = type(value)
        module = public_name(kind).removesuffix(f".{kind.__qualname__}")
        return {"enum": [module, kind.__qualname__, value.name]}
    return {"unknown": repr(type(value))}


def decode(path: str, data: Any, tensors: Mapping[str, torch.Tensor], device: Any) -> Any:
    """The value of ``encode``, with its tensors, and with ``device`` in place of a CUDA device.

    Raises
    ------
    UnknownValueError
        If the value could not be encoded. The message has ``path``.
    """
    if isinstance(data, list):
        return [decode(f"{path}.{i}", item, tensors, device) for i, item in enumerate(data)]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(decode(path, content, tensors, device))
    if kind == "dict":
        return {k: decode(item_path(path, k), v, tensors, device) for k, v in content.items()}
    if kind == "float":
        return float(content)
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "device":
        place = torch.device(content)
        return torch.device(device) if place.type == "cuda" else place
    if kind == "enum":
        module, qualname, name = content
        return _enum(module, qualname)[name]
    raise UnknownValueError(f"the argument {path} is {content}, which a dump cannot contain")


def import_named(module: str) -> Any:
    """Return a module that a dump names: one of precast, or one that the program has imported.

    Dumps come from others, in bug reports for example, and importing a module runs its code.

    Raises
    ------
    ImportError
        If it is another module, or is not there.
    """
    if module in sys.modules:
        return sys.modules[module]
    own = module == "precast" or module.startswith("precast.")
    if not own or module.rpartition(".")[2] == "__main__":
        raise ImportError(
            f"a dump does not decide what is imported. Fix: if you trust {module}, import it first "
            f"(precast replay --import {module})"
        )
    return importlib.import_module(module)


def _enum(module: str, qualname: str) -> type[enum.Enum]:
    try:
        found: Any = import_named(module)
    except ImportError as error:
        raise UnknownValueError(f"{module}.{qualname} cannot be imported: {error}") from error
    for word in qualname.split("."):
        found = getattr(found, word, None)
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        raise UnknownValueError(f"{module}.{qualname} is not an enumeration in this environment")
    return found
