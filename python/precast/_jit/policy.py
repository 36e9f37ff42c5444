# SPDX-License-Identifier: Apache-2.0
"""Whether a compile may happen now: ``PRECAST_JIT`` and ``precast.freeze()``."""

from __future__ import annotations

from precast._base import env as _env

_frozen = False


def freeze() -> None:
    """Make every later compile of this process an error.

    Call it at the end of start-up, after :func:`precast.preload`. A kernel that would have to be
    compiled then raises :class:`~precast.errors.MissingKernelError` instead of delaying a request.
    Kernels that are prebuilt or cached still load.
    """
    global _frozen
    _frozen = True


def refusal() -> str | None:
    """Why nothing may be compiled now, or None."""
    if _frozen:
        return "precast.freeze() was called"
    if _env.JIT() == "error":
        return "PRECAST_JIT=error"
    return None
