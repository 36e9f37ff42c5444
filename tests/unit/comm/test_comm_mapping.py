# SPDX-License-Identifier: Apache-2.0
"""Which ranks share what: each rank is in its own groups; sizes that do not fit are refused."""

from __future__ import annotations

import itertools

import pytest

from precast.comm import Mapping


def mappings():
    for tp, cp, pp in itertools.product((1, 2, 4, 8), (1, 2), (1, 3)):
        for moe in itertools.product((-1, 2), (-1, 1, 2), (-1, 1, 2)):
            sizes = dict(zip(("moe_cluster_size", "moe_tp_size", "moe_ep_size"), moe, strict=True))
            try:
                Mapping(tp * cp * pp, tp_size=tp, cp_size=cp, pp_size=pp, **sizes)
            except (ValueError, NotImplementedError):
                continue
            yield {"tp_size": tp, "cp_size": cp, "pp_size": pp, **sizes}


@pytest.mark.parametrize("sizes", [*mappings()], ids=lambda s: "-".join(map(str, s.values())))
def test_groups_divide_the_world(sizes):
    world = sizes["tp_size"] * sizes["cp_size"] * sizes["pp_size"]
    for rank in range(world):
        m = Mapping(world, rank, gpus_per_node=4, **sizes)
        for kind in ("tp", "cp", "pp"):
            groups, own = getattr(m, f"{kind}_groups"), getattr(m, f"{kind}_group")
            assert sorted(itertools.chain(*groups)) == [*range(world)]
            assert own in groups and own[getattr(m, f"{kind}_rank")] == rank
            assert len(own) == getattr(m, f"{kind}_size")
            assert getattr(m, f"has_{kind}")() == (len(own) > 1)
        if sizes["cp_size"] == 1:  # Experts are not divided by context.
            for kind in ("moe_tp", "moe_cluster", "moe_ep"):
                groups, own = getattr(m, f"{kind}_groups"), getattr(m, f"{kind}_group")
                assert sorted(itertools.chain(*groups)) == [*range(world)]
                assert own in groups and rank in own
            assert m.moe_tp_group[m.moe_tp_rank] == rank
            assert m.moe_ep_group[m.moe_ep_rank] == rank
        assert m.next_pp_rank() == m.pp_group[(m.pp_rank + 1) % m.pp_size]
        assert m.prev_pp_rank() == m.pp_group[m.pp_rank - 1]
        assert (m.is_first_pp_rank(), m.is_last_pp_rank()) == (
            m.pp_rank == 0,
            m.pp_rank == m.pp_size - 1,
        )
        again = Mapping.from_dict(m.to_dict())
        assert (
            again == m and hash(again) == hash(m) and again != Mapping(world + 1, tp_size=world + 1)
        )


def test_groups_of_a_cluster():
    m = Mapping(8, 6, tp_size=4, pp_size=2)
    assert (m.tp_group, m.pp_group) == ([4, 5, 6, 7], [2, 6])
    m = Mapping(8, 3, tp_size=2, pp_size=2, cp_size=2)
    assert (m.tp_group, m.cp_group, m.pp_group) == ([2, 3], [1, 3], [3, 7])
    m = Mapping(16, 13, gpus_per_node=8, tp_size=8, pp_size=2, moe_ep_size=4)
    assert (m.moe_tp_size, m.moe_tp_group, m.moe_ep_group) == (2, [9, 13], [12, 13, 14, 15])
    assert (m.node_rank, m.local_rank, m.is_multi_node()) == (1, 5, True)


def test_layers_and_experts():
    layers = [Mapping(3, rank, pp_size=3).pp_layers(8) for rank in range(3)]
    assert layers == [[0, 1, 2], [3, 4, 5], [6, 7]]
    experts = [Mapping(4, rank, tp_size=4, moe_ep_size=2).ep_experts(8) for rank in range(4)]
    assert experts == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
    with pytest.raises(ValueError, match="cp_size must be 1, got 2"):
        Mapping(2, cp_size=2).ep_experts(8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"world_size": 4, "tp_size": 2}, r"tp_size \* pp_size \* cp_size = 2 \* 1 \* 1, got 4"),
        ({"world_size": 2, "tp_size": 2, "rank": 2}, "rank must be 0 to 1, got 2"),
        ({"world_size": 2, "tp_size": 2, "rank": -1}, "rank must be 0 to 1, got -1"),
        ({"world_size": 0}, "world_size must be at least 1, got 0"),
        ({"world_size": 4, "tp_size": 4, "moe_ep_size": 3}, r"= 1 \* 3 \* 1, got 4"),
        ({"world_size": 2, "tp_size": 2, "attn_cp_size": 2}, "attn_cp_size must be 1, got 2"),
        ({"world_size": 2, "tp_size": 2, "attn_tp_size": 1}, "attn_cp_size must be 1, got 2"),
        ({"world_size": 2, "tp_size": 2, "auto_parallel": True}, "must be 1 with auto_parallel"),
    ],
)
def test_sizes_that_do_not_fit(arguments, words):
    with pytest.raises(ValueError, match=words):
        Mapping(**arguments)


def test_context_and_experts_are_refused():
    with pytest.raises(NotImplementedError, match="cp_size must be 1 with a moe_ep_size of 2"):
        Mapping(4, cp_size=2, tp_size=2, moe_ep_size=2)
    Mapping(2, 7, tp_size=2, enable_attention_dp=True)  # Requests are divided instead.
