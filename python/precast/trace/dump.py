# SPDX-License-Identifier: Apache-2.0
"""``PRECAST_TRACE_DUMP=1``: the definitions of the calls of a process, one JSON file each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from precast._base import env as _env
from precast._base.lazy import public_object
from precast._base.public_name import public_name
from precast._base.torch import torch
from precast._op.dispatch import Kernel
from precast._op.export import Export
from precast._op.torch_ops import ON_COMPILE
from precast.trace.registry import read_call, write_definition

#: Definitions that are written, and the call that each name belongs to. Threads are synchronised by
#: ``setdefault`` and not by a lock, because a forked child could inherit a lock that is held.
_written: dict[object, object] = {}
_names: dict[str, object] = {}


def on_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Write the definition of a call that has succeeded, unless this process has written it.

    Does nothing if ``PRECAST_TRACE_DUMP`` is off, or while ``torch.compile`` traces, whose calls
    :func:`_on_compile` sees. It reads shapes and dtypes alone, so it may run while a CUDA graph is
    captured. A failure is logged as a warning, once; only an illegal value of
    ``PRECAST_TRACE_DUMP`` raises an error.
    """
    # TorchDynamo treats the condition as a constant, so it does not trace the rest.
    if torch.compiler.is_compiling() or not _env.TRACE_DUMP():
        return
    _dump(function, args, kwargs)


def _on_compile(kernel: Kernel, args: Sequence[Any]) -> None:
    """As :func:`on_call`, for a call that ``torch.compile`` traces; ``args`` are the torch op's."""
    if _env.TRACE_DUMP():
        import inspect

        assert isinstance(kernel, Export)
        public = kernel.public_arguments(tuple(args))
        if public is not None:
            function = public_object(kernel.function)
            # An output that the function allocates is an argument of the export alone.
            names = inspect.signature(function).parameters.keys() & public.keys()
            _dump(function, (), {key: public[key] for key in names})


ON_COMPILE.append(_on_compile)


def _dump(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    try:
        row, template, reading = read_call(function, args, kwargs)
        if not all(isinstance(reading.sizes[name], int) for name, _ in template.consts()):
            return  # A symbolic size: reading its value would specialise the compiled graph.
        key = (public_name(row.function), *template.key(reading))
        if not _first(key):
            return
        definition = template.definition(reading, key[0])
        if _names.setdefault(definition["name"], key) != key:
            raise ValueError(
                f"another definition of this process is called {definition['name']}: that of "
                f"{_names[definition['name']]}. Fix: give {template!r} another name_prefix"
            )
        try:
            _write(definition)
        except OSError:
            _written.pop(key, None)  # A later call may succeed.
            raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if _first((function.__qualname__, text)):
            from precast._base.log import get_logger

            get_logger().warning(
                "the trace of a call of %s is not written: %s", function.__qualname__, text
            )


def _first(key: object) -> bool:
    token = object()
    return _written.setdefault(key, token) is token


def _write(definition: Mapping[str, Any]) -> None:
    """Write a definition where flashinfer-bench's ``TraceSet.from_path`` reads."""
    from pathlib import Path

    folder = Path(_env.TRACE_DUMP_DIR()) / "definitions" / str(definition["op_type"])
    write_definition(definition, folder)
