"""`gate = …`: which tokens go to which experts, and with what weights."""

from fractions import Fraction
from typing import Annotated, ClassVar, Literal, get_args

from moec.grammar.spec.base import AsWritten, Doc, Node, Portion, PositiveInt, Ratio, at_least, at_most, more_than
from moec.grammar.units import LARGEST_WHOLE

Weight = Annotated[float, at_least(0)]


class Online(Node):
    """A bias per expert that chooses but does not weigh, moved after each step towards equal loads."""

    word = "online"
    source = "Wang et al. 2024, arXiv 2408.15664"
    positional = ("rate",)
    rate: Annotated[float, more_than(0), Doc("how far a bias moves in a step")] = 1e-3


class _Gate(Node):
    """What every gate says of itself.

    `takes` is what it needs beside the vectors of the tokens, `gives` what it has of every expert for each token.
    `replays`: whether its choices can be given, because each token's k weights follow from scores and choices alone.
    `decides_rows`: it decides how many rows an expert takes, so that there is no capacity. `leaks`: when a token's
    result depends on later tokens.
    """

    takes: ClassVar[tuple[Literal["tokens"], ...]] = ()
    gives: ClassVar[tuple[Literal["logits", "probabilities", "weights", "noise"], ...]] = (
        "logits",
        "probabilities",
        "weights",
    )
    by_expert: ClassVar[bool] = False
    """Whether a token has a choice of every expert, in the experts' order, −1 where it does not go; else best first."""
    draws: ClassVar[bool] = False
    """Whether it always draws random numbers."""
    replays: ClassVar[bool] = False

    decides_rows: ClassVar[bool] = False
    equal_loads: ClassVar[bool] = False
    """Whether every expert takes as many tokens as every other."""
    leaks: ClassVar[Literal["", "training", "training and evaluation"]] = ""
    slices_experts: ClassVar[bool] = True
    """Whether `etp` cuts its experts with a hidden width: the ranks of an `etp` group compute the same rows."""
    for_heads: ClassVar[bool] = False
    """Whether a token has as many choices as any other, whatever others choose: `moa` takes such gates."""

    def choices(self, experts: int) -> int:
        """The number of a token's choices among so many experts, those included that are −1."""
        return experts if self.by_expert else int(getattr(self, "k", 1))

    def inputs(self) -> tuple[Literal["tokens", "keys"], ...]:
        """What it needs beside the vectors of the tokens: `takes`, and keys of tokens where it draws random numbers."""
        return (*self.takes, "keys") if self.draws or self.random() else self.takes

    def random(self) -> tuple[str, ...]:
        """The fields that ask for random numbers."""
        return tuple(name for name in ("jitter", "noise") if getattr(self, name, 0))


_JITTER = (
    "in training each element of the router's input is multiplied by a random number in 1 ± this (Switch, appendix C)"
)


class TopK(_Gate):
    """Each token goes to its `k` best experts; ties go to the lower index."""

    word = "topk"
    source = "Shazeer et al. 2017, arXiv 1701.06538; Mixtral, arXiv 2401.04088, section 2.1"
    for_heads = True
    replays = True
    positional = ("k",)
    k: Annotated[PositiveInt, Doc("experts per token")]
    score: Annotated[Literal["softmax", "sigmoid"], Doc("how logits become scores")] = "softmax"
    order: Annotated[
        Literal["before", "after"],
        Doc("`before`: score all, keep the best k; `after`: keep the k best logits, score only those"),
    ] = "before"
    normalize: Annotated[bool, Doc("divide the k weights by their sum")] = False
    scale: Annotated[float, more_than(0), Doc("factor on the weights, after `normalize` (DeepSeek-V3: 2.5)")] = 1.0
    bias: Annotated[
        Online | Literal["none", "learned"],
        Doc(
            "`online(rate)`: added to the scores that choose, and balances (DeepSeek-V3); "
            "`learned`: added to the logits, a parameter of the router (gpt-oss)"
        ),
    ] = "none"
    groups: Annotated[PositiveInt, Doc("experts are in this many groups of neighbours, of which some are kept")] = 1
    keep_groups: Annotated[PositiveInt | None, Doc("groups that a token may choose from; default: all")] = None
    group_score: Annotated[
        Literal["top2_sum", "max"],
        Doc("what groups are ranked by: their two best experts (DeepSeek-V3) or their best (V2), biases included"),
    ] = "top2_sum"
    jitter: Annotated[Portion, Doc(_JITTER)] = 0.0
    noise: Annotated[Weight, Doc("standard deviation of Gaussian noise that is added to the logits in training")] = 0.0


class Switch(_Gate):
    """Each token goes to its one best expert, weighted by the probability."""

    word = "switch"
    source = "Fedus et al. 2021, arXiv 2101.03961, section 2.1"
    for_heads = True
    replays = True
    jitter: Annotated[Portion, Doc(_JITTER)] = 0.0


class GShard(_Gate):
    """The best expert, and in training the second with a probability of twice its weight; in evaluation always."""

    word = "gshard"
    source = "Lepikhin et al. 2020, arXiv 2006.16668, algorithm 1"
    for_heads = True
    draws = True
    k: ClassVar[int] = 2


class NoisyTopK(_Gate):
    """The k best logits, with normal noise of a learned standard deviation in training; weights are their softmax."""

    word = "noisy_topk"
    source = "Shazeer et al. 2017, arXiv 1701.06538, eq. 3 to 5"
    for_heads = True
    gives = ("logits", "probabilities", "weights", "noise")
    draws = True
    positional = ("k",)
    k: Annotated[PositiveInt, Doc("experts per token")]


class SparseMixer(_Gate):
    """Experts near the best are sampled in training, one after another; weights carry the gradient of that choice."""

    word = "sparsemixer"
    source = "Liu et al. 2023, arXiv 2310.00811; GRIN, arXiv 2409.12136 (Phi-3.5-MoE)"
    for_heads = True
    draws = True
    positional = ("k",)
    k: Annotated[PositiveInt, at_most(63), Doc("experts per token")] = 2
    jitter: Annotated[
        Portion,
        Doc("candidates are logits that are less than the best by at most twice this part of max(|logit|, best)"),
    ] = 0.01


class ExpertChoice(_Gate):
    """Each expert takes its `ceil(factor * tokens / experts)` best tokens of a group; a token may get none, or many."""

    word = "expert_choice"
    source = "Zhou et al. 2022, arXiv 2202.09368, section 3.2"
    by_expert = True
    equal_loads = True
    decides_rows = True
    leaks = "training and evaluation"
    positional = ("factor",)
    factor: Annotated[Ratio, Doc("experts per token on average")] = Fraction(2)


class Hash(_Gate):
    """A token's experts are a fixed random function of its id, weighted alike; nothing is learned."""

    word = "hash"
    source = "Roller et al. 2021, arXiv 2106.04426, section 3.1 (random hash)"
    for_heads = True
    takes = ("tokens",)
    gives = ()
    positional = ("k",)
    k: Annotated[PositiveInt, Doc("experts per token, all different, each with the weight 1 / k")] = 1
    seed: Annotated[
        int, at_least(0), at_most(LARGEST_WHOLE), Doc("of the function: layers with another send ids to other experts")
    ] = 0


class Base(_Gate):
    """Balanced assignment in training: the matching of tokens and experts with the largest sum of scores, equal loads.

    In evaluation each token goes to its best expert. The weight is the sigmoid of the score.
    """

    word = "base"
    source = "Lewis et al. 2021, arXiv 2103.16716, section 3.1"
    decides_rows = True
    leaks = "training"


class DSelectK(_Gate):
    """A smooth choice of k experts by binary codes of each token, sparse once trained: before, a token goes to many."""

    word = "dselect_k"
    source = "Hazimeh et al. 2021, arXiv 2106.03760 (per-example gating)"
    for_heads = True
    gives = ("probabilities", "weights")
    by_expert = True
    positional = ("k",)
    k: Annotated[PositiveInt, Doc("experts per token")]
    gamma: Annotated[float, more_than(0), Doc("width of the smooth step")] = 1.0
    entropy: Annotated[Weight, Doc("weight in the loss of the codes' entropy, which makes it sparse")] = 0.0


class Topology(_Gate):
    """`topk(k)` that prefers near experts, by a loss over the levels of the cluster, and may bound the far choices.

    The loss of a data-parallel rank is `E * sum_e penalty_e * f_e * P_e`, with f and P as in `switch_loss`, over the
    rank's tokens of a micro-batch. The penalty is the time to send a byte from the rank to the expert, by the
    bandwidths of the levels, over its mean over all experts: where all are alike, this is `switch_loss`.

    `share` bounds the choices of experts in other nodes, in training: those with the largest probabilities stay, the
    others go to the token's next best experts in its own node. A node is everything inside the outermost level.
    """

    word = "topology"
    source = "TA-MoE, Chen et al. 2022, arXiv 2302.09915, section 4; share: FasterMoE, He et al. 2022, section 4.3"
    replays = True
    positional = ("k",)
    k: Annotated[PositiveInt, Doc("experts per token")]
    weight: Annotated[Weight, Doc("of the preference in the loss")] = 1e-2
    share: Annotated[
        Annotated[Fraction, AsWritten(), at_least(0), at_most(1)] | None,
        Doc("the most of a data-parallel rank's choices that may go to other nodes in training; default: all"),
    ] = None


class BatchPriority(_Gate):
    """`topk(k)` with a capacity whose `order` is `priority`: tokens with the best scores take their places first."""

    word = "batch_priority"
    source = "Riquelme et al. 2021, arXiv 2106.05974, section 4.1"
    positional = ("k",)
    k: Annotated[PositiveInt, Doc("experts per token")]


class AttentionRouter(_Gate):
    """Logits are attention between experts: softmax(q kᵀ) v of three projections of the token to one number each."""

    word = "attention_router"
    source = "Yuan 2.0-M32, arXiv 2405.17976, section 2"
    for_heads = True
    positional = ("k",)
    k: Annotated[PositiveInt, Doc("experts per token, weighted by the softmax of their logits")]


class Dense(_Gate):
    """Every token goes to every expert, weighted by the softmax."""

    word = "dense"
    source = "Jacobs et al. 1991, Adaptive Mixtures of Local Experts, eq. 1"
    for_heads = True

    def choices(self, experts: int) -> int:
        return experts


class Soft(_Gate):
    """Experts take weighted means of a sequence's tokens, and tokens weighted means of all results (token merging)."""

    word = "soft"
    source = "Puigcerver et al. 2023, arXiv 2308.00951, section 2.1"
    gives = ()
    decides_rows = True
    slices_experts = False
    leaks = "training and evaluation"
    positional = ("slots",)
    slots: Annotated[PositiveInt, Doc("means that each expert takes; `tp` divides their number")] = 1


class Smear(_Gate):
    """One expert of each sequence, made as the weighted mean of all experts' parameters (expert merging)."""

    word = "smear"
    source = "Muqeeth et al. 2023, arXiv 2306.03745, section 3"
    gives = ()
    decides_rows = True
    slices_experts = False
    leaks = "training and evaluation"


Gate = (
    TopK
    | Switch
    | GShard
    | NoisyTopK
    | SparseMixer
    | ExpertChoice
    | Hash
    | Base
    | DSelectK
    | Topology
    | BatchPriority
    | AttentionRouter
    | Dense
    | Soft
    | Smear
)

HEAD_GATES: tuple[type[_Gate], ...] = tuple(kind for kind in get_args(Gate) if kind.for_heads)
