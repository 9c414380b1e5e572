"""`save_hf` looks for an architecture among all of them: each says of any model what its config is, or what differs."""

from __future__ import annotations

import pytest
from huggingface.decoders import ROWS, config_of
from huggingface.test_config_refusals import usual

import moec
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.huggingface.families import BY_TYPE
from moec.grammar.huggingface.read import read_config
from moec.grammar.huggingface.write import as_inferred, config_for, differences
from moec.grammar.spec import Spec


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("model_type", sorted(ROWS))
def test_every_architecture_answers_for_every_model(model_type: str) -> None:
    written = set()
    for name in ROWS[model_type][1]:
        spec = moec.from_hf(usual(model_type, **config_of(model_type, name)))
        for other in BY_TYPE:
            if says(spec, other):
                written.add(other)
    assert model_type in written


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("model_type", sorted(ROWS))
def test_every_architecture_answers_for_models_of_one_layer_and_of_dense_ones(model_type: str) -> None:
    spec = moec.from_hf(usual(model_type))
    for layer in dict.fromkeys(map(id, spec.model.layers)):
        (one,) = {id(each): each for each in spec.model.layers if id(each) == layer}.values()
        model = spec.model.replace(depth=1, layers=(one,))
        for other in BY_TYPE:
            says(spec.replace(model=model), other)


def says(spec: Spec, model_type: str) -> bool:
    """Whether the architecture has a config for the model, which is then the same model again."""
    try:
        config, _ = config_for(spec, model_type)
    except DiagnosticError as error:
        if [found.code for found in error.diagnostics] != ["MOE0908"]:
            raise
        return False
    again = read_config(config).spec.model
    assert next(differences(as_inferred(spec.model), as_inferred(again)), None) is None
    return True
