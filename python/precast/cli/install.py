# SPDX-License-Identifier: Apache-2.0
"""Install the prebuilt modules that suit this machine: its GPUs, its driver, its torch.

    precast install --dry-run
    precast install
    precast install --arch 9.0 --cuda 13                  in an image build without a GPU
    precast install --no-index --find-links bundle/wheels without a network

It prints what it found and what it concludes, runs pip (or uv, in an environment of uv) for this
interpreter, and checks the result. It never changes torch. If the modules are installed already, it
prints that and does nothing.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from precast.cli import _completers, _environment, _fit, _installer, _machine, _output, _state
from precast.cli._gpus import Gpu, find_gpus
from precast.cli._output import UnableError, UsageError

EXIT_CODES = (0, 1, 2, 3)
JSON = {
    "status": "fits (there was nothing to do), planned (a dry run), installed, or incomplete "
    "(installed, but a compile would still be needed)",
    "extras": "the extras of precast that this machine needs, such as cu13-sm90a",
    "commands": "the commands that run, or would run, each as a list of arguments",
    "reasons": "rows: the part that was examined, what was found, and the conclusion",
    "notes": "texts: each problem of this machine and its fix",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _state.add_arch(parser, "compute capabilities to install for, instead of this machine's GPUs")
    action = parser.add_argument(
        "--cuda",
        type=int,
        metavar="MAJOR",
        help="CUDA major of the modules (default: torch's if the driver runs it, else the newest "
        "that it runs); with --arch, the driver of this machine is ignored",
    )
    _completers.attach(action, _completers.cuda_majors)
    parser.add_argument(
        "--find-links",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder or page of wheels, such as the wheels/ of a bundle",
    )
    parser.add_argument(
        "--no-index", action="store_true", help="take wheels from --find-links only"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only print what would be run, and why"
    )
    _output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from precast._runtime.loader import loader

    gpus, no_gpu = find_gpus()
    capabilities = _state.flatten(args.arch) or list(dict.fromkeys(g.capability for g in gpus))
    if not capabilities:
        raise UsageError(
            f"{no_gpu}. Fix: name a compute capability, for example precast install --arch 9.0"
        )
    if args.no_index and not args.find_links:
        raise UsageError(
            "--no-index without --find-links has no source of wheels. Fix: add --find-links DIR"
        )
    machine = _fit.this_machine()
    if args.arch and args.cuda:
        machine = machine._replace(driver=None)
    chosen, notes = _choose(capabilities, machine, args.cuda)
    todo = [c for c in chosen if not _fit.fits_already(c.capability, args.cuda)]
    report: dict[str, Any] = {
        "status": "planned" if args.dry_run else "installed",
        "extras": _extras(chosen),
        "commands": [],
        "reasons": _reasons(machine, gpus, chosen, bool(args.arch)),
        "notes": [*notes, *_notes(machine, bool(gpus))],
    }
    if not todo:
        report["status"] = "fits"
    else:
        problem = _fit.platform_problem(any_libc=bool(args.find_links))
        if problem is not None:
            raise UnableError(problem)
        report["commands"] = _commands(todo, args.find_links, args.no_index)
    if not args.json:
        _print(report)
    if todo and not args.dry_run:
        for command in report["commands"]:
            _installer.execute(command)
        loader.bind()
        left = [c for c in todo if not _fit.fits_already(c.capability, args.cuda)]
        if left:
            return _incomplete(report, left, args.json)
    if args.json:
        _output.print_json(report)
    elif todo and not args.dry_run:
        print(f"installed: {', '.join(report['extras'])}")
    return 0


def _choose(
    capabilities: list[str], machine: _fit.Machine, wanted: int | None
) -> tuple[list[_fit.Choice], list[str]]:
    """Choose modules for every GPU that has some, and make notes about the others."""
    chosen: list[_fit.Choice] = []
    refused: list[UnableError] = []
    for capability in capabilities:
        try:
            chosen += _fit.choices(capability, machine, wanted)
        except UnableError as error:
            refused.append(error)
    if not chosen:
        raise refused[0]
    return chosen, [str(error) for error in refused]


def _extras(chosen: list[_fit.Choice]) -> list[str]:
    return list(dict.fromkeys(choice.extra for choice in chosen))


def _commands(todo: list[_fit.Choice], links: list[str], no_index: bool) -> list[list[str]]:
    """One command installs missing modules, and one more reinstalls damaged ones."""
    from precast._base.version import __version__

    installer, _ = _installer.find_installer()
    pin = _installer.torch_pin(_environment.torch(has_gpu=False)["version"])
    options = [*(f"--find-links={place}" for place in links), *(["--no-index"] * no_index)]
    core = f"precast[{','.join(_extras(todo))}]=={__version__}"
    commands = [[*installer, *options, core, pin]]
    names = dict.fromkeys(choice.distribution for choice in todo)
    same = [name for name in names if _installer.installed_version(name) == __version__]
    if same:
        again = ["--force-reinstall", "--no-deps"]
        commands.append([*installer, *options, *again, *(f"{n}=={__version__}" for n in same)])
    return commands


def _incomplete(report: dict[str, Any], left: list[_fit.Choice], as_json: bool) -> int:
    """Report that the installer succeeded, but a compile would still be needed."""
    from precast._base import env as _env

    capabilities = dict.fromkeys(choice.capability for choice in left)
    rows = _state.profile_outcomes(_env.PROFILE.default, capabilities)
    missing = [row for row in rows if row.state not in ("prebuilt", "unsupported")]
    report["status"] = "incomplete"
    report["notes"].append(
        f"{len(missing)} modules are still not prebuilt, such as {missing[0].module}: "
        f"{missing[0].reason}"
        if missing
        else "the modules that were installed before still load first"
    )
    if as_json:
        _output.print_json(report)
    fix = f"precast doctor --profile {_env.PROFILE.default} --arch {' '.join(capabilities)}"
    print(f"error: {report['notes'][-1]}\nFix: {fix}", file=sys.stderr)
    return 1


# -- printed text -----------------------------------------------------------------------------


def _reasons(
    machine: _fit.Machine, gpus: list[Gpu], chosen: list[_fit.Choice], overridden: bool
) -> list[dict[str, str]]:
    rows = []
    names = [g.label for g in gpus if not overridden]
    for choice in chosen:
        here = [name for name in names if name.endswith(f" {choice.capability})")]
        found = ", ".join(here) or f"compute capability {choice.capability}"
        follows = f"target {choice.arch}; {choice.reason}: {choice.extra}"
        rows.append({"what": "GPU", "found": found, "follows": follows})
    if machine.driver is not None:
        found = f"runs CUDA up to {machine.driver[0]}.{machine.driver[1]}"
        rows.append({"what": "driver", "found": found, "follows": "modules up to that CUDA major"})
    torch = _environment.torch(has_gpu=False)
    follows = "not changed"
    if machine.torch_major is not None:
        follows += f"; modules of CUDA {machine.torch_major} share its CUDA runtime"
    rows.append({"what": "torch", "found": torch["text"], "follows": follows})
    system = _machine.system()
    found = f"{system['os']}, {system['machine']}, {system['libc']}"
    follows = _fit.platform_problem() or "wheels are made for it"
    rows.append({"what": "system", "found": found, "follows": follows})
    return rows


def _notes(machine: _fit.Machine, has_gpu: bool) -> list[str]:
    from precast._plan.places import checkout_root

    notes = []
    torch = _environment.torch(has_gpu)
    if torch.get("problem") and torch["version"] is not None:
        notes.append(torch["problem"])
    major, driver = machine.torch_major, machine.driver
    if major is not None and driver is not None and driver[0] < major:
        notes.append(
            f"torch {torch['version']} is built for CUDA {major}, and this driver runs CUDA "
            f"{driver[0]}.{driver[1]}: torch cannot use the GPU. Fix: update the driver, or "
            f"install a torch for CUDA {driver[0]}"
        )
    if checkout_root() is not None:
        notes.append(
            "this precast is a checkout: modules fit only if they were built from exactly these "
            "sources. To build them here: pip install ./python/precast_jit_cache"
        )
    return notes


def _print(report: dict[str, Any]) -> None:
    rows = [(row["what"], row["found"], row["follows"]) for row in report["reasons"]]
    _output.print_table(rows, ("part", "found", "conclusion"), indent=0)
    for note in report["notes"]:
        print(f"Note: {note}")
    if report["status"] == "fits":
        print(f"nothing to do: {', '.join(report['extras'])} is installed and fits")
    elif report["status"] == "planned":
        print("would run:")
        for command in report["commands"]:
            print(f"  {_installer.shown(command)}")
