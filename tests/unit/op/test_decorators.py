# SPDX-License-Identifier: Apache-2.0
"""supported_compute_capability and backend_requirement: what is rejected, and what a call pays."""

from __future__ import annotations

import inspect
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import precast
from precast._op import requirement as _requirement
from precast._plan.installed import plan
from precast.decorators import backend_requirement, served_by, supported_compute_capability
from precast.errors import BackendSupportedError, UnsupportedConfigError

X = torch.ones(4, 2)


@pytest.fixture
def gpu(monkeypatch) -> Callable[[int | None], None]:
    """Say what GPU the tensors of calls are on."""

    def be(cc: int | None) -> None:
        monkeypatch.setattr(_requirement, "_capability", lambda arguments: cc)

    return be


# -- supported_compute_capability -----------------------------------------------------------------


def test_a_check_declares_its_capabilities_and_is_not_wrapped():
    def check(x):
        return x + 1

    declared = supported_compute_capability([80, 90, 103])(check)
    assert declared is check
    assert declared(1) == 2
    assert [declared.is_compute_capability_supported(cc) for cc in (80, 86, 103)] == [1, 0, 1]
    assert declared._supported_ccs == {80, 90, 103}


@pytest.mark.parametrize("wrong", [80, "80", b"80", None])
def test_capabilities_must_be_several(wrong):
    with pytest.raises(TypeError, match="must be an iterable of integers"):
        supported_compute_capability(wrong)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [([True], "got bool: True"), (["80"], "got str: '80'"), ([80, 9.0], "got float: 9.0")],
)
def test_a_capability_must_be_an_integer(wrong, words):
    where = rf"^supported_ccs\[{len(wrong) - 1}\] must be an integer, {words}"
    with pytest.raises(TypeError, match=where):
        supported_compute_capability(wrong)
    ask = supported_compute_capability([80])(lambda: True).is_compute_capability_supported
    with pytest.raises(TypeError, match=f"a compute capability must be an integer, {words}"):
        ask(wrong[-1])


def test_served_by_takes_the_capabilities_from_the_toml_and_the_table_of_targets():
    for op in plan().config.ops.values():
        served = {c for name in op.archs for c in plan().build.archs[name].serves}
        numbers = {int(c.replace(".", "")) for c in served}
        check = served_by(op.name)
        assert {cc for cc in range(150) if check.is_compute_capability_supported(cc)} == numbers
    with pytest.raises(ValueError, match=r"served_by\('nrom'\): no such op; legal: .*norm"):
        served_by("nrom").is_compute_capability_supported(90)


def test_engines_find_the_decorators_and_their_error_in_utils():
    from precast import utils

    assert utils.backend_requirement is backend_requirement
    assert utils.supported_compute_capability is supported_compute_capability
    assert utils.BackendSupportedError is BackendSupportedError


# -- no choice ------------------------------------------------------------------------------------


def double(x: torch.Tensor, times: int = 2, *, out: Any = None) -> torch.Tensor:
    """Twice."""
    return x * times


def test_without_a_choice_the_common_check_decides(gpu):
    @supported_compute_capability([42])
    def small(x, times, out):
        return x.shape[0] <= 4

    op = backend_requirement({}, common_check=small)(double)
    assert op.is_compute_capability_supported(42)
    assert not op.is_compute_capability_supported(90)
    assert not op.has_backend_choices()
    assert not op.has_backend("small")
    with pytest.raises(ValueError, match="is_backend_supported call: no backend choices for dou"):
        op.is_backend_supported("small", 42)
    gpu(42)
    assert torch.equal(op(X), X * 2)
    with pytest.raises(ValueError, match=r"Problem size is not supported for double: small refus"):
        op(torch.ones(5, 2))
    gpu(90)
    with pytest.raises(
        BackendSupportedError,
        match=r"double does not support compute capability 9\.0; legal: 4\.2$",
    ):
        op(X)
    assert torch.equal(op(torch.ones(5, 2), skip_check=True), torch.full((5, 2), 2.0))


def test_what_a_check_raises_is_what_the_caller_sees():
    def check(x, times, out):
        raise ValueError("x must be square")

    with pytest.raises(ValueError, match=r"^x must be square$"):
        backend_requirement({}, common_check=check)(double)(X)


def test_an_undeclared_capability_is_an_error_only_for_its_query(gpu):
    op = backend_requirement({}, common_check=lambda x, times, out: True)(double)
    with pytest.raises(ValueError, match="<lambda> does not have is_compute_capability_supp"):
        op.is_compute_capability_supported(90)
    gpu(90)
    assert torch.equal(op(X), X * 2)


@pytest.mark.parametrize("name", ["_function", "_validate", "<lambda>"])
def test_an_op_may_have_any_name(name):
    function = lambda x: x * 2  # noqa: E731
    function.__name__ = name
    op = backend_requirement({}, common_check=lambda x: True)(function)
    assert torch.equal(op(X), X * 2)
    assert op.__name__ == name


def test_neither_backends_nor_a_common_check_is_a_mistake():
    op = backend_requirement({})(double)
    assert not op.has_backend_choices()
    with pytest.raises(ValueError, match="no backend choices and no common_check for double"):
        op(X)
    with pytest.raises(ValueError, match=r"None does not have .* \(double\)"):
        op.is_compute_capability_supported(90)


# -- several backends -----------------------------------------------------------------------------


@supported_compute_capability([80, 90])
def wide(x, backend):
    return x.shape[0] > 2


@supported_compute_capability([90, 100])
def narrow(x, backend):
    if x.shape[0] > 8:
        raise ValueError("at most 8 rows")
    return True


def test_the_caller_chooses_a_backend(gpu):
    @backend_requirement({"wide": wide, "narrow": narrow}, common_check=lambda x, backend: x.ndim)
    def op(x, backend="narrow"):
        return backend

    assert op.has_backend_choices()
    assert (op.has_backend("wide"), op.has_backend("auto")) == (True, False)
    assert (op.is_backend_supported("wide"), op.is_backend_supported("x", 90)) == (True, False)
    assert (op.is_backend_supported("wide", 100), op.is_backend_supported("narrow", 100)) == (0, 1)
    assert [op.is_compute_capability_supported(cc) for cc in (70, 80, 100)] == [False, True, True]
    gpu(90)
    assert (op(X), op(X, "wide"), op(X, backend="wide")) == ("narrow", "wide", "wide")
    with pytest.raises(ValueError, match="Problem size is not supported for op: wide refused"):
        op(torch.ones(1), backend="wide")
    with pytest.raises(ValueError, match="Problem size is not supported for op: <lambda> refuse"):
        op(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"^at most 8 rows$"):
        op(torch.ones(9))
    with pytest.raises(
        BackendSupportedError,
        match=r"op does not support backend 'fa9' on compute capability 9\.0; legal: 'wide', 'nar",
    ):
        op(X, backend="fa9")
    assert op(X, backend="fa9", skip_check=True) == "fa9"
    gpu(100)
    with pytest.raises(BackendSupportedError, match=r"backend 'wide' on .* 10\.0; legal: 'narrow'"):
        op(X, backend="wide")
    with pytest.raises(BackendSupportedError, match="does not support backend 'auto'"):
        op(X, backend="auto")


def test_a_capability_must_suit_the_common_check_too(gpu):
    @supported_compute_capability([90])
    def common(x, backend):
        return True

    @backend_requirement({"wide": wide, "narrow": narrow}, common_check=common)
    def op(x, backend="narrow"):
        return backend

    assert op.is_backend_supported("wide", 90)
    assert not op.is_backend_supported("wide", 80)
    assert not op.is_compute_capability_supported(80)
    gpu(80)
    with pytest.raises(BackendSupportedError, match=r"does not support compute capability 8\.0"):
        op(X, backend="wide")


def test_a_backend_that_declares_no_capability_supports_none(gpu):
    @backend_requirement({"wide": wide, "bare": lambda x, backend: True})
    def op(x, backend="bare"):
        return backend

    assert op.is_backend_supported("bare")
    assert op.is_backend_supported("bare", 80) is False
    assert [op.is_compute_capability_supported(cc) for cc in (80, 75)] == [True, False]
    assert op.experimental_backends == frozenset()
    bare = backend_requirement({"bare": lambda x, backend: True})(named_by_default)
    assert bare.is_compute_capability_supported(90) is False


def named_by_default(x, backend="bare"):
    return backend


def test_backends_need_an_argument_of_that_name():
    with pytest.raises(ValueError, match="double must have an argument 'backend'"):
        backend_requirement({"a": wide})(double)


# -- backend="auto" -------------------------------------------------------------------------------


@backend_requirement(
    {"wide": wide, "narrow": narrow},
    heuristic_func=lambda suitable, x, backend: ["narrow", "wide"] if x.shape[1] > 3 else suitable,
)
def attention(x, backend="auto"):
    if backend == "auto":
        backend = attention.suitable_auto_backends[0]
    return backend


def test_auto_takes_what_is_suitable_in_the_order_of_the_heuristic(gpu):
    gpu(90)
    assert attention(torch.ones(4, 2)) == "wide"
    assert attention.suitable_auto_backends == ["wide", "narrow"]
    assert attention(torch.ones(4, 9)) == "narrow"
    assert attention.suitable_auto_backends == ["narrow", "wide"]
    # What does not suit is dropped, though the heuristic names it.
    assert attention(torch.ones(2, 9)) == "narrow"
    assert attention.suitable_auto_backends == ["narrow"]
    assert attention(torch.ones(9, 9)) == "wide"
    gpu(80)
    assert attention(torch.ones(4, 9)) == "wide"
    # An explicit choice leaves the last automatic one alone.
    assert attention(torch.ones(4, 9), backend="wide") == "wide"


def test_auto_without_a_suitable_backend_says_why_each_is_not(gpu):
    gpu(100)
    with pytest.raises(
        BackendSupportedError,
        match=r"No suitable auto backends found for attention: wide: does not support compute "
        r"capability 10\.0; narrow: at most 8 rows",
    ):
        attention(torch.ones(9, 2))


def test_auto_is_resolved_with_skip_check_too(gpu):
    gpu(80)
    attention(torch.ones(4, 9), backend="auto")
    gpu(100)
    assert attention(torch.ones(4, 9), skip_check=True) == "narrow"


def test_a_heuristic_may_leave_everything_out():
    op = backend_requirement({"narrow": narrow}, heuristic_func=lambda suitable, **rest: [])(named)
    with pytest.raises(BackendSupportedError, match="narrow: the heuristic left it out"):
        op(X)


def test_a_lambda_has_a_wrapper_too():
    assert backend_requirement({}, common_check=served_by("norm"))(lambda x: x + 1)(1) == 2


def named(x, backend="auto"):
    return backend


def test_auto_needs_a_heuristic():
    with pytest.raises(ValueError, match=r"named: backend='auto' is the default, so .* needs heur"):
        backend_requirement({"narrow": narrow})(named)


def test_each_thread_reads_its_own_choice():
    met = threading.Barrier(2)
    got = {}

    @backend_requirement({"wide": wide, "narrow": narrow}, heuristic_func=lambda s, x, backend: s)
    def op(x, backend="auto"):
        met.wait(10)
        return op.suitable_auto_backends[0], list(op.suitable_auto_backends)

    def call(rows):
        got[rows] = op(torch.ones(rows))

    threads = [threading.Thread(target=call, args=(rows,)) for rows in (2, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert got == {2: ("narrow", ["narrow"]), 9: ("wide", ["wide"])}


# -- the wrapper ----------------------------------------------------------------------------------


def signatures() -> list[Callable[..., Any]]:
    def plain(x, y=2.5, z=None): ...
    def only(x, /, y=1, *, z, w="a"): ...
    def stars(x, *more, z=3, **rest): ...
    def rest(**kwargs): ...
    def nothing(): ...

    return [plain, only, stars, rest, nothing]


@pytest.mark.parametrize("shape", signatures(), ids=lambda f: f.__name__)
@pytest.mark.parametrize("common", [served_by("norm"), lambda *a, **k: True], ids=["none", "runs"])
def test_signature_defaults_and_calls_are_those_of_the_op(shape, common):
    seen = []
    signature = inspect.signature(shape)

    def op(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        seen.append(bound.arguments)
        return 7

    op.__signature__ = signature
    op.__name__ = shape.__name__
    op.__defaults__ = None
    checked = backend_requirement({}, common_check=common)(op)
    assert inspect.signature(checked) == signature
    assert checked.__name__ == shape.__name__
    calls = {
        "plain": [((1,), {}), ((1, 2), {"z": 3}), ((), {"x": 1})],
        "only": [((1,), {"z": 2}), ((1, 5), {"z": 2, "w": "b"})],
        "stars": [((1, 2, 3), {"z": 4, "k": 5}), ((1,), {})],
        "rest": [((), {"a": 1}), ((), {})],
        "nothing": [((), {})],
    }
    for args, kwargs in calls[shape.__name__]:
        want = signature.bind(*args, **kwargs)
        want.apply_defaults()
        for extra in ({}, {"skip_check": True}):
            assert checked(*args, **kwargs, **extra) == 7
            assert seen.pop() == want.arguments


def test_metadata_and_docstrings_stay():
    op = backend_requirement({}, common_check=served_by("norm"))(double)
    assert op.__doc__ == double.__doc__ == "Twice."
    assert "skip_check : bool" in precast.rmsnorm.__doc__  # Ops of the library document it.
    assert (op.__module__, op.__qualname__) == (double.__module__, "double")
    assert op.__wrapped__ is double
    with pytest.raises(TypeError, match=r"double\(\) .*'color'"):
        op(X, color=1)


@pytest.mark.parametrize("backend", ["auto", "wide"])
def test_torch_compile_traces_through_validation_and_choice(backend):
    @backend_requirement({"wide": wide, "narrow": narrow}, heuristic_func=lambda s, x, backend: s)
    def op(x, backend="auto"):
        if backend == "auto":
            backend = op.suitable_auto_backends[0]
        return x + (1 if backend == "wide" else 2)

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: op(x, backend=backend) * 3, fullgraph=True, backend="eager")
    for rows in (4, 9):
        x = torch.ones(rows)
        assert torch.equal(compiled(x), op(x, backend=backend) * 3)


def test_torch_compile_traces_through_an_op_of_the_library():
    op = backend_requirement({}, common_check=served_by("scale"))(precast.scale)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: op(x, 2.0) + 1, fullgraph=True, backend="eager")
    with precast.reference_mode():
        assert torch.equal(compiled(X), X * 2 + 1)


# -- the loader's part ----------------------------------------------------------------------------


def test_the_loader_rejects_a_gpu_that_the_op_does_not_exist_for(world, tree):
    """What ``served_by`` leaves to the first call on a device."""
    import json

    toml = tree / "aot_configs" / "norm.toml"
    text = toml.read_text()
    old = text[text.index("archs = [") : text.index("]", text.index("archs = [")) + 1]
    toml.write_text(text.replace(old, 'archs = ["sm90a"]'))
    from precast._op.dispatch import kernels
    from precast._plan.planner import Plan
    from precast._runtime import loader

    hopper_only = Plan.load(tree)
    world.patch.setattr(loader, "plan", lambda: hopper_only)
    fresh = world.loader()
    fresh.document = json.loads(json.dumps(hopper_only.document))
    op = backend_requirement({}, common_check=served_by("norm"))(precast.rmsnorm)
    assert op.is_compute_capability_supported(90)
    assert not op.is_compute_capability_supported(80)
    kernel = kernels()["rmsnorm"]
    with pytest.raises(BackendSupportedError, match=r"norm does not support .* 8\.0") as caught:
        kernel[torch.bfloat16, 1]  # a GPU of 8.0
    assert isinstance(caught.value, UnsupportedConfigError)
    assert (torch.bfloat16, 1) not in kernel


def test_an_op_that_the_toml_declares_pays_less_than_the_budget():
    """The promise is 0.2 us a call; a wrapper that packs its arguments takes 0.28."""

    def kernel(input, weight, eps=1e-6, out=None, enable_pdl=None):
        return out

    op = backend_requirement({}, common_check=served_by("norm"))(kernel)
    extra = [_per_call(op) - _per_call(kernel) for _ in range(9)]
    assert statistics.median(extra) < 200e-9


def _per_call(op: Callable[..., Any], count: int = 5000) -> float:
    start = time.perf_counter()
    for _ in range(count):
        op(X, X, out=X)
    return (time.perf_counter() - start) / count
