"""A key with another value is refused, or the model equals transformers': nothing differs in silence.

Where transformers' own class cannot compute a value, nothing is compared. decoders.py has the values that families
must import; here are those that some of them ignore, such as a part of each head that turns.
"""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
import torch
from huggingface.decoders import ROWS, config_of
from huggingface.equal import made, text
from huggingface_hub.errors import StrictDataclassError
from support.combinations import diagonals

import moec
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.spec import Spec

Keys = dict[str, Any]
YARN: Keys = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 99.0}
CHANGES: dict[str, Keys] = {
    "activation": {"hidden_act": "gelu"},
    "one choice": {"num_experts_per_tok": 1},
    "part of a head": {"rope_parameters": {"rope_type": "default", "rope_theta": 99.0, "partial_rotary_factor": 0.5}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 99.0, "mscale_all_dim": 1.3}},
    "yarn": {"rope_parameters": YARN},
    "yarn, two factors": {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
    "yarn, stated factor": {"rope_parameters": {**YARN, "attention_factor": 1.9, "mscale_all_dim": 1.3}},
    "width of a head": {"head_dim": 16},
    "dropped": {"attention_dropout": 0.3},
}
REFUSED = "part of a head", "yarn, two factors"
"""Changes that most families refuse; most import the others."""

FAMILIES = sorted(ROWS)
THIRDS = [FAMILIES[number::3] for number in range(3)]
"""Each change is made to every third family in turn; to the others in the slow tests."""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("change", "third"), diagonals(list(CHANGES), range(3)))
def test_another_value_is_refused_or_equal(change: str, third: int) -> None:
    equal, refused = 0, 0
    for model_type in THIRDS[third]:
        theirs, wanted = computed(model_type, CHANGES[change])
        if theirs is None:
            continue
        spec, codes = read(json.loads(json.dumps(theirs.config.to_dict(), default=str)))
        if spec is None:
            assert codes == {"MOE0903"}, model_type
            refused += 1
            continue
        ours = moec.reference(spec).eval()
        moec.load_hf(ours, theirs.state_dict())
        with torch.no_grad():
            logits = ours(text()).logits
        bound = 1e-5 * max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(logits, wanted, rtol=0, atol=bound, msg=lambda said, of=model_type: f"{of}: {said}")
        equal += 1
    assert (refused if change in REFUSED else equal) >= 8


def computed(model_type: str, changes: Keys) -> tuple[Any, torch.Tensor]:
    """Their model and logits, or None where their class has no such model."""
    try:
        theirs = made(model_type, **{**config_of(model_type), **deepcopy(changes)})
        with torch.no_grad():
            return theirs, theirs(text()).logits
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, StrictDataclassError):
        return None, torch.empty(0)


def read(config: Keys) -> tuple[Spec | None, set[str]]:
    """The Spec, or the codes of what is wrong."""
    try:
        return moec.from_hf(config), set()
    except DiagnosticError as error:
        return None, {found.code for found in error.diagnostics}
