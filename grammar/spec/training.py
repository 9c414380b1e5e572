"""`train { … }`: how the model is trained."""

from typing import Annotated, Literal

from moec.grammar.spec.base import Doc, Node, NotYet, PositiveInt, Text, at_least
from moec.grammar.spec.optimizers import AdamW, Optimizer


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


class Trace(Node):
    """Loads that were measured: token counts `[iterations, layers, ranks, experts]` in a NumPy file."""

    word = "trace"
    source = "SmartMoE, Zhai et al. 2023, whose artifact has one"
    implemented = False
    positional = ("path",)
    path: Annotated[Text, Doc("the `.npz` file, beside this one")]


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
    routing: Annotated[Uniform | Zipf | Trace, Doc("the expert load to plan for")] = Uniform()
