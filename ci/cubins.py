# SPDX-License-Identifier: Apache-2.0
"""Read the kernels of a built module: their machine code, and what they use of the GPU.

It needs cuobjdump and pyelftools (``pip install "precast[build]"``) and c++filt (binutils). Only a
disassembly needs nvdisasm.
"""

from __future__ import annotations

import functools
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from precast._runtime import elf

#: What ``.nv.info`` says of a kernel's launch: the number of each attribute, with its meaning.
LAUNCH_ATTRIBUTES = {
    0x05: "most threads",
    0x10: "required threads",
    0x3D: "blocks in a cluster",
    0x3E: "explicit cluster",
    0x3F: "most blocks in a cluster",
    0x4C: "barriers",
}


class Kernel(NamedTuple):
    """One kernel of one module."""

    symbol: str
    text: bytes
    resources: elf.Resources
    launch: dict[str, str]  # launch bounds, cluster shape and barriers, as in LAUNCH_ATTRIBUTES
    data: dict[str, str]  # hash of each section of constants and globals of its translation unit
    constant_bytes: int  # constant bank 0, which ends with the parameters
    cubin: bytes  # the whole file that holds the kernel

    @property
    def disassembly(self) -> tuple[str, ...]:
        """One instruction each; empty without nvdisasm."""
        return _disassemble(self.cubin).get(self.symbol, ())


def read_kernels(library: Path) -> dict[str, Kernel]:
    """The kernels in a library by demangled name.

    A kernel that several translation units define stands here once for each.
    """
    found: list[Kernel] = []
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [elf.find_cuobjdump(), "--extract-elf", "all", library.resolve()],
            cwd=folder,
            capture_output=True,
            text=True,
        )
        # A module of host code alone has nothing to extract.
        if done.returncode != 0 and "does not contain device code" not in done.stdout + done.stderr:
            raise SystemExit(f"error: cuobjdump cannot read {library}: {done.stderr.strip()}")
        for cubin in sorted(Path(folder).iterdir()):
            found += _kernels_of(cubin)
    kernels: dict[str, Kernel] = {}
    for kernel, name in zip(found, demangle([kernel.symbol for kernel in found]), strict=True):
        copies = sum(other.split(" #")[0] == name for other in kernels)
        kernels[f"{name} #{copies + 1}" if copies else name] = kernel
    return kernels


def _kernels_of(cubin: Path) -> Iterator[Kernel]:
    from elftools.elf.elffile import ELFFile

    resources = {row.kernel: row for row in elf.read_resources(cubin)}
    with cubin.open("rb") as file:
        sections = {section.name: section for section in ELFFile(file).iter_sections()}
        data = {
            name: hashlib.sha256(section.data()).hexdigest()
            for name, section in sections.items()
            if re.match(r"\.nv\.(constant[1-9]|global)", name)
        }
        for name, section in sections.items():
            if not name.startswith(".text."):
                continue
            symbol = name[len(".text.") :]
            yield Kernel(
                symbol,
                section.data(),
                resources[symbol],
                dict(_launch_attributes(sections[f".nv.info.{symbol}"].data())),
                data,
                sections[f".nv.constant0.{symbol}"]["sh_size"],
                cubin.read_bytes(),
            )


def _launch_attributes(data: bytes) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(data):
        # An attribute: its layout, its number, and 16 bits; in layout 4 they are a value's size.
        layout, number = data[at], data[at + 1]
        end = at + 4 + (int.from_bytes(data[at + 2 : at + 4], "little") if layout == 4 else 0)
        if number in LAUNCH_ATTRIBUTES:
            yield LAUNCH_ATTRIBUTES[number], data[at + 2 : end].hex()
        at = end


@functools.lru_cache(maxsize=4)
def _disassemble(cubin: bytes) -> dict[str, tuple[str, ...]]:
    """The instructions of each kernel, or nothing without nvdisasm. It takes seconds a file."""
    tool = find_nvdisasm()
    if tool is None:
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--print-code", "--print-raw", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    kernels = {}
    for part in re.split(r"^\s*\.section\s+\.text\.", text, flags=re.MULTILINE)[1:]:
        symbol = re.match(r"[^,\s]+", part)
        assert symbol is not None
        kernels[symbol[0].strip('"')] = tuple(
            " ".join(line.split()) for line in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", part)
        )
    return kernels


@functools.cache
def find_nvdisasm() -> str | None:
    """The nvdisasm beside cuobjdump, else on PATH."""
    beside = Path(elf.find_cuobjdump()).with_name("nvdisasm")
    return str(beside) if beside.is_file() else shutil.which("nvdisasm")


def demangle(symbols: Sequence[str]) -> list[str]:
    """C++ names, as c++filt prints them."""
    text = "\n".join(symbols)
    try:
        done = subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise SystemExit("error: there is no c++filt. Fix: install binutils") from None
    return done.stdout.splitlines()
