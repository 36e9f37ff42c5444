# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own, precast's beside another one: what their benchmarks share.

An engine is a script that reads its options from one JSON file and writes its answer to another.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _engine_log
import peers
import torch
from _vllm_model import CONFIG, LENGTHS, write_checkpoint

from precast.testing import environment, report

#: Two tokens whose log-probabilities differ by less are a tie: rounding decides. The logits of the
#: model have a standard deviation of 4 and bfloat16 rounds the largest to 0.06. vLLM itself does
#: not repeat its tokens on an H200: it chose between some that lie up to 0.31 apart.
TIE = 0.5
#: A sampled token may lie this far behind ``top_k``, which is 20, where logits are equal.
EQUAL_LOGITS = 5


class Engine(NamedTuple):
    """What is measured: a script, and the packages whose versions the results name."""

    name: str
    script: Path
    packages: tuple[str, ...]
    forbidden: tuple[str, ...] = ()  # compilers that precast's process may not start


class Pair(NamedTuple):
    """Two engines that differ in their attention and sampler; options beside the common ones."""

    name: str
    ours: Mapping[str, Any]
    other: Mapping[str, Any]
    called: tuple[str, ...]  # functions of flashinfer that precast's engine has to call


def parser(description: str, caches: Iterable[str]) -> argparse.ArgumentParser:
    """Make the parser of the options that all engines have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--kv", action="append", choices=[*caches], help="default: all")
    parser.add_argument("--other", help="the engine's own backend to compare with")
    parser.add_argument("--model", help="a folder or name of a model (default: random weights)")
    parser.add_argument("--vocab", type=int, default=CONFIG["vocab_size"], help="of that model")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and queries")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate for a prompt")
    parser.add_argument("--runs", type=int, default=2, help="timed runs; the best counts")
    parser.add_argument("--tie", type=float, default=TIE, help="difference of log-probabilities")
    parser.add_argument(
        "--logs", type=Path, help="a folder for the engines' whole logs and answers"
    )
    parser.add_argument(
        "--only", choices=("ours", "other"), help="run these engines alone and compare nothing"
    )
    parser.add_argument(
        "--reuse", action="store_true", help="take answers that --logs has instead of running again"
    )
    parser.add_argument(
        "--json", type=Path, help="write the results here, and the engines' logs beside as .log"
    )
    parser.add_argument("--csv", type=Path, help="write the table to this file")
    parser.add_argument("--commit", help="the commit measured (default: $COMMIT, then git)")
    return parser


# -- one engine -----------------------------------------------------------------------------------


def name_of(options: Mapping[str, Any]) -> str:
    """The name of an engine's files."""
    return "-".join(str(options[key]) for key in ("backend", "kv_cache_dtype", "decode"))


def run_engine(options: Mapping[str, Any], folder: Path, script: Path) -> dict[str, Any]:
    """What one engine answers, or ``{"error": ...}``; its log is kept in the folder.

    Each has empty caches, so that none starts faster because of one before it.
    """
    name = name_of(options)
    asked, answer = folder / f"{name}.options.json", folder / f"{name}.json"
    asked.write_text(json.dumps(options), encoding="utf-8")
    caches = Path(str(options["caches"])) / name
    variables = {
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TVM_FFI_CACHE_DIR": str(caches / "tvm-ffi"),
    }
    with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
        done = subprocess.run(
            [sys.executable, str(script), str(asked), str(answer)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            check=False,
        )
    if done.returncode:
        lines = (folder / f"{name}.log").read_text(encoding="utf-8").strip().splitlines()
        said = lines[-1] if lines else f"exit status {done.returncode}"
        said = _engine_log.without_names(said, _engine_log.names_of_this_machine())
        return {"error": f"{name}: {said}"}
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found


#: Options that say where something lies, and not what an engine does.
PLACES = ("model", "caches")


def answer_in(folder: Path, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """What an engine of these options has answered into the folder before, if it has."""
    asked, answer = (folder / f"{name_of(options)}{end}" for end in (".options.json", ".json"))
    if not (asked.is_file() and answer.is_file()):
        return None
    before = json.loads(asked.read_text(encoding="utf-8"))
    if any(before.get(key) != value for key, value in options.items() if key not in PLACES):
        return None
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found


def write_logs(file: Path, folder: Path, engines: Iterable[str], names: Mapping[str, str]) -> None:
    """Write the logs of these engines into one file beside the results, see ``_engine_log``."""
    logs = {
        name: (folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        for name in engines
    }
    text = _engine_log.kept(logs, {str(folder.resolve()): "$LOGS", str(folder): "$LOGS", **names})
    file.write_text(text, encoding="utf-8")


# -- two engines ----------------------------------------------------------------------------------


def compare(ours: Mapping[str, Any], other: Mapping[str, Any], tie: float) -> dict[str, Any]:
    """Count the greedy tokens that are equal, and the prompts whose first difference is a tie.

    What comes after a difference is not compared: the two engines read other tokens there.
    """
    equal, ties, wrong = 0, 0, []
    for prompt, (mine, theirs) in enumerate(zip(ours["greedy"], other["greedy"])):
        same = [a == b for a, b in zip(mine, theirs)]
        first = same.index(False) if False in same else len(same)
        equal += first
        if first == len(same):
            continue
        step = other["logprobs"][prompt][first]
        best = step[str(theirs[first])]
        gap = best - step.get(str(mine[first]), float("-inf"))
        if gap < tie:
            ties += 1
        else:
            wrong.append({"prompt": prompt, "token": first, "gap": gap})
    total = sum(map(len, other["greedy"]))
    return {"tokens": total, "equal": equal, "ties": ties, "wrong": wrong}


def problems(
    engine: Engine, pair: Pair, ours: Mapping[str, Any], compared: Mapping[str, Any]
) -> Iterator[str]:
    """What is not as it has to be, one line each."""
    if compared["wrong"]:
        yield f"{len(compared['wrong'])} prompts have a wrong token: {compared['wrong'][0]}"
    if ours["attention"] != [pair.ours["backend"]]:
        yield f"attention is {ours['attention']}"
    for name in pair.called:
        if not ours["calls"].get(name):
            yield f"flashinfer's {name} was not called"
    built = {name: n for name, n in ours["compilers"].items() if name in engine.forbidden}
    if built:
        yield f"compilers ran: {built}"
    if not ours["cached_tokens"]:
        yield "no prompt found its prefix in the cache"
    for name in ("top_k", "both"):
        worst = max(max(ranks) for ranks in ours["ranks"][name])
        if worst > 20 + EQUAL_LOGITS:
            yield f"{name}: a token of rank {worst} was drawn"


def record_of(
    engine: Engine, pair: Pair, ours: Mapping[str, Any], other: Mapping[str, Any], tie: float
) -> dict[str, Any]:
    """One row of the result file, in seconds and tokens per second."""
    return {
        "name": pair.name,
        "engine": f"{engine.name} {ours[engine.name]}",
        "other": other["backend"],
        "seconds": ours["seconds"]["start"],
        "other_seconds": other["seconds"]["start"],
        "tokens_per_second": max(ours["tokens_per_second"]),
        "other_tokens_per_second": max(other["tokens_per_second"]),
        "repeats_itself": ours["greedy"] == ours["again"],
        "other_repeats_itself": other["greedy"] == other["again"],
        "tie": tie,
        **compare(ours, other, tie),
        "cached_tokens": ours["cached_tokens"],
        "prompt_tokens": ours["prompt_tokens"],
        "stages": ours["seconds"],
        "other_stages": other["seconds"],
        "calls": ours["calls"],
        "compilers": ours["compilers"],
        "other_compilers": other["compilers"],
    }


def table(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row for each pair of engines."""
    rows = [["engine", "equal tokens", "ties", "wrong", "start s", "other", "tokens/s", "other"]]
    for r in records:
        times = [f"{r[key]:.1f}" for key in ("seconds", "other_seconds")]
        speeds = [f"{r[key]:.0f}" for key in ("tokens_per_second", "other_tokens_per_second")]
        counts = [f"{r['equal']} of {r['tokens']}", str(r["ties"]), str(len(r["wrong"]))]
        rows.append([f"{r['engine']}, {r['name']}, {r['other']}", *counts, *times, *speeds])
    return rows


def measure(engine: Engine, pairs: Iterable[Pair], options: argparse.Namespace) -> None:
    """Run the pairs, report and write what they answer; exits with 1 if something is wrong."""
    if not torch.cuda.is_available():
        sys.exit("error: benchmarks need a CUDA device; torch sees none")
    packages = (*engine.packages, *peers.distributions())
    here = environment(options.commit, Path(__file__).parent, packages)
    report.print_circumstances(here)
    records: list[dict[str, Any]] = []
    failures: list[dict[str, str]] = []
    answers: dict[str, dict[str, Any]] = {}  # of the engines that ran, by their names
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        model = options.model or str(write_checkpoint(Path(temporary) / "model"))
        common = {
            "model": model,
            "caches": f"{temporary}/caches",
            "vocab": options.vocab,
            "dtype": options.dtype,
            "tokens": options.tokens,
            "runs": options.runs,
            "requests": len(LENGTHS),
            "max_model_len": 4096,
            "chunk": 512,
        }
        for pair in pairs:
            of_pair = {"other": pair.other, "ours": pair.ours}
            for which, asked in of_pair.items():
                given = {**common, **asked}
                if name_of(asked) in answers or options.only not in (None, which):
                    continue
                before = answer_in(folder, given) if options.reuse else None
                answers[name_of(asked)] = before or run_engine(given, folder, engine.script)
            if options.only:
                run = answers[name_of(of_pair[options.only])]
                if "error" in run:
                    failures += [{"op": engine.name, "shape": pair.name, "error": run["error"]}]
                continue
            other, ours = (answers[name_of(asked)] for asked in (pair.other, pair.ours))
            errors = [run["error"] for run in (ours, other) if "error" in run]
            if not errors:
                record = record_of(engine, pair, ours, other, options.tie)
                records.append(record)
                errors = [*problems(engine, pair, ours, record)]
            failures += [{"op": engine.name, "shape": pair.name, "error": e} for e in errors]
            print("\n".join([pair.name, *errors]), file=sys.stderr, flush=True)
            # Written after each pair: what ran is kept if a later one takes too long.
            if options.json:
                report.write_json(options.json, report.document(here, records, failures=failures))
                places = {temporary: "$TEMPORARY"}
                if Path(model).is_dir():
                    places[model] = "$MODEL"
                write_logs(options.json.with_suffix(".log"), folder, answers, places)
    if records:
        report.print_table(table(records))
    for failure in failures:
        print("FAILED {op} {shape}: {error}".format(**failure))
    if options.csv and records:
        report.write_csv(options.csv, table(records), here)
    if failures:
        sys.exit(1)
