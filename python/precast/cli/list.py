# SPDX-License-Identifier: Apache-2.0
"""List modules by op and target, and where each would come from.

    precast list --op norm --arch 9.0

prebuilt: an installed provider has the module. cached: this user compiled it earlier. JIT: it would
be compiled at its first call. missing: it can neither be found nor compiled; `precast explain`
shows why.
"""

from __future__ import annotations

import argparse

from precast.cli import _completers, _output, _state

EXIT_CODES = (0, 2, 3)
JSON = {"modules": f"the selected modules, each with {_state.OUTCOME_KEYS}"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _state.add_op(parser)
    _state.add_arch(parser, "only these compute capabilities (default: every target of the plan)")
    action = parser.add_argument(
        "--profile", metavar="NAME", help="only the modules of this profile (default: all)"
    )
    _completers.attach(action, _completers.profiles)
    parser.add_argument("--source", choices=_state.STATES[:4], help="only modules in this state")
    _output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from precast._plan.installed import plan

    found = _state.flatten(args.arch)
    if not found:
        found = [arch.target.rstrip("af") for arch in plan().build.archs.values()]
    rows = [
        row
        for row in _state.profile_outcomes(args.profile, found, args.op)
        if row.state != "unsupported" and args.source in (None, row.state)
    ]
    if args.json:
        _output.print_json({"modules": [row.as_json() for row in rows]})
        return 0
    _output.print_table(
        [
            (row.op, row.module, row.capability, row.arch, row.state, row.place or row.reason)
            for row in rows
        ],
        ("op", "module", "GPU", "target", "source", "from"),
        indent=0,
    )
    counts = {state: sum(row.state == state for row in rows) for state in _state.STATES}
    total = ", ".join(f"{n} {state}" for state, n in counts.items() if n)
    print(f"{len(rows)} modules" + (f": {total}" if total else ""))
    return 0
