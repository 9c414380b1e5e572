"""docs/from: the formulas are those of the other systems."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.tables import each_row
from torch import Tensor

import moec

FOLDER = Path(__file__).parents[3] / "docs" / "from"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}


# ---- auxiliary losses ---------------------------------------------------------------------------------


def of_logits(logits: Tensor, term: str = "", gate: str = "topk(2)", **more: str) -> moec.MoeLayer:
    """A layer after a pass in which its router's logits are `logits` [tokens, experts]."""
    experts = logits.shape[1]
    words = "; ".join([f"experts = {experts} * gelu(8)", f"gate = {gate}", *(f"{k} = {v}" for k, v in more.items())])
    balance = f"; balance = [{term}]" if term else ""
    layer = moec.layer(f'layer "l" {{ dim = {experts}; dtype = fp32; moe {{ {words}{balance} }} }}', seed=1)
    with torch.no_grad():
        layer.get_parameter("gate.weight").copy_(torch.eye(experts))
    layer.output = layer(logits)
    return layer


def term(name: str, logits: Tensor, k: int = 2) -> float:
    layer = of_logits(logits, f"{name}(1)", f"topk({k})")
    assert layer.aux_loss is not None
    return float(layer.aux_loss.detach())


def counted(logits: Tensor, choices: Tensor) -> Tensor:
    """Choices of each expert, fp32 [experts]."""
    return F.one_hot(choices.flatten(), logits.shape[1]).sum(0).float()


def megatron(logits: Tensor, k: int) -> Tensor:
    """Sums over tokens, scaled at the end: E / (k * tokens²)."""
    tokens, experts = logits.shape
    counts = counted(logits, logits.topk(k).indices)
    return (logits.softmax(-1).sum(0) * counts).sum() * experts / (k * tokens * tokens)


def first_choices(logits: Tensor) -> Tensor:
    """DeepSpeed's for two choices, and Tutel's: the mean over experts of products, times E²."""
    tokens, experts = logits.shape
    return (logits.softmax(-1).mean(0) * counted(logits, logits.argmax(-1)) / tokens).mean() * experts**2


def deepspeed_of_many(logits: Tensor, k: int) -> Tensor:
    tokens, experts = logits.shape
    fractions = counted(logits, logits.topk(k).indices) / tokens
    return (logits.softmax(-1).mean(0) * fractions).mean() * experts**2 / k


def megatron_of_sequence(logits: Tensor, k: int) -> Tensor:
    """`seq_aux_loss` of one sequence: sigmoids over their sum, and the k best of these, whatever the gate chooses."""
    tokens, experts = logits.shape
    scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    return (scores.sum(0) * counted(logits, scores.topk(k).indices)).sum() * experts / (k * tokens * tokens)


def hugging_face(layers: tuple[Tensor, ...], k: int) -> Tensor:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    loss: Tensor = mixtral.load_balancing_loss_func(layers, layers[0].shape[1], k)
    return loss


LOGITS = torch.randn(512, 8, generator=torch.Generator().manual_seed(0)) + torch.arange(8) / 4


def test_the_values_of_the_page_are_those_of_its_logits() -> None:
    values = [float(value) for value in re.findall(r"\| (\d\.\d{4}) \|", PAGES["README"])]
    systems = [term("switch_loss", LOGITS), megatron(LOGITS, 2), first_choices(LOGITS), hugging_face((LOGITS,), 2)]
    assert values == pytest.approx([float(value) for value in systems], abs=5e-5)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_megatrons_auxiliary_loss_and_deepspeeds_of_many_choices_are_switch_loss(k: int) -> None:
    assert term("switch_loss", LOGITS, k) == pytest.approx(float(megatron(LOGITS, k)), rel=1e-5)
    assert term("switch_loss", LOGITS, k) == pytest.approx(float(deepspeed_of_many(LOGITS, k)), rel=1e-5)


def test_megatrons_loss_of_a_sequence_is_sequence_loss_whatever_the_gate_chooses() -> None:
    gate = "topk(2, score = sigmoid, normalize = true, groups = 4, keep_groups = 1)"
    values = {}
    for name in ("sequence_loss", "switch_loss"):
        layer = of_logits(LOGITS, f"{name}(1)", gate)
        assert layer.aux_loss is not None
        values[name] = float(layer.aux_loss.detach())
    assert values["sequence_loss"] == pytest.approx(float(megatron_of_sequence(LOGITS, 2)), rel=1e-5)
    assert abs(values["switch_loss"] - values["sequence_loss"]) > 1e-2


@each_row(("k", "experts"), [(2, 8), (8, 128)])
def test_weights_that_are_not_divided_are_as_small_as_the_page_says(k: int, experts: int) -> None:
    (said,) = re.findall(
        rf"{k} of (?:{experts}) experts sum to (0\.\d+)|of {k} of {experts} to (0\.\d+)", PAGES["megatron"]
    )
    logits = torch.randn(4096, experts, generator=torch.Generator().manual_seed(0))
    chosen = logits.softmax(-1).topk(k).values.sum(-1).mean()
    assert float(chosen) == pytest.approx(float("".join(said)), abs=0.01)


def test_topk_of_equal_numbers_keeps_as_many_tokens_as_token_order_and_not_the_same() -> None:
    """Megatron's `position` and DeepSpeed without `use_rts`: places by `torch.topk` of a mask of ones and zeros."""
    tokens, experts, places = 64, 4, 8
    chosen = torch.randint(experts, (tokens,), generator=torch.Generator().manual_seed(0))
    mask = F.one_hot(chosen, experts)
    kept = mask * torch.zeros_like(mask).scatter_(0, mask.topk(places, dim=0).indices, 1)
    first = mask * (mask.cumsum(0) <= places)
    assert torch.equal(kept.sum(0), first.sum(0))
    assert not torch.equal(kept, first)


def test_deepspeeds_and_tutels_auxiliary_loss_of_two_choices_is_gshard_loss_and_not_switch_loss() -> None:
    assert term("gshard_loss", LOGITS) == pytest.approx(float(first_choices(LOGITS)), rel=1e-5)
    assert abs(term("switch_loss", LOGITS) - float(first_choices(LOGITS))) > 1e-3


def test_all_auxiliary_losses_of_one_choice_are_the_same() -> None:
    values = [megatron(LOGITS, 1), first_choices(LOGITS), hugging_face((LOGITS,), 1)]
    assert [float(value) for value in values] == pytest.approx([term("switch_loss", LOGITS, 1)] * 3, rel=1e-5)
    assert term("gshard_loss", LOGITS, 1) == pytest.approx(term("switch_loss", LOGITS, 1), rel=1e-5)


@pytest.mark.parametrize("k", [2, 4])
def test_hugging_faces_auxiliary_loss_is_converted_by_k_over_the_layers_where_they_load_alike(k: int) -> None:
    coefficient, layers = 0.02, 3
    alike = (LOGITS, LOGITS.flip(0), LOGITS.roll(7, 0))
    here = sum(term("switch_loss", logits, k) for logits in alike) * coefficient * k / layers
    assert here == pytest.approx(coefficient * float(hugging_face(alike, k)), rel=1e-5)


def test_hugging_faces_pooled_loss_is_smaller_where_layers_load_other_experts() -> None:
    opposite = (LOGITS, LOGITS.flip(1))
    here = sum(term("switch_loss", logits) for logits in opposite) * 2 / 2
    assert float(hugging_face(opposite, 2)) < here - 0.1


def test_tutels_importance_loss_has_another_variance() -> None:
    sums = LOGITS.softmax(-1).sum(0)
    tutels = float(sums.var() / sums.mean() ** 2)
    layer = of_logits(LOGITS, "importance_loss(1)", "dense")
    assert layer.aux_loss is not None
    assert float(layer.aux_loss.detach()) == pytest.approx(tutels * 7 / 8, rel=1e-4)


# ---- places, weights, jitter, decay ---------------------------------------------------------------------

CAPACITIES: dict[str, Callable[[float, int, int, int], int]] = {
    "megatron": lambda factor, k, tokens, experts: math.ceil(tokens * k / experts * factor),
    "deepspeed": lambda factor, k, tokens, experts: max(4, math.ceil(tokens / experts * (factor * k))),
    "tutel": lambda factor, k, tokens, experts: k * int(factor * ((tokens + experts - 1) // experts)),
}


@each_row("tokens", [24, 50, 100])
@each_row("factor", [0.5, 1.0, 1.25])
@each_row("system", CAPACITIES)
def test_experts_have_the_places_that_the_page_says(system: str, factor: float, tokens: int) -> None:
    """All tokens want experts 0 and 1 of 8, which then have as many rows as places."""
    wanted = CAPACITIES[system](factor, 2, tokens, 8)
    if system == "tutel":
        factor = int(factor * math.ceil(tokens / 8)) * 8 / tokens
    least = ", min = 4" if system == "deepspeed" else ""
    logits = torch.tensor([2.0, 1.0, *[0.0] * 6]).expand(tokens, 8)
    layer = of_logits(logits, capacity=f"factor({factor!r}{least})", group="rank")
    assert layer.expert_counts.tolist() == [wanted, wanted, *[0] * 6]


def test_softmax_of_the_chosen_logits_is_the_normalised_softmax_of_all() -> None:
    of_all, of_chosen = (of_logits(LOGITS, gate=f"topk(2, {how})") for how in ("normalize = true", "order = after"))
    assert torch.allclose(of_all.output, of_chosen.output, atol=1e-6)


def test_mixtrals_jitter_changes_what_its_experts_get_and_moecs_does_not() -> None:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = mixtral.MixtralConfig(hidden_size=8, intermediate_size=8, num_local_experts=4, router_jitter_noise=0.5)
    config._experts_implementation = "eager"
    block = mixtral.MixtralSparseMoeBlock(config).train()
    given = torch.randn(1, 4, 8)
    got = given.clone()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_()
        block(got)
    assert not torch.equal(got, given)
    # With one expert the router decides nothing: only the experts' own input could change the result.
    file = """
    model "m" {{
      vocab = 32; dim = 8; depth = 1; dtype = fp32
      layers {{ attention = mha(heads = 2); moe {{ experts = {} * gelu(8); gate = topk(1{}) }} }}
    }}
    train {{ batch = 2; sequence = 8 }}
    """
    tokens = torch.arange(16).reshape(2, 8)
    for experts in (1, 4):
        models = (moec.reference(file.format(experts, jitter)).train() for jitter in ("", ", jitter = 0.5"))
        still, jittered = (model(tokens).logits for model in models)
        assert torch.equal(still, jittered) == (experts == 1)


def test_no_bias_and_no_vector_decays() -> None:
    file = """
    model "m" {
      vocab = 32; dim = 16; depth = 2; dtype = fp32; embedding = tokens(positions = learned); norm = layer_norm()
      layers {
        attention = gqa(heads = 4, kv_heads = 2, bias = all, sinks = true)
        moe { experts = 4 * swiglu(8, bias = true); gate = topk(2, bias = learned); residual = gelu(8) }
      }
    }
    train { batch = 2; sequence = 8 }
    """
    for name, parameter in moec.compile(file).parameters.items():
        assert parameter.decays == (len(parameter.shape) > 1 and not name.endswith("bias")), name


def test_new_weights_have_the_deviations_of_the_page() -> None:
    model = moec.reference(
        'model "m" { vocab = 64; dim = 128; depth = 8; dtype = fp32; '
        "layers { attention = mha(heads = 4); moe { experts = 8 * swiglu(128); gate = topk(2) } } } "
        "train { batch = 2; sequence = 8 }"
    )
    for name in ("layers.0.moe.experts.up.weight", "layers.3.attention.q.weight", "embedding.weight"):
        assert float(model.get_parameter(name).detach().std()) == pytest.approx(0.02, rel=0.05)
    for name in ("layers.0.moe.experts.down.weight", "layers.3.attention.o.weight"):
        assert float(model.get_parameter(name).detach().std()) == pytest.approx(0.02 / 4, rel=0.05)
