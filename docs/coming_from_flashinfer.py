# SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/coming_from_flashinfer.md.

They come from the facts that the tests of the shim compare with precast: what engines ask of
FlashInfer, what is absent and why, and FlashInfer's public names.
"""

from __future__ import annotations

import fnmatch
import json
import sys
from typing import Any

from sitegen import ROOT, markup

import precast
from precast.shim import ENGINES, look_up, modules

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = "docs/coming_from_flashinfer.md"
_FACTS = ROOT / "tests" / "unit" / "shim"
ASKED: dict[str, Any] = json.loads((_FACTS / "engines.json").read_text())
ABSENT: dict[str, Any] = tomllib.loads((_FACTS / "absent.toml").read_text())
DIFFERENCES: dict[str, Any] = tomllib.loads((_FACTS / "differences.toml").read_text())
FLASHINFER: dict[str, Any] = json.loads((_FACTS / "flashinfer.json").read_text())
#: How the page writes the engines.
TITLES = {"vllm": "vLLM", "sglang": "SGLang"}


def engine(version: str) -> str:
    """``vllm`` of ``vllm 0.33.0``."""
    return version.partition(" ")[0]


def newest(of: str) -> str:
    """The newest version of an engine whose facts are known, ``vllm 0.33.0``."""
    versions = (v for v in ASKED if engine(v) == of)
    return max(versions, key=lambda v: [int(part) for part in v.partition(" ")[2].split(".")])


def names(version: str) -> list[str]:
    """What a version asks for, but for what every module has, such as ``__version__``."""
    return [name for name in ASKED[version]["names"] if not name.startswith("__")]


def missing(version: str) -> list[str]:
    """The names among them that the package ``flashinfer`` lacks."""
    return [name for name in names(version) if not _is_there(name, engine(version))]


def _is_there(name: str, of: str) -> bool:
    module, _, attribute = name.rpartition(".")
    if module not in modules(of):
        return False
    try:
        look_up(module, attribute, of)
    except AttributeError:
        return False
    return True


def contract() -> str:
    """A row for each engine: the names that it asks for, those that are there, and those not."""
    rows = []
    for version in ASKED:
        asked, absent = names(version), missing(version)
        there = len(asked) - len(absent)
        title = f"{TITLES[engine(version)]} {version.partition(' ')[2]}"
        rows.append((title, *map(str, (len(asked), there, len(absent)))))
    return markup.table(("engine", "names it asks for", "there", "missing"), rows)


def families() -> str:
    """A row for each family of absent names: how many engines ask for, and why they are absent."""
    lacking = {of: missing(newest(of)) for of in TITLES}
    rows = []
    for family in ABSENT["family"]:
        counts = [
            str(sum(_belongs(name, family) for name in lacking[of]))
            if of in family.get("engines", ENGINES)
            else "-"
            for of in TITLES
        ]
        patterns = ", ".join(f"`{pattern}`" for pattern in family["names"])
        rows.append((family["name"], *counts, patterns, family["reason"]))
    titles = (f"{title} {newest(of).partition(' ')[2]}" for of, title in TITLES.items())
    return markup.table(("family", *titles, "names", "why"), rows)


def _belongs(name: str, family: dict[str, Any]) -> bool:
    patterns = family["names"]
    return name not in family.get("except", ()) and any(
        fnmatch.fnmatchcase(name, pattern) for pattern in patterns
    )


def top_level() -> str:
    """The names of ``flashinfer`` itself that ``precast`` lacks."""
    public = [name for name in FLASHINFER["names"] if "." not in name]
    lacking = [name for name in public if not hasattr(precast, name)]
    said = (
        f"`flashinfer` {FLASHINFER['version']} itself has {len(public)} public functions and"
        f" classes, and `precast` has {len(public) - len(lacking)} of them. These are missing:"
    )
    return f"{said}\n\n{', '.join(f'`{name}`' for name in lacking)}\n"


def differences() -> str:
    """A row for each difference of a signature, with the reason."""
    rows = [(f"`{d['name']}`", d["what"], d["reason"]) for d in DIFFERENCES["difference"]]
    return markup.table(("name", "in precast", "why"), rows)


def made(page: str) -> str:
    """The page's text with the tables as they should be."""
    for block in (contract, families, top_level, differences):
        page = markup.with_block(page, block.__name__, block())
    return page


if __name__ == "__main__":
    path = ROOT / PAGE
    before = path.read_text(encoding="utf-8")
    after = made(before)
    if after != before:
        path.write_text(after, encoding="utf-8")
        print(PAGE)
