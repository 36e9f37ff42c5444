# SPDX-License-Identifier: Apache-2.0
"""Pipes of processors: what is fused, that fusing changes nothing, what is rejected."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from sampling_support import LEAST_P_VALUE, p_value, shares

from precast._ops.logits_processor.compiler import (
    FusionRule,
    build_minp_sampling,
    build_temperature_softmax,
    build_topk_sampling,
    build_topp_sampling,
    compile_pipeline,
    get_default_validity_checks,
    indices_terminal_rule,
    joint_topk_topp_sampleprobs_guard,
    single_softmax_rule,
    validate_pipeline,
)
from precast._ops.logits_processor.op import Op
from precast._ops.logits_processor.operators import (
    FusedProbsTopKSampleOp,
    FusedProbsTopKTopPSampleOp,
    FusedTemperatureSoftmaxOp,
    MinPOp,
    ProbsSampleOp,
    ProbsTopKOp,
    SoftmaxOp,
    TemperatureOp,
    TopPOp,
)
from precast._ops.logits_processor.processors import validate_processor_chain
from precast.logits_processor import (
    CompileError,
    LegalizationError,
    LogitsPipe,
    LogitsProcessor,
    MinP,
    Sample,
    Softmax,
    TaggedTensor,
    Temperature,
    TensorType,
    TopK,
    TopP,
)

LOGITS, PROBS = TensorType.LOGITS, TensorType.PROBS
RANDOM = {"seed": 11, "offset": 0}
PARAMETERS: dict[str, Any] = {"temperature": 0.7, "top_k": 12, "top_p": 0.6, "min_p": 0.05}

pytestmark = pytest.mark.usefixtures("reference_mode")


def logits(rows: int = 400, size: int = 300) -> torch.Tensor:
    return 2 * torch.randn(rows, size, generator=torch.Generator().manual_seed(0))


def used(processors: Sequence[LogitsProcessor]) -> dict[str, Any]:
    names = {Temperature: "temperature", TopK: "top_k", TopP: "top_p", MinP: "min_p"}
    kinds = [type(processor) for processor in processors]
    return {name: PARAMETERS[name] for kind, name in names.items() if kind in kinds}


def names(pipe: LogitsPipe) -> list[str]:
    return [type(op).__name__ for op in pipe.compiled_ops or ()]


FUSED: list[tuple[list[LogitsProcessor], TensorType, list[str]]] = [
    ([Temperature(), Softmax(), Sample()], LOGITS, ["FusedLogitsSampleOp"]),
    ([Softmax(), TopK(), Sample()], LOGITS, ["FusedLogitsSampleOp"]),
    ([Softmax(), MinP(), Sample()], LOGITS, ["FusedLogitsSampleOp"]),
    ([Temperature(), TopK(), Softmax(), TopP(), Sample()], LOGITS, ["FusedLogitsSampleOp"]),
    ([Softmax(), TopK(), TopP(), MinP(), Sample()], LOGITS, ["FusedLogitsSampleOp"]),
    ([Temperature(), Softmax()], LOGITS, ["FusedTemperatureSoftmaxOp"]),
    (
        [Temperature(), Softmax(), TopK()],
        LOGITS,
        ["FusedTemperatureSoftmaxOp", "ProbsTopKOp"],
    ),
    ([TopK(), Sample()], PROBS, ["FusedProbsTopKSampleOp"]),
    ([TopP(), Sample()], PROBS, ["FusedProbsTopPSampleOp"]),
    ([MinP(), Sample()], PROBS, ["FusedProbsMinPSampleOp"]),
    ([TopK(), TopP(), Sample()], PROBS, ["FusedProbsTopKTopPSampleOp"]),
    ([TopP(), TopK(), Sample()], PROBS, ["FusedProbsTopKTopPSampleOp"]),
    ([Softmax(), TopP(), TopK(), Sample()], LOGITS, ["FusedLogitsSampleOp"]),
    (
        [TopK(joint_topk_topp=True), Softmax(), TopP(), Sample()],
        LOGITS,
        ["FusedLogitsSampleOp"],
    ),
    ([MinP(), TopP(), Sample()], PROBS, ["MinPOp", "FusedProbsTopPSampleOp"]),
    (
        [Softmax(), MinP(), TopP(), Sample()],
        LOGITS,
        ["SoftmaxOp", "MinPOp", "FusedProbsTopPSampleOp"],
    ),
]


@pytest.mark.parametrize(("processors", "kind", "ops"), FUSED, ids=lambda value: str(value)[:70])
def test_what_is_fused_does_what_the_steps_do(
    processors: list[LogitsProcessor], kind: TensorType, ops: list[str]
) -> None:
    pipe = LogitsPipe(processors, input_type=kind)
    assert names(pipe) == ops
    steps = LogitsPipe(processors, compile=False, input_type=kind)
    x = logits() if kind == LOGITS else logits().softmax(1)
    more = used(processors)
    if not isinstance(processors[-1], Sample):
        torch.testing.assert_close(pipe(x, **more), steps(x, **more), rtol=1e-5, atol=1e-8)
        return
    tokens = pipe(x, **more, **RANDOM)
    assert tokens.dtype == torch.int32
    assert torch.equal(pipe(x, **more, **RANDOM), tokens)
    rows = LogitsPipe(processors[:-1], compile=False, input_type=kind)(x, **more)
    if kind == LOGITS and not rows.min() >= 0:
        rows = rows.softmax(1)
    assert (rows.gather(1, tokens[:, None].long()) > 0).double().mean() >= 0.99
    if "top_p" not in more:  # The same draw of the same masses, but for rounding.
        assert (tokens == steps(x, **more, **RANDOM)).double().mean() >= 0.98


@pytest.mark.parametrize(
    "processors",
    [
        [Temperature(), Softmax(), TopK(), TopP(), Sample()],
        [Softmax(), TopP(), TopK(), Sample()],
        [TopK(joint_topk_topp=True), Softmax(), TopP(), Sample()],
        [Softmax(), TopK(), TopP(), MinP(), Sample()],
        [Temperature(), Softmax(), MinP(), TopP(), Sample()],
    ],
    ids=str,
)
def test_a_fused_pipe_is_distributed_as_its_steps(processors: list[LogitsProcessor]) -> None:
    x = logits(1, 60).expand(1 << 14, -1)
    more = used(processors)
    tokens = LogitsPipe(processors, input_type=LOGITS)(x, **more, **RANDOM)
    steps = LogitsPipe(processors[:-1], compile=False, input_type=LOGITS)
    assert p_value(tokens, shares(steps(x[:1], **more)[0])) > LEAST_P_VALUE


def test_steps_without_a_processor_are_fused_as_they_are() -> None:
    (op,) = compile_pipeline([ProbsTopKOp(), TopPOp(), ProbsSampleOp()])
    rows = TaggedTensor.probs(torch.tensor([[0.4, 0.3, 0.2, 0.1]]).expand(2000, -1))
    assert op(rows, top_k=2, top_p=0.55, **RANDOM).data.unique().tolist() == [0]


def test_a_mask_of_logits_is_not_joint() -> None:
    x = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(2000, -1)
    pipe = LogitsPipe([TopK(joint_topk_topp=True), Softmax(), TopP(), Sample()], input_type=LOGITS)
    assert pipe(x, top_k=2, top_p=0.55, **RANDOM).unique().tolist() == [0]


def test_joint_filters_count_the_whole_mass() -> None:
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).expand(2000, -1)
    found = {}
    for joint in (False, True):
        pipe = LogitsPipe([TopK(joint_topk_topp=joint), TopP(), Sample()], input_type=PROBS)
        found[joint] = pipe(probs, top_k=2, top_p=0.55, **RANDOM).unique().tolist()
    assert found == {False: [0], True: [0, 1]}


def test_parameters_of_a_processor_a_call_and_a_row() -> None:
    x = logits(50)
    fixed = LogitsPipe([Softmax(), TopK(top_k=1), Sample()])
    assert torch.equal(fixed(x).long(), x.argmax(1))
    assert len(fixed(x[:1].expand(200, -1), top_k=40, **RANDOM).unique()) > 1
    by_row = torch.full((50,), 5, dtype=torch.int32)
    open_pipe = LogitsPipe([Softmax(), TopK(), Sample()])
    assert torch.equal(open_pipe(x, top_k=by_row, **RANDOM), open_pipe(x, top_k=5, **RANDOM))
    with pytest.raises(ValueError, match="Required parameter 'top_k' not provided"):
        open_pipe(x)
    generator = torch.Generator().manual_seed(3)
    first = open_pipe(x, top_k=40, generator=generator)
    assert torch.equal(open_pipe(x, top_k=40, generator=generator.manual_seed(3)), first)


def test_indices_choose_rows() -> None:
    indices = torch.tensor([2, 0, 2, 1])
    for compiled in (False, True):
        pipe = LogitsPipe([Softmax(), Sample()], compile=compiled)
        assert torch.equal(pipe(torch.eye(3) * 500, indices=indices), indices)


@pytest.mark.parametrize(
    ("processors", "more"),
    [
        ([Temperature()], {"temperature": 0.0}),
        ([Temperature()], {"temperature": -1.0}),
        ([TopK()], {"top_k": 0}),
        ([TopK()], {"top_k": 2.5}),
        ([Softmax(), TopP()], {"top_p": 0.0}),
        ([Softmax(), TopP()], {"top_p": 1.5}),
        ([Softmax(), MinP()], {"min_p": 0.0}),
    ],
)
def test_parameters_out_of_range(processors: list[LogitsProcessor], more: dict[str, Any]) -> None:
    for steps in (processors, [*processors, Sample()]):
        pipe = LogitsPipe(steps, input_type=LOGITS)
        with pytest.raises(ValueError, match=r"must be"):
            pipe(logits(2), **more)


@pytest.mark.parametrize(
    ("processors", "kind", "error", "words"),
    [
        ([], None, ValueError, "Pipeline cannot be empty"),
        ([TopK()], None, LegalizationError, "Cannot infer input type: TopK can accept both"),
        ([Softmax(), Temperature()], None, LegalizationError, "processor 1 .Temperature."),
        ([Softmax(), Softmax()], None, LegalizationError, "processor 1 .Softmax."),
        ([TopP()], LOGITS, LegalizationError, "TopP can only be applied to PROBS"),
        ([Softmax(), Sample(), TopK()], None, LegalizationError, "processor 2 .TopK."),
        ([Temperature()], PROBS, LegalizationError, "Temperature can only be applied to LOGITS"),
    ],
)
def test_pipes_that_do_not_fit_are_rejected(
    processors: list[LogitsProcessor], kind: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        LogitsPipe(processors, input_type=kind)


def test_the_kind_of_a_tensor() -> None:
    pipe = LogitsPipe([TopK(), Sample()], input_type=PROBS)
    x = logits(5).softmax(1)
    plain = pipe(x, top_k=4, **RANDOM)
    assert torch.equal(pipe(TaggedTensor.probs(x), top_k=4, **RANDOM), plain)
    with pytest.raises(ValueError, match="LOGITS"):
        pipe(TaggedTensor.logits(x), top_k=4)
    tagged = TaggedTensor.indices(x)
    assert (tagged.type, tagged.shape, tagged.dtype) == (TensorType.INDICES, x.shape, x.dtype)
    assert (tagged.device, tagged.size(), tagged.size(0)) == (x.device, x.shape, 5)
    assert float(torch.sum(tagged)) == float(x.sum())  # type: ignore[call-overload]
    assert torch.equal(torch.cat([tagged, x]), torch.cat([x, x]))
    assert torch.equal(torch.sum(input=tagged, dim=1), x.sum(1))


class Halve(Op):
    """Logits halved, by anybody."""

    IN, OUT = LOGITS, LOGITS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        return TaggedTensor(tensor.data / 2, self._validate_input_type(tensor))


class Quarter(Halve):
    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        return TaggedTensor(tensor.data / 4, self._validate_input_type(tensor))


class Half(LogitsProcessor):
    def legalize(self, input_type: TensorType) -> list[Op]:
        if input_type != LOGITS:
            raise ValueError("only logits are halved")
        return [Halve()]


def test_processors_rules_and_checks_of_ones_own() -> None:
    rule = FusionRule((Halve, Halve), lambda window: True, lambda window: Quarter(), 1000)
    x = logits(4)
    pipe = LogitsPipe([Half(), Half(), Softmax()], custom_fusion_rules=[rule])
    assert names(pipe) == ["Quarter", "SoftmaxOp"]
    torch.testing.assert_close(pipe(x), (x / 4).softmax(1))
    later = LogitsPipe([Half(), Half(), Softmax()], compile=False)
    torch.testing.assert_close(later(x), (x / 4).softmax(1))
    later.compile([rule])
    assert names(later) == ["Quarter", "SoftmaxOp"]

    def reject(ops: Sequence[Op]) -> None:
        raise CompileError("not today")

    with pytest.raises(CompileError, match="not today"):
        LogitsPipe([Softmax()], custom_validity_checks=[reject])


# -- names of FlashInfer --------------------------------------------------------------------------

#: Its modules and what users can import from them.
THEIRS = {
    "compiler": "Compiler compile_pipeline CompileError ValidityCheck",
    "fusion_rules": "FusionRule get_default_fusion_rules joint_topk_topp_sampleprobs_guard "
    "build_temperature_softmax build_topk_sampling build_topp_sampling build_minp_sampling",
    "legalization": "LegalizationError infer_initial_type legalize_processors "
    "validate_processor_chain",
    "op": "Op ParameterizedOp",
    "operators": "TemperatureOp SoftmaxOp ProbsTopKOp LogitsTopKOp TopPOp MinPOp ProbsSampleOp "
    "LogitsSampleOp FusedTemperatureSoftmaxOp FusedProbsTopKSampleOp FusedProbsTopPSampleOp "
    "FusedProbsMinPSampleOp FusedProbsTopKTopPSampleOp",
    "pipeline": "LogitsPipe",
    "processors": "LogitsProcessor Temperature Softmax TopK TopP MinP Sample",
    "types": "TensorType TaggedTensor",
    "validators": "CompileError ValidityCheck single_softmax_rule indices_terminal_rule "
    "get_default_validity_checks validate_pipeline",
}


@pytest.mark.parametrize("module", THEIRS)
def test_the_names_of_flashinfer_are_there(module: str) -> None:
    found = importlib.import_module(f"precast.logits_processor.{module}")
    assert [name for name in THEIRS[module].split() if not hasattr(found, name)] == []


def test_validators() -> None:
    checks = get_default_validity_checks()
    assert checks == [single_softmax_rule, indices_terminal_rule]
    good = [SoftmaxOp(), ProbsTopKOp(), ProbsSampleOp()]
    for ops, words in (
        ([SoftmaxOp(), SoftmaxOp()], "Multiple Softmax operators found"),
        ([ProbsSampleOp(), ProbsTopKOp()], "Found ProbsTopKOp after ProbsSampleOp"),
        ([], "Pipeline cannot be empty"),
    ):
        with pytest.raises(CompileError, match=words):
            validate_pipeline(ops)
    validate_pipeline(good)
    seen: list[Sequence[Op]] = []
    validate_pipeline(good, [seen.append])
    assert seen == [good]
    single_softmax_rule(good)
    indices_terminal_rule(good)


def test_chains_of_processors() -> None:
    validate_processor_chain([Temperature(), Softmax(), TopK(), Sample()])
    for processors, words in (
        ([], "Processor chain cannot be empty"),
        ([TopK(), Sample()], "TopK can accept both"),
        ([Softmax(), Temperature()], "processor 1 .Temperature."),
    ):
        with pytest.raises(LegalizationError, match=words):
            validate_processor_chain(processors)


def test_what_builds_fused_steps() -> None:
    draw, nucleus, best = ProbsSampleOp(seed=1), TopPOp(top_p=0.3), ProbsTopKOp(top_k=4)
    assert [joint_topk_topp_sampleprobs_guard([op]) for op in (best, Halve())] == [False, False]
    assert joint_topk_topp_sampleprobs_guard([ProbsTopKOp(joint_topk_topp=True), nucleus])
    for build, window, kind, wanted in (
        (build_topk_sampling, [best, draw], "FusedProbsTopKSampleOp", {"top_k": 4, "seed": 1}),
        (build_topp_sampling, [nucleus, draw], "FusedProbsTopPSampleOp", {"top_p": 0.3}),
        (build_minp_sampling, [MinPOp(), draw], "FusedProbsMinPSampleOp", {"seed": 1}),
        (
            build_temperature_softmax,
            [TemperatureOp(temperature=2.0), SoftmaxOp(enable_pdl=False)],
            "FusedTemperatureSoftmaxOp",
            {"temperature": 2.0, "enable_pdl": False},
        ),
    ):
        made: Any = build(window)
        assert type(made).__name__ == kind
        assert wanted.items() <= made.default_params.items()
    assert FusedProbsTopKTopPSampleOp(True).order == "joint"
    assert FusedProbsTopKSampleOp(False, top_k=3).default_params == {
        "deterministic": False,
        "top_k": 3,
    }
    assert FusedTemperatureSoftmaxOp(False).default_params["enable_pdl"] is False


def test_a_temperature_that_is_no_number_is_rejected() -> None:
    for processors in ([Temperature()], [Temperature(), Softmax()]):
        with pytest.raises(ValueError, match="Temperature must be positive float"):
            LogitsPipe(processors)(logits(2), temperature=float("nan"))
