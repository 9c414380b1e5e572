"""A checkpoint records every field of a file that changes what its model computes."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from pydantic import ValidationError

from moec.grammar import load_text
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.printer import to_text
from moec.grammar.schema import CallKind, Kind, NumberKind, WordKind, fields
from moec.grammar.spec import Spec
from moec.grammar.spec.base import Node
from moec.passes.ir.texts.text import print_program
from moec.passes.lower.lower_model import lower
from moec.runtime.checkpoint.format.index import ModelFields
from moec.runtime.checkpoint.model_fields import differences, fields_of

ROPE = "rope(scaling = {})"
MOE = "moe {{ experts = {}; gate = {}; {} }}"
TEXT = """
model "m" {{ vocab = 32; dim = 16; depth = 1; context = 64; {model}
  layers {{ attention = {attention}; {ffn} }} }}
{inner}
cluster "c" {{ device = cpu; level "process" {{ size = 1 }} }}
train {{ batch = 2; sequence = 8 }}
"""
USUAL = {"model": "", "attention": "mha(heads = 2)", "ffn": "ffn = swiglu(8, clamp = 7, alpha = 1.7)", "inner": ""}
INNER = """
layer "inner" { moe { experts = 3 * swiglu(4, clamp = 7); gate = topk(2, score = sigmoid, normalize = true) } }
"""


def mixture(experts: str = "4 * gelu(4)", gate: str = "topk(2)", beside: str = "") -> str:
    return MOE.format(experts, gate, beside)


FILES: dict[str, dict[str, str]] = {
    "dense": {"model": "embedding = tokens(multiplier = 2, separator = 3, padding = 0)"},
    "post": {"model": "norm_place = post; norm = layer_norm(eps = 0.001)"},
    "linear": {"attention": f"mha(heads = 2, window = 3, sinks = true, clip = 3, rope = {ROPE.format('linear(2)')})"},
    "ntk": {"attention": f"gqa(heads = 2, kv_heads = 1, rope = {ROPE.format('ntk(2, original = 16)')})"},
    "yarn": {"attention": f"mha(heads = 2, rope = {ROPE.format('yarn(4, original = 16)')})"},
    "llama3": {"attention": f"mha(heads = 2, rope = {ROPE.format('llama3(4, low = 1, high = 4, original = 16)')})"},
    "mla": {"attention": "mla(heads = 2, kv_rank = 4, nope_dim = 4, rope_dim = 2, value_dim = 4, rope = rope())"},
    "moa": {
        "attention": "moa(heads = 4, kv_heads = 2, experts = 5, gate = topk(2), normalize = true, "
        "balance = [switch_loss(0.1)])"
    },
    "topk": {"ffn": mixture(gate="topk(2, groups = 2, keep_groups = 1, scale = 2)", beside="shared = gelu(4)")},
    "online": {"ffn": mixture(gate="topk(2, bias = online(0.1), jitter = 0.1)", beside="residual = gelu(4)")},
    "capacity": {"ffn": mixture(beside="capacity = factor(1.5, eval = 2); balance = [switch_loss(0.1)]")},
    "dynamic": {"ffn": mixture(beside="capacity = dynamic(max = 1); group = batch")},
    "hash": {"ffn": mixture(gate="hash(2)")},
    "sparsemixer": {"ffn": mixture(gate="sparsemixer(2)")},
    "dselect_k": {"ffn": mixture(gate="dselect_k(2, entropy = 0.1)")},
    "expert_choice": {"ffn": mixture(gate="expert_choice(1)")},
    "lora": {"ffn": mixture("4 * lora(2, alpha = 4)")},
    "conv": {"ffn": mixture("[2 * conv(4), 2 * swiglu(4, clamp = 7)]")},
    "nested": {"ffn": mixture('4 * mixture("inner")'), "inner": INNER},
}
"""Files whose fields are changed, one by one."""


def changed(node: Node) -> Iterator[tuple[str, Node]]:
    """`node` with one field, of itself or of a node inside, changed: the field as `Class.field`."""
    for known in fields(type(node)).values():
        value = getattr(node, known.name)
        items = value if isinstance(value, tuple) else (value,)
        for number, item in enumerate(items):
            for name, new in changed(item) if isinstance(item, Node) else ():
                others = (*items[:number], new, *items[number + 1 :]) if isinstance(value, tuple) else new
                yield name, node.replace(**{known.name: others})
        for other in others_than(value, known.kinds):
            try:
                yield f"{type(node).__name__}.{known.name}", node.replace(**{known.name: other})
            except ValidationError:
                continue


def others_than(value: Any, kinds: tuple[Kind, ...]) -> Iterator[Any]:
    """Values of these kinds near `value`, some of which the field may not take."""
    for kind in kinds:
        match kind:
            case WordKind():
                yield from (word for word in kind.values.values() if word != value)
            case NumberKind(whole=True):
                yield from (1, 2, 5) if not isinstance(value, int) else (value + 1, 2 * value)
            case NumberKind():
                exact, near = Fraction if kind.exact else float, isinstance(value, int | float | Fraction)
                yield from (exact(value * 3) / 4, exact(value + 2)) if near else (exact(3) / 4, exact(2))
            case CallKind():
                for cls in kind.classes.values():
                    if not any(known.required for known in fields(cls).values()) and cls is not type(value):
                        yield cls()


def computed(spec: Spec) -> tuple[str, dict[str, Any]]:
    """The text of a file's Program, and the shapes of its parameters."""
    program = lower(spec)
    shapes = {p.name: (block.name, p.shape) for block in program.blocks for p in block.parameters}
    return print_program(program, spans=False), shapes


def test_every_field_that_changes_what_a_model_computes_is_told_of() -> None:
    """Fields of `model` and of `layer` are changed one by one; the Program says which of them change the results."""
    found = set[str]()
    for name, given in FILES.items():
        spec = load_text(TEXT.format(**USUAL | given)).unwrap()
        recorded, (text, shapes) = ModelFields(**fields_of(spec)), computed(spec)
        assert differences(recorded, spec) == []
        wholes = [(field, spec.replace(model=model)) for field, model in changed(spec.model)]
        wholes += [
            (f"inner {field}", spec.replace(layers=(layer,))) for each in spec.layers for field, layer in changed(each)
        ]
        for field, other in wholes:
            if field in found:
                continue
            loaded = load_text(to_text(other))
            if loaded.spec is None:
                continue
            try:
                there, of_shapes = computed(loaded.spec)
            except DiagnosticError:
                continue
            if there != text and of_shapes == shapes:
                assert differences(recorded, loaded.spec), (name, field)
                found.add(field)
    assert found >= EXPECTED


EXPECTED = {
    *("Model.context", "Model.residual_multiplier", "Model.parallel_residual", "Model.dtype", "RmsNorm.eps"),
    *("TokenEmbedding.multiplier", "TokenEmbedding.logits_multiplier", "TokenEmbedding.padding"),
    *("Rope.theta", "Rope.fraction", "Yarn.factor", "Llama3.low", "Mha.window", "Mha.clip", "Moa.normalize"),
    *("Moa.gate", "Moe.gate", "Moe.group", "Moe.capacity", "Factor.eval", "SwitchLoss.weight", "Online.rate"),
    *("SwiGLU.clamp", "Lora.alpha", "TopK.score", "TopK.k", "DSelectK.gamma", "Hash.seed", "ExpertChoice.factor"),
    *("inner Moe.gate", "inner TopK.score", "inner TopK.normalize", "inner TopK.k", "inner SwiGLU.clamp"),
}
