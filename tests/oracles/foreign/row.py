"""A row of the tables: options of another system, what it computes with them, and the `.moe` lines that say it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from oracles.foreign.probe import ModelProbe, layer_weights
from oracles.foreign.routing import Routing
from oracles.plain_philox import normal, uniform, words_of
from torch import Tensor

BATCH, SEQUENCE, EXPERTS = 2, 24, 8
NOISE = 0.5  # what `noisy_topk` learned, times the logits
QUEUES = 7  # the stream of random numbers of `order = random`


@dataclass(frozen=True)
class Given:
    """What a router of another system is given; random numbers are those that moec draws."""

    logits: Tensor
    bias: Tensor
    real: Tensor | None = None

    @property
    def flat(self) -> Tensor:
        """Logits [tokens, experts], sequence after sequence."""
        return self.logits.flatten(0, 1)

    @property
    def padded(self) -> Tensor:
        """Whether a token is real: bool [tokens]."""
        assert self.real is not None
        return self.real.flatten()

    @cached_property
    def normal(self) -> Tensor:
        """The standard normal noise of each logit: [tokens, experts]."""
        return normal(*self.logits.shape, 0).flatten(0, 1)

    @cached_property
    def factors(self) -> Tensor:
        """The numbers in [−1, 1) of `jitter`, of each element of the router's input: [tokens, experts]."""
        batch, sequence, experts = self.logits.shape
        return (2 * uniform(batch, sequence, 2 * experts + 1, 0, 0) - 1)[..., :experts].flatten(0, 1)

    @cached_property
    def queue(self) -> Tensor:
        """The number of each token's place in a queue at random, the largest first: [tokens]."""
        batch, sequence, _ = self.logits.shape
        drawn = [words_of(b, s, 1, 0, QUEUES)[0] >> 8 for b in range(batch) for s in range(sequence)]
        return torch.tensor(drawn, dtype=torch.float64)

    @cached_property
    def coin(self) -> Tensor:
        """The number in [0, 1) that decides on a token's second expert: [tokens]."""
        return uniform(*self.logits.shape[:2], 1, 0).flatten()


@dataclass(frozen=True)
class Options:
    """A function of this folder, and options under the system's own names; values may be functions of what is given."""

    function: Callable[..., Routing]
    options: Mapping[str, Any]

    def __call__(self, given: Given) -> Routing:
        return self.function(given.flat, **self.values(given))

    def values(self, given: Given) -> dict[str, Any]:
        """The options for these logits."""
        return {name: value(given) if callable(value) else value for name, value in self.options.items()}


@dataclass(frozen=True)
class Row:
    """`theirs` gives what the system computes; `moe` are the lines of a `moe` block for the same.

    `differs` names what no lines make equal, with `why`: `moe` is then the nearest. `needs` a `model` where a `layer`
    cannot say it.
    """

    name: str
    theirs: Callable[[Given], Routing]
    moe: str
    differs: Literal["", "weights", "loss"] = ""
    why: str = ""
    needs: Literal["", "model", "bias", "padding", "bf16"] = ""
    training: bool = True
    batch: int = BATCH
    sequence: int = SEQUENCE
    experts: int = EXPERTS
    drops: bool = False

    @cached_property
    def given(self) -> Given:
        """Logits and biases of some size, the same in every run."""
        generator = torch.Generator().manual_seed(3)
        shape = (self.batch, self.sequence, self.experts)
        logits = 1.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
        bias = 0.2 * torch.randn(self.experts, generator=generator, dtype=torch.float64)
        real = None
        if self.needs == "padding":
            lengths = torch.tensor([self.sequence - 7 * i for i in range(self.batch)])
            real = torch.arange(self.sequence) < lengths[:, None]
        return Given(logits, bias, real)

    def ours(self, moe: str, given: Given) -> Routing:
        """What `moec.reference` of these lines computes."""
        if self.needs in ("", "bf16"):
            if self.needs == "bf16":
                return Routing(layer_weights(moe, given.logits.bfloat16(), training=self.training).weights.double())
            return layer_weights(moe, given.logits, training=self.training, bias=given.bias)
        probe = ModelProbe(moe, given.logits, real=given.real, noise=NOISE)
        if self.needs == "bias":
            probe.bias.copy_(given.bias)
        return probe.route(training=self.training)
