"""The collectives over gloo, against what one process works out with all ranks' tensors in hand."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch
import torch.distributed as dist
from support.combinations import diagonals
from support.ranks.gloo_pool import GlooPool
from torch import Tensor
from torch.library import opcheck

from moec.runtime import ops
from moec.runtime.ops import dense_collectives, ragged_collectives
from moec.runtime.ranks import groups

NUM_EXPERTS, DIM = 8, 3
WORLD_SIZES = [1, 2, 4]


def world() -> AbstractContextManager[None]:
    return groups.use({"ep": dist.group.WORLD})


def counts_of(world_size: int, load: str) -> Tensor:
    """Rows that each rank has for each expert: [world size, experts]."""
    counts = torch.randint(0, 4, (world_size, NUM_EXPERTS), generator=torch.Generator().manual_seed(1))
    if load == "a rank sends nothing":
        counts[0] = 0
    if load == "a rank receives nothing":
        counts[:, -(NUM_EXPERTS // world_size) :] = 0
    if load == "no rows at all":
        counts[:] = 0
    return counts


LOADS = ["uneven", "a rank sends nothing", "a rank receives nothing", "no rows at all"]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
loads_of_worlds = pytest.mark.parametrize(("load", "world_size"), diagonals(LOADS, [4, 2, 1]))
world_sizes = pytest.mark.parametrize("world_size", WORLD_SIZES)


# ---- exchange_counts ---------------------------------------------------------------------------------


def exchange(counts: Tensor) -> tuple[Tensor, Tensor]:
    with world():
        return ragged_collectives.exchange_counts(counts[dist.get_rank()][None], "ep")


@loads_of_worlds
def test_every_rank_learns_what_each_source_sends_for_each_of_its_experts(
    gloo: GlooPool, world_size: int, load: str
) -> None:
    counts = counts_of(world_size, load)
    by_owner = counts.view(world_size, world_size, -1)  # source, owner, local expert
    for rank, (received, splits) in enumerate(gloo.run(world_size, exchange, counts)):
        assert torch.equal(received, by_owner[:, rank])
        assert torch.equal(splits[0], by_owner[rank].sum(1))
        assert torch.equal(splits[1], by_owner[:, rank].sum(1))
        assert splits.device.type == "cpu"


# ---- all_to_all --------------------------------------------------------------------------------------


def rows_of(counts: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Each rank's rows, no two alike: rank, then number within the rank."""
    return [
        (100 * rank + torch.arange(int(total) * DIM)).view(-1, DIM).to(dtype)
        for rank, total in enumerate(counts.sum(1))
    ]


def there(counts: Tensor, rows: list[Tensor]) -> list[Tensor]:
    """What every rank receives: from each source in turn, the rows for its experts."""
    size = len(rows)
    sent = [r.split(c.view(size, -1).sum(1).tolist()) for r, c in zip(rows, counts, strict=True)]
    return [torch.cat([sent[source][rank] for source in range(size)]) for rank in range(size)]


def send(counts: Tensor, rows: list[Tensor], scales: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows sent there, back again, and the gradient of their sum, weighted on arrival by `scales`."""
    rank = dist.get_rank()
    own = rows[rank].requires_grad_()
    with world():
        _, splits = ragged_collectives.exchange_counts(counts[rank][None], "ep")
        arrived = ragged_collectives.all_to_all(own, splits, False, "ep")
        back = ragged_collectives.all_to_all(arrived, splits, True, "ep")
        (arrived * scales[rank]).sum().backward()
    assert own.grad is not None
    return arrived.detach(), back.detach(), own.grad


@pytest.mark.parametrize(("load", "world_size", "dtype"), diagonals(LOADS, [2, 4, 1], DTYPES, number=2))
def test_rows_arrive_source_by_source_return_home_and_so_do_gradients(
    gloo: GlooPool, world_size: int, load: str, dtype: torch.dtype
) -> None:
    counts = counts_of(world_size, load)
    rows, scales = rows_of(counts, dtype), [s + 7 for s in rows_of(counts, dtype)]
    results = gloo.run(world_size, send, counts, rows, there(counts, scales))
    expected = there(counts, rows)
    for rank, (arrived, back, grad) in enumerate(results):
        assert torch.equal(arrived, expected[rank])
        assert torch.equal(back, rows[rank])
        assert torch.equal(grad, scales[rank])


def send_reverse(counts: Tensor, rows: list[Tensor], scales: list[Tensor]) -> Tensor:
    rank = dist.get_rank()
    with world():
        _, splits = ragged_collectives.exchange_counts(counts[rank][None], "ep")
        arrived = there(counts, rows)[rank].requires_grad_()
        (ragged_collectives.all_to_all(arrived, splits, True, "ep") * scales[rank]).sum().backward()
    assert arrived.grad is not None
    return arrived.grad


@world_sizes
def test_backward_of_the_way_home_is_the_way_there(gloo: GlooPool, world_size: int) -> None:
    counts = counts_of(world_size, "uneven")
    rows = rows_of(counts, torch.float64)
    scales = [s + 7 for s in rows]
    for grad, expected in zip(
        gloo.run(world_size, send_reverse, counts, rows, scales), there(counts, scales), strict=True
    ):
        assert torch.equal(grad, expected)


def refused_counts(counts: Tensor) -> str:
    """What this rank says to its counts, in a group of its own that is not the first ranks'."""
    rank = dist.get_rank()
    peers = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    with groups.use({"ep": peers}):
        try:
            ragged_collectives.exchange_counts(counts[rank][None], "ep")
        except RuntimeError as error:
            return str(error)
    return "nothing"


def test_counts_below_0_are_refused_by_both_ranks_that_they_concern(gloo: GlooPool) -> None:
    counts = torch.ones(4, 4, dtype=torch.int64)
    counts[3, 0] = -1  # The sum, 0, does not show it.
    assert gloo.run(4, refused_counts, counts) == [
        "nothing",
        "nothing",
        'moec::exchange_counts: rank 2 counts -1 rows from rank 3 over "ep"',
        'moec::exchange_counts: rank 3 counts -1 rows to rank 2 over "ep"',
    ]


def send_below_zero() -> None:
    with world():
        ragged_collectives.all_to_all(
            torch.randn(3, 2), torch.tensor([[4, -1], [2, 2]]), False, "ep", "layer 3 (tiny.moe:9)"
        )


def test_splits_below_0_are_refused_before_anything_moves(gloo: GlooPool) -> None:
    with pytest.raises(
        RuntimeError, match=r'all_to_all: rank [01] counts -1 rows to rank 1 over "ep" in layer 3 \(tiny'
    ):
        gloo.run(2, send_below_zero)


def send_too_few() -> None:
    with world():
        ragged_collectives.all_to_all(torch.randn(3, 2), torch.tensor([[2, 2], [2, 2]]), False, "ep")


def test_rows_that_do_not_match_the_splits_are_refused_before_anything_moves(gloo: GlooPool) -> None:
    with pytest.raises(RuntimeError, match=r'rank [01] has 3 rows to send, but the splits send 4 over "ep"'):
        gloo.run(2, send_too_few)


# ---- all_reduce --------------------------------------------------------------------------------------


def reduce_and_differentiate(xs: list[Tensor], grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = xs[dist.get_rank()].requires_grad_()
    before = x.detach().clone()
    with world():
        total = dense_collectives.all_reduce(x, "ep")
        total.backward(grad)
    assert torch.equal(x, before)
    assert x.grad is not None
    return total.detach(), x.grad, before


@pytest.mark.parametrize(("world_size", "shape"), diagonals([4, 2, 1], [(2, 3), (), (0, 3)], number=2))
def test_all_reduce_sums_forward_and_passes_gradients_through_unchanged(
    gloo: GlooPool, world_size: int, shape: tuple[int, ...]
) -> None:
    xs = [torch.randn(shape, dtype=torch.float64) for _ in range(world_size)]
    grad = torch.randn(shape, dtype=torch.float64)
    for total, own_grad, _ in gloo.run(world_size, reduce_and_differentiate, xs, grad):
        torch.testing.assert_close(total, torch.stack(xs).sum(0))
        assert torch.equal(own_grad, grad)


# ---- together ----------------------------------------------------------------------------------------


def check_operators() -> None:
    """opcheck runs each operator several times, on all ranks alike."""
    rank = dist.get_rank()
    counts = counts_of(2, "uneven")[rank][None]
    rows = rows_of(counts_of(2, "uneven"), torch.float64)[rank]
    with world():
        opcheck(ragged_collectives.exchange_counts, (counts, "ep"))
        _, splits = ragged_collectives.exchange_counts(counts, "ep")
        opcheck(ragged_collectives.all_to_all, (rows.requires_grad_(), splits, False, "ep"))
        opcheck(dense_collectives.all_reduce, (torch.randn(3, 2, requires_grad=True), "ep"))


def test_operators_are_well_formed(gloo: GlooPool) -> None:
    gloo.run(2, check_operators)


def moe_layer(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, group: str | None) -> Tensor:
    probabilities, weights, experts = ops.route(x @ gate.t(), None, 2, "softmax", "before", True)
    rows, counts, positions = ops.permute(x, experts, NUM_EXPERTS)
    if group is None:
        out, *_ = ops.expert_mlp(rows, counts, up, down, None, None, None, "swiglu")
    else:
        received, splits = ragged_collectives.exchange_counts(counts, group)
        arrived = ragged_collectives.all_to_all(rows, splits, False, group)
        done, *_ = ops.expert_mlp(arrived, received, up, down, None, None, None, "swiglu")
        out = ragged_collectives.all_to_all(done, splits, True, group)
    return ops.combine(out, positions, weights) + 0.01 * ops.switch_loss(
        probabilities, ops.count_choices(experts, NUM_EXPERTS, 0)
    )


def share(t: Tensor, rank: int, size: int, dim: int = 0) -> Tensor:
    return t.tensor_split(size, dim)[rank].detach().clone().requires_grad_()


def train_shard(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, compiled: bool) -> list[Tensor]:
    """This rank's sequences and experts: outputs, and gradients of x, up, down and (summed over ranks) the gate."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own_x, own_up, own_down = share(x, rank, size), share(up, rank, size), share(down, rank, size)
    own_gate = gate.clone().requires_grad_()
    layer = torch.compile(moe_layer, fullgraph=True, backend="aot_eager") if compiled else moe_layer
    with world():
        out = layer(own_x, own_gate, own_up, own_down, "ep")
        out.square().sum().backward()
        assert own_gate.grad is not None
        gate_grad = dense_collectives.all_reduce(own_gate.grad, "ep")
    return [out.detach(), own_x.grad, own_up.grad, own_down.grad, gate_grad]


WORLDS = [(2, 4), (4, 3), (1, 2), (4, 4)]


@pytest.mark.parametrize(("world", "how"), diagonals(WORLDS, ["compiled", "eager"]))
def test_an_expert_parallel_layer_equals_the_whole_one_with_gradients(
    gloo: GlooPool, world: tuple[int, int], how: str
) -> None:
    """With 3 sequences on 4 ranks, one rank has no tokens at all."""
    (world_size, sequences), compiled = world, how == "compiled"
    shapes = [(sequences, 5, 4), (NUM_EXPERTS, 4), (NUM_EXPERTS, 2, 6, 4), (NUM_EXPERTS, 4, 6)]
    whole = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    results = gloo.run(world_size, train_shard, *(t.detach() for t in whole), compiled)
    # The balance term is a sum over a rank's sequences: so it is over the whole, rank by rank.
    parts = [moe_layer(x, *whole[1:], None) for x in whole[0].tensor_split(world_size)]
    torch.cat(parts).square().sum().backward()
    gathered = [torch.cat([result[i] for result in results]) for i in range(4)]
    expected = [torch.cat(parts).detach(), whole[0].grad, whole[2].grad, whole[3].grad]
    for ours, theirs in zip(gathered, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    for result in results:
        torch.testing.assert_close(result[4], whole[1].grad, rtol=1e-10, atol=1e-10)
