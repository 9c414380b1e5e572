"""Frequencies and factors of scaled rotary positions against transformers' `modeling_rope_utils`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moec.grammar.spec import Linear, Llama3, LongRope, Ntk, Rope, Yarn
from moec.passes.lower.rotary import scaled, score_factor

pytest.importorskip("transformers")
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ORACLE_OF = {
    "ntk": "factor",
    "yarn": "factor original beta_fast beta_slow mscale mscale_all truncate",
    "llama3": "factor low high original",
    "longrope": "short long original",
}

SHORT, LONG = ([1.0 + 0.1 * i for i in range(16)], [1.0 + 1.5 * i for i in range(16)])
LLAMA = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
OF_LISTS = LongRope(short=tuple(SHORT), long=tuple(LONG), original=4096)

KINDS: dict[str, tuple[Rope, dict[str, Any], int]] = {
    "linear": (Rope(scaling=Linear(factor=4.0)), {"rope_type": "linear", "factor": 4.0}, 8192),
    "dynamic": (
        Rope(scaling=Ntk(factor=2.0, original=4096)),
        {"rope_type": "dynamic", "factor": 2.0, "trained": 4096},
        8192,
    ),
    "dynamic, within": (Rope(scaling=Ntk(factor=2.0)), {"rope_type": "dynamic", "factor": 2.0}, 8192),
    "yarn": (Rope(scaling=Yarn(factor=40.0, original=4096)), YARN, 163_840),
    "yarn, gpt-oss": (
        Rope(theta=150_000.0, scaling=Yarn(factor=32.0, original=4096, truncate=False)),
        YARN | {"factor": 32.0, "truncate": False},
        131_072,
    ),
    "yarn, DeepSeek-V2-Lite": (
        Rope(scaling=Yarn(factor=40.0, original=4096, mscale=0.707, mscale_all=0.707)),
        YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        163_840,
    ),
    "yarn, Kimi K2": (
        Rope(theta=50_000.0, scaling=Yarn(factor=32.0, original=4096, beta_fast=1.0, mscale=1.0, mscale_all=1.0)),
        YARN | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        131_072,
    ),
    "yarn, a step": (
        Rope(scaling=Yarn(factor=32.0, original=4096, beta_fast=2.0, beta_slow=2.0, truncate=False)),
        YARN | {"factor": 32.0, "beta_fast": 2.0, "beta_slow": 2.0, "truncate": False},
        131_072,
    ),
    "yarn, two sharpenings": (
        Rope(scaling=Yarn(factor=40.0, original=4096, mscale=1.3, mscale_all=0.6, beta_fast=8.0, beta_slow=2.0)),
        YARN | {"mscale": 1.3, "mscale_all_dim": 0.6, "beta_fast": 8.0, "beta_slow": 2.0},
        163_840,
    ),
    "llama3": (
        Rope(theta=500_000.0, scaling=Llama3(factor=8.0, original=8192)),
        LLAMA | {"original_max_position_embeddings": 8192},
        131_072,
    ),
    "longrope, short": (Rope(scaling=OF_LISTS), LONGROPE | {"original_max_position_embeddings": 4096}, 4096),
    "longrope, long": (Rope(scaling=OF_LISTS), LONGROPE | {"original_max_position_embeddings": 4096}, 131_072),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [32, 128])
def test_frequencies_are_those_of_transformers(kind: str, width: int) -> None:
    rope, given, context = KINDS[kind]
    if "longrope" in kind and width != 2 * len(SHORT):
        pytest.skip("the lists are for one width")
    given = given | {"rope_theta": rope.theta}
    trained = given.pop("trained", context)
    config = LlamaConfig(
        hidden_size=4 * width, num_attention_heads=4, max_position_embeddings=trained, rope_parameters=given
    )
    expected, factor = ROPE_INIT_FUNCTIONS[given["rope_type"]](config, torch.device("cpu"), seq_len=context)
    ours, our_factor = scaled(rope, width, context)
    torch.testing.assert_close(torch.tensor(ours), expected, rtol=2e-6, atol=0)
    assert our_factor == pytest.approx(factor, rel=1e-12)


def test_scores_are_sharpened_as_deepseek_does() -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_get_mscale

    rope = Rope(scaling=Yarn(factor=40.0, original=4096, mscale=0.7, mscale_all=0.6))
    assert score_factor(rope) == pytest.approx(yarn_get_mscale(40.0, 0.6) ** 2)
    assert (
        score_factor(Rope(scaling=Yarn(factor=40.0, original=4096))) == score_factor(Rope()) == score_factor(None) == 1
    )
