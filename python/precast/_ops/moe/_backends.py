# SPDX-License-Identifier: Apache-2.0
"""Ops whose kernel exists twice: in CUDA for every GPU, and in CuTe DSL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from precast._base.errors import BackendSupportedError
from precast._op.decorators import served_by
from precast._op.export import Export

#: The op of the kernel in CuTe DSL, after that of the one in CUDA.
CUTE_DSL = "_cute_dsl"

#: An argument that these ops have.
BACKEND = """
Parameters
----------
backend : str
    ``"cuda"``, for every GPU; ``"cute_dsl"``, the same kernel written in CuTe DSL, for compute
    capabilities 9.0, 10.0 and 10.3; or ``"auto"``, which is ``"cuda"``. Results are the same.

Raises
------
BackendSupportedError
    Another backend, or one that the GPU has no kernel for.
"""


class Both(NamedTuple):
    """The exports of an op, by backend."""

    cuda: Export
    cute_dsl: Export

    @classmethod
    def of(cls, op: str, declaration: str, **keywords: Any) -> Both:
        """Two exports with one declaration."""
        return cls(
            Export(op, op, declaration, function=op, **keywords),
            Export(op + CUTE_DSL, op + CUTE_DSL, declaration, function=op, **keywords),
        )

    def other(self, backend: str) -> Export:
        """The export of a backend that is neither ``"cuda"`` nor ``"auto"``, which is CUDA.

        Why not of every backend: a call of Python costs 0.1 us.
        """
        if backend == "cute_dsl":
            return self.cute_dsl
        raise BackendSupportedError(
            f"{self.cuda.function} does not support backend {backend!r}; legal: 'cuda', "
            f"'cute_dsl', 'auto'"
        )


def backends(op: str) -> dict[str, Callable[..., Any]]:
    """A check for each backend: the GPUs that its TOML names."""
    return {"cuda": served_by(op), "cute_dsl": served_by(op + CUTE_DSL)}
