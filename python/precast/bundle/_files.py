# SPDX-License-Identifier: Apache-2.0
"""The text files of a bundle: the install script and the page that explains it."""

from __future__ import annotations

from collections.abc import Sequence

from packaging.requirements import Requirement

_SCRIPT = """\
#!/bin/sh
# Installs precast from this folder, without a network.
#
#   ./install.sh [PIP OPTIONS]          into the Python of PATH
#   PYTHON=/path/to/python ./install.sh into another one
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)

fail() {{
  echo "error: $1" >&2
  exit 1
}}

python=${{PYTHON:-$(command -v python || command -v python3 || true)}}
[ -n "$python" ] || fail "no python on PATH. Fix: PYTHON=/path/to/python ./install.sh"

echo "checking SHA256SUMS"
sums=$(cd "$here" && sha256sum -c SHA256SUMS 2>&1) || {{
  echo "$sums" | grep -v ': OK$' >&2
  fail "the bundle is damaged or was changed. Fix: copy it again"
}}
# pip looks at every file of the folder.
added=$(cd "$here" && find . ! -type d ! -path ./SHA256SUMS | while IFS= read -r file; do
  cut -c67- SHA256SUMS | grep -Fqx -e "${{file#./}}" || echo "${{file#./}} is not in SHA256SUMS"
done)
[ -z "$added" ] || {{
  echo "$added" >&2
  fail "files were added to the bundle. Fix: copy it again, into an empty folder"
}}

machine=$(uname -m)
[ "$machine" = "{machine}" ] || fail "the bundle is for {machine}, this machine is $machine"
{checks}
# pip uses only this folder: neither its configuration nor its environment variables add sources.
PIP_CONFIG_FILE=/dev/null "$python" -m pip --isolated install --disable-pip-version-check \\
  --no-index --find-links "$here/wheels" -r "$here/requirements.txt" "$@"
"""

_PYTHON_CHECK = """
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$version" = "{python}" ] || fail "the bundle is for Python {python}, $python is $version"
"""

_ASSUMED_CHECK = """
"$python" -c 'import importlib.metadata as m; m.version("{name}")' 2>/dev/null ||
  fail "{requirement} must be installed first: this bundle does not include it"
"""

_README = """\
# precast, offline

Wheels for Python {python} on {platform}.{assumed} Nothing is fetched from a network:

    ./install.sh                              # into the Python of PATH
    PYTHON=/path/to/python ./install.sh       # into another one

The script checks `SHA256SUMS` and that no other file is there, then runs `pip install --no-index`
on `wheels/`; further arguments go to pip. Afterwards `precast doctor --profile core` checks that
every kernel is installed.

| file | what it is |
|---|---|
| `wheels/` | the wheels below |
| `requirements.txt` | the packages to install; pip adds their dependencies |
| `constraints.txt` | the exact version of every wheel, for `pip install -c` elsewhere |
| `SHA256SUMS` | the digest of every other file: `sha256sum -c SHA256SUMS` |

| wheel | version | size |
|---|---|---|
{wheels}
"""


def script(python: str | None, machine: str, assumed: str | None) -> str:
    """The text of ``install.sh``; ``python`` is None if the wheels suit every version."""
    checks = "" if python is None else _PYTHON_CHECK.format(python=python)
    if assumed is not None:
        name = Requirement(assumed).name
        checks += _ASSUMED_CHECK.format(name=name, requirement=assumed)
    return _SCRIPT.format(machine=machine, checks=checks)


def readme(
    wheels: Sequence[tuple[str, str, int]],
    python: str,
    platform: str,
    assumed: str | None,
    notes: Sequence[str],
) -> str:
    rows = [f"| {name} | {version} | {size / 1e6:.1f} MB |" for name, version, size in wheels]
    text = _README.format(
        python=python,
        platform=platform,
        assumed="" if assumed is None else f" `{assumed}` must be installed there already.",
        wheels="\n".join(rows),
    )
    if notes:
        text += "\nNotes:\n\n" + "".join(f"- {note}\n" for note in notes)
    return text
