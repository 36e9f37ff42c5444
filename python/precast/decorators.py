# SPDX-License-Identifier: Apache-2.0
"""What a public function supports, as methods of the function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
Check = Callable[..., bool]


def served_by(op: str) -> Check:
    """A check that knows the compute capabilities of ``aot_configs/<op>.toml``."""

    def check(*args: Any, **kwargs: Any) -> bool:
        return True

    marked: Any = check
    marked.op = op
    return check


def backend_requirement(
    backend_checks: Mapping[str, Check],
    common_check: Check | None = None,
    heuristic_func: Callable[..., list[str]] | None = None,
) -> Callable[[F], F]:
    """Give a function the questions about what it supports; a call stays as it is."""

    def is_compute_capability_supported(cc: int) -> bool:
        from precast.loader import plan

        op = getattr(common_check, "op", None)
        if op is None:
            return True
        config = plan().config
        targets = config.build.accepted(f"{cc // 10}.{cc % 10}")
        return any(target.name in config.ops[op].archs for target in targets)

    def decorate(function: F) -> F:
        marked: Any = function
        marked.has_backend_choices = lambda: bool(backend_checks)
        marked.has_backend = lambda name: name in backend_checks
        marked.is_compute_capability_supported = is_compute_capability_supported
        marked.is_backend_supported = lambda name, cc=None: (
            name in backend_checks and (cc is None or is_compute_capability_supported(cc))
        )
        return function

    return decorate
