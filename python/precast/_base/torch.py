# SPDX-License-Identifier: Apache-2.0
"""torch, imported at its first use.

``import precast`` must not pull torch in, so every other module takes it from here::

    from precast._base.torch import torch

It is a module object whose attributes are looked up once and then stored. TorchDynamo resolves the
attributes of a module while it traces, so it never traces into the look-up itself.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any


class LazyModule(types.ModuleType):
    """A module that asks ``resolve`` for an attribute when it is read for the first time."""

    def __init__(self, name: str, resolve: Callable[[str], Any]) -> None:
        super().__init__(name)
        self.__dict__["_resolve"] = resolve

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self.__dict__["_resolve"](name)
        setattr(self, name, value)
        return value


def _torch_attribute(name: str) -> Any:
    return getattr(importlib.import_module("torch"), name)


if TYPE_CHECKING:
    import torch as torch
else:
    torch = LazyModule("precast._base.torch.torch", _torch_attribute)
