"""`train { … }`: how the model is trained."""

import math
from typing import Annotated, Literal

from moec.grammar.spec.base import Doc, Node, NotYet, PositiveInt, Text, at_least
from moec.grammar.spec.optimizers import AdamW, Optimizer

Load = Annotated[float, at_least(1)]
"""Rows of the busiest rank over the mean."""


class Uniform(Node):
    """Every expert gets the same load."""

    word = "uniform"
    source = "the best case of every planner"


class Zipf(Node):
    """Expert loads fall as rank ** -s."""

    word = "zipf"
    source = "Zipf 1935; the skew that FasterMoE (He et al. 2022) reports"
    positional = ("s",)
    s: Annotated[float, at_least(0), Doc("exponent; 0 is uniform")]


class GateBound(Node):
    """The most that gates allow: every token goes to the same experts, up to the capacity of each."""

    word = "bound"
    source = "the worst case of every planner"


class Trace(Node):
    """Loads that were measured: `counts` of choices `[iterations, layers, ranks, experts]` in a NumPy file.

    A plan keeps `measured` of them, and reads no file.
    """

    word = "trace"
    source = "SmartMoE, Zhai et al. 2023, whose artifact has one"
    positional = ("path",)
    path: Annotated[
        Text, Doc("the `.npz` file, relative to this one; of a text or a Spec in Python, to the working folder")
    ]


LoadUse = Literal["time", "kept", "most"]
"""What a load is planned for: the seconds of a step, the rows that a rank keeps, and one layer at its worst."""


class Measured(Node):
    """What a plan keeps of a `trace`: rows of the busiest rank over the mean of all, the 95th percentile of iterations.

    `time` and `kept` have a row for each number of `ranks`, with a value for each number of `layers`.
    """

    word = "measured"
    source = "SmartMoE, Zhai et al. 2023"
    positional = ("file",)
    file: Annotated[Text, Doc("the trace; it is not read again")]
    ranks: Annotated[tuple[PositiveInt, ...], Doc("the ranks that share the experts of a layer")]
    layers: Annotated[tuple[PositiveInt, ...], Doc("layers with experts of one pipeline rank")]
    time: Annotated[tuple[Load, ...], Doc("the mean over these layers")]
    kept: Annotated[tuple[Load, ...], Doc("the busiest rank by its rows in all of these layers")]
    most: Annotated[tuple[Load, ...], Doc("the most uneven layer, for each number of `ranks`")]

    def load(self, use: LoadUse, ranks: int, layers: int) -> float:
        """The load of one of `ranks`, else of more ranks or fewer layers. Infinite where nothing is known."""
        wide = [of for of in self.ranks if of >= ranks]
        few = [of for of in self.layers if of <= layers]
        if ranks == 1 or not wide or not few:
            return 1.0 if ranks == 1 else math.inf
        row = self.ranks.index(min(wide))
        if use == "most":
            return self.most[row]
        of_use = self.time if use == "time" else self.kept
        return of_use[row * len(self.layers) + self.layers.index(max(few))]


ModelPart = Literal["embedding", "attention", "norms", "ffn", "experts", "gate", "shared", "residual", "head"]
"""A part of a model whose parameters train or do not; `passes/lower/lower_frozen.py` says which are whose."""


class Train(Node):
    """`train { … }`: the batch, the optimizer, and the load to plan for."""

    word = "train"
    form = "block"
    batch: Annotated[PositiveInt, Doc("sequences per optimizer step, over all ranks")]
    sequence: Annotated[PositiveInt | None, Doc("tokens per sequence; images have none")]
    optimizer: Annotated[Optimizer, Doc("update rule")] = AdamW()
    master: Annotated[
        Literal["fp32", "bf16"],
        NotYet(("bf16",), numbers=True),
        Doc("dtype of the weights that the optimizer updates"),
    ] = "fp32"
    state: Annotated[Literal["fp32", "bf16"], Doc("dtype of the optimizer's states between steps")] = "fp32"
    replay: Annotated[
        bool,
        Doc("whether a step can take the experts that each token goes to: `job.step(…, routes=…)`, `.routes`"),
    ] = False
    frozen: Annotated[
        tuple[ModelPart, ...],
        Doc(
            "parts of the model that do not train: their parameters have no gradient, no master and no optimizer "
            "state; gradients flow through them"
        ),
    ] = ()
    routing: Annotated[Uniform | Zipf | GateBound | Trace | Measured, Doc("the expert load to plan for")] = Uniform()
