# SPDX-License-Identifier: Apache-2.0
"""benchmarks/_engine_log.py: logs of engines that can be committed beside their results."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from bench_support import BENCHMARKS, benchmarks

__all__ = ["benchmarks"]

NAMES = {"/data/weights": "$MODEL", "/data/weights/logs": "$LOGS", "node-17": "$HOST"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("loading /data/weights/model.safetensors", "loading $MODEL/model.safetensors"),
        ("see /data/weights/logs", "see $LOGS"),
        ("/data/weights-2/x is another", "$DIR/x is another"),
        ("on node-17, tcp://10.2.3.4:29500", "on $HOST, tcp://$IP:29500"),
        ("tcp://127.0.0.1:29500", "tcp://127.0.0.1:29500"),
        ("see https://docs.vllm.ai/en/latest/usage", "see https://docs.vllm.ai/en/latest/usage"),
        ("File '/srv/env/lib/python3.12/threading.py', line 4", "File '$DIR/threading.py', line 4"),
        ("file:///srv/x/y.log", "file://$DIR/y.log"),
        ("LD=/srv/a/lib:/srv/b/lib", "LD=$DIR/lib:$DIR/lib"),
        ("tokens/s 5/7 driver 580.159.04", "tokens/s 5/7 driver 580.159.04"),
        ("[core.py:98] vllm/v1/engine/core.py", "[core.py:98] vllm/v1/engine/core.py"),
    ],
)
def test_names_of_the_machine_become_placeholders(
    benchmarks: Any, line: str, expected: str
) -> None:
    assert benchmarks("_engine_log").without_names(line, NAMES) == expected


def test_folders_of_this_python_and_checkout_are_known(benchmarks: Any) -> None:
    log = benchmarks("_engine_log")
    line = f"{sysconfig.get_path('purelib')}/vllm/a.py {sys.prefix}/bin/x {BENCHMARKS}/run.py"
    found = log.without_names(line, log.names_of_this_machine())
    assert found == "$SITE/vllm/a.py $PREFIX/bin/x $CHECKOUT/benchmarks/run.py"


def test_progress_bars_end_and_the_middle_of_a_long_log_is_left_out(benchmarks: Any) -> None:
    log = benchmarks("_engine_log")
    assert log.short("a\n0%\r50%\r100%\n\n\x1b[32mgreen\x1b[0m\n") == ["a", "100%", "green"]
    many = log.short("\n".join(map(str, range(1000))))
    assert len(many) == log.FIRST + 1 + log.LAST
    assert many[log.FIRST - 1 : log.FIRST + 2] == ["299", "... 600 lines ...", "900"]
    assert len(log.short("x" * 10_000)[0]) < 500


def test_logs_of_all_engines_stand_in_one_file(benchmarks: Any, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.log").write_text(f"I am {name} in {tmp_path}/{name}.log\n/a/b/c\n")
    file = tmp_path / "vllm.log"
    benchmarks("_engines").write_logs(file, tmp_path, ["two", "one"], {})
    assert file.read_text() == (
        "== two\nI am two in $LOGS/two.log\n$DIR/c\n\n== one\nI am one in $LOGS/one.log\n$DIR/c\n"
    )
