# SPDX-License-Identifier: Apache-2.0
"""The arguments of the exports that plan and run, and what callers name them."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from precast._base.torch import torch


class PagedCall(NamedTuple):
    """The arguments of an export over a block table, in its order."""

    query: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None
    workspace: torch.Tensor
    tables: torch.Tensor
    lens: torch.Tensor
    q_bounds: torch.Tensor | None  # None: every request has q_len queries
    mask: torch.Tensor | None
    sinks: torch.Tensor | None
    is_hnd: bool
    q_len: int  # the most queries of a request
    causal: bool
    window_left: int
    logits_soft_cap: float
    is_alibi: bool
    sm_scale: float
    out_scale: float
    qk_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    enable_pdl: bool = True

    @property
    def values(self) -> torch.Tensor:
        """The cache of values, which may hold keys, too."""
        return self.k_cache if self.v_cache is None else self.v_cache

    @property
    def kv_sizes(self) -> tuple[int, int]:
        """KV heads, and entries of a page."""
        outer, inner = self.k_cache.shape[-3:-1]
        return (outer, inner) if self.is_hnd else (inner, outer)


class RaggedCall(NamedTuple):
    """The arguments of an export over ragged keys and values, in its order."""

    query: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    workspace: torch.Tensor
    q_bounds: torch.Tensor
    kv_bounds: torch.Tensor
    sinks: torch.Tensor | None
    q_len: int  # the most queries of a request
    causal: bool
    window_left: int
    logits_soft_cap: float
    is_alibi: bool
    sm_scale: float
    out_scale: float
    qk_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    enable_pdl: bool = True


class Words(NamedTuple):
    """What the public function names its arguments."""

    function: str
    query: str = "query"
    out: str = "out"
    lse: str = "lse"
    workspace: str = "workspace_buffer"
    cache: str = "kv_cache"
    keys: str = "kv_cache[0]"
    values: str = "kv_cache[1]"
    tables: str = "block_tables"
    lens: str = "seq_lens"
    q_bounds: str = "q_cu_seq_lens"
    kv_bounds: str = "cum_seq_lens_kv"
    q_len: str = "q_len_per_req"
    mask: str = "mask"
    sinks: str = "sinks"
    bmm1: str = "bmm1_scale"
    bmm2: str = "bmm2_scale"
    #: What errors call the queries, where they are a part of an argument.
    rows: str = ""
    #: Whether callers choose programmatic dependent launch.
    has_pdl: bool = True

    def of_bindings(self, is_pair: bool) -> dict[str, str]:
        """The names in errors of bindings and of declarations, which know no block tables."""
        keys, values = (self.keys, self.values) if is_pair else (self.cache, self.cache)
        return {
            "k_cache": keys,
            "v_cache": values,
            "paged_kv_cache[0]": keys,
            "paged_kv_cache[1]": values,
            "paged_kv_cache": self.cache,
            "kv_indices": self.tables,
            "kv_indptr": self.kv_bounds,
            "kv_len": self.lens,
            "qo_indptr": self.q_bounds,
            "int_workspace": self.workspace,
            "float_workspace": self.workspace,
            "sm_scale * q_scale * k_scale": self.bmm1,
            "qk_scale": self.bmm1,
            "out_scale": self.bmm2,
            "packed_mask": self.mask,
            "q": self.rows or self.query,
            "k": self.keys,
            "v": self.values,
            "out": self.out,
        }


#: What errors of bindings start with.
_EXPORTS = ("run_paged", "run_ragged", "run_paged_sm90", "run_ragged_sm90", "pack_plan", "plan")


def renamed(words: Words, error: BaseException, is_pair: bool) -> BaseException:
    """Return an error with the public names of arguments; ``is_pair``: keys and values are two."""
    match = re.match(r"(?P<export>\w+): (?P<what>.*)", str(error), re.DOTALL)
    if match is None or match["export"] not in (*_EXPORTS, words.function):
        return error
    names = words.of_bindings(is_pair)
    if match["export"] == words.function:  # Declarations have most public names.
        parts = ("k_cache", "v_cache", *(("k", "v") if words.rows else ()))
        names = {name: names[name] for name in parts} | {words.query: words.rows or words.query}
    known = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    said = re.sub(
        rf"(?<![\w.\[])({known})(?![\w\]\[])", lambda found: names[found[1]], match["what"]
    )
    made: BaseException = type(error)(f"{words.function}: {said}")
    return made


def given_of(kind: Any, words: Words, given: dict[str, Any]) -> Any:
    """Return a call from the arguments of its export by their declared names."""
    names = words._asdict()
    declared = {field: names.get(field, field) for field in kind._fields}
    return kind(**{field: given[name] for field, name in declared.items() if name in given})
