"""moec's reference beside a handwritten model: the same large parameters, a batch, the same results and gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from oracles.specs import BATCH, SEQUENCE, VOCAB
from plain_moe import PlainModel
from plain_weights import plain_state_dict
from torch import Generator, Tensor

from moec.grammar.spec import Spec
from moec.runtime.host.reference import reference
from moec.runtime.model.model_output import ModelOutput
from moec.runtime.model.module import PlanModule
from moec.runtime.verify.unsharded import training_loss

TIGHT = {"rtol": 1e-10, "atol": 1e-10}
PADDING, SEPARATOR = 3, 7


def spread(model: PlanModule, seed: int = 1) -> dict[str, Tensor]:
    """Draws the model's parameters so large that no term is negligible; returns copies of them, by name."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            deviation = 0.3 if parameter.dim() > 1 else 0.1
            parameter += deviation * torch.randn(parameter.shape, generator=generator).to(parameter)
    return {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}


def enlarge(model: PlanModule) -> Generator:
    """As `spread`, vectors as much as matrices; returns the generator, which draws what a test needs next."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return generator


def copy_parameters(ours: PlanModule, plain: PlainModel) -> None:
    """Gives `plain` the parameters of `ours`."""
    plain.load_state_dict(plain_state_dict(dict(ours.named_parameters())))


def pair(spec: Spec) -> tuple[PlanModule, PlainModel, Generator]:
    """moec's reference and the handwritten model with the same large parameters, and the generator of these."""
    ours, plain = reference(spec, dtype=torch.float64), PlainModel(spec, torch.float64)
    generator = enlarge(ours)
    copy_parameters(ours, plain)
    return ours, plain, generator


def batch(generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """Random tokens and labels."""
    generator = generator or torch.Generator().manual_seed(2)
    tokens, labels = torch.randint(VOCAB, (2, BATCH, SEQUENCE), generator=generator)
    return tokens, labels


def packed_and_padded() -> Tensor:
    """Tokens: texts end in some places; one sequence begins and one ends with padding."""
    tokens = batch()[0]
    tokens[(tokens == PADDING) | (tokens == SEPARATOR)] = 11
    tokens[0, 4] = tokens[1, 0] = tokens[1, 8] = tokens[2, 6] = SEPARATOR
    tokens[1, 10:] = tokens[2, :3] = PADDING
    return tokens


def require_same(
    ours: PlanModule, plain: PlainModel, tokens: Tensor, labels: Tensor, *, evaluated: bool = False, **given: Tensor
) -> ModelOutput:
    """Logits, loss with balance terms and gradients are the same, and, if `evaluated`, the logits in evaluation."""
    output = ours(tokens, labels, **given)
    require_results(ours, plain, (output.logits, training_loss(ours, output)), plain(tokens, labels))
    if evaluated:
        with torch.no_grad():
            torch.testing.assert_close(ours.eval()(tokens).logits, plain.eval()(tokens)[0], **TIGHT)
    return output


def require_results(
    ours: PlanModule, plain: PlainModel, found: tuple[Tensor, ...], expected: tuple[Tensor, ...]
) -> None:
    """The results are the same, of which the last is the loss, and so are its gradients."""
    torch.testing.assert_close(found, expected, **TIGHT)
    found[-1].backward()
    expected[-1].backward()
    require_plain_gradients(ours, plain, TIGHT)


def require_plain_gradients(ours: PlanModule, plain: PlainModel, tight: Mapping[str, float]) -> None:
    """Every gradient is the same, one that `plain` has not is zero; only experts and noise may go without."""
    found = plain_state_dict({name: parameter.grad for name, parameter in ours.named_parameters()})
    expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in plain.named_parameters()}
    torch.testing.assert_close(found, expected, **tight)
    for name, gradient in expected.items():
        assert gradient.any() or ".experts." in name or ".noise." in name, f"{name}: the test sees no gradient"


def require_gradients(ours: PlanModule, plain: Mapping[str, Tensor], unused: tuple[str, ...] = ()) -> None:
    """Every gradient is the same; only those of names that have one of `unused` in them may be zero."""
    for name, parameter in ours.named_parameters():
        expected = plain[name].grad
        assert expected is not None, name
        assert parameter.grad is not None, name
        assert expected.any() or any(part in name for part in unused), f"{name}: the test sees no gradient"
        torch.testing.assert_close(parameter.grad, expected, **TIGHT, msg=lambda text, n=name: f"{n}: {text}")
