# SPDX-License-Identifier: Apache-2.0
"""The installed tvm-ffi, without importing it (which would pull torch in)."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """The installed version; an empty string if there is none."""
    try:
        return importlib.metadata.version("apache-tvm-ffi")
    except importlib.metadata.PackageNotFoundError:
        return ""


def range_problem(low: str, high: str) -> str | None:
    """Why the installed tvm-ffi cannot serve a module built for ``[low, high)``, or None."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import InvalidVersion, Version

    installed = version()
    try:
        # A specifier, as pip reads it: unlike Version's <, it leaves out 0.2rc1 below 0.2.
        accepted = SpecifierSet(f">={Version(low)},<{Version(high)}")
        if installed and accepted.contains(Version(installed), prereleases=True):
            return None
    except (InvalidSpecifier, InvalidVersion) as error:
        return f"its tvm-ffi range [{low}, {high}) cannot be read ({error})"
    return (
        f"needs apache-tvm-ffi in [{low}, {high}), installed is {installed or 'none'}. "
        f'Fix: pip install "apache-tvm-ffi>={low},<{high}"'
    )
