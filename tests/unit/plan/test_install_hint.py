# SPDX-License-Identifier: Apache-2.0
"""The commands that messages print fit where precast and its modules were installed from."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import precast
from precast._plan import install_hint

HOPPER, AMPERE = {(13, "sm90a"): "9.0a"}, {(12, "sm80"): "8.0"}
VERSION = precast.__version__
CACHE = "precast-jit-cache-cu13-sm90a"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Write the metadata of a distribution, with the URL that pip recorded."""
    site = tmp_path / "site-packages"
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(install_hint, "checkout_root", lambda: None)
    install_hint._local.cache_clear()

    def install(name: str, place: Path | None) -> None:
        info = site / f"{name.replace('-', '_')}-{VERSION}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {VERSION}\n")
        if place is not None:
            (info / "direct_url.json").write_text(json.dumps({"url": place.as_uri()}))
        install_hint._local.cache_clear()

    yield install
    install_hint._local.cache_clear()


def test_a_checkout_builds_the_modules_of_its_own_sources(tmp_path, monkeypatch):
    fix = install_hint.modules_command({**HOPPER, **AMPERE})
    root = Path(precast.__file__).resolve().parents[2]
    setting, *words = shlex.split(fix)
    assert setting == "PRECAST_CUDA_ARCH_LIST=9.0a 8.0"
    assert words[:2] == ["pip", "install"]
    assert Path(words[2]).resolve() == (root / "python" / "precast_jit_cache").resolve()
    monkeypatch.chdir(tmp_path)
    assert Path(shlex.split(install_hint.modules_command(HOPPER))[-1]).is_absolute()
    assert install_hint.names_its_wheels(fix)


def test_a_core_from_a_wheel_file_names_the_folder_of_that_wheel(tmp_path, installed):
    wheels = tmp_path / "my wheels"
    wheels.mkdir()
    wheel = wheels / f"precast-{VERSION}-py3-none-any.whl"
    wheel.touch()
    installed("precast", wheel)
    fix = install_hint.modules_command({**HOPPER, **AMPERE})
    requirement = f"precast[cu13-sm90a,cu12-sm80]=={VERSION}"
    assert shlex.split(fix) == ["pip", "install", "--find-links", str(wheels), requirement]
    assert install_hint.names_its_wheels(fix)


def test_a_core_from_an_index_or_from_a_file_that_is_gone_names_no_folder(tmp_path, installed):
    installed("precast", tmp_path / "gone.whl")
    fix = install_hint.modules_command(HOPPER)
    assert fix == f'pip install "precast[cu13-sm90a]=={VERSION}"'
    assert not install_hint.names_its_wheels(fix)


def test_damaged_modules_come_again_from_where_they_came(tmp_path, installed):
    start = "pip install --force-reinstall --no-deps"
    assert install_hint.reinstall_command(CACHE, f"{CACHE}==1") == f"{start} {CACHE}==1"
    wheel = tmp_path / "cache.whl"
    wheel.touch()
    installed(CACHE, wheel)
    wanted = f"{start} --find-links {tmp_path} {CACHE}==1"
    assert install_hint.reinstall_command(CACHE, f"{CACHE}==1") == wanted
    (tmp_path / "pyproject.toml").touch()
    installed("precast-jit-cache", tmp_path)
    assert install_hint.reinstall_command("precast-jit-cache", "x") == f"{start} {tmp_path}"


@pytest.mark.parametrize("text", ["", "{}", "not JSON", '{"url": "https://host/precast.whl"}'])
def test_a_record_that_leads_nowhere_is_none(tmp_path, installed, text):
    installed("precast", None)
    info = next((tmp_path / "site-packages").iterdir())
    (info / "direct_url.json").write_text(text)
    install_hint._local.cache_clear()
    assert install_hint.modules_command(HOPPER).startswith('pip install "precast[cu13-sm90a]==')


def test_the_commands_of_messages_are_ones_that_precast_and_pip_parse(installed):
    from precast.cli import _fit, _parser

    installed("precast", None)
    command = install_hint.FROM_A_FOLDER.split()
    args = _parser.parse(command[1:])
    assert args.find_links == ["DIR"]
    assert install_hint.FROM_A_FOLDER in str(
        _fit.folder_hint([install_hint.modules_command(HOPPER)])
    )
    words = shlex.split(install_hint.modules_command(HOPPER))
    done = subprocess.run(
        [sys.executable, "-m", *words, "--no-index", "--dry-run"],
        capture_output=True,
        text=True,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        timeout=100,
    )
    # It has no wheel to find; what it read is a requirement.
    assert "No module named pip" in done.stderr or "No matching distribution" in done.stderr
