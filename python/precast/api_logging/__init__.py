# SPDX-License-Identifier: Apache-2.0
"""The decorator of the public API, which logs calls and registers trace templates.

:func:`precast_api` decorates every public function. ``PRECAST_LOGLEVEL`` sets the level; the
variables are read when a function is decorated, which is when its op is imported:

==== ==============================================================================================
0    nothing is logged: the decorator returns the function itself
1    one line a call, with its number and the name of the function
3    also inputs and outputs: shape, dtype, device and strides of tensors, other values, and which
     tensors share memory
5    also statistics of tensors: the number of NaN and Inf; min, max and mean of finite elements.
     Each call waits for the GPU, and raises the error of its own kernel
10   also a dump of each call with all its tensors, in a folder below ``PRECAST_DUMP_DIR``, which
     ``precast replay`` runs again
==== ==============================================================================================

Lines go to ``PRECAST_LOGDEST``: ``stdout``, ``stderr`` or a file, in whose name ``%i`` is the
process id. They are written before and after the call, so that the last lines of a process that
crashed name the call in which it crashed. A kernel runs after its launch has returned, so at levels
1 and 3 its error may be raised by a later call, unless ``CUDA_LAUNCH_BLOCKING=1`` is set.

At level 10, the inputs are on the disk, synchronised, before the function is called.
``PRECAST_DUMP_MAX_COUNT`` limits the calls of a process, ``PRECAST_DUMP_MAX_SIZE_GB`` the folder;
``PRECAST_DUMP_INCLUDE`` and ``PRECAST_DUMP_EXCLUDE`` choose functions. It needs
``pip install "precast[log]"``.

While a CUDA graph is captured, statistics and dumps are skipped, because they wait for the GPU; the
log has a note. Nothing is logged while ``torch.compile`` traces, nor by compiled code. The same
decorator logs your own functions::

    @precast_api
    def my_op(x, out): ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

from precast._base import env as _env
from precast._base.errors import EnvironmentVariableError
from precast._base.lazy import import_all
from precast._base.public_name import public_name

__all__ = ["precast_api", "public_api"]

F = TypeVar("F", bound=Callable[..., Any])

#: By the module that defines them and their qualname, which a reloaded module repeats.
_public: dict[str, Callable[..., Any]] = {}


def public_api() -> dict[str, Callable[..., Any]]:
    """Every function that :func:`precast_api` decorated, all ops among them, by their names.

    A name is ``module.qualname``, with the public module for what precast itself exports.
    """
    import_all()
    return {public_name(function): function for function in _public.values()}


@overload
def precast_api(function: F, /) -> F: ...
@overload
def precast_api(*, trace: Any = None) -> Callable[[F], F]: ...
def precast_api(function: Any = None, /, *, trace: Any = None) -> Any:
    """Mark a function as public, log its calls and register its trace template.

    Parameters
    ----------
    function : callable, optional
        The function, if the decorator is used without parentheses.
    trace : TraceTemplate or callable, optional
        The function's template, or a dispatch function that chooses one; see ``precast.trace``.
        The function gets the method ``fi_trace(*args, **kwargs)``, which returns the definition of
        that call.

    Returns
    -------
    callable
        The function itself, with attributes added, or a wrapper of it if ``PRECAST_LOGLEVEL`` or
        ``PRECAST_TRACE_DUMP`` is on.

    Raises
    ------
    EnvironmentVariableError
        At the first call, if a variable has an illegal value.

    Examples
    --------
    >>> @precast_api
    ... def double(x):
    ...     return 2 * x
    >>> [name for name in public_api() if name.endswith(".double")]
    ['precast.api_logging.double']
    """
    if function is None:
        return functools.partial(_decorate, trace=trace)
    return _decorate(function, trace=trace)


def _decorate(function: Callable[..., Any], trace: Any) -> Callable[..., Any]:
    # The logging wrapper is the outermost one, where a second decoration finds it.
    public: Any = _logged(function if trace is None or not _tracing() else _traced(function))
    if trace is not None:
        from precast.trace import fi_trace, register

        public.fi_trace = functools.partial(fi_trace, public)
        register(public, trace)
    _public[f"{function.__module__}.{function.__qualname__}"] = public
    decorated: Callable[..., Any] = public
    return decorated


def _logged(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        level = _env.LOGLEVEL()
    except EnvironmentVariableError as error:
        return _refusing(function, error)
    if level == 0:
        return function
    from precast.api_logging._calls import logged

    return logged(function, level)


def _refusing(function: Callable[..., Any], error: EnvironmentVariableError) -> Callable[..., Any]:
    """Raise at a call and not at import, so that ``precast doctor`` can report the problem."""

    @functools.wraps(function)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise EnvironmentVariableError(str(error))

    return refuse


def _tracing() -> bool:
    try:
        return _env.TRACE_DUMP()
    except EnvironmentVariableError:
        return True  # The trace package raises the error at the first call.


def _traced(function: Callable[..., Any]) -> Callable[..., Any]:
    from precast.trace import on_call

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        on_call(call, args, kwargs)
        return result

    return call
