"""`save_hf` looks for an architecture among all of them: each says of any model what its config is, or what differs."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface.decoders import ROWS, mixes_of, usual

import moec
from moec.commands.import_hf import moe_text
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.huggingface.families import BY_TYPE
from moec.grammar.huggingface.read import read_config
from moec.grammar.huggingface.write import as_inferred, config_for, differences
from moec.grammar.load import load_text
from moec.grammar.spec import Spec


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("model_type", sorted(ROWS))
def test_every_architecture_answers_for_every_model(model_type: str) -> None:
    written = set()
    for keys in mixes_of(model_type).values():
        spec = moec.from_hf(usual(model_type, **keys))
        for other in BY_TYPE:
            if says(spec, other):
                written.add(other)
    assert model_type in written


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("model_type", sorted(ROWS))
def test_the_file_of_every_config_is_the_same_model(model_type: str) -> None:
    """What `moec import hf` writes, read again."""
    for name, keys in mixes_of(model_type).items():
        imported = read_config(usual(model_type, **keys))
        loaded = load_text(moe_text(imported, Path(name)))
        assert loaded.spec is not None, loaded.diagnostics
        assert loaded.spec.model == imported.spec.model


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("model_type", sorted(ROWS))
def test_every_architecture_answers_for_models_of_one_layer_and_of_dense_ones(model_type: str) -> None:
    spec = moec.from_hf(usual(model_type))
    for layer in dict.fromkeys(map(id, spec.model.layers)):
        (one,) = {id(each): each for each in spec.model.layers if id(each) == layer}.values()
        model = spec.model.replace(depth=1, layers=(one,))
        for other in BY_TYPE:
            says(spec.replace(model=model), other)


def test_a_model_without_a_context_is_written_with_the_sequence_of_its_training() -> None:
    spec = load_text(layers_of_mixtral()).unwrap()
    assert spec.model.context is None
    config, family = config_for(spec)
    assert (family.model_type, config["max_position_embeddings"]) == ("mixtral", 48)


def layers_of_mixtral() -> str:
    return """
        model "mixtral" {
          vocab = 64; dim = 32; depth = 2
          layers {
            attention = gqa(heads = 4, kv_heads = 2, rope = rope())
            moe { experts = 4 * swiglu(32); gate = topk(2, normalize = true) }
          }
        }
        cluster "here" { device = cpu; level "process" { size = 1 } }
        train { batch = 4; sequence = 48; optimizer = adamw(lr = 1e-3) }
    """


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
