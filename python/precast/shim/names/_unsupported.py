# SPDX-License-Identifier: Apache-2.0
"""Functions that an engine imports when it starts and that precast has no kernels for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from precast._base.errors import BackendSupportedError


def unsupported(name: str, caller: str, fix: str) -> Callable[..., NoReturn]:
    """A function that raises.

    Parameters
    ----------
    name : str
        Its name in FlashInfer.
    caller : str
        A sentence that says what calls it.
    fix : str
        What avoids the call.
    """

    def raising(*args: object, **kwargs: object) -> NoReturn:
        raise BackendSupportedError(
            f"{name}: precast stands in for FlashInfer here, and has no kernel for it. {caller} "
            f"Fix: {fix}"
        )

    raising.__name__ = raising.__qualname__ = name
    raising.__doc__ = f"Raise: precast has no kernel for it. {caller}"
    # Engines ask this of functions that have several backends.
    raising.is_backend_supported = lambda backend, cc=None: False  # type: ignore[attr-defined]
    return raising
