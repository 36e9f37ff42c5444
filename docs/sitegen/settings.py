# SPDX-License-Identifier: Apache-2.0
"""Tables of the environment variables and of the keys of ``aot_configs/``."""

from __future__ import annotations

import re

from precast._base import env as _env
from precast._plan import keys
from sitegen import markup

_DEFAULT = re.compile(r"\s*\(default: ([^()]*(?:\([^()]*\)[^()]*)*)\)")


def environment() -> str:
    """Every variable that precast reads, in the order of its declaration."""
    rows = []
    for row in _env.REGISTRY:
        said = _DEFAULT.search(row.doc)
        if said is not None:  # A description says more than an empty value.
            default = markup.text(said[1])
        elif row.default in ("", "False"):
            default = "off" if row.default else "none"
        else:
            default = f"`{row.default}`"
        meaning = markup.text(_DEFAULT.sub("", row.doc))
        rows.append((f'<span id="{row.name}">`{row.name}`</span>', default, meaning))
    return markup.table(("Variable", "Default", "Meaning"), rows)


def toml_keys() -> str:
    """Every key that the planner accepts."""
    parts = []
    for title, table in keys.TABLES.items():
        rows = [(f"`{key}`", meaning) for key, meaning in table.items()]
        parts.append(f"**`{title}`**\n\n{markup.table(('Key', 'Meaning'), rows)}")
    return "\n".join(parts)
