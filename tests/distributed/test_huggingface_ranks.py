"""Weights of Hugging Face on gloo ranks: logits are those of transformers, saved files those that were loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from huggingface.decoders import ROWS, config_of
from huggingface.equal import made, text
from support.ranks.gloo_pool import GlooPool
from support.ranks.huggingface_jobs import load_and_save, load_other_files, refused, train_after_load

DEGREES = {
    "tp 2, ep 2, two ranks": (2, "tp = 2; ep = 2"),
    "zero 3, two ranks": (2, "ep = 1; zero = 3"),
    "tp 2, ep 2": (4, "tp = 2; ep = 2"),
    "ep 2, etp 2, cp 2, zero 3": (4, "ep = 2; etp = 2; cp = 2; zero = 3"),
}
OF_FAMILY = {name: list(DEGREES)[number % 2] for number, name in enumerate(ROWS)}
"""Every family under one of the first two, in turn."""
FOUR = [("gpt_oss", "ep 2, etp 2, cp 2, zero 3")]
CASES = [
    pytest.param(name, degrees, marks=[] if degrees == OF_FAMILY[name] or (name, degrees) in FOUR else pytest.mark.slow)
    for name in ROWS
    for degrees in DEGREES
]


@pytest.mark.parametrize(("model_type", "degrees"), CASES)
def test_ranks_load_compute_and_save_as_one(gloo: GlooPool, model_type: str, degrees: str, tmp_path: Path) -> None:
    ranks, written = DEGREES[degrees]
    folder, saved = tmp_path / "theirs", tmp_path / "ours"
    theirs = made(model_type, **config_of(model_type))
    theirs.save_pretrained(folder)
    tokens = torch.cat([text(1), text(2)])
    with torch.no_grad():
        expected = theirs(tokens).logits
    results = gloo.run(ranks, load_and_save, str(folder), written, str(saved), tokens)
    parts = expected.split(len(results[0]))
    for rank, result in enumerate(results):
        wanted = parts[rank * len(parts) // ranks]
        bound = 1e-5 * max(1.0, float(expected.abs().max()))  # of logits up to 5 the worst is off by 1.2e-5
        torch.testing.assert_close(result, wanted, rtol=0, atol=bound, msg=lambda m, r=rank: f"rank {r}: {m}")
    assert (saved / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_one_ranks_error_is_every_ranks_and_nothing_is_loaded(gloo: GlooPool, tmp_path: Path) -> None:
    theirs = made("mixtral", **config_of("mixtral") | {"num_local_experts": 4})
    for name in ("theirs", "damaged"):
        theirs.save_pretrained(tmp_path / name)
    path = tmp_path / "damaged" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    in_use = tmp_path / "theirs"
    for load, save in gloo.run(2, refused, str(in_use), str(tmp_path / "damaged"), str(in_use)):
        assert "MOE0905" in load
        assert "rank 1" in load
        assert "MOE0909" in save
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "theirs"]


def test_ranks_that_read_different_files_are_told(gloo: GlooPool, tmp_path: Path) -> None:
    """Two revisions of one model on the disks of two machines."""
    theirs = made("mixtral", **config_of("mixtral"))
    theirs.save_pretrained(tmp_path / "one")
    with torch.no_grad():
        theirs.lm_head.weight += 1
    theirs.save_pretrained(tmp_path / "other")
    for said in gloo.run(2, load_other_files, str(tmp_path / "one"), str(tmp_path / "other")):
        assert "MOE0811" in said


def test_an_optimizer_made_before_the_weights_were_loaded_trains_these(gloo: GlooPool, tmp_path: Path) -> None:
    """Its masters are the parameters: none holds other weights."""
    made("qwen3_moe", **config_of("qwen3_moe")).save_pretrained(tmp_path / "theirs")
    tokens = torch.cat([text(1), text(2)])
    arguments = str(tmp_path / "theirs"), "ep = 2; zero = 2", tokens
    first, second = (gloo.run(2, train_after_load, *arguments, order) for order in (True, False))
    assert first == second
