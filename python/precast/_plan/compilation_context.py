# SPDX-License-Identifier: Apache-2.0
"""Which targets to compile for."""

from __future__ import annotations

import re
from collections.abc import Iterable

from precast._base import env as _env
from precast._plan.config import Arch
from precast._plan.places import source_root
from precast._plan.planner import Plan

__all__ = ["CompilationContext"]


class CompilationContext:
    """The compile targets of this process.

    Attributes
    ----------
    TARGET_CUDA_ARCHS : set of (int, str)
        Major version and minor version with suffix, ``{(8, "0"), (9, "0a")}``. From
        ``PRECAST_CUDA_ARCH_LIST`` if it is set, otherwise from the GPUs present. A capability
        without a suffix gets the one of ``aot_configs/build.toml``; an explicit one is kept.

    Raises
    ------
    ValueError
        If ``PRECAST_CUDA_ARCH_LIST`` has an entry that is not a capability, or if no target serves
        an entry or a GPU that is present. The message quotes it and lists what is legal.
    """

    def __init__(self, plan: Plan | None = None) -> None:
        self._plan = plan or Plan.load(source_root())
        self._archs = self._listed() or self._present()
        self.TARGET_CUDA_ARCHS: set[tuple[int, str]] = {_split(a) for a in self._archs}

    @property
    def archs(self) -> list[Arch]:
        """The targets as rows of the plan, lowest first."""
        return sorted(self._archs, key=lambda arch: arch.number)

    def _listed(self) -> list[Arch]:
        words = [w for w in re.split(r"[\s,;]+", _env.CUDA_ARCH_LIST()) if w]
        for word in words:
            if re.fullmatch(r"\d+\.\d[af]?", word) is None:
                raise ValueError(
                    f"PRECAST_CUDA_ARCH_LIST: {word!r} is not a compute capability; legal: "
                    f"entries such as '8.0' or '9.0a', separated by spaces, commas or semicolons"
                )
        return self._plan.archs(words, any_suffix=True)

    def _present(self) -> list[Arch]:
        from precast._base.torch import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        capabilities = (torch.cuda.get_device_capability(i) for i in range(count))
        return self._plan.archs(f"{major}.{minor}" for major, minor in capabilities)

    def get_nvcc_flags_list(
        self, supported_major_versions: Iterable[int] | None = None
    ) -> list[str]:
        """The ``-gencode`` flags of the targets whose major version qualifies.

        Parameters
        ----------
        supported_major_versions : iterable of int, optional
            Majors that the kernel supports; None takes every target. A list never extends to
            later majors by itself.

        Raises
        ------
        RuntimeError
            If no target is left.
        """
        majors = None if supported_major_versions is None else list(supported_major_versions)
        flags = [
            f"-gencode={arch.gencode}"
            for arch in self.archs
            if majors is None or _split(arch)[0] in majors
        ]
        if not flags:
            raise RuntimeError(
                f"No supported CUDA architectures found for major versions {majors}. Targets: "
                f"{', '.join(a.target for a in self.archs) or 'none (no GPU present)'}. Fix: set "
                f"PRECAST_CUDA_ARCH_LIST"
            )
        return flags


def check_cuda_arch() -> None:
    """Raise unless there is a GPU, or an entry of ``PRECAST_CUDA_ARCH_LIST``, to compile for.

    Raises
    ------
    RuntimeError
        If there is none, or if no target serves one that is there.
    """
    try:
        archs = CompilationContext().archs
    except ValueError as error:
        raise RuntimeError(str(error)) from None
    if not archs:
        raise RuntimeError(
            "there is no GPU, and PRECAST_CUDA_ARCH_LIST names no target. Fix: set it, or look at "
            "what torch.cuda.is_available() says"
        )


def _split(arch: Arch) -> tuple[int, str]:
    major, _, minor = arch.target.partition(".")
    return int(major), minor
