# SPDX-License-Identifier: Apache-2.0
"""Examine this machine: the environment, the GPUs, the compilers, the prebuilt modules.

    precast doctor
    precast doctor --profile core --arch 9.0
    precast doctor --profile core --op BatchDecodeWithPagedKVCacheWrapper

For each GPU (or for --arch without a GPU) it then shows where every module of a profile would come
from. With --profile it is a check for images and start-up scripts: it exits with 1 if a module of
that profile would have to be compiled or could not be loaded, and prints how to fix it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from precast.cli import _completers, _environment, _fit, _output, _state
from precast.cli._gpus import find_gpus

EXIT_CODES = (0, 1, 2, 3)
JSON = {
    "ok": "false if there is a problem or, with --profile, a module would need a compile",
    "problems": "texts: each problem and its fix",
    "fixes": "commands after which every module of the profile is prebuilt",
    "packages": "name, version, text and perhaps problem of each package",
    "driver": "version, newest CUDA that it runs ([major, minor]), text and perhaps problem",
    "gpus": "index, name, capability and memory of each GPU",
    "compilers": "name, version, path, origin, accepted and reason of each compiler",
    "providers": "label, source, root, manifest and perhaps problem of each provider",
    "jit": "policy, cache_dir and cache_writable, with texts",
    "gemm_table": "path of PRECAST_GEMM_TABLE, or null, text and perhaps problem",
    "profile": "the profile that was examined",
    "targets": f"capability, label and modules of each target; a module has {_state.OUTCOME_KEYS}",
}

_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = parser.add_argument(
        "--profile",
        metavar="NAME",
        help="fail if a module of this profile would need a compile: core, full",
    )
    _completers.attach(action, _completers.profiles)
    _state.add_op(parser)
    _state.add_arch(parser, "compute capabilities to examine instead of this machine's GPUs")
    _output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from precast._base import env as _env

    found = _state.flatten(args.arch)
    gpus, no_gpu = find_gpus()
    if found:
        targets = _state.arch_targets(found)
    else:
        targets = [_state.Target(gpu.capability, gpu.label) for gpu in gpus]
    if args.profile is not None and not targets:
        targets = _state.device_targets()  # Its message names the option that is needed.
    profile = args.profile or _env.PROFILE.default
    rows = _state.profile_outcomes(profile, dict.fromkeys(t.capability for t in targets), args.op)
    report = _environment.report(gpus, no_gpu)
    report["problems"] += [*_unserved(targets), *_without_runtime(rows)]
    unready = [row for row in rows if row.state not in (*_state.READY, "unsupported")]
    failed = bool(report["problems"]) or (args.profile is not None and bool(unready))
    report["profile"] = profile
    report["targets"] = [
        {
            **target._asdict(),
            "modules": [row.as_json() for row in rows if row.capability == target.capability],
        }
        for target in targets
    ]
    report["fixes"] = _fit.fixes(unready)
    report["ok"] = not failed
    if args.json:
        _output.print_json(report)
    else:
        _print(report, targets, rows, args.profile is not None)
    return 1 if failed else 0


def _unserved(targets: Sequence[_state.Target]) -> list[str]:
    """A problem where there are GPUs and precast has a target for none of them."""
    from precast._plan.installed import plan

    build = plan().build
    if not targets or any(build.accepted(target.capability) for target in targets):
        return []
    return [
        f"no target of precast serves {', '.join(target.label for target in targets)}; legal: "
        f"{', '.join(build.capabilities)}. Fix: use another GPU, or a release of precast that "
        f"knows this one"
    ]


def _without_runtime(rows: Sequence[_state.Outcome]) -> list[str]:
    """A problem for each CUDA runtime that prebuilt modules need and that is not found."""
    from precast._base.errors import LoadError
    from precast._runtime.cudart import open_cudart
    from precast._runtime.loader import loader

    prebuilt = {Path(row.path).parents[1] for row in rows if row.state == "prebuilt" and row.path}
    problems = []
    for provider in loader.providers:
        if provider.root in prebuilt and provider.manifest is not None:
            runtime = loader.document["cuda"][str(provider.manifest.cuda_major)]
            try:
                open_cudart(runtime["cudart"], runtime["cudart_wheel"])
            except (LoadError, OSError) as error:
                problems.append(str(error))
    return list(dict.fromkeys(problems))


def _print(
    report: dict[str, Any],
    targets: list[_state.Target],
    rows: list[_state.Outcome],
    checked: bool,
) -> None:
    _output.print_sections(_environment.sections(report))
    for target in targets:
        _print_target(target, report["profile"], [r for r in rows if r.capability == target[0]])
    if not targets:
        print("\nThere is no GPU. To examine another one: precast doctor --arch 9.0")
    for problem in report["problems"]:
        print(f"\nProblem: {problem}")
    if report["fixes"]:
        print("\nFix:" if checked else "\nTo install everything prebuilt:")
        for fix in report["fixes"]:
            print(f"  {fix}")
        hint = _fit.folder_hint(report["fixes"])
        if hint is not None:
            print(hint)
    if checked:
        print(f"\n{'ok' if report['ok'] else 'failed'}: profile {report['profile']}")


def _print_target(target: _state.Target, profile: str, rows: list[_state.Outcome]) -> None:
    print()
    lines = []
    for op in dict.fromkeys(row.op for row in rows):
        states = [row.state for row in rows if row.op == op]
        counts = [f"{states.count(s)} {s}" for s in _state.STATES if s in states]
        lines.append((op, ", ".join(counts)))
    _output.print_sections({f"Profile {profile} on {target.label}": lines})
    unready = [row for row in rows if row.state not in (*_state.READY, "unsupported")]
    _output.print_table([(row.module, row.state, row.reason) for row in unready[:_SHOWN]], indent=4)
    if len(unready) > _SHOWN:
        print(f"    and {len(unready) - _SHOWN} more: precast list --arch {target.capability}")
