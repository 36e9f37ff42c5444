# SPDX-License-Identifier: Apache-2.0
"""A machine for the loader: GPUs, driver and providers of fake modules, and no compiler."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cli_support import specs_of, write_provider

from precast._base import driver
from precast._jit import cuda_major, toolchain
from precast._jit.cache import META_NAME, Meta, module_folder
from precast._jit.env import cache_dir
from precast._plan.installed import plan
from precast._plan.spec import ModuleSpec
from precast._runtime import library, loader, providers
from precast._runtime.resolution import Resolution
from precast.errors import ToolchainError

BF16 = {"dtype": "bf16"}


class FakeModule:
    """What ``load_library`` returns here: knows its file and calls back with its path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get_function(self, name: str) -> Any:
        return lambda *args: (self.path, name, args)


class World:
    """Devices by index, the driver's CUDA, and where providers lie; ``loader()`` reads it anew."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.patch = patch
        self.devices = {0: "9.0", 1: "8.0", 2: "8.6", 3: "13.0"}
        self.opened: list[Path] = []
        self.driver: tuple[int, int] | None = (13, 0)
        self.compiler = False
        patch.setattr(loader, "_device_capability", lambda device: self.devices[device])
        patch.setattr(loader, "_device_name", lambda device: f"cuda:{device} (a GPU)")
        patch.setattr(library, "load_library", self._open)
        for module in (driver, cuda_major, toolchain):
            patch.setattr(module, "driver_cuda_version", lambda: self.driver)
        patch.setattr(toolchain, "find_toolkit", self._no_compiler)
        providers.provider_problem.cache_clear()

    def _open(self, path: Path, cuda_major: int) -> FakeModule:
        self.opened.append(path)
        return FakeModule(path)

    def _no_compiler(self, *args: object) -> Any:
        raise ToolchainError('no CUDA compiler: nothing there\nFix: pip install "precast[jit]"')

    def specs(
        self, *archs: str, ops: tuple[str, ...] = ("norm", "scale"), major: int = 13
    ) -> list[ModuleSpec]:
        return [s for s in specs_of(None, archs, major) if s.op in ops]

    def spec(self, dtype: str = "bf16", capability: str = "9.0", major: int = 13) -> ModuleSpec:
        return plan().spec("norm", {"dtype": dtype}, capability, major)

    def provide(
        self, name: str, *archs: str, source: str = "PROVIDER_PATH", **changes: Any
    ) -> Path:
        """A provider for these targets, and the environment that points to it."""
        import os

        root = self.folder / name
        major = changes.get("cuda_major", 13)
        write_provider(root, self.specs(*archs, major=major), **{"distribution": name, **changes})
        variable = f"PRECAST_{source}"
        before = os.environ.get(variable)
        self.patch.setenv(variable, f"{before}{os.pathsep}{root}" if before else str(root))
        return root

    def install(self, name: str, *archs: str, **changes: Any) -> Path:
        """The same as a package with an entry point on ``sys.path``, as pip would install it."""
        site = self.folder / f"site-{name}"
        package = name.replace("-", "_")
        info = site / f"{package}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[precast.jit_cache]\n{name} = {package}\n")
        root = site / package
        write_provider(root, self.specs(*archs), **{"distribution": name, **changes})
        self.patch.syspath_prepend(site)
        return root

    def loader(self) -> loader.Loader:
        fresh = loader.Loader()
        self.patch.setattr(loader, "loader", fresh)
        return fresh

    def cached(self, spec: ModuleSpec, data: bytes = b"cached", **changes: Any) -> Path:
        """A build of ``spec`` in the JIT cache of this user."""
        folder = module_folder(cache_dir(), spec) / f"{spec.name}-0123456789abcdef"
        folder.mkdir(parents=True)
        library = folder / f"{spec.name}.so"
        library.write_bytes(data)
        meta = Meta(
            name=spec.name,
            arch=spec.arch.name,
            cuda_major=spec.cuda_major,
            fingerprint=spec.fingerprint,
            compiler="nvcc 13.0.88; g++ 12",
            tvm_ffi="0.1.15",
            size=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            compile_seconds=1.0,
        )
        fields = {**json.loads(meta.dump()), **changes}
        (folder / META_NAME).write_text(json.dumps(fields))
        return library


def rejections(found: Resolution) -> list[str]:
    return [str(step) for step in found.steps if not step.accepted]


def resolve(
    axes: Mapping[str, object] = BF16, capability: str = "9.0", op: str = "norm"
) -> Resolution:
    return loader.loader.resolve(op, axes, capability)


def messages(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "precast" and r.levelno >= level]
