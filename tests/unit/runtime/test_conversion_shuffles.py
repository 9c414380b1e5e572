"""Every registered conversion on the virtual cluster: results and gradients, from where values lie before and after."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from support.conversion_cases import CASES, KINDS, PLACEMENTS, RANKS, Case, first
from support.plans import moe_plan
from torch import Tensor, fx

from moec.passes.ir import Layout, Mesh, Meshes, Value
from moec.passes.ir.ops import Conversion
from moec.passes.ir.ops.conversion import conversion_classes, matching
from moec.passes.ir.ops.ragged_conversions import AllGatherRows, ReduceScatterRows
from moec.runtime import ops  # noqa: F401  (registers torch.ops.moec.*)
from moec.runtime.verify.cluster.shuffles import _SHUFFLES, NODES
from moec.runtime.verify.verification import verify
from moec.runtime.verify.verify_report import BOUND


def check_virtually(case: Case, ranks: int) -> None:
    values, *beside = case.operands(ranks)
    own = [value.requires_grad_(value.is_floating_point()) for value in values]
    graph = fx.Graph()
    args = (*(graph.placeholder(f"x{i}") for i in range(1 + len(beside))), *case.attributes, "tp")
    results = [first(result) for result in NODES[f"moec.{case.operator}.default"](args, [own, *beside])]
    require_equal([result.detach() for result in results], case.results(ranks))
    assert all(result.requires_grad == case.differentiated for result in results)
    if case.differentiated:
        torch.autograd.backward(results, case.given_gradients(ranks))
        require_equal([value.grad for value in own], case.gradients(ranks))


def require_equal(found: list[Tensor | None], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_conversion_moves_a_value_and_its_gradient(case: Case, ranks: int):
    check_virtually(case, ranks)


def test_every_registered_conversion_is_among_the_cases():
    assert {type(case.conversion) for case in CASES} == set(conversion_classes())
    others = {"embed_part", "label_logit", "exchange_and_gather_counts", "assign_slots"}
    assert {case.operator for case in CASES} | others == {
        name.removeprefix("moec.").removesuffix(".default") for name in NODES
    }


def test_no_two_conversions_go_from_one_placement_to_another():
    found = 0
    for kind, source, target, partial in product(KINDS, PLACEMENTS, PLACEMENTS, (False, True)):
        conversions = matching(kind, "tp", source, target, partial_gradient=partial)
        assert len(conversions) <= 1, (kind, source, target, conversions)
        found += len(conversions)
    assert found > 25


def of_rank(case: Case, name: str, layout: Layout) -> Value:
    shape = {"dense": (8, 12, 3), "row counts": ("sources", 8), "rows": (8, "rows", 3)}[case.kind]
    dtype, ragged = ("int64", None) if case.kind == "row counts" else ("fp64", "c" if case.kind == "rows" else None)
    return Value(name=name, shape=shape, dtype=dtype, layout=layout, ragged=ragged)


@pytest.mark.parametrize("case", [case for case in CASES if case.kind == "dense"], ids=str)
def test_the_layout_rule_says_where_the_result_lies(case: Case):
    source, target = ({"tp": p} if p else {} for p in (case.conversion.source(), case.conversion.target()))
    given = of_rank(case, "x", Layout.of(source))
    placing = case.conversion.place([given], Meshes(Mesh("dense", (("tp", 2),))), {})
    assert placing.results == (Layout.of(target),)


# ---- a wrong backward ----------------------------------------------------------------------------------

DIFFERENTIATED = [case for case in CASES if case.differentiated and case.load in ("full", "uneven")]


def placements(of: Conversion | str) -> object:
    """Conversions with the same placements do the same forward; the identity is replicated → replicated."""
    return (of.source(), of.target()) if isinstance(of, Conversion) else (None, None)


@pytest.mark.parametrize("case", DIFFERENTIATED, ids=str)
def test_every_wrong_backward_is_found(case: Case, monkeypatch: pytest.MonkeyPatch):
    right = case.conversion.backward()
    others = {placements(other.conversion): other.conversion for other in DIFFERENTIATED if other.kind == case.kind}
    wrong = [other for key, other in others.items() if key != placements(right)]
    assert len(wrong) >= 3
    for other in (*wrong, "none", *(["identity"] if right != "identity" else [])):
        monkeypatch.setattr(type(case.conversion), "backward", lambda self, other=other: other)
        with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError, TypeError)):
            check_virtually(case, 2)
        monkeypatch.undo()


# ---- in a model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ep", [1, 2])
def test_experts_over_a_second_axis_do_as_the_unsharded_model(ep: int):
    report = verify(moe_plan(ranks=2 * ep, ep=ep, etp=2), float32=False)
    assert report.ok
    assert max(report.max_output_error, report.max_gradient_error) < BOUND


class KeptRows(ReduceScatterRows):
    """Rows of all ranks' tokens → those of a rank's tokens, without the other ranks' terms."""

    operator = "kept_rows"


def kept(_: Conversion, tensors: Sequence[Tensor], splits: Sequence[Tensor]) -> list[Tensor]:
    parts = (torch.split(tensor, split[1].tolist()) for tensor, split in zip(tensors, splits, strict=True))
    return [of_rank[rank].clone() for rank, of_rank in enumerate(parts)]


@pytest.mark.parametrize(("kind", "wrong"), [(AllGatherRows, KeptRows), (ReduceScatterRows, ReduceScatterRows)])
def test_a_wrong_backward_of_gathered_rows_makes_a_model_wrong(
    kind: type[Conversion], wrong: type[Conversion], monkeypatch: pytest.MonkeyPatch
):
    plan = moe_plan(ranks=4, ep=2, etp=2)
    monkeypatch.setitem(_SHUFFLES, "kept_rows", kept)
    monkeypatch.setattr(kind, "backward", lambda self: wrong.over(self.axis))
    report = verify(plan, float32=False)
    assert not report.ok
    assert report.max_output_error < BOUND < report.max_gradient_error
    found = report.first_difference
    assert found is not None
    assert (found.layer, found.op, found.gradient) == ("layers.2", kind.mnemonic, True)
