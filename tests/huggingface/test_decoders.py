"""Every family equals transformers: logits, gradients, what is saved, for usual and unusual values of its keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface.decoders import CASES, ROWS, config_of, mixes_of
from huggingface.equal import both, require_equal_gradients, require_equal_logits, require_saved_alike, text
from support.combinations import some

import moec
from moec.grammar.huggingface.families import BY_TYPE

ALONE = {f"{model_type}-{name}": (model_type, config_of(model_type, name)) for model_type, name in CASES}
MIXED = {f"{model_type}-{name}": (model_type, mix) for model_type in ROWS for name, mix in mixes_of(model_type).items()}
"""Every variant of every family too, few at a time of each family."""


@pytest.mark.parametrize("case", some(list(ALONE | MIXED), list(MIXED)))
def test_logits_gradients_and_saved_files_equal_transformers(case: str, tmp_path: Path) -> None:
    model_type, config = (ALONE | MIXED)[case]
    pair = both(tmp_path / "theirs", model_type, **config)
    tokens = text()
    require_equal_logits(pair, tokens)
    require_saved_alike(pair, tmp_path / "ours")
    require_equal_gradients(pair, tokens)


def test_every_family_has_cases() -> None:
    assert ROWS.keys() == BY_TYPE.keys() - {"kimi_k2"}


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path: Path) -> None:
    """transformers has no class for its `model_type`: its folder names code, which moec does not run."""
    pair = both(tmp_path, "deepseek_v3", **config_of("deepseek_v3"))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config |= {"model_type": "kimi_k2", "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}}
    path.write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="auto_map"):
        kimi = moec.reference(moec.from_hf(tmp_path))
    moec.load_hf(kimi, tmp_path)
    tokens = text()
    assert torch.equal(kimi.eval()(tokens).logits, pair.ours(tokens).logits)
