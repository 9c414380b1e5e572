"""NaN in any parameter of any gate is MOE0708, with the layer and line of the gate."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from support.combinations import diagonals
from support.plans import FOUR, moe_spec, moe_text

from moec.grammar import load_text
from moec.grammar.schema import fields
from moec.grammar.spec import Gate, Spec
from moec.grammar.spec.base import Node
from moec.runtime.errors import JobError
from moec.runtime.host.reference import reference

WITHOUT_SCORES = {"hash"}
INNER = 'layer "inner" {{ moe {{ experts = 3 * gelu(5); gate = {} }} }}'


def spelled(gate: type[Node]) -> str:
    """The gate as a file writes it: two choices where it asks for their number."""
    return f"{gate.word}(2)" if any(known.required for known in fields(gate).values()) else str(gate.word)


GATES = [spelled(gate) for gate in get_args(Gate) if gate.implemented and gate.word not in WITHOUT_SCORES]
MORE = ["dselect_k(1)", "topk(2, bias = learned)", "topk(2, score = sigmoid, normalize = true)", "soft(2)"]


def nested_spec(outer: str, inner: str) -> Spec:
    text = moe_text(gate=outer, balance="[]").replace("8 * swiglu(16)", '8 * mixture("inner")')
    return load_text(text + INNER.format(inner), name="tiny.moe").unwrap()


SPECS = {gate: moe_spec(gate=gate, balance="[]", ranks=4, ep=2, levels=FOUR) for gate in [*GATES, *MORE]} | {
    "a mixture of mixtures": nested_spec("topk(2, score = sigmoid)", "topk(2, normalize = true)"),
}


@pytest.mark.parametrize(("gate", "training"), diagonals(list(SPECS), [True, False]))
def test_nan_in_any_parameter_of_a_gate_names_its_layer(gate: str, training: bool) -> None:
    model = reference(SPECS[gate], seed=1).train(training)
    tokens = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(0))
    model(tokens, tokens)
    names = [name for name, _ in model.named_parameters() if name.startswith("layers.2.moe.gate.")]
    assert names
    for name in names:
        parameter = model.get_parameter(name).data
        kept = parameter.clone()
        parameter[-1] = torch.nan
        with pytest.raises(JobError, match=r"MOE0708.*: the router logits of layer 2 \(tiny.moe:11\) are NaN"):
            model(tokens, tokens)
        parameter.copy_(kept)
    assert model(tokens, tokens).logits.isfinite().all()
