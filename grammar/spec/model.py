"""`model { … }`: what the network is."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from moec.grammar.spec.base import BlockLabel, Form, Node

PositiveInt = Annotated[int, Field(ge=1)]


class DType(StrEnum):
    """Element types of parameters and activations."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


# ---- norms, embeddings, positions -------------------------------------------------------------------


class RmsNorm(Node):
    """Root-mean-square norm with a learned scale (Zhang & Sennrich 2019)."""

    word: ClassVar[str] = "rms"
    eps: Annotated[float, Field(gt=0, lt=1, description="added to the mean square under the root")] = 1e-5


class TokenEmbedding(Node):
    """A learned vector per token id."""

    word: ClassVar[str] = "tokens"
    tied: Annotated[bool, Field(description="whether the output head shares the embedding's weights")] = False


class Rope(Node):
    """Rotary position embedding, half-split convention (Su et al. 2021; layout as in Llama)."""

    word: ClassVar[str] = "rope"
    theta: Annotated[float, Field(gt=0, description="base of the wavelengths")] = 10_000.0


# ---- attention ---------------------------------------------------------------------------------------


class Gqa(Node):
    """Causal grouped-query attention (Ainslie et al. 2023): `heads / kv_heads` queries share one key and value."""

    word: ClassVar[str] = "gqa"
    heads: Annotated[PositiveInt, Field(description="query heads")]
    kv_heads: Annotated[PositiveInt, Field(description="key and value heads; divides `heads`")]
    head_dim: Annotated[PositiveInt | None, Field(description="width of a head; default model dim / heads")] = None
    rope: Annotated[Rope | None, Field(description="rotary positions; without it, none")] = None


class Mha(Node):
    """Causal multi-head attention (Vaswani et al. 2017): every head has its own key and value."""

    word: ClassVar[str] = "mha"
    heads: Annotated[PositiveInt, Field(description="heads")]
    head_dim: Annotated[PositiveInt | None, Field(description="width of a head; default model dim / heads")] = None
    rope: Annotated[Rope | None, Field(description="rotary positions; without it, none")] = None


# ---- feed-forward ------------------------------------------------------------------------------------


class SwiGLU(Node):
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020)."""

    word: ClassVar[str] = "swiglu"
    positional: ClassVar[tuple[str, ...]] = ("hidden",)
    hidden: Annotated[PositiveInt, Field(description="hidden width")]


class Gelu(Node):
    """`down(gelu(up(x)))` with the exact (erf) GELU (Hendrycks & Gimpel 2016)."""

    word: ClassVar[str] = "gelu"
    positional: ClassVar[tuple[str, ...]] = ("hidden",)
    hidden: Annotated[PositiveInt, Field(description="hidden width")]


class Experts(Node):
    """`count * body`: that many experts of one kind and size."""

    word: ClassVar[str] = "experts"
    form: ClassVar[Form] = "product"
    count: Annotated[int, Field(ge=1, description="number of experts")]
    body: Annotated[SwiGLU | Gelu, Field(description="what one expert is")]


# ---- mixture of experts ------------------------------------------------------------------------------


class TopK(Node):
    """Each token goes to its `k` best experts (Shazeer et al. 2017; Mixtral, arXiv 2401.04088, section 2.1).

    Ties go to the lower expert index.
    """

    word: ClassVar[str] = "topk"
    positional: ClassVar[tuple[str, ...]] = ("k",)
    k: Annotated[PositiveInt, Field(description="experts per token")]
    score: Annotated[Literal["softmax", "sigmoid"], Field(description="how logits become scores")] = "softmax"
    order: Annotated[
        Literal["before", "after"],
        Field(description="`before`: score all, keep the best k; `after`: keep the k best logits, score only those"),
    ] = "before"
    normalize: Annotated[bool, Field(description="divide the k weights by their sum")] = False


class Dropless(Node):
    """Every chosen expert gets the token, however many come (MegaBlocks, arXiv 2211.15841)."""

    word: ClassVar[str] = "dropless"


class SwitchLoss(Node):
    """`E * sum_i f_i * P_i` over each routing group (Fedus et al. 2021, eq. 4); 1 when balanced, for any k."""

    word: ClassVar[str] = "switch_loss"
    positional: ClassVar[tuple[str, ...]] = ("weight",)
    weight: Annotated[float, Field(ge=0, description="factor in the total loss, per layer")]


class ZLoss(Node):
    """Mean squared log-sum-exp of the router logits (ST-MoE, Zoph et al. 2022, eq. 5)."""

    word: ClassVar[str] = "z_loss"
    positional: ClassVar[tuple[str, ...]] = ("weight",)
    weight: Annotated[float, Field(ge=0, description="factor in the total loss, per layer")]


class Moe(Node):
    """`moe { … }`: a gate and its experts in the place of one dense feed-forward."""

    word: ClassVar[str] = "moe"
    form: ClassVar[Form] = "block"
    experts: Annotated[Experts, Field(description="`count * body`, such as `8 * swiglu(14_336)`")]
    gate: Annotated[TopK, Field(description="how tokens choose experts")]
    capacity: Annotated[Dropless, Field(description="how many rows an expert takes")] = Dropless()
    balance: Annotated[tuple[SwitchLoss | ZLoss, ...], Field(description="auxiliary losses, each with its weight")] = ()
    group: Annotated[Literal["sequence"], Field(description="the tokens over which balance is counted")] = "sequence"


# ---- layers and the model ----------------------------------------------------------------------------


class Layer(Node):
    """One layer after every `layers` block: attention, then `ffn` or `moe`, each pre-normed with a residual."""

    word: ClassVar[str] = "layers"
    form: ClassVar[Form] = "block"
    selects: ClassVar[bool] = True
    slots: ClassVar[tuple[tuple[str, ...], ...]] = (("ffn", "moe"),)
    attention: Annotated[Gqa | Mha, Field(description="how tokens see each other")]
    ffn: Annotated[SwiGLU | Gelu | None, Field(description="a dense feed-forward")] = None
    moe: Annotated[Moe | None, Field(description="a mixture of experts in its place")] = None


class Model(Node):
    """`model "name" { … }`: a decoder-only language model."""

    word: ClassVar[str] = "model"
    form: ClassVar[Form] = "block"
    labelled: ClassVar[bool] = True
    name: BlockLabel
    vocab: Annotated[PositiveInt, Field(description="number of token ids")]
    dim: Annotated[PositiveInt, Field(description="width of the residual stream")]
    depth: Annotated[PositiveInt, Field(le=10_000, description="number of layers")]
    context: Annotated[PositiveInt | None, Field(description="longest sequence; default: `train.sequence`")] = None
    dtype: Annotated[DType, Field(description="of parameters and activations")] = DType.BF16
    norm: Annotated[RmsNorm, Field(description="before attention, before the feed-forward, and at the end")] = RmsNorm()
    embedding: Annotated[TokenEmbedding, Field(description="how token ids become vectors")] = TokenEmbedding()
    layers: Annotated[tuple[Layer, ...], Field(description="one entry a layer; equal neighbours are one object")]
