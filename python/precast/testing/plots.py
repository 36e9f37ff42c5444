# SPDX-License-Identifier: Apache-2.0
"""Pictures of a run: bars of each shape with its peers, shares of the ceiling, the roofline.

Needs matplotlib (``pip install "precast[bench]"``). Every picture says its GPU, commit and
date. Colours are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which colour-blind
readers can tell apart; ops also differ by marker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from precast.testing.report import peers_of
from precast.testing.results import Run

OURS = "#0072B2"
OTHERS = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
MARKERS = "osD^vP*X<>hd"
_ROW = 0.3  # inches that a bar takes
_SETTINGS = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    # The same run makes the same SVG, byte for byte, and its text stays text.
    "svg.hashsalt": "precast",
    "svg.fonttype": "none",
}


def save_run(run: Run, path: Path) -> None:
    """Everything in one picture: bars, shares of the ceiling and the roofline side by side."""
    with _figure(run, 15.0, _height(run)) as figure:
        speed, share, roof = figure.subplots(1, 3, width_ratios=(3, 2, 4))
        _bars(run, speed, share, peers_of(run.records))
        _roofline(run, roof)
        _save(figure, path)


def save_bars(run: Run, path: Path, peers: Sequence[str] = (), stamp: str = "") -> None:
    """Speed of each peer relative to ours, and our share of the ceiling, for each shape.

    Parameters
    ----------
    peers : sequence of str, optional
        All peers that pictures side by side show, so that each has one colour in all of them.
    stamp : str, optional
        Text to embed in an SVG's description.
    """
    with _figure(run, 9.5, _height(run)) as figure:
        speed, share = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        _bars(run, speed, share, peers or peers_of(run.records))
        _save(figure, path, stamp)


def save_roofline(run: Run, path: Path, stamp: str = "") -> None:
    """What each shape reaches under the ceilings of its run."""
    with _figure(run, 7.5, 4.6) as figure:
        _roofline(run, figure.subplots())
        _save(figure, path, stamp)


@contextlib.contextmanager
def _figure(run: Run, width: float, height: float) -> Iterator[Any]:
    """A titled figure, with our settings in force while it is drawn and saved."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(width, height), layout="constrained")
        title = f"{run.name}: {run.gpu}, commit {run.commit}, {run.date:%Y-%m-%d}"
        figure.suptitle(title, fontsize=10)
        yield figure


def _height(run: Run) -> float:
    peers = len(peers_of(run.records))
    return max(3.0, 1.4 + len(run.records) * _ROW * (0.7 + 0.3 * peers))


def _bars(run: Run, speed: Any, share: Any, peers: Sequence[str]) -> None:
    records = run.records
    shown = ["precast", *(peer for peer in peers if peer in peers_of(records))]
    colours = _colours(peers)
    thick = 0.8 / len(shown)
    centres = range(len(records))
    for index, name in enumerate(shown):
        places = [y + (index - (len(shown) - 1) / 2) * thick for y in centres]
        values = [_relative(record, name) for record in records]
        bars = speed.barh(places, values, thick, color=colours[name], label=name)
        if name == "precast":
            times = [f"{record['gpu_us'][name]['median']:.2f} us" for record in records]
            speed.bar_label(bars, times, padding=2, fontsize=6.5)
    speed.set_yticks(centres, [f"{record['op']} {record['shape']}" for record in records])
    speed.set_ylim(len(records) - 0.4, -0.6)
    speed.set_xlabel("speed relative to precast (longer is faster)")
    speed.axvline(1.0, color="black", linewidth=0.8)
    longest = max(_relative(record, name) for record in records for name in shown)
    speed.set_xlim(0, max(1.25, longest * 1.05))
    speed.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(shown), frameon=False)

    bars = share.barh(centres, [record["share"] or 0.0 for record in records], 0.6, color=OURS)
    labels = ["-" if r["share"] is None else f"{r['share']:.2f}" for r in records]
    share.bar_label(bars, labels, padding=2, fontsize=7)
    share.set_ylim(speed.get_ylim())
    share.tick_params(labelleft=False)
    share.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    share.set_xlim(0, 1.2)
    share.set_xlabel("share of the ceiling of the same run")


def _relative(record: Mapping[str, Any], name: str) -> float:
    if name == "precast":
        return 1.0
    return 1.0 / record["ratio"][name] if name in record["ratio"] else 0.0


def _roofline(run: Run, axes: Any) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(True, which="major", linewidth=0.4, alpha=0.6)
    matmul = run.ceilings.get("matmul")
    if matmul is not None:
        points = _under_the_matrix_units(run, axes, matmul)
    else:
        points = _under_the_bandwidth(run, axes)
    ops = list(dict.fromkeys(record["op"] for record in run.records))
    palette = (OURS, *OTHERS)
    for index, op in enumerate(ops):
        mine = [point for record, point in zip(run.records, points) if record["op"] == op]
        axes.plot(
            *zip(*mine),
            MARKERS[index % len(MARKERS)],
            color=palette[index % len(palette)],
            label=op,
            markersize=6,
            markeredgecolor="black",
            markeredgewidth=0.4,
        )
    axes.legend(loc="lower right", fontsize=7)


def _under_the_bandwidth(run: Run, axes: Any) -> list[tuple[float, float]]:
    """Bandwidth over bytes: small calls run along the cost of a launch, large ones at the roof."""
    points = [(float(r["bytes_moved"]), float(r["gbps"])) for r in run.records]
    sizes = [min(x for x, _ in points) / 2, max(x for x, _ in points) * 2]
    roof = run.ceilings["elementwise"]["best"]
    axes.plot(sizes, [roof, roof], "k--", linewidth=1)
    axes.annotate(f"elementwise ceiling {roof:.0f} GB/s", (sizes[0], roof), va="bottom", fontsize=8)
    if "launch" in run.ceilings:
        floor = run.ceilings["launch"]["best"]
        corner = roof * floor * 1e3  # bytes that the roof moves in the time of an empty call
        slope = [sizes[0], min(corner, sizes[1])]
        axes.plot(slope, [size / floor * 1e-3 for size in slope], "k:", linewidth=1)
        middle = (slope[0] * slope[1]) ** 0.5
        axes.annotate(f"  one launch, {floor:.2f} us", (middle, middle / floor * 1e-3), fontsize=8)
    axes.set_xlabel("bytes moved by a call")
    axes.set_ylabel("GB/s")
    return points


def _under_the_matrix_units(
    run: Run, axes: Any, matmul: Mapping[str, Any]
) -> list[tuple[float, float]]:
    """TFLOP/s over FLOPs a byte, under bandwidth and matrix units."""
    points = [(r["flops"] / r["bytes_moved"], float(r["tflops"] or 0.0)) for r in run.records]
    bandwidth, peak = run.ceilings["elementwise"]["best"] * 1e-3, matmul["best"]
    corner = peak / bandwidth
    ends = [
        min(corner / 10, *(x for x, _ in points)),
        corner,
        max(corner * 10, *(x for x, _ in points)),
    ]
    axes.plot(ends, [min(peak, bandwidth * x) for x in ends], "k--", linewidth=1)
    axes.annotate(f"matmul ceiling {peak:.0f} TFLOP/s", (corner, peak), va="bottom", fontsize=8)
    axes.set_xlabel("FLOPs a byte moved")
    axes.set_ylabel("TFLOP/s")
    return points


def _colours(peers: Sequence[str]) -> dict[str, str]:
    others = {peer: OTHERS[index % len(OTHERS)] for index, peer in enumerate(peers)}
    return {"precast": OURS, **others}


def _save(figure: Any, path: Path, stamp: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None, "Description": stamp} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=160, metadata=metadata)
