# SPDX-License-Identifier: Apache-2.0
"""The builds in the JIT cache, and whether this precast would still use each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from precast._base.progress import steps

if TYPE_CHECKING:
    from precast._jit.cache import Contents, Entry


class Build(NamedTuple):
    """One build: ``ok``, ``stale`` or ``damaged``, and why."""

    entry: Entry
    state: str
    reason: str


def judged_builds(contents: Contents) -> list[Build]:
    """Every build in the cache, and whether this precast would use it."""
    entries = contents.builds
    rows = []
    with steps("checking the builds", len(entries)) as done:
        for entry in entries:
            rows.append(Build(entry, *_judge(entry)))
            done()
    return rows


def _judge(entry: Entry) -> tuple[str, str]:
    """``ok``, ``stale`` or ``damaged``, and why."""
    from precast._base.errors import ConfigError, UnsupportedConfigError
    from precast._base.trust import check_contents
    from precast._jit import cache
    from precast._plan.installed import plan

    meta = entry.meta
    if meta is None:
        return "damaged", f"{cache.META_NAME} cannot be read"
    library = entry.folder / f"{meta.name}.so"
    problem = check_contents(library, meta.size, meta.sha256, "precast cache prune")
    if problem is not None:
        return "damaged", problem
    op = meta.name.partition("__")[0]
    config = plan().config.ops.get(op)
    if config is None:
        return "ok", "a kernel of your own"
    axes: dict[str, str] = {}
    words = meta.name.split("__")[1:]
    for axis, word in zip(config.axes, words):
        axes[axis] = word.removeprefix(f"{axis}_")
    try:
        spec = plan().spec(op, axes, meta.arch, meta.cuda_major)
    except (ConfigError, UnsupportedConfigError, ValueError) as error:
        return "stale", f"this precast does not know it: {error}"
    if spec.name != meta.name or spec.fingerprint != meta.fingerprint:
        return "stale", "built from other sources or flags"
    return "ok", ""
