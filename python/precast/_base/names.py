# SPDX-License-Identifier: Apache-2.0
"""Names of modules and of what carries them; everything in the package takes them from here."""

from __future__ import annotations

from collections.abc import Mapping


def module_name(op: str, axes: Mapping[str, object]) -> str:
    """The op and its axes in declared order: ``norm__dtype_bf16``."""
    return "__".join([op, *(f"{axis}_{axis_word(value)}" for axis, value in axes.items())])


def provider_extra(cuda_major: int, arch: str) -> str:
    """The extra of precast that brings the modules of one target: ``cu13-sm90a``."""
    return f"cu{cuda_major}-{arch}"


def provider_name(cuda_major: int, arch: str) -> str:
    """The distribution behind that extra."""
    return f"precast-jit-cache-{provider_extra(cuda_major, arch)}"


def axis_word(value: object) -> str:
    """An axis value as names and macros spell it; booleans are 0 and 1."""
    return str(int(value)) if isinstance(value, bool) else str(value)
