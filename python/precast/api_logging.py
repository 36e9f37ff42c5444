# SPDX-License-Identifier: Apache-2.0
"""The mark of a public function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from precast import _env
from precast.trace import fi_trace, on_call, register

if TYPE_CHECKING:
    from precast.trace.registry import Trace

F = TypeVar("F", bound=Callable[..., Any])


def precast_api(trace: Trace | None = None) -> Callable[[F], F]:
    """Mark a public function and register its trace, which ``function.fi_trace(...)`` returns.

    Parameters
    ----------
    trace : TraceTemplate or dispatch function, optional
        See :mod:`precast.trace`.

    Returns
    -------
    callable
        A decorator that returns the function itself, unless ``PRECAST_TRACE_DUMP`` is on.
    """

    def decorate(function: F) -> F:
        if trace is None:
            return function
        register(function, trace)
        marked: Any = function
        marked.fi_trace = functools.partial(fi_trace, function)
        if not _env.TRACE_DUMP():
            return function

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            on_call(function, args, kwargs)
            return result

        return cast("F", call)

    return decorate
