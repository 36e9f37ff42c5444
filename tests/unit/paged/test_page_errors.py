# SPDX-License-Identifier: Apache-2.0
"""The ops of the paged KV cache name an invalid argument, and write nothing then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from page_support import bits

import precast
from precast.errors import CacheLayoutError

BF16 = torch.bfloat16
PAGES, HEADS, DIM = 11, 3, 16

pytestmark = pytest.mark.usefixtures("reference_mode")


def valid(op: str) -> dict[str, Any]:
    """Valid arguments of the op."""
    tokens = 3
    dtype = torch.float8_e4m3fn if op.startswith("fp8") else BF16
    mla: dict[str, Any] = {
        "append_ckv": torch.ones(tokens, 32, dtype=BF16),
        "append_kpe": torch.ones(tokens, 8, dtype=BF16),
        "ckv_cache": torch.zeros(PAGES, 4, 32).to(dtype),
        "kpe_cache": torch.zeros(PAGES, 4, 8).to(dtype),
    }
    kv: dict[str, Any] = {
        "append_key": torch.ones(tokens, HEADS, DIM, dtype=BF16),
        "append_value": torch.ones(tokens, HEADS, DIM, dtype=BF16),
        "paged_kv_cache": torch.zeros(PAGES, 2, 4, HEADS, DIM).to(dtype),
    }
    if op.startswith("nvfp4"):
        kv["paged_kv_cache"] = torch.zeros(PAGES, 2, 4, HEADS, DIM // 2, dtype=torch.uint8)
        kv["kv_cache_sf"] = torch.zeros(PAGES, 2, 4, HEADS, DIM // 16).to(torch.float8_e4m3fn)
    made: dict[str, Any] = {**(mla if "mla" in op else kv)}
    if "slot_mapping" in op:
        made["slot_mapping"] = torch.arange(tokens)
    else:
        made["batch_indices"] = torch.zeros(tokens, dtype=torch.int32)
        made["positions"] = torch.arange(tokens, dtype=torch.int32)
        made["kv_indices"] = torch.arange(2, dtype=torch.int32)
        made["kv_indptr"] = torch.tensor([0, 2], dtype=torch.int32)
        made["kv_last_page_len"] = torch.tensor([1], dtype=torch.int32)
    if op.startswith(("fp8", "nvfp4")):
        made.update({"scale": 2.0} if "mla" in op else {"k_scale": 2.0, "v_scale": 3.0})
    return made


OPS = (
    "append_paged_kv_cache",
    "append_paged_kv_cache_with_slot_mapping",
    "fp8_quantize_append_paged_kv_cache_with_slot_mapping",
    "append_paged_mla_kv_cache",
    "append_paged_mla_kv_cache_with_slot_mapping",
    "fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping",
)
PACKED = (
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
)
#: Those whose caches have the shape of the rows.
UNPACKED = OPS
OPS += PACKED
every_op = pytest.mark.parametrize("op", OPS)
on_unpacked_keys = pytest.mark.parametrize("op", [op for op in UNPACKED if "mla" not in op])
on_packed = pytest.mark.parametrize("op", PACKED)
on_keys = pytest.mark.parametrize("op", [op for op in OPS if "mla" not in op])


def rejected(op: str, kind: type[Exception], words: str, **changes: Any) -> None:
    """The call raises ``kind`` with these words and writes nothing."""
    arguments = {**valid(op), **changes}
    tensors = [t for v in arguments.values() for t in (v if isinstance(v, tuple) else (v,))]
    tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
    before = [t.clone() for t in tensors]
    with pytest.raises(kind) as caught:
        getattr(precast, op)(**arguments)
    assert f"{op}: {words}" in str(caught.value)
    for tensor, old in zip(tensors, before):
        assert torch.equal(bits(tensor), bits(old))


@every_op
def test_valid_arguments_are_accepted(op: str) -> None:
    """The three tokens stand in page 0, divided by their scale, and nothing else is written."""
    arguments = valid(op)
    assert getattr(precast, op)(**arguments) is None
    if "mla" in op:
        scale = arguments.get("scale", 1.0)
        written = [(arguments["ckv_cache"], scale), (arguments["kpe_cache"], scale)]
    else:
        cache, scales = arguments["paged_kv_cache"], ("k_scale", "v_scale")
        if op in PACKED:
            # 1 is 6 times the scale 1 / (6 g), which e4m3 rounds to 0.0859375 and 0.0546875.
            for i, scale in enumerate((0.0859375, 0.0546875)):
                assert (cache[0, i, :3] == 0x77).all()
                assert (arguments["kv_cache_sf"][0, i, :3].float() == scale).all()
            assert int(cache.count_nonzero()) == 2 * 3 * HEADS * DIM // 2
            assert int(arguments["kv_cache_sf"].float().count_nonzero()) == 2 * 3 * HEADS
            return
        written = [(cache[:, i], arguments.get(name, 1.0)) for i, name in enumerate(scales)]
    for pages, scale in written:
        want = torch.zeros(pages.shape)
        want[0, :3] = 1.0 / scale
        assert torch.equal(bits(pages), bits(want.to(pages.dtype)))


@on_keys
@pytest.mark.parametrize("layout", ["nhd", "NDH", "", None, 0, ["NHD"]])
def test_an_unknown_layout_is_a_key_error_and_a_value_error(op: str, layout: Any) -> None:
    for kind in (KeyError, ValueError, CacheLayoutError):
        rejected(op, kind, f"kv_layout must be NHD or HND, got {layout!r}", kv_layout=layout)


@on_keys
def test_a_cache_of_another_type_is_a_key_error_and_a_value_error(op: str) -> None:
    one = valid(op)["paged_kv_cache"][:, 0]
    cases = [
        ([one, one], "list"),
        ({"k": one}, "dict"),
        (None, "NoneType"),
        ((one, one, one), "a tuple of Tensor, Tensor, Tensor"),
        ((one, 1), "a tuple of Tensor, int"),
        ((), "a tuple of none"),
    ]
    for cache, got in cases:
        for kind in (KeyError, ValueError):
            words = f"paged_kv_cache must be a torch.Tensor or a tuple of two, got {got}"
            rejected(op, kind, words, paged_kv_cache=cache)


@every_op
def test_what_is_no_tensor_is_named(op: str) -> None:
    for name, value in valid(op).items():
        if isinstance(value, torch.Tensor) and name not in ("paged_kv_cache", "kv_cache_sf"):
            rejected(op, TypeError, f"{name} must be a torch.Tensor, got list", **{name: [1.0]})


@every_op
def test_shapes_of_what_is_appended(op: str) -> None:
    first, second = [name for name in valid(op) if name.startswith("append_")]
    good = valid(op)[first]
    rejected(op, ValueError, f"{first} must have shape [tokens", **{first: good[0]})
    rejected(op, ValueError, f"{second} must have shape [tokens", **{second: good[None]})
    longer = torch.cat([valid(op)[second]] * 2)
    rejected(
        op, ValueError, f"{second} must have the tokens and heads of {first}", **{second: longer}
    )
    words = f"{second} must be bfloat16, got float16"
    rejected(op, ValueError, words, **{second: valid(op)[second].half()})


@every_op
def test_indices(op: str) -> None:
    for name, value in valid(op).items():
        if name == "kv_cache_sf":
            continue
        if name in ("positions", "batch_indices", "slot_mapping") or name.startswith("kv_"):
            words = f"{name} must be int32 or int64, got float32"
            rejected(op, ValueError, words, **{name: value.float()})
            rejected(op, ValueError, f"{name} must have shape [", **{name: value[:, None]})
    if "slot_mapping" in op:
        words = "slot_mapping must have shape [tokens] with at most the 3 tokens of append_"
        rejected(op, ValueError, words, slot_mapping=torch.arange(4))
    else:
        words = "kv_last_page_len must have shape [1], got [2]"
        rejected(op, ValueError, words, kv_last_page_len=torch.zeros(2, dtype=torch.int32))
        words = "positions must have shape [3], got [4]"
        rejected(op, ValueError, words, positions=torch.zeros(4, dtype=torch.int32))


@on_unpacked_keys
def test_caches_that_do_not_fit(op: str) -> None:
    cache = valid(op)["paged_kv_cache"]
    words = (
        f"paged_kv_cache must hold keys and values in dimension 1 of size 2, got shape [{PAGES}, 3,"
    )
    rejected(
        op, ValueError, words, paged_kv_cache=torch.cat([cache.float()] * 2, 1)[:, :3].to(cache)
    )
    words = f"paged_kv_cache must hold rows of {HEADS} x {DIM} as append_key, got shape"
    rejected(op, ValueError, words, paged_kv_cache=cache.transpose(2, 3))
    rejected(op, ValueError, words, kv_layout="HND")
    k, v = cache.unbind(1)
    words = f"paged_kv_cache[1] must have {PAGES} pages of 4 as paged_kv_cache[0], got {PAGES} of 3"
    rejected(op, ValueError, words, paged_kv_cache=(k, v[:, :3]))
    words = f"paged_kv_cache[0] must hold rows of {HEADS} x {DIM} as append_key, got shape"
    rejected(op, ValueError, words, paged_kv_cache=(k[..., :-1], v))
    rejected(op, ValueError, "paged_kv_cache[0] must have 3 to 4 dim", paged_kv_cache=(k[None], v))
    if op.startswith("fp8"):
        words = "paged_kv_cache must be float8_e4m3fn or float8_e5m2, got uint8"
        rejected(op, ValueError, words, paged_kv_cache=cache.view(torch.uint8))
        words = "k_scale must hold one number, got shape [2]"
        rejected(op, ValueError, words, k_scale=torch.ones(2))
        rejected(
            op, ValueError, "v_scale must be float32, got float16", v_scale=torch.ones(1).half()
        )
        rows = {"append_key": torch.ones(3, HEADS, DIM), "append_value": torch.ones(3, HEADS, DIM)}
        rejected(op, ValueError, "append_key must be float16 or bfloat16, got float32", **rows)
    else:
        words = "paged_kv_cache must be bfloat16 as append_key, got float16"
        rejected(op, ValueError, words, paged_kv_cache=cache.half())
        rows = {n: torch.ones(3, HEADS, DIM).double() for n in ("append_key", "append_value")}
        words = "append_key must have elements of 1, 2 or 4 bytes, got float64"
        rejected(op, ValueError, words, paged_kv_cache=cache.double(), **rows)


@on_unpacked_keys
def test_caches_that_overlap(op: str) -> None:
    cache = valid(op)["paged_kv_cache"]
    k, v = cache.unbind(1)
    words = "paged_kv_cache[1] must not overlap paged_kv_cache[0]'s memory; call .clone()"
    rejected(op, ValueError, words, paged_kv_cache=(k, k))
    rejected(op, ValueError, words, paged_kv_cache=(k[:-1], k[1:]))
    words = "paged_kv_cache[0] must not hold an element twice, got strides"
    rejected(op, ValueError, words, paged_kv_cache=(k[:1].expand(PAGES, -1, -1, -1), v))
    if not op.startswith("fp8"):
        rows = k.reshape(-1, HEADS, DIM)[:3]
        rows = k[0, :3]
        words = "paged_kv_cache[0] must not overlap append_key's memory; call .clone()"
        rejected(op, ValueError, words, append_key=rows, paged_kv_cache=(k, v))


@on_packed
def test_packed_caches_that_do_not_fit(op: str) -> None:
    cache, factors = valid(op)["paged_kv_cache"], valid(op)["kv_cache_sf"]
    words = f"paged_kv_cache must hold rows of {HEADS} x {DIM // 2} bytes for append_key, got shape"
    rejected(op, ValueError, words, paged_kv_cache=cache[..., :-1])
    rejected(op, ValueError, words, kv_layout="HND")
    rejected(op, ValueError, "paged_kv_cache must be uint8, got int8", paged_kv_cache=cache.char())
    words = f"kv_cache_sf must hold rows of {HEADS} x 1 bytes for append_key, got shape"
    rejected(op, ValueError, words, kv_cache_sf=torch.cat([factors.view(torch.uint8)] * 2, -1))
    words = "kv_cache_sf must be float8_e4m3fn or uint8, got float32"
    rejected(op, ValueError, words, kv_cache_sf=factors.float())
    words = f"kv_cache_sf must have {PAGES} pages of 4 as paged_kv_cache, got {PAGES - 1} of 4"
    rejected(op, ValueError, words, kv_cache_sf=factors[:-1])
    k, v = factors.unbind(1)
    words = f"kv_cache_sf[1] must have {PAGES} pages of 4 as kv_cache_sf[0], got {PAGES} of 3"
    rejected(op, ValueError, words, kv_cache_sf=(k, v[:, :3]))
    for bad, got in (([k, v], "list"), ((k,), "a tuple of Tensor"), (None, "NoneType")):
        words = f"kv_cache_sf must be a torch.Tensor or a tuple of two, got {got}"
        rejected(op, KeyError, words, kv_cache_sf=bad)
    rows = {n: torch.ones(3, HEADS, 24, dtype=BF16) for n in ("append_key", "append_value")}
    words = "append_key's last dimension must be a multiple of 16, got 24"
    rejected(op, ValueError, words, **rows)
    rows = {n: torch.ones(3, HEADS, DIM) for n in ("append_key", "append_value")}
    rejected(op, ValueError, "append_key must be float16 or bfloat16, got float32", **rows)


@on_packed
def test_packed_caches_that_overlap(op: str) -> None:
    cache = valid(op)["paged_kv_cache"]
    words = "kv_cache_sf must not overlap paged_kv_cache's memory; call .clone()"
    both = "paged_kv_cache must not overlap kv_cache_sf's memory; call .clone()"
    with pytest.raises(ValueError) as caught:
        getattr(precast, op)(
            **{**valid(op), "paged_kv_cache": cache, "kv_cache_sf": cache[..., :1]}
        )
    assert words in str(caught.value) or both in str(caught.value)
    factors = valid(op)["kv_cache_sf"]
    k, v = factors.unbind(1)
    words = "kv_cache_sf[1] must not overlap kv_cache_sf[0]'s memory; call .clone()"
    rejected(op, ValueError, words, kv_cache_sf=(k, k))
    words = "kv_cache_sf[0] must not hold an element twice, got strides"
    rejected(op, ValueError, words, kv_cache_sf=(k[:1].expand(PAGES, -1, -1, -1), v))


@on_packed
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_of_packed_caches(op: str, name: str) -> None:
    for bad in (0.0, -1.0, 1e-60, 1e39, float("inf"), float("nan")):
        words = f"{name} must be positive and finite as float32, got {bad:g}"
        rejected(op, ValueError, words, **{name: bad})
    rejected(op, ValueError, f"{name} must hold one number, got shape [2]", **{name: torch.ones(2)})
    half = torch.ones(1).half()
    rejected(op, ValueError, f"{name} must be float32, got float16", **{name: half})


@every_op
@pytest.mark.parametrize("tokens", [0])
def test_nothing_to_append(op: str, tokens: int) -> None:
    arguments = valid(op)
    for name, value in arguments.items():
        if name.startswith("append_") or name in ("positions", "batch_indices", "slot_mapping"):
            arguments[name] = value[:tokens]
    before = [bits(v).clone() for n, v in arguments.items() if "cache" in n and "kv_last" not in n]
    getattr(precast, op)(**arguments)
    after = [bits(v) for n, v in arguments.items() if "cache" in n and "kv_last" not in n]
    assert all(map(torch.equal, before, after))


def test_invalid_arguments_of_positions() -> None:
    name, indptr, lens = "get_batch_indices_positions", torch.tensor([0, 3]), torch.tensor([3])
    bad: list[tuple[str, tuple[Any, ...]]] = [
        ("append_indptr must have shape [batch_size + 1]", (indptr[None], lens, 3)),
        ("append_indptr must have shape [batch_size + 1]", (indptr[:0], lens, 3)),
        ("append_indptr must be int32 or int64, got float32", (indptr.float(), lens, 3)),
        ("seq_lens must have shape [1], got [2]", (indptr, indptr, 3)),
        ("batch_indices must be int32, got int64", (indptr, lens, 3, torch.zeros(3).long())),
        ("batch_indices must have shape [3], got [4]", (indptr, lens, 3, torch.zeros(4).int())),
        ("positions must have shape [3], got [2]", (indptr, lens, 3, None, torch.zeros(2).int())),
    ]
    for words, args in bad:
        with pytest.raises(ValueError) as caught:
            precast.get_batch_indices_positions(*args)
        assert str(caught.value).startswith(f"{name}: {words}")
    out = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="positions must not overlap batch_indices's memory"):
        precast.get_batch_indices_positions(indptr, lens, 3, out, out)
    with pytest.raises(TypeError, match=r"seq_lens must be a torch\.Tensor, got list"):
        precast.get_batch_indices_positions(indptr, [3], 3)  # type: ignore[arg-type]


def test_invalid_arguments_of_concat() -> None:
    k, nope, rope = torch.zeros(2, 3, 6), torch.ones(2, 3, 4), torch.ones(2, 1, 2)
    bad: list[tuple[str, tuple[Any, ...]]] = [
        ("k_nope must be float32, got float16", (k, nope.half(), rope)),
        ("k_nope must have the tokens and heads of k", (k, nope[:1], rope)),
        ("k_rope must have shape [2, 1, rope_dim], got [2, 2]", (k, nope, rope[:, 0])),
        ("k_rope must have shape [2, 1, rope_dim], got [2, 3, 2]", (k, nope, rope.expand(2, 3, 2))),
        (
            "k's last dimension must be those of k_nope and k_rope together, 4 + 2, got 5",
            (k[..., 1:], nope, rope),
        ),
        ("k must not overlap k_nope's memory", (k, k[..., :4], rope)),
        ("k must not hold an element twice", (k[:, :1].expand(2, 3, 6), nope, rope)),
        ("k must have elements of 1, 2 or 4 bytes, got float64", (k.double(), nope, rope)),
    ]
    for words, args in bad:
        with pytest.raises(ValueError) as caught:
            precast.concat_mla_k(*args)
        assert str(caught.value).startswith("concat_mla_k: "), caught.value
        assert words in str(caught.value) or "dimensions" in str(caught.value)
    with pytest.raises(TypeError, match=r"k_rope must be a torch\.Tensor, got int"):
        precast.concat_mla_k(k, nope, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend must be 'default', got 'cake'"):
        precast.concat_mla_k(k, nope, rope, backend="cake")
    assert not k.any()
    precast.concat_mla_k(k, nope, rope, backend="default")
    assert k.all()
