# SPDX-License-Identifier: Apache-2.0
"""Load kernels ahead of time, so that no request waits for one."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from precast.errors import MissingKernelError

if TYPE_CHECKING:
    from pathlib import Path

    from precast.utils import Device


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
    """Load the modules of a profile now: for start-up, and before a CUDA graph is captured.

    Parameters
    ----------
    ops : iterable of str, optional
        Op families such as ``["norm", "activation"]``; default all.
    profile : str
        The named set of ``aot_configs/build.toml``: ``ci``, ``core`` or ``full``.
    device : torch.device, str or int, optional
        Default: the current CUDA device. Call it once for every kind of GPU in the process.
    **axes
        Only modules with these axis values: ``preload(dtype="bf16")``, or ``dtype=["f16", "bf16"]``.
        An op without such an axis is not limited by it.

    Returns
    -------
    list of Preloaded
        What was loaded, from where, and how long each took.

    Raises
    ------
    MissingKernelError
        If modules are neither prebuilt nor may be compiled. All are tried first; the message has a
        paragraph for each.
    ValueError
        If an op, profile or axis does not exist.
    """
    from precast.loader import loader, plan
    from precast.utils import device_index

    index = device_index(device)
    wanted = set(plan().config.ops if ops is None else ops)
    for op in wanted:
        plan().config.op(op)
    for axis in axes:
        known = {name for op in wanted for name in plan().config.op(op).axes}
        if axis not in known:
            raise ValueError(f"{axis} is not an axis of these ops; legal: {sorted(known)}")
    allowed = {
        axis: {str(v) for v in ([value] if isinstance(value, (str, int)) else value)}  # type: ignore[attr-defined]
        for axis, value in axes.items()
    }
    done: list[Preloaded] = []
    missing: list[MissingKernelError] = []
    for op, values in plan().aot_axes(profile):
        if op not in wanted:
            continue
        if any(str(values[a]) not in ok for a, ok in allowed.items() if a in values):
            continue
        start = time.perf_counter()
        try:
            loader.load(op, values, index)
        except MissingKernelError as error:
            missing.append(error)
            continue
        resolution = loader.resolution(op, values, index)
        assert resolution.path is not None
        source = next((s.source for s in resolution.steps if s.accepted), "JIT")
        done.append(
            Preloaded(resolution.module, resolution.path, source, time.perf_counter() - start)
        )
    if missing:
        raise MissingKernelError("\n\n".join(map(str, missing)), missing[0].spec)
    return done
