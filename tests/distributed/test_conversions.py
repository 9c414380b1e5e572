"""Every conversion over gloo, against what its placements say and against the virtual cluster, with gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.conversion_cases import CASES, RANKS, Case, first
from support.ranks.gloo_pool import GlooPool
from torch import Tensor, fx
from torch.autograd import forward_ad
from torch.library import opcheck

from moec.passes.ir.ops.conversion import Conversion, conversion_classes
from moec.runtime.errors import JobError
from moec.runtime.ops import dense_collectives
from moec.runtime.ops import sharded_vocabulary as vocabulary
from moec.runtime.ranks import groups
from moec.runtime.verify.cluster.shuffles import NODES

VOCAB = 12


def operator(name: str) -> Any:
    return getattr(torch.ops.moec, name).default


def run_here(
    name: str, inputs: list[list[Tensor]], attributes: tuple[Any, ...], grads: list[Tensor], group: str = "tp"
) -> list[Any]:
    """One rank's result, and the gradients of its inputs."""
    rank = dist.get_rank()
    own = [tensors[rank].requires_grad_(tensors[rank].is_floating_point()) for tensors in inputs]
    before = [tensor.detach().clone() for tensor in own]
    with groups.use({group: dist.group.WORLD}):
        result = first(operator(name)(*own, *attributes, group))
        if result.requires_grad:
            result.backward(grads[rank])
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(own, before, strict=True)), "an input was written"
    assert result.data_ptr() not in [tensor.data_ptr() for tensor in own if tensor.numel()], "an input was returned"
    return [result.detach(), *(tensor.grad for tensor in own)]


def run_each(cases: list[Case], ranks: int) -> list[list[Any]]:
    return [
        run_here(case.operator, case.operands(ranks), case.attributes, case.given_gradients(ranks)) for case in cases
    ]


def run_virtually(name: str, inputs: list[list[Tensor]], attributes: tuple[Any, ...], grads: list[Tensor]) -> list[Any]:
    own = [[t.clone().requires_grad_(t.is_floating_point()) for t in tensors] for tensors in inputs]
    results = [first(result) for result in NODES[f"moec.{name}.default"](node_args(len(own), attributes), own)]
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


def require_close(found: list[Any], expected: list[Any]) -> None:
    """Result and gradients of one rank."""
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


KINDS = [kind.mnemonic for kind in conversion_classes()]


@pytest.fixture(scope="module")
def of_ranks(gloo: GlooPool) -> Callable[[int], list[tuple[Case, list[list[Any]]]]]:
    """Every case with what each rank found, on so many ranks: all cases in one job."""

    @cache
    def run(ranks: int) -> list[tuple[Case, list[list[Any]]]]:
        found = zip(*gloo.run(ranks, run_each, CASES, ranks), strict=True)
        return [(case, list(each)) for case, each in zip(CASES, found, strict=True)]

    return run


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("mnemonic", KINDS)
def test_a_conversion_does_as_its_placements_and_the_virtual_cluster_say(
    of_ranks: Callable[[int], list[tuple[Case, list[list[Any]]]]], mnemonic: str, ranks: int
):
    cases = [(case, found) for case, found in of_ranks(ranks) if case.conversion.mnemonic == mnemonic]
    assert cases, "support/conversion_cases.py has no case of this conversion"
    for case, found_by_rank in cases:
        beside: list[None] = [None for _ in case.operands(ranks)[1:]]
        virtual = run_virtually(case.operator, case.operands(ranks), case.attributes, case.given_gradients(ranks))
        gradients = case.gradients(ranks) if case.differentiated else [None] * ranks
        said = [[r, g, *beside] for r, g in zip(case.results(ranks), gradients, strict=True)]
        for found, expected, shuffled in zip(found_by_rank, said, virtual, strict=True):
            require_close(found, expected)
            require_close(found, shuffled)


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
    expected = NODES[f"moec.{name}.default"](node_args(1, attributes), [[x.mT.contiguous() for x in inputs]])
    for found, wanted in zip(gloo.run(2, run_transposed, name, inputs, attributes), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_sharded_vocabulary_is_looked_up_in_parts(gloo: GlooPool, ranks: int):
    ids = torch.randint(VOCAB, (2, 5), generator=torch.Generator().manual_seed(0))
    tables = list(drawn(1, (VOCAB, 3))[0].chunk(ranks))
    require_equal(gloo, "embed_part", [[ids] * ranks, tables], (2, 5, 3))
    whole = torch.cat(tables)[ids]
    parts = [vocabulary.embed_rows(ids, table, rank) for rank, table in enumerate(tables)]
    torch.testing.assert_close(torch.stack(parts).sum(0), whole)
    labels = ids.clone()
    labels[0, 2] = -100
    logits = list(drawn(1, (2, 5, VOCAB))[0].chunk(ranks, -1))
    require_equal(gloo, "label_logit", [logits, [labels] * ranks], (2, 5))


def require_equal(gloo: GlooPool, name: str, inputs: list[list[Tensor]], shape: tuple[int, ...]) -> None:
    """An operator without attributes, whose results have this shape, on gloo ranks and on the virtual cluster."""
    ranks = len(inputs[0])
    grads = drawn(ranks, shape, seed=1)
    expected = run_virtually(name, inputs, (), grads)
    for found, wanted in zip(gloo.run(ranks, run_here, name, inputs, (), grads), expected, strict=True):
        require_close(found, wanted)


def test_every_operator_that_takes_a_group_has_a_rule_on_the_virtual_cluster():
    """But for those that the backward of another calls."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("moec::")]
    operators = [getattr(torch.ops.moec, name.removeprefix("moec::").partition(".")[0]).default for name in names]
    grouped = {str(op) for op in operators if "group" in [argument.name for argument in op._schema.arguments]}
    assert grouped - {op for op in grouped if "_backward." in op} == set(NODES)


def check_operators() -> None:
    rank = dist.get_rank()
    with groups.use({"tp": dist.group.WORLD}):
        for case in (case for case in CASES if case.load in ("full", "uneven")):
            own = [tensors[rank] for tensors in case.operands(2)]
            given = [tensor.requires_grad_(tensor.is_floating_point()) for tensor in own]
            opcheck(operator(case.operator), (*given, *case.attributes, "tp"))
        ids = torch.randint(6, (2, 3), generator=torch.Generator().manual_seed(0))
        opcheck(vocabulary.embed_part, (ids, torch.randn(3, 4, requires_grad=True), "tp"))
        opcheck(vocabulary.label_logit, (torch.randn(2, 3, 3, requires_grad=True), ids, "tp"))
        opcheck(vocabulary.embed_part_backward, (torch.randn(2, 3, 4), ids, 3, "tp"))
        opcheck(vocabulary.label_logit_backward, (torch.randn(2, 3), ids, 3, "tp"))


def test_operators_are_well_formed(gloo: GlooPool):
    gloo.run(2, check_operators)


def cut_what_does_not_divide() -> str:
    with groups.use({"tp": dist.group.WORLD}), pytest.raises(RuntimeError) as caught:
        dense_collectives.reduce_scatter(torch.ones(2, 3), 1, "tp")
    return str(caught.value)


def test_what_does_not_divide_is_refused(gloo: GlooPool):
    assert all('does not divide over the 2 ranks of "tp"' in text for text in gloo.run(2, cut_what_does_not_divide))


# ---- counts that cannot be ----------------------------------------------------------------------------


def refused(name: str, *operands: Tensor) -> str:
    """What this rank says to these operands; a rank that waits for another would not answer."""
    with groups.use({"tp": dist.group.WORLD}):
        try:
            operator(name)(*operands, "tp", "layer 3 (tiny.moe:9)")
        except RuntimeError as error:
            return str(error)
    return "nothing"


OF_ROWS = ["all_gather_rows", "reduce_scatter_rows"]


WHERE = 'over "tp" in layer 3 (tiny.moe:9)'


def refused_counts() -> str:
    return refused("gather_counts", torch.tensor([[4, -1 if dist.get_rank() else 0]]))  # The sum, 3, does not show it.


def test_counts_below_0_are_refused_by_every_rank_before_rows_move(gloo: GlooPool):
    assert gloo.run(2, refused_counts) == [
        f"moec::gather_counts: rank 0 counts -1 rows from rank 1 {WHERE}",
        f"moec::gather_counts: rank 1 counts -1 rows to rank 0 {WHERE}",
    ]


@pytest.mark.parametrize("name", OF_ROWS)
def test_splits_below_0_are_refused_by_every_rank_before_anything_moves(gloo: GlooPool, name: str):
    direction = "from" if name.startswith("all_gather") else "to"
    for rank, text in enumerate(gloo.run(2, refused, name, torch.ones(3, 2), torch.tensor([[3, 3], [4, -1]]))):
        assert text == f"moec::{name}: rank {rank} counts -1 rows {direction} rank 1 {WHERE}"


@pytest.mark.parametrize("name", OF_ROWS)
def test_rows_that_the_splits_do_not_count_are_refused_before_anything_moves(gloo: GlooPool, name: str):
    given, counted = (10, 6) if name.startswith("all_gather") else (5, 7)
    for rank, text in enumerate(gloo.run(2, refused, name, torch.ones(5, 2), torch.tensor([[3, 3], [3, 4]]))):
        assert text == f"moec::{name}: rank {rank} has {given} rows to send, but the splits send {counted} {WHERE}"


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        (
            "all_gather_rows",
            [torch.ones(3, 2), torch.ones(2, 3, dtype=torch.int64)],
            'splits must be int64 [2, 2] over "tp"',
        ),
        ("all_gather_rows", [torch.ones(3, 2), torch.ones(2, 2)], "splits must be int64"),
        ("gather_counts", [torch.ones(2, 2)], "counts of rows must be int64 [sources, E]"),
        ("gather_counts", [torch.ones(4, dtype=torch.int64)], "counts of rows must be int64 [sources, E]"),
    ],
    ids=["ranks of splits", "dtype of splits", "dtype of counts", "dims of counts"],
)
def test_splits_and_counts_of_another_form_are_refused(gloo: GlooPool, name: str, given: list[Tensor], says: str):
    assert all(says in text for text in gloo.run(2, refused, name, *given))


# ---- derivatives beyond backward -----------------------------------------------------------------------


def derivatives(cases: list[Case]) -> list[tuple[str, str, bool]]:
    """Of each case: the codes of its second derivative and of its tangent; whether a batch is its calls."""
    found, rank = list[tuple[str, str, bool]](), dist.get_rank()
    with groups.use({"tp": dist.group.WORLD}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop|.*torch.jit.script")
        for case in cases:
            x, *beside = (tensors[rank] for tensors in case.operands(2))
            run = partial(_converted, operator(case.operator), tuple(beside), case.attributes)
            one, other = run(x), run(2 * x)
            batch = torch.func.vmap(run)(torch.stack([x, 2 * x]))
            found.append((_twice(run, x), _tangent(run, x), torch.equal(batch, torch.stack([one, other]))))
    return found


def _converted(operator: Any, beside: tuple[Tensor, ...], attributes: tuple[Any, ...], x: Tensor) -> Tensor:
    return first(operator(x, *beside, *attributes, "tp"))


def _twice(run: Callable[[Tensor], Tensor], x: Tensor) -> str:
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
    try:
        torch.autograd.grad(gradient.sum(), x)
    except JobError as error:
        return error.diagnostics[0].code
    return ""


def _tangent(run: Callable[[Tensor], Tensor], x: Tensor) -> str:
    try:
        with forward_ad.dual_level():
            run(forward_ad.make_dual(x, x))
    except JobError as error:
        return error.diagnostics[0].code
    return ""


def test_conversions_refuse_second_derivatives_and_tangents_and_take_a_batch_call_by_call(gloo: GlooPool):
    cases = [case for case in CASES if case.differentiated and case.load in ("full", "uneven")]
    for found in gloo.run(2, derivatives, cases):
        assert found == [("MOE0729", "MOE0729", True) for _ in cases]


# ---- a wrong backward ---------------------------------------------------------------------------------


def run_with_wrong_backward(mnemonic: str, wrong: Conversion, case: Case, ranks: int) -> list[Any] | str:
    kind = next(kind for kind in conversion_classes() if kind.mnemonic == mnemonic)
    right = kind.backward
    kind.backward = lambda self: type(wrong).over(self.axis, **_beside_axis(wrong))  # type: ignore[method-assign]
    try:
        # An operator remembers its backward by its group.
        given = case.operands(ranks), case.attributes, case.given_gradients(ranks)
        return run_here(case.operator, *given, group="planted")
    except RuntimeError as error:
        return str(error)
    finally:
        kind.backward = right  # type: ignore[method-assign]


def _beside_axis(conversion: Conversion) -> dict[str, Any]:
    return {name: value for name, value in conversion.attributes().items() if name != "axis"}


@pytest.mark.parametrize(
    ("mnemonic", "wrong"),
    [
        ("all_gather_rows", "all_to_all"),
        ("reduce_scatter_rows", "all_to_all"),
        ("all_gather", "slice"),
        ("copy_to", "all_gather"),
    ],
)
def test_a_wrong_backward_of_the_class_is_a_wrong_gradient_over_gloo(gloo: GlooPool, mnemonic: str, wrong: str):
    case, other = (
        next(case for case in CASES if case.conversion.mnemonic == each and case.differentiated)
        for each in (mnemonic, wrong)
    )
    for rank, found in enumerate(gloo.run(2, run_with_wrong_backward, mnemonic, other.conversion, case, 2)):
        if not isinstance(found, str):
            torch.testing.assert_close(found[0], case.results(2)[rank], rtol=1e-12, atol=1e-12)
            with pytest.raises(AssertionError):
                torch.testing.assert_close(found[1], case.gradients(2)[rank], rtol=1e-12, atol=1e-12)
