# SPDX-License-Identifier: Apache-2.0
"""Read and check ``aot_configs/build.toml``: flags, targets, CUDA majors and profiles."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from precast._base.errors import ConfigError, UnsupportedTargetError
from precast._plan import keys
from precast._plan.table import major_key, read_table, release, version


@dataclass(frozen=True)
class Arch:
    """One compile target and the devices that its machine code runs on."""

    name: str
    target: str
    serves: tuple[str, ...]
    cuda: tuple[int, int]
    shared_kib: int

    @property
    def number(self) -> int:
        """The target as one integer, 90 for ``9.0a``."""
        return int(re.sub(r"[^0-9]", "", self.target))

    @property
    def sass(self) -> str:
        """The name that nvcc and cuobjdump use, ``sm_90a``."""
        return "sm_" + self.target.replace(".", "")

    @property
    def gencode(self) -> str:
        return f"arch=compute_{self.sass[3:]},code={self.sass}"


@dataclass(frozen=True)
class CudaMajor:
    """What modules of one CUDA major need at run time."""

    major: int
    min_driver: str
    cudart: str
    cudart_wheel: str
    toolkit_on_pypi: bool = False


@dataclass(frozen=True)
class Profile:
    name: str
    description: str
    include: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()


@dataclass(frozen=True)
class BuildConfig:
    """``aot_configs/build.toml``."""

    cuda_flags: tuple[str, ...]
    cuda_major_flags: Mapping[int, tuple[str, ...]]
    host_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    version_script: str
    tvm_ffi_min: str
    tvm_ffi_max_exclusive: str
    cute_dsl: str
    cuda: Mapping[int, CudaMajor]
    archs: Mapping[str, Arch]
    profiles: Mapping[str, Profile]

    def accepted(self, capability: str) -> list[Arch]:
        """Targets whose code runs on a device of this capability, best first."""
        serving = [a for a in self.archs.values() if capability in a.serves]
        return sorted(serving, key=lambda a: a.number, reverse=True)

    @property
    def capabilities(self) -> list[str]:
        """The compute capabilities that some target serves, lowest first."""
        served = {capability for arch in self.archs.values() for capability in arch.serves}
        return sorted(served, key=lambda capability: int(capability.replace(".", "")))

    @property
    def newest_cuda(self) -> int:
        """The CUDA major that is taken where nothing says which."""
        return max(self.cuda)

    def arch(self, name: str, *, any_suffix: bool = False) -> Arch:
        """A target by folder name (``sm90a``) or by capability with or without suffix (``9.0a``).

        Parameters
        ----------
        name : str
            A capability without a suffix takes its best target: ``12.1`` is ``sm120f``.
        any_suffix : bool
            Whether a suffix that no target has makes a target of its own, which is never prebuilt:
            ``10.0a``, for the compiler flags of a user's own kernels.

        Raises
        ------
        UnsupportedTargetError
            If no target serves the capability, or no target has the suffix. It is a ValueError.
        ValueError
            If ``name`` is not a target at all.
        """
        if name in self.archs:
            return self.archs[name]
        capability, suffix = split_target(name, self.archs)
        accepted = self.accepted(capability)
        if not accepted:
            raise UnsupportedTargetError(
                f"{name!r}: no target of precast serves compute capability {capability}; legal: "
                f"{', '.join(self.capabilities)}"
            )
        if not suffix:
            return accepted[0]
        target = capability + suffix
        for arch in accepted:
            if arch.target == target:
                return arch
        if any_suffix:
            name = "sm" + target.replace(".", "")
            return replace(accepted[0], name=name, target=target, serves=(capability,))
        raise UnsupportedTargetError(
            f"{name!r}: precast has no target {target}; legal: "
            f"{', '.join(arch.target for arch in self.archs.values())}, or a capability without a "
            f"suffix"
        )

    def profile_names(self, name: str) -> set[str]:
        """The profile and all that it includes."""
        if name not in self.profiles:
            raise ConfigError(f"unknown profile {name!r}; legal: {', '.join(self.profiles)}")
        names, todo = set(), [name]
        while todo:
            current = todo.pop()
            if current not in names:
                names.add(current)
                todo.extend(self.profiles[current].include)
        return names


def split_target(name: str, legal: Iterable[str]) -> tuple[str, str]:
    """The capability and the suffix of ``9.0a``, ``90a`` or ``sm_90a``: ``("9.0", "a")``.

    Raises
    ------
    ValueError
        If it is none of these; the message lists ``legal`` targets.
    """
    match = re.fullmatch(r"(?:sm_?)?(\d+)\.?(\d)([af]?)", name.strip())
    if match is None:
        raise ValueError(
            f"{name!r} is not a CUDA target; legal: {', '.join(legal)}, or a capability such as "
            f"'9.0a'"
        )
    return f"{int(match[1])}.{match[2]}", match[3]


def read_build(path: Path, root: Path) -> BuildConfig:
    top = read_table(path).only(*keys.BUILD)
    ffi = top.table("tvm_ffi").only(*keys.TVM_FFI)
    cute_dsl = top.table("cute_dsl").only(*keys.CUTE_DSL)
    flags = top.table("flags").only(*keys.FLAGS)

    cuda = {}
    for key, row in top.rows("cuda"):
        row.only(*keys.CUDA)
        major = major_key(top.table("cuda"), key)
        cuda[major] = CudaMajor(
            major,
            row.text("min_driver"),
            row.text("cudart"),
            row.text("cudart_wheel"),
            row.flag("toolkit_on_pypi", False),
        )

    major_flags = {}
    for key, row in flags.rows("cuda_major", required=False):
        major = major_key(flags.table("cuda_major"), key)
        if major not in cuda:
            raise flags.table("cuda_major").fail(key, "unknown CUDA major", cuda)
        major_flags[major] = row.only(*keys.FLAGS_CUDA_MAJOR).texts("cuda")

    archs = {}
    for name, row in top.rows("archs"):
        row.only(*keys.ARCH)
        target = row.text("target")
        if re.fullmatch(r"\d+\.\d[af]?", target) is None:
            raise row.fail("target", f"got {target!r}", "a capability such as '9.0a'")
        if name != "sm" + target.replace(".", ""):
            raise row.fail("target", f"got {target!r}", f"the target that the name {name!r} says")
        serves = row.texts("serves")
        for capability in serves:
            if re.fullmatch(r"\d+\.\d", capability) is None:
                raise row.fail("serves", f"got {capability!r}", "capabilities such as '9.0'")
        if target.rstrip("af") not in serves:
            raise row.fail("serves", f"got {list(serves)}", f"its own {target.rstrip('af')} too")
        archs[name] = Arch(name, target, serves, version(row, "cuda"), row.number("shared_kib"))

    profile_rows = top.rows("profiles")
    names = [name for name, _ in profile_rows]
    profiles = {
        name: Profile(
            name,
            row.only(*keys.PROFILE).text("description"),
            row.choices("include", names, ()),
            row.choices("archs", archs, ()),
        )
        for name, row in profile_rows
    }

    script = flags.text("version_script")
    if not (root / script).is_file():
        raise flags.fail("version_script", f"{script!r} does not exist", "a file of the project")
    return BuildConfig(
        cuda_flags=flags.texts("cuda"),
        cuda_major_flags=major_flags,
        host_flags=flags.texts("host"),
        link_flags=flags.texts("link"),
        version_script=script,
        tvm_ffi_min=release(ffi, "min"),
        tvm_ffi_max_exclusive=release(ffi, "max_exclusive"),
        cute_dsl=release(cute_dsl, "version"),
        cuda=cuda,
        archs=archs,
        profiles=profiles,
    )
