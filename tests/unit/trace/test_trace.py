# SPDX-License-Identifier: Apache-2.0
"""Every op's trace template agrees with its op, and what a definition says of a call."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trace_support import definition_model, run_of

import precast
from precast import trace
from precast._base.public_name import public_name
from precast._op.dispatch import kernels
from precast.api_logging import public_api
from precast.trace.registry import find

PAIRS = trace.registered()
IDS = [template.name_prefix for _, template in PAIRS]
every_template = pytest.mark.parametrize(("function", "template"), PAIRS, ids=IDS)

Op = Callable[..., Any]
BF16 = torch.bfloat16


#: Public functions and methods without a definition, each with the reason. A name without a class
#: stands for the methods of that name of all classes, too.
WITHOUT_TEMPLATE = {
    "scaled_fp8_quant": "calls one of three functions, which have one",
    "quantize_fp8": "calls one of two functions, which have one",
    "per_token_cast_to_fp8": "calls per_token_group_quant_8bit, which has one",
    "mxfp4_dequantize_host": "runs on the CPU while weights are loaded; mxfp4_dequantize has one",
    "mxfp8_dequantize_host": "runs on the CPU while weights are loaded; mxfp8_dequantize has one",
    "shuffle_matrix_a": "is indexing by PyTorch while weights are loaded, no kernel",
    "shuffle_matrix_sf_a": "calls block_scale_interleave, which has one",
    "get_shuffle_matrix_a_row_indices": "makes indices by PyTorch while weights are loaded",
    "get_shuffle_matrix_sf_a_row_indices": "makes indices by PyTorch while weights are loaded",
    "cutlass_fused_moe_workspace_size": "computes a size, no kernel",
    "interleave_moe_scales_for_sm90_mixed_gemm": "is indexing by PyTorch while weights are loaded",
    "interleave_moe_weights_for_sm90_mixed_gemm": "is indexing by PyTorch while weights are loaded",
    "fp8_blockscale_gemm_sm90": "calls gemm_fp8_nt_groupwise, which has one",
    "gemm_fp8_nt_blockscaled": "calls gemm_fp8_nt_groupwise, which has one",
    "SegmentGEMMWrapper.run": "calls segment_gemm, which has one",
    "get_seq_lens": "is four operations of PyTorch, no kernel",
    "convert_bsr_mask_layout": "is indexing by PyTorch in a plan, no kernel",
    "supports_gated_residual_rmsnorm": "answers without a kernel",
    "supports_gated_residual_next_rmsnorm": "answers without a kernel",
    "supports_rmsnorm_sigmoid_gate": "answers without a kernel",
    "create_allreduce_fusion_workspace": "shares memory between processes",
    "create_shared_buffer": "shares memory between processes",
    "free_shared_buffer": "frees what processes share",
    "trtllm_create_ipc_workspace_for_all_reduce_fusion": "shares memory between processes",
    "trtllm_destroy_ipc_workspace_for_all_reduce_fusion": "frees what processes share",
    "allreduce_fusion": "needs the other processes, which no definition has",
    "trtllm_allreduce_fusion": "needs the other processes, which no definition has",
    "vllm_all_reduce": "needs the other processes, which no definition has",
    "vllm_dispose": "frees what processes share",
    "vllm_get_graph_buffer_ipc_meta": "shares memory between processes",
    "vllm_init_custom_ar": "shares memory between processes",
    "vllm_meta_size": "is a number",
    "vllm_register_buffer": "shares memory between processes",
    "vllm_register_graph_buffers": "shares memory between processes",
    "can_implement_filtered_topk": "answers without a kernel",
    "is_gated_activation": "answers without a kernel",
    "has_bgmv_moe": "answers without a kernel",
    "has_monomoe": "answers without a kernel",
    "get_scratchpad_size_bytes": "is a number",
    "alloc_scratchpad": "takes memory and computes nothing",
    "interleave_for_tma_wgmma_up": "reorders weights by PyTorch when they are loaded, no kernel",
    "fill_w_ptr": "writes addresses by PyTorch when weights are loaded, no kernel",
    # -- methods of wrappers
    "__init__": "makes a wrapper of attention, which keeps buffers",
    "plan": "divides work for run(); the plan is no result",
    "fast_decode_plan": "is a plan",
    "begin_forward": "is a plan",
    "forward": "calls run(), which has one",
    "forward_return_lse": "calls run(), which has one",
    "run_return_lse": "calls run(), which has one",
    "end_forward": "does nothing",
    "reset_workspace_buffer": "takes memory and computes nothing",
    "workspace_size": "answers without a kernel",
    # -- pipelines of sampling, whose steps are functions that have one
    "compile_pipeline": "chooses functions of sampling, which have one",
    "legalize_processors": "chooses functions of sampling, which have one",
    "legalize": "chooses functions of sampling, which have one",
    "Compiler.compile": "chooses functions of sampling, which have one",
    "Compiler.register_fusion_rule": "keeps a rule",
    "Compiler.register_validity_check": "keeps a rule",
    "LogitsPipe.compile": "chooses functions of sampling, which have one",
    "TaggedTensor.indices": "marks a tensor",
    "TaggedTensor.logits": "marks a tensor",
    "TaggedTensor.probs": "marks a tensor",
    "TaggedTensor.size": "asks a tensor for its size",
}
#: Public modules of tools, which compute nothing.
TOOLS = {"cli", "shim", "bundle", "testing", "trace"}


def _short(name: str) -> str:
    """The name of a function, or of a method with its class."""
    *_, owner, own = name.split(".")
    return f"{owner}.{own}" if owner[:1].isupper() else own


def _public_functions() -> dict[str, Op]:
    """Every public function and method of an op by its short name; no references."""
    names = [m.name for m in pkgutil.iter_modules(precast.__path__) if not m.name.startswith("_")]
    modules = [importlib.import_module(f"precast.{name}") for name in names if name not in TOOLS]
    found: dict[str, Op] = {}
    for module in (precast, *modules):
        for name in getattr(module, "__all__", [n for n in vars(module) if n[0] != "_"]):
            value = getattr(module, name)
            if not str(getattr(value, "__module__", "")).startswith("precast._ops."):
                continue
            if inspect.isclass(value):
                if module.__name__ == "precast.comm":  # They hold what processes share.
                    continue
                methods = inspect.getmembers(value, inspect.isfunction)
                found |= {f"{name}.{m}": f for m, f in methods if m[0] != "_" and m != "reference"}
            elif callable(value) and not value.__name__.endswith("_reference"):
                found[value.__name__] = value
    return found


def test_a_definition_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    x = torch.empty(3, 64, device="meta")
    definition = precast.fi_trace(precast.rmsnorm, x, x[0], save_dir=tmp_path / "new")
    assert precast.rmsnorm.fi_trace(x, x[0], save_dir=str(tmp_path / "new")) == definition
    (file,) = (tmp_path / "new").iterdir()
    assert file.name == f"{definition['name']}.json"
    assert json.loads(file.read_text()) == definition


def test_every_public_function_has_a_template_or_a_reason() -> None:
    traced = {f"{f.__module__}.{f.__qualname__}" for f, _ in PAIRS}
    reasons, missing, unused = WITHOUT_TEMPLATE, [], {*WITHOUT_TEMPLATE} - {"__init__"}
    functions = _public_functions()
    for name, function in functions.items():
        has_one = f"{function.__module__}.{function.__qualname__}" in traced
        excuses = {name, name.rpartition(".")[2]} & reasons.keys()
        # A method of several names, such as ``forward`` of one that merges levels, is itself.
        if has_one == bool(excuses) and not (has_one and "." in name):
            missing.append(name)
        unused -= excuses
    assert missing == []
    assert unused == set()
    assert len(functions) > len(traced) > 100
    public = {_short(name) for name in public_api() if name.startswith("precast.")}
    assert {n for n in public if not n.endswith("__init__")} <= functions.keys()
    ops = {name for name in precast.__all__ if inspect.isfunction(getattr(precast, name))}
    ops = {name for name in ops if _is_op(getattr(precast, name))}
    assert len(ops) > len(kernels()) // 2
    assert ops - {"nvfp4_block_scale_interleave"} <= public


def test_every_run_of_a_wrapper_has_a_template_of_its_own() -> None:
    ends = ".run", "SharedPrefixPagedKVCacheWrapper.forward"
    runs = {name: f for name, f in _public_functions().items() if name.endswith(ends)}
    own = {public_name(function) for function, _ in PAIRS}
    missing = {name for name, function in runs.items() if public_name(function) not in own}
    assert missing == {"SegmentGEMMWrapper.run"}  # It calls segment_gemm, and has no plan.
    assert len(runs) > 10


def _is_op(function: Op) -> bool:
    """Whether it is defined with the ops and no reference of one."""
    return function.__module__.startswith("precast._ops.") and "reference" not in function.__name__


def test_every_op_has_a_template() -> None:
    traced = {public_name(function).rpartition(".")[2] for function, _ in PAIRS}
    functions = {kernel.function for kernel in kernels().values()} - WITHOUT_TEMPLATE.keys()
    public = {name for name in functions if not inspect.isclass(getattr(precast, name))}
    assert traced - {"run", "forward"} == public  # Wrappers run by a plan.
    for function in public:
        assert callable(getattr(precast, function).fi_trace)


def test_no_two_templates_make_the_same_name() -> None:
    assert len(set(IDS)) == len(IDS)


@every_template
def test_names_agree(function: Op, template: trace.TraceTemplate) -> None:
    assert trace.check_template(function, template) == []


@every_template
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_trace_of_generated_tensors_is_complete(
    function: Op, template: trace.TraceTemplate, device: str
) -> None:
    call = trace.make_inputs(function, template, device=device)
    tensors = [value for value in template.values(call) if isinstance(value, torch.Tensor)]
    assert tensors
    assert {tensor.device.type for tensor in tensors} == {device}
    assert find(function).choose(call) is template, "its dispatch function chooses another"
    definition = trace.fi_trace(function, **call)
    assert definition == function.fi_trace(**call)  # type: ignore[attr-defined]
    assert definition["tags"][0] == f"fi_api:{public_name(function)}"
    for name, axis in template.consts():
        value = definition["axes"][name]["value"]
        assert type(value) is int, name
        if axis.abbrev:
            assert f"_{axis.abbrev}{value}" in definition["name"]
    for group in ("inputs", "outputs"):
        assert definition[group].keys() == getattr(template, group).keys()
        for name, row in definition[group].items():
            assert row["dtype"] in trace.DTYPES.values(), name
            assert all(axis in definition["axes"] for axis in row["shape"] or []), name
    sizes = {**template.whole_numbers(call), **template.read(call).sizes}
    for constraint in definition["constraints"]:
        assert eval(constraint, {}, sizes) is True, constraint
    assert json.loads(json.dumps(definition)) == definition


@every_template
def test_flashinfer_bench_takes_it(function: Op, template: trace.TraceTemplate) -> None:
    model = definition_model().Definition
    call = trace.make_inputs(function, template)
    definition = trace.fi_trace(function, **call)
    for row in [*definition["inputs"].values(), *definition["outputs"].values()]:
        row["dtype"] = row["dtype"].replace("uint8", "int8")  # Its schema has no uint8 yet.
    parsed = model.model_validate(definition, strict=False)
    assert parsed.model_dump(mode="json", exclude_unset=True) == definition
    if any(getattr(axis, "in_data", False) for axis in template.axes.values()):
        return  # No size of it is in the shapes of the inputs.
    bound = parsed.get_axes_values_from_inputs(template.values(call))
    assert set(bound) == set(parsed.var_axes)


@every_template
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_reference_alone_gives_what_the_op_gives(
    function: Op, template: trace.TraceTemplate, dtype: str
) -> None:
    call = trace.make_inputs(function, template, dtype=dtype, seed=3)
    definition = trace.fi_trace(function, **call)
    # Before the op, which may write to its inputs.
    wanted = run_of(definition)(*template.values(call))
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    with precast.reference_mode():
        result = function(**call)
    got = template.results(call, result)
    sizes = {
        axis: size
        for row, value in zip(definition["inputs"].values(), template.values(call))
        for axis, size in zip(row["shape"] or [], _shape(value))
    } | {name: row["value"] for name, row in definition["axes"].items() if "value" in row}
    assert len(got) == len(wanted) == len(template.outputs)
    for (name, output), mine, alone in zip(definition["outputs"].items(), got, wanted):
        assert torch.equal(mine, alone), name
        assert [sizes.get(axis) for axis in output["shape"]] == [
            size if axis in sizes else None for axis, size in zip(output["shape"], mine.shape)
        ], name
        assert str(mine.dtype) == f"torch.{output['dtype']}", name


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


@every_template
def test_the_reference_runs_where_there_is_no_precast(
    function: Op, template: trace.TraceTemplate
) -> None:
    call = trace.make_inputs(function, template, device="meta")
    definition = trace.fi_trace(function, **call)
    assert "precast" not in "".join(
        line for line in definition["reference"].splitlines() if line.startswith(("import", "from"))
    )


def test_references_run_in_a_process_of_their_own() -> None:
    """Each in a namespace of its own, where there is no precast."""
    texts = {  # Several templates may have one reference.
        trace.fi_trace(function, **trace.make_inputs(function, template))["reference"]: name
        for (function, template), name in zip(PAIRS, IDS)
    }
    code = "import json, sys; sys.modules['precast'] = None; texts = json.load(sys.stdin)\n"
    code += "for text, name in texts.items(): exec(compile(text, name, 'exec'), {})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_element_types_are_those_of_flashinfer_bench() -> None:
    theirs = {dtype.value for dtype in definition_model().DType}
    assert set(trace.DTYPES.values()) == theirs | {"uint8"}
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in trace.DTYPES)


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("export", "arguments", "name"),
    [
        ("rmsnorm", (meta(7, 4096), meta(4096)), "rmsnorm_h4096"),
        ("rmsnorm", (meta(8, 4096), meta(4096)), "rmsnorm_h4096"),
        ("rmsnorm", (meta(7, 32, 128), meta(128)), "rmsnorm_heads_n32_d128"),
        (
            "rmsnorm",
            (meta(7, 64, dtype=torch.float16), meta(64, dtype=torch.float16)),
            "rmsnorm_h64_f16",
        ),
        ("fused_add_rmsnorm", (meta(7, 64), meta(7, 64), meta(64)), "fused_add_rmsnorm_h64"),
        (
            "layernorm",
            (meta(7, 64), *2 * (meta(64, dtype=torch.float32),)),
            "layernorm_h64",
        ),
        ("silu_and_mul", (meta(7, 28672),), "silu_and_mul_i14336"),
        ("silu_and_mul", (meta(2, 7, 28672),), "silu_and_mul_i14336_3d"),
        ("silu_and_mul", (meta(28672),), "silu_and_mul_i14336_1d"),
        ("scale", (meta(7), 2.0), "scale"),
        ("scale", (meta(), 2.0), "scale_0d"),
        ("scale", (meta(7, 5, dtype=torch.float32), 2.0), "scale_2d_f32"),
    ],
)
def test_names(export: str, arguments: tuple[Any, ...], name: str) -> None:
    definition = trace.fi_trace(getattr(precast, export), *arguments)
    assert definition["name"] == name


def test_a_definition_in_full() -> None:
    definition = precast.fi_trace(precast.silu_and_mul, meta(2, 7, 64))
    reference = definition.pop("reference")
    assert definition == {
        "name": "silu_and_mul_i32_3d",
        "description": "The SiLU of the first half of each row times the second half.",
        "op_type": "activation",
        "tags": ["fi_api:precast.activation.silu_and_mul"],
        "axes": {
            "num_tokens_0": {"type": "var"},
            "num_tokens_1": {"type": "var"},
            "gate_up_size": {"type": "const", "value": 64},
            "intermediate_size": {"type": "const", "value": 32},
        },
        "constraints": ["intermediate_size == gate_up_size // 2"],
        "inputs": {
            "gate_up": {
                "shape": ["num_tokens_0", "num_tokens_1", "gate_up_size"],
                "dtype": "bfloat16",
            }
        },
        "outputs": {
            "output": {
                "shape": ["num_tokens_0", "num_tokens_1", "intermediate_size"],
                "dtype": "bfloat16",
            }
        },
    }
    assert reference.endswith(
        "def run(gate_up):\n    return silu_and_mul_reference(input=gate_up)\n"
    )


def test_a_tag_has_the_name_that_users_know() -> None:
    tags = {public_name(function) for function, _ in PAIRS}
    assert {"precast.norm.gemma_rmsnorm", "precast.norm.layernorm", "precast.scale"} <= tags


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: precast.fi_trace(len), ValueError, "has no trace template. Fix: decorate it with"),
        (
            lambda: precast.fi_trace(precast.rmsnorm, meta(2, 8)),
            TypeError,
            "precast.norm.rmsnorm: missing a required argument: 'weight'",
        ),
        (
            lambda: precast.fi_trace(precast.rmsnorm, meta(2, 8), meta(9)),
            ValueError,
            "<TraceTemplate rmsnorm>: axis 'hidden_size' is 9 in weight and 8 in a tensor before",
        ),
        (
            lambda: precast.fi_trace(precast.rmsnorm, meta(2, 3, 4, 8), meta(8)),
            ValueError,
            "input must have the dimensions [batch_size, hidden_size], got shape [2, 3, 4, 8]",
        ),
        (
            lambda: precast.fi_trace(precast.rmsnorm, [[1.0]], meta(1)),
            TypeError,
            "input must be a torch.Tensor, got list",
        ),
        (
            lambda: precast.fi_trace(precast.scale, meta(2, dtype=torch.complex64), 1.0),
            ValueError,
            "input: the schema has no element type complex64; it has float32, float16",
        ),
    ],
)
def test_a_call_that_cannot_be_traced_says_why(
    call: Callable[[], Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert words in str(caught.value)


def test_the_decorators_keyword_is_left_out() -> None:
    definition = precast.fi_trace(precast.scale, meta(2), 1.0, skip_check=True)
    assert definition["name"] == "scale"


def test_inputs_have_the_sizes_dtypes_and_values_asked_for() -> None:
    function, template = next(p for p in PAIRS if p[1].name_prefix == "layernorm")
    call = trace.make_inputs(
        function, template, {"batch_size": 3, "hidden_size": 32}, dtype=torch.float16, seed=1
    )
    assert call["input"].shape == (3, 32)
    assert call["input"].dtype is torch.float16
    assert call["beta"].shape == (32,)
    assert call["beta"].dtype is torch.float32
    assert call["eps"] == 1e-6
    again = trace.make_inputs(function, template, {"batch_size": 3, "hidden_size": 32}, seed=1)
    assert torch.equal(call["beta"], again["beta"])
    other = trace.make_inputs(function, template, {"batch_size": 3, "hidden_size": 32}, seed=2)
    assert not torch.equal(call["beta"], other["beta"])
    assert not torch.equal(call["gemma"], call["beta"])


def test_inputs_of_several_leading_sizes() -> None:
    function, template = next(p for p in PAIRS if p[1].name_prefix == "silu_and_mul")
    call = trace.make_inputs(function, template, {"num_tokens": (2, 3), "gate_up_size": 16})
    assert call["input"].shape == (2, 3, 16)


def test_inputs_reject_what_is_no_axis() -> None:
    function, template = next(p for p in PAIRS if p[1].name_prefix == "silu_and_mul")
    words = "axes has intermediate_size; the axes that can be given are num_tokens, gate_up_size"
    with pytest.raises(ValueError, match=words):
        trace.make_inputs(function, template, {"intermediate_size": 8})
    with pytest.raises(ValueError, match="axis 'gate_up_size' takes one size"):
        trace.make_inputs(function, template, {"gate_up_size": (8, 8)})
