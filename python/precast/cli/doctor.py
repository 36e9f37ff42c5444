# SPDX-License-Identifier: Apache-2.0
"""Examine this machine: the environment, the GPUs, the compilers, the prebuilt modules.

Then, for each GPU (or for --arch where there is none), where every module of a profile would come
from. With --profile it is a check for images and start-up scripts: it exits with 1 if anything in
that profile would have to be compiled, and prints the command that mends it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from precast.cli import _output, _state
from precast.cli._gpus import find_gpus

_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile", metavar="NAME", help="fail if a module of it would need a compile: core, full"
    )
    _state.add_arch(parser, "compute capabilities to look at instead of this machine's GPUs")
    _output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from precast import _env
    from precast.cli import _environment

    found = _state.flatten(args.arch)
    gpus, no_gpu = find_gpus()
    if found:
        targets = _state.arch_targets(found)
    else:
        targets = [_state.Target(gpu.capability, gpu.label) for gpu in gpus]
    if args.profile is not None and not targets:
        targets = _state.device_targets()  # Says which option is needed.
    profile = args.profile or _env.PROFILE.default
    rows = _state.profile_outcomes(profile, dict.fromkeys(t.capability for t in targets))
    report = _environment.report(gpus, no_gpu)
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
    report["fixes"] = _state.fixes(unready)
    report["ok"] = not failed
    if args.json:
        _output.print_json(report)
    else:
        _print(report, targets, rows, args.profile is not None)
    return 1 if failed else 0


def _print(
    report: dict[str, Any],
    targets: list[_state.Target],
    rows: list[_state.Outcome],
    checked: bool,
) -> None:
    _section("Environment", [(p["name"], p["text"]) for p in report["packages"]])
    driver = report["driver"]
    _section(
        "GPUs",
        [("driver", driver["text"])]
        + [
            (f"cuda:{g['index']}", f"{g['name']}, capability {g['capability']}, {g['memory_text']}")
            for g in report["gpus"]
        ],
    )
    _section(
        "Compilers",
        [
            ("accepted" if c["accepted"] else "rejected", c["name"], c["reason"])
            for c in report["compilers"]
        ],
    )
    providers = [(p["label"], p["text"]) for p in report["providers"]]
    _section("Prebuilt modules", providers or [("none", "no provider is installed")])
    jit = report["jit"]
    _section("JIT", [("policy", jit["policy_text"]), ("cache", jit["cache_text"])])
    for target in targets:
        _print_target(target, report["profile"], [r for r in rows if r.capability == target[0]])
    if not targets:
        print("\nNo GPU to look at; for one that is elsewhere: precast doctor --arch 9.0")
    for problem in report["problems"]:
        print(f"\nProblem: {problem}")
    if report["fixes"]:
        print("\nFix:" if checked else "\nTo have everything prebuilt:")
        for fix in report["fixes"]:
            print(f"  {fix}")
    if checked:
        print(f"\n{'ok' if report['ok'] else 'failed'}: profile {report['profile']}")


def _section(title: str, rows: Sequence[Sequence[str]]) -> None:
    if title != "Environment":
        print()
    _output.print_heading(title)
    _output.print_table(rows)


def _print_target(target: _state.Target, profile: str, rows: list[_state.Outcome]) -> None:
    print()
    _output.print_heading(f"Profile {profile} on {target.label}")
    lines = []
    for op in dict.fromkeys(row.op for row in rows):
        states = [row.state for row in rows if row.op == op]
        counts = [f"{states.count(s)} {s}" for s in _state.STATES if s in states]
        lines.append((op, ", ".join(counts)))
    _output.print_table(lines)
    unready = [row for row in rows if row.state not in (*_state.READY, "unsupported")]
    _output.print_table([(row.module, row.state, row.reason) for row in unready[:_SHOWN]], indent=4)
    if len(unready) > _SHOWN:
        print(f"    and {len(unready) - _SHOWN} more: precast list --arch {target.capability}")
