"""`attention = …`: how tokens see each other, and how they know where they stand."""

from fractions import Fraction
from typing import Annotated, Literal

from moec.grammar.spec.balance import Loss
from moec.grammar.spec.base import (
    Bound,
    Doc,
    Node,
    Positive,
    PositiveInt,
    at_least,
    at_most,
    less_than,
    more_than,
)
from moec.grammar.spec.gates import Gate

# ---- positions ---------------------------------------------------------------------------------------


class Linear(Node):
    """Positions divided by a factor, so that a longer context looks like the one that was trained."""

    word = "linear"
    source = "Chen et al. 2023, arXiv 2306.15595"
    positional = ("factor",)
    factor: Annotated[float, at_least(1), Doc("how many times longer the context becomes")]


class Ntk(Node):
    """A larger base of the wavelengths, so that high frequencies stay and low ones stretch."""

    word = "ntk"
    source = "bloc97 2023; Hugging Face calls it `dynamic`"
    positional = ("factor",)
    factor: Annotated[float, at_least(1), Doc("how many times longer the context becomes")]
    original: Annotated[
        PositiveInt | None, Doc("context that was trained; default: `context`, which changes nothing")
    ] = None


class Yarn(Node):
    """Wavelengths stretched by how often they turn in the original context, and attention sharpened."""

    word = "yarn"
    source = "Peng et al. 2023, arXiv 2309.00071"
    positional = ("factor",)
    factor: Annotated[float, at_least(1), Doc("how many times longer the context becomes")]
    original: Annotated[PositiveInt, Doc("context that was trained")]
    beta_fast: Annotated[
        Positive, Doc("dimensions with more turns than this in the original context keep their wavelength")
    ] = 32.0
    beta_slow: Annotated[
        Positive,
        Doc("dimensions with fewer turns than this in the original context are stretched by the whole `factor`"),
    ] = 1.0
    mscale: Annotated[float, at_least(0), Doc("factor in the sharpening of rotated dimensions; 0 for the paper's")] = (
        0.0
    )
    mscale_all: Annotated[
        float, at_least(0), Doc("factor in the sharpening of all dimensions, as DeepSeek has it; 0 for none")
    ] = 0.0
    truncate: Annotated[bool, Doc("round the limits of the ramp to whole dimensions")] = True


class Llama3(Node):
    """Low frequencies stretched, high ones kept, and a smooth passage between."""

    word = "llama3"
    source = "Llama 3.1, Grattafiori et al. 2024, arXiv 2407.21783"
    positional = ("factor",)
    factor: Annotated[float, at_least(1), Doc("how many times longer low frequencies become")]
    low: Annotated[Positive, Doc("a frequency with fewer turns than this in the original context is low")] = 1.0
    high: Annotated[Positive, Doc("a frequency with more turns than this in the original context is high")] = 4.0
    original: Annotated[PositiveInt, Doc("context that was trained")]


class LongRope(Node):
    """A searched factor for every pair of dimensions, one list for short and one for long contexts."""

    word = "longrope"
    source = "Ding et al. 2024, arXiv 2402.13753"
    short: Annotated[tuple[Positive, ...], Doc("factors for a `context` up to the original one")]
    long: Annotated[tuple[Positive, ...], Doc("factors for a longer `context`")]
    original: Annotated[PositiveInt, Doc("context that was trained")]


class Rope(Node):
    """Rotary position embedding. Dimension i turns with i + half (layout as in Llama), `interleaved` with i + 1."""

    word = "rope"
    source = "Su et al. 2021, arXiv 2104.09864"
    theta: Annotated[Positive, Doc("base of the wavelengths")] = 10_000.0
    scaling: Annotated[Linear | Ntk | Yarn | Llama3 | LongRope | None, Doc("how a longer context is reached")] = None
    fraction: Annotated[
        float, more_than(0), at_most(1), Doc("fraction of a head's dimensions that turn, counted from the first")
    ] = 1.0
    interleaved: Annotated[bool, Doc("turn neighbours in pairs, as GPT-J and DeepSeek do")] = False

    def turning(self, width: int) -> int:
        """How many dims of a head turn: the fraction of its width, rounded down."""
        return int(Fraction(str(self.fraction)) * width)


# ---- attention ---------------------------------------------------------------------------------------


class Windows(Node):
    """Square windows of an image's grid of patches: a patch attends to those of its window, and to no other."""

    word = "windows"
    source = "Swin, Liu et al. 2021, arXiv 2103.14030, section 3.2"
    positional = ("size",)
    size: Annotated[PositiveInt, Doc("patches along one side of a window; divides the patches along the grid's side")]
    shift: Annotated[
        int,
        at_least(0),
        Doc("patches by which windows are moved down and right, commonly size / 2 in alternate layers"),
    ] = 0


class _Attention(Node):
    """What every kind of attention may have."""

    heads: Annotated[PositiveInt, Doc("query heads")]
    rope: Annotated[Rope | None, Doc("rotary positions; default: none")] = None
    qk_norm: Annotated[
        Literal["none", "head", "projection"],
        Doc("RMS norm of queries and keys: per head (Qwen3), or over the whole projection (OLMoE)"),
    ] = "none"
    qk_norm_place: Annotated[
        Literal["before_rope", "after_rope"], Doc("whether `qk_norm` comes before `rope`, or after it (Hunyuan)")
    ] = "before_rope"
    bias: Annotated[
        Literal["none", "qkv", "all"], Doc("which projections have a bias: `qkv` (Qwen2), `all` (gpt-oss)")
    ] = "none"
    window: Annotated[
        PositiveInt | None,
        Doc("tokens that each token sees, itself included; with `causal = false`, as many after it too"),
    ] = None
    grid: Annotated[Windows | None, Doc("windows of the grid of patches, for images with `causal = false`")] = None
    sinks: Annotated[
        bool, Doc("a learned logit per head in the softmax, which takes attention away from tokens (gpt-oss)")
    ] = False
    clip: Annotated[Positive | None, Doc("queries, keys and values are clamped to ± this, after norms (DBRX)")] = None
    output_gate: Annotated[
        Literal["none", "head", "element"],
        Doc("what attention gives is multiplied by a sigmoid of a projection of the token, per head or per element"),
    ] = "none"
    causal: Annotated[bool, Doc("whether a token sees only itself and those before it")] = True
    multiplier: Annotated[Positive | None, Doc("factor on scores; default 1 / sqrt(head_dim) (Granite)")] = None

    def inputs(self) -> tuple[Literal["tokens", "keys"], ...]:
        """What a gate of its heads needs beside the vectors of the tokens."""
        return ()


class Gqa(_Attention):
    """Grouped-query attention: `heads / kv_heads` queries share one key and value."""

    word = "gqa"
    source = "Ainslie et al. 2023, arXiv 2305.13245"
    kv_heads: Annotated[PositiveInt, Doc("key and value heads; divides `heads`")]
    head_dim: Annotated[PositiveInt | None, Doc("width of a head; default model dim / heads")] = None


class Mha(_Attention):
    """Multi-head attention: every head has its own key and value."""

    word = "mha"
    source = "Vaswani et al. 2017, arXiv 1706.03762"
    head_dim: Annotated[PositiveInt | None, Doc("width of a head; default model dim / heads")] = None


class Mla(_Attention):
    """Multi-head latent attention: keys and values are made from one small vector per token, which has an RMS norm.

    `bias` is of the projections to latent vectors and to the shared key, and for `all` of the last one.
    """

    word = "mla"
    source = "DeepSeek-V2, arXiv 2405.04434, section 2.1"
    q_rank: Annotated[PositiveInt | None, Doc("width of the queries' latent vector; default: none, made directly")] = (
        None
    )
    kv_rank: Annotated[PositiveInt, Doc("width of the latent vector of keys and values")]
    nope_dim: Annotated[PositiveInt, Doc("dimensions of a query and key without positions")]
    rope_dim: Annotated[PositiveInt, Doc("dimensions with rotary positions, shared by all heads' keys")]
    value_dim: Annotated[PositiveInt, Doc("width of a value")]
    latent_eps: Annotated[
        Annotated[float, more_than(0), less_than(1)] | None,
        Doc("`eps` of the latent vectors' norms; default: that of `norm`"),
    ] = None


class Moa(_Attention):
    """A mixture of attention heads: each token chooses groups of query heads, and all share keys and values.

    A group has `heads` query heads with projections of its own, from the token and back, and a token's result is the
    weighted sum over its groups. `tp` cuts the heads of every group, and nothing cuts the list of groups: a rank of
    `ep` has them all. Padding tokens choose no group. `job.head_loads` counts the choices of each group.
    """

    word = "moa"
    source = "Zhang et al. 2022, arXiv 2210.05144, section 3"
    experts: Annotated[int, at_least(1), Bound("at most", 65_536, "MOE0402"), Doc("groups of `heads` to choose from")]
    gate: Annotated[Gate, Doc("how tokens choose them; one that gives each token a number of choices")]
    kv_heads: Annotated[PositiveInt | None, Doc("key and value heads, which divide `heads`; default: `heads`")] = None
    head_dim: Annotated[PositiveInt | None, Doc("width of a head; default model dim / heads")] = None
    normalize: Annotated[
        bool, Doc("divide the weights of a token's choices by their sum, which gets no gradient (the paper's)")
    ] = False
    balance: Annotated[tuple[Loss, ...], Doc("auxiliary losses of the gate, each with its weight")] = ()
    group: Annotated[Literal["sequence", "batch"], Doc("tokens over which balance is counted, as in `moe`")] = (
        "sequence"
    )

    @property
    def num_experts(self) -> int:
        """Groups of heads to choose from."""
        return self.experts

    def inputs(self) -> tuple[Literal["tokens", "keys"], ...]:
        return self.gate.inputs()


Attention = Gqa | Mha | Mla | Moa


# ---- norms -------------------------------------------------------------------------------------------


class RmsNorm(Node):
    """Root-mean-square norm with a learned scale."""

    word = "rms"
    source = "Zhang & Sennrich 2019, arXiv 1910.07467"
    eps: Annotated[float, more_than(0), less_than(1), Doc("added to the mean square under the root")] = 1e-5


class LayerNorm(Node):
    """Norm to mean 0 and variance 1, with a learned scale and shift."""

    word = "layer_norm"
    source = "Ba et al. 2016, arXiv 1607.06450"
    eps: Annotated[float, more_than(0), less_than(1), Doc("added to the variance under the root")] = 1e-5
    bias: Annotated[bool, Doc("whether there is a shift")] = True
