# SPDX-License-Identifier: Apache-2.0
"""Look at the bytes of a shared library before the dynamic linker does.

The linker ends the process with SIGBUS for a file that breaks off, and runs the constructors of a
file that is another library. Source: Tool Interface Standard, ELF specification 1.2, and the
64-bit object file format.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterable, Iterator

#: tvm-ffi's entry points are C symbols with this prefix.
EXPORT_PREFIX = "__tvm_ffi_"

_SEGMENT = struct.Struct("<2I6Q")
_HEADER_BYTES, _SECTION_BYTES = 64, 64
#: ``e_type`` of a shared library.
_SHARED = 3
#: ``e_machine`` of the machines that precast is built for.
_MACHINES = {"x86_64": 62, "aarch64": 183}


def defect(data: bytes, exports: Iterable[str], machine: str | None = None) -> str | None:
    """Why ``data`` is not a whole shared library with these functions, or None.

    Parameters
    ----------
    data : bytes
        The file.
    exports : iterable of str
        The tvm-ffi functions that it has to have.
    machine : str, optional
        What it has to be built for, as :func:`platform.machine` says it. Default: this machine.
    """
    machine = machine or platform.machine()
    if len(data) < _HEADER_BYTES or data[:6] != b"\x7fELF\x02\x01":
        return "is not a 64-bit shared library"
    kind, number = struct.unpack_from("<2H", data, 16)
    if kind != _SHARED:
        return "is not a shared library"
    if number != _MACHINES.get(machine, number):
        name = {v: k for k, v in _MACHINES.items()}.get(number, f"ELF machine {number}")
        return f"is built for {name}, not for {machine}"
    end = max(_ends(data))
    if end > len(data):
        return f"breaks off after {len(data)} of {end} bytes"
    for name in exports:
        if f"\0{EXPORT_PREFIX}{name}\0".encode() not in data:
            return f"has no function {name}"
    return None


def _ends(data: bytes) -> Iterator[int]:
    """Where the tables of segments and sections end, and each segment."""
    segments, sections = struct.unpack_from("<2Q", data, 32)
    segment_count, _, section_count = struct.unpack_from("<3H", data, 56)
    yield sections + section_count * _SECTION_BYTES
    yield segments + segment_count * _SEGMENT.size
    for k in range(segment_count):
        at = segments + k * _SEGMENT.size
        if at + _SEGMENT.size <= len(data):
            _, _, offset, _, _, size, _, _ = _SEGMENT.unpack_from(data, at)
            yield offset + size
