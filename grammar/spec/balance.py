"""`balance = […]` and `capacity = …`: what keeps experts equally busy, and how many rows one may take."""

from typing import Annotated, ClassVar, Literal

from moec.grammar.spec.base import Doc, Node, PositiveInt, Ratio, at_least

# ---- auxiliary losses --------------------------------------------------------------------------------


class _Loss(Node):
    """A term of the loss; `needs` is what the gate must have of every expert for each token.

    `counts`: what it takes an expert's load from, a token's choices, its first one (so the gate must list the best one
    first) or as many of its best scores as it has choices; empty for a term without loads.
    """

    needs: ClassVar[Literal["logits", "probabilities", "weights", "noise"]] = "probabilities"
    counts: ClassVar[Literal["", "choices", "first", "scores"]] = ""
    positional = ("weight",)
    weight: Annotated[float, at_least(0), Doc("factor in the total loss, per layer")]

    @property
    def counted(self) -> Literal["", "choices", "first", "scores"]:
        """`counts` of this very term, which an option may change."""
        return self.counts


class SwitchLoss(_Loss):
    """`E * sum_i f_i * P_i` over each routing group; 1 when balanced, for any k.

    With `over = model` there is one term for all layers that have it, whose f and P are over the tokens of them all. It
    is transformers' `load_balancing_loss_func` divided by k, over a micro-batch: `group = batch`.
    """

    word = "switch_loss"
    source = "Fedus et al. 2021, arXiv 2101.03961, eq. 4; transformers 5.24.0, models/mixtral/modeling_mixtral.py"
    counts = "choices"
    over: Annotated[
        Literal["layer", "model"],
        Doc("`layer`: a term of each layer, and their sum; `model`: one term, over the tokens of all layers together"),
    ] = "layer"
    fractions: Annotated[
        Literal["choices", "scores"],
        Doc(
            "what f counts: the choices that are made, or the k best scores alone, whatever biases and groups choose "
            "(Megatron's `aux_loss`; `sequence_loss` does so over each sequence)"
        ),
    ] = "choices"

    @property
    def counted(self) -> Literal["", "choices", "first", "scores"]:
        return self.fractions


class GShardLoss(_Loss):
    """`E * sum_i f_i * P_i` over each routing group, with f the share of first choices; 1 when balanced, for any k.

    The paper's term is this one divided by E².
    """

    word = "gshard_loss"
    source = "Lepikhin et al. 2020, arXiv 2006.16668, section 2.2"
    counts = "first"


class ImportanceLoss(_Loss):
    """Squared coefficient of variation of the experts' summed weights over each routing group; 0 when balanced."""

    word = "importance_loss"
    source = "Shazeer et al. 2017, arXiv 1701.06538, eq. 6 and 7"
    needs = "weights"
    of: Annotated[
        Literal["choices", "all"],
        Doc(
            "whose weights are summed: those of a token's choices, or `all` experts' probabilities before noise "
            "(Tutel, whose variance is E / (E - 1) times this one)"
        ),
    ] = "choices"


class LoadLoss(_Loss):
    """Squared coefficient of variation of the experts' expected loads under the gate's noise; 0 when balanced."""

    word = "load_loss"
    source = "Shazeer et al. 2017, arXiv 1701.06538, appendix A, eq. 8 to 11"
    needs = "noise"
    of: Annotated[
        Literal["logits", "probabilities"],
        Doc(
            "what noise lifts over the k-th best logit: an expert's logit, or its probability before noise (Tutel, for "
            "`topk` with `noise`; its variance is E / (E - 1) times this one)"
        ),
    ] = "logits"


class SequenceLoss(_Loss):
    """`E * sum_i f_i * P_i` over each sequence, whatever `group` is; f is of the k best scores alone.

    The weight is the paper's alpha, whose f contains E / k. The term is the mean of the paper's over sequences, each
    counted by its tokens.
    """

    word = "sequence_loss"
    source = "DeepSeek-V3, arXiv 2412.19437, eq. 17 to 20"
    counts = "scores"


class DeviceLoss(_Loss):
    """`sum_d f_d * P_d` over groups of neighbouring experts: f_d the mean of their f, P_d the sum of their P.

    The weight is the paper's alpha 2: its f contain E / k. f and P are those of `switch_loss`, over each routing group.
    """

    word = "device_loss"
    source = "DeepSeekMoE, arXiv 2401.06066, eq. 15 to 17"
    counts = "choices"
    groups: Annotated[PositiveInt | None, Doc("number of groups; default: the `ep` that the file states")] = None


class ZLoss(_Loss):
    """Mean squared log-sum-exp of the router logits."""

    word = "z_loss"
    source = "ST-MoE, Zoph et al. 2022, arXiv 2202.08906, eq. 5"
    needs = "logits"


Loss = SwitchLoss | GShardLoss | ImportanceLoss | LoadLoss | SequenceLoss | DeviceLoss | ZLoss


# ---- capacity ----------------------------------------------------------------------------------------


PlaceOrder = Literal["sequence", "random", "priority", "weight", "token"]
Order = Annotated[
    PlaceOrder,
    Doc(
        "which choices take places first: all first choices before second ones, tokens as in the `sequence`, at "
        "`random` in training, or by `priority`, those with the best scores first, each divided by the sum over "
        "all experts (V-MoE, Riquelme et al. 2021, arXiv 2106.05974, section 4.1); by `weight`, so that each expert "
        "keeps the choices that it weighs most (Megatron `probs`); or `token` by token, all choices of "
        "one before those of the next"
    ),
]


class Dropless(Node):
    """Every chosen expert gets the token, however many come."""

    word = "dropless"
    source = "MegaBlocks, Gale et al. 2022, arXiv 2211.15841"


class Factor(Node):
    """Each expert takes at most `max(min, ceil(factor * k * tokens / experts))` tokens of a group."""

    word = "factor"
    source = "Lepikhin et al. 2020, arXiv 2006.16668; Fedus et al. 2021, arXiv 2101.03961, eq. 3"
    positional = ("factor",)
    factor: Annotated[Ratio, Doc("places per expert, as a multiple of an equal share")]
    eval: Annotated[Ratio | None, Doc("`factor` in evaluation; default: as in training")] = None
    min: Annotated[PositiveInt, Doc("least number of places per expert")] = 1
    order: Order = "sequence"
    renormalize: Annotated[
        bool,
        Doc(
            "divide the weights of a token's choices by the sum of those that find a place, before the gate's `scale` "
            "(DeepSpeed, for k of 2 or more)"
        ),
    ] = False


class Dynamic(Node):
    """Padded to what the busiest expert needs this step, the same on all ranks; drops what exceeds `max`."""

    word = "dynamic"
    source = "Tutel, Hwang et al. 2023, arXiv 2206.03382, section 3.3"
    max: Annotated[Ratio | None, Doc("most places per expert, as a multiple of an equal share; default: no limit")] = (
        None
    )
    order: Order = "sequence"


Capacity = Dropless | Factor | Dynamic
