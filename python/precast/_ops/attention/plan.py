# SPDX-License-Identifier: Apache-2.0
"""A plan of a batch is one frozen object, which every run until the next plan reads.

Kernels get it as a params block, a small CPU tensor of bytes. Python writes the two structs of
numbers at its start, the export ``pack_plan`` checks them with the plan's tensors and fills the
rest (``csrc/attention/plan_block.h``). A block holds addresses, which the plan keeps alive.
"""

from __future__ import annotations

import struct
from operator import is_
from typing import Any, NamedTuple, TypeAlias

from precast._base.errors import PlanMismatchError
from precast._base.torch import torch
from precast._ops.attention.enums import MaskMode

Dtype: TypeAlias = "torch.dtype | str | None"


class PlanShape(NamedTuple):
    """What the division of work depends on, in the order of the C++ struct of this name."""

    batch_size: int = 0
    rows: int = -1  # queries of the batch, -1 where the host does not know them
    q_len_per_req: int = 0  # 0: qo_indptr counts queries
    page_size: int = 0  # 0: keys and values are not in pages
    num_qo_heads: int = 0
    num_kv_heads: int = 0
    head_dim_qk: int = 0
    head_dim_vo: int = 0
    kv_bytes: int = 0
    block_m: int = 0
    causal: bool = False
    window_left: int = -1
    fixed_split_size: int = -1
    disable_split_kv: bool = False
    plans_itself: bool = False  # every CTA finds its own work, so plan() is not called
    sm90: bool = False  # for the kernels of attention_sm90, or of mla_sm90
    mla: bool = False  # for the kernels of mla: one KV head, whose values are columns of keys
    #: Nothing but causal mask and window changes scores, and keys have no scales of blocks, so that
    #: a tile may have the rows of two KV heads. Whether it has them is decided where it is planned.
    may_pair_heads: bool = False

    def with_tile(self, block_m: int, sm90: bool) -> PlanShape:
        """Return the shape for tiles of so many packed rows, of the kernels for Hopper or not."""
        # Why not _replace: it takes three times as long, and every plan does this.
        return PlanShape(*self[:9], block_m, *self[10:15], sm90, *self[16:])


class ScoreOptions(NamedTuple):
    """What scores depend on as kernels know it, in the order of the C++ struct of this name."""

    hnd: bool
    mask_mode: int
    window_left: int
    pos_encoding: int
    token_pos_len: int
    logits_soft_cap: float
    sm_scale: float
    rope_scale: float
    rope_theta: float


_NO_OPTIONS = ScoreOptions(False, 0, -1, 0, 0, 0.0, 1.0, 1.0, 1e4)

#: Both structs, one behind the other.
_NUMBERS = struct.Struct("=18q5q4d")
BLOCK_BYTES = 1024


def new_block(shape: PlanShape, options: tuple[float, ...] = _NO_OPTIONS) -> torch.Tensor:
    """Make a params block of these numbers, the second as in ScoreOptions; it is not packed yet."""
    memory = bytearray(BLOCK_BYTES)
    try:
        _NUMBERS.pack_into(memory, 0, *shape, *options)
    except struct.error as error:
        names = (*PlanShape._fields, *ScoreOptions._fields)
        given = ", ".join(f"{name}={value!r}" for name, value in zip(names, (*shape, *options)))
        raise TypeError(f"options of plan() must be numbers of 64 bits: {error}; {given}") from None
    return torch.frombuffer(memory, dtype=torch.uint8)


class BlockNumbers(NamedTuple):
    """The numbers at the start of a block."""

    shape: PlanShape
    scores: ScoreOptions


def read_block(block: torch.Tensor) -> BlockNumbers:
    """Read the numbers of a block, for references, which have more time than kernels."""
    numbers = _NUMBERS.unpack(bytes(block[: _NUMBERS.size].tolist()))
    count = len(PlanShape._fields)
    return BlockNumbers(PlanShape(*numbers[:count]), ScoreOptions(*numbers[count:]))


class Model(NamedTuple):
    """What does not depend on the batch: it chooses the module."""

    q_dtype: Any = None
    kv_dtype: Any = None
    o_dtype: Any = None
    #: Of the kernels' table: dtypes, head dimensions and the device's index.
    key: tuple[Any, ...] = ()
    #: What queries of 8 bits are converted to before a kernel runs; None: no kernel needs it.
    converts_to: Any = None
    #: Of the table of kernels whose queries, keys and values are e4m3, which convert nothing: the
    #: dtype of outputs, head dimensions and the device's index. None: there are none.
    fp8_key: tuple[Any, ...] | None = None
    #: Whether outputs have the dtype of queries, as kernels write them.
    writes_outputs: bool = True
    #: Whether they have the shape, too.
    is_like_q: bool = False
    #: Whether keys and values are in NVFP4, with scales of blocks.
    is_packed: bool = False

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of a number of keys in kernels, which convert NVFP4 to float16."""
        return 2 if self.is_packed else self.kv_dtype.itemsize


class Scores(NamedTuple):
    """Options of scores, as ``plan()`` is given them."""

    causal: bool = False
    window_left: int = -1
    logits_soft_cap: float | None = 0.0
    sm_scale: float | None = None
    pos_encoding_mode: str = "NONE"
    rope_scale: float | None = None
    rope_theta: float | None = None
    use_fp16_qk_reduction: bool = False


def has_plain_scores(logits_soft_cap: Any, pos_encoding_mode: Any) -> bool:
    """Whether neither soft cap nor positions change scores. Of odd types nothing is known."""
    cap = logits_soft_cap
    return pos_encoding_mode == "NONE" and (cap is None or (type(cap) in (float, int) and cap <= 0))


class Tables(NamedTuple):
    """The lengths and pages of a batch, int32."""

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_last_page_len: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    kv_len: torch.Tensor | None = None


NO_TABLES = Tables()


class Mask(NamedTuple):
    """Bits of a custom mask; under CUDA graphs the buffers stay where no mask is used."""

    bits: torch.Tensor | None = None
    indptr: torch.Tensor | None = None
    is_used: bool = False


NO_MASK = Mask()


class Items(NamedTuple):
    """Prefixes and items of multi-item scoring; kernels do without the longest item."""

    prefix_len: torch.Tensor | None = None
    token_pos: torch.Tensor | None = None
    token_pos_len: int = 0
    max_item_len: torch.Tensor | None = None


NO_ITEMS = Items()


class Hints(NamedTuple):
    """What engines read in a plan and kernels do not."""

    max_q_len: int | None = None
    max_kv_len: int | None = None
    max_total_num_rows: int | None = None
    block_tables: torch.Tensor | None = None
    #: Whether a new output may have rows that no request has; those are 0.
    pads: bool = False
    #: Whether the tensor of query bounds that decode makes may serve the next plan.
    keeps_qo_indptr: bool = False
    #: Whether the tile was chosen without any number of queries, which the first run knows.
    guesses_tile: bool = False


class AttentionPlan(NamedTuple):
    """What a run reads. Another option makes another plan: nothing here changes."""

    model: Model
    shape: PlanShape
    scores: Scores
    tables: Tables
    mask: Mask
    items: Items
    hints: Hints
    hnd: bool
    int_workspace: torch.Tensor | None
    float_workspace: torch.Tensor | None
    #: Whether the int workspace holds it.
    is_launched: bool = False
    alibi_slopes: torch.Tensor | None = None
    #: None: an option has changed since it was packed.
    block: torch.Tensor | None = None

    @property
    def multiplies_fp8(self) -> bool:
        """Whether queries of e4m3 are multiplied as they are; rotated ones would be rounded."""
        return (
            self.shape.sm90
            and self.model.fp8_key is not None
            and self.scores.pos_encoding_mode != "ROPE_LLAMA"
        )

    @property
    def may_pair_heads(self) -> bool:
        """What of the shape's permission is left where options of scores have changed since."""
        scores = self.scores
        return self.shape.may_pair_heads and has_plain_scores(
            scores.logits_soft_cap, scores.pos_encoding_mode
        )

    @property
    def query_bounds(self) -> list[int]:
        """Where the queries of each request begin, and the last one's end; for references."""
        q_len = self.shape.q_len_per_req
        if q_len:
            return [i * q_len for i in range(self.shape.batch_size + 1)]
        assert self.tables.qo_indptr is not None
        bounds: list[int] = self.tables.qo_indptr.tolist()
        return bounds

    @property
    def mask_mode(self) -> MaskMode:
        """Which keys a query sees; items come before a custom mask, and that before causal."""
        if self.items.prefix_len is not None:
            return MaskMode.MULTIITEMSCORING
        if self.mask.is_used:
            return MaskMode.CUSTOM
        return MaskMode.CAUSAL if self.scores.causal else MaskMode.NON_CAUSAL

    def is_packed_as(self, before: AttentionPlan) -> bool:
        """Whether the block of a plan before says the same: nothing but hints differs."""
        return (
            before.block is not None
            and self.shape == before.shape
            and self.scores == before.scores
            and (self.model is before.model or self.model == before.model)
            and self.int_workspace is before.int_workspace
            and self.float_workspace is before.float_workspace
            and _has_same_tensors(self.tables, before.tables)
            and _has_same_tensors(self.mask, before.mask)
            and self.items.prefix_len is None is before.items.prefix_len
        )


def _has_same_tensors(these: tuple[Any, ...], those: tuple[Any, ...]) -> bool:
    return these is those or all(map(is_, these, those))


def plan_of(export: str, block: torch.Tensor) -> AttentionPlan:
    """Return the plan of a block; kernels know its tensors by their addresses in the block."""
    plan: AttentionPlan | None = getattr(block, "attention_plan", None)
    if plan is None:
        raise ValueError(f"{export}: block must be of a plan that is alive. Fix: call plan()")
    return plan


# -- the names of engines -------------------------------------------------------------------------


class PlanField:
    """An attribute of a wrapper that lies in its plan; engines read it, and some of them set it.

    A value that differs makes another plan, whose params block the next run packs.
    """

    def __init__(self, group: str, name: str) -> None:
        self._group, self._name = group, name

    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        if wrapper is None:
            return self
        return getattr(getattr(wrapper._plan, self._group), self._name)

    def __set__(self, wrapper: Any, value: Any) -> None:
        group = getattr(wrapper._plan, self._group)
        before = getattr(group, self._name)
        is_tensor = isinstance(value, torch.Tensor) or isinstance(before, torch.Tensor)
        if value is before or (not is_tensor and value == before):
            return
        changed = {self._group: group._replace(**{self._name: value})}
        wrapper._plan = wrapper._plan._replace(block=None, **changed)


class PlanAttributes:
    """Give a plan the names that engines use."""

    _plan: AttentionPlan

    _cached_q_data_type = PlanField("model", "q_dtype")
    _cached_kv_data_type = PlanField("model", "kv_dtype")
    _cached_o_data_type = PlanField("model", "o_dtype")
    _batch_size = PlanField("shape", "batch_size")
    _num_qo_heads = PlanField("shape", "num_qo_heads")
    _num_kv_heads = PlanField("shape", "num_kv_heads")
    _page_size = PlanField("shape", "page_size")
    _causal = PlanField("scores", "causal")
    _window_left = PlanField("scores", "window_left")
    _logits_soft_cap = PlanField("scores", "logits_soft_cap")
    _sm_scale = PlanField("scores", "sm_scale")
    _pos_encoding_mode = PlanField("scores", "pos_encoding_mode")
    _rope_scale = PlanField("scores", "rope_scale")
    _rope_theta = PlanField("scores", "rope_theta")
    _use_fp16_qk_reduction = PlanField("scores", "use_fp16_qk_reduction")
    _qo_indptr_buf = PlanField("tables", "qo_indptr")
    _custom_mask_buf = PlanField("mask", "bits")
    _mask_indptr_buf = PlanField("mask", "indptr")
    _prefix_len_ptr = PlanField("items", "prefix_len")
    _token_pos_in_items_ptr = PlanField("items", "token_pos")
    _token_pos_in_items_len = PlanField("items", "token_pos_len")
    _max_item_len_ptr = PlanField("items", "max_item_len")
    _max_q_len = PlanField("hints", "max_q_len")
    _max_kv_len = PlanField("hints", "max_kv_len")
    _max_total_num_rows = PlanField("hints", "max_total_num_rows")
    _block_tables = PlanField("hints", "block_tables")

    @property
    def _plan_info(self) -> list[int] | None:
        """Rows of a tile, ``causal`` and ``window_left`` of the plan; None if there is none."""
        shape = self._plan.shape
        if not self._plan.is_launched:
            return None
        return [shape.block_m, int(shape.causal), shape.window_left]

    @_plan_info.setter
    def _plan_info(self, info: list[int] | None) -> None:
        # Engines store here what _cached_module.plan() returned, which has kept its plan itself.
        if info is None:
            self._forget_plan()

    def _forget_plan(self) -> None:
        """Make the next run say that there is no plan."""
        self._plan = self._plan._replace(block=None, is_launched=False)

    def _check_planned(self, method: str) -> None:
        if not self._plan.is_launched:
            raise PlanMismatchError(f"{method}: there is no plan. Fix: call plan() first")
