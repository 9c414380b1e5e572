"""Random numbers by counter: known answers, and parameters that start the same however they are sharded."""

from __future__ import annotations

import pytest
import torch

from moec.codegen.plan import PlanParameter
from moec.passes.ir import Init, Layout, Mesh
from moec.runtime import philox
from moec.runtime.weights.shards import initial_shard

ALONE = Mesh("dense", (("tp", 1),))


def data(shape: tuple[int, ...], layout: str = "replicate", init: str = "normal") -> PlanParameter:
    return PlanParameter(
        name="w",
        mesh="dense",
        shape=shape,
        dtype="bf16",
        layout=Layout.parse(layout),
        weight=Layout.parse(layout),
        gradient=Layout.parse(layout),
        optimizer_state=Layout.parse(layout),
        init=Init(kind=init, std=0.5),
        decays=True,
        sum_over=(),
    )


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        (0, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        # Of Random123's vectors the others set all four counter words; these are by its reference code, two words set.
        (0x7FFFFFFF_FFFFFFFF, (0xFFFFFFFF, 0xFFFFFFFF), (0x7B2535F5, 0xD6DCFCA4, 0x955042FB, 0x3C0FD6A5)),
    ],
)
def test_known_answers(counter: int, key: tuple[int, int], words: tuple[int, ...]) -> None:
    assert tuple(philox.philox_words(torch.tensor([counter]), key).flatten().tolist()) == words


def by_hand(counter: int, key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 in Python's own integers (Salmon et al. 2011, section 4.3)."""
    c = [counter & 0xFFFFFFFF, counter >> 32, 0, 0]
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def test_any_counter_and_key_give_what_big_integers_give() -> None:
    counters = torch.randint(2**62, (200,), generator=torch.Generator().manual_seed(0))
    key = philox.key_of(3, "layers.0.attention.q.weight")
    words = philox.philox_words(counters, key).T.tolist()
    assert words == [by_hand(counter, key) for counter in counters.tolist()]


def test_normal_numbers_have_their_moments_and_no_neighbour_is_like_another() -> None:
    x = philox.normal(torch.arange(1 << 18), (1, 2)).flatten().double()
    assert abs(x.mean()) < 0.005
    assert abs(x.std() - 1) < 0.005
    assert abs((x**4).mean() - 3) < 0.05
    for step in (1, 2, 3, 4):
        assert abs((x[step:] * x[:-step]).mean()) < 0.005
    assert x.isfinite().all()


@pytest.mark.parametrize("shape", [(8, 6, 10), (6, 3, 5, 4), (2, 70_000), (4, 70_001)], ids=str)
def test_shards_are_parts_of_the_whole_along_any_dim(shape: tuple[int, ...]) -> None:
    whole = initial_shard("w", data(shape), ALONE, 0, seed=1)
    assert whole.dtype == torch.float32
    for dim, size in enumerate(shape):
        if size % 2 == 0:
            mesh, layout = Mesh("dense", (("tp", 2),)), f"tp:shard({dim})"
            parts = [initial_shard("w", data(shape, layout), mesh, rank, seed=1) for rank in range(2)]
            assert torch.equal(torch.cat(parts, dim), whole)


def test_seeds_and_names_draw_differently_and_std_scales() -> None:
    first, seed, name = (initial_shard(n, data((64, 64)), ALONE, 0, seed=s) for n, s in (("w", 1), ("w", 2), ("v", 1)))
    assert not torch.equal(first, seed)
    assert not torch.equal(first, name)
    assert abs(first.std() - 0.5) < 0.02


def test_on_meta_nothing_is_drawn() -> None:
    assert initial_shard("w", data((1 << 20, 1 << 20)), ALONE, 0, seed=1, device=torch.device("meta")).is_meta
