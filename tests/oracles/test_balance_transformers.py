"""The balance term over all layers against transformers' `load_balancing_loss_func`, in whole models.

Theirs is k times ours: each of the k choices counts in full. It is over the tokens of all layers and of all sequences
of a forward pass; tokens that the attention mask leaves out do not count.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracles.specs import SEQUENCE, VOCAB, small_spec
from oracles.test_mixtral_transformers import MODELS, our_name, ours_with_weights_of, shifted, text
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainingArguments

from moec.driver import compile as compile_source
from moec.grammar.foreign.lookup import elsewhere
from moec.runtime.model.module import PlanModule
from moec.runtime.verify.cluster.virtual import VirtualCluster

ORACLE_OF = {
    "switch_loss": "over",
}

K, COEFFICIENT = 2, 0.3
TERM = f"balance = [switch_loss({K * COEFFICIENT}, over = model)]; group = batch"


def balanced(name: str) -> tuple[PreTrainedModel, str]:
    """Their model, which adds its term to the loss, and the layers of ours with the same term."""
    make, layers = MODELS[name]
    theirs = make()
    theirs.config.output_router_logits = True
    theirs.router_aux_loss_coef = COEFFICIENT
    plain = "moe { experts = 6 * swiglu(20); gate = topk(2, normalize = true)"
    assert plain in layers
    return theirs, layers.replace(plain, f"{plain}; {TERM}").replace("; balance = [] }", " }")


def require_gradients_of(theirs: PreTrainedModel, ours: PlanModule) -> None:
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    for name, parameter in theirs.named_parameters():
        gradient = gradients[our_name(name)].view(parameter.shape)
        scale = float(parameter.grad.abs().max())
        assert float((gradient - parameter.grad).abs().max()) <= 1e-5 * scale, name


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_theirs(name: str) -> None:
    theirs, layers = balanced(name)
    ours, tokens = ours_with_weights_of(theirs, layers), text()
    expected, output = theirs(tokens, labels=tokens), ours(tokens, shifted(tokens))
    assert expected.aux_loss > 1
    torch.testing.assert_close(output.aux_loss, COEFFICIENT * expected.aux_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
    expected.loss.backward()
    output.loss.backward()
    require_gradients_of(theirs, ours)


def test_a_term_of_each_layer_is_another() -> None:
    theirs, layers = balanced("mixtral")
    of_layers = layers.replace(", over = model", "").replace(str(K * COEFFICIENT), str(K * COEFFICIENT / 3))
    tokens = text()
    found = [ours_with_weights_of(theirs, words)(tokens, tokens).aux_loss.item() for words in (layers, of_layers)]
    assert abs(found[0] / found[1] - 1) > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_masked_tokens_do_not_count(name: str) -> None:
    theirs, layers = balanced(name)
    tokens, lengths = text(), torch.tensor([SEQUENCE, 5, 9])
    padding = torch.arange(SEQUENCE) >= lengths[:, None]
    expected = theirs(tokens, attention_mask=(~padding).long(), labels=tokens.masked_fill(padding, -100))
    ours = ours_with_weights_of(theirs, layers, embedding="tokens(padding = given)")
    output = ours(tokens, shifted(tokens.masked_fill(padding, -100)), padding=padding)
    torch.testing.assert_close(output.aux_loss, COEFFICIENT * expected.aux_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
    whole = theirs(tokens, labels=tokens).aux_loss
    assert abs(whole / expected.aux_loss - 1) > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_under_trainer_the_weight_is_theirs_times_k_and_the_accumulated_parts(name: str, tmp_path: Path) -> None:
    said, parts = elsewhere("router_aux_loss_coef").said(str(COEFFICIENT)), 2
    assert f"under `Trainer` WEIGHT is {COEFFICIENT} * k times the accumulated micro-batches" in said
    theirs, layers = balanced(name)
    ours = ours_with_weights_of(theirs, layers.replace(f"({K * COEFFICIENT}", f"({K * COEFFICIENT * parts}"))
    options = TrainingArguments(str(tmp_path), gradient_accumulation_steps=parts, use_cpu=True, report_to=[])
    trainer = Trainer(theirs, options)
    batches = [{"input_ids": tokens, "labels": tokens} for tokens in (text(), text().flip(0, 1))]
    batches, labels = trainer.get_batch_samples(iter(batches), parts, torch.device("cpu"))
    expected = torch.stack([trainer.training_step(theirs, batch, labels) for batch in batches]).sum()
    loss = torch.stack([ours(batch["input_ids"], shifted(batch["labels"])).loss for batch in batches]).mean()
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=0)
    require_gradients_of(theirs, ours)


@pytest.mark.parametrize(("parts", "group"), [(1, "batch"), (2, "batch"), (1, "rank")])
def test_on_two_ranks_it_is_theirs_of_what_a_group_is(parts: int, group: str) -> None:
    """`batch`: theirs of each micro-batch of all ranks; `rank`: of what a process sees, as under data parallelism."""
    theirs, layers = balanced("qwen3")
    ours = ours_with_weights_of(theirs, layers)
    text_of_plan = small_spec(layers.replace("group = batch", f"group = {group}"), dim=32, depth=3, ranks=2, batch=4)
    plan = compile_source(text_of_plan)
    assert plan.meshes["dense"].size("dp") == 2
    tokens = torch.randint(VOCAB, (4, SEQUENCE), generator=torch.Generator().manual_seed(3))
    of_rank: list[Tensor] = [tokens.chunk(2)[plan.data_rank(rank)] for rank in range(2)]
    cluster = VirtualCluster(plan, dict(ours.named_parameters()))
    step = cluster.step(of_rank, [shifted(part) for part in of_rank], microbatches=parts)
    step.run()
    if group == "batch":
        seen = [torch.cat([part.chunk(parts)[index] for part in of_rank]) for index in range(parts)]
    else:
        seen = of_rank
    assert len(seen) * len(seen[0]) == 4
    expected = torch.stack([theirs(part, labels=part).loss for part in seen]).mean()
    for loss in step.stage_values.scalars["loss"]:
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
