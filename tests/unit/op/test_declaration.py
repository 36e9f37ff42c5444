# SPDX-License-Identifier: Apache-2.0
"""The language of declarations: what it reads, and what it rejects."""

from __future__ import annotations

import math

import pytest
import torch

from precast._op.declaration import Declaration, Kind, Leading, TensorKind
from precast._op.matcher import check_arguments
from precast.errors import UnsupportedConfigError

NORM = "input:T[*rows(1-2),hidden] weight:T[hidden] eps:float out!:like(input) enable_pdl:pdl"


def test_the_schema_marks_what_is_written_and_what_may_be_none():
    assert Declaration(NORM).schema == (
        "(Tensor input, Tensor weight, float eps, Tensor(a!) out, bool enable_pdl) -> ()"
    )
    text = "x!:any y!?:U n:size k:int flag:bool z?:i32|i64[n]"
    assert Declaration(text).schema == (
        "(Tensor(a!) x, Tensor(b!)? y, SymInt n, int k, bool flag, Tensor? z) -> ()"
    )


def test_a_kind_of_a_family_makes_several_arguments_of_one_and_one_of_several():
    pair = Kind("Tensor{w} a, Tensor{w}? b", "*_split({name})", lambda a, b: (a, b))
    declaration = Declaration("x:T cache!:pair n:int", {"pair": pair})
    assert declaration.schema == "(Tensor x, Tensor(a!) a, Tensor(b!)? b, int n) -> ()"
    assert declaration.names == ("x", "a", "b", "n")
    assert declaration.decoded((1, 2, 3, 4)) == {"x": 1, "cache": (2, 3), "n": 4}
    assert declaration.parameters[1].source == "*_split(cache)"


def test_tensors_are_read_with_axes_dtypes_sizes_and_peers():
    kinds = {p.name: p.kind for p in Declaration(NORM).tensors}
    assert kinds["input"] == TensorKind("T", (), (Leading("rows", 1, 2), "hidden"))
    assert kinds["out"] == TensorKind(like="input")
    kinds = {p.name: p.kind for p in Declaration("x:T a:like(x,U=e4m3|e5m2,apart) b:u8").tensors}
    assert kinds["a"] == TensorKind("U", ("e4m3", "e5m2"), like="x", apart=True)
    assert kinds["b"] == TensorKind("", ("u8",))


@pytest.mark.parametrize("text", ["x:T[m", "x!!:T", "x:W[m]", ":T", "x:like()", "eps:real()"])
def test_a_mistake_is_an_error_that_quotes_it(text):
    with pytest.raises(ValueError, match=r"legal: ") as caught:
        Declaration(text)
    assert text.partition(":")[2] in str(caught.value)


def rejected(text: str, words: str, kind: type[Exception] = ValueError, **values: object) -> None:
    with pytest.raises(kind) as caught:
        check_arguments("op", Declaration(text), values)
    assert caught.type is kind
    assert str(caught.value) == f"op: {words}"


def test_what_the_matcher_rejects():
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    good = {"input": x, "weight": weight, "out": torch.zeros(2, 8)}
    check_arguments("op", Declaration(NORM), good)
    check_arguments("op", Declaration(NORM), {**good, "out": x})
    words = "input must have 2 to 3 dimensions, got shape [8]"
    rejected(NORM, words, **{**good, "input": x[0]})
    rejected(NORM, "weight must have shape [8], got [4]", **{**good, "weight": weight[:4]})
    rejected(NORM, "weight must be float32, got float16", **{**good, "weight": weight.half()})
    rejected(
        NORM, "weight must be on cpu as input, got meta", **{**good, "weight": weight.to("meta")}
    )
    rejected(NORM, "out must have input's shape [2, 8], got [2, 4]", **{**good, "out": x[:, :4]})
    inside = torch.zeros(3, 8)
    words = "out must be input itself or not overlap its memory; call .clone()"
    rejected(NORM, words, input=inside[:2], weight=weight, out=inside[1:])


def test_sizes_may_be_expressions_and_numbers_of_the_call():
    text = "x:any[rows,n] y:f32[rows,n//2] half!:like(y) k:size top!:i32[rows,k] one:f32[.]"
    values = {
        "x": torch.zeros(3, 8),
        "y": torch.zeros(3, 4),
        "half": torch.zeros(3, 4),
        "k": 2,
        "top": torch.zeros(3, 2, dtype=torch.int32),
        "one": torch.zeros(1, 1),
    }
    check_arguments("op", Declaration(text), values)
    rejected(text, "y must have shape [3, 4], got [3, 3]", **{**values, "y": torch.zeros(3, 3)})
    rejected(text, "top must have shape [3, 5], got [3, 2]", **{**values, "k": 5})
    words = "one must hold one number, got shape [2]"
    rejected(text, words, **{**values, "one": torch.zeros(2)})


def test_a_dtype_that_no_module_has_is_an_unsupported_configuration():
    text = "x:T[n] out!:like(x,U=e4m3|T)"
    x = torch.zeros(4)
    check_arguments("op", Declaration(text), {"x": x, "out": torch.zeros(4)})
    words = "out must be float8_e4m3fn, got int32"
    rejected(text, words, UnsupportedConfigError, x=x, out=torch.zeros(4, dtype=torch.int32))


def test_ranges_of_numbers() -> None:
    ranges = Declaration("x:T[n] eps:float(1e-30-) p:float(-) k:size(1-9) n:int(0-)").ranges
    assert [ranges[name].words for name in ("eps", "p", "k", "n")] == [
        "a finite number of at least 1e-30",
        "a number, not NaN",
        "from 1 to 9",
        "at least 0",
    ]
    assert [ranges["eps"].holds(v) for v in (1e-30, 0.0, math.nan, math.inf, 1e39)] == [
        True,
        *[False] * 4,
    ]
    assert [ranges["p"].holds(v) for v in (-math.inf, math.inf, math.nan)] == [True, True, False]
    assert [ranges["k"].holds(v) for v in (0, 1, 9, 10)] == [False, True, True, False]
    named = Declaration("x:T[n] a:float(finite) b:float(positive)").ranges
    assert [named[name].words for name in "ab"] == ["a finite number", "positive and finite"]
    assert [named["a"].holds(v) for v in (-3e38, 0.0, 1e39, math.nan)] == [True, True, False, False]
    assert [named["b"].holds(v) for v in (1e-37, 1e-39, 0.0, math.inf)] == [True, *[False] * 3]
    with pytest.raises(ValueError, match="'x' is no range of numbers; legal: 0-"):
        Declaration("x:T[n] eps:float(x)")
