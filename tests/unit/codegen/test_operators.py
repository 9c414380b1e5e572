"""The operators that emitted graphs name: every op is emitted, and only pure operators of `aten` and `moec` are used.

A plan holds no graph and names no operator. What it can make a job run is what the emission functions name.
"""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.image_plans import image_plan
from support.plans import FOUR, layer_plan, moe_plan, moe_text
from torch import fx

import moec
from moec.codegen.emit import emit_graph, info_of, target_name
from moec.codegen.emit.functions import EMISSIONS
from moec.codegen.plan import Plan
from moec.grammar.spec import Spec
from moec.passes.ir import Op
from moec.passes.ir.ops import Attention
from moec.passes.lower.lower_model import lower
from moec.runtime import ops  # noqa: F401  (registers torch.ops.moec.*)

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.moe"))

MLA = "heads = 4, kv_rank = 8, nope_dim = 4, rope_dim = 2"
FORMS: dict[str, dict[str, Any]] = {
    "ep": {},
    "tp": {"tp": 2, "ep": 4},
    "tp, tokens whole": {"tp": 4, "ep": 2, "sequence_parallel": False},
    "one rank": {"ranks": 1, "ep": 1, "dtype": "bf16"},
    "one rank, fp32": {"ranks": 1, "ep": 1},
    "padding, both ways": {
        "model": "embedding = tokens(padding = 0)",
        "attention": "gqa(heads = 4, kv_heads = 2, causal = false)",
    },
    "more ranks than heads of k": {"ranks": 4, "tp": 4, "ep": 1},
    "padding": {"model": "embedding = tokens(padding = 3)"},
    "padding, tp": {"model": "embedding = tokens(padding = 3)", "tp": 2, "ep": 4},
    "padding, one rank": {"model": "embedding = tokens(padding = 3)", "ranks": 1, "ep": 1},
    "positions": {"model": "embedding = tokens(tied = true, positions = learned); norm = layer_norm(bias = true)"},
    "bf16": {"dtype": "bf16", "model": "norm = layer_norm(bias = false)"},
    "bf16, tp": {"dtype": "bf16", "tp": 2, "ep": 4, "bias": "all"},
    "capacity of a sequence": {"beside": "capacity = factor(1.0); group = sequence"},
    "capacity of a batch": {"beside": "capacity = factor(0.5, eval = 1.5); group = batch", "tp": 2, "ep": 4},
    "capacity of a rank": {"beside": "capacity = factor(0.75); group = rank"},
    "capacity, one rank": {"beside": "capacity = factor(1.0)", "ranks": 1, "ep": 1},
    "capacity by priority": {"beside": "capacity = factor(1.0, order = priority)", "tp": 2, "ep": 4},
    "balance over all layers": {"balance": "[switch_loss(0.1, over = model)]", "tp": 2, "ep": 4},
    "loads above": {"gate": "topk(2, noise = 0.5)", "balance": "[load_loss(0.1, of = probabilities)]", "tp": 2},
    "renormalized weights": {"beside": "capacity = factor(0.5, renormalize = true)", "tp": 2, "ep": 4},
    "capacity by weight": {"beside": "capacity = factor(1.0, order = weight)", "tp": 2, "ep": 4},
    "capacity token by token": {"beside": "capacity = dynamic(max = 1.0, order = token); group = batch"},
    "capacity with reroutes": {"beside": "capacity = factor(1.0); overflow = reroute", "tp": 2, "ep": 4},
    "capacity at random": {"beside": "capacity = dynamic(max = 1.0, order = random)"},
    "balanced assignment": {"gate": "base", "tp": 2, "ep": 4},
    "slots": {"gate": "soft(2)", "balance": "[]", "tp": 2, "ep": 4},
    "slots, padding": {"gate": "soft", "balance": "[]", "model": "embedding = tokens(padding = 3)", "dtype": "bf16"},
    "merged experts": {"gate": "smear", "balance": "[]", "tp": 2, "ep": 4, "expert": "gelu(8, bias = true)"},
    "experts choose": {"gate": "expert_choice(2)", "balance": "[]", "tp": 2, "ep": 4},
    "capacity of the busiest": {"beside": "capacity = dynamic()", "ep": 4},
    "capacity of the busiest, up to one": {"beside": "capacity = dynamic(max = 1.0)", "ep": 4},
    "dense paths beside": {"beside": "shared = swiglu(8, gated = true); residual = gelu(8)"},
    "geglu": {"expert": "geglu(8)", "ffn": "geglu(8)"},
    "relu": {"expert": "relu(8)", "ffn": "relu(8)"},
    "relu2": {"expert": "relu2(8)", "ffn": "relu2(8)", "gate": "topk(1, score = sigmoid)"},
    "expert biases": {"expert": "swiglu(8, bias = true)", "ffn": "swiglu(8, bias = true)"},
    "balance of first choices": {"balance": "[gshard_loss(0.1)]", "tp": 2},
    "clamp and alpha": {"expert": "swiglu(8, clamp = 7)", "ffn": "swiglu(8, clamp = 7, alpha = 1.7)"},
    "balance of weights": {"balance": "[importance_loss(0.1)]", "tp": 2},
    "balance of loads": {"gate": "noisy_topk(2)", "balance": "[load_loss(0.1)]", "tp": 2},
    "linear": {"expert": "linear(bias = true)", "ffn": "linear"},
    "linear, places": {"expert": "linear", "ffn": "linear", "beside": "capacity = factor(1.0)"},
    "lora": {"expert": "lora(3, alpha = 8)", "ffn": "lora(2)"},
    "conv": {"expert": "conv(4)", "ffn": "conv(4)", "model": "embedding = tokens(padding = 3, separator = 2)"},
    "conv, places": {"expert": "conv(4, bias = true)", "beside": "capacity = factor(1.0)", "tp": 2},
    "no balance": {"balance": "[]"},
    "biases that balance": {"gate": "topk(2, bias = online(0.01))", "tp": 2, "ep": 4},
    "experts by ids": {"balance": "[]", "gate": "hash(2)", "tp": 2},
    "a random second expert": {"gate": "gshard", "tp": 2},
    "a random second expert, places": {"gate": "gshard", "tp": 2, "beside": "capacity = factor(1.0)"},
    "learned noise": {"gate": "noisy_topk(2)", "tp": 2},
    "sampled experts": {"gate": "sparsemixer(2)", "tp": 2},
    "experts by codes": {"gate": "dselect_k(2, entropy = 0.1)", "balance": "[]", "tp": 2},
    "near experts": {"gate": "topology(2, share = 0.2)", "tp": 2, "ep": 4, "levels": FOUR},
    "jitter": {"gate": "topk(2, jitter = 0.1)", "tp": 2},
    "noise": {"gate": "topk(2, noise = 0.5)", "tp": 2},
    "balance of sequences": {
        "gate": "topk(2, score = sigmoid, groups = 4, keep_groups = 2)",
        "balance": "[sequence_loss(0.1)]",
        "tp": 2,
    },
    "balance of devices": {"balance": "[device_loss(0.1)]", "tp": 2, "beside": "group = batch"},
    "all experts": {"gate": "dense", "tp": 2},
    "attention between experts": {"gate": "attention_router(2)", "tp": 2},
    "a router of bf16": {"gate": "topk(2, bias = learned)", "model": "router_dtype = model", "dtype": "bf16", "tp": 2},
    "packed texts": {"model": "embedding = tokens(separator = 3)", "tp": 2},
    "attention to later tokens": {"attention": "mha(heads = 4, causal = false)"},
    "multipliers": {"model": "residual_multiplier = 0.22; embedding = tokens(multiplier = 12.0)", "tp": 2},
    "clip": {"attention": "mha(heads = 4, clip = 8.0)"},
    "replay": {"optimizer": "sgd(lr = 0.1); replay = true", "tp": 2, "gate": "topk(2, score = sigmoid)"},
    "window": {"attention": "mha(heads = 4, window = 3)"},
    "window both ways": {"attention": "mha(heads = 4, window = 3, causal = false)"},
    "sinks": {"attention": "mha(heads = 4, sinks = true)", "tp": 2},
    "padding marked by the batch": {"model": "embedding = tokens(padding = given)", "tp": 2},
    "texts marked by the batch": {
        "model": "embedding = tokens(segments = true, padding = 0)",
        "beside": "capacity = factor(0.5, eval = 1.5)",
        "tp": 2,
    },
    "mla": {"attention": f"mla({MLA}, value_dim = 4, q_rank = 4, rope = rope())", "tp": 2},
    "mla, sinks": {"attention": f"mla({MLA}, value_dim = 8, sinks = true)"},
    "gates of heads": {"attention": "mha(heads = 4, output_gate = element)", "tp": 2},
    "heads by token": {
        "attention": "moa(heads = 4, kv_heads = 2, experts = 5, gate = topk(2), normalize = true, bias = all)",
        "model": "embedding = tokens(padding = 3)",
        "tp": 2,
    },
    "a degree per layer": {"ranks": 4, "tp": 2, "ep": 4, "mixtures": ((8, 2), (16, None), (8, 1))},
}
"""Options of `moe_plan` that together make every op (`test_every_op_is_in_one_of_these_plans`)."""


def emitted(program: Any) -> list[fx.Node]:
    return [node for block in program.blocks for node in emit_graph(program, block).nodes]


def plans() -> dict[str, Plan]:
    made = {name: moe_plan(**options) for name, options in FORMS.items()}
    made |= {path.name: moec.compile(path) for path in EXAMPLES}
    made |= {"images": image_plan(), "images, tp": image_plan(ranks=4, tp=2, ep=2)}
    made |= {f"class token, tp {tp}": image_plan(ranks=2, tp=tp, ep=2, image=6, pool="first") for tp in (1, 2)}
    made |= {"windows": image_plan(attention="mha(heads = 4, causal = false, grid = windows(2, shift = 1))")}
    made |= {"a layer": layer_plan(), "a layer, ep": layer_plan(ep=4)}
    parts = moe_text(expert="gelu(3)").replace("8 * gelu(3)", "[4 * swiglu(8), 4 * linear]")
    inner = 'layer "inner" { moe { experts = 3 * gelu(5); gate = topk(2, score = sigmoid, normalize = true) } }'
    for outer in ("topk(2, order = after)", "switch"):
        nested = moe_text(expert="gelu(3)", gate=outer, balance="[switch_loss(0.1)]")
        made[f"nested, {outer}"] = moec.compile(nested.replace("8 * gelu(3)", '8 * mixture("inner")') + inner)
    made |= {"parts": moec.compile(parts), "a layer": layer_plan(), "a layer, ep": layer_plan(ep=4)}
    made |= {f"sliced experts, ep {ep}": moe_plan(expert="gelu(4, bias = true)", ep=ep, etp=2) for ep in (1, 2)}
    return made


@pytest.fixture(scope="module")
def nodes() -> list[fx.Node]:
    """Every node of these plans, in training and in evaluation, sharded and as the reference runs them."""
    found = []
    for plan in plans().values():
        spec: Spec = plan.spec
        found += emitted(plan.program)
        found += emitted(lower(spec))
    return found


def test_every_op_has_an_emission():
    assert {kind for kind in EMISSIONS if kind in Op.registry.values()} == set(Op.registry.values())


def test_every_op_is_in_one_of_these_plans(nodes: list[fx.Node]):
    """An op that no plan makes would not be tested here."""
    assert set(Op.registry.values()) - {type(info_of(node).op) for node in nodes} == set()


def test_graphs_name_operators_of_torch_and_moec_only(nodes: list[fx.Node]):
    for node in nodes:
        match node.op:
            case "call_function":
                target = node.target
                assert target is operator.getitem or isinstance(target, torch._ops.OpOverload), node
                assert target is operator.getitem or target.namespace in ("aten", "moec"), target  # type: ignore[union-attr]
            case "call_module":
                assert info_of(node).op is not None
                assert target_name(node) == f"layers.{info_of(node).op.layer}"  # type: ignore[union-attr]
            case _:
                assert node.op in ("placeholder", "output"), node


def overloads(nodes: list[fx.Node]) -> set[torch._ops.OpOverload]:
    return {node.target for node in nodes if isinstance(node.target, torch._ops.OpOverload)}


def test_no_operator_writes_its_inputs_or_draws_numbers(nodes: list[fx.Node]):
    found = overloads(nodes)
    assert len(found) > 60
    for target in found:
        assert not target._schema.is_mutable, target
        assert torch.Tag.nondeterministic_seeded not in target.tags or target in SEEDED, target
        assert "generator" not in {argument.name for argument in target._schema.arguments}, target


VIEWS = {
    "detach",
    "expand",
    "flatten",
    "permute",
    "select",
    "slice",
    "squeeze",
    "transpose",
    "unflatten",
    "unsqueeze",
    "view",
}


def test_no_views_that_overlap_leave_an_op_or_reach_an_operator_of_moec(nodes: list[fx.Node]):
    """Dynamo ends a graph at some of these operators. The gradient of a result then has the result's strides: where
    they overlap, its numbers overwrite each other. torch replaces strides of 0 alone.
    """
    assert not {target for target in overloads(nodes) if "strided" in target.name()}
    found = [node for node in nodes if node.target is torch.ops.aten.unfold.default and node.args[2] > node.args[3]]  # type: ignore[operator]
    assert {info_of(node).op.mnemonic for node in found} == {"windows", "window_linear", "expert_linear"}  # type: ignore[union-attr]
    for node in found:
        for user in node.users:
            assert user.op == "call_function", (node, user)
            assert info_of(user).op is info_of(node).op, (node, user)
            assert user.target.namespace != "moec", (node, user)  # type: ignore[union-attr]
            if user.target.name().removeprefix("aten::").split(".")[0] in VIEWS:  # type: ignore[union-attr]
                found.append(user)


SEEDED = {torch.ops.aten.scaled_dot_product_attention.default}
"""It draws random numbers only for dropout, which is 0.0."""


def test_attention_drops_nothing(nodes: list[fx.Node]):
    attention = [node for node in nodes if node.target in SEEDED]
    assert attention
    assert all(node.args[4] == 0.0 for node in attention)


def test_attention_is_causal_by_torch_or_in_blocks(nodes: list[fx.Node]):
    attention = [node for node in nodes if node.target in SEEDED and isinstance(info_of(node).op, Attention)]
    assert {(node.args[3] is None, info_of(node).op.causal) for node in attention} == {  # type: ignore[union-attr]
        (True, True),
        (True, False),
        (False, False),
    }
    in_blocks = [node for node in nodes if node.target is torch.ops.moec.masked_attention.default]
    assert {info_of(node).op.causal for node in in_blocks} == {True, False}  # type: ignore[union-attr]
    for node in attention:
        assert node.args[5] == (node.args[3] is None and info_of(node).op.causal)  # type: ignore[union-attr]


def test_arguments_are_what_the_schemas_take(nodes: list[fx.Node]):
    """Arguments match torch's schema in number and type; none is an object of the plan."""
    for node in nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            schema = node.target._schema
            by_name = {argument.name: argument for argument in schema.arguments}
            positional = [argument for argument in schema.arguments if not argument.kwarg_only]
            assert len(node.args) <= len(positional), node
            assert node.kwargs.keys() <= by_name.keys(), node
            given = [*zip(positional, node.args, strict=False), *((by_name[k], v) for k, v in node.kwargs.items())]
            for argument, value in given:
                assert any(fits(value) for fits in KINDS[str(argument.type)]), (node.target, argument, value)
            missing = {a.name for a in schema.arguments if not a.has_default_value()} - {a.name for a, _ in given}
            assert not missing, (node.target, missing)


def _of(*types: type) -> Any:
    return lambda value: type(value) in types


def _list_of(kind: type) -> Any:
    return lambda value: isinstance(value, list | tuple) and all(type(item) is kind for item in value)


_NODE, _NONE = _of(fx.Node), _of(type(None))
KINDS: dict[str, tuple[Any, ...]] = {
    "Tensor": (_NODE,),
    "Optional[Tensor]": (_NODE, _NONE),
    "int": (_of(int, torch.dtype),),
    "Optional[int]": (_of(int, torch.dtype), _NONE),
    "Optional[str]": (_of(str), _NONE),
    "number": (_of(int, float),),
    "Optional[number]": (_of(int, float), _NONE),
    "float": (_of(float),),
    "Optional[float]": (_of(float), _NONE),
    "bool": (_of(bool),),
    "str": (_of(str),),
    "List[int]": (_list_of(int),),
    "List[float]": (_list_of(float),),
    "List[Tensor]": (_list_of(fx.Node),),
    "Optional[List[int]]": (_list_of(int), _NONE),
}
"""The Python types of an argument by its type in a schema, which writes a dtype as an int."""
