"""Feed-forwards: what `ffn`, one expert, `shared` and `residual` can be."""

from typing import Annotated

from moec.grammar.spec.base import (
    Doc,
    Node,
    Positive,
    PositiveInt,
    Text,
    at_least,
    at_most,
)

MAX_EXPERTS = 65_536


class _FeedForward(Node):
    """What every feed-forward may have."""

    positional = ("hidden",)
    hidden: Annotated[PositiveInt, Doc("hidden width")]
    bias: Annotated[bool, Doc("whether projections have biases (gpt-oss)")] = False
    gated: Annotated[
        bool, Doc("for `shared` only: whether the result is scaled by a learned sigmoid per token (Qwen2)")
    ] = False


class Activated(_FeedForward):
    """Projections with an activation between. `passes/ir/activations.py` has a row for each."""


class SwiGLU(Activated):
    """`down(silu(gate(x)) * up(x))`."""

    word = "swiglu"
    source = "Shazeer 2020, arXiv 2002.05202"
    clamp: Annotated[Positive | None, Doc("gate at most this, up within ± this (gpt-oss: 7)")] = None
    alpha: Annotated[
        Positive | None, Doc("`g * sigmoid(alpha * g) * (up + 1)` in place of `silu(g) * up` (gpt-oss: 1.702)")
    ] = None


class GeGLU(Activated):
    """`down(gelu(gate(x)) * up(x))`."""

    word = "geglu"
    source = "Shazeer 2020, arXiv 2002.05202"


class Gelu(Activated):
    """`down(gelu(up(x)))` with the exact (erf) GELU."""

    word = "gelu"
    source = "Hendrycks & Gimpel 2016, arXiv 1606.08415"


class Relu(Activated):
    """`down(relu(up(x)))`."""

    word = "relu"
    source = "Vaswani et al. 2017, arXiv 1706.03762, section 3.3"


class Relu2(Activated):
    """`down(relu(up(x)) ** 2)`."""

    word = "relu2"
    source = "Primer, So et al. 2021, arXiv 2109.08668"


class Silu(Activated):
    """`down(silu(up(x)))`, with `silu(x) = x * sigmoid(x)`."""

    word = "silu"
    source = "Elfwing et al. 2017, arXiv 1702.03118"


class LinearMap(Node):
    """One matrix, model width to model width."""

    word = "linear"
    source = "a single matrix, the smallest expert"
    bias: Annotated[bool, Doc("whether a bias is added")] = False
    gated: Annotated[bool, Doc("for `shared` only: whether the result is scaled by a learned sigmoid per token")] = (
        False
    )


class Lora(Node):
    """A low-rank map, `up(down(x)) · alpha / rank`; up starts at zeros."""

    word = "lora"
    source = "Hu et al. 2021, arXiv 2106.09685"
    positional = ("rank",)
    rank: Annotated[PositiveInt, Doc("width between the two matrices")]
    alpha: Annotated[Positive | None, Doc("the result is scaled by alpha / rank; default: rank")] = None


class Conv(_FeedForward):
    """Two convolutions over the sequence with a GELU between, causal if the attention is.

    Applied at token t it sees the `2 * kernel - 1` vectors up to t, or around t, with zeros in place of tokens outside
    of the sequence, of other texts, and of padding. The first convolution is taken at `kernel` positions of this
    window, the second at one. In a `layer` file it is causal.
    """

    word = "conv"
    source = "FastSpeech, Ren et al. 2019, arXiv 1905.09263, section 3.1, with a GELU"
    kernel: Annotated[PositiveInt, Doc("tokens that a convolution sees")] = 3


class Mixture(Node):
    """An expert that is itself a mixture, declared by a `layer "name" { … }` block (hierarchical).

    A token goes to pairs of an outer and an inner expert, with the product of their weights. `ep` divides the outer
    experts: an expert's inner experts lie on one rank.
    """

    word = "mixture"
    source = "Jordan & Jacobs 1994; Shazeer et al. 2017, appendix B"
    positional = ("name",)
    name: Annotated[Text, Doc("label of the `layer` block")]


FeedForward = SwiGLU | GeGLU | Gelu | Relu | Relu2 | Silu | LinearMap | Lora | Conv


class Experts(Node):
    """`count * body`: that many experts of one kind and size."""

    word = "experts"
    form = "product"
    count: Annotated[int, at_least(1), at_most(MAX_EXPERTS, "MOE0402"), Doc("number of experts")]
    body: Annotated[FeedForward | Mixture, Doc("the body of one expert")]
