# SPDX-License-Identifier: Apache-2.0
"""Pick the module that serves a call: prebuilt first, then cached, then compiled, else an error.

At import the manifests are read and every planned module is bound, for each compute capability, to
the files that may serve it. A call looks its own device up and loads lazily. Nothing here writes,
compiles, or imports torch or tvm-ffi before a kernel is asked for.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from precast._base.errors import (
    LoadError,
    MissingJITCacheError,
    MissingKernelError,
    ToolchainError,
    UnsupportedTargetError,
)
from precast._base.log import get_logger
from precast._base.names import module_name, provider_name
from precast._base.trust import check_contents, distrust
from precast._base.version import __version__
from precast._plan.axes import in_declared_order, names_of
from precast._runtime.cudart import driver_cuda_version, open_cudart
from precast._runtime.manifest import MANIFEST_NAME, Manifest, ModuleRow
from precast._runtime.providers import Provider, find_providers, provider_problem

if TYPE_CHECKING:
    import tvm_ffi

    from precast._plan.config import Arch
    from precast._plan.planner import Plan
    from precast._plan.spec import JitSpec


class Step(NamedTuple):
    """One candidate that the loader looked at, and its verdict.

    ``fault`` marks a provider that should have served and could not: damaged, stale or unsuited to
    this machine. What is loaded in its place is never taken in silence.
    """

    source: str
    place: str
    accepted: bool
    reason: str
    fault: bool = False

    def __str__(self) -> str:
        verdict = "accepted" if self.accepted else "rejected"
        where = f" ({self.place})" if self.place else ""
        return f"{self.source}{where}: {verdict}: {self.reason}"


class Resolution(NamedTuple):
    """Which library serves a module on a device, and how that was decided."""

    module: str
    capability: str
    path: Path | None
    cuda_major: int
    steps: tuple[Step, ...]


class _Binding(NamedTuple):
    provider: Provider
    row: ModuleRow


class Loader:
    """The providers, the plan, and the modules that are loaded in this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._loaded: dict[tuple[str, str], tuple[Resolution, tvm_ffi.Module]] = {}
        self._warned: set[str] = set()
        self.bind()

    # -- binding ----------------------------------------------------------------------------------

    def bind(self) -> None:
        """Read plan and manifests, and bind every planned module for every capability."""
        self.document = _plan_document()
        self.providers = find_providers()
        self.table: dict[tuple[str, str], list[_Binding]] = {}
        for provider in self.providers:
            if provider.manifest is not None:
                self._bind_provider(provider, provider.manifest)
        for bindings in self.table.values():
            bindings.sort(key=_preference)

    def _bind_provider(self, provider: Provider, manifest: Manifest) -> None:
        modules = self.document["modules"]
        major = f"cu{manifest.cuda_major}"
        for row in manifest.modules:
            planned = modules.get(row.name, {}).get("fingerprints", {}).get(major, {})
            if planned.get(row.arch) == row.fingerprint:
                for capability in self._served(row):
                    bindings = self.table.setdefault((row.name, capability), [])
                    bindings.append(_Binding(provider, row))

    def _served(self, row: ModuleRow) -> list[str]:
        """The capabilities of the devices that take this module."""
        archs = self.document["archs"]
        serves: list[str] = archs.get(row.arch, {}).get("serves", [])
        planned = self.document["modules"].get(row.name)
        op = self.document["ops"][planned["op"]] if planned else {}
        if not op.get("own_target"):
            return serves
        better = [a for a in op["archs"] if _number(a) > _number(row.arch)]
        return [c for c in serves if not any(c in archs[a]["serves"] for a in better)]

    def axis_names(self, op: str) -> list[str]:
        """The axes of an op in declared order."""
        return [name for key in self.document["ops"][op]["axes"] for name in names_of(key)]

    # -- resolution -------------------------------------------------------------------------------

    def resolve(self, op: str, axes: Mapping[str, object], capability: str) -> Resolution:
        """Walk the sources in order without compiling; the last step tells what JIT would do."""
        name, axes = self._name(op, axes)
        steps: list[Step] = []
        for binding in self.table.get((name, capability), ()):
            path = binding.provider.root / binding.row.file
            problem = self._problem(binding, path)
            place = f"{binding.provider.title}, {binding.row.file}"
            if problem is None:
                steps.append(Step(binding.provider.source, place, True, "fingerprint matches"))
                major = _manifest(binding.provider).cuda_major
                return Resolution(name, capability, path, major, tuple(steps))
            steps.append(Step(binding.provider.source, place, False, problem, fault=True))
        steps += self._unbound(name, capability)
        return self._resolve_jit(op, axes, name, capability, steps)

    def _name(self, op: str, axes: Mapping[str, object]) -> tuple[str, Mapping[str, object]]:
        """The module's name; the plan's table of axes is enough, no file is read."""
        declared = self.document["ops"].get(op, {}).get("axes", {})
        ordered: Mapping[str, Any] | None = in_declared_order(declared, axes)
        if ordered is None:
            ordered = plan().axes(op, axes)
        return module_name(op, ordered), ordered

    def _problem(self, binding: _Binding, path: Path) -> str | None:
        """Why a bound file cannot be loaded, or None."""
        manifest = _manifest(binding.provider)
        record = binding.provider.root / MANIFEST_NAME
        problem = provider_problem(manifest) or distrust(path, record, must_be_own=False)
        mend = binding.provider.mend(f"{manifest.distribution}=={manifest.version}")
        return problem or check_contents(path, binding.row.size, binding.row.sha256, mend)

    def _unbound(self, name: str, capability: str) -> list[Step]:
        """Why providers that seem to hold the module were not bound to this capability."""
        steps = []
        planned = self.document["modules"].get(name, {}).get("fingerprints", {})
        for provider in self.providers:
            if provider.manifest is None:
                place, problem = str(provider.root), str(provider.problem)
                steps.append(Step(provider.source, place, False, problem, fault=True))
                continue
            manifest = provider.manifest
            rows = [row for row in manifest.modules if row.name == name]
            bound = {b.row.arch for b in self.table.get((name, capability), ()) if b[0] is provider}
            if not rows:
                steps.append(Step(provider.source, provider.title, False, f"does not hold {name}"))
            for row in rows:
                serves = self._served(row)
                wanted = planned.get(f"cu{manifest.cuda_major}", {}).get(row.arch)
                if row.arch in bound:
                    continue
                fault = False
                if serves and capability not in serves:
                    reason = f"{row.arch} serves {', '.join(serves)}, not {capability}"
                elif wanted is None:
                    reason = f"this precast {__version__} does not plan {name} for {row.arch}"
                else:
                    fault = True
                    again = provider_name(manifest.cuda_major, row.arch)
                    reason = (
                        f"its fingerprint {row.fingerprint[:12]} is not the {wanted[:12]} of this "
                        f"precast {__version__}: it was built from other sources. "
                        f"Fix: {provider.mend(f'{again}=={__version__}')}"
                    )
                place = f"{provider.title}, {row.file}"
                steps.append(Step(provider.source, place, False, reason, fault))
        return steps

    def _resolve_jit(
        self,
        op: str,
        axes: Mapping[str, object],
        name: str,
        capability: str,
        steps: list[Step],
    ) -> Resolution:
        from precast._jit import cache, policy
        from precast._jit.env import cache_dir
        from precast._jit.toolchain import find_toolchain

        target = plan().target(op, capability)
        major = jit_cuda_major(target)
        spec = plan().spec(op, axes, capability, major)
        refusal = policy.refusal()
        if refusal is not None:
            compiler = Step("JIT", "", False, f"compiling is forbidden ({refusal})")
        else:
            try:
                toolchain = find_toolchain(spec.arch, major, spec.tvm_ffi_range)
            except ToolchainError as error:
                compiler = Step("JIT", "", False, str(error).replace("\n", " "))
            else:
                compiler = Step("JIT", str(toolchain.toolkit), True, "would be compiled")
        # What cannot be compiled here may have been compiled elsewhere, for any CUDA that runs.
        majors = [major] if compiler.accepted else [major, *_older_majors(target, major)]
        refused = False
        for cached in majors:
            found = cache.find(spec if cached == major else plan().spec(op, axes, target, cached))
            refused = refused or bool(found.refused)
            steps += [Step("JIT cache", str(folder), False, why) for folder, why in found.refused]
            if found.path is not None:
                steps.append(Step("JIT cache", str(found.path), True, "fingerprint matches"))
                return Resolution(name, capability, found.path, cached, tuple(steps))
        if not refused:
            steps.append(Step("JIT cache", str(cache_dir()), False, f"holds no build of {name}"))
        return Resolution(name, capability, None, major, (*steps, compiler))

    # -- loading ----------------------------------------------------------------------------------

    def load(self, op: str, axes: Mapping[str, object], device: int) -> tvm_ffi.Module:
        """The module of one configuration for one device, compiled first if policy allows."""
        capability = _device_capability(device)
        name, axes = self._name(op, axes)
        loaded = self._loaded.get((name, capability))
        if loaded is None:
            with self._lock:
                loaded = self._loaded.get((name, capability))
                if loaded is None:
                    loaded = self._load(op, axes, device, capability)
                    self._loaded[name, capability] = loaded
        return loaded[1]

    def _load(
        self, op: str, axes: Mapping[str, object], device: int, capability: str
    ) -> tuple[Resolution, tvm_ffi.Module]:
        self.check_device(device)
        resolution = self.resolve(op, axes, capability)
        self._warn(resolution)
        path = resolution.path
        if path is None:
            spec = plan().spec(op, axes, capability, resolution.cuda_major)
            if not resolution.steps[-1].accepted:
                raise MissingKernelError(self._missing(resolution, spec, device), spec)
            try:
                path = spec.build(_why(resolution))
            except MissingJITCacheError as error:
                raise MissingKernelError(self._missing(resolution, spec, device), spec) from error
            resolution = resolution._replace(path=path)
        return resolution, load_library(path, resolution.cuda_major)

    def check_device(self, device: int) -> None:
        """Raise UnsupportedTargetError, a ValueError, if no target serves the device."""
        capability = _device_capability(device)
        known = [c for arch in self.document["archs"].values() for c in arch["serves"]]
        if capability not in known:
            raise UnsupportedTargetError(
                f"{_device_name(device)} has compute capability {capability}, which no target of "
                f"precast {__version__} serves; legal: {', '.join(dict.fromkeys(known))}. Fix: use "
                f"another GPU, or a release of precast that knows this one"
            )

    def _warn(self, resolution: Resolution) -> None:
        """Say once for each faulty file that something else is taken in its place, and why."""
        for step in resolution.steps:
            if step.fault and step.place not in self._warned:
                self._warned.add(step.place)
                get_logger().warning("%s", step)

    def _missing(self, resolution: Resolution, spec: JitSpec, device: int) -> str:
        lines = [
            f"no kernel {resolution.module} for {_device_name(device)} (compute capability "
            f"{resolution.capability}). Looked at:"
        ]
        lines += [f"  {step}" for step in resolution.steps]
        near = [n for n in self.document["modules"] if n.startswith(f"{spec.op}__")]
        if resolution.module not in near and near:
            lines.append(f"Prebuilt configurations of {spec.op}: {', '.join(near)}.")
        if spec.is_aot:
            extra = f"cu{resolution.cuda_major}-{spec.arch.name}"
            lines.append(f'Fix: pip install "precast[{extra}]=={__version__}"')
        else:
            lines.append('Fix: allow JIT: PRECAST_JIT=auto, with pip install "precast[jit]"')
        return "\n".join(lines)

    def resolution(self, op: str, axes: Mapping[str, object], device: int) -> Resolution:
        """How a loaded module was found; KeyError if it is not loaded."""
        return self._loaded[self._name(op, axes)[0], _device_capability(device)][0]

    def loaded(self) -> list[Resolution]:
        """What is loaded in this process, in order of loading."""
        return [resolution for resolution, _ in self._loaded.values()]


def _why(resolution: Resolution) -> str:
    refused = [step for step in resolution.steps if not step.accepted]
    prebuilt = [str(s) for s in refused if not s.source.startswith("JIT")]
    return "; ".join(prebuilt) or "no provider of prebuilt modules is installed"


def _preference(binding: _Binding) -> tuple[bool, int, int]:
    """A developer's build tree first, then the nearest target, then the newest CUDA."""
    built = binding.provider.source == "PRECAST_KERNEL_DIR"
    return not built, -_number(binding.row.arch), -_manifest(binding.provider).cuda_major


def _number(arch: str) -> int:
    """90 of ``sm90a``."""
    return int("".join(filter(str.isdigit, arch)))


def _manifest(provider: Provider) -> Manifest:
    assert provider.manifest is not None
    return provider.manifest


# -- process-wide state ---------------------------------------------------------------------------


def _plan_document() -> dict[str, Any]:
    """The plan that the wheel ships; a checkout computes it."""
    shipped = Path(__file__).resolve().parents[1] / "data" / "plan.json"
    if shipped.is_file():
        document: dict[str, Any] = json.loads(shipped.read_bytes())
        return document
    return plan().document


@functools.cache
def plan() -> Plan:
    """The configuration space of the installed sources."""
    from precast._jit.env import source_root
    from precast._plan.planner import Plan

    return Plan.load(source_root())


def jit_cuda_major(arch: Arch) -> int:
    """The CUDA major that a compile for ``arch`` would have; without a compiler, the driver's."""
    from precast._jit.toolchain import find_toolkit

    try:
        return find_toolkit(arch).major
    except ToolchainError:
        newest = (driver_cuda_version() or (max(plan().build.cuda), 0))[0]
        return max((m for m in plan().build.cuda if m <= newest), default=max(plan().build.cuda))


def _older_majors(arch: Arch, newest: int) -> list[int]:
    """The other CUDA majors whose builds for ``arch`` run where ``newest`` does, newest first."""
    known = sorted(plan().build.cuda, reverse=True)
    return [major for major in known if arch.cuda[0] <= major < newest]


def _device_capability(device: int) -> str:
    from precast.utils import get_compute_capability

    major, minor = get_compute_capability(device)
    return f"{major}.{minor}"


def _device_name(device: int) -> str:
    from precast._base.torch import torch

    return f"cuda:{device} ({torch.cuda.get_device_name(device)})"


def load_library(path: Path, cuda_major: int) -> tvm_ffi.Module:
    """Open a module's library.

    libcudart is opened by its full path first, whether torch has loaded one already or not: a
    module names it, but does not say where it is.

    Raises
    ------
    LoadError
        If libcudart is missing or the library does not open; the message gives the linker's words.
    """
    row = loader.document["cuda"][str(cuda_major)]
    open_cudart(row["cudart"], row["cudart_wheel"])
    try:
        module: tvm_ffi.Module = _import_tvm_ffi().load_module(str(path))
    except Exception as error:
        raise LoadError(f"{path} was accepted but did not load: {error}") from error
    return module


@functools.cache
def _import_tvm_ffi() -> Any:
    import tvm_ffi

    from precast._base.errors import FFI_KINDS

    for kind in FFI_KINDS:
        tvm_ffi.register_error(kind.__name__, kind)
    return tvm_ffi


def get_function(module: tvm_ffi.Module, export: str) -> Any:
    """An exported function; LoadError if the library lacks it."""
    try:
        return module.get_function(export)
    except Exception as error:
        raise LoadError(f"the library has no function {export!r}: {error}") from error


loader = Loader()
