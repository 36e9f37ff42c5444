# SPDX-License-Identifier: Apache-2.0
"""The package index: what pip makes of it, and that readers never see a part of it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from ci_support import script

make_index = script("make_index")
NAME, PROJECT = "precast_jit_cache_cu13_sm90a", "precast-jit-cache-cu13-sm90a"


def wheel(folder: Path, version: str, name: str = NAME) -> Path:
    """A wheel that pip installs, with nothing in it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def sums(*wheels: Path) -> dict[str, str]:
    return {w.name: hashlib.sha256(w.read_bytes()).hexdigest() for w in wheels}


def download(index: Path, out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "pip", "--isolated", "download", "--no-deps", "-d", str(out)]
    argv += ["--disable-pip-version-check", "--index-url", index.as_uri() + "/", *words]
    return subprocess.run(
        argv, capture_output=True, text=True, env={"PIP_CONFIG_FILE": "/dev/null"}
    )


def test_pip_finds_every_release_and_checks_its_digest(tmp_path: Path) -> None:
    old, new = wheel(tmp_path / "v0.1.0", "0.1.0"), wheel(tmp_path / "v0.2.0", "0.2.0")
    pages = make_index.pages([(w.parent.as_uri(), sums(w)) for w in (old, new)])
    assert set(pages) == {"", PROJECT}
    link = tmp_path / "public" / "simple"
    make_index.publish(pages, link)
    for words, wanted in (([PROJECT], new), ([f"{PROJECT}==0.1.0"], old)):
        out = tmp_path / wanted.stem
        done = download(link, out, *words)
        assert done.returncode == 0, done.stderr
        assert [p.name for p in out.iterdir()] == [wanted.name]
    # Another content under the address that the index states.
    wheel(new.parent, "0.2.0", "precast_jit_cache_cu13_sm80").replace(new)
    done = download(link, tmp_path / "rejected", PROJECT)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr


def test_the_link_moves_to_a_whole_index(tmp_path: Path) -> None:
    link = tmp_path / "simple"
    first = make_index.publish({"": "old", "a": "old a"}, link)
    assert (link / "a" / "index.html").read_text() == "old a"
    reader = (link / "index.html").open()
    second = make_index.publish({"": "new", "b": "new b"}, link)
    assert link.is_symlink()
    assert link.resolve() == second
    assert not (link / "a").exists()
    assert reader.read() == "old"  # who had begun to read reads on
    reader.close()
    assert (first / "a" / "index.html").is_file()
    # The same index again is the same folder, and nothing is left over.
    assert make_index.publish({"": "new", "b": "new b"}, link) == second
    assert {p.name for p in tmp_path.iterdir()} == {"simple", first.name, second.name}


def test_a_failure_leaves_the_old_index(tmp_path: Path) -> None:
    link = tmp_path / "simple"
    first = make_index.publish({"": "old"}, link)
    with pytest.raises(OSError, match="a/b"):
        make_index.publish({"": "new", "a/b": "no such folder"}, link)
    assert link.resolve() == first
    assert {p.name for p in tmp_path.iterdir()} == {"simple", first.name}
    folder = tmp_path / "other"
    folder.mkdir()
    with pytest.raises(ValueError, match="no link to an index"):
        make_index.publish({"": "new"}, folder)


@pytest.mark.parametrize(
    ("digests", "text"),
    [
        ({f"{NAME}-0.1.0-py3-none-any.whl": "0" * 63}, "is not a sha256 digest"),
        ({"notes.txt": "0" * 64}, "is not the name of a wheel"),
        ({f"../{NAME}-0.1.0-py3-none-any.whl": "0" * 64}, "is not the name of a wheel"),
    ],
)
def test_a_wrong_row_is_rejected(digests: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_index.pages([("https://host/v0.1.0", digests)])


def test_one_name_has_one_content_and_pages_are_escaped() -> None:
    row = {f"{NAME}-0.1.0-py3-none-any.whl": "0" * 64}
    other = {f"{NAME}-0.1.0-py3-none-any.whl": "1" * 64}
    with pytest.raises(ValueError, match="released twice, with different contents"):
        make_index.pages([("https://host/a", row), ("https://host/b", other)])
    pages = make_index.pages([('https://host/a"<&', row)])
    assert '"<&' not in pages[PROJECT]
    assert "&quot;&lt;&amp;/" in pages[PROJECT]


def test_the_command_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "SHA256SUMS"
    file.write_text(f"{'0' * 64}  {NAME}-0.1.0-py3-none-any.whl\n")
    arguments = ["-o", str(tmp_path / "simple"), "--release", "https://host/v0.1.0", str(file)]
    assert make_index.main(arguments) == 0
    assert ": 1 projects" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        make_index.main([*arguments[:-1], str(tmp_path / "missing")])
    assert "No such file" in capsys.readouterr().err
