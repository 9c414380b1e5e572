"""`model { … }`: what the network is."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Literal, NamedTuple

from moec.grammar.spec.attention import Attention, LayerNorm, RmsNorm
from moec.grammar.spec.balance import Capacity, Dropless, Dynamic, Factor, Loss, PlaceOrder, SwitchLoss
from moec.grammar.spec.base import BlockLabel, Doc, Node, NotYet, Positive, PositiveInt, at_least, at_most
from moec.grammar.spec.experts import Experts, FeedForward, Mixture
from moec.grammar.spec.gates import BatchPriority, Gate, Hash, Topology
from moec.grammar.spec.images import Classes, Patches

MAX_LAYERS = 10_000


class DType(StrEnum):
    """Element types of parameters and activations."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


_NO_FP16 = NotYet(
    ("fp16",),
    help="use `bf16`: gradients in fp16 vanish unless the loss is scaled, and nothing scales it",
    numbers=True,
)


KeptPart = Literal["routers", "sinks"]
"""Parameters that a model of bf16 may compute with in fp32. `routers`: of all gates, those of attention heads too."""

_KEPT = Doc(
    "parameters that are not rounded to `dtype` where they compute: `routers` of mixtures, `sinks` of attention "
    "(ERNIE-4.5, Hunyuan, Flint: fp32 routers)"
)


_ROUTERS = Doc(
    "of routers' logits and of the weights of choices: `fp32`, or `model`: the model's `dtype` (Megatron and Tutel "
    "unless told, FastMoE, most classes of transformers); scores are computed in fp32"
)


class TokenEmbedding(Node):
    """A learned vector per token id."""

    word = "tokens"
    source = "Vaswani et al. 2017, arXiv 1706.03762, section 3.4"
    tied: Annotated[bool, Doc("whether the output head shares the embedding's weights")] = False
    positions: Annotated[Literal["none", "learned"], Doc("a learned vector per position, added (GPT-2)")] = "none"
    padding: Annotated[
        Annotated[int, at_least(0)] | Literal["given"] | None,
        Doc(
            "the id of padding tokens: these go to no expert, take no place and count in no balance term; `given`: a "
            "batch says which tokens they are, `job.step(…, padding=…)`"
        ),
    ] = None
    separator: Annotated[
        int | None,
        at_least(0),
        Doc("the id that ends a text: tokens attend to their own text alone, and positions start again at 0 after it"),
    ] = None
    segments: Annotated[
        bool,
        Doc(
            "whether a batch says which text each token belongs to: `job.step(…, segments=…)`, in place of a separator"
        ),
    ] = False
    multiplier: Annotated[
        Positive, Doc("factor on the vectors, before learned positions are added (Granite: 12; Gemma: sqrt(dim))")
    ] = 1.0
    logits_multiplier: Annotated[Positive, Doc("factor on the logits (Granite: 1 / logits_scaling)")] = 1.0
    logits_bias: Annotated[bool, Doc("whether a learned number per id is added to the logits (Phi-3.5-MoE)")] = False

    @property
    def padding_id(self) -> int | None:
        """The id of padding, if padding is an id."""
        return self.padding if isinstance(self.padding, int) else None

    @property
    def packs(self) -> bool:
        """Whether a sequence may consist of several texts."""
        return self.segments or self.separator is not None


class Moe(Node):
    """`moe { … }`: a gate and its experts in the place of one dense feed-forward."""

    word = "moe"
    form = "block"
    experts: Annotated[
        Experts | tuple[Experts, ...],
        Doc("`count * body`, such as `8 * swiglu(14_336)`; a list of them for experts of different sizes"),
    ]
    gate: Annotated[Gate, Doc("how tokens choose experts")]
    shared: Annotated[FeedForward | None, Doc("a feed-forward that every token goes through, added")] = None
    residual: Annotated[
        FeedForward | None,
        Doc("a dense path, mixed in by two learned, softmaxed coefficients per token (DeepSpeed's Residual-MoE)"),
    ] = None
    capacity: Annotated[Capacity, Doc("how many rows an expert takes")] = Dropless()
    overflow: Annotated[
        Literal["drop", "reroute", "pad"],
        Doc(
            "a choice whose expert is full is dropped, or goes to the next best expert with room; `pad` drops it, and "
            "every expert computes all its places on any ranks (shapes do not depend on tokens)"
        ),
    ] = "drop"
    balance: Annotated[tuple[Loss, ...], Doc("auxiliary losses, each with its weight")] = ()
    group: Annotated[
        Literal["sequence", "batch", "rank"],
        Doc(
            "tokens over which capacity and balance are counted: a sequence (each text of it, where texts are packed), "
            "a micro-batch, or a rank's part of it"
        ),
    ] = "sequence"

    def inputs(self) -> tuple[Literal["tokens", "keys"], ...]:
        """What its gate and its capacity need beside the vectors of the tokens."""
        drawn: tuple[Literal["keys"], ...] = ("keys",) if self.order == "random" else ()
        return tuple(dict.fromkeys((*self.gate.inputs(), *drawn)))

    @property
    def drops(self) -> bool:
        """Whether its capacity bounds the rows of an expert."""
        return isinstance(self.capacity, Factor) or (
            isinstance(self.capacity, Dynamic) and self.capacity.max is not None
        )

    @property
    def order(self) -> PlaceOrder:
        """Which choices take the places of a capacity first: in sequence where the capacity drops nothing."""
        capacity = self.capacity
        if isinstance(capacity, Factor) or (isinstance(capacity, Dynamic) and capacity.max is not None):
            return "priority" if isinstance(self.gate, BatchPriority) else capacity.order
        return "sequence"

    @property
    def pooled(self) -> SwitchLoss | None:
        """Its balance term over the tokens of all layers, if it has one."""
        terms = (term for term in self.balance if isinstance(term, SwitchLoss) and term.over == "model")
        return next(terms, None)

    @property
    def by_rank(self) -> bool:
        """Whether its results depend on which tokens are of one data-parallel rank."""
        return self.group == "rank" or isinstance(self.gate, Topology)

    @property
    def num_experts(self) -> int:
        """Experts of all sizes together."""
        return sum(part.count for part in self.parts)

    @property
    def counts(self) -> tuple[int, ...]:
        """The experts of each size: `ep` divides each of these numbers."""
        return tuple(part.count for part in self.parts)

    @property
    def parts(self) -> tuple[Experts, ...]:
        """The experts, one entry for each size."""
        return self.experts if isinstance(self.experts, tuple) else (self.experts,)


class Layer(Node):
    """One layer after every `layers` block: attention, then `ffn` or `moe`, each with norms and a residual."""

    word = "layers"
    form = "block"
    selects = True
    exclusive = (("ffn", "moe"),)
    attention: Annotated[Attention, Doc("how tokens see each other")]
    ffn: Annotated[FeedForward | None, Doc("a dense feed-forward")] = None
    moe: Annotated[Moe | None, Doc("a mixture of experts in its place")] = None


class Subject(NamedTuple):
    """What a file compiles to, a model or one layer: name, width, dtype, and each layer's mixture, if any."""

    name: str
    dim: int
    dtype: DType
    mixtures: tuple[Moe | None, ...]
    inner: Mapping[str, Moe] = {}
    """The mixtures that experts of others are, by name."""
    keep_in_fp32: tuple[KeptPart, ...] = ()
    rounds_logits: bool = False
    """Whether routers' logits and the weights of choices are of `dtype`, and not of fp32."""

    def dtype_of(self, part: KeptPart) -> DType:
        """The dtype in which the parameters of `part` compute."""
        return DType.FP32 if part in self.keep_in_fp32 else self.dtype

    def within(self, experts: Experts) -> Moe | None:
        """The mixture that each of these experts is; None for feed-forwards."""
        return self.inner[experts.body.name] if isinstance(experts.body, Mixture) else None

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.mixtures)


class LayerModule(Node):
    """`layer "name" { … }`: a mixture by itself, `[…, dim]` to the same, or the inside of `mixture("name")`."""

    word = "layer"
    form = "block"
    labelled = True
    name: BlockLabel
    dim: Annotated[PositiveInt | None, Doc("width of a token; inside a model it is the model's")] = None
    dtype: Annotated[DType, _NO_FP16, Doc("of computation; parameters that train stay fp32")] = DType.BF16
    keep_in_fp32: Annotated[tuple[Literal["routers"], ...], _KEPT] = ()
    router_dtype: Annotated[Literal["fp32", "model"], _ROUTERS] = "fp32"
    moe: Annotated[Moe, Doc("the mixture")]

    @property
    def subject(self) -> Subject:
        """The layer as what a file compiles to: it has a `dim` then."""
        assert self.dim is not None
        rounds = self.router_dtype == "model"
        return Subject(
            self.name, self.dim, self.dtype, (self.moe,), keep_in_fp32=self.keep_in_fp32, rounds_logits=rounds
        )


class Model(Node):
    """`model "name" { … }`: a decoder-only language model, or a classifier of images."""

    word = "model"
    form = "block"
    labelled = True
    name: BlockLabel
    vocab: Annotated[PositiveInt | None, Doc("number of token ids; images have none")]
    dim: Annotated[PositiveInt, Doc("width of the residual stream")]
    depth: Annotated[int, at_least(1), at_most(MAX_LAYERS, "MOE0401"), Doc("number of layers")]
    context: Annotated[PositiveInt | None, Doc("longest sequence; default: `train.sequence`")] = None
    dtype: Annotated[DType, _NO_FP16, Doc("of computation; parameters that train stay fp32")] = DType.BF16
    keep_in_fp32: Annotated[tuple[KeptPart, ...], _KEPT] = ()
    router_dtype: Annotated[Literal["fp32", "model"], _ROUTERS] = "fp32"
    norm: Annotated[RmsNorm | LayerNorm, Doc("of each layer's attention and feed-forward, and at the end")] = RmsNorm()
    norm_place: Annotated[
        Literal["pre", "post", "res_post", "sandwich"],
        Doc(
            "`pre` x + f(norm(x)); `post` norm(x + f(x)), and none at the end (Vaswani et al. 2017); `res_post` "
            "x + norm(f(x)) (Swin V2, OLMo 2); `sandwich` x + norm(f(norm(x))) (CogView, Gemma 2)"
        ),
    ] = "pre"
    parallel_residual: Annotated[
        Literal["none", "one_norm", "two_norms"],
        Doc(
            "attention and the feed-forward side by side, x + attention(norm(x)) + ffn(norm(x)): with `one_norm` for "
            "both (GPT-J, PaLM), or with `two_norms` (GPT-NeoX)"
        ),
    ] = "none"
    embedding: Annotated[TokenEmbedding | Patches, Doc("how token ids, or patches of images, become vectors")] = (
        TokenEmbedding()
    )
    head: Annotated[Classes | None, Doc("the classes of images; default: scores of the next token")] = None
    residual_multiplier: Annotated[
        Positive, Doc("factor on what attention and the feed-forward add to the residual stream (Granite: 0.22)")
    ] = 1.0
    layers: Annotated[tuple[Layer, ...], Doc("one entry a layer; equal neighbours are one object")]

    @property
    def subject(self) -> Subject:
        """The model as what a file compiles to."""
        mixtures = tuple(layer.moe for layer in self.layers)
        rounds = self.router_dtype == "model"
        return Subject(self.name, self.dim, self.dtype, mixtures, keep_in_fp32=self.keep_in_fp32, rounds_logits=rounds)

    def has(self, part: KeptPart) -> bool:
        """Whether any layer has such parameters."""
        if part == "sinks":
            return any(getattr(layer.attention, "sinks", False) for layer in self.layers)
        gates = (getattr(of, "gate", None) for layer in self.layers for of in (layer.moe, layer.attention))
        return any(gate is not None and not isinstance(gate, Hash) for gate in gates)

    @property
    def outputs(self) -> int:
        """Logits of a token, or of an image: ids or classes."""
        outputs = self.head.count if self.head is not None else self.vocab
        assert outputs is not None, "the language requires `vocab` or `head`"
        return outputs

    @property
    def length(self) -> int | None:
        """The length of every sequence where the model fixes it: the patches of an image, and its class token."""
        return self.embedding.tokens + self.has_class_token if isinstance(self.embedding, Patches) else None

    @property
    def has_class_token(self) -> bool:
        """Whether a learned token stands before the patches of each image."""
        return self.head is not None and self.head.pool == "first"


def distinct_layers(layers: Sequence[Layer]) -> list[tuple[Layer, list[int]]]:
    """Each distinct layer with the numbers of all its layers, ordered by the first number.

    Two layers are the same if they are one object, or equal and made in Python, without spans. The printer and the
    compiler both use this function, so a Spec that is printed and read again compiles to the same layers.
    """
    alike: dict[object, tuple[Layer, list[int]]] = {}
    for number, layer in enumerate(layers):
        key = layer if layer.span() is None else id(layer)
        alike.setdefault(key, (layer, []))[1].append(number)
    return list(alike.values())
