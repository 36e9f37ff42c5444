# SPDX-License-Identifier: Apache-2.0
"""Read result files of benchmarks: one :class:`Run` a file, for every version of the schema."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from precast.testing.report import SCHEMA


@dataclass(frozen=True)
class Run:
    """One result file.

    Attributes
    ----------
    name : str
        The file's name without its ending: ``norm_bf16``, ``startup``.
    environment : mapping of str to str
        GPU, driver, CUDA, versions, commit and date.
    ceilings : mapping
        By name: ``unit``, ``best``, ``kernel`` and ``all``.
    records : list
        As ``precast.testing.report`` makes them; ``startup``, ``vllm`` and the micro-benchmarks
        have their own.
    failures : list
        Failed measurements: ``op``, ``shape`` and ``error``.
    """

    name: str
    environment: Mapping[str, str]
    records: list[dict[str, Any]]
    ceilings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)

    @property
    def gpu(self) -> str:
        return self.environment.get("gpu", "unknown GPU")

    @property
    def commit(self) -> str:
        """The first characters of the commit, as ``git log --oneline`` shows it."""
        commit = self.environment.get("commit", "unknown")
        return commit if commit == "unknown" else commit[:7]

    @property
    def date(self) -> datetime.datetime:
        return datetime.datetime.strptime(self.environment["date"], "%Y-%m-%d %H:%M UTC")

    @property
    def measures_ops(self) -> bool:
        """Whether the records are of ops, not of the start of a process."""
        return all("op" in record for record in self.records)

    @property
    def measures_engines(self) -> bool:
        """Whether the records are of engines that run on precast."""
        return bool(self.records) and all("engine" in record for record in self.records)

    @property
    def measures_primitives(self) -> bool:
        """Whether the records are of instructions, which micro-benchmarks measure."""
        return bool(self.records) and all("figures" in record for record in self.records)


def load_run(path: Path) -> Run:
    """Read one file of any schema so far.

    Raises
    ------
    ValueError
        If it is no result file, or has a schema that this version does not know.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        schema, environment, records = int(data["schema"]), data["environment"], data["results"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no result file of a benchmark ({error})") from error
    if not 1 <= schema <= SCHEMA:
        raise ValueError(f"{path} has schema {schema}; this version reads 1 to {SCHEMA}")
    ceilings = data.get("ceilings", {})
    if schema == 1:
        # Every ceiling was a bandwidth, and every share that of `elementwise`.
        old = data.get("ceilings_gbps", {})
        ceilings = {name: {"unit": "GB/s", **ceiling} for name, ceiling in old.items()}
        records = [_upgraded(record) for record in records]
    return Run(path.stem, environment, records, ceilings, data.get("failures", []))


def _upgraded(record: dict[str, Any]) -> dict[str, Any]:
    if "op" not in record:
        return record
    share = record.pop("share_of_elementwise")
    ceiling = None if share is None else "elementwise"
    return {**record, "flops": 0, "tflops": None, "ceiling": ceiling, "share": share}


def newest(folder: Path) -> dict[str, dict[str, Run]]:
    """The newest run of every file name for every GPU, by the date inside.

    Parameters
    ----------
    folder : Path
        Holds ``<gpu>/<commit>/<name>.json``.

    Returns
    -------
    dict
        GPU (the name of its folder) to name to run; both are sorted.
    """
    found: dict[str, dict[str, Run]] = {}
    for path in sorted(folder.glob("*/*/*.json")):
        run = load_run(path)
        runs = found.setdefault(path.parent.parent.name, {})
        if run.name not in runs or run.date > runs[run.name].date:
            runs[run.name] = run
    return {gpu: dict(sorted(runs.items())) for gpu, runs in sorted(found.items())}
