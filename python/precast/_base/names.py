# SPDX-License-Identifier: Apache-2.0
"""The names of modules, of providers, and of the extras that install them."""

from __future__ import annotations

from collections.abc import Mapping


def module_name(op: str, axes: Mapping[str, object]) -> str:
    """The name of a module, from its op and its axes in declared order: ``norm__dtype_bf16``."""
    return "__".join([op, *(f"{axis}_{axis_word(value)}" for axis, value in axes.items())])


def provider_extra(cuda_major: int, arch: str) -> str:
    """The extra of precast that installs the modules of one target: ``cu13-sm90a``."""
    return f"cu{cuda_major}-{arch}"


def provider_name(cuda_major: int, arch: str) -> str:
    """The distribution that this extra installs."""
    return f"precast-jit-cache-{provider_extra(cuda_major, arch)}"


def axis_word(value: object) -> str:
    """An axis value as it stands in names and macros; booleans are 0 and 1."""
    return str(int(value)) if isinstance(value, bool) else str(value)
