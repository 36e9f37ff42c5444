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
    from packaging.version import InvalidVersion, Version

    installed = version()
    try:
        if installed and Version(low) <= Version(installed) < Version(high):
            return None
    except InvalidVersion as error:
        return f"its tvm-ffi range [{low}, {high}) cannot be read ({error})"
    return (
        f"needs apache-tvm-ffi in [{low}, {high}), installed is {installed or 'none'}. "
        f'Fix: pip install "apache-tvm-ffi>={low},<{high}"'
    )
