"""Plain PyTorch for gates and balance terms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from oracles.plain_philox import SEED, STEP
from oracles.same import copy_parameters, enlarge, require_results
from oracles.specs import VOCAB, small_spec
from plain_moe import PlainModel, PlainMoe
from torch import Tensor, nn

from moec.grammar.spec import Spec
from moec.runtime.host.reference import reference


@dataclass
class Routed:
    """A gate's results: weights and experts of choices [batch, sequence, k], −1 for none."""

    weights: Tensor
    experts: Tensor
    logits: Tensor
    probabilities: Tensor
    more: dict[str, Tensor] = field(default_factory=dict)


class OracleMoe(PlainMoe):
    """`PlainMoe` with another gate. `real` [batch, sequence] are the tokens that are no padding."""

    number: int
    real: Tensor

    def prepare(self) -> None:
        """Adds the parameters that the gate has beside its router."""

    def route(self, x: Tensor) -> Routed:
        raise NotImplementedError

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        found = self.route(x)
        weights, experts = found.weights, found.experts.masked_fill(~self.real[..., None], -1)
        factor, least = self.places()
        kept = experts >= 0
        if factor is not None:
            kept = with_place(experts, factor, least, list(self.groups(x)), self.num_experts)
        shares = F.one_hot(experts.clamp_min(0), self.num_experts) * (weights * kept)[..., None]
        mixed = sum(expert(x) * shares.sum(2)[..., i, None] for i, expert in enumerate(self.experts))
        found.experts = experts
        return self.with_dense_paths(x, mixed), self.balanced(found, x)

    def groups(self, x: Tensor) -> Iterator[list[int]]:
        """The sequences of each routing group."""
        sequences = list(range(len(x)))
        return iter([[i] for i in sequences] if self.group == "sequence" else [sequences])

    def balanced(self, found: Routed, x: Tensor) -> Tensor | float:
        """Each term as a mean over groups, weighted by their tokens."""
        total: Tensor | float = 0.0
        for members in self.groups(x):
            real = self.real[members].flatten()
            of_group = Routed(
                *(
                    value[members].flatten(0, 1)[real]
                    for value in (found.weights, found.experts, found.logits, found.probabilities)
                ),
                {name: value[members].flatten(0, 1)[real] for name, value in found.more.items()},
            )
            for term in self.terms:
                value = LOSSES[term.word](of_group, self.num_experts)
                total = total + term.weight * value * real.sum() / self.real.sum()
        return total


def with_place(experts: Tensor, factor: float, least: int, groups: list[list[int]], count: int) -> Tensor:
    """Which choices [batch, sequence, k] have a place, counted one by one; −1 takes none."""
    kept = torch.zeros_like(experts, dtype=torch.bool)
    for members in groups:
        tokens = len(members) * experts.shape[1]
        places, taken = max(least, math.ceil(factor * experts.shape[2] * tokens / count)), [0] * count
        for choice in range(experts.shape[2]):
            for sequence in members:
                for token, expert in enumerate(experts[sequence, :, choice].tolist()):
                    if expert >= 0:
                        kept[sequence, token, choice] = taken[expert] < places
                        taken[expert] += 1
    return kept


def switch_loss(found: Routed, count: int) -> Tensor:
    chosen = found.experts[found.experts >= 0]
    share = torch.stack([(chosen == i).double().sum() for i in range(count)]) / len(chosen)
    return count * (share * found.probabilities.mean(0)).sum()


def z_loss(found: Routed, count: int) -> Tensor:
    return found.logits.exp().sum(-1).log().square().mean()


def gshard_loss(found: Routed, count: int) -> Tensor:
    """Lepikhin et al. 2020, section 2.2, times E²: c_e / S is the share of the tokens whose first expert is e."""
    first = found.experts[:, 0]
    share = torch.stack([(first == i).double().mean() for i in range(count)])
    return count * (share * found.probabilities.mean(0)).sum()


def squared_variation(loads: Tensor) -> Tensor:
    """(standard deviation / mean)² over experts."""
    return loads.var(unbiased=False) / loads.mean() ** 2


def importance_loss(found: Routed, count: int) -> Tensor:
    """Shazeer et al. 2017, eq. 6 and 7."""
    return squared_variation(torch.stack([found.weights[found.experts == i].sum() for i in range(count)]))


def load_loss(found: Routed, count: int) -> Tensor:
    """Shazeer et al. 2017, eq. 8 to 11, with the threshold looked up for each token and expert."""
    normal, loads = torch.distributions.Normal(0.0, 1.0), []
    k = found.experts.shape[-1]
    for i in range(count):
        without = torch.cat([found.logits[:, :i], found.logits[:, i + 1 :]], -1)
        threshold = without.sort(-1, descending=True).values[:, k - 1]
        loads.append(normal.cdf((found.more["clean"][:, i] - threshold) / found.more["deviation"][:, i]).sum())
    return squared_variation(torch.stack(loads))


LOSSES: dict[str, Callable[[Routed, int], Tensor]] = {
    "gshard_loss": gshard_loss,
    "importance_loss": importance_loss,
    "load_loss": load_loss,
    "switch_loss": switch_loss,
    "z_loss": z_loss,
}


def compare(
    oracle: type[OracleMoe],
    layers: str,
    *,
    training: bool = True,
    padding: int | None = None,
    ranks: Callable[[Spec], Spec] = lambda spec: spec,
    microbatches: int = 1,
) -> PlainModel:
    """The reference of a model whose `layers` are these against the handwritten model: logits, loss, gradients.

    `ranks` puts the model, of one rank, on several.
    """
    embedding = "tokens()" if padding is None else f"tokens(padding = {padding})"
    spec = ranks(small_spec(layers, dim=22, embedding=embedding))
    ours = reference(spec, dtype=torch.float64, microbatches=microbatches)
    plain = PlainModel(spec, torch.float64)
    generator = enlarge(ours)
    assert spec.train is not None
    tokens, labels = (torch.randint(VOCAB, (spec.train.batch, 13), generator=generator) for _ in range(2))
    if padding is not None:
        tokens[1, 4:] = padding
    for number, layer in enumerate(plain.layers):
        moe = layer.moe
        moe.__class__, moe.number = oracle, number
        moe.real = torch.ones_like(tokens, dtype=torch.bool) if padding is None else tokens != padding
        moe.prepare()
        moe.double()
    copy_parameters(ours, plain)
    for model in (ours, plain):
        model.train(training)
    ours.set(seed=SEED, step=STEP)
    output, (logits, _) = ours(tokens, labels), plain(tokens)
    balance = aux_loss(plain, tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + balance
    own = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten()) + output.aux_loss
    require_results(ours, plain, (output.logits, output.aux_loss, own), (logits, balance, loss))
    return plain


def aux_loss(plain: PlainModel, tokens: Tensor) -> Tensor:
    """The layers' balance terms."""
    x, total = plain.embedding(tokens), torch.zeros((), dtype=torch.float64)
    for layer in plain.layers:
        x, balance = layer(x)
        total = total + balance
    return total


def linear(features: int, outputs: int) -> nn.Linear:
    """A projection without bias."""
    return nn.Linear(features, outputs, bias=False, dtype=torch.float64)
