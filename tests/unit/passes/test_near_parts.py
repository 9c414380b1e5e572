"""The experts in a token's own node, against the groups of meshes."""

from __future__ import annotations

import itertools

import pytest

from moec.passes.degrees.near_rules import near_parts
from moec.passes.ir import Mesh

RANKS = 24


@pytest.mark.parametrize("node", [1, 2, 3, 4, 6, 8, 12, 24])
def test_near_parts_are_those_of_the_groups_of_a_mesh(node: int) -> None:
    divisors = [d for d in range(1, RANKS + 1) if RANKS % d == 0]
    for sharers, ep, etp in itertools.product(divisors, repeat=3):
        if RANKS % (ep * etp):
            continue
        mesh = Mesh("experts", (("edp", RANKS // (ep * etp)), ("ep", ep), ("etp", etp)))
        peers = {rank: group for group in mesh.groups("ep") for rank in group}
        near = [
            sum(
                all(peers[rank][part] // node == rank // node for rank in range(first, first + sharers))
                for part in range(ep)
            )
            for first in range(0, RANKS, sharers)
        ]
        assert list(near_parts(RANKS, node, sharers, ep, etp)) == near
