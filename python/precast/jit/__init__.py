# SPDX-License-Identifier: Apache-2.0
"""Compile kernels on the spot, by the same plan that the prebuilt ones are made from."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from precast.errors import MissingJITCacheError, MissingKernelError
from precast.jit.policy import freeze

if TYPE_CHECKING:
    from precast.jit.custom import gen_jit_spec
    from precast.jit.spec import JitSpec

__all__ = ["JitSpec", "MissingJITCacheError", "MissingKernelError", "freeze", "gen_jit_spec"]

# ``import precast`` passes here; what only a compile needs is imported at its first use.
_LATE = {"JitSpec": "precast.jit.spec", "gen_jit_spec": "precast.jit.custom"}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATE[name]), name)
