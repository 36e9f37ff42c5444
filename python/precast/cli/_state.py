# SPDX-License-Identifier: Apache-2.0
"""Predict what the loader would do for a module on a device."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from precast.cli import _completers
from precast.cli._gpus import find_gpus
from precast.cli._names import ops_of
from precast.cli._output import UsageError

#: Where a module would come from, best first. ``unsupported``: the op or precast has no target for
#: the device.
STATES = ("prebuilt", "cached", "JIT", "missing", "unsupported")
#: Keys of an :class:`Outcome` as JSON.
OUTCOME_KEYS = (
    "op, axes, module, capability, arch (the target), state (prebuilt, cached, JIT, missing or "
    "unsupported), place, path, reason (why it is not prebuilt) and steps (source, place, "
    "accepted, reason, fault of each candidate)"
)
#: The states in which a call needs no compiler.
READY = ("prebuilt", "cached")


class Target(NamedTuple):
    """A device, or a compute capability without a device."""

    capability: str
    label: str


class Outcome(NamedTuple):
    """One module on one target."""

    op: str
    axes: Mapping[str, Any]
    module: str
    capability: str
    arch: str
    state: str
    place: str
    path: str | None
    reason: str
    steps: tuple[Any, ...]

    def as_json(self) -> dict[str, Any]:
        data = self._asdict()
        data["axes"] = dict(self.axes)
        data["steps"] = [step._asdict() for step in self.steps]
        return data


def capabilities(text: str) -> list[str]:
    """Parse ``"8.0 9.0a"``, ``sm90a``, ``90``, ... to compute capabilities, as an argparse type.

    A suffix is legal where a target of the plan has it.
    """
    from precast._plan.build_config import split_target
    from precast._plan.installed import plan

    found = []
    for word in filter(None, re.split(r"[\s,;]+", text)):
        try:
            plan().arch(word)
            capability, _ = split_target(word, plan().build.archs)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        found.append(capability)
    if not found:
        raise argparse.ArgumentTypeError("empty; legal: entries such as 9.0, 9.0a or sm90a")
    return found


def add_arch(parser: argparse.ArgumentParser, text: str) -> None:
    action = parser.add_argument(
        "--arch", type=capabilities, nargs="+", action="extend", metavar="CC", help=text
    )
    _completers.attach(action, _completers.capabilities)


def add_op(parser: argparse.ArgumentParser) -> None:
    action = parser.add_argument(
        "--op", metavar="OP", help="only this op, or those of a function such as rmsnorm"
    )
    _completers.attach(action, _completers.ops)


def flatten(groups: Iterable[Sequence[str]] | None) -> list[str]:
    return list(dict.fromkeys(item for group in groups or () for item in group))


def device_targets(device: int | None = None) -> list[Target]:
    """Return the GPUs of this process, or one of them.

    Raises
    ------
    UsageError
        If there is no GPU, or none with that index.
    """
    gpus, problem = find_gpus()
    if problem is not None:
        raise UsageError(f"{problem}. Fix: name a compute capability, for example --arch 9.0")
    if device is not None and not 0 <= device < len(gpus):
        raise UsageError(f"--device {device}: legal: 0 to {len(gpus) - 1}")
    return [
        Target(gpu.capability, gpu.label) for gpu in gpus if device is None or gpu.index == device
    ]


def arch_targets(found: Iterable[str]) -> list[Target]:
    return [Target(capability, f"compute capability {capability}") for capability in found]


def outcome(op: str, axes: Mapping[str, Any], capability: str) -> Outcome:
    """Ask the loader; nothing is compiled or loaded.

    Raises
    ------
    UnsupportedConfigError, ConfigError
        If the op, an axis or a value does not exist.
    """
    from precast._base.errors import UnsupportedConfigError
    from precast._base.names import module_name
    from precast._plan.installed import plan
    from precast._runtime.loader import loader

    checked = plan().axes(op, axes)
    name = module_name(op, checked)
    targets = plan().build.accepted(capability)
    folder = targets[0].name if targets else ""
    try:
        resolution = loader.resolve(op, checked, capability)
    except UnsupportedConfigError as error:
        return Outcome(
            op, checked, name, capability, folder, "unsupported", "", None, str(error), ()
        )
    last = resolution.steps[-1]
    path = resolution.path
    if path is None:
        state = "JIT" if last.accepted else "missing"
    elif last.source == "JIT cache":
        state = "cached"
    else:
        state, folder = "prebuilt", path.parent.name
    return Outcome(
        op=op,
        axes=checked,
        module=name,
        capability=capability,
        arch=folder,
        state=state,
        place=last.place if last.accepted else "",
        path=None if path is None else str(path),
        reason="" if state == "prebuilt" else _reason(resolution.steps, state),
        steps=resolution.steps,
    )


def _reason(steps: Sequence[Any], state: str) -> str:
    """Why a module is not prebuilt, and if it is missing why it cannot be compiled either."""
    prebuilt = [step for step in steps if not step.source.startswith("JIT")]
    # A refused file of that name explains more than a provider without such a file.
    named = [step for step in prebuilt if step.place.endswith(".so")] or prebuilt
    texts = [f"{step.place}: {step.reason}" for step in named]
    if not texts:
        texts = ["no provider of prebuilt modules is installed"]
    if state == "missing":
        texts.append(steps[-1].reason)
    return "; ".join(dict.fromkeys(texts))


def profile_outcomes(
    profile: str | None, found: Iterable[str], op: str | None = None
) -> list[Outcome]:
    """Predict every module of a profile (None: of all) for every capability.

    ``op`` selects an op, or those of a public function or class.

    Raises
    ------
    ConfigError
        If the profile does not exist.
    UsageError
        If ``op`` is unknown, or runs no kernel.
    """
    from precast._jit.toolchain import searching_once
    from precast._plan.installed import plan

    ops = None if op is None else ops_of(op)
    rows = [row for row in plan().aot_axes(profile) if ops is None or row[0] in ops]
    with searching_once():
        return [outcome(name, axes, capability) for capability in found for name, axes in rows]
