"""docs/huggingface.md: its commands and its Python run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from transformers import AutoModelForCausalLM, OlmoeConfig

import moec
from moec.cli import app

PAGE = Path(__file__).parents[3] / "docs" / "huggingface.md"


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)


def tiny_model() -> Any:
    """A model of the page's architecture, with random weights."""
    config = OlmoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=16,
        pad_token_id=None,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config)


def test_its_python_trains_and_transformers_loads_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained("olmoe")
    console, (training, alone, with_tokens) = blocks("console")[0], blocks("python")
    _, command, output = console.rstrip("\n").split("\n")
    result = CliRunner().invoke(app, command.removeprefix("$ moec ").split())
    assert result.stdout.rstrip("\n") == output
    names: dict[str, Any] = {"moec": moec, "torch": torch, "plan": moec.compile("olmoe.moe"), "batch": batch}
    exec(training, names)  # noqa: S102
    tokens, _ = batch(0)
    tuned = AutoModelForCausalLM.from_pretrained("tuned")
    again = moec.reference(moec.from_hf("tuned"))
    moec.load_hf(again, "tuned")
    torch.testing.assert_close(again(tokens).logits, tuned(tokens).logits, rtol=1e-5, atol=1e-5)
    exec(alone, names)  # noqa: S102
    assert Path("again/model.safetensors").read_bytes() == Path("olmoe/model.safetensors").read_bytes()
    assert Path("tuned/model.safetensors").read_bytes() != Path("olmoe/model.safetensors").read_bytes()
    exec(with_tokens, names)  # noqa: S102
    larger = AutoModelForCausalLM.from_pretrained("with_tokens")
    torch.testing.assert_close(names["model"](tokens + 8).logits, larger(tokens + 8).logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(moec.DiagnosticError, match=r"(?s)`vocab` is 64, and in the model 72.*added tokens"):
        moec.load_hf(names["model"], "olmoe")


def test_its_commands_of_weights_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their output is that of the page's model in its whole size: here only their words are compared."""
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained("olmoe")
    lines = blocks("console")[1].rstrip("\n").split("\n")
    for command, output in zip(lines[::2], lines[1::2], strict=True):
        result = CliRunner().invoke(app, command.replace("/2000", "/0").removeprefix("$ moec ").split())
        assert result.exit_code == 0, result.stdout
        assert re.sub(r"[\d.]+ \w+", "N", result.stdout.rstrip("\n")) == re.sub(r"[\d.]+ \w+", "N", output)
    AutoModelForCausalLM.from_pretrained("tuned")


def test_a_live_model_s_state_dict_loads() -> None:
    theirs, tokens = tiny_model().eval(), batch(0)[0]
    ours = moec.reference(moec.from_hf(theirs.config.to_dict()))
    for source in (theirs.state_dict(), theirs):
        moec.load_hf(ours, source)
    assert moec.from_hf(theirs.config) == moec.from_hf(theirs.config.to_dict())
    torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, rtol=1e-5, atol=1e-5)
