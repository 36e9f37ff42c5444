# SPDX-License-Identifier: Apache-2.0
"""Build the prebuilt set of a profile directly, by the commands that JIT uses.

::

    python -m precast.aot --profile core --arch "8.0 9.0a 10.0f" --out-dir D

is ``precast build`` with the same arguments. ``D`` is then a provider: ``PRECAST_KERNEL_DIR=D``, or
a folder on ``PRECAST_PROVIDER_PATH``. A run that was stopped goes on where it was: a module whose
fingerprint, compiler and contents are as wanted is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from precast._runtime.aot import build, is_built

__all__ = [
    "build",
    "is_built",
    "main",
]


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m precast.aot``: the command ``precast build``; returns its exit code."""
    from precast.cli import main

    return main(["build", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    raise SystemExit(main())
