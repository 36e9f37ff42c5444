# SPDX-License-Identifier: Apache-2.0
"""Run one command, and turn errors into a message with a fix and an exit code."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from precast._base import errors
from precast.cli import _output
from precast.cli._output import UnableError, UsageError
from precast.cli._parser import asks_for_json, build_parser, corrected, parse

#: What precast requires, by the names that are imported.
_REQUIRED = {name: name for name in ("filelock", "packaging", "platformdirs", "tomli", "torch")}
_REQUIRED["tvm_ffi"] = "apache-tvm-ffi"

OK, FAILED, USAGE, UNABLE, BUG, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 3, 70, 130, 141

#: Exit code and default fix for each kind of error; None if its message always has one.
_ERRORS: dict[type[BaseException], tuple[int, str | None]] = {
    UsageError: (USAGE, "{help}"),
    errors.ConfigError: (USAGE, "{help}"),
    errors.UnsupportedConfigError: (USAGE, "{help}"),
    errors.EnvironmentVariableError: (USAGE, "unset {variable}, or set it to a legal value"),
    errors.ProviderError: (FAILED, "precast verify"),
    errors.MissingJITCacheError: (UNABLE, "precast doctor"),
    errors.ToolchainError: (UNABLE, "precast doctor"),
    errors.CompileError: (UNABLE, "precast doctor"),
    errors.CacheDirectoryError: (UNABLE, "precast doctor"),
    errors.LoadError: (UNABLE, "precast verify"),
    errors.BundleError: (UNABLE, "name the missing wheels with --find-links or --wheel: {help}"),
    UnableError: (UNABLE, "precast doctor"),
    OSError: (UNABLE, "free space or permit writing there, or name another place: {help}"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``precast`` with ``argv`` (default: the process's) and return the exit code."""
    _complete_streams()
    _output.forget_json()
    words = list(sys.argv[1:] if argv is None else argv)
    if "_ARGCOMPLETE" in os.environ:
        from precast.cli._completers import answer

        answer(build_parser())
    try:
        args = parse(words)
        if args.command is None:
            build_parser().print_help(sys.stderr)
            return USAGE
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return _tell(INTERRUPTED, "interrupted", None, words)
    except Exception as error:
        return _report(error, words)


def _complete_streams() -> None:
    """Output that was closed goes nowhere; what an encoding lacks is written as an escape."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, nowhere)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Discard what Python flushes at exit: the pipe is closed, or the disk is full."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: Exception, words: Sequence[str]) -> int:
    if isinstance(error, ImportError):
        package = _REQUIRED.get((error.name or "").partition(".")[0])
        if package is not None:
            error = UnableError(
                f"{package} is missing, too old or damaged ({error}). Fix: pip install {package}"
            )
    kind = next((kind for kind in _ERRORS if isinstance(error, kind)), None)
    if kind is None:
        traceback.print_exc()
        what = traceback.format_exception_only(type(error), error)[-1].strip()
        report = "report it with the lines above and the output of: precast collect-env"
        return _tell(BUG, "this is a bug in precast", report, words, what)
    text = str(error)
    code, last_resort = _ERRORS[kind]
    fix = None
    if "Fix:" not in text and last_resort is not None:
        helped = getattr(error, "help_of", None) or f"precast {words[0]}"
        fallback = last_resort.format(help=f"{helped} --help", variable=text.partition("=")[0])
        fix = corrected(text, words) or fallback
    return _tell(code, text, fix, words)


def _tell(
    code: int, text: str, fix: str | None, words: Sequence[str], what: str | None = None
) -> int:
    """Print an error to standard error, and with ``--json`` as an object to standard output, too.

    ``what`` is the exception of a bug, whose traceback was printed. Returns ``code``.
    """
    fix_line = "" if fix is None else f"Fix: {fix}"
    # A bug's fix stands on the line of its error, below the traceback.
    print(f"error: {text}" + (f". {fix_line}" if what else ""), file=sys.stderr)
    if fix_line and not what:
        print(fix_line, file=sys.stderr)
    try:
        if asks_for_json(words) and not _output.has_printed_json():
            message, _, own_fix = text.partition("Fix:")
            shown = message.strip() if what is None else f"{text}: {what}"
            _output.print_json(
                {"error": shown, "fix": fix or own_fix.strip() or None, "exit_code": code}
            )
        sys.stdout.flush()
    except OSError:  # The pipe is closed, or the disk is full.
        _drop_output()
    return code
