# SPDX-License-Identifier: Apache-2.0
"""The layout of an attention plan, read from the headers that define it.

Tests that look into a plan take sizes and positions from here, so that they cannot disagree with
``include/precast/attention``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from precast.jit.env import source_root

#: In the checkout, or in the installed package where the tests stand alone.
HEADERS = source_root() / "include" / "precast" / "attention"


@functools.cache
def _source() -> str:
    names = ("plan_layout.cuh", "scheduler.cuh", "plan_kernel.cuh")
    text = "\n".join((HEADERS / name).read_text(encoding="utf-8") for name in names)
    return re.sub(r"//.*", "", text)


def constant(name: str) -> int:
    """The value of ``constexpr int <name> = <number>;``."""
    found = re.search(rf"constexpr int {name} = (\d+);", _source())
    assert found, f"the headers of {HEADERS} have no constant {name}"
    return int(found[1])


@functools.cache
def fields(struct: str) -> dict[str, range]:
    """Where each field of a struct lies, in int32 from its start; all are of int32."""
    found = re.search(rf"struct (?:alignas\(\d+\) )?{struct} \{{(.*?)\n\}};", _source(), re.DOTALL)
    assert found, f"the headers of {HEADERS} have no struct {struct}"
    places: dict[str, range] = {}
    at = 0
    for kind, names in re.findall(r"^  (\w+) ([\w\[\], ]+);", found[1], re.MULTILINE):
        size = size_of(kind) if f"struct alignas(16) {kind} " in _source() else 1
        for name, length in re.findall(r"(\w+)(?:\[(\d+)\])?(?:, |$)", names):
            places[name] = range(at, at + size * int(length or 1))
            at = places[name].stop
    return places


def size_of(struct: str) -> int:
    """The size of a struct, in int32."""
    return max(place.stop for place in fields(struct).values())


def read(ints: Sequence[int], struct: str, at: int = 0) -> dict[str, int]:
    """The fields of a struct that are one number, from a plan as a list."""
    places = fields(struct)
    return {name: ints[at + p.start] for name, p in places.items() if len(p) == 1}


def shape_word(field: str) -> int:
    """Where a plan holds a field of the ``ScheduleShape`` that it was made for."""
    return fields("PlanHeader")["shape"].start + fields("ScheduleShape")[field].start
