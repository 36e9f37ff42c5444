# SPDX-License-Identifier: Apache-2.0
"""The wrapper of a logged function, which logs before and after a call and makes the dump."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from precast._base.public_name import public_name
from precast._base.torch import torch
from precast.api_logging import _destination
from precast.api_logging._describe import describe, is_capturing, statistics, tensors_of
from precast.api_logging._dump import Dump, Recorder
from precast.api_logging._memory import opaque, shared

INPUTS, STATISTICS, DUMPS = 3, 5, 10
_CAPTURING = "a CUDA graph is being captured"

#: An argument that a kernel's torch schema marks as written.
_WRITTEN = re.compile(r"Tensor\(\w+!\)\??\s+(\w+)")

_numbers = itertools.count(1)
_recorder = Recorder()


def _after_fork() -> None:
    """A child counts its own dumps, with a lock that no thread of its parent holds."""
    global _recorder
    _recorder = Recorder()


os.register_at_fork(after_in_child=_after_fork)


def logged(function: Callable[..., Any], level: int) -> Callable[..., Any]:
    """``function``, with every call logged at ``level``.

    A function that logs its calls already, because it was decorated before, logs them once, at the
    new level.
    """
    if getattr(function, "_logging_wrapper", None) is function:
        function = function.__wrapped__
    signature = inspect.signature(function)
    if level < INPUTS:

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            _destination.write(f"{_title(next(_numbers))}: {public_name(function)}")
            return function(*args, **kwargs)

    else:

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            values = arguments(signature, args, kwargs)
            return _Call(public_name(function), values, level).run(
                functools.partial(function, *args, **kwargs)
            )

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # TorchDynamo treats the condition as a constant: traced calls are not logged.
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return run(args, kwargs)

    # Decorators copy attributes, so a wrapper of this one has the attribute, too; it names another.
    call._logging_wrapper = call  # type: ignore[attr-defined]
    return call


def arguments(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """All arguments by name, with defaults. Arguments that do not fit are named by position."""
    own = set(signature.parameters)
    # A keyword that a decorator adds, such as skip_check, is in no signature.
    extra = {name: value for name, value in kwargs.items() if name not in own}
    has_keywords = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    named = kwargs if has_keywords else {n: v for n, v in kwargs.items() if n in own}
    try:
        bound = signature.bind(*args, **named)
    except TypeError:  # The function itself will raise the error.
        return {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    bound.apply_defaults()
    return {**bound.arguments, **({} if has_keywords else extra)}


def _title(number: int) -> str:
    return f"precast call {number} of process {os.getpid()}"


class _Call:
    """A call that is logged at level 3 or above."""

    def __init__(self, name: str, values: dict[str, Any], level: int) -> None:
        self.name = name
        self.values = values
        self.number = next(_numbers)
        self.title = _title(self.number)
        self.tensors = tensors_of(values)
        self.known = {n: t for n, t in self.tensors.items() if opaque(t) is None}
        # Fake tensors have no elements, and a capture must not wait for the GPU.
        capturing = is_capturing(self.known.values())
        self.note = _CAPTURING if capturing else ""
        self.level = level
        self.before: dict[str, str] = {}
        self.dump: Dump | None = None

    def run(self, function: Callable[[], Any]) -> Any:
        self._write_inputs()
        try:
            result = function()
        except BaseException as error:
            _destination.write(f"{self.title}: raised {type(error).__name__}: {error}")
            if self.dump is not None:
                self.dump.raised(error)
            raise
        self._write_outputs(result)
        return result

    # -- before -----------------------------------------------------------------------------------

    def _write_inputs(self) -> None:
        lines = [f"{self.title}: {self.name}"]
        lines += [f"  in  {name}: {describe(value)}" for name, value in self.values.items()]
        lines += [f"  in  {name} {words}" for name, words in shared(self.known).items()]
        # Written first, because the statistics may raise the error of an earlier kernel.
        _destination.write("\n".join(lines))
        if self.level < STATISTICS or (not self.tensors and self.level < DUMPS):
            return
        if self.note:
            what = "statistics and dump" if self.level >= DUMPS else "statistics"
            _destination.write(f"{self.title}: [{what} skipped: {self.note}]")
            return
        try:
            self.before = self._statistics(self.tensors)
            lines = [f"  in  {name}: {text}" for name, text in self.before.items()]
            if self.level >= DUMPS:
                self.dump, note = _recorder.begin(self.number, self.name, self.values, self.known)
                lines.append(f"  {note}")
        except torch.AcceleratorError as error:
            _destination.write(
                f"{self.title}: its inputs cannot be read, because an earlier kernel has failed: "
                f"{_first_line(error)}"
            )
            raise
        _destination.write("\n".join([f"{self.title}: statistics", *lines]))

    # -- after ------------------------------------------------------------------------------------

    def _write_outputs(self, result: Any) -> None:
        lines = [f"{self.title}: returned"]
        outputs = tensors_of({"result": result})
        names = {id(tensor): name for name, tensor in self.tensors.items()}
        if not outputs or len(outputs) > 1 or "result" not in outputs:
            lines.append(f"  out result: {describe(result)}")
        for path, tensor in outputs.items():
            is_argument = f", is {names[id(tensor)]}" if id(tensor) in names else ""
            lines.append(f"  out {path}: {describe(tensor)}{is_argument}")
        for name in self._written():
            lines.append(f"  out {name}: {describe(self.tensors[name])}, written in place")
        if self.level < STATISTICS or self.note:
            _destination.write("\n".join(lines))
            return
        try:
            after = self._statistics(outputs)
            written = self._written()
            changed = {
                name: text
                for name, text in self._statistics(self.tensors).items()
                if name in written or text != self.before.get(name)
            }
            lines += [f"  out {path}: {text}" for path, text in after.items()]
            lines += [f"  out {name}, written in place: {text}" for name, text in changed.items()]
            if self.dump is not None:
                lines.append(f"  {self.dump.returned(result)}")
        except torch.AcceleratorError as error:
            # Everything before the call had finished, so the call itself has failed.
            _destination.write(f"{self.title}: failed on the GPU: {_first_line(error)}")
            raise
        _destination.write("\n".join(lines))

    def _written(self) -> list[str]:
        """The arguments that the schema of the op's kernel marks as written."""
        from precast._op.dispatch import KERNELS

        kernel = KERNELS.get(self.name.rpartition(".")[2])
        if kernel is None or not self.name.startswith("precast."):
            return []
        return [name for name in _WRITTEN.findall(kernel.schema) if name in self.tensors]

    @staticmethod
    def _statistics(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        found = {}
        for name, tensor in tensors.items():
            try:
                found[name] = statistics(tensor)
            except torch.AcceleratorError:
                raise
            except (RuntimeError, TypeError) as error:  # A dtype without arithmetic, no memory.
                found[name] = f"[statistics skipped: {_first_line(error)}]"
        return found


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
