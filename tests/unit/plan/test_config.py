# SPDX-License-Identifier: Apache-2.0
"""aot_configs: the project's own files are sound, and every kind of mistake is one clear error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from config_mistakes import MISTAKES, SCALE

from precast._plan.config import load_config
from precast._plan.places import source_root
from precast.errors import ConfigError


def change(path: Path, old: str | re.Pattern[str] | None, new: str | bytes | None) -> None:
    if new is None:
        path.unlink()
    elif isinstance(new, bytes):
        path.write_bytes(new)
    else:
        text = path.read_text()
        after = text.replace(old, new, 1) if isinstance(old, str) else old.sub(new, text, count=1)  # type: ignore[union-attr]
        assert after != text, "the mistake was not made: the file has changed, adapt the row"
        path.write_text(after)


def test_the_projects_own_files_are_valid():
    config = load_config(source_root())
    assert {"scale", "norm", "activation"} <= set(config.ops)
    assert list(config.build.archs) == [
        "sm80",
        "sm86",
        "sm89",
        "sm90a",
        "sm100f",
        "sm110a",
        "sm120f",
    ]
    assert list(config.build.profiles) == ["ci", "core", "full"]


@pytest.mark.parametrize("name", list(MISTAKES))
def test_a_mistake_is_one_error_that_names_file_key_and_legal_values(tree, name):
    file, old, new, words = MISTAKES[name]
    change(tree / file, old, new)
    with pytest.raises(ConfigError) as caught:
        load_config(tree)
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert "; legal: " in message
    assert "\n" not in message
    for word in words:
        assert word in message


def test_an_op_that_prebuilds_nothing_is_legal(tree):
    change(tree / SCALE, re.compile(r"\[\[aot\]\](.|\n)*"), "")
    assert load_config(tree).op("scale").aot == ()
    with (tree / SCALE).open("a") as out:
        out.write('\n[aot]\ndtype = ["f32"]\n')
    with pytest.raises(ConfigError, match=r"aot: got .*; legal: \[\[aot\]\] blocks"):
        load_config(tree)


def test_a_bad_file_name_is_rejected(tree):
    (tree / SCALE).rename(tree / "aot_configs" / "scale__x.toml")
    with pytest.raises(ConfigError, match=r"aot_configs/scale__x.toml: bad op name; legal: "):
        load_config(tree)


def test_unknown_op_and_profile_name_the_known_ones(tree):
    config = load_config(tree)
    with pytest.raises(ConfigError, match="unknown op 'mul'; legal: activation, "):
        config.op("mul")
    with pytest.raises(ConfigError, match="unknown profile 'all'; legal: ci, core, full"):
        config.build.profile_names("all")
