# SPDX-License-Identifier: Apache-2.0
"""Run dumped calls again, and compare their outputs with the dumped ones."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precast._base.errors import DumpError, MissingPackageError
from precast._base.files import open_regular, read_regular
from precast._base.torch import torch
from precast.api_logging import _encoding, public_api
from precast.api_logging._describe import tensors_of
from precast.api_logging._dump import CALL, INPUTS, OUTCOME, OUTPUTS, SCHEMA, replaying
from precast.api_logging._memory import Block, View, dense, place, same_bits, view_of

if TYPE_CHECKING:
    from precast._base.device import Device


@dataclass(frozen=True)
class Comparison:
    """The comparison of one output of a replayed call with the dumped one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bitwise: bool
    #: The largest finite difference; None if there is none, for example between different shapes.
    max_error: float | None
    #: Why the output is outside the tolerance; empty if it is within.
    problem: str


@dataclass(frozen=True)
class Replay:
    """The result of the replay of one dumped call.

    ``verdict`` is ``bitwise`` (every output has the same bits), ``close`` (all are within the
    tolerances of ``precast.testing``), ``different``, ``raised`` (the dumped call did not raise),
    ``as recorded`` (the dumped call raised the same type of error) or ``ran`` (nothing can be
    compared: the dumped call did not return, or its outputs are not in the dump).
    """

    dump: Path
    function: str
    device: str
    verdict: str
    note: str = ""
    outputs: list[Comparison] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the call agrees with the dump."""
        return self.verdict not in ("different", "raised")


def find_dumps(path: Path) -> list[Path]:
    """The dumps in a folder, in the order of the calls; a folder that is a dump is returned itself.

    Raises
    ------
    DumpError
        If there are none.
    """
    if (path / CALL).is_file():
        return [path]
    found = [file.parent for file in path.glob(f"*/{CALL}")]
    if not found:
        raise DumpError(f"{path} is not a dump: neither it nor a folder in it has a {CALL}")
    times = {folder: str(_read_json(folder / CALL).get("time", "")) for folder in found}
    return sorted(found, key=lambda folder: (times[folder], folder.name))


def replay(
    path: str | Path,
    *,
    reference: bool | None = None,
    device: Device = None,
    function: Callable[..., Any] | None = None,
) -> Replay:
    """Run one dumped call again.

    Parameters
    ----------
    path : path
        The folder of the call.
    reference : bool, optional
        Whether to run the PyTorch reference instead of the kernel. Default: True without a CUDA
        device, and for calls without a CUDA tensor.
    device : torch.device, str or int, optional
        The device for CUDA tensors. Default: the device with the recorded index, otherwise the
        first one; the CPU if there is no GPU.
    function : callable, optional
        The function to call in place of the dumped one, if that cannot be imported by its name.

    Returns
    -------
    Replay
        The comparison of the outputs. Tensors have the alignment, the strides and the shared memory
        of the dumped ones.

    Raises
    ------
    DumpError
        If the folder is not a complete dump, an argument cannot be restored, or the function is not
        public here.
    MissingPackageError
        If safetensors is not installed.
    """
    folder = Path(path)
    call = _read_json(folder / CALL)
    if call.get("schema") != SCHEMA:
        raise DumpError(
            f"{folder}: schema {call.get('schema')!r} is not the {SCHEMA} of this precast"
        )
    with _reading(folder):
        name = str(call["function"])
        views = {n: View(**_tuples(row)) for n, row in call["tensors"].items()}
        blocks = {n: Block(**row) for n, row in call["blocks"].items()}
        recorded = {block.device: torch.device(block.device) for block in blocks.values()}
    run = function or _find(name)
    where = _devices(recorded, device)
    if reference is None:
        reference = not any(place.type == "cuda" for place in where.values())
    target = next((p for p in where.values() if p.type == "cuda"), torch.device("cpu"))
    with _reading(folder):
        tensors = _load(folder, blocks, views, where)
        values = {
            n: _encoding.decode(n, data, tensors, target) for n, data in call["arguments"].items()
        }
    args, kwargs = _split(run, values)
    outcome = _read_json(folder / OUTCOME) if (folder / OUTCOME).is_file() else None
    title = (folder, name, f"{target}{', reference' if reference else ''}")
    try:
        with _mode(reference):
            result = run(*args, **kwargs)
        if any(p.type == "cuda" for p in where.values()):
            torch.cuda.synchronize(target)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if outcome is not None and outcome.get("raised") == type(error).__name__:
            return Replay(*title, "as recorded", text)
        return Replay(*title, "raised", text)
    return _compare(title, folder, outcome, tensors, result)


def _compare(
    title: tuple[Path, str, str],
    folder: Path,
    outcome: Mapping[str, Any] | None,
    tensors: Mapping[str, torch.Tensor],
    result: Any,
) -> Replay:
    if outcome is None:
        return Replay(*title, "ran", "the dumped call did not return; this one did")
    with _reading(folder):
        if outcome["raised"] is not None:
            text = f"the dumped call raised {outcome['raised']}: {outcome['message']}"
            return Replay(*title, "different", text)
        if outcome["outputs"] is None:
            return Replay(*title, "ran", f"the outputs are not in the dump: {outcome['note']}")
        stored = _read_tensors(folder / OUTPUTS)
        wanted = {path: stored[key] for path, key in outcome["outputs"].items()}
    got = {**tensors, **tensors_of({"result": result})}
    outputs = [_compare_one(path, got.get(path), want) for path, want in wanted.items()]
    verdict = "close"
    if any(row.problem for row in outputs):
        verdict = "different"
    elif all(row.bitwise for row in outputs):
        verdict = "bitwise"
    return Replay(*title, verdict, "", outputs)


def _compare_one(name: str, got: torch.Tensor | None, want: torch.Tensor) -> Comparison:
    from precast._base.tolerances import TOLERANCES, assert_close

    dtype, shape = str(want.dtype).partition(".")[2], tuple(want.shape)
    if got is None:
        return Comparison(name, dtype, shape, False, None, "the replayed call has no such output")
    mine = dense(got)
    if same_bits(mine, want):
        return Comparison(name, dtype, shape, True, 0.0, "")
    if mine.dtype != want.dtype or mine.shape != want.shape:
        problem = f"is {mine.dtype} of shape {tuple(mine.shape)}"
        return Comparison(name, dtype, shape, False, None, problem)
    wide = torch.complex128 if want.is_complex() else torch.float64
    error = (mine.to(wide) - want.to(wide)).abs()
    finite = error[error.isfinite()]
    largest = float(finite.max()) if finite.numel() else None
    if want.is_floating_point() and want.dtype not in TOLERANCES:
        problem = "its bits differ, and no tolerance is known for its dtype"
        return Comparison(name, dtype, shape, False, largest, problem)
    # NaN in the same places counts as equal here; assert_close is stricter.
    both = mine.isnan() & want.isnan()
    try:
        assert_close(_zeroed(mine, both), _zeroed(want, both), name=name)
    except AssertionError as difference:
        return Comparison(name, dtype, shape, False, largest, str(difference))
    return Comparison(name, dtype, shape, False, largest, "")


def _zeroed(tensor: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() and tensor.itemsize == 1:  # torch does not fill fp8 tensors.
        return tensor.view(torch.uint8).masked_fill(where, 0).view(tensor.dtype)
    return tensor.masked_fill(where, 0)


# -- what a call needs ----------------------------------------------------------------------------


@contextlib.contextmanager
def _reading(folder: Path) -> Any:
    """Raise errors as errors of the dump, unless the GPU failed or memory ran out."""
    try:
        yield
    except (DumpError, torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except _encoding.UnknownValueError as error:
        raise DumpError(f"{folder}: {error}, so the call cannot be run again") from error
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise DumpError(f"{folder} is damaged: {type(error).__name__}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(read_regular(path)[0])
    except (OSError, RecursionError, ValueError) as error:
        raise DumpError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise DumpError(f"{path} does not belong to a dump")
    return data


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        open_regular(path).close()
        return _encoding.read_tensors(path)
    except MissingPackageError:
        raise
    except Exception as error:  # safetensors has its own error besides OSError.
        raise DumpError(f"{path} cannot be read: {error}") from error


def _find(name: str) -> Callable[..., Any]:
    """The decorated function with this public name; a dump can have no other."""
    problem = ""
    words = name.split(".")
    for end in range(len(words) - 1, 0, -1):
        if name in public_api():
            break
        try:
            _encoding.import_named(".".join(words[:end]))
        except ImportError as error:
            problem = problem or f" ({error})"
    function = public_api().get(name)
    if function is None:
        raise DumpError(
            f"{name} is not a function of the public API{problem}. Fix: import the module that "
            f"decorates it with @precast_api (precast replay --import MODULE), or call "
            f"precast.api_logging.replay.replay(dump, function=...)"
        )
    return function


def _devices(recorded: Mapping[str, torch.device], device: Device) -> dict[str, torch.device]:
    """The device for the memory of each dumped device."""
    from precast._base.device import device_index

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    places = {}
    for name, old in recorded.items():
        if old.type == "cuda" and device is not None and str(device) != "cpu":
            places[name] = torch.device("cuda", device_index(device))
        elif old.type == "cuda" and count and str(device) != "cpu":
            index = old.index if old.index is not None and old.index < count else 0
            places[name] = torch.device("cuda", index)
        else:
            places[name] = torch.device("cpu")
    return places


def _load(
    folder: Path,
    blocks: Mapping[str, Block],
    views: Mapping[str, View],
    where: Mapping[str, torch.device],
) -> dict[str, torch.Tensor]:
    data = _read_tensors(folder / INPUTS)
    placed = {}
    for name, block in blocks.items():
        raw = data.get(name)
        if raw is None or raw.numel() * raw.element_size() != block.size:
            raise DumpError(f"{folder / INPUTS} does not have the {block.size} bytes of {name}")
        placed[name] = place(raw.reshape(-1), block, where[block.device])
    return {name: view_of(placed[view.block], view) for name, view in views.items()}


def _tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "shape": tuple(row["shape"]), "strides": tuple(row["strides"])}


def _split(
    function: Callable[..., Any], values: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by name as the positional and keyword arguments of a call."""
    args: list[Any] = []
    kwargs = dict(values)
    parameters = inspect.signature(function).parameters.values()
    variadic = any(p.kind is p.VAR_POSITIONAL and kwargs.get(p.name) for p in parameters)
    for parameter in parameters:
        name, kind = parameter.name, parameter.kind
        if name not in kwargs:
            continue
        if kind is parameter.VAR_POSITIONAL:
            args += kwargs.pop(name)
        elif kind is parameter.VAR_KEYWORD:
            kwargs.update(kwargs.pop(name))
        elif kind is parameter.POSITIONAL_ONLY or (
            variadic and kind is parameter.POSITIONAL_OR_KEYWORD
        ):
            args.append(kwargs.pop(name))
    return args, kwargs


@contextlib.contextmanager
def _mode(reference: bool) -> Any:
    from precast._op.mode import reference_mode

    token = replaying.set(True)
    try:
        with reference_mode() if reference else contextlib.nullcontext(), torch.no_grad():
            yield
    finally:
        replaying.reset(token)
