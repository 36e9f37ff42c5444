# SPDX-License-Identifier: Apache-2.0
"""The torch ops ``torch.ops.precast.<kernel>``, each registered at its first use.

Only ``torch.compile`` uses them: an eager call does not go through the dispatcher of torch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from precast._base.torch import LazyModule
from precast._op.dispatch import KERNELS, Kernel

#: Called with the kernel and the arguments of every call that ``torch.compile`` traces.
ON_COMPILE: list[Callable[[Kernel, Sequence[Any]], None]] = []

_registered: dict[str, Any] = {}
_registering = threading.Lock()
_libraries: list[Any] = []  # A torch Library unregisters its ops when it is collected.


def _after_fork() -> None:
    """Another thread of the parent may have held the lock, and nobody would release it here."""
    global _registering
    _registering = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def register_torch_op(name: str) -> Any:
    """``torch.ops.precast.<name>`` for the kernel of this name, which is registered once."""
    import torch

    with _registering:
        if name not in _registered:
            kernel = KERNELS[name]

            def fake(*args: Any) -> None:
                for hook in ON_COMPILE:
                    hook(kernel, args)

            library: Any = torch.library.Library("precast", "FRAGMENT")
            tags = (torch.Tag.cudagraph_unsafe,) if kernel.reads_host else ()
            library.define(f"{name}{kernel.schema}", tags=tags)
            library.impl(name, kernel.call, "CompositeExplicitAutograd")
            torch.library.register_fake(f"precast::{name}", fake, lib=library)
            _libraries.append(library)
            _registered[name] = getattr(torch.ops.precast, name).default
        return _registered[name]


if TYPE_CHECKING:
    torch_ops: Any
else:
    # A module object, so that TorchDynamo resolves the attribute and does not trace the look-up.
    torch_ops = LazyModule("precast._op.torch_ops.torch_ops", register_torch_op)
