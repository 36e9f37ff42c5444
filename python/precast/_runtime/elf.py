# SPDX-License-Identifier: Apache-2.0
"""Read the symbols, the needed libraries and the machine code of a built module.

Symbols are read with pyelftools, machine code with cuobjdump; both come with
``pip install "precast[build]"``. Nothing here loads the module.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from precast._base.errors import ToolchainError
from precast._base.shared_object import EXPORT_PREFIX

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

INSTALL_HINT = 'pip install "precast[build]"'


def require_readers() -> None:
    """Raise unless symbols and machine code can be read here.

    Raises
    ------
    ToolchainError
        If pyelftools or cuobjdump is missing.
    """
    if importlib.util.find_spec("elftools") is None:
        raise ToolchainError(f"no pyelftools, which reads symbols. Fix: {INSTALL_HINT}")
    find_cuobjdump()


class Symbols(NamedTuple):
    """The dynamic symbols of a shared library.

    Attributes
    ----------
    defined : tuple of str
        The exported symbols.
    unique : tuple of str
        Symbols that the dynamic linker shares across the process (``STB_GNU_UNIQUE``). A module has
        none.
    needed : tuple of str
        The libraries that it is linked with (``DT_NEEDED``).
    run_path : tuple of str
        ``DT_RPATH`` and ``DT_RUNPATH``; a module has none.
    versions : dict
        The newest version of each family that it needs: ``{"GLIBC": "2.17"}``.
    """

    defined: tuple[str, ...]
    unique: tuple[str, ...]
    needed: tuple[str, ...]
    run_path: tuple[str, ...]
    versions: dict[str, str]

    @property
    def exports(self) -> tuple[str, ...]:
        """The tvm-ffi functions, without their prefix."""
        return tuple(
            name[len(EXPORT_PREFIX) :] for name in self.defined if name.startswith(EXPORT_PREFIX)
        )

    @property
    def private(self) -> tuple[str, ...]:
        """Exported symbols that are not functions of tvm-ffi."""
        return tuple(name for name in self.defined if not name.startswith(EXPORT_PREFIX))


class MachineCode(NamedTuple):
    """The targets of the device code in a shared library, such as ``sm_90a``."""

    sass: tuple[str, ...]
    ptx: tuple[str, ...]


class Resources(NamedTuple):
    """Registers of one kernel, and the bytes of memory that it uses."""

    kernel: str
    registers: int
    stack: int
    local: int
    shared: int


def read_symbols(path: Path) -> Symbols:
    """The dynamic symbols of the library at ``path``.

    Raises
    ------
    ValueError
        If it is not a shared library.
    """
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        try:
            elf = ELFFile(file)
            defined, unique = _defined(elf)
            needed, run_path = _dynamic(elf)
            return Symbols(defined, unique, needed, run_path, _versions(elf))
        except ELFError as error:
            raise ValueError(f"{path} is not a shared library ({error})") from None


def _defined(elf: ELFFile) -> tuple[tuple[str, ...], tuple[str, ...]]:
    table = elf.get_section_by_name(".dynsym")
    found = [
        (symbol.name, symbol["st_info"]["bind"])
        for symbol in (table.iter_symbols() if table is not None else ())
        if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] != "STB_LOCAL"
    ]
    names = sorted(name for name, _ in found)
    # STB_GNU_UNIQUE is the first number of the range that ELF reserves for the system.
    return tuple(names), tuple(n for n, bind in found if bind == "STB_LOOS")


def _dynamic(elf: ELFFile) -> tuple[tuple[str, ...], tuple[str, ...]]:
    section = elf.get_section_by_name(".dynamic")
    if section is None:
        raise ValueError("no dynamic section: not a shared library")
    tags = list(section.iter_tags())
    needed = tuple(sorted(tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"))
    paths = [tag.rpath for tag in tags if tag.entry.d_tag == "DT_RPATH"]
    paths += [tag.runpath for tag in tags if tag.entry.d_tag == "DT_RUNPATH"]
    return needed, tuple(paths)


def _versions(elf: ELFFile) -> dict[str, str]:
    newest: dict[str, tuple[int, ...]] = {}
    section = elf.get_section_by_name(".gnu.version_r")
    for _, auxiliaries in section.iter_versions() if section is not None else ():
        for auxiliary in auxiliaries:
            match = re.fullmatch(r"([A-Z]+)_(\d+(?:\.\d+)*)", auxiliary.name)
            if match is not None:
                number = tuple(map(int, match[2].split(".")))
                newest[match[1]] = max(number, newest.get(match[1], (0,)))
    return {family: ".".join(map(str, n)) for family, n in sorted(newest.items())}


# -- device code ----------------------------------------------------------------------------------


def read_machine_code(path: Path) -> MachineCode:
    """The targets of the device code in the library at ``path``.

    Raises
    ------
    ToolchainError
        If there is no cuobjdump, or it cannot read the file.
    """
    # --list-elf prints sm_100 for code of the family target sm_100f; this option prints sm_100f.
    listing = _cuobjdump("--dump-resource-usage", path)
    return MachineCode(_targets(listing, "elf"), _targets(listing, "ptx"))


def _targets(listing: str, kind: str) -> tuple[str, ...]:
    found = re.findall(rf"^Fatbin {kind} code:\n=+\narch = (\w+)$", listing, re.MULTILINE)
    return tuple(sorted(set(found)))


def read_resources(path: Path) -> Iterator[Resources]:
    """Registers and memory of every kernel in the library at ``path``."""
    text = _cuobjdump("--dump-resource-usage", path)
    for name, usage in re.findall(r"Function (\S+):\s*\n\s*(\S.*)", text):
        values = dict(re.findall(r"(\w+):(\d+)", usage))
        yield Resources(name, *(int(values[key]) for key in ("REG", "STACK", "LOCAL", "SHARED")))


def _cuobjdump(option: str, path: Path) -> str:
    done = subprocess.run(
        [find_cuobjdump(), option, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    # cuobjdump fails if there is nothing to list.
    if done.returncode != 0 and "does not contain device code" not in done.stdout:
        raise ToolchainError(f"cuobjdump {option} {path} failed: {done.stdout.strip()}")
    return done.stdout


@functools.cache
def find_cuobjdump() -> str:
    """The cuobjdump of the Python environment, else of the toolkit, else on PATH.

    Raises
    ------
    ToolchainError
        If there is none.
    """
    from precast._jit.toolchain import candidates

    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for found in sorted(Path(folder).glob("cu*/bin/cuobjdump"), reverse=True):
            return str(found)
    for toolkit in candidates():
        beside = toolkit.nvcc.with_name("cuobjdump")
        if beside.is_file():
            return str(beside)
    on_path = shutil.which("cuobjdump")
    if on_path is None:
        raise ToolchainError(f"no cuobjdump, which reads machine code. Fix: {INSTALL_HINT}")
    return on_path
