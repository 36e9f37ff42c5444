# SPDX-License-Identifier: Apache-2.0
"""precast tune gemm and precast explain gemm: shapes, errors, what is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import run

from precast._plan import gemm_table
from precast._plan.gemm_model import FAMILIES
from precast._plan.gemm_table import Shape
from precast.cli import _gemm_shapes, tune
from precast.cli._output import UsageError


def test_a_file_has_shapes_of_all_kinds():
    text = "m=1,64 n=256 k=512  # two\n\nm=16 n=256 k=512 groups=8\nm=1,64 n=256 k=512\n"
    text += "m=256 n=256 k=512 groups=2 kind=contiguous\nm=1 n=250 k=8 operands=bf16\n"
    assert _gemm_shapes.of_file("shapes", text) == [
        Shape("plain", 1, 1, 256, 512),
        Shape("plain", 1, 64, 256, 512),
        Shape("masked", 8, 16, 256, 512),
        Shape("contiguous", 2, 256, 256, 512),
        Shape("plain", 1, 1, 250, 8, "bf16"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("m=1 n=256", "shapes, line 2: k missing"),
        ("m=1 n=256 k=512 k=512", "'k=512' is not one of m, n and k"),
        ("m=1 n=256 k=512 q=1", "'q=1' is not one of m, n and k"),
        ("m=0 n=256 k=512", "m=0: legal: positive integers"),
        ("m=1 n=250 k=512", "n=250: legal: positive multiples of 8"),
        ("m=1 n=256 k=8", "k=8: legal: positive multiples of 16"),
        (f"m={'9' * 5000} n=256 k=512", "legal: positive integers"),
        ("m=1 n=256 k=512 kind=odd", "unknown kind 'odd'; legal: plain, masked"),
        ("m=1 n=256 k=512 kind=plain groups=2", "kind=plain has no groups"),
        ("m=1 n=256 k=512 operands=e5m2", "unknown operands 'e5m2'; legal: fp8_block, fp8_row"),
        ("m=1 n=256 k=12 operands=bf16", "k=12: legal: positive multiples of 8"),
        ("m=1 n=256 k=512 operands=bf16 kind=masked", "legal: plain, batched, ranges"),
    ],
)
def test_a_wrong_line_is_named(line, message):
    with pytest.raises(UsageError) as error:
        _gemm_shapes.of_file("shapes", "# shapes\n" + line)
    assert message in str(error.value)


def test_a_file_without_shapes_is_an_error():
    with pytest.raises(UsageError, match="shapes has no shape"):
        _gemm_shapes.of_file("shapes", "# none\n")


def test_tuning_without_a_gpu_of_hopper_says_so(tmp_path: Path):
    shapes = tmp_path / "shapes"
    shapes.write_text("m=1 n=256 k=512\n")
    table = tmp_path / "table.json"
    done = run(
        "tune", "gemm", "--shapes", str(shapes), "--out", str(table), CUDA_VISIBLE_DEVICES=""
    )
    assert done.returncode == 3
    assert "--device 0: torch sees no CUDA devices" in done.stderr
    assert not table.exists()


@pytest.mark.parametrize("out", [".", "no/such/folder/table.json"])
def test_a_table_needs_a_folder(tmp_path: Path, out: str):
    shapes = tmp_path / "shapes"
    shapes.write_text("m=1 n=256 k=512\n")
    done = run("tune", "gemm", "--shapes", str(shapes), "--out", str(tmp_path / out))
    assert done.returncode == 2
    assert "legal: a file in a folder that exists" in done.stderr


@pytest.mark.parametrize(
    ("operands", "kind"),
    [(operands, kind) for operands, family in FAMILIES.items() for kind in family.kinds],
)
def test_candidates_begin_with_the_choice_of_the_model(operands, kind):
    shape = Shape(kind, 1 if kind == "plain" else 8, 128, 4096, 7168, operands)
    found = tune.candidates(shape, 132)
    assert len(found) > 3 and all(choice.is_legal(kind) for choice in found)
    explained = run("explain", "gemm", *str(shape).split(), "--json")
    assert json.loads(explained.stdout)["products"][0]["choice"] == found[0].name


def test_a_choice_takes_the_place_of_the_model_where_it_is_faster():
    shape = Shape("plain", 1, 128, 4096, 7168)
    near = tune.chosen(shape, "128x64", {"128x64": 10.05, "128x96": 10.0})
    far = tune.chosen(shape, "128x64", {"128x64": 10.5, "128x96": 10.0})
    assert (near["choice"], near["us"], near["model_us"]) == ("128x64", 10.05, 10.05)
    assert (far["choice"], far["us"], far["model"], far["model_us"]) == (
        *("128x96", 10.0),
        *("128x64", 10.5),
    )


def test_explain_shows_the_ranking_and_the_table(tmp_path: Path):
    words = ("explain", "gemm", "m=64,4096", "n=4096", "k=7168")
    done = run(*words, "--json")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert report["table"] is None
    few, many = report["products"]
    assert (few["m"], many["m"], few["source"], few["sms"]) == (64, 4096, "model", 132)
    assert few["choice"] == few["ranking"][0]["name"] != many["choice"]
    assert [r["us"] for r in many["ranking"]] == sorted(r["us"] for r in many["ranking"])
    shape = Shape("plain", 1, 64, 4096, 7168)
    path = tmp_path / "table.json"
    gemm_table.write(path, "a GPU", 132, [{**shape._asdict(), "choice": "128x96"}])
    text = run(*words, PRECAST_GEMM_TABLE=str(path)).stdout
    assert "Result: 128x96, the choice of PRECAST_GEMM_TABLE" in text
    assert f"Result: {many['choice']}, the choice of the model" in text
    assert f"Table: {path}: 1 shapes, measured on a GPU" in text
    # On a GPU with other multiprocessors it does not count.
    other = json.loads(run(*words, "sms=114", "--json", PRECAST_GEMM_TABLE=str(path)).stdout)
    assert [product["source"] for product in other["products"]] == ["model", "model"]


@pytest.mark.parametrize("word", ["sms=0", "sms=9999", "sms=x", "n=7", "groups=2,x"])
def test_explain_names_a_wrong_size(word):
    words = {"m": "m=64", "n": "n=4096", "k": "k=7168", word.partition("=")[0]: word}
    done = run("explain", "gemm", *words.values())
    assert done.returncode == 2
    assert word in done.stderr and "legal: " in done.stderr


def test_doctor_says_which_table_is_in_use(tmp_path: Path):
    path = tmp_path / "table.json"
    gemm_table.write(path, "a GPU", 132, [])
    done = run("doctor", "--arch", "9.0", "--json", PRECAST_GEMM_TABLE=str(path))
    report = json.loads(done.stdout)
    assert (done.returncode, report["gemm_table"]["path"]) == (0, str(path))
    assert f"{path}: 0 shapes" in report["gemm_table"]["text"]
    path.write_text("junk")
    done = run("doctor", "--arch", "9.0", "--json", PRECAST_GEMM_TABLE=str(path))
    (problem,) = json.loads(done.stdout)["problems"]
    assert done.returncode == 1 and "Fix: write it again with `precast tune gemm`" in problem
