"""`train { … }`: how the model is trained."""

from typing import Annotated, Literal

from moec.grammar.spec.base import Doc, Node, PositiveInt, Text, at_least, less_than, more_than


class AdamW(Node):
    """Adam with decoupled weight decay."""

    word = "adamw"
    source = "Loshchilov & Hutter 2019, arXiv 1711.05101"
    lr: Annotated[float, more_than(0), Doc("learning rate")] = 3e-4
    beta1: Annotated[float, at_least(0), less_than(1), Doc("decay of the first moment")] = 0.9
    beta2: Annotated[float, at_least(0), less_than(1), Doc("decay of the second moment")] = 0.95
    eps: Annotated[float, more_than(0), Doc("added to the root of the second moment")] = 1e-8
    weight_decay: Annotated[float, at_least(0), Doc("decoupled; norms are not decayed")] = 0.1


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


class Train(Node):
    """`train { … }`: the batch, the optimizer, and the load to plan for."""

    word = "train"
    form = "block"
    batch: Annotated[PositiveInt, Doc("sequences per optimizer step, over all ranks")]
    sequence: Annotated[PositiveInt, Doc("tokens per sequence")]
    optimizer: Annotated[AdamW, Doc("update rule")] = AdamW()
    master: Annotated[Literal["fp32"], Doc("dtype of master weights where the model's is narrower")] = "fp32"
    routing: Annotated[Uniform | Zipf | Trace, Doc("the expert load to plan for")] = Uniform()
