# SPDX-License-Identifier: Apache-2.0
"""The installed tvm-ffi, without importing it (which would pull torch in)."""

from __future__ import annotations

import importlib.metadata
import re

_FINAL = re.compile(r"\d+(\.\d+)*")


def version() -> str:
    """The installed version; an empty string if there is none."""
    try:
        return importlib.metadata.version("apache-tvm-ffi")
    except importlib.metadata.PackageNotFoundError:
        return ""


def range_problem(low: str, high: str) -> str | None:
    """Why the installed tvm-ffi cannot serve a module built for ``[low, high)``, or None."""
    installed = version()
    base = installed.partition(".post")[0]  # A post-release orders right after its release.
    release, least, bound = (_release(text) for text in (base, low, high))
    if release and least and bound and least <= release < bound:
        return None
    # Other versions follow the rules of packaging. The usual case avoids its import, which costs
    # more than everything else in a first call.
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        # A specifier, as in pip: unlike the operator < of Version, <0.2 excludes 0.2rc1.
        accepted = SpecifierSet(f">={Version(low)},<{Version(high)}")
        if installed and accepted.contains(Version(installed), prereleases=True):
            return None
    except (InvalidSpecifier, InvalidVersion) as error:
        return f"its tvm-ffi range [{low}, {high}) cannot be read ({error})"
    return (
        f"needs apache-tvm-ffi in [{low}, {high}), installed is {installed or 'none'}. "
        f'Fix: pip install "apache-tvm-ffi>={low},<{high}"'
    )


def _release(text: str) -> tuple[int, ...] | None:
    """The numbers of a final release, without trailing zeros; None for any other version."""
    if not _FINAL.fullmatch(text):
        return None
    numbers = [int(number) for number in text.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
