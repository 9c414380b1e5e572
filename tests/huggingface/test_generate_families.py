"""`generate` of every family gives transformers' greedy tokens, one by one, with its cache and ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from huggingface.decoders import ROWS, config_of
from huggingface.equal import both, text

NEW = 12
OTHER_CACHES = {"qwen2_moe": "window pattern", "qwen3_moe": "yarn", "mixtral": "window"}
"""Cases beside the usual one whose cache differs: windows, and positions that are stretched."""
CASES = [(model_type, name) for model_type in ROWS for name in ("usual", OTHER_CACHES.get(model_type)) if name]


@pytest.mark.parametrize(("model_type", "name"), CASES)
def test_greedy_tokens_are_those_of_transformers(model_type: str, name: str, tmp_path: Path) -> None:
    pair = both(tmp_path, model_type, **config_of(model_type, name))
    prompts = text(4, 9)
    with torch.no_grad():
        expected = pair.theirs.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
            eos_token_id=-1, pad_token_id=0,
        )[:, prompts.shape[1] :]  # fmt: skip
    assert len(set(expected.flatten().tolist())) > 3
    assert torch.equal(pair.ours.generate(prompts, max_new_tokens=NEW).tokens, expected)
