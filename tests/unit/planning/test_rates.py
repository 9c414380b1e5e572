"""Seconds of products, bytes and collectives, from what a cluster states."""

from __future__ import annotations

import numpy as np
import pytest
from support.tables import each_row

from moec.grammar import load_text
from moec.grammar.spec.cluster import Cluster
from moec.passes.cost.groups import Group, outermost_between, parts_of_group
from moec.passes.cost.rates import ClusterRates, peak
from moec.passes.ir.work.cost import Product

TEXT = """
device "d" {{ kind = cuda; memory = 80GB; bandwidth = 1TB/s; peak {{ bf16 = 100TFLOPS{fp32} }}{device} }}
cluster "c" {{ device = d
  level "node" {{ size = 8; bandwidth = 100GB/s; latency = 10us{node} }}
  level "rail" {{ size = 32; bandwidth = 10GB/s; latency = 20us }}
}}
model "m" {{
  vocab = 64; dim = 16; depth = 1; context = 8; layers {{ attention = mha(heads = 2, rope = rope()); ffn = swiglu(16) }}
}}
"""


def cluster(fp32: str = "", device: str = "", node: str = "") -> Cluster:
    """32 nodes of 8."""
    return load_text(TEXT.format(fp32=fp32, device=device, node=node)).unwrap().cluster


EXACT = (
    "; achieved { products = 1; half_rows = 64; attention = 0.5; attention_backward = 0.25; memory = 1; launch = 1ms }"
)


def test_a_large_product_is_bound_by_arithmetic_and_a_narrow_one_by_memory() -> None:
    rates = ClusterRates(cluster(device=EXACT))
    large = Product(name="p", m=1e5, n=1e4, k=1e4, dtype="bf16")
    assert rates.product(large, backward=False) == pytest.approx(2e13 / 1e14)
    narrow = Product(name="p", m=10, n=1e4, k=1e4, dtype="bf16")
    assert rates.product(narrow, backward=False) == pytest.approx(narrow.moved / 1e12)


def test_experts_with_as_many_rows_as_half_rows_run_at_half_speed() -> None:
    rates = ClusterRates(cluster(device=EXACT))
    plain = Product(name="p", m=64 * 1e6, n=1e4, k=1e4, dtype="bf16")
    grouped = Product(name="p", m=64 * 1e6, n=1e4, k=1e4, dtype="bf16", kind="grouped", groups=1e6)
    assert rates.product(grouped, backward=False) == pytest.approx(2 * rates.product(plain, backward=False))


def test_attention_has_a_share_of_its_own_in_each_direction() -> None:
    rates = ClusterRates(cluster(device=EXACT))
    product = Product(name="p", m=1e5, n=1e4, k=1e4, dtype="bf16", kind="attention")
    assert [rates.product(product, backward=is_back) for is_back in (False, True)] == pytest.approx([0.4, 0.8])


def test_a_dtype_without_a_peak_takes_that_of_a_wider_one() -> None:
    assert peak(cluster().device, "fp32") == 100e12 / 16
    assert peak(cluster(fp32="; fp32 = 7TFLOPS").device, "fp32") == 7e12
    assert peak(cluster().device, "fp8") == 100e12


PARTS = [
    ((8, 1), [(1, 8), (8, 1)]),
    ((64, 1), [(1, 8), (8, 8)]),
    ((4, 8), [(1, 1), (1, 4)]),
    ((64, 4), [(1, 2), (2, 32)]),
    ((12, 1), [(1, 8), (8, 2)]),
]
"""Ranks and stride of a group; for node and rail, its ranks inside of a unit, and its units."""


@each_row("group, parts", PARTS)
def test_a_group_lies_on_levels(group: tuple[int, int], parts: list[tuple[int, int]]) -> None:
    assert parts_of_group(Group(*group), cluster()) == parts


@each_row("ranks, others, name", [((0, 8), (8, 16), "rail"), ((0, 4), (4, 8), "node")])
def test_stages_are_as_far_apart_as_their_ranks(ranks: tuple[int, int], others: tuple[int, int], name: str) -> None:
    level = outermost_between(range(*ranks), range(*others), cluster())
    assert level is not None
    assert level.name == name
    assert outermost_between(range(*ranks), range(*ranks), cluster()) is None


def test_a_ring_takes_the_slowest_level_and_a_strided_one_has_fewer_links() -> None:
    rates = ClusterRates(cluster(node="; achieved { ring = 1; all_to_all = 1 }"))
    inside = rates.collective("all_gather", 7e9, Group(8, 1))
    assert inside == pytest.approx(7e9 / 100e9 + 7 * 10e-6)
    of_eight = rates.collective("all_gather", 63e9, Group(64, 1))
    of_one = rates.collective("all_gather", 62e9, Group(32, 8))
    # 64 GB cross the rail of 8 units over the links of all 8 ranks of a node, or of 32 over one.
    assert of_eight == pytest.approx(64e9 * 7 / 8 / (8 * 0.7 * 0.75 * 10e9) + 7 * 20e-6)
    assert of_one == pytest.approx(64e9 * 31 / 32 / (0.75 * 10e9) + 31 * 20e-6)


def test_rows_of_an_all_to_all_cross_the_rail_but_for_those_of_the_own_node() -> None:
    rates = ClusterRates(cluster())
    across = rates.collective("all_to_all", 63e9, Group(64, 1))
    assert across == pytest.approx(64e9 * 56 / 64 / (0.7 * 10e9) + 56 * 20e-6)
    assert rates.collective("all_to_all", 7e9, Group(8, 1)) == pytest.approx(7e9 / (0.7 * 100e9) + 7 * 10e-6)


def test_nothing_is_sent_in_no_time() -> None:
    rates = ClusterRates(cluster())
    assert rates.collective("none", 0.0, Group(8, 1)) == rates.collective("all_gather", 0.0, Group(8, 1)) == 0
    assert rates.collective("all_gather", 0.0, Group(1, 8)) == rates.message(1e9, None) == 0


def test_groups_of_several_plans_at_once_take_the_time_of_each() -> None:
    rates, groups = ClusterRates(cluster()), [Group(8, 1), Group(64, 4), Group(1, 8), Group(32, 8)]
    sent = np.array([1e9, 2e9, 0.0, 3e9])
    several = Group(*(np.array(numbers) for numbers in zip(*groups, strict=True)))
    for collective in ("all_gather", "all_to_all"):
        each = [rates.collective(collective, size, group) for size, group in zip(sent, groups, strict=True)]
        assert rates.collective(collective, sent, several) == pytest.approx(each)
