# SPDX-License-Identifier: Apache-2.0
"""Dumps of calls: one folder for each call, which ``precast replay`` runs again.

::

    <PRECAST_DUMP_DIR>/20260102-030405_<pid>_<number>_<function>/
      inputs.safetensors    the memory of the arguments before the call
      call.json             the function, its arguments, and which tensor is where in that memory
      outputs.safetensors   results, and arguments that the call has written
      outcome.json          how the call ended

The first two are written and synchronised before the function is called, the others after it has
returned. If ``outcome.json`` is missing, the process has crashed during the call.

A contiguous tensor that shares no memory is stored under its name, with its dtype and shape, so
that other programs can read it. Other tensors are stored as the bytes of their block; see
``_memory``.
"""

from __future__ import annotations

import datetime
import json
import os
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from precast._base import env as _env
from precast._base.torch import torch
from precast._base.version import __version__
from precast.api_logging import _encoding
from precast.api_logging._describe import tensors_of
from precast.api_logging._memory import (
    Block,
    View,
    copy_to_host,
    dense,
    layout,
    opaque,
    same_bits,
    view_of,
)

SCHEMA = 1
#: True during a replay, which must not make dumps.
replaying: ContextVar[bool] = ContextVar("precast_replaying", default=False)
CALL, INPUTS = "call.json", "inputs.safetensors"
OUTCOME, OUTPUTS = "outcome.json", "outputs.safetensors"


class Recorder:
    """Decides which calls of a process are dumped, and enforces the limits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._bytes = -1  # The size of the folder; -1 until it is known.

    def begin(
        self, number: int, name: str, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> tuple[Dump | None, str]:
        """Write the inputs of a call to the disk; return the dump and a line about it for the log.

        Raises
        ------
        MissingPackageError
            If safetensors is not installed.
        """
        if replaying.get():
            return None, "[dump skipped: this is a replay]"
        if not selected(name):
            return None, "[dump skipped: not selected by PRECAST_DUMP_INCLUDE and _EXCLUDE]"
        _encoding.safetensors()
        root = Path(_env.DUMP_DIR())
        try:
            blocks, views = layout(tensors)
            size = sum(block.size for block in blocks.values())
            refusal = self._reserve(root, size)
            if refusal is not None:
                return None, f"[dump skipped: {refusal}]"
            dump = Dump(self, root, number, name)
            dump.write_inputs(values, tensors, blocks, views)
        except torch.AcceleratorError:
            raise
        except (
            OSError,
            RuntimeError,
        ) as error:  # A full disk or a lack of memory must not stop the program.
            return None, f"[dump failed: {type(error).__name__}: {error}]"
        return dump, f"dump {dump.folder}"

    def _reserve(self, root: Path, size: int) -> str | None:
        with self._lock:
            if self._bytes < 0:
                self._bytes = folder_size(root)
            if self._count >= _env.DUMP_MAX_COUNT():
                return f"{_env.DUMP_MAX_COUNT.name}={_env.DUMP_MAX_COUNT()} calls are dumped"
            refusal = self._too_large(size)
            if refusal is None:
                self._count += 1
                self._bytes += size
            return refusal

    def reserve_outputs(self, size: int) -> str | None:
        """Count the bytes of outputs; return the reason if they exceed the limit."""
        with self._lock:
            refusal = self._too_large(size)
            if refusal is None:
                self._bytes += size
            return refusal

    def _too_large(self, size: int) -> str | None:
        limit = _env.DUMP_MAX_SIZE_GB()
        if self._bytes + size <= limit * 1e9:
            return None
        return (
            f"the folder has {self._bytes / 1e9:.3g} GB, and {size / 1e9:.3g} GB more would exceed "
            f"{_env.DUMP_MAX_SIZE_GB.name}={limit:g}"
        )


class Dump:
    """The folder of one call."""

    def __init__(self, recorder: Recorder, root: Path, number: int, name: str) -> None:
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        short = "".join(c if c.isalnum() or c in "_.-" else "_" for c in name.rpartition(".")[2])
        self.folder = root / f"{stamp}_{os.getpid()}_{number:06d}_{short}"
        self._recorder = recorder
        self._number = number
        self._name = name
        self._arguments: dict[str, torch.Tensor] = {}
        self._blocks: dict[str, Block] = {}
        self._views: dict[str, View] = {}
        self._before: dict[str, torch.Tensor] = {}

    def write_inputs(
        self,
        values: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        blocks: dict[str, Block],
        views: dict[str, View],
    ) -> None:
        """Write and synchronise ``inputs.safetensors`` and ``call.json``."""
        self._arguments, self._blocks, self._views = dict(tensors), blocks, views
        self._before = copy_to_host(tensors, blocks, views)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700)  # Prompts and weights are private.
        stored = {name: self._stored(name) for name in blocks}
        _encoding.write_tensors(self.folder / INPUTS, stored)
        unknown = set(tensors_of(values)) - set(tensors)
        call = {
            "schema": SCHEMA,
            "function": self._name,
            "number": self._number,
            "process": os.getpid(),
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(),
            "arguments": {
                name: _encoding.encode(name, value, unknown) for name, value in values.items()
            },
            "tensors": {name: asdict(view) for name, view in views.items()},
            "blocks": {name: asdict(block) for name, block in blocks.items()},
            "environment": self._environment(),
        }
        self._write_json(CALL, call)
        _encoding.sync_folder(self.folder.parent)

    def _stored(self, block: str) -> torch.Tensor:
        """The bytes of a block; the tensor itself, if it is contiguous and fills the block."""
        data = self._before[block]
        members = {view for view in self._views.values() if view.block == block}
        view = next(iter(members))
        if len(members) == 1 and view.is_contiguous and view.numel:
            return view_of(data, view)
        return data

    def _environment(self) -> dict[str, str]:
        rows = {"precast": __version__, "torch": str(torch.version.__version__)}
        gpus = {t.device for t in self._arguments.values() if t.is_cuda}
        for device in sorted(gpus, key=str):
            major, minor = torch.cuda.get_device_capability(device)
            rows[str(device)] = f"{torch.cuda.get_device_name(device)}, {major}.{minor}"
        return rows

    # -- the end of the call ----------------------------------------------------------------------

    def raised(self, error: BaseException) -> None:
        """Record that the call raised; outputs are not read."""
        outcome = {"raised": type(error).__name__, "message": str(error)}
        try:
            self._write_json(OUTCOME, outcome)
        except OSError:  # The error of the call matters more.
            return

    def returned(self, result: Any) -> str:
        """Add results and written arguments; return a line about them for the log."""
        try:
            return self._add_outputs(result)
        except torch.AcceleratorError:
            raise
        except (OSError, RuntimeError) as error:
            return f"[outputs are not dumped: {type(error).__name__}: {error}]"

    def _add_outputs(self, result: Any) -> str:
        results = tensors_of({"result": result})
        opaque_results = {path for path, tensor in results.items() if opaque(tensor)}
        is_argument = {id(tensor): name for name, tensor in self._arguments.items()}
        after = copy_to_host(self._arguments, self._blocks, self._views)
        stored: dict[str, torch.Tensor] = {}
        outputs: dict[str, str] = {}
        for name, view in self._views.items():
            now = dense(view_of(after[view.block], view))
            if not same_bits(now, dense(view_of(self._before[view.block], view))):
                stored[name], outputs[name] = now, name
        for path, tensor in results.items():
            argument = is_argument.get(id(tensor))
            if argument in stored:
                outputs[path] = str(argument)
            elif path not in opaque_results:
                stored[path], outputs[path] = dense(tensor), path
        size = sum(t.numel() * t.element_size() for t in stored.values())
        refusal = self._recorder.reserve_outputs(size)
        outcome = {
            "raised": None,
            "result": _encoding.encode("result", result, opaque_results),
            "outputs": outputs if refusal is None else None,
            "note": refusal,
        }
        if refusal is None:
            _encoding.write_tensors(self.folder / OUTPUTS, stored)
        self._write_json(OUTCOME, outcome)
        self._before = {}
        if refusal is not None:
            return f"[outputs are not dumped: {refusal}]"
        return f"dump has the outputs {', '.join(outputs) or '(none)'}"

    def _write_json(self, name: str, data: object) -> None:
        text = json.dumps(data, indent=1) + "\n"
        with (self.folder / name).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _encoding.sync_folder(self.folder)


def selected(name: str) -> bool:
    """Whether ``PRECAST_DUMP_INCLUDE`` and ``PRECAST_DUMP_EXCLUDE`` select a function.

    The patterns ``rmsnorm`` and ``precast.rmsnorm`` match ``precast.norm.rmsnorm``, too.
    """
    *modules, function = name.split(".")
    names = [".".join([*modules[:end], function]) for end in range(len(modules) + 1)]

    def matches(patterns: str) -> bool:
        words = [word.strip() for word in patterns.split(",") if word.strip()]
        return any(fnmatchcase(n, word) for word in words for n in names)

    include = _env.DUMP_INCLUDE()
    return (not include or matches(include)) and not matches(_env.DUMP_EXCLUDE())


def folder_size(root: Path) -> int:
    """The bytes of the files below a folder; 0 if there is no folder."""
    total = 0
    for folder, _, files in os.walk(root):
        for name in files:
            try:
                total += (Path(folder) / name).stat().st_size
            except OSError:  # Another process has removed it.
                continue
    return total
