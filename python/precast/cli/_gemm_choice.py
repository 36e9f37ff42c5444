# SPDX-License-Identifier: Apache-2.0
"""Explain which tile a product takes on Hopper: ``precast explain gemm m=.. n=.. k=..``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from precast.cli import _gemm_shapes, _output
from precast.cli._output import UsageError

JSON = {
    "products": "of gemm with m, n and k, in the place of modules: kind, groups, m, n, k, operands "
    "and sms, the choice, whether it is that of the table or of the model as source, and the "
    "ranking: name, us, waves, blocks and limit of the choices that the model expects to be the "
    "fastest",
    "table": "of gemm with m, n and k: the table of PRECAST_GEMM_TABLE, or null",
}
#: Choices that are shown.
_SHOWN = 5


def is_asked(op: str, words: Sequence[str]) -> bool:
    """Whether a command asks for the tile of a product, not for its module."""
    return op == "gemm" and any(word.partition("=")[0] in ("m", "n", "k") for word in words)


def explain(words: Sequence[str], json: bool) -> int:
    """Print what the model expects, and the table where it has the shape."""
    from precast._plan import gemm_table

    sms, sizes = _without_sms(words)
    table = gemm_table.current()
    products = [_product(shape, sms, table) for shape in _gemm_shapes.shapes(sizes)]
    if json:
        shown = None if table is None else str(table)
        _output.print_json({"products": products, "table": shown})
        return 0
    for product in products:
        _print(product)
    if table is not None:
        print(f"Table: {table}")
    return 0


def _without_sms(words: Sequence[str]) -> tuple[int, list[str]]:
    from precast._plan.gemm_model import SMS

    found = [word.partition("=")[2] for word in words if word.startswith("sms=")]
    legal = all(_gemm_shapes.is_number(word) and 0 < int(word) < 1024 for word in found)
    if len(found) > 1 or not legal:
        raise UsageError(f"sms={','.join(found)}: legal: one number of multiprocessors, sms=132")
    rest = [word for word in words if not word.startswith("sms=")]
    return int(found[0]) if found else SMS, rest


def _product(shape: Any, sms: int, table: Any) -> dict[str, Any]:
    from precast._plan import gemm_model

    ranking = gemm_model.ranking(shape.problem(sms), shape.operands)
    tuned = None if table is None or table.sms != sms else table.choices.get(shape)
    rows = [
        {
            "name": choice.name,
            "us": round(estimate.us, 2),
            "waves": estimate.waves,
            "blocks": estimate.blocks,
            "limit": estimate.limit,
        }
        for choice, estimate in ranking[:_SHOWN]
    ]
    return {
        **shape._asdict(),
        "sms": sms,
        "choice": rows[0]["name"] if tuned is None else tuned.name,
        "source": "model" if tuned is None else "table",
        "ranking": rows,
    }


def _print(product: dict[str, Any]) -> None:
    from precast._plan.gemm_model import CLOCK_GHZ, FAMILIES

    sizes = " ".join(f"{key}={product[key]}" for key in ("m", "n", "k", "groups"))
    family = FAMILIES[product["operands"]]
    function = " and ".join(family.functions[product["kind"]])
    _output.print_heading(f"{function} {sizes} on {product['sms']} multiprocessors")
    _output.print_table(
        [
            (r["name"], f"{r['us']:.2f}", r["waves"], r["blocks"], r["limit"])
            for r in product["ranking"]
        ],
        ("tile", "expected us", "waves", f"blocks of {128 // family.element_bytes}", "limit"),
    )
    of = "PRECAST_GEMM_TABLE" if product["source"] == "table" else "the model"
    print(f"Result: {product['choice']}, the choice of {of}")
    print(f"Times are those of a GPU at {CLOCK_GHZ} GHz; limit is what takes the longest of them.")
