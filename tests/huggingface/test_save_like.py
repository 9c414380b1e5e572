"""`moec.save_hf(…, like=folder)`: the folder's files, and its config as far as it is the model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface.test_weights import folder_of, require_refused

import moec
from moec.grammar.spec import Spec, SwitchLoss, TopK


def with_mixtures(spec: Spec, **changed: Any) -> Spec:
    layers = tuple(layer.replace(moe=layer.moe.replace(**changed)) for layer in spec.model.layers)
    return spec.replace(model=spec.model.replace(layers=layers))


def config_in(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


pytestmark = pytest.mark.filterwarnings("ignore:MOE0904")  # of the coefficient, which `from_hf` does not import
OF_TRAINING = {"tokenizer_class": "Own", "router_aux_loss_coef": 0.02, "output_router_logits": True} | {
    f"{name}_token_id": number for number, name in enumerate(("bos", "eos", "pad", "sep", "eod"), 5)
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = folder_of(tmp_path / "theirs")
    (folder / "config.json").write_text(json.dumps(config_in(folder) | OF_TRAINING))
    return folder


def test_a_model_is_saved_like_the_folder_that_it_came_from(folder: Path, tmp_path: Path) -> None:
    """What acts in training alone does not count."""
    spec = with_mixtures(moec.from_hf(folder), group="rank", balance=(SwitchLoss(weight=0.01),))
    module = moec.reference(spec)
    moec.load_hf(module, folder)
    moec.save_hf(module, tmp_path / "ours", like=folder)
    assert config_in(tmp_path / "ours") == config_in(folder)
    for name in ("tokenizer.json", "merges.txt", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (folder / name).read_bytes()
    moec.save_hf(module, tmp_path / "plain")
    assert not {"router_aux_loss_coef", "bos_token_id"} & {
        key for key, value in config_in(tmp_path / "plain").items() if value is not None
    }


def test_a_model_that_computes_otherwise_has_its_own_config(folder: Path, tmp_path: Path) -> None:
    module = moec.reference(with_mixtures(moec.from_hf(folder), gate=TopK(k=3, normalize=True)))
    with pytest.warns(UserWarning, match=r"`moe\.gate\.k` of layers 0\.\.2 is 2, and in the model 3"):
        moec.save_hf(module, tmp_path / "ours", like=folder)
    ours = config_in(tmp_path / "ours")
    assert ours["num_experts_per_tok"] == 3
    assert OF_TRAINING.items() <= ours.items()


def test_a_folder_that_is_none_or_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    module = moec.reference(moec.from_hf(folder))
    another = folder_of(tmp_path / "another", "qwen3_moe")
    for code, words, like in (("MOE0900", "nowhere", tmp_path / "nowhere"), ("MOE0908", "leave `like` out", another)):
        require_refused(code, words, lambda like=like: moec.save_hf(module, tmp_path / "more", like=like))
    assert not (tmp_path / "more").exists()
