"""When later tokens change what earlier ones get, found by running the reference; MOE0322 warns then and only then.

Whether a router gets a gradient from the loss, found the same way; MOE0321 warns if it does not.
"""

from __future__ import annotations

import pytest
import torch
from support.session import extent

from moec.grammar import load_text
from moec.grammar.load import Loaded
from moec.runtime.host.reference import reference
from moec.runtime.model.module import PlanModule

MODEL = """
model "m" {{
  vocab = 16; dim = 8; depth = 2; context = 12; dtype = fp32
  layers {{ attention = mha(heads = 2); moe {{ experts = 4 * gelu(8); gate = {gate}; {beside} }} }}
}}
train {{ batch = 4; sequence = 12 }}
"""
BATCH, SEQUENCE = 2, 12


def load(gate: str, beside: str = "") -> Loaded:
    return load_text(MODEL.format(gate=gate, beside=beside))


def warned(loaded: Loaded) -> list[str]:
    return [found.code for found in loaded.diagnostics]


def model_of(loaded: Loaded, seed: int) -> PlanModule:
    """The reference in float64 with weights so large that experts differ and are chosen unevenly."""
    model = reference(loaded.unwrap(), seed=seed, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1 if "norm" in name else 20)
    return model


def logits_of(model: PlanModule, tokens: torch.Tensor) -> torch.Tensor:
    """Logits with the random numbers of one step, whatever was computed before."""
    model.set(step=1)
    return model(tokens).logits


def change(loaded: Loaded, *, train: bool, expected: bool, of: str = "before") -> float:
    """The change of logits when one token of the first sequence is another.

    `of` the tokens "before" it, or of the "other" sequence. The largest over some models, tokens and places, or the
    first that counts as a change. Where none is expected, `make test-all` tries more models.
    """
    largest = 0.0
    for seed in range(6 if expected or extent.everything else 2):
        model = model_of(loaded, seed).train(train)
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(16, (BATCH, SEQUENCE), generator=generator)
        with torch.no_grad():
            logits = logits_of(model, tokens)
            for place in range(1, SEQUENCE, 2):
                changed = tokens.clone()
                changed[0, place] = (tokens[0, place] + 1 + seed) % 16
                difference = (logits_of(model, changed) - logits).abs()
                part = difference[0, :place] if of == "before" else difference[1]
                largest = max(largest, part.max().item())
                if largest > ANOTHER:
                    return largest
    return largest


SAME, ANOTHER = 1e-10, 1e-4


def assert_changed(difference: float, expected: bool) -> None:
    assert difference > ANOTHER if expected else difference < SAME


@pytest.mark.parametrize(
    ("gate", "beside", "in_training", "in_evaluation"),
    [
        ("topk(2)", "capacity = factor(0.5)", True, True),
        ("topk(2, normalize = true)", "capacity = factor(1.0)", True, True),
        ("topk(3, order = after)", "capacity = factor(0.5)", True, True),
        ("topk(2)", "capacity = dynamic(max = 0.6)", True, True),
        ("topk(2)", "capacity = factor(0.5); group = batch", True, True),
        ("topk(2)", "capacity = factor(0.5); group = rank", True, True),
        ("topk(2)", "capacity = factor(0.5, eval = 2.0)", True, False),
        ("topk(2)", "capacity = factor(2.0, eval = 0.5)", False, True),
        ("topk(2)", "", False, False),
        ("topk(2)", "capacity = dynamic()", False, False),
        ("topk(2)", "capacity = factor(2.0)", False, False),
        ("topk(2)", "capacity = factor(2.0); group = batch", False, False),
        ("topk(2)", "capacity = factor(0.5, min = 12)", False, False),
        ("topk(3)", "capacity = factor(4 / 3)", False, False),
        ("topk(1)", "capacity = factor(0.5)", False, False),
        ("topk(1)", "capacity = factor(0.5, order = priority)", True, True),
        ("topk(2)", "capacity = dynamic(max = 0.6, order = priority); group = batch", True, True),
        ("topk(1)", "capacity = factor(0.5, order = weight)", True, True),
        ("topk(2)", "capacity = factor(0.5, order = token)", False, False),
        ("topk(2)", "capacity = factor(0.5, order = token); group = batch", False, False),
        ("topk(1)", "capacity = factor(0.5, order = random)", True, False),
        ("topk(1)", "capacity = factor(0.5); overflow = reroute", True, True),
        ("topk(2)", "capacity = factor(2.0); overflow = reroute", False, False),
        ("topk(1)", "capacity = factor(0.5); overflow = pad", False, False),
        ("batch_priority(1)", "capacity = factor(0.5)", True, True),
        ("batch_priority(2)", "capacity = factor(2.0)", False, False),
        ("topk(2)", "capacity = factor(2.0, eval = 0.5, order = random)", False, True),
        ("topk(2)", "capacity = factor(2.0, order = priority)", False, False),
        ("gshard", "", False, False),
        ("gshard", "capacity = factor(0.5)", True, True),
        ("noisy_topk(2)", "capacity = factor(0.5)", True, True),
        ("noisy_topk(1)", "capacity = factor(0.5)", False, False),
        ("sparsemixer(2)", "capacity = factor(0.5)", True, True),
        ("sparsemixer(1)", "capacity = factor(0.5)", False, False),
        ("attention_router(2)", "capacity = factor(0.5)", True, True),
        ("hash(2)", "capacity = factor(0.5)", True, True),
        ("hash(1)", "capacity = factor(0.5)", False, False),
        ("topk(2, groups = 2, keep_groups = 1)", "capacity = factor(0.5)", True, True),
        ("topk(2, bias = learned)", "capacity = factor(0.5)", True, True),
        ("dense", "capacity = factor(0.5)", True, True),
        ("dense", "capacity = factor(1.0)", False, False),
        ("dselect_k(2)", "capacity = factor(0.5)", False, False),
        ("dselect_k(2)", "capacity = factor(0.3, order = priority)", True, True),
        ("dselect_k(2)", "capacity = factor(1.0, order = priority)", False, False),
        ("dselect_k(2)", "capacity = factor(1.25, order = priority)", False, False),
        ("switch", "capacity = factor(0.5)", False, False),
        ("switch", "capacity = dynamic(max = 0.6)", False, False),
        ("switch", "capacity = factor(0.5); group = batch", False, False),
        ("switch", "capacity = factor(0.5); group = rank", False, False),
    ],
)
def test_a_warning_stands_where_later_tokens_change_earlier_ones(
    gate: str, beside: str, in_training: bool, in_evaluation: bool
) -> None:
    loaded = load(gate, beside)
    for train, expected in ((True, in_training), (False, in_evaluation)):
        assert_changed(change(loaded, train=train, expected=expected), expected)
    found = [one for one in loaded.diagnostics if one.code == "MOE0322"]
    assert len(found) == (in_training or in_evaluation)
    for one in found:
        assert ("training" in one.message, "evaluation" in one.message) == (in_training, in_evaluation)


@pytest.mark.parametrize(("group", "mixes"), [("sequence", False), ("batch", True), ("rank", True)])
def test_only_a_group_of_several_sequences_lets_one_change_another(group: str, mixes: bool) -> None:
    loaded = load("switch", f"capacity = factor(0.5); group = {group}")
    for train in (True, False):
        assert_changed(change(loaded, train=train, expected=mixes, of="other"), mixes)


def test_a_longer_sequence_has_more_places_so_that_its_start_is_not_what_it_was_alone() -> None:
    """Also with one choice per token: the number of later tokens matters, not their ids."""
    model = model_of(load("switch", "capacity = factor(0.5)"), seed=0)
    tokens = torch.randint(16, (1, SEQUENCE), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (model(tokens).logits[:, :8] - model(tokens[:, :8]).logits).abs().max().item()
    assert_changed(difference, True)


@pytest.mark.parametrize(("gate", "places"), [("dense", 12), ("dselect_k(2)", 12), ("topk(3)", 9), ("switch", 3)])
def test_least_places_are_compared_with_those_of_all_choices(gate: str, places: int) -> None:
    """MOE0320: `ceil(choices · 12 / 4)` places, with 4 choices of a token for `dense` and `dselect_k`."""
    for least in (places, places + 1):
        found = warned(load(gate, f"capacity = factor(0.5, eval = 1.0, min = {least})"))
        assert ("MOE0320" in found) == (least > places)


def test_layers_that_share_a_block_share_the_warning() -> None:
    assert warned(load("topk(2)", "capacity = factor(0.5)")) == ["MOE0322"]
    assert warned(load("topk(1, normalize = true)")) == ["MOE0321"]


def test_layers_that_differ_beside_a_capacity_share_its_warning() -> None:
    text = MODEL.format(gate="topk(2)", beside="capacity = factor(0.5)").replace(
        "}\ntrain", "  layers 1 { moe { experts = 8 * gelu(8) } }\n}\ntrain"
    )
    assert warned(load_text(text)) == ["MOE0322"]


def test_a_model_that_is_not_causal_is_not_warned() -> None:
    text = MODEL.format(gate="topk(2)", beside="capacity = factor(0.5)").replace(
        "heads = 2", "heads = 2, causal = false"
    )
    assert warned(load_text(text)) == []


@pytest.mark.parametrize(
    ("gate", "learns"),
    [
        ("topk(1); capacity = factor(4, renormalize = true)", False),
        ("switch; capacity = factor(0.5, order = token, renormalize = true)", False),
        ("topk(2); capacity = factor(0.5, order = token, renormalize = true)", True),
        ("topk(1, normalize = true)", False),
        ("topk(1, score = sigmoid, normalize = true)", False),
        ("topk(1, order = after, normalize = true)", False),
        ("topk(1, order = after)", False),
        ("topk(1, score = sigmoid, order = after)", True),
        ("topk(1)", True),
        ("switch", True),
        ("noisy_topk(1)", False),
        ("noisy_topk(2)", True),
        ("sparsemixer(1, jitter = 0.5)", True),
        ("batch_priority(1)", True),
        ("base", True),
        ("attention_router(1)", False),
        ("topk(2, normalize = true)", True),
        ("topk(2, order = after)", True),
        ("topk(1, normalize = true, bias = learned)", False),
        ("topk(1, groups = 2, keep_groups = 1)", True),
        ("attention_router(2)", True),
        ("gshard", True),
        ("dense", True),
        ("expert_choice(1)", True),
        ("soft", True),
        ("smear", True),
    ],
)
def test_a_warning_stands_where_the_router_gets_no_gradient(gate: str, learns: bool) -> None:
    loaded = load(gate)
    model = model_of(loaded, seed=1)
    tokens = torch.randint(16, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    model(tokens, tokens.roll(-1, 1)).loss.backward()
    routers = [parameter.grad for name, parameter in model.named_parameters() if name.endswith("moe.gate.weight")]
    assert len(routers) == 2
    for gradient in routers:
        assert_changed(gradient.abs().max().item(), learns)
    assert ("MOE0321" in warned(loaded)) != learns


def test_the_importance_of_weights_that_are_all_1_does_not_train_a_router() -> None:
    loaded = load("noisy_topk(1)", "balance = [importance_loss(1.0)]")
    assert warned(loaded) == ["MOE0321"]
    model = model_of(loaded, seed=1)
    tokens = torch.randint(16, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    model(tokens, tokens.roll(-1, 1)).loss.backward()
    gates = [parameter.grad for name, parameter in model.named_parameters() if ".moe.gate." in name]
    assert len(gates) == 4
    assert all(gradient is None or gradient.abs().max() < SAME for gradient in gates)


def test_a_router_of_one_expert_has_nothing_to_learn_and_no_warning() -> None:
    text = MODEL.format(gate="topk(1, normalize = true)", beside="").replace("4 * gelu", "1 * gelu")
    assert warned(load_text(text)) == []
