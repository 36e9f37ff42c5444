# SPDX-License-Identifier: Apache-2.0
"""benchmarks/compare.py: what counts as slower, and what is noise or another machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_support import RESULTS, benchmarks, write_run, write_startup

__all__ = ["benchmarks"]


@pytest.fixture
def compare(benchmarks: Any) -> Any:
    return benchmarks("compare")


def verdicts(compare: Any, old: Path, new: Path, threshold: float = 0.03) -> dict[str, str]:
    changes = compare.changes(compare.load_run(old), compare.load_run(new), threshold)
    return {change.name.split()[0]: change.verdict for change in changes}


def test_slower_and_faster_beyond_noise_are_marked(compare: Any, tmp_path: Path) -> None:
    old = write_run(tmp_path / "old.json", {"a [1]": 10.0, "b [1]": 10.0, "c [1]": 10.0})
    new = write_run(tmp_path / "new.json", {"a [1]": 11.0, "b [1]": 9.0, "c [1]": 10.2})
    assert verdicts(compare, old, new) == {"a": "REGRESSION", "b": "improved", "c": ""}


def test_spans_that_meet_are_noise(compare: Any, tmp_path: Path) -> None:
    old = write_run(tmp_path / "old.json", {"a [1]": 10.0}, spread=0.1)
    new = write_run(tmp_path / "new.json", {"a [1]": 11.0}, spread=0.1)
    # p80 of old is 10.6, p20 of new 10.34
    assert verdicts(compare, old, new) == {"a": ""}
    tight = write_run(tmp_path / "tight.json", {"a [1]": 11.0}, spread=0.01)
    assert verdicts(compare, old, tight) == {"a": "REGRESSION"}
    assert verdicts(compare, old, tight, threshold=0.2) == {"a": ""}


def test_a_slower_machine_is_no_regression(compare: Any, tmp_path: Path) -> None:
    old = write_run(tmp_path / "old.json", {"a [1]": 10.0, "b [1]": 10.0}, roof=4400.0)
    new = write_run(tmp_path / "new.json", {"a [1]": 11.0, "b [1]": 10.0}, roof=4000.0)
    # All is a tenth slower there, so b, which is not, became better.
    assert verdicts(compare, old, new) == {"a": "", "b": "improved"}
    # And a faster machine hides nothing.
    fast = write_run(tmp_path / "fast.json", {"a [1]": 10.0, "b [1]": 9.1}, roof=4840.0)
    assert verdicts(compare, old, fast) == {"a": "REGRESSION", "b": ""}


def test_exit_status(compare: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = str(write_run(tmp_path / "old.json", {"a [1]": 10.0}))
    slow = str(write_run(tmp_path / "slow.json", {"a [1]": 20.0}))
    other = str(write_run(tmp_path / "other.json", {"b [1]": 10.0}))
    assert compare.main([old, old]) == 0
    assert "1 cases compared, 0 regressions" in capsys.readouterr().out
    assert compare.main([old, slow]) == 1
    assert "2.000  REGRESSION" in capsys.readouterr().out
    assert compare.main([old, slow, "--threshold", "1.5"]) == 0
    assert compare.main([old, other]) == 2
    for wrong in ([old, str(tmp_path)], [old, str(tmp_path / "none.json")]):
        with pytest.raises(SystemExit) as raised:
            compare.main(wrong)
        assert raised.value.code == 2


def test_other_gpu_and_failures_are_said(
    compare: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench_support import rewrite

    old = write_run(tmp_path / "old.json", {"a [1]": 10.0})
    new = write_run(tmp_path / "new.json", {"a [1]": 10.0})
    here = {"date": "2026-11-21 06:00 UTC", "gpu": "Other GPU", "commit": "x"}
    rewrite(new, environment=here, failures=[{"op": "b", "shape": "[1]", "error": "ValueError: y"}])
    assert compare.main([str(old), str(new)]) == 0
    out = capsys.readouterr().out
    assert "warning: other GPU: Test GPU, now Other GPU" in out
    assert "not measured now: b [1]: ValueError: y" in out


def test_cpu_times_are_in_units_of_one_torch_call(compare: Any, tmp_path: Path) -> None:
    old = write_startup(tmp_path / "old.json", 4.0, {"f(x)": 3.0, "g(x)": 3.0})
    new = write_startup(tmp_path / "new.json", 6.0, {"f(x)": 4.5, "g(x)": 6.0})
    changes = compare.changes(compare.load_run(old), compare.load_run(new), 0.15)
    found = {change.name: change.verdict for change in changes}
    # What has no spread (import, without torch) cannot be judged.
    assert found == {
        "CPU time of f(x)": "",
        "CPU time of g(x)": "REGRESSION",
        "CPU time of torch.add(x, x, out=o)": "",
    }
    assert changes[0].old.median == pytest.approx(3.0)


def test_committed_results_are_as_fast_as_themselves(compare: Any) -> None:
    folders = sorted(RESULTS.iterdir())
    assert folders
    for folder in folders:
        runs = [json.loads(path.read_text()) for path in folder.glob("*.json")]
        # Figures by their units are left out, and a folder may have nothing else.
        if not all("figures" in record for run in runs for record in run["results"]):
            assert compare.main([str(folder)] * 2) == 0


def test_engines_are_compared_by_the_time_of_a_token(compare: Any, tmp_path: Path) -> None:
    """Normalised by the other attention of the same run, which the machine slows down as well."""

    def written(name: str, speed: float, other: float) -> Path:
        record = {"engine": "e", "name": "KV cache auto", "other": "OTHER"}
        record |= {"tokens_per_second": speed, "other_tokens_per_second": other}
        environment = {"date": "2026-11-23 12:00 UTC"}
        path = tmp_path / name
        path.write_text(json.dumps({"schema": 2, "environment": environment, "results": [record]}))
        return path

    old, same = written("old.json", 1000, 500), written("same.json", 800, 400)
    slower = written("slower.json", 800, 500)
    assert compare.main([str(old), str(same)]) == 0
    assert compare.main([str(old), str(slower)]) == 1
