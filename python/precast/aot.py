# SPDX-License-Identifier: Apache-2.0
"""Build the prebuilt set of a profile directly, by the commands that JIT uses.

::

    python -m precast.aot --profile core --arch "8.0 9.0a 10.0f" --out-dir D

is ``precast build`` with the same arguments. ``D`` is then a provider: ``PRECAST_KERNEL_DIR=D``, or
a folder on ``PRECAST_PROVIDER_PATH``. A run that was stopped goes on where it was: a module whose
fingerprint, compiler and contents are as wanted is kept.
"""

from __future__ import annotations

from precast._runtime.aot import (
    build,
    is_built,
    main,
)

__all__ = [
    "build",
    "is_built",
    "main",
]

if __name__ == "__main__":
    raise SystemExit(main())
