# SPDX-License-Identifier: Apache-2.0
"""Random calls of allreduce_fusion and what they must compute, for simulated and real ranks."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch

from precast.comm import AllReduceFusionPattern as Pattern
from precast.comm import allreduce_fusion, allreduce_fusion_reference
from precast.comm.allreduce import AllReduceFusionWorkspace

PATTERNS = (0, 1, 2, 4, 8, 9, 10, 11)
GROUPED = (Pattern.kARResidualRMSNormPerTokenGroupFP8PackedQuant, 9)
BY_TOKEN = (Pattern.kARResidualRMSNormDynamicFP8Quant, 11)
WITH_NORM = (1, 4, 9, 11)
HIDDEN = (128, 256, 384, 1024, 2880, 4096, 5120, 7168, 8192, 12288, 16384)
#: Vectors of a thread and CTAs of a row, 0 for the launcher's choice. With more than two vectors
#: the kernel for any rows runs, in one CTA as on GPUs without clusters.
CUTS = ((0, 0), (0, 0), (0, 0), (8, 1), (4, 0), (3, 0))
VECS_WORD = 8  # of the params block, before the CTAs of a row
ROWS = (1, 2, 3, 7, 8, 17, 33, 64, 130)


class Case(NamedTuple):
    """A call; all ranks draw the same."""

    pattern: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # elements by which all tensors are unaligned; -1: those of ranks with odd numbers
    group_size: int
    use_oneshot: bool | None
    weight_bias: float
    in_place: int  # 0: outputs of their own; 1: residual in place, norm in the input; 2: crosswise
    pdl: bool
    early: bool
    special: str  # what the inputs hold besides numbers
    cut: tuple[int, int]  # of CUTS


def draw(numbers: random.Random, dtypes: tuple[torch.dtype, ...], most: int = 1 << 19) -> Case:
    """Draw a call of at most ``most`` elements."""
    pattern = numbers.choice(PATTERNS)
    dtype = numbers.choice(dtypes)
    if dtype == torch.float32:
        pattern = numbers.choice((0, 1))
    group_size = numbers.choice((16, 32, 64, 128))
    shape: tuple[int, ...]
    if pattern == 0:
        shape = (numbers.choice((1, 7, 8, 100, 4096, 8193, 65536, numbers.randint(1, most))),)
    else:
        hidden = numbers.choice(HIDDEN)
        if pattern in (1, 2, 4, 10, 11) and numbers.random() < 0.1:
            hidden = numbers.randint(1, 3000)
        if dtype == torch.float32:
            hidden = min(hidden, 8192)  # a row has at most 32 KiB
        if hidden % group_size:
            group_size = 16
        rows = max(1, min(numbers.choice(ROWS), most // hidden))
        shape = (rows, hidden)
    return Case(
        pattern,
        dtype,
        shape,
        numbers.choice((0, 0, 0, 1, -1)),
        group_size,
        numbers.choice((None, True, False)),
        numbers.choice((0.0, 1.0, 0.25)),
        numbers.choice((0, 0, 1, 2)),
        numbers.random() < 0.5,
        numbers.random() < 0.5,
        numbers.choice(("", "", "", "sentinel", "nan", "zeros")),
        numbers.choice(CUTS),
    )


def of_rank(case: Case, rank: int) -> Case:
    """Return the case of one rank, which differs in alignment alone."""
    return case._replace(offset=rank % 2) if case.offset < 0 else case


def new(case: Case, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Make a poisoned tensor of the shape of a case."""
    dtype = dtype or case.dtype
    size = torch.Size(case.shape).numel() + case.offset
    bytes_ = torch.full((size * dtype.itemsize,), 0x7F, dtype=torch.uint8, device="cuda")
    return bytes_.view(dtype)[case.offset :].view(case.shape)


def make_input(case: Case, generator: torch.Generator) -> torch.Tensor:
    """Make the input of one rank."""
    x = new(case)
    x.copy_(torch.randn(case.shape, device="cuda", generator=generator))
    if case.special == "sentinel":  # the bits that stand for data that has not arrived
        x.view(torch.int32 if case.dtype == torch.float32 else torch.int16)[..., :3] = -1
    elif case.special == "nan":
        x[..., -1] = float("nan")
    elif case.special == "zeros":
        x.zero_().neg_()
    return x


class Outputs(NamedTuple):
    """What a call wrote."""

    sums: torch.Tensor | None  # s of the pattern without a norm, otherwise x
    norm: torch.Tensor | None
    codes: torch.Tensor | None
    scales: torch.Tensor | None


class Call:
    """The tensors of a case on one rank."""

    def __init__(self, case: Case, input: torch.Tensor, common: torch.Generator) -> None:
        self.case = case
        self.input = input
        self.given: dict[str, Any] = {}
        if case.pattern == 0:
            self.output = new(case) if case.in_place == 0 else input
            return
        rows, hidden = case.shape
        self.residual = new(case)
        self.residual.copy_(torch.randn(case.shape, device="cuda", generator=common))
        self.gamma = new(case._replace(shape=(hidden,)))
        self.gamma.copy_(torch.randn(hidden, device="cuda", generator=common))
        self.scale = torch.rand(1, device="cuda", generator=common) * 0.05 + 0.005
        self.kept = self.residual.clone()
        self.residual_out, self.norm_out = {
            0: (new(case), new(case)),
            1: (self.residual, input),
            2: (input, self.residual),
        }[case.in_place]
        if case.pattern not in WITH_NORM and case.in_place == 2:
            self.norm_out = None
        self.codes = self.scales = None
        if case.pattern != 1:
            self.codes = new(case, torch.float8_e4m3fn)
        if case.pattern in GROUPED:
            words, padded = -(-(hidden // case.group_size) // 4), -(-rows // 4) * 4
            self.scales = torch.full((words, padded), -7, dtype=torch.int32, device="cuda")
            self.scales = self.scales[:, :rows].T
        elif case.pattern in BY_TOKEN:
            self.scales = torch.full((rows, 1), -7.0, device="cuda")

    def run(self, workspace: AllReduceFusionWorkspace) -> None:
        """Call it."""
        block = getattr(workspace, "block", None)
        if block is None:  # A process group reduces.
            self._run(workspace)
            return
        kept = block.clone()
        block[VECS_WORD : VECS_WORD + 2] = torch.tensor(self.case.cut)
        self._run(workspace)
        block.copy_(kept)

    def _run(self, workspace: AllReduceFusionWorkspace) -> None:
        case = self.case
        options: dict[str, Any] = {
            "launch_with_pdl": case.pdl,
            "trigger_completion_at_end": not case.early,
            "use_oneshot": case.use_oneshot,
        }
        if case.pattern == 0:
            result = allreduce_fusion(self.input, workspace, 0, output=self.output, **options)
            assert result is self.output
            return
        allreduce_fusion(
            self.input,
            workspace,
            case.pattern,
            residual_out=self.residual_out,
            norm_out=self.norm_out,
            quant_out=self.codes,
            scale_out=self.scales,
            residual_in=self.residual,
            rms_gamma=self.gamma,
            rms_eps=1e-5,
            scale_factor=self.scale,
            block_quant_group_size=case.group_size,
            weight_bias=case.weight_bias,
            **options,
        )

    @property
    def outputs(self) -> Outputs:
        """What the call wrote."""
        if self.case.pattern == 0:
            return Outputs(self.output, None, None, None)
        norm = self.norm_out if self.case.pattern in WITH_NORM else None
        return Outputs(self.residual_out, norm, self.codes, self.scales)

    def check(self, inputs: list[torch.Tensor]) -> list[str]:
        """Compare the outputs with the reference, given copies of all inputs."""
        case, got = self.case, self.outputs
        if case.pattern == 0:
            (total,) = allreduce_fusion_reference(inputs)
            return [] if same(got.sums, total) else ["sum"]
        x, y, codes, scales = allreduce_fusion_reference(
            inputs,
            case.pattern,
            self.kept,
            self.gamma,
            1e-5,
            self.scale,
            case.group_size,
            case.weight_bias,
        )
        wrong = [] if same(got.sums, x) else ["sum with the residual"]
        assert y is not None
        if got.norm is not None:
            # The order of a sum of squares differs: by one unit of the last place at most.
            limit = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}[case.dtype]
            near = torch.allclose(
                got.norm.float(), y.float(), rtol=limit, atol=limit / 100, equal_nan=True
            )
            wrong += [] if near else ["norm"]
            if case.pattern != 1:  # codes and scales are of the norm that was written
                _, _, codes, scales = _quantised(case, got.norm, self.scale)
                wrong += [] if same(got.codes, codes) else ["codes"]
                wrong += [] if scales is None or same(got.scales, scales) else ["scales"]
        elif got.codes is not None and codes is not None:
            # A norm that rounds the other way moves a code to its neighbour.
            steps = got.codes.view(torch.int8).int() - codes.view(torch.int8).int()
            far = (steps.abs() > 1) & ~(got.codes.isnan() & codes.isnan())
            if far.float().mean() > 0.01:
                wrong.append(f"codes {int(far.sum())}")
        return wrong


def _quantised(
    case: Case, norm: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """The reference of what follows a norm: the sum of one rank without a residual and a norm."""
    from precast._ops.comm.fused_reference import quantized
    from precast._ops.comm.patterns import fusion_of

    mode = fusion_of("test", case.pattern).mode
    return None, None, *quantized(norm, mode, case.group_size, scale)


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors hold the same numbers, a NaN in the same places."""
    if a is None or b is None:
        return a is b
    if a.dtype == torch.int32:
        return bool(torch.equal(a, b))
    a, b = a.float(), b.float()
    return bool(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors hold the same bits."""
    if a is None or b is None:
        return a is b
    if a.dtype != torch.int32:  # words of scales have strides, and compare as they are
        a, b = a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    return bool(torch.equal(a, b))
