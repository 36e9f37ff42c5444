# SPDX-License-Identifier: Apache-2.0
"""The plan: names, profiles, targets, and what becomes of a configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from precast._base.names import module_name
from precast._plan.axis_keys import in_declared_order
from precast._plan.places import source_root
from precast._plan.planner import Plan
from precast.errors import UnsupportedConfigError


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan.load(source_root())


def targets(plan: Plan, text: str) -> list[str]:
    return [arch.target for arch in plan.archs(text)]


def test_module_names_are_unique_and_say_op_and_axes(plan):
    specs = plan.modules(cuda_major=13)
    assert len({spec.file_name for spec in specs}) == len(specs) > 0
    for spec in specs:
        words = [f"{axis}_{value}" for axis, value in spec.axes.items()]
        assert spec.name == "__".join([spec.op, *words])
        assert spec.file_name == f"{spec.arch.name}/{spec.name}.so"


def test_everything_prebuilt_lies_inside_the_axes(plan):
    for op, axes in plan.aot_axes():
        assert plan.axes(op, axes) == axes


def test_profiles_nest_and_every_op_is_in_the_smallest(plan):
    def names(profile: str) -> set[str]:
        return {spec.file_name for spec in plan.modules(profile)}

    assert names("ci") < names("core") <= names("full") <= {s.file_name for s in plan.modules()}
    assert {op for op, _ in plan.aot_axes("ci")} == set(plan.config.ops)


def test_a_profile_may_limit_the_targets(plan):
    limited = plan.build.profiles["ci"].archs
    assert {spec.arch.name for spec in plan.modules("ci")} == set(limited) < set(plan.build.archs)
    asked = plan.archs("8.9")
    assert {spec.arch.name for spec in plan.modules("ci", asked)} == {"sm89"}


@pytest.mark.parametrize(
    ("capability", "accepted", "target"),
    [
        ("8.0", ["sm80"], "8.0"),
        ("8.6", ["sm86", "sm80"], "8.6"),
        ("8.7", ["sm86", "sm80"], "8.6"),
        ("8.9", ["sm89", "sm80"], "8.9"),
        ("9.0", ["sm90a"], "9.0a"),
        ("10.0", ["sm100f"], "10.0f"),
        ("10.3", ["sm100f"], "10.0f"),
        ("11.0", ["sm110a"], "11.0a"),
        ("12.0", ["sm120f"], "12.0f"),
        ("12.1", ["sm120f"], "12.0f"),
    ],
)
def test_a_capability_has_accepted_targets_best_first_and_one_to_compile_for(
    plan, capability, accepted, target
):
    assert [arch.name for arch in plan.build.accepted(capability)] == accepted
    assert plan.arch(capability).target == target
    assert plan.spec("scale", {"dtype": "f32"}, capability).arch.target == target


@pytest.mark.parametrize("capability", ["99.9", "7.5", "9.1", "13.0", "75", "sm_75", "9.1a"])
def test_a_capability_that_no_target_serves_is_an_error_that_lists_the_known_ones(plan, capability):
    legal = "legal: 8.0, 8.6, 8.7, 8.9, 9.0, 10.0, 10.3, 11.0, 12.0, 12.1"
    for ask in (
        plan.arch,
        plan.archs,
        lambda name: plan.arch(name, any_suffix=True),
        lambda name: plan.target("scale", name),
        lambda name: plan.spec("scale", {"dtype": "f32"}, name),
    ):
        with pytest.raises(ValueError, match=rf"'{capability}': no target .* {re.escape(legal)}$"):
            ask(capability)


def test_a_target_newer_than_the_cuda_major_is_never_prebuilt(plan):
    assert plan.spec("scale", {"dtype": "f32"}, "11.0", 13).is_aot
    assert not plan.spec("scale", {"dtype": "f32"}, "11.0", 12).is_aot
    assert "sm110a" not in plan.document["modules"]["scale__dtype_f32"]["fingerprints"]["cu12"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8.0 9.0a", ["8.0", "9.0a"]),
        ("8.0;9.0, 10.0", ["8.0", "9.0a", "10.0f"]),
        ("sm90a sm_100f 120", ["9.0a", "10.0f", "12.0f"]),
        ("9.0 9.0a sm90a", ["9.0a"]),
        ("8.7", ["8.6"]),
        ("", []),
    ],
)
def test_target_lists(plan, text, expected):
    assert targets(plan, text) == expected


@pytest.mark.parametrize("word", ["hopper", "9", "9.0b", "9.0+PTX", "sm"])
def test_a_malformed_target_is_quoted(plan, word):
    with pytest.raises(ValueError, match=rf"'{re.escape(word)}' is not a CUDA target; legal: sm80"):
        plan.archs(f"8.0 {word}")


@pytest.mark.parametrize("name", ["10.0a", "8.0a", "9.0f", "sm_120a", "12.1a", "8.7f"])
def test_a_suffix_that_no_target_has_is_for_kernels_of_the_user_alone(plan, name):
    legal = "legal: 8.0, 8.6, 8.9, 9.0a, 10.0f, 11.0a, 12.0f, or a capability without a suffix"
    with pytest.raises(ValueError, match=f"precast has no target .*; {re.escape(legal)}"):
        plan.archs(name)
    with pytest.raises(ValueError, match="precast has no target"):
        plan.spec("scale", {"dtype": "f32"}, name)
    assert plan.arch(name, any_suffix=True).target not in {
        arch.target for arch in plan.build.archs.values()
    }


def test_flags_of_a_suffix_that_no_target_has(plan):
    arch = plan.arch("10.0a", any_suffix=True)
    assert (arch.name, arch.gencode) == ("sm100a", "arch=compute_100a,code=sm_100a")
    assert arch.cuda == plan.build.archs["sm100f"].cuda
    with pytest.raises(UnsupportedConfigError, match=r"scale .* does not exist for sm100a"):
        plan.spec("scale", {"dtype": "f32"}, arch)


def test_the_newest_cuda_major_is_the_default(tree):
    assert Plan.load(tree).spec("scale", {"dtype": "f32"}, "9.0").cuda_major == 13
    path = tree / "aot_configs" / "build.toml"
    table = '[cuda.14]\nmin_driver = "600"\ncudart = "libcudart.so.14"\ncudart_wheel = "w"\n\n'
    path.write_text(path.read_text().replace("[archs.sm80]", table + "[archs.sm80]", 1))
    plan = Plan.load(tree)
    assert plan.spec("scale", {"dtype": "f32"}, "9.0").cuda_major == 14
    assert {spec.cuda_major for spec in plan.modules("ci")} == {14}


@pytest.mark.parametrize(
    ("op", "axes", "message"),
    [
        ("scale", {"dtype": "e4m3"}, "scale: dtype=e4m3 is not supported; legal: f16, bf16, f32"),
        ("scale", {}, "scale: axis 'dtype' is missing; legal: f16, bf16, f32"),
        ("scale", {"dtype": "f32", "x": 1}, "scale has no axis 'x'; legal: dtype"),
        ("mul", {"dtype": "f32"}, "unknown op 'mul'; legal: activation, "),
        (
            "attention",
            {"dtype_q": "f16", "dtype_kv": "bf16", "head_dim_qk": 64, "head_dim_vo": 64},
            "attention: dtype_q,dtype_kv=f16,bf16 is not supported; legal: f16,f16 or f16,e4m3 or "
            "f16,e5m2 or bf16,bf16 or bf16,e4m3 or bf16,e5m2",
        ),
        (
            "attention",
            {"dtype_q": "f16", "dtype_kv": "f16", "head_dim_qk": 64, "head_dim_vo": 128},
            "attention: head_dim_qk,head_dim_vo=64,128 is not supported; legal: 64,64 or 80,80 or ",
        ),
        (
            "attention",
            {"dtype_q": "f16", "dtype_kv": "f16", "head_dim_qk": 192},
            "attention: axis 'head_dim_vo' is missing; legal: 64, 80, 96, 128, 256, 512",
        ),
    ],
)
def test_an_illegal_configuration_names_what_is_legal(plan, op, axes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan.spec(op, axes, "9.0")


def test_an_unsupported_cuda_major_names_the_supported_ones(plan):
    with pytest.raises(UnsupportedConfigError, match="CUDA 11 is not supported; legal: 12, 13"):
        plan.spec("scale", {"dtype": "f32"}, "9.0", 11)


def test_an_op_for_some_targets_only(tree):
    path = tree / "aot_configs" / "scale.toml"
    path.write_text(re.sub(r"archs = .*", 'archs = ["sm80", "sm90a"]', path.read_text()))
    plan = Plan.load(tree)
    # The nearest target that the op exists for serves a device whose own target it lacks.
    assert plan.spec("scale", {"dtype": "f32"}, "8.9").arch.name == "sm80"
    with pytest.raises(
        UnsupportedConfigError, match="does not exist for sm100f; legal: sm80, sm90a"
    ):
        plan.spec("scale", {"dtype": "f32"}, "10.0")
    assert {s.arch.name for s in plan.modules() if s.op == "scale"} == {"sm80", "sm90a"}


def test_axes_of_every_type_become_names_and_defines(tree):
    path = tree / "aot_configs" / "scale.toml"
    text = path.read_text().replace(
        "[axes]\n", '[axes]\nwide = [true, false]\nwidth = [4]\nlayout = ["nhd"]\n'
    )
    rows = 'wide = [true]\nwidth = [4]\nlayout = ["nhd"]\ndtype = ['
    path.write_text(text.partition("[[aot]]")[0] + "[[aot]]\n" + rows + '"f32"]\n')
    modules = Plan.load(tree).modules(archs=Plan.load(tree).archs("9.0"))
    spec = next(spec for spec in modules if spec.op == "scale")
    assert spec.name == "scale__wide_1__width_4__layout_nhd__dtype_f32"
    assert spec.defines == (
        "PRECAST_SM=90",
        "PRECAST_WIDE=1",
        "PRECAST_WIDTH=4",
        "PRECAST_LAYOUT=nhd",
        "PRECAST_DTYPE=f32",
    )


JOINT = """[axes]
wide = [true, false]
"width,dtype" = [[4, "f16"], [4, "f32"], [8, "bf16"]]
"""


@pytest.fixture
def joint(tree) -> Plan:
    """A plan whose op ``scale`` has a joint axis."""
    path = tree / "aot_configs" / "scale.toml"
    text = path.read_text().partition("[axes]")[0] + JOINT
    path.write_text(text + '[[aot]]\nwide = [true]\n"width,dtype" = [[4, "f32"], [8, "bf16"]]\n')
    return Plan.load(tree)


def test_a_joint_axis_keeps_the_names_of_its_axes(joint):
    config = joint.config.op("scale")
    assert config.axes == {
        "wide": (True, False),
        "width": (4, 8),
        "dtype": ("f16", "f32", "bf16"),
    }
    spec = joint.spec("scale", {"dtype": "f32", "width": "4", "wide": "1"}, "9.0")
    assert spec.name == "scale__wide_1__width_4__dtype_f32"
    assert spec.axes == {"wide": True, "width": 4, "dtype": "f32"}
    assert spec.defines[1:] == ("PRECAST_WIDE=1", "PRECAST_WIDTH=4", "PRECAST_DTYPE=f32")
    assert [axes for op, axes in joint.aot_axes() if op == "scale"] == [
        {"wide": True, "width": 4, "dtype": "f32"},
        {"wide": True, "width": 8, "dtype": "bf16"},
    ]
    assert joint.document["ops"]["scale"]["axes"] == {
        "wide": [True, False],
        "width,dtype": [[4, "f16"], [4, "f32"], [8, "bf16"]],
    }


def test_the_space_of_joint_axes_has_their_rows_alone(joint):
    points = list(joint.config.op("scale").space.points())
    assert len(points) == 6
    assert {(p["width"], p["dtype"]) for p in points} == {(4, "f16"), (4, "f32"), (8, "bf16")}
    with pytest.raises(
        UnsupportedConfigError,
        match="scale: width,dtype=8,f16 is not supported; legal: 4,f16 or 4,f32 or 8,bf16",
    ):
        joint.axes("scale", {"wide": True, "width": 8, "dtype": "f16"})


def test_values_are_offered_that_go_with_those_given(joint):
    space = joint.config.op("scale").space
    assert space.offered("dtype", {}) == ["f16", "f32", "bf16"]
    assert space.offered("dtype", {"width": "4", "wide": "1"}) == ["f16", "f32"]
    assert space.offered("width", {"dtype": "bf16"}) == [8]
    assert space.offered("wide", {"dtype": "bf16"}) == [True, False]
    assert space.offered("depth", {}) == []


def test_the_shipped_axes_order_a_call_without_the_files(joint):
    declared = json.loads(json.dumps(joint.document["ops"]["scale"]["axes"]))
    call = {"dtype": "bf16", "width": 8, "wide": False}
    ordered = in_declared_order(declared, call)
    assert ordered is not None
    assert list(ordered.items()) == [("wide", False), ("width", 8), ("dtype", "bf16")]
    for wrong in (
        {**call, "width": 4},
        {**call, "width": "8"},
        {**call, "more": 1},
        {"width": 8, "wide": True},
    ):
        assert in_declared_order(declared, wrong) is None


def test_the_document_holds_a_fingerprint_for_every_planned_module(plan):
    for major in plan.build.cuda:
        for spec in plan.modules(cuda_major=major):
            row = plan.document["modules"][spec.name]["fingerprints"][f"cu{major}"]
            assert (spec.arch.name in row) == spec.is_aot or spec.arch.cuda[0] > major
            if spec.arch.name in row:
                assert row[spec.arch.name] == spec.fingerprint


def test_the_names_of_torch_dtypes_are_values_of_the_axes():
    from precast._base.dtypes import DTYPE_WORDS
    from precast._plan.config import DTYPES

    assert set(DTYPE_WORDS.values()) <= set(DTYPES)


def test_the_document_reads_every_file_once(monkeypatch):
    """A checkout makes it at import: once a module, that took seconds."""
    plan, read, real = Plan.load(source_root()), [], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or real(path))
    modules = plan.document["modules"]
    assert len({*read}) == len(read)
    ops = {row["op"] for row in modules.values()}
    assert {plan.root / source for op in ops for source in plan.config.op(op).sources} <= {*read}


def test_the_plan_of_a_wheel_keeps_the_order_of_axes(plan, tmp_path):
    """Names of modules and the keys of calls are made of it."""
    from precast._jit.plan_files import main

    assert main(["json", "--root", str(source_root()), "--out", str(tmp_path / "plan.json")]) == 0
    document = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    for op, row in document["ops"].items():
        names = [name for key in row["axes"] for name in key.split(",")]
        assert names == list(plan.config.op(op).axes)
    for name, row in document["modules"].items():
        assert module_name(row["op"], row["axes"]) == name
    assert document == plan.document
