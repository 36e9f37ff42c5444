# SPDX-License-Identifier: Apache-2.0
"""Parse the command line, run one command, turn what goes wrong into a line and an exit code."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType

from precast import errors
from precast._version import __version__
from precast.cli._output import UnableError, UsageError

OK, FAILED, USAGE, UNABLE, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 3, 130, 141

_USER_ERRORS: dict[type[BaseException], int] = {
    UsageError: USAGE,
    errors.ConfigError: USAGE,
    errors.EnvironmentVariableError: USAGE,
    errors.UnsupportedConfigError: USAGE,
    errors.MissingJITCacheError: UNABLE,
    errors.ToolchainError: UNABLE,
    errors.CompileError: UNABLE,
    errors.CacheDirectoryError: UNABLE,
    errors.LoadError: UNABLE,
    errors.BundleError: UNABLE,
    UnableError: UNABLE,
    KeyboardInterrupt: INTERRUPTED,
    BrokenPipeError: BROKEN_PIPE,
    OSError: UNABLE,
}


def commands() -> Iterator[tuple[str, ModuleType]]:
    """The commands by name, found in the folder of this package."""
    package = importlib.import_module(__package__)
    for info in pkgutil.iter_modules(package.__path__):
        if not info.name.startswith("_"):
            module = importlib.import_module(f"{__package__}.{info.name}")
            yield info.name.replace("_", "-"), module


def _exit_codes() -> str:
    """The table of the package's docstring."""
    text = importlib.import_module(__package__).__doc__ or ""
    return "exit codes:" + text.partition("Exit codes::")[2].replace("\n\n", "\n", 1)


def build_parser() -> argparse.ArgumentParser:
    """The argparse tree of all commands."""
    parser = argparse.ArgumentParser(
        prog="precast",
        description="CUDA kernels as finished parts: what is there, what fits, what is missing.",
        epilog=_exit_codes(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"precast {__version__}")
    tree = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, module in commands():
        text = (module.__doc__ or "").strip()
        sub = tree.add_parser(
            name,
            help=text.partition("\n")[0].rstrip("."),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **getattr(module, "PARSER_OPTIONS", {}),
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``precast`` with ``argv`` (default: the process's) and return the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return USAGE
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except tuple(_USER_ERRORS) as error:
        return _report(error)


def _report(error: BaseException) -> int:
    if isinstance(error, BrokenPipeError):
        # Whoever read the output has left; what Python still flushes at exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    text = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
    print(f"error: {text}", file=sys.stderr)
    return next(code for kind, code in _USER_ERRORS.items() if isinstance(error, kind))
