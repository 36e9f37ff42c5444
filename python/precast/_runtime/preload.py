# SPDX-License-Identifier: Apache-2.0
"""Load kernels ahead of time, so that no request waits for a load or a compile."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from precast._base.dtypes import DTYPE_WORDS
from precast._base.errors import MissingKernelError, UnsupportedConfigError, UnsupportedTargetError
from precast._base.names import axis_word

if TYPE_CHECKING:
    from pathlib import Path

    from precast._base.device import Device


class Preloaded(NamedTuple):
    """One module that :func:`preload` loaded."""

    module: str
    path: Path
    source: str
    seconds: float


def preload(
    ops: Iterable[str] | None = None,
    *,
    profile: str = "core",
    device: Device = None,
    **axes: object,
) -> list[Preloaded]:
    """Load the modules of a profile now, at start-up or before a CUDA graph is captured.

    Parameters
    ----------
    ops : iterable of str, optional
        Op families such as ``["norm", "activation"]``; default all, those with kernels in CuTe DSL
        where a build has them: no function takes these unless its ``backend`` says so.
    profile : str
        The named set of ``aot_configs/build.toml``: ``ci``, ``core`` or ``full``.
    device : torch.device, str or int, optional
        Default: the current CUDA device. Call it once for every kind of GPU in the process.
    **axes
        Only modules with these axis values: ``preload(dtype="bf16")``, ``dtype=torch.bfloat16`` or
        ``dtype=["f16", "bf16"]``.
        It does not restrict ops without such an axis.

    Returns
    -------
    list of Preloaded
        Each module that was loaded, with its source and the time that it took.

    Raises
    ------
    TypeError
        If ``ops`` is one string.
    MissingKernelError
        If modules are neither prebuilt nor cached, and cannot be compiled. All modules are tried
        first; the message has a paragraph for each.
    ValueError
        If an op, profile, axis or axis value does not exist, or if no target serves the device.
    RuntimeError
        If PyTorch finds no CUDA device, or none of this index.
    """
    from precast._base.device import device_index
    from precast._plan.installed import plan
    from precast._runtime.loader import loader

    if isinstance(ops, str):
        raise TypeError(f"ops must be a list of ops, got the string {ops!r}. Fix: pass [{ops!r}]")
    try:
        index = device_index(device)
        loader.check_device(index)
    except (AssertionError, RuntimeError) as error:  # PyTorch's, of several kinds.
        if isinstance(error, UnsupportedTargetError):
            raise
        what = "the current CUDA device" if device is None else f"device={device!r}"
        why = str(error).splitlines()[0].rstrip(".")
        raise RuntimeError(
            f"preload loads modules for the GPU of {what}, and PyTorch finds none: {why}. Fix: "
            f"call it where torch.cuda.is_available() is True (a driver, and a PyTorch that is "
            f"built for CUDA); reference mode needs no preload"
        ) from None
    wanted = set(plan().config.ops if ops is None else ops)
    for op in wanted:
        plan().config.op(op)
    legal: dict[str, set[str]] = {}
    for op in wanted:
        for axis, all_values in plan().config.op(op).axes.items():
            legal.setdefault(axis, set()).update(map(axis_word, all_values))
    allowed = {axis: _words(value) for axis, value in axes.items()}
    for axis, words in allowed.items():
        if axis not in legal:
            raise ValueError(
                f"{axis} is not an axis of these ops; legal: {', '.join(sorted(legal))}"
            )
        for word in words - legal[axis]:
            raise ValueError(
                f"{axis}={word} does not exist; legal: {', '.join(sorted(legal[axis]))}"
            )
    done: list[Preloaded] = []
    missing: list[MissingKernelError] = []
    for op, values in plan().aot_axes(profile):
        if op not in wanted:
            continue
        if any(axis_word(values[a]) not in ok for a, ok in allowed.items() if a in values):
            continue
        start = time.perf_counter()
        try:
            loader.load(op, values, index)
        except MissingKernelError as error:
            if ops is not None or not plan().config.op(op).is_cute_dsl:
                missing.append(error)
            continue  # Builds without the compiler of CuTe DSL leave these out.
        except UnsupportedConfigError:
            if ops is not None:
                raise
            continue  # The op is for other GPUs.
        resolution = loader.resolution(op, values, index)
        assert resolution.path is not None
        source = next((s.source for s in resolution.steps if s.accepted), "JIT")
        done.append(
            Preloaded(resolution.module, resolution.path, source, time.perf_counter() - start)
        )
    if missing:
        raise MissingKernelError("\n\n".join(map(str, missing)), missing[0].spec)
    return done


def _words(value: object) -> set[str]:
    """One axis value or several, as they stand in names; a torch dtype becomes its word."""
    several = value if isinstance(value, (list, tuple, set, frozenset)) else [value]
    return {axis_word(DTYPE_WORDS.get(str(v), v)) for v in several}
