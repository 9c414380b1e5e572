"""The conversion table over gloo against the virtual cluster's: the same numbers, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_pool import GlooPool
from torch import Tensor, fx
from torch.library import opcheck

from moec.runtime.job import groups
from moec.runtime.ops import conversions
from moec.runtime.ops import sharded_vocabulary as vocabulary
from moec.runtime.verify.shuffles import SHUFFLES

VOCAB, RANKS = 12, (1, 2, 4)


def operator(name: str) -> Any:
    return getattr(torch.ops.moec, name).default


def run_here(name: str, inputs: list[list[Tensor]], attributes: tuple[Any, ...], grads: list[Tensor]) -> list[Any]:
    """One rank's result, and the gradients of its inputs."""
    rank = dist.get_rank()
    own = [tensors[rank].requires_grad_(tensors[rank].is_floating_point()) for tensors in inputs]
    before = [tensor.detach().clone() for tensor in own]
    with groups.use({"tp": dist.group.WORLD}):
        result = operator(name)(*own, *attributes, "tp")
        if result.requires_grad:
            result.backward(grads[rank])
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(own, before, strict=True)), "an input was written"
    return [result.detach(), *(tensor.grad for tensor in own)]


def run_virtually(name: str, inputs: list[list[Tensor]], attributes: tuple[Any, ...], grads: list[Tensor]) -> list[Any]:
    own = [[t.clone().requires_grad_(t.is_floating_point()) for t in tensors] for tensors in inputs]
    results = SHUFFLES[f"moec.{name}.default"](node_args(len(own), attributes), own)
    if results[0].requires_grad:
        torch.autograd.backward(results, grads)
    return [[result.detach(), *(tensors[rank].grad for tensors in own)] for rank, result in enumerate(results)]


def node_args(operands: int, attributes: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a node in a graph: as many nodes as operands, attributes, and the group."""
    graph = fx.Graph()
    return (*(graph.placeholder(f"x{i}") for i in range(operands)), *attributes, "tp")


def drawn(ranks: int, shape: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(ranks)]


def require_equal(gloo: GlooPool, name: str, inputs: list[list[Tensor]], attributes: tuple[Any, ...]) -> None:
    ranks = len(inputs[0])
    out = {"all_gather": ranks, "all_gather_alike": ranks, "reduce_scatter": 1 / ranks, "slice": 1 / ranks}.get(name, 1)
    shape = list(inputs[0][0].shape)
    if attributes:
        shape[attributes[0]] = int(shape[attributes[0]] * out)
    if name == "embed_part":
        shape = [*shape, inputs[1][0].shape[1]]
    if name == "label_logit":
        shape = shape[:-1]
    grads = drawn(ranks, tuple(shape), seed=1)
    expected = run_virtually(name, inputs, attributes, grads)
    for got, wanted in zip(gloo.run(ranks, run_here, name, inputs, attributes, grads), expected, strict=True):
        for one, other in zip(got, wanted, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("shape", [(4, 8, 3), (0, 4, 4)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["all_gather", "all_gather_alike", "reduce_scatter", "slice"])
def test_what_moves_along_a_dim_does_as_declared(
    gloo: GlooPool, name: str, dim: int, shape: tuple[int, ...], ranks: int
):
    require_equal(gloo, name, [drawn(ranks, shape)], (dim,))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dims", [(1, 0), (0, 1)], ids=str)
def test_pieces_along_one_dim_become_pieces_along_another(gloo: GlooPool, dims: tuple[int, int], ranks: int):
    given, wanted = dims
    inputs, shape = drawn(ranks, (4, 8, 3)), [4, 8, 3]
    shape[given], shape[wanted] = shape[given] * ranks, shape[wanted] // ranks
    grads = drawn(ranks, tuple(shape), seed=1)
    expected = run_virtually("all_to_all_padded", [inputs], dims, grads)
    for got, wanted_here in zip(
        gloo.run(ranks, run_here, "all_to_all_padded", [inputs], dims, grads), expected, strict=True
    ):
        torch.testing.assert_close(got, wanted_here, rtol=0, atol=0)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ["all_reduce", "all_reduce_max", "copy_to"])
def test_what_reduces_or_copies_does_as_declared(gloo: GlooPool, name: str, ranks: int):
    inputs = drawn(ranks, (2, 3))
    if name == "all_reduce_max":
        inputs = [x.detach().to(torch.int64) for x in inputs]  # not differentiated
    require_equal(gloo, name, [inputs], ())


def run_transposed(name: str, inputs: list[Tensor], attributes: tuple[Any, ...]) -> Tensor:
    with groups.use({"tp": dist.group.WORLD}):
        result: Tensor = operator(name)(inputs[dist.get_rank()].mT, *attributes, "tp")
    return result


@pytest.mark.parametrize(
    ("name", "attributes"), [("all_reduce", ()), ("copy_to", ()), ("reduce_scatter", (1,)), ("all_gather", (1,))]
)
def test_an_input_that_is_not_contiguous_is_converted_and_not_a_copy_of_it(
    gloo: GlooPool, name: str, attributes: tuple[int, ...]
):
    inputs = drawn(2, (2, 6, 4))
    expected = SHUFFLES[f"moec.{name}.default"](node_args(1, attributes), [[x.mT.contiguous() for x in inputs]])
    for found, wanted in zip(gloo.run(2, run_transposed, name, inputs, attributes), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_sharded_vocabulary_is_looked_up_in_parts(gloo: GlooPool, ranks: int):
    ids = torch.randint(VOCAB, (2, 5), generator=torch.Generator().manual_seed(0))
    tables = list(drawn(1, (VOCAB, 3))[0].chunk(ranks))
    require_equal(gloo, "embed_part", [[ids] * ranks, tables], ())
    whole = torch.cat(tables)[ids]
    parts = [vocabulary.embed_rows(ids, table, rank) for rank, table in enumerate(tables)]
    torch.testing.assert_close(torch.stack(parts).sum(0), whole)
    labels = ids.clone()
    labels[0, 2] = -100
    logits = list(drawn(1, (2, 5, VOCAB))[0].chunk(ranks, -1))
    require_equal(gloo, "label_logit", [logits, [labels] * ranks], ())


def test_every_operator_that_takes_a_group_has_a_rule_on_the_virtual_cluster():
    """But for those that the backward of another calls."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("moec::")]
    operators = [getattr(torch.ops.moec, name.removeprefix("moec::").partition(".")[0]).default for name in names]
    grouped = {str(op) for op in operators if "group" in [argument.name for argument in op._schema.arguments]}
    assert grouped - {op for op in grouped if "_backward." in op} == set(SHUFFLES)


def check_operators() -> None:
    with groups.use({"tp": dist.group.WORLD}):
        x = torch.randn(4, 4, 3, requires_grad=True)
        for along in (
            conversions.all_gather,
            conversions.all_gather_alike,
            conversions.reduce_scatter,
            conversions.slice_,
        ):
            opcheck(along, (x, 1, "tp"))
        opcheck(conversions.all_to_all_padded, (x, 1, 0, "tp"))
        opcheck(conversions.copy_to, (x, "tp"))
        opcheck(conversions.all_reduce_max, (x.detach(), "tp"))
        ids = torch.randint(6, (2, 3), generator=torch.Generator().manual_seed(0))
        opcheck(vocabulary.embed_part, (ids, torch.randn(3, 4, requires_grad=True), "tp"))
        opcheck(vocabulary.label_logit, (torch.randn(2, 3, 3, requires_grad=True), ids, "tp"))
        opcheck(vocabulary.embed_part_backward, (torch.randn(2, 3, 4), ids, 3, "tp"))
        opcheck(vocabulary.label_logit_backward, (torch.randn(2, 3), ids, 3, "tp"))


def test_operators_are_well_formed(gloo: GlooPool):
    gloo.run(2, check_operators)


def cut_what_does_not_divide() -> str:
    with groups.use({"tp": dist.group.WORLD}), pytest.raises(RuntimeError) as caught:
        conversions.reduce_scatter(torch.ones(2, 3), 1, "tp")
    return str(caught.value)


def test_what_does_not_divide_is_refused(gloo: GlooPool):
    assert all('does not divide over the 2 ranks of "tp"' in text for text in gloo.run(2, cut_what_does_not_divide))
