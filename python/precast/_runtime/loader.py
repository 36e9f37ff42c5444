# SPDX-License-Identifier: Apache-2.0
"""Choose the module that serves a call: a prebuilt one, else a cached one, else compile it.

At import, the manifests are read and every planned module is bound, for each compute capability, to
the files that may serve it. A call looks up its device in this table and loads the module if it is
new. Nothing here writes, compiles, or imports torch or tvm-ffi before the first kernel is needed.
Functions import what only a first call needs, because every module costs time at import.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from precast._base.errors import MissingJITCacheError, MissingKernelError, UnsupportedTargetError
from precast._base.names import module_name, provider_name
from precast._base.version import __version__
from precast._plan.installed import plan, plan_document
from precast._runtime.manifest import MANIFEST_NAME, Manifest, ModuleRow
from precast._runtime.providers import Provider, find_providers, provider_problem
from precast._runtime.resolution import Resolution, Step

if TYPE_CHECKING:
    import tvm_ffi

    from precast._runtime.jit_spec import JitSpec


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
        self.document = plan_document()
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
        if not op.get("exact_arch"):
            return serves
        better = [a for a in op["archs"] if _number(a) > _number(row.arch)]
        return [c for c in serves if not any(c in archs[a]["serves"] for a in better)]

    def axis_names(self, op: str) -> list[str]:
        """The axes of an op in declared order."""
        from precast._plan.axis_keys import names_of

        return [name for key in self.document["ops"][op]["axes"] for name in names_of(key)]

    # -- resolution -------------------------------------------------------------------------------

    def resolve(self, op: str, axes: Mapping[str, object], capability: str) -> Resolution:
        """Ask the sources in order without compiling; the last step says what JIT would do."""
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
        from precast._runtime.jit_fallback import resolve_jit  # Imports the toolchain.

        return resolve_jit(plan(), op, axes, capability, steps)

    def _name(self, op: str, axes: Mapping[str, object]) -> tuple[str, Mapping[str, object]]:
        """The name of the module, from the axes in the plan's document without reading a file."""
        from precast._plan.axis_keys import in_declared_order

        declared = self.document["ops"].get(op, {}).get("axes", {})
        ordered: Mapping[str, Any] | None = in_declared_order(declared, axes)
        if ordered is None:
            ordered = plan().axes(op, axes)
        return module_name(op, ordered), ordered

    def _problem(self, binding: _Binding, path: Path) -> str | None:
        """Why a bound file cannot be loaded, or None."""
        from precast._base.files import path_problem
        from precast._base.trust import check_contents, trust_problem

        manifest = _manifest(binding.provider)
        record = binding.provider.root / MANIFEST_NAME
        problem = (
            provider_problem(manifest)
            or path_problem(path)
            or trust_problem(path, record, must_be_own=False)
        )
        fix_hint = binding.provider.fix_hint(f"{manifest.distribution}=={manifest.version}")
        row = binding.row
        return problem or check_contents(path, row.size, row.sha256, fix_hint, row.exports)

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
                        f"Fix: {provider.fix_hint(f'{again}=={__version__}')}"
                    )
                place = f"{provider.title}, {row.file}"
                steps.append(Step(provider.source, place, False, reason, fault))
        return steps

    # -- loading ----------------------------------------------------------------------------------

    def load(self, op: str, axes: Mapping[str, object], device: int) -> tvm_ffi.Module:
        """The loaded module of one configuration for one device, compiled if the policy allows."""
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
        from precast._runtime.library import import_ffi, load_library

        self.check_device(device)
        import_ffi()
        resolution = self.resolve(op, axes, capability)
        self._warn(resolution)
        path = resolution.path
        if path is None:
            from precast._runtime.jit_spec import JitSpec

            spec = JitSpec.of(plan().spec(op, axes, capability, resolution.cuda_major))
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
        """Warn once for each faulty file that something else is loaded in its place, and why."""
        for step in resolution.steps:
            if step.fault and step.place not in self._warned:
                self._warned.add(step.place)
                from precast._base.log import get_logger

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
            from precast._plan import install_hint

            target = {(spec.cuda_major, spec.arch.name): spec.arch.target}
            fix = install_hint.modules_command(target)
            if not install_hint.names_its_wheels(fix):
                fix += f"; with wheels in a folder: {install_hint.FROM_A_FOLDER}"
            lines.append(f"Fix: {fix}")
        else:
            lines.append('Fix: allow JIT: PRECAST_JIT=auto, with pip install "precast[jit]"')
        return "\n".join(lines)

    def resolution(self, op: str, axes: Mapping[str, object], device: int) -> Resolution:
        """How the library of a loaded module was chosen; KeyError if it is not loaded."""
        return self._loaded[self._name(op, axes)[0], _device_capability(device)][0]

    def loaded(self) -> list[Resolution]:
        """The modules that this process has loaded, in order of loading."""
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


def _device_capability(device: int) -> str:
    from precast._base.device import get_compute_capability

    major, minor = get_compute_capability(device)
    return f"{major}.{minor}"


def _device_name(device: int) -> str:
    from precast._base.torch import torch

    return f"cuda:{device} ({torch.cuda.get_device_name(device)})"


loader = Loader()


def _after_fork() -> None:
    """Another thread of the parent may have held the lock, and nobody would release it here."""
    loader._lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
