# SPDX-License-Identifier: Apache-2.0
"""Every header stands alone, and every kernel also compiles for CUDA 12.

PyPI has no complete nvcc for CUDA 12, but NVRTC 12.9. The kernels that the modules really hold are
read back from them and compiled again, for each target that NVRTC knows.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from build_support import EVERYTHING, PLAN, ROOT, Built, run, some

from precast._jit.commands import location_flags
from precast._jit.toolchain import find_toolchain
from precast._plan.config import Arch
from precast._runtime import elf

INCLUDE = ROOT / "include"
#: The newest CUDA 12, whose NVRTC PyPI has.
CUDA_12 = (12, 9)
HEADERS = sorted(p.relative_to(INCLUDE).as_posix() for p in INCLUDE.rglob("*.cuh"))


def _has_host_code(header: str) -> bool:
    """Whether NVRTC, which is much faster than nvcc, does not see all of a header."""
    text = (INCLUDE / header).read_text()
    return "__CUDACC_RTC__" in text or "#include <" in text


LAUNCHING = HEADERS if EVERYTHING else [*filter(_has_host_code, HEADERS)]


@pytest.mark.parametrize("header", some(LAUNCHING, 6))
def test_header_compiles_alone(header: str, tmp_path: Path) -> None:
    source = tmp_path / "alone.cu"
    source.write_text(f'#include "{header}"\n#include "{header}"\n')
    toolchain = find_toolchain()
    spec = next(s for s in PLAN.modules("ci", PLAN.archs("9.0a"), toolchain.toolkit.major))
    flags = [*spec.compile_flags(".cu"), *location_flags(spec, ".cu"), "-Werror=all-warnings"]
    run([*toolchain.nvcc_command(), *flags, "-ptx", "-o", "/dev/null", source])


# -- NVRTC ----------------------------------------------------------------------------------------


def _wheel_folder(package: str, part: str) -> Path:
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / package / part).is_dir():
            return Path(folder) / package / part
    raise FileNotFoundError(f"nvidia/{package}/{part}: pip install 'precast[test]'")


class Nvrtc:
    """NVRTC 12.9 of PyPI."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(_wheel_folder("cuda_nvrtc", "lib") / "libnvrtc.so.12"))
        folders = (
            INCLUDE,
            _wheel_folder("cuda_runtime", "include"),
            _wheel_folder("cuda_cccl", "include"),
        )
        # NVRTC rejects host functions, which the launchers' headers have beside the kernels.
        self.options = ["-default-device", *(f"--include-path={folder}" for folder in folders)]

    @property
    def version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        assert self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0
        return major.value, minor.value

    def targets(self) -> list[Arch]:
        """The plan's targets that this NVRTC knows."""
        count = ctypes.c_int()
        assert self.library.nvrtcGetNumSupportedArchs(ctypes.byref(count)) == 0
        numbers = (ctypes.c_int * count.value)()
        assert self.library.nvrtcGetSupportedArchs(numbers) == 0
        return [
            arch
            for arch in PLAN.build.archs.values()
            if arch.number in set(numbers) and arch.cuda <= self.version
        ]

    def compile(self, source: str, arch: Arch, kernels: Sequence[str], *options: str) -> bytes:
        """The machine code of ``kernels`` (name expressions) in ``source``."""
        program = ctypes.c_void_p()
        words = [f"--gpu-architecture={arch.sass}", "-std=c++17", *self.options, *options]
        argv = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
        library = self.library
        assert (
            library.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
            )
            == 0
        )
        try:
            for kernel in kernels:
                assert library.nvrtcAddNameExpression(program, kernel.encode()) == 0
            status = library.nvrtcCompileProgram(program, len(words), argv)
            assert status == 0, f"{arch.sass}: {self._text(program, 'ProgramLog').decode()}"
            return self._text(program, "CUBIN")
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        assert getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert getattr(self.library, f"nvrtcGet{what}")(program, buffer) == 0
        return buffer.raw


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    library = Nvrtc()
    assert library.version == CUDA_12
    return library


def _kernels(library: Path) -> list[str]:
    """The kernels of a module as C++ names: ``precast::ScaleKernel<float, 1, true>``."""
    mangled = "\n".join(usage.kernel for usage in elf.read_resources(library))
    done = subprocess.run(["c++filt"], input=mangled, capture_output=True, text=True, check=True)
    return [re.sub(r"^void |\([^()]*\)$", "", line).strip() for line in done.stdout.splitlines()]


def test_cuda_12_knows_its_targets(nvrtc: Nvrtc) -> None:
    planned = [arch for arch in PLAN.build.archs.values() if arch.cuda <= CUDA_12]
    assert nvrtc.targets() == planned


def _pairs() -> list[tuple[str, str]]:
    """Every other op with one of its targets; at night all pairs."""
    pairs = []
    for i, (op, config) in enumerate(sorted(PLAN.config.ops.items())):
        if config.is_cute_dsl:  # No header has its kernels.
            continue
        archs = [arch.name for arch in PLAN.build.archs.values() if arch.cuda <= CUDA_12]
        archs = [name for name in archs if name in config.archs]
        if EVERYTHING or i % 2 == 0:
            pairs += [
                (op, name) for name in (archs if EVERYTHING else [archs[i // 2 % len(archs)]])
            ]
    return pairs


@pytest.mark.parametrize(("op", "arch"), _pairs())
def test_kernels_compile_for_cuda_12(op: str, arch: str, built: Built, nvrtc: Nvrtc) -> None:
    target = PLAN.build.archs[arch]
    spec = next(s for s in built.specs if s.op == op)
    kernels = _kernels(built.library(spec))
    assert kernels
    sources = [spec.source_path(s).read_text() for s in spec.sources if s.endswith(".cu")]
    headers = re.findall(r'#include "(precast/[^"]+)"', "\n".join(sources))
    assert headers
    text = "".join(f'#include "{header}"\n' for header in headers)
    options = [f"-DPRECAST_SM={target.number}"]
    if not EVERYTHING:  # Nobody runs this code, and optimising it takes most of the time.
        options.append("--Ofast-compile=max")
    cubin = nvrtc.compile(text, target, kernels, *options)
    assert cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize("header", some(HEADERS))
def test_header_compiles_alone_with_nvrtc(header: str, nvrtc: Nvrtc) -> None:
    nvrtc.compile(f'#include "{header}"\n', PLAN.build.archs["sm90a"], [])
