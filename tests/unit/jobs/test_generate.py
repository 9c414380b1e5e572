"""Generation with a cache gives the tokens of full recomputation, for every kind of model that can generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.combinations import some
from support.plans import moe_spec
from support.recomputed_generation import lively, recomputed, uneven

import moec
from moec.grammar import load_file
from moec.runtime.errors import JobError
from moec.runtime.host.reference import reference

WORDS = sorted((Path(__file__).parents[2] / "words").glob("*.moe"))
REFUSED = {
    "02_paths": "a capacity",
    "03_ranks": "a capacity",
    "13_places": "causal = false",
    "14_group_gates": "causal = false",
    "15_experts": "`conv`",
    "16_images": "a model of images",
    "17_gray_images": "a model of images",
    "18_replay": "a capacity",
    "19_segments": "a capacity",
    "21_topology": "a capacity",
    "22_heads": "causal = false",
    "24_class_token": "a model of images",
}
"""Files of words that cannot generate, and a word of why."""


def of_words(path: Path) -> Any:
    spec = load_file(path).unwrap()
    if not spec.has_model:
        pytest.skip("the file of one layer")
    return reference(spec, seed=3, dtype=torch.float32)


@pytest.mark.parametrize("path", [p for p in WORDS if p.stem not in REFUSED], ids=lambda path: path.stem)
def test_files_of_words_generate_the_tokens_of_full_recomputation(path: Path) -> None:
    model = lively(of_words(path))
    context = model.limits.context
    lengths = (context // 2, 1, max(1, context // 2 - 1))
    prompts = uneven(model.limits.vocab, lengths, without=model.limits.padding)
    new = context - context // 2
    expected = recomputed(model, prompts, new)
    assert torch.equal(model.generate(prompts, max_new_tokens=new).tokens, expected)


@pytest.mark.parametrize("stem", sorted(REFUSED))
def test_files_of_words_that_look_at_later_tokens_are_refused(stem: str) -> None:
    model = of_words(next(path for path in WORDS if path.stem == stem))
    with pytest.raises(JobError, match="MOE0741") as error:
        model.generate(torch.ones(1, 2, dtype=torch.int64), max_new_tokens=2)
    assert REFUSED[stem] in str(error.value)


KINDS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "one kv head": {"attention": "gqa(heads = 4, kv_heads = 1, rope = rope())"},
    "no positions": {"attention": "mha(heads = 4)"},
    "learned positions": {"model": "embedding = tokens(positions = learned)", "attention": "mha(heads = 4)"},
    "window": {"attention": "gqa(heads = 4, kv_heads = 2, window = 3, rope = rope())"},
    "window of one": {"attention": "mha(heads = 4, window = 1, rope = rope())"},
    "sinks": {"attention": "gqa(heads = 4, kv_heads = 2, sinks = true, rope = rope())"},
    "sinks and a window": {"attention": "gqa(heads = 4, kv_heads = 2, sinks = true, window = 4)"},
    "multiplier and clip": {"attention": "mha(heads = 4, multiplier = 0.3, clip = 0.8, rope = rope())"},
    "biases and norms": {"bias": "all", "qk_norm": "head"},
    "norms over heads": {"qk_norm": "projection"},
    "interleaved": {"attention": "mha(heads = 2, rope = rope(interleaved = true, fraction = 0.5))"},
    "yarn": {"attention": "mha(heads = 2, rope = rope(scaling = yarn(4, original = 8)))"},
    "ntk": {"attention": "mha(heads = 2, rope = rope(scaling = ntk(2, original = 8)))"},
    "llama3": {"attention": "mha(heads = 2, rope = rope(scaling = llama3(4, low = 1, high = 3, original = 7)))"},
    "linear scaling": {"attention": "mha(heads = 2, rope = rope(scaling = linear(2.5)))"},
    "mla": {"attention": "mla(heads = 4, kv_rank = 8, nope_dim = 4, rope_dim = 2, value_dim = 6, rope = rope())"},
    "mla, wide values": {
        "attention": "mla(heads = 4, q_rank = 6, kv_rank = 8, nope_dim = 4, rope_dim = 2, value_dim = 9, rope = rope())"
    },
    "mla, narrow values": {
        "attention": "mla(heads = 4, kv_rank = 8, nope_dim = 4, rope_dim = 6, value_dim = 3, rope = rope(), window = 3)"
    },
    "moa": {"attention": "moa(heads = 2, experts = 4, gate = topk(2), rope = rope())"},
    "moa, window": {
        "attention": "moa(heads = 2, kv_heads = 1, experts = 4, gate = topk(2), qk_norm = head, window = 3)"
    },
    "padding": {"model": "embedding = tokens(padding = 3)"},
    "given padding": {"model": "embedding = tokens(padding = given)"},
    "separator": {"model": "embedding = tokens(separator = 5)"},
    "separator and a window": {
        "model": "embedding = tokens(separator = 5, positions = learned)",
        "attention": "gqa(heads = 4, kv_heads = 2, window = 3, sinks = true, rope = rope())",
    },
    "segments": {"model": "embedding = tokens(segments = true)"},
    "tied": {"model": "embedding = tokens(tied = true, multiplier = 2.0, logits_multiplier = 0.5)"},
    "norms after": {"model": "norm_place = post; norm = layer_norm(bias = true)"},
    "parallel residual": {"model": "parallel_residual = one_norm"},
    "shared and residual": {"beside": "shared = swiglu(8, gated = true); residual = gelu(8)"},
    "a list of experts": {"experts": "[4 * swiglu(8), 2", "expert": "gelu(5)]"},
    "switch": {"gate": "switch"},
    "switch, jitter": {"gate": "switch(jitter = 0.1)"},
    "sigmoid, groups, online": {
        "gate": "topk(2, score = sigmoid, normalize = true, scale = 2.5, groups = 4, keep_groups = 2, "
        "bias = online(0.01))"
    },
    "gshard": {"gate": "gshard", "balance": "[]"},
    "noisy": {"gate": "noisy_topk(2)", "balance": "[]"},
    "sparsemixer": {"gate": "sparsemixer(2)", "balance": "[]"},
    "hash": {"gate": "hash(2)", "balance": "[]"},
    "base": {"gate": "base", "balance": "[]"},
    "dselect_k": {"gate": "dselect_k(2)", "balance": "[]"},
    "attention_router": {"gate": "attention_router(2)", "balance": "[]"},
    "dense gate": {"gate": "dense", "balance": "[]"},
    "dynamic": {"beside": "capacity = dynamic()"},
    "a capacity for all": {"beside": "capacity = factor(1.0, eval = 4.0)"},
    "a capacity for all, of the batch": {"beside": "capacity = factor(1.0, eval = 4.0); group = batch"},
    "lora": {"expert": "lora(3, alpha = 8)", "ffn": "lora(2)"},
    "relu2 with biases": {"expert": "relu2(8, bias = true)", "ffn": "swiglu(8, bias = true)"},
}


IN_A_LAYER = ("attention", "gate", "balance", "beside")
"""Options that a layer may have and its neighbours not."""


def layers_of(kinds: dict[str, dict[str, Any]]) -> list[str]:
    """A layer for each kind that needs no option of the whole model."""
    found = []
    for given in kinds.values():
        if given and set(given) <= {*IN_A_LAYER}:
            words = "; ".join(f"{name} = {given[name]}" for name in ("gate", "balance") if name in given)
            moe = f"moe {{ {words}; {given.get('beside', '')} }}"
            found.append(f"attention = {given['attention']}" if "attention" in given else moe)
    return found


def of_models() -> list[dict[str, Any]]:
    """The other kinds, each with its share of the layers."""
    others = [given for given in KINDS.values() if not set(given) <= {*IN_A_LAYER}]
    layers = layers_of(KINDS)
    return [{**given, "layers": layers[place :: len(others)]} for place, given in enumerate(others)]


def require_tokens_of_full_recomputation(options: dict[str, Any], lengths: tuple[int, ...], new: int) -> None:
    model = lively(moec.reference(moe_spec(ranks=1, ep=1, sequence=16, **options), seed=1))
    prompts = uneven(32, lengths, without=model.limits.padding)
    expected = recomputed(model, prompts, new)
    assert len({tuple(row) for row in expected.tolist()}) > 1
    given = torch.stack(prompts) if len(set(lengths)) == 1 else prompts
    assert torch.equal(model.generate(given, max_new_tokens=new).tokens, expected)


@pytest.mark.parametrize("options", of_models(), ids=str)
def test_models_of_many_kinds_generate_the_tokens_of_full_recomputation(options: dict[str, Any]) -> None:
    require_tokens_of_full_recomputation(options, (6, 2, 9, 1), 7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_generates_the_tokens_of_full_recomputation(kind: str) -> None:
    require_tokens_of_full_recomputation(KINDS[kind], (6, 2, 9, 1), 7)


OF_ONE_LENGTH = ["gqa", "window", "sinks and a window", "mla", "learned positions", "separator"]


@pytest.mark.parametrize("kind", some(OF_ONE_LENGTH, ["sinks and a window", "mla", "separator"]))
def test_prompts_of_one_length_generate_the_tokens_of_full_recomputation(kind: str) -> None:
    require_tokens_of_full_recomputation(KINDS[kind], (6, 6, 6), 9)


GATES = {
    "expert_choice(2)": "`expert_choice`",
    "soft": "`soft`",
    "smear": "`smear`",
    "batch_priority(2)": "a capacity",
}


@pytest.mark.parametrize("gate", GATES)
def test_gates_that_look_at_other_tokens_are_refused_at_their_line(gate: str) -> None:
    beside = "capacity = factor(1.0)" if "priority" in gate else ""
    model = moec.reference(moe_spec(ranks=1, ep=1, gate=gate, balance="[]", beside=beside))
    with pytest.raises(JobError, match="MOE0741") as error:
        model.generate(torch.ones(1, 2, dtype=torch.int64), max_new_tokens=2)
    assert GATES[gate] in str(error.value)
    assert "layer 1 (tiny.moe:" in str(error.value)
