# SPDX-License-Identifier: Apache-2.0
"""Make docs/performance.md and the table of README.md from the committed results.

The newest result file of each name and GPU counts, by the date inside; older ones are deleted.
The pictures are not committed: the build of the documentation draws them into
``build/performance``. Each picture carries a hash of the numbers and of the code that it was drawn
from, so that a second build draws only what changed. Prints the files that it changed or deleted.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from sitegen import markup

from precast.testing import plots
from precast.testing.report import figure_table, is_number, peers_of, table
from precast.testing.results import Run, load_run, newest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results"
PAGE, PICTURES, README = "docs/performance.md", "build/performance", "README.md"

#: A run with more shapes has bars only for those of Llama 3: its vocabulary, its heads of 128.
MOST_BARS, USUAL = 72, re.compile(r" 128256\]$|^32/8 (?!d\d)")


class Headline(NamedTuple):
    """A row of README.md: a shape of an op, or the sum of figures of `startup`."""

    text: str
    op: str = ""
    shape: str = ""
    dtype: str = ""
    figures: tuple[str, ...] = ()


_SILU, _NORM = "first silu_and_mul(x)", "first rmsnorm(x, w, out=o)"
HEADLINES = (
    Headline(
        "decode of 64 requests of 4096 tokens",
        "BatchDecodeWithPagedKVCacheWrapper",
        "32/8 b64 4096",
        "bf16",
    ),
    Headline(
        "causal prefill of 8 requests of 2048 tokens",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "32/8 8 x 2048",
        "bf16",
    ),
    Headline("norm of 1024 rows of 8192", "rmsnorm", "[1024, 8192]", "bf16"),
    Headline(
        "top-k, top-p sampling of 64 rows of 128256",
        "top_k_top_p_sampling_from_probs",
        "[64, 128256]",
        "f32",
    ),
    Headline("top 50 of 64 rows of 128256", "top_k", "[64, 128256] k 50", "f32"),
    Headline(
        "import after torch and first `rmsnorm`, tvm_ffi included",
        figures=("import after torch", f"{_NORM}, with tvm_ffi"),
    ),
    Headline(
        "first `silu_and_mul` alone, tvm_ffi imported before", figures=(f"{_SILU}, after tvm_ffi",)
    ),
    Headline("JIT of the norms, 16 cores", figures=("JIT of norm, 16 cores",)),
)
#: The peers that README.md shows, by their names in results.
PEERS = {"flashinfer": "FlashInfer", "fa3": "FlashAttention 3", "cudnn": "cuDNN"}

INTRO = """\
# Performance

<!-- Made by docs/performance.py from the files under benchmarks/results. Fix: make generate -->

Every figure here was measured on real hardware by the scripts of `benchmarks/`; the files they
wrote are in `benchmarks/results/`, and this page is made from the newest of each.

- **us** is the median time of a call on the GPU, and **p20-p80** its spread: CUDA-graph replays,
  over copies of the arguments that together exceed twice the L2 cache. Ours and the peers' graphs
  are replayed in turn, so that clocks and temperature are the same for all.
- **GB/s** counts the bytes that the call must at least read and write.
- **of ceiling** is the share of what this GPU reached in the same run: the best of torch's copy,
  negate, scale and product over 1 GiB, or of its large matrix products if those are the limit.
  Calls of a few microseconds are limited by the launch instead.
- **x peer** is the peer's time over ours: above 1, precast is faster.
- **CPU us** is the CPU time of the call, launch included.
"""

REPRODUCE = """\
## Measure it yourself

```bash
python benchmarks/run.py --json results/ --plot results/    # all ops, beside the peers installed
python benchmarks/run.py --routine startup --json results/
python benchmarks/compare.py benchmarks/results/nvidia-h200/COMMIT results/
```

`benchmarks/README.md` explains the options and how a benchmark or a peer is added.
"""


class Picture(NamedTuple):
    """One picture of a run of ops, and what it is drawn from."""

    name: str  # of the file
    kind: str  # "bars" or "roofline"
    run: Run
    peers: tuple[str, ...]  # that the pictures of this GPU show, so that each has one colour
    text: str  # alternative text

    @property
    def stamp(self) -> str:
        """A hash of the numbers and of the code, which the file holds."""
        numbers = json.dumps([asdict(self.run), self.peers], sort_keys=True)
        content = numbers + inspect.getsource(plots)
        return "made from sha256 " + hashlib.sha256(content.encode()).hexdigest()

    def draw(self, folder: Path) -> None:
        """Write the file atomically."""
        unfinished = folder / f"{os.getpid()}-{self.name}"
        if self.kind == "bars":
            plots.save_bars(self.run, unfinished, self.peers, self.stamp)
        else:
            plots.save_roofline(self.run, unfinished, self.stamp)
        unfinished.replace(folder / self.name)


def pictures(results: Mapping[str, Mapping[str, Run]]) -> dict[str, list[Picture]]:
    """Two pictures of every run of ops, by ``<gpu>/<run>``."""
    found = {}
    for gpu, runs in results.items():
        ops = [run for run in runs.values() if run.measures_ops and run.records]
        peers = tuple(dict.fromkeys(peer for run in ops for peer in peers_of(run.records)))
        for run in ops:
            short = with_few_bars(run)
            shapes = "each shape" if short is run else "the shapes of one model"
            start = f"{gpu}-{run.name.replace('_', '-')}"
            text = f"{run.name}: speed of {shapes} beside its peers"
            found[f"{gpu}/{run.name}"] = [
                Picture(f"{start}-bars.svg", "bars", short, peers, text),
                Picture(f"{start}-roofline.svg", "roofline", run, peers, f"{run.name}: roofline"),
            ]
    return found


def with_few_bars(run: Run) -> Run:
    """The run, or if it has very many shapes, those of one model of each op that has them."""
    if len(run.records) <= MOST_BARS:
        return run
    usual = [r for r in run.records if USUAL.search(r["shape"])]
    ops = {record["op"] for record in usual}
    few = [r for r in run.records if r["op"] not in ops or r in usual]
    return replace(run, records=few)


def page(results: Mapping[str, Mapping[str, Run]]) -> str:
    """The text of docs/performance.md."""
    parts = [INTRO]
    for gpu, runs in results.items():
        parts.append(f"## {next(iter(runs.values())).gpu}\n")
        for run in runs.values():
            if run.measures_ops:
                parts += _ops(gpu, run)
            elif run.measures_primitives:
                parts += _primitives(run)
            else:
                parts += _engines(run) if run.measures_engines else _startup(run)
    return "\n".join([*parts, REPRODUCE])


def _ops(gpu: str, run: Run) -> Iterator[str]:
    yield f"### {run.name.replace('_', ', ')}\n"
    yield _circumstances(run)
    if run.records:
        yield f"<!-- generated: pictures {gpu}/{run.name} -->\n"
    yield _markdown(table(run.records))


def _startup(run: Run) -> Iterator[str]:
    yield "### Start-up and CPU time\n"
    yield _circumstances(run)
    yield (
        "Fresh processes, medians; the first call is one with a prebuilt module, and JIT compiles"
        " one module into an empty cache.\n"
    )
    yield _markdown(_startup_table([r for r in run.records if "p20" not in r]))
    yield _markdown(_cpu_table([r for r in run.records if "p20" in r]))


def _primitives(run: Run) -> Iterator[str]:
    yield f"### Primitives: {run.name.removeprefix('micro_').replace('_', ' ')}\n"
    yield _circumstances(run)
    yield _markdown(figure_table(run.records))


def _engines(run: Run) -> Iterator[str]:
    yield "### vLLM on precast\n"
    yield _circumstances(run)
    yield (
        "Engines with the same weights and prompts, in fresh processes: vLLM with precast as its"
        " FlashInfer, and with an attention backend and a sampler of its own. Greedy tokens are"
        " compared up to the first difference of each prompt, which is a tie if both tokens are"
        " about as likely.\n"
    )
    yield _markdown(_engine_table(run.records))


def _engine_table(records: Sequence[Mapping[str, object]]) -> list[list[str]]:
    rows = [["engine", "beside", "equal tokens", "ties", "start", "beside", "tokens/s", "beside"]]
    for r in records:
        start = (_time(r[key]) for key in ("seconds", "other_seconds"))
        speed = (f"{r[key]:.0f}" for key in ("tokens_per_second", "other_tokens_per_second"))
        equal = f"{r['equal']} of {r['tokens']}"
        name = f"{r['engine']}, {r['name']}"
        rows.append([name, str(r["other"]), equal, str(r["ties"]), *start, *speed])
    return rows


def _startup_table(records: Sequence[Mapping[str, object]]) -> list[list[str]]:
    others = (
        [key for key in records[0] if key not in ("name", "seconds", "note")] if records else []
    )
    rows = [["measure", "precast", *others]]
    for record in records:
        rows.append([_code(record["name"]), *(_time(record[key]) for key in ("seconds", *others))])
    return rows


def _cpu_table(records: Sequence[Mapping[str, object]]) -> list[list[str]]:
    rows = [["measure", "median", "p20-p80"]]
    for record in records:
        spread = f"{_time(record['p20'])} - {_time(record['p80'])}"
        rows.append([_code(record["name"]), _time(record["seconds"]), spread])
    return rows


def _code(name: object) -> str:
    """A call inside a name, as code."""
    return re.sub(r"(\w[\w.]*\([^)]*\))", r"`\1`", str(name))


def _time(seconds: object) -> str:
    if not isinstance(seconds, (int, float)):
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _circumstances(run: Run) -> str:
    known = run.environment
    names = {
        "driver": "driver",
        "cuda": "CUDA",
        "torch": "torch",
        "flashinfer-python": "FlashInfer",
    }
    where = [f"{text} {known[name]}" for name, text in names.items() if name in known]
    lines = [f"Commit {run.commit}, {run.date:%Y-%m-%d}; {', '.join(where)}."]
    ceilings = [
        f"{name} {c['best']:.4g} {c['unit']} ({c['kernel']})" for name, c in run.ceilings.items()
    ]
    if ceilings:
        lines.append(f"Ceilings of the run: {', '.join(ceilings)}.")
    return "\n".join(lines) + "\n"


def _versions(runs: Iterable[Run]) -> str:
    """The versions of all packages, of each that of the newest run that had it."""
    found: dict[str, str] = {}
    for run in sorted(runs, key=lambda run: run.date):
        found |= run.environment
    names = {"driver": "driver", "cuda": "CUDA", "torch": "torch"}
    # Every other entry of the environment is a package that we compared with.
    own = (*names, "date", "precast", "commit", "python", "machine", "gpu", "capability", "sms")
    names |= {name: name for name in found if name not in own}
    known = {text: found.get(name) for name, text in names.items()}
    return ", ".join(f"{text} {version}" for text, version in known.items() if version)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    right = [all(is_number(row[column]) for row in rows[1:]) for column in range(len(rows[0]))]
    rule = ["---:" if side else "---" for side in right]
    lines = [rows[0], rule, *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def readme_block(results: Mapping[str, Mapping[str, Run]]) -> str:
    """The table of README.md: a row for each headline that was measured on a GPU."""
    parts = []
    for runs in results.values():
        rows = [row for headline in HEADLINES for row in _headline(headline, runs.values())]
        if not rows:
            continue
        head = ["what", "dtype", "precast", *PEERS.values(), "x FlashInfer", "x best", "commit"]
        gpu = next(iter(runs.values())).gpu
        heads = "attention has 32 heads and 8 KV heads of 128"
        parts.append(f"{gpu}, {_versions(runs.values())}; {heads}.\n")
        parts.append(_markdown([head, *rows]))
    return "\n".join(parts)


def _headline(headline: Headline, runs: Iterable[Run]) -> Iterator[list[str]]:
    """The row of a headline, of the run with most peers; none if it was not measured."""
    found = [(times, run) for run in runs if (times := _times(headline, run)) is not None]
    if found:
        (ours, theirs, factors), run = max(found, key=lambda pair: len(pair[0][1]))
        peers = [_time(theirs.get(peer)) for peer in PEERS]
        best = f"{min(factors.values()):.2f}" if factors else "-"
        factor = f"{factors['flashinfer']:.2f}" if "flashinfer" in factors else "-"
        yield [headline.text, headline.dtype or "-", _time(ours), *peers, factor, best, run.commit]


def _times(
    headline: Headline, run: Run
) -> tuple[float, dict[str, float], Mapping[str, float]] | None:
    """Seconds of precast and of each peer, and each peer's time over ours."""
    if run.measures_ops:
        wanted = (headline.op, headline.shape, headline.dtype)
        for record in run.records:
            if (record["op"], record["shape"], record["dtype"]) == wanted:
                medians = {who: 1e-6 * t["median"] for who, t in record["gpu_us"].items()}
                return medians.pop("precast"), medians, record["ratio"]
        return None
    by_name = {str(record["name"]): record for record in run.records}
    if not headline.figures or not by_name.keys() >= set(headline.figures):
        return None
    chosen = [by_name[name] for name in headline.figures]
    ours = sum(record["seconds"] for record in chosen)
    others = [record.get("flashinfer") for record in chosen]
    if not all(isinstance(other, float) for other in others):
        return ours, {}, {}
    return ours, {"flashinfer": sum(others)}, {"flashinfer": sum(others) / ours}


def with_block(text: str, block: str) -> str:
    """README.md with the marked block replaced."""
    return markup.with_block(text, "performance", block)


def draw_pictures(folder: Path, wanted: Sequence[Picture], one_of: int = 1) -> list[Path]:
    """Draw missing and stale pictures in ``folder``, delete other files, and return the changes.

    With ``one_of``, only a random one of so many is drawn; the others of them are then missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = {picture.name for picture in wanted}
    left = [path for path in folder.iterdir() if path.name not in names]
    stale = [p for p in wanted if not _is_drawn(folder / p.name, p.stamp)]
    if one_of > 1:
        left += [folder / p.name for p in stale if (folder / p.name).exists()]
        stale = [p for p in stale if random.randrange(one_of) == 0]
    for path in left:
        path.unlink(missing_ok=True)
    if stale:
        # Each takes almost a second.
        with ProcessPoolExecutor() as pool:
            list(pool.map(partial(Picture.draw, folder=folder), stale))
    return [*left, *(folder / picture.name for picture in stale)]


def _is_drawn(path: Path, stamp: str) -> bool:
    return path.is_file() and stamp in path.read_text(encoding="utf-8")


def superseded(root: Path, results: Mapping[str, Mapping[str, Run]]) -> list[Path]:
    """Result files that are not the newest of their name and GPU."""
    folder = root / RESULTS
    there = [path for gpu in results for path in sorted((folder / gpu).glob("*/*.json"))]
    return [path for path in there if load_run(path) != results[path.parent.parent.name][path.stem]]


def make(root: Path = ROOT) -> list[Path]:
    """Write missing and stale files, delete old results, and return the changes."""
    results = newest(root / RESULTS)
    changed = superseded(root, results)
    for path in changed:
        path.unlink()
    readme = (root / README).read_text(encoding="utf-8")
    texts = {PAGE: page(results), README: with_block(readme, readme_block(results))}
    for name, text in texts.items():
        path = root / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed


if __name__ == "__main__":
    for changed in make():
        print(changed.relative_to(ROOT))
