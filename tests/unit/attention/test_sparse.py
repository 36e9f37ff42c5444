# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention in reference mode: against a dense mask in float64, and errors."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from attention_dense import I32, dense, indptr
from attention_support import record_launches, workspace

import precast
from precast.errors import BackendSupportedError, PlanMismatchError
from precast.sparse import convert_bsr_mask_layout

HEADS, KV_HEADS, DIM = 4, 2, 64
SIZES = (HEADS, KV_HEADS, DIM)
F32 = {"q_data_type": "float32", "o_data_type": "float32"}
BSR, VARIABLE = precast.BlockSparseAttentionWrapper, precast.VariableBlockSparseAttentionWrapper

pytestmark = pytest.mark.usefixtures("reference_mode")


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# -- blocks of one size ---------------------------------------------------------------------------


class Matrix:
    """A random block-sparse matrix of M by N in blocks of R by C, and tensors for it."""

    def __init__(self, m, n, r, c, seed=1, density=0.5):
        g = torch.Generator().manual_seed(seed)
        self.m, self.n, self.r, self.c = m, n, r, c
        block_rows, block_columns = -(-m // r), n // c
        self.blocks = torch.rand(block_rows, block_columns, generator=g) < density
        self.order = [row.nonzero().flatten() for row in self.blocks]
        # In any order.
        self.order = [x[torch.randperm(len(x), generator=g)] for x in self.order]
        self.indptr = indptr([len(x) for x in self.order])
        self.indices = torch.cat(self.order).to(I32)
        self.mask = torch.rand(len(self.indices), r, c, generator=g) < 0.7
        self.q = torch.randn(m, HEADS, DIM, generator=g)
        self.k, self.v = torch.randn(2, n, KV_HEADS, DIM, generator=g)

    @property
    def plan(self):
        return self.indptr, self.indices, self.m, self.n, self.r, self.c, *SIZES

    @property
    def tensors(self):
        return self.q, self.k, self.v

    def seen(self, masked=False, causal=False):
        """``[M, N]``, True where a query attends to a key."""
        seen = torch.zeros(len(self.order) * self.r, self.n, dtype=torch.bool)
        block = 0
        for row, columns in enumerate(self.order):
            rows = min(self.r, self.m - row * self.r)
            for at, column in enumerate(columns.tolist()):
                own = torch.ones(self.r, self.c, dtype=torch.bool)
                if masked:
                    own = self.mask[block]
                elif causal:  # Keys are counted in the order of the indices.
                    key = at * self.c + torch.arange(self.c)
                    last = len(columns) * self.c - rows + torch.arange(self.r)
                    own = key <= last.unsqueeze(-1)
                at_row, at_column = row * self.r, column * self.c
                seen[at_row : at_row + self.r, at_column : at_column + self.c] = own
                block += 1
        return seen[: self.m]

    def expected(self, masked=False, causal=False, **options):
        state = dense(*self.tensors, self.seen(masked, causal), **options)
        return tuple(part.float() for part in state)


MATRICES = [(6, 6, 1, 1), (8, 12, 2, 3), (16, 32, 8, 16), (7, 8, 4, 2), (1, 4, 1, 4), (5, 0, 2, 3)]


def planned(matrix, **options):
    wrapper = BSR(workspace())
    wrapper.plan(*matrix.plan, **{**F32, **options})
    return wrapper


@pytest.mark.parametrize("sizes", MATRICES, ids=str)
@pytest.mark.parametrize("mask", ["none", "bool", "packed", "causal"])
def test_a_matrix(sizes, mask):
    matrix = Matrix(*sizes)
    options = {"causal": mask == "causal"}
    if mask == "bool":
        options["mask"] = matrix.mask
    if mask == "packed":
        options["packed_mask"] = packed(matrix)
    wrapper = planned(matrix, **options, sm_scale=0.2)
    got = wrapper.run(*matrix.tensors, return_lse=True)
    want = matrix.expected(mask in ("bool", "packed"), mask == "causal", sm_scale=0.2)
    for mine, theirs in zip(got, want):
        close(mine, theirs)
    out, lse = torch.empty_like(matrix.q), torch.empty(matrix.m, HEADS)
    again = wrapper.run(*matrix.tensors, out=out, lse=lse, return_lse=True)
    assert again[0] is out
    assert again[1] is lse
    assert torch.equal(out, got[0])
    assert torch.equal(wrapper.run(*matrix.tensors), out)


def packed(matrix):
    """Bits by hand: each row of blocks from a byte of its own on."""
    parts, block = [], 0
    for row, columns in enumerate(matrix.order):
        rows = min(matrix.r, matrix.m - row * matrix.r)
        own = matrix.mask[block : block + len(columns), :rows].transpose(0, 1).reshape(-1)
        block += len(columns)
        bits = torch.nn.functional.pad(own.int(), (0, -own.numel() % 8)).view(-1, 8)
        parts.append((bits * 2 ** torch.arange(8)).sum(1).to(torch.uint8))
    return torch.cat(parts)


def test_keys_with_gaps_are_not_copied(monkeypatch):
    """Slices of packed projections are pages as they are."""
    matrix = Matrix(8, 12, 2, 3)
    wide = torch.full((12, KV_HEADS, 3 * DIM), torch.nan)
    wide[..., :DIM], wide[..., DIM : 2 * DIM] = matrix.k, matrix.v
    wrapper, launched = planned(matrix), record_launches(monkeypatch)
    got = wrapper.run(matrix.q, wide[..., :DIM], wide[..., DIM : 2 * DIM])
    close(got, matrix.expected()[0])
    pages = wrapper._pages(wide[..., :DIM], wide[..., DIM : 2 * DIM])
    assert pages[0].data_ptr() == wide.data_ptr()
    assert launched == ["run_paged"]


def test_outputs_are_float16_unless_the_plan_says_more():
    matrix = Matrix(8, 12, 2, 3)
    wrapper = BSR(workspace())
    wrapper.plan(*matrix.plan, q_data_type="float32")
    assert wrapper.run(*matrix.tensors).dtype is torch.float16
    wrapper.plan(*matrix.plan, q_data_type="float32", o_data_type=None)
    assert wrapper.run(*matrix.tensors).dtype is torch.float32
    assert (wrapper.M, wrapper.N, wrapper.R, wrapper.C) == (8, 12, 2, 3)


def test_a_soft_cap_and_older_calls():
    matrix = Matrix(8, 12, 2, 3)
    want = matrix.expected(logits_soft_cap=2.0)[0]
    close(planned(matrix, logits_soft_cap=2.0).run(*matrix.tensors), want)
    wrapper = planned(matrix)
    close(wrapper.forward(*matrix.tensors, logits_soft_cap=2.0), want)
    wrapper.end_forward()
    causal = planned(matrix, causal=True)
    close(causal.forward(*matrix.tensors), matrix.expected(causal=True)[0])


# -- blocks of any sizes --------------------------------------------------------------------------


class Variable:
    """For each KV head a mask of blocks and the sizes of rows and columns."""

    def __init__(self, rows, columns, heads=HEADS, seed=1):
        g = torch.Generator().manual_seed(seed)
        self.rows, self.columns = torch.tensor(rows), torch.tensor(columns)
        shape = len(rows), len(rows[0]), len(columns[0])
        self.mask = torch.rand(shape, generator=g) < 0.6
        self.heads, self.kv_heads = heads, len(rows)
        self.q = torch.randn(heads, sum(rows[0]), DIM, generator=g)
        self.k, self.v = torch.randn(2, self.kv_heads, sum(columns[0]), DIM, generator=g)

    @property
    def plan(self):
        return self.mask, self.rows, self.columns, self.heads, self.kv_heads, DIM

    @property
    def tensors(self):
        return self.q, self.k, self.v

    def expected(self, **options):
        group, states = self.heads // self.kv_heads, []
        for head in range(self.heads):
            kv = head // group
            seen = self.mask[kv].repeat_interleave(self.rows[kv], 0)
            seen = seen.repeat_interleave(self.columns[kv], 1)
            one = (x[i].unsqueeze(1) for x, i in zip(self.tensors, (head, kv, kv)))
            states.append(dense(*one, seen, **options))
        outs, lses = zip(*states)
        return torch.cat(outs, 1).transpose(0, 1).float(), torch.cat(lses, 1).t().float()


#: Rows and columns of each KV head, query heads.
SHAPES = {
    "uneven": ([[1, 3, 2], [2, 2, 2]], [[3, 1, 4], [5, 0, 3]], 4),
    "multiples": ([[4, 4], [8, 0]], [[16, 32], [32, 16]], 2),
    "one head": ([[5]], [[7, 9]], 3),
    "large": ([[3, 2]], [[256, 512]], 1),
}
shapes = pytest.mark.parametrize("name", SHAPES)


def planned_variable(matrix, **options):
    wrapper = VARIABLE(workspace())
    wrapper.plan(*matrix.plan, **{"q_data_type": "float32", **options})
    return wrapper


def reversed_strides(x):
    return torch.empty(x.shape[::-1]).permute(*reversed(range(x.dim())))


@shapes
def test_blocks_of_any_sizes(name):
    matrix = Variable(*SHAPES[name])
    wrapper = planned_variable(matrix, sm_scale=0.2)
    want = matrix.expected(sm_scale=0.2)
    got = wrapper.run(*matrix.tensors, return_lse=True)
    for mine, theirs in zip(got, want):
        close(mine, theirs)
    assert torch.equal(wrapper.run(*matrix.tensors), got[0])
    for make in (torch.empty_like, reversed_strides):
        out, lse = make(matrix.q), make(want[1])
        again = wrapper.run(*matrix.tensors, out, lse, return_lse=True)
        assert again[0] is out
        assert again[1] is lse
        assert torch.equal(out, got[0])
        assert torch.equal(lse, got[1])


@pytest.mark.parametrize(("name", "size"), [("uneven", 1), ("multiples", 16), ("large", 128)])
def test_pages_are_as_large_as_all_columns_allow(name, size):
    assert planned_variable(Variable(*SHAPES[name]))._rows._page_size == size


def test_masks_may_be_integers():
    matrix = Variable(*SHAPES["uneven"])
    want = matrix.expected()[0]
    matrix.mask = matrix.mask.int()
    close(planned_variable(matrix).run(*matrix.tensors), want)


def test_one_head_for_each_is_one_launch_without_copies(monkeypatch):
    matrix = Variable(*SHAPES["multiples"])
    wrapper, launched = planned_variable(matrix), record_launches(monkeypatch)
    out = torch.empty_like(matrix.q)
    wrapper.run(*matrix.tensors, out)
    assert launched == ["run_paged"]
    assert wrapper._rows_in(out).data_ptr() == out.data_ptr()
    assert wrapper._as_rows(matrix.q).data_ptr() == matrix.q.data_ptr()
    strided = torch.randn(2, 8, 2 * DIM)[..., :DIM]
    close(wrapper.run(strided, *matrix.tensors[1:]),
          wrapper.run(strided.contiguous(), *matrix.tensors[1:]))  # fmt: skip


def test_older_calls_of_blocks_of_any_sizes():
    matrix = Variable(*SHAPES["uneven"])
    want = matrix.expected(logits_soft_cap=2.0)[0]
    close(planned_variable(matrix).forward(*matrix.tensors, logits_soft_cap=2.0), want)
    close(planned_variable(matrix, logits_soft_cap=2.0).run(*matrix.tensors), want)


def test_causal_blocks_count_the_keys_that_are_seen():
    matrix = Variable([[2, 2]], [[3, 1]], heads=1)
    matrix.mask = torch.tensor([[[True, False], [True, True]]])
    got = planned_variable(matrix, causal=True).run(*matrix.tensors)[0]
    q, k, v = (x[0].unsqueeze(1) for x in matrix.tensors)
    for rows, keys in (((0, 2), 3), ((2, 4), 4)):
        mask = torch.arange(keys) <= torch.arange(2).unsqueeze(-1) + keys - 2
        want = dense(q[slice(*rows)], k[:keys], v[:keys], mask)[0]
        close(got[slice(*rows)], want[:, 0].float())


# -- the layout of masks --------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", MATRICES, ids=str)
def test_a_mask_of_blocks_in_the_order_of_rows(sizes):
    matrix = Matrix(*sizes)
    flat = convert_bsr_mask_layout(matrix.mask, matrix.indptr)
    want, bounds = [], matrix.indptr.tolist()
    for begin, end in itertools.pairwise(bounds):
        for row in range(matrix.r):
            want += [matrix.mask[block, row] for block in range(begin, end)]
    want = torch.cat(want) if want else torch.zeros(0, dtype=torch.bool)
    assert torch.equal(flat, want)
    assert flat.dtype is torch.bool


def test_bounds_of_masks_that_are_wrong():
    mask = torch.arange(12).view(3, 2, 2)
    for wrong in ([0, 2], [0, 2, 9], [5, 1, 3], [0]):
        assert convert_bsr_mask_layout(mask, torch.tensor(wrong)).shape == (12,)
    with pytest.raises(ValueError, match="mask must have 3 dimensions, got shape"):
        convert_bsr_mask_layout(mask[0], torch.tensor([0, 3]))
    with pytest.raises(TypeError, match=r"indptr must be a torch\.Tensor, got list"):
        convert_bsr_mask_layout(mask, [0, 3])


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"indptr": None}, r"indptr must be a torch\.Tensor, got None"),
        ({"indices": None}, r"indices must be a torch\.Tensor, got None"),
        ({"M": -1}, "M must be >= 0, got -1"),
        ({"R": 0}, "R must be >= 1, got 0"),
        ({"C": 0}, "C must be >= 1, got 0"),
        ({"N": 13}, "N must be a multiple of C=3, got 13"),
        ({"M": 9}, r"indptr must have shape \[6\] for M=9 rows in blocks of R=2, got \[5\]"),
        ({"N": 9}, "indices must be 0 to 2, the blocks of a row, got 3"),
        ({"mask": torch.ones(2, 2, 3).bool()}, r"mask must have shape \[\d+, 2, 3\], one block"),
        ({"block_mask": torch.ones(4, 4, 4).bool()}, "block_mask must be None: .* Fix: .*Variable"),
        ({"kv_splits": 2}, "kv_splits must be None"),
        ({"num_kv_heads": 3}, "num_qo_heads must be a positive multiple"),
        ({"head_dim": 72}, "head_dim_qk/head_dim_vo must be one of"),
    ],
    ids=str,
)
def test_plans_of_blocks_that_are_refused(change, words):
    matrix = Matrix(8, 12, 2, 3, seed=2)
    wrapper = planned(matrix)
    want = wrapper.run(*matrix.tensors)
    names = ["indptr", "indices", "M", "N", "R", "C", "num_qo_heads", "num_kv_heads", "head_dim"]
    with pytest.raises(ValueError, match=words):
        wrapper.plan(**{**dict(zip(names, matrix.plan)), **F32, **change})
    assert torch.equal(wrapper.run(*matrix.tensors), want)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_mask_map": torch.ones(2, 3, 2)}, r"block_mask_map must have shape \[2, 3, 3\]"),
        ({"block_row_sz": torch.ones(3, 3)}, r"block_row_sz must have shape \[2, 3\]"),
        ({"block_row_sz": torch.tensor([[1, 3, 2], [2, 2, 3]])}, "row_sz must have the same sum"),
        ({"block_col_sz": torch.tensor([[3, 1, 4], [9, -1, 0]])}, "col_sz must be >= 0, got -1"),
        ({"num_qo_heads": 3}, "num_qo_heads must be a positive multiple of num_kv_heads"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode must be NONE or ROPE_LLAMA"),
        ({"head_dim": 72}, "head_dim_qk/head_dim_vo must be one of"),
    ],
    ids=str,
)
def test_plans_of_any_sizes_that_are_refused(change, words):
    matrix = Variable(*SHAPES["uneven"])
    wrapper = planned_variable(matrix)
    want = wrapper.run(*matrix.tensors)
    names = [*inspect.signature(wrapper.plan).parameters][:6]
    given = {**dict(zip(names, matrix.plan)), "q_data_type": "float32", **change}
    with pytest.raises((NotImplementedError, ValueError), match=words):
        wrapper.plan(**given)
    assert torch.equal(wrapper.run(*matrix.tensors), want)


@pytest.mark.parametrize("kind", [BSR, VARIABLE])
def test_runs_that_are_refused(kind):
    matrix = Matrix(8, 12, 2, 3) if kind is BSR else Variable(*SHAPES["uneven"])
    q, k, v = matrix.tensors
    with pytest.raises(PlanMismatchError, match=rf"{kind.__name__}\.run: there is no plan"):
        kind(workspace()).run(q, k, v)
    wrapper = planned(matrix) if kind is BSR else planned_variable(matrix)
    out = torch.full_like(q, 7.0)
    for call, words in (
        ((q, k[:, :-1], v), r"k must have shape .* as in plan\(\)"),
        ((q, k, v[:-1]), r"v must have shape .* as in plan\(\)"),
        ((q, k.half(), v.half()), "dtype of k, torch.float16, does not match the kv_data_type"),
        ((q.half(), k, v), "dtype of q, torch.float16, does not match|Invalid dtype of out"),
        ((q[:-1], k, v), "q must have shape|does not match qo_indptr"),
    ):
        with pytest.raises(ValueError, match=words):
            wrapper.run(*call, out=out)
    with pytest.raises(ValueError, match=r"Invalid shape of out|out must have shape"):
        wrapper.run(q, k, v, out=out[:-1])
    assert out.eq(7).all()
    with pytest.raises(BackendSupportedError, match="backend='cake' is not part of precast"):
        kind(workspace(), backend="cake")


def test_outputs_that_are_refused():
    """Where they are copies of what the kernel has written."""
    matrix = Variable(*SHAPES["uneven"])
    wrapper, q = planned_variable(matrix), matrix.q
    with pytest.raises(ValueError, match="out must not hold an element twice"):
        wrapper.run(*matrix.tensors, q[:1].clone().expand(q.shape))
    out = torch.full_like(q, 7.0)
    with pytest.raises(ValueError, match="out must not overlap lse's memory"):
        wrapper.run(*matrix.tensors, out, out[..., 0], return_lse=True)
    with pytest.raises(ValueError, match="Invalid dtype of lse: expected"):
        wrapper.run(*matrix.tensors, out, torch.empty(q.shape[:2]).half(), return_lse=True)
    assert out.eq(7).all()


def test_scales_of_8_bits_are_not_there():
    matrix = Matrix(8, 12, 2, 3)
    for option in ("scale_q", "scale_k", "scale_v"):
        for method in (planned(matrix).run, planned(matrix).forward):
            with pytest.raises(NotImplementedError, match=f"{option} must be None"):
                method(*matrix.tensors, **{option: torch.ones(HEADS)})


@pytest.mark.parametrize("kind", [BSR, VARIABLE])
def test_torch_compile_makes_one_graph(kind):
    matrix = Matrix(8, 12, 2, 3) if kind is BSR else Variable(*SHAPES["uneven"])
    wrapper = planned(matrix) if kind is BSR else planned_variable(matrix)
    want = wrapper.run(*matrix.tensors, return_lse=True)
    torch._dynamo.reset()
    run = torch.compile(
        lambda q, k, v: wrapper.run(q, k, v, return_lse=True), fullgraph=True, backend="aot_eager"
    )
    assert all(map(torch.equal, run(*matrix.tensors), want))


def test_parameters_are_flashinfers():
    def names(function):
        return " ".join(inspect.signature(function).parameters)

    assert names(BSR.__init__) == names(VARIABLE.__init__) == "self float_workspace_buffer backend"
    assert names(BSR.plan) == (
        "self indptr indices M N R C num_qo_heads num_kv_heads head_dim mask packed_mask causal "
        "pos_encoding_mode use_fp16_qk_reduction logits_soft_cap sm_scale rope_scale rope_theta "
        "q_data_type kv_data_type o_data_type non_blocking block_mask kv_block_lens q2k_indices "
        "q2k_num kv_splits use_clc q_scale k_scale v_scale"
    )
    assert names(BSR.run) == ("self q k v scale_q scale_k scale_v out lse return_lse enable_pdl")
    assert names(VARIABLE.plan) == (
        "self block_mask_map block_row_sz block_col_sz num_qo_heads num_kv_heads head_dim causal "
        "pos_encoding_mode use_fp16_qk_reduction logits_soft_cap sm_scale rope_scale rope_theta "
        "non_blocking q_data_type kv_data_type"
    )
    assert names(VARIABLE.run) == "self q k v out lse return_lse enable_pdl"
    assert precast.sparse.BlockSparseAttentionWrapper is BSR
