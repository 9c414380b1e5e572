"""`optimizer = …`: how a step changes the weights. Their states are in `passes/cost/optimizers.py`."""

from typing import Annotated, ClassVar, Literal, NamedTuple, get_args

from moec.grammar.spec.base import Doc, Node, PositiveInt, at_least, at_most, less_than, more_than

Beta = Annotated[float, at_least(0), less_than(1)]
"""How much of a state a step keeps."""
Decay = Annotated[float, at_least(0)]


class _Optimizer(Node):
    """What every optimizer says of itself.

    `betas` are the fields that say how much of a state a step keeps. `wide`: why its states stay in fp32 between steps;
    empty where `state = bf16` is allowed. `elsewhere` says what defaults other systems have of the fields `differ`.
    """

    betas: ClassVar[tuple[str, ...]] = ()
    wide: ClassVar[str] = ""
    differ: ClassVar[frozenset[str]] = frozenset()
    elsewhere: ClassVar[str] = ""

    def parts(self) -> tuple["_Optimizer", ...]:
        """Itself, and the optimizers of some parameters that it has."""
        return self, *(value for value in vars(self).values() if isinstance(value, _Optimizer))


class AdamW(_Optimizer):
    """Adam with decoupled weight decay."""

    word = "adamw"
    source = "Loshchilov & Hutter 2019, arXiv 1711.05101"
    betas = ("beta1", "beta2")
    differ = frozenset(("beta2", "weight_decay"))
    elsewhere = (
        "its defaults are beta2 = 0.95 and weight_decay = 0.1, PyTorch's are 0.999 and 0.01, DeepSpeed's 0.999 and 0"
    )
    lr: Annotated[float, more_than(0), Doc("learning rate")] = 3e-4
    beta1: Annotated[Beta, Doc("decay of the first moment")] = 0.9
    beta2: Annotated[Beta, Doc("decay of the second moment")] = 0.95
    eps: Annotated[float, more_than(0), Doc("added to the root of the second moment")] = 1e-8
    weight_decay: Annotated[Decay, Doc("decoupled; norms are not decayed")] = 0.1


class Sgd(_Optimizer):
    """Gradient descent, with momentum if wanted. `weight_decay` is added to the gradient, as in PyTorch."""

    word = "sgd"
    source = "momentum as in Sutskever et al. 2013, PMLR 28(3)"
    betas = ("momentum",)
    lr: Annotated[float, more_than(0), Doc("learning rate")]
    momentum: Annotated[Beta, Doc("decay of the sum of gradients; 0 keeps no state")] = 0.0
    nesterov: Annotated[bool, Doc("Nesterov's momentum")] = False
    weight_decay: Annotated[Decay, Doc("factor on the weight that is added to the gradient; norms are not decayed")] = (
        0.0
    )


class Adafactor(_Optimizer):
    """Second moments as one row and one column per matrix, no first moment. Every expert is a matrix of its own."""

    word = "adafactor"
    source = "Shazeer & Stern 2018, arXiv 1804.04235"
    wide = "its factors are small, and decay ever more slowly: bf16 would round their changes away"
    lr: Annotated[float, more_than(0), Doc("largest step, relative to the weights; it is at most 1 / sqrt(t)")] = 1e-2
    decay: Annotated[float, more_than(0), Doc("the second moment decays by 1 - t ** -decay (section 7.2)")] = 0.8
    clip: Annotated[float, at_least(1), Doc("largest root mean square of an update (section 6)")] = 1.0
    eps: Annotated[float, more_than(0), Doc("least root mean square of weights that a step's size is relative to")] = (
        1e-3
    )
    weight_decay: Annotated[Decay, Doc("decoupled; norms are not decayed")] = 0.0


class Muon(_Optimizer):
    """Momentum, orthogonalised per hidden matrix and expert; embeddings, head, routers, norms, biases take `adamw`."""

    word = "muon"
    source = "Jordan et al. 2024, https://kellerjordan.github.io/posts/muon"
    betas = ("momentum",)
    lr: Annotated[float, more_than(0), Doc("learning rate of matrices")] = 0.02
    momentum: Annotated[Beta, Doc("decay of the mean of gradients")] = 0.95
    nesterov: Annotated[bool, Doc("Nesterov's momentum")] = True
    ns_steps: Annotated[PositiveInt, at_most(20), Doc("Newton-Schulz iterations")] = 5
    scale: Annotated[
        Literal["shape", "rms"],
        Doc(
            "factor on an update of n x m: `shape` sqrt(max(1, n / m)); `rms` 0.2 sqrt(max(n, m)), AdamW's size "
            "(Liu et al. 2025, arXiv 2502.16982)"
        ),
    ] = "shape"
    weight_decay: Annotated[Decay, Doc("decoupled")] = 0.1
    adamw: Annotated[AdamW, Doc("optimizer of every other parameter")] = AdamW()


class Lion(_Optimizer):
    """The sign of the momentum blended with the gradient, so that every element moves by `lr`; one state.

    Against AdamW, `lr` is 3 to 10 times smaller and `weight_decay` as much larger (section 5).
    """

    word = "lion"
    source = "Chen et al. 2023, arXiv 2302.06675, algorithm 2"
    betas = ("beta2",)
    differ = frozenset(("lr", "beta2"))
    elsewhere = "its defaults are lr = 1e-4 and beta2 = 0.99, DeepSpeed's are 1e-3 and 0.999"
    lr: Annotated[float, more_than(0), Doc("learning rate")] = 1e-4
    beta1: Annotated[Beta, Doc("part of the momentum in what is taken the sign of")] = 0.9
    beta2: Annotated[Beta, Doc("decay of the momentum")] = 0.99
    weight_decay: Annotated[Decay, Doc("decoupled; norms are not decayed")] = 0.0


Optimizer = AdamW | Sgd | Adafactor | Muon | Lion

OPTIMIZERS: dict[str, type[_Optimizer]] = {kind.word: kind for kind in get_args(Optimizer)}
"""The optimizers by word."""


class Update(NamedTuple):
    """How a step changes weights: the optimizer, and the dtype of its states between steps."""

    optimizer: Optimizer = AdamW()
    state: Literal["fp32", "bf16"] = "fp32"
