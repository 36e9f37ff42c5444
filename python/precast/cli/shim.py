# SPDX-License-Identifier: Apache-2.0
"""Let an engine that imports FlashInfer run on precast: a package of its name.

    precast shim wheel -o dist --for vllm
    precast shim install --for sglang
    precast shim install --for vllm --version 0.6.13
    precast shim status
    precast shim uninstall

wheel      writes a wheel of the distribution flashinfer-python, whose modules answer with precast's
           names; install it with pip on any machine that has precast
install    writes it and installs it into this environment, in the place of FlashInfer
uninstall  removes it; pip install flashinfer-python brings FlashInfer back
status     prints what a program gets that imports flashinfer here

A name that precast lacks is missing from the package, so that an engine takes its other path.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from precast.cli import _installer, _output
from precast.cli._output import UnableError
from precast.shim import DISTRIBUTION, ENGINES, make_wheel, shim_version

EXIT_CODES = (0, 1, 2, 3)
JSON = {
    "wheel": "of wheel: the file",
    "version": "the version of flashinfer-python: of the wheel, or what is then installed, or null",
    "served_by": "of status: precast, flashinfer, or null if there is neither",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    tree = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    wheel = _output.add_action(tree, "shim", "wheel", "write the wheel")
    wheel.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="the folder of the wheel"
    )
    install = _output.add_action(tree, "shim", "install", "install it in the place of FlashInfer")
    uninstall = _output.add_action(tree, "shim", "uninstall", "remove it")
    status = _output.add_action(tree, "shim", "status", "print what serves flashinfer here")
    for sub in (wheel, install):
        sub.add_argument(
            "--for",
            dest="engine",
            choices=[*ENGINES],
            default="vllm",
            help="the engine that it is for (default: vllm)",
        )
        sub.add_argument(
            "--version",
            help="the version of FlashInfer that the engine pins (default: "
            + ", ".join(f"{version} for {engine}" for engine, version in ENGINES.items())
            + ")",
        )
    for sub in (wheel, install, uninstall, status):
        _output.add_json(sub)


def run(args: argparse.Namespace) -> int:
    actions = {"wheel": _wheel, "install": _install, "uninstall": _uninstall, "status": _status}
    report, line = actions[args.action](args)
    if args.json:
        _output.print_json(report)
    else:
        print(line)
    return 0 if report.get("served_by", "precast") == "precast" else 1


def _version(args: argparse.Namespace) -> str:
    try:
        return shim_version(args.engine, args.version)
    except ValueError as error:
        raise _output.UsageError(f"argument --version: {error}", help_of="shim wheel") from None


def _wheel(args: argparse.Namespace) -> tuple[dict[str, object], str]:
    version = _version(args)
    path = make_wheel(args.output, args.engine, args.version)
    return {"wheel": str(path), "version": version}, str(path)


def _install(args: argparse.Namespace) -> tuple[dict[str, object], str]:
    version = _version(args)
    command, _ = _installer.find_installer()
    with tempfile.TemporaryDirectory() as folder:
        path = make_wheel(Path(folder), args.engine, args.version)
        _installer.execute([*command, "--no-deps", "--no-index", "--quiet", str(path)])
    return {"version": version}, f"installed {DISTRIBUTION} {version}"


def _uninstall(args: argparse.Namespace) -> tuple[dict[str, object], str]:
    version, served_by = _installed()
    if served_by != "precast":
        what = "is not installed" if version is None else f"{version} is FlashInfer itself"
        raise UnableError(
            f"{DISTRIBUTION} {what}; nothing was removed. Fix: precast shim status shows what "
            f"serves flashinfer here"
        )
    command, _ = _installer.find_installer("uninstall")
    _installer.execute([*command, "--quiet", DISTRIBUTION])
    fix = f"FlashInfer itself: pip install {DISTRIBUTION}"
    return {"version": None}, f"removed {DISTRIBUTION} {version}. {fix}"


def _status(args: argparse.Namespace) -> tuple[dict[str, object], str]:
    version, served_by = _installed()
    line = f"{DISTRIBUTION} is not installed. Fix: precast shim install"
    if version is not None:
        who = "precast" if served_by == "precast" else "FlashInfer itself"
        line = f"{DISTRIBUTION} {version}: {who}"
    return {"version": version, "served_by": served_by}, line


def _installed() -> tuple[str | None, str | None]:
    """The installed version of the distribution, and who serves it."""
    version = _installer.installed_version(DISTRIBUTION)
    if version is None:
        return None, None
    return version, "precast" if "+precast." in version else "flashinfer"
