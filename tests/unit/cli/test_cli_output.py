# SPDX-License-Identifier: Apache-2.0
"""What the commands print: for a terminal, for a pipe, and for machines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import PACKAGES, core_specs, on_terminal, run, without_colours, write_provider

from precast._base import progress as _progress
from precast.cli import _output, _parser

COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9][0-9;]*m")
EXPLAIN = ["explain", "norm", "dtype=bf16", "--arch", "9.0"]


@pytest.fixture(scope="module", autouse=True)
def _rich() -> None:
    pytest.importorskip("rich")


# -- a terminal, or not ---------------------------------------------------------------------------


def test_a_terminal_gets_the_same_text_in_colour(tmp_path):
    settings = {"PRECAST_JIT": "error", "PRECAST_CACHE_DIR": str(tmp_path)}
    text, _, code = on_terminal(*EXPLAIN, **settings)
    assert code == 1
    assert COLOUR.search(text)
    plain = without_colours(text)
    assert "norm__dtype_bf16 on compute capability 9.0" in plain
    assert re.search(r"rejected +JIT +compiling is forbidden", plain)
    # Square brackets are text, not mark-up.
    assert "Fix: PRECAST_CUDA_ARCH_LIST=9.0a pip install " in plain


def test_a_table_on_a_terminal_has_a_ruled_head_and_a_pipe_gets_plain_columns(tmp_path):
    words = ["list", "--arch", "9.0", "--op", "norm"]
    settings = {"PRECAST_CACHE_DIR": str(tmp_path), "PRECAST_JIT": "error"}
    drawn, _, _ = on_terminal(*words, **settings)
    assert "────" in drawn
    piped = run(*words, **settings).stdout
    assert "─" not in piped
    assert "\x1b" not in piped
    cells = [line.split() for line in piped.splitlines()[:-1]]
    shown = without_colours(drawn).replace("│", " ")
    for row in cells:
        for cell in row:
            assert cell in shown


def test_no_color_removes_only_the_colours(tmp_path):
    settings = {"PRECAST_JIT": "error", "PRECAST_CACHE_DIR": str(tmp_path)}
    text, _, _ = on_terminal(*EXPLAIN, NO_COLOR="1", **settings)
    assert not COLOUR.search(text)
    assert re.search(r"rejected +JIT +compiling is forbidden", without_colours(text))


def test_a_dumb_terminal_gets_no_escape_sequences(tmp_path):
    text, _, _ = on_terminal(*EXPLAIN, TERM="dumb", PRECAST_CACHE_DIR=str(tmp_path))
    assert "\x1b" not in text
    assert "norm__dtype_bf16 on compute capability 9.0" in text


@pytest.mark.parametrize("columns", [60, 80, 100, 180])
def test_a_narrow_terminal_loses_no_word(tmp_path, columns):
    root = write_provider(tmp_path / "provider", core_specs("sm90a"))
    text, _, _ = on_terminal(
        "list", "--arch", "9.0", COLUMNS=str(columns), PRECAST_PROVIDER_PATH=str(root), NO_COLOR="1"
    )
    lines = without_colours(text).splitlines()
    assert max(map(len, lines)) <= columns
    if columns >= 80:
        # A name is one word on one line, which can be copied.
        words = {word for line in lines for word in line.split()}
        assert {spec.name for spec in core_specs("sm90a")} <= words
    joined = re.sub(r"\s+", "", "".join(lines))
    for spec in core_specs("sm90a"):
        assert spec.name in joined
        assert joined.count(f"sm90a/{spec.name}.so") == 1


@pytest.mark.parametrize("columns", [60, 80])
def test_a_row_that_is_too_wide_has_its_short_cells_on_one_line(tmp_path, columns):
    words = ["list", "--arch", "9.0", "--op", "norm"]
    settings = {"PRECAST_CACHE_DIR": str(tmp_path), "PRECAST_JIT": "error", "NO_COLOR": "1"}
    text, _, _ = on_terminal(*words, COLUMNS=str(columns), **settings)
    lines = [line.rstrip() for line in without_colours(text).splitlines()]
    if columns == 60:
        assert lines[0].split() == ["op", "module", "GPU", "target", "source"]
        assert lines[1] == "    from"
        assert "\u2500" * columns == lines[2]
        assert not [line for line in lines if line.endswith("__")]
    row = next(i for i, line in enumerate(lines) if "norm__dtype_bf16" in line)
    assert re.match(r"norm +norm__dtype_bf16 +9.0 +sm90a +missing", lines[row])
    shown = " ".join(lines[row : row + 5])
    assert "compiling is forbidden (PRECAST_JIT=error)" in re.sub(r"\s+", " ", shown)


def test_a_long_word_is_broken_behind_a_slash_or_a_double_underscore():
    assert _output._fitted("cache 0.1, sm90a/norm__dtype_bf16.so", 16) == [
        "cache 0.1,",
        "sm90a/norm__",
        "dtype_bf16.so",
    ]
    assert _output._fitted("x" * 25, 10) == ["x" * 10, "x" * 10, "x" * 5]


def test_without_rich_a_terminal_gets_plain_text(tmp_path):
    (tmp_path / "rich.py").write_text("raise ImportError('no rich here')\n")
    path = os.pathsep.join([str(tmp_path), PACKAGES])
    text, _, _ = on_terminal("list", "--arch", "9.0", PYTHONPATH=path)
    assert "\x1b" not in text
    assert text.splitlines()[0].split() == ["op", "module", "GPU", "target", "source", "from"]


# -- progress -------------------------------------------------------------------------------------


def test_progress_is_drawn_on_a_terminal_and_never_among_the_json(tmp_path):
    root = write_provider(tmp_path, core_specs("sm90a"))
    out, err, code = on_terminal("verify", "--json", str(root), error_only=True)
    assert code == 1
    assert json.loads(out)["ok"] is False
    count = len(core_specs("sm90a"))
    assert f"{count}/{count}" in without_colours(err)
    piped = run("verify", "--json", str(root))
    assert piped.stderr == ""
    assert json.loads(piped.stdout) == json.loads(out)


DRAW = """
from precast._base.progress import make_progress, spinner
with make_progress(3) as bar:
    bar.skip(1)
    bar.start("sm90a/a.so")
    bar.done("sm90a/a.so", 2.5)
    bar.start("sm90a/b[x].so")
    bar.done("sm90a/b[x].so", 1.5)
with spinner("making it") as log:
    log("fetching [a]")
"""


def test_the_progress_of_a_build_is_lines_in_a_pipe():
    done = subprocess.run(
        [sys.executable, "-c", DRAW], capture_output=True, text=True, env={"PYTHONPATH": PACKAGES}
    )
    lines = done.stderr.splitlines()
    assert done.stdout == ""
    assert lines[0] == "1 of 3 modules are built already"
    assert re.fullmatch(
        r"\[2/3\] sm90a/a.so 2.5 s; elapsed 0:0\d, left .*; slowest .* 2.5 s", lines[1]
    )
    assert lines[2].startswith("[3/3] sm90a/b[x].so 1.5 s;")
    assert lines[2].endswith("slowest sm90a/a.so 2.5 s")
    assert lines[3] == "fetching [a]"


def test_the_progress_of_a_build_is_a_bar_on_a_terminal(monkeypatch):
    import io

    from rich.console import Console

    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=120)
    monkeypatch.setattr(_progress, "_console", lambda: console)
    exec(DRAW, {})
    text = without_colours(drawn.getvalue())
    assert "━" in text
    assert "3/3" in text
    assert "sm90a/b[x].so" in text
    assert "fetching [a]" in text


# -- JSON -----------------------------------------------------------------------------------------

DOCUMENTS = {
    "build": ["build", "--arch", "9.0", "--profile", "ci", "--dry-run"],
    "cache": ["cache", "info"],
    "collect-env": ["collect-env"],
    "doctor": ["doctor", "--arch", "9.0"],
    "explain": EXPLAIN,
    "install": ["install", "--arch", "9.0", "--dry-run"],
    "list": ["list", "--arch", "9.0"],
    "verify": ["verify"],
}


@pytest.mark.parametrize("command", DOCUMENTS)
def test_the_json_of_a_command_is_one_object_with_the_documented_keys(command, tmp_path):
    done = run(*DOCUMENTS[command], "--json", PRECAST_CACHE_DIR=str(tmp_path))
    document = json.loads(done.stdout)
    assert document.pop("schema") == _output.JSON_SCHEMA == 1
    declared = _parser.command_module(command).JSON
    other = {"cache": "of prune", "explain": "of gemm"}.get(command)
    if other is not None:
        declared = {k: text for k, text in declared.items() if not text.startswith(other)}
    assert set(document) == set(declared)


@pytest.mark.parametrize("action", ["prune", "clear"])
def test_the_json_of_what_is_removed(action, tmp_path):
    done = run("cache", action, "--dry-run", "--json", PRECAST_CACHE_DIR=str(tmp_path))
    document = json.loads(done.stdout)
    declared = _parser.command_module("cache").JSON
    wanted = {key for key, text in declared.items() if not text.startswith("of info")}
    assert set(document) == {"schema", *wanted}


def test_every_command_but_completion_speaks_json():
    silent = [
        name
        for name in _parser.command_names()
        if not getattr(_parser.command_module(name), "JSON", None)
    ]
    assert "completion" in silent
    assert set(silent) & set(DOCUMENTS) == set()


def test_help_lists_the_keys_and_the_exit_codes():
    text = run("doctor", "--help").stdout
    assert re.search(r"^  schema +1, the version of this format$", text, re.MULTILINE)
    assert re.search(r"^  fixes +commands after which", text, re.MULTILINE)
    assert re.search(r"^  3 +the machine cannot do it", text, re.MULTILINE)


def test_every_option_has_a_help_text_and_every_command_an_example():
    def walk(parser, name):
        for action in parser._actions:
            if isinstance(action.choices, dict):
                for word, sub in action.choices.items():
                    yield from walk(sub, f"{name} {word}")
            elif action.help is None:
                yield f"{name} {action.dest}"
        if name != "precast" and f"    {name} " not in f"{parser.description} ".replace(
            "\n", " \n"
        ):
            yield f"{name}: no example"

    ours = [*DOCUMENTS, "bundle", "completion"]
    assert list(walk(_parser.build_parser(ours), "precast")) == []


# -- speed ----------------------------------------------------------------------------------------


def test_asking_for_the_version_imports_no_command_and_nothing_heavy():
    script = (
        "import sys, precast.cli\n"
        "try: precast.cli.main(['--version'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'tvm_ffi', 'rich', 'argcomplete', 'subprocess', 'pip'}\n"
        "commands = {f'precast.cli.{n}' for n in sys.argv[1:]}\n"
        "print(sorted((heavy | commands) & set(sys.modules)))"
    )
    names = [name.replace("-", "_") for name in _parser.command_names()]
    done = subprocess.run(
        [sys.executable, "-c", script, *names],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": PACKAGES},
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_one_command_imports_no_other():
    script = "import sys, precast.cli; precast.cli.main(['cache', 'info', '--json'])\n"
    script += "print([n for n in sys.modules if n.startswith('precast.cli.')], file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={"PYTHONPATH": PACKAGES}
    )
    loaded = {name.rpartition(".")[2] for name in eval(done.stderr)}
    assert {name for name in loaded if not name.startswith("_")} == {"cache"}


def test_the_command_line_adds_little_to_the_import_of_precast():
    best = 1e9
    for _ in range(4):  # The first run writes the byte code; of the others the quietest counts.
        report = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "precast", "--version"],
            capture_output=True,
            text=True,
            env={"PYTHONPATH": PACKAGES},
        ).stderr
        row = re.search(r"\| +(\d+) \| precast\.cli\n", report)
        assert row is not None
        best = min(best, int(row[1]))
    # 4-8 ms on an idle machine; the bound is loose, because several tests may run at once.
    assert best < 60_000


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize("command", ["list --arch 9.0", "list --arch 9.0 --json", "cache info"])
def test_closed_output_is_no_error(closed, command, tmp_path):
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m precast {command} {closed}', sys.executable],
        env={**os.environ, "PYTHONPATH": PACKAGES, "PRECAST_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_an_encoding_lacks_is_escaped(encoding, tmp_path):
    place = tmp_path / "\u4e16\u754c"
    place.mkdir()
    done = run("doctor", PRECAST_PROVIDER_PATH=str(place), PYTHONIOENCODING=encoding)
    assert done.returncode == 1, done.stderr
    assert r"\u4e16\u754c" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("command", [["doctor", "--arch", "9.0"], ["verify"], ["collect-env"]])
def test_json_of_a_path_that_is_not_utf_8_is_unicode(command, tmp_path):
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/d\xe9"))
    write_provider(root, core_specs("sm90a")[:1])
    done = run(*command, "--json", PRECAST_PROVIDER_PATH=str(root), PRECAST_JIT="error")
    (provider,) = json.loads(done.stdout)["providers"]
    assert provider["root"] == f"{tmp_path}/d\\udce9"
    json.dumps(json.loads(done.stdout), ensure_ascii=False).encode()
