# SPDX-License-Identifier: Apache-2.0
"""Random cases of attention: a seed is a shape, a layout and a set of features that go together."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from precast._base.dtypes import DTYPE_WORDS
from precast._ops.attention.validation import HEAD_DIMS
from precast._plan.installed import plan

T = TypeVar("T")

KINDS = ("decode", "decode", "paged", "paged", "ragged", "single_decode", "single_prefill")
GROUPS = (1, 1, 2, 3, 4, 4, 5, 7, 8, 8, 16)
DTYPES = {word: getattr(torch, name.removeprefix("torch.")) for name, word in DTYPE_WORDS.items()}
AXES = plan().config.op("attention").axes
FP8 = tuple(DTYPES[kv] for kv in AXES["dtype_kv"] if kv not in AXES["dtype_q"])


@dataclass(frozen=True)
class Space:
    """What cases are drawn from."""

    dtypes: tuple[torch.dtype, ...] = tuple(DTYPES[q] for q in AXES["dtype_q"])
    kv_dtypes: tuple[torch.dtype, ...] = FP8
    head_dims: tuple[tuple[int, int], ...] = HEAD_DIMS
    most_kv: int = 3000
    most_q: int = 400
    #: Pairs of a query and a key that one case may have, times heads.
    most_pairs: int = 1 << 24
    device: str = "cuda"


@dataclass
class Case:
    """One call. Lengths are of each request; a feature that is off is None or as in ``plan``."""

    seed: int
    kind: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dim_qk: int
    head_dim_vo: int
    num_kv_heads: int
    group: int
    q_lens: list[int]
    kv_lens: list[int]
    page_size: int = 1
    kv_layout: str = "NHD"
    packed_cache: bool = True
    strided: bool = False
    lengths_on_host: bool = False
    causal: bool = False
    window_left: int = -1
    logits_soft_cap: float = 0.0
    sm_scale: float | None = None
    pos_encoding_mode: str = "NONE"
    rope_scale: float | None = None
    rope_theta: float | None = None
    mask: str = ""  # "", "bool", "packed" or "items"
    items: list[list[int]] = field(default_factory=list)  # a prefix and its items, per request
    sinks: bool = False
    scales: str = ""  # "", "float" or "tensor"
    fixed_split_size: int | None = None
    disable_split_kv: bool = False
    out_given: bool = False
    use_tensor_cores: bool = True
    o_dtype: torch.dtype | None = None  # of outputs, where queries are of 8 bits

    @property
    def num_qo_heads(self) -> int:
        return self.num_kv_heads * self.group

    def options(self) -> dict[str, Any]:
        """The options of scores, as ``plan`` and the functions of one request know them."""
        return {
            "pos_encoding_mode": self.pos_encoding_mode,
            "window_left": self.window_left,
            "logits_soft_cap": self.logits_soft_cap or None,
            "sm_scale": self.sm_scale,
            "rope_scale": self.rope_scale,
            "rope_theta": self.rope_theta,
        }


def draw(seed: int, space: Space) -> Case:
    """The case of a seed."""
    r = random.Random(seed)
    kind = r.choice(KINDS)
    dtype = r.choice(space.dtypes)
    kv_dtype = r.choice((dtype, dtype, dtype, *space.kv_dtypes))
    equal = [pair for pair in space.head_dims if pair[0] == pair[1]]
    dims = r.choice(equal if "decode" in kind and equal else space.head_dims)
    case = Case(
        seed=seed,
        kind=kind,
        dtype=dtype,
        kv_dtype=kv_dtype,
        head_dim_qk=dims[0],
        head_dim_vo=dims[1],
        num_kv_heads=r.choice((1, 2, 3, 4, 8)),
        group=r.choice(GROUPS),
        q_lens=[],
        kv_lens=[],
    )
    if dtype.itemsize == 1:
        case.kv_dtype, case.o_dtype = dtype, r.choice((torch.float16, torch.bfloat16))
    single = kind.startswith("single")
    batch = 1 if single else r.choice((1, 1, 2, 3, 5, 9, 17))
    _lengths(r, case, batch, space)
    _layout(r, case)
    _scores(r, case)
    if kind in ("paged", "ragged", "single_prefill"):
        _masks(r, case, space)
    if kind in ("decode", "paged"):
        case.sinks = r.random() < 0.2
    _schedule(r, case)
    return case


def _lengths(r: random.Random, case: Case, batch: int, space: Space) -> None:
    top = r.choice((1, 17, 64, 200, space.most_kv))
    case.kv_lens = [_length(r, min(top, space.most_kv)) for _ in range(batch)]
    if case.kind == "single_decode":
        case.q_lens = [1]
    elif case.kind == "decode":
        case.use_tensor_cores = r.random() < 0.7
        each = r.choice((1, 1, 1, 2, 3, 5)) if case.use_tensor_cores else 1
        case.q_lens = [each] * batch
        if each > 1:  # Queries are among the tokens.
            case.kv_lens = [max(kv, each) for kv in case.kv_lens]
    else:
        most = r.choice((1, 8, 40, space.most_q))
        case.q_lens = [r.choice((0, r.randint(1, most))) for _ in range(batch)]
        if r.random() < 0.5:  # As a prefill: all tokens are new.
            case.q_lens = [min(kv, space.most_q) for kv in case.kv_lens]
    pairs = sum(q * kv for q, kv in zip(case.q_lens, case.kv_lens)) * case.num_qo_heads
    while pairs > space.most_pairs and case.num_kv_heads * case.group > 1:
        case.num_kv_heads, case.group = max(1, case.num_kv_heads // 2), max(1, case.group // 2)
        pairs //= 2


def _length(r: random.Random, top: int) -> int:
    near = r.choice((16, 32, 64, 128))
    return r.choice(
        (0, 1, min(top, near), min(top, near + r.choice((-1, 1))), r.randint(1, top), top)
    )


def _layout(r: random.Random, case: Case) -> None:
    case.kv_layout = r.choice(("NHD", "HND"))
    case.page_size = r.choice((1, 1, 2, 3, 5, 8, 16, 16, 32, 64, 128))
    case.packed_cache = case.head_dim_qk == case.head_dim_vo and r.random() < 0.5
    case.strided = r.random() < 0.3
    case.lengths_on_host = r.random() < 0.4
    case.out_given = r.random() < 0.3


def _scores(r: random.Random, case: Case) -> None:
    if r.random() < 0.3:
        case.window_left = r.choice((0, 1, 7, 63, 64, 127, 1000))
    if r.random() < 0.2:
        case.logits_soft_cap = r.choice((1.0, 8.0, 30.0))
    if r.random() < 0.2:
        case.sm_scale = r.choice((0.05, 0.2, 1.0, -0.2, 0.0)) / case.head_dim_qk**0.25
    if r.random() < 0.3:
        case.pos_encoding_mode = r.choice(("ROPE_LLAMA", "ALIBI"))
        if r.random() < 0.5:
            case.rope_scale, case.rope_theta = r.choice((1.0, 2.0)), r.choice((1e4, 5e5))
    if case.kv_dtype in FP8 or r.random() < 0.2:
        case.scales = r.choice(("", "float", "tensor"))


def _masks(r: random.Random, case: Case, space: Space) -> None:
    case.causal = r.random() < 0.6
    choice = r.random()
    if choice < 0.15:
        case.mask = r.choice(("bool", "packed"))
    elif choice < 0.25 and case.kind != "single_prefill":
        case.mask = "items"
        for i in range(len(case.kv_lens)):
            items = [r.randint(1, 9) for _ in range(r.randint(1, 6))]
            prefix = r.randint(0, min(90, space.most_kv))
            case.items.append([prefix, *items])
            case.kv_lens[i] = prefix + sum(items) + len(items) + 1
            most = min(case.kv_lens[i], space.most_q)
            case.q_lens[i] = r.choice((most, r.randint(1, most)))


def _schedule(r: random.Random, case: Case) -> None:
    if case.kind.startswith("single") or not case.use_tensor_cores:
        return
    choice = r.random()
    if choice < 0.2:
        case.disable_split_kv = True
    elif choice < 0.4:
        case.fixed_split_size = r.choice((1, 4, 64, 100))
