"""`train { … }`: how the model is trained."""

from typing import Annotated, Literal

from moec.grammar.spec.base import Doc, Node, NotYet, PositiveInt, Text, at_least, at_most, less_than, more_than

# ---- optimizers ----------------------------------------------------------------------------------------


class AdamW(Node):
    """Adam with decoupled weight decay."""

    word = "adamw"
    source = "Loshchilov & Hutter 2019, arXiv 1711.05101"
    lr: Annotated[float, more_than(0), Doc("learning rate")] = 3e-4
    beta1: Annotated[float, at_least(0), less_than(1), Doc("decay of the first moment")] = 0.9
    beta2: Annotated[float, at_least(0), less_than(1), Doc("decay of the second moment")] = 0.95
    eps: Annotated[float, more_than(0), Doc("added to the root of the second moment")] = 1e-8
    weight_decay: Annotated[float, at_least(0), Doc("decoupled; norms are not decayed")] = 0.1


class Sgd(Node):
    """Gradient descent, with momentum if wanted. `weight_decay` is added to the gradient, as in PyTorch."""

    word = "sgd"
    source = "momentum as in Sutskever et al. 2013, PMLR 28(3)"
    lr: Annotated[float, more_than(0), Doc("learning rate")]
    momentum: Annotated[float, at_least(0), less_than(1), Doc("decay of the sum of gradients; 0 keeps no state")] = 0.0
    nesterov: Annotated[bool, Doc("Nesterov's momentum")] = False
    weight_decay: Annotated[
        float, at_least(0), Doc("factor on the weight that is added to the gradient; norms are not decayed")
    ] = 0.0


class Adafactor(Node):
    """Second moments as one row and one column per matrix, no first moment. Every expert is a matrix of its own."""

    word = "adafactor"
    source = "Shazeer & Stern 2018, arXiv 1804.04235"
    lr: Annotated[float, more_than(0), Doc("largest step, relative to the weights; it is at most 1 / sqrt(t)")] = 1e-2
    decay: Annotated[float, more_than(0), Doc("the second moment decays by 1 - t ** -decay (section 7.2)")] = 0.8
    clip: Annotated[float, at_least(1), Doc("largest root mean square of an update (section 6)")] = 1.0
    eps: Annotated[float, more_than(0), Doc("least root mean square of weights that a step's size is relative to")] = (
        1e-3
    )
    weight_decay: Annotated[float, at_least(0), Doc("decoupled; norms are not decayed")] = 0.0


class Muon(Node):
    """Momentum, orthogonalised per hidden matrix and expert; embeddings, head, routers, norms, biases take `adamw`."""

    word = "muon"
    source = "Jordan et al. 2024, https://kellerjordan.github.io/posts/muon"
    lr: Annotated[float, more_than(0), Doc("learning rate of matrices")] = 0.02
    momentum: Annotated[float, at_least(0), less_than(1), Doc("decay of the mean of gradients")] = 0.95
    nesterov: Annotated[bool, Doc("Nesterov's momentum")] = True
    ns_steps: Annotated[PositiveInt, at_most(20), Doc("Newton-Schulz iterations")] = 5
    scale: Annotated[
        Literal["shape", "rms"],
        Doc(
            "factor on an update of n x m: `shape` sqrt(max(1, n / m)); `rms` 0.2 sqrt(max(n, m)), AdamW's size "
            "(Liu et al. 2025, arXiv 2502.16982)"
        ),
    ] = "shape"
    weight_decay: Annotated[float, at_least(0), Doc("decoupled")] = 0.1
    adamw: Annotated[AdamW, Doc("optimizer of every other parameter")] = AdamW()


Optimizer = AdamW | Sgd | Adafactor | Muon


# ---- loads ---------------------------------------------------------------------------------------------


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
