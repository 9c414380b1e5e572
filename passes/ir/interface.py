"""Inputs and outputs of the blocks of a whole Program, on which jobs, layers and `moec verify` rely.

`forward` runs the layers. In a model it maps `tokens` or `images` to `logits`; in a single layer it maps `residual` to
`residual`. Either may also give `balance` and the `counts` of each layer, and a model that takes `routes` gives them.
A pipeline has a `forward` for each stage; together they take and give the same.
Update blocks give states (`state_rules.py`). Every other block gives one scalar.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from moec.grammar.diagnostics import InternalError
from moec.passes.ir.layout import REPLICATED, Partial
from moec.passes.ir.ops import Call, Replay
from moec.passes.ir.program import Block, Program
from moec.passes.ir.roles import GROUPS, ROLES, WIDTH, Role
from moec.passes.ir.state_rules import require_updates, update_blocks
from moec.passes.ir.value import SETTINGS, TRAINING, Dim, Value

FORWARD = "forward"

COUNTS: tuple[Role, ...] = ("counts", "head_counts", "made")
"""The counts of a layer, which `forward` gives: rows of experts, choices of groups of heads, choices made."""

BESIDE_TOKENS: tuple[Role, ...] = ("routes", "segments", "real", "sequences")
"""The inputs that `forward` of a model may have beside `tokens`, in this order."""

HANDED_ON: tuple[Role, ...] = ("residual", "balance", "probabilities", "choice_counts")
"""The outputs of a stage that the next stage takes. The last two are sums over the layers so far, for a balance term
over all layers."""

LOSS_BLOCKS: Mapping[str, tuple[tuple[Role, ...], Role]] = {
    "valid_labels": (("labels",), "valid"),
    "loss": (("logits", "labels", "valid"), "loss"),
}
"""The blocks of a model's loss: the roles of their inputs, in order, and the role of their output."""

BALANCE_BLOCKS: Mapping[str, tuple[tuple[Role, ...], Role]] = {
    "num_tokens": ((), "num_tokens"),
    "aux_loss": (("balance", "num_tokens"), "loss"),
}
"""The blocks of the balance terms, if there are any. `num_tokens` has the input `real` of `forward`, or its first."""


def forwards(program: Program) -> tuple[Block, ...]:
    """The block that the ranks of each stage run, in the order of the stages."""
    return tuple(program.block(stage.forward) for stage in program.stages) or (program.block(FORWARD),)


def taken_role(program: Program) -> Role:
    """The role of the first input of `forward`: `tokens` or `images` of a model, `residual` of a single layer."""
    role = forwards(program)[0].inputs[0].role
    assert role is not None
    return role


def result_role(program: Program) -> Role:
    """The role of the first output of `forward`: `logits` of a model, `residual` of a single layer."""
    return forwards(program)[-1].outputs[0].role


def scalar_blocks(program: Program) -> tuple[str, ...]:
    """The blocks beside `forward` that give one scalar each. A single layer has no loss."""
    loss = tuple(LOSS_BLOCKS) if result_role(program) == "logits" else ()
    return loss + tuple(BALANCE_BLOCKS) if forwards(program)[-1].output("balance") is not None else loss


def is_forward(block: Block) -> bool:
    """Whether the block is `forward`, or a stage's part of it."""
    return block.name.partition("[")[0] == FORWARD


def layer_calls(program: Program, stages: Collection[int] | None = None) -> tuple[Call, ...]:
    """The calls of layers, in the order in which `forward` runs them; those of some `stages` only, if given."""
    blocks = (block for stage, block in enumerate(forwards(program)) if stages is None or stage in stages)
    return tuple(op for forward in blocks for op in forward.ops if isinstance(op, Call))


def stages_of_layers(program: Program) -> dict[int, int]:
    """The stage of each layer."""
    calls = ((stage, op) for stage, forward in enumerate(forwards(program)) for op in forward.ops)
    return {op.layer: stage for stage, op in calls if isinstance(op, Call)}


def has_interface(program: Program) -> None:
    """Requires the blocks that a job runs, with the inputs and outputs that it expects. Raises `InternalError`."""
    _require(FORWARD in program.block_map, "there is no block called forward")
    for block in program.blocks:
        _require_roles(block)
        _require_settings(block, in_layer=block.name in program.layer_blocks)
    stages, calls = forwards(program), layer_calls(program)
    _require_stages(stages)
    names = scalar_blocks(program)
    for name in names:
        _require(name in program.block_map, f"there is no block called {name}")
        _require_scalar(program.block(name), stages[0], stages[-1])
    layers = [layer.number for layer in program.layers]
    in_order = layers == [call.layer for call in calls] == list(range(len(layers)))
    _require(in_order, "forward does not call the layers 0, 1, … once each, in order")
    for call, layer in zip(calls, program.layers, strict=True):
        is_body = layer.bodies == (call.block,)
        _require(is_body, f"{call.block}, which forward runs, is not the one body of layer {call.layer}")
    require_updates(program, program.layer_blocks)
    known = {*(forward.name for forward in stages), *names, *program.layer_blocks, *update_blocks(program)}
    unknown = sorted(set(program.block_map) - known)
    _require(not unknown, f"nothing runs the block {unknown[0] if unknown else ''}")
    for name in sorted(program.layer_blocks):
        _require_layer(program.block(name))
        _require_gates_of_replay(program.block(name))
    for forward in stages:
        _require_counts(program, forward)


def _require_counts(program: Program, forward: Block) -> None:
    calls = [op for op in forward.ops if isinstance(op, Call)]
    for call in calls:
        _require_handed_on(program, call, forward)
    counted = {
        (call.layer, value.name)
        for call in calls
        for value, output in zip(call.results, program.block(call.block).outputs, strict=True)
        if output.role in COUNTS
    }
    handed_on = {(output.layer, output.name) for output in forward.outputs if output.role in COUNTS}
    _require(handed_on == counted, "forward does not give the counts that its layers give")


def _require_settings(block: Block, *, in_layer: bool) -> None:
    """Requires settings of `SETTINGS`. A layer has only `training`: it may run again in backward, in a later step."""
    for setting in block.settings:
        known = SETTINGS.get(setting.name)
        _require(known == replace(setting, layout=None), f"there is no setting ${setting.name} in {block.name}")
        _require(not in_layer or setting.name == TRAINING.name, f"${setting.name} is no setting of a layer")


def _require_roles(block: Block) -> None:
    """Requires that inputs have different roles, outputs different keys, and all values the type of their role."""
    input_roles = [value.role for value in block.inputs]
    _require(len(set(input_roles)) == len(input_roles), f"{block.name} takes two inputs of one role, or without one")
    keys = [output.key for output in block.outputs]
    _require(len(set(keys)) == len(keys), f"{block.name} gives two outputs of one role")
    for value in block.inputs:
        _require(value.role is not None, f"{block.name} takes %{value.name}, which has no role")
        assert value.role is not None
        _require_type(block, value, value.role)
    for value, output in zip(block.output_values(), block.outputs, strict=True):
        if output.role != "state":  # the type of a new value is the state's (`require_updates`)
            _require_type(block, value, output.role)


def _require_type(block: Block, value: Value, role: Role) -> None:
    fits = _has_type_of(value, role)
    _require(fits, f"in {block.name} %{value.name} has the role {role}, which is {ROLES[role].doc}")


def _has_type_of(value: Value, role: Role) -> bool:
    spec = ROLES[role]
    if value.dtype not in spec.dtypes or value.ragged is not None:
        return False
    return any(_has_shape(value, shape) for shape in (spec.shape, spec.image_shape) if shape is not None)


def _has_shape(value: Value, shape: tuple[Dim, ...]) -> bool:
    if len(value.shape) != len(shape):
        return False
    return all(_fits(dim, expected) for dim, expected in zip(value.shape, shape, strict=True))


def _fits(dim: Dim, expected: Dim) -> bool:
    if expected == WIDTH:
        return isinstance(dim, int)
    return dim in ("batch", "data_ranks", 1) if expected == GROUPS else dim == expected


def _require_stages(stages: Sequence[Block]) -> None:
    """Requires that the first stage takes the model's inputs, that the last one gives the model's result, and that each
    stage after the first takes what the stage before it hands on."""
    first, last = stages[0], stages[-1]
    extras = [value.role for value in first.inputs[1:]]
    allowed: tuple[Role, ...] = () if first.input("residual") is not None else BESIDE_TOKENS
    if first.input("images") is not None:
        allowed = ("sequences",)
    expected = [role for role in allowed if role in extras]
    _require(bool(first.inputs) and extras == expected, f"forward takes {_listed(extras)} beside tokens, images or x")
    _require(bool(last.outputs), "forward gives nothing")
    input_role, result = first.inputs[0].role, last.outputs[0]
    result_roles: dict[Role | None, Role] = {"tokens": "logits", "images": "logits", "residual": "residual"}
    _require(result_roles.get(input_role) == result.role, f"forward takes {input_role} and gives {result.role} first")
    dims = 2 if input_role == "images" else 3
    _require(len(last.output_values()[0].shape) == dims, f"of {input_role}, forward does not give {dims} dims")
    if result.role == "residual":
        y, x = last.output_values()[0], first.inputs[0]
        _require((y.shape, y.dtype) == (x.shape, x.dtype), "forward gives another type than it takes")
    for forward in stages:
        _, *other_outputs = forward.outputs
        allowed_roles: tuple[Role, ...] = ("balance", "routes") if forward is last else (*HANDED_ON[1:], "routes")
        fits = all(output.role in (allowed_roles if output.layer is None else COUNTS) for output in other_outputs)
        complaint = f"{forward.name} gives more than its result, balance terms, routes and layers' counts"
        _require(fits and forward.outputs[0].layer is None, complaint)
    _require_routes(first.input("routes"), [routes for stage in stages if (routes := stage.output("routes"))])
    for stage, successor in pairwise(stages):
        _require_handed_to_next(stage, successor, first)


def _require_routes(taken: Value | None, given: Sequence[Value]) -> None:
    """Requires that the stages together give the routes of all mixtures that `forward` takes."""
    mixtures = sum(number for routes in given if isinstance(number := routes.shape[2], int))
    shapes = {(*routes.shape[:2], mixtures, routes.shape[3]) for routes in given}
    _require(shapes == ({taken.shape} if taken else set()), "forward does not give routes as it takes them")


def _require_handed_to_next(stage: Block, successor: Block, first: Block) -> None:
    roles = [value.role for value in successor.inputs]
    allowed = [*HANDED_ON, *(value.role for value in first.inputs)]
    ordered = [role for role in allowed if role in roles]
    _require(roles == ordered and roles[:1] == ["residual"], f"{successor.name} takes {_listed(roles)}")
    for role in HANDED_ON:
        output, expected = stage.output(role), successor.input(role)
        types = [value and (value.shape, value.dtype, value.layout) for value in (output, expected)]
        _require(types[0] == types[1], f"{stage.name} does not give the {role} that {successor.name} takes")


def _require_scalar(block: Block, first: Block, last: Block) -> None:
    roles, output_role = {**LOSS_BLOCKS, **BALANCE_BLOCKS}[block.name]
    input_roles = [value.role for value in block.inputs]
    counted = first.input("real") or first.inputs[0]
    expected_roles = [*(roles or (counted.role,))]
    _require(input_roles == expected_roles, f"{block.name} takes {_listed(input_roles)}")
    for value in block.inputs:
        assert value.role is not None
        source = first.input(value.role) or last.output(value.role) or value
        _require((source.shape, source.dtype) == (value.shape, value.dtype), f"{block.name} takes another {value.role}")
    keys = [output.key for output in block.outputs]
    _require(keys == [(output_role, None, None)], f"{block.name} does not give one scalar, {output_role}")
    _require(not block.parameters, f"{block.name} has parameters")
    reduced = not any(
        isinstance(p, Partial) for v in block.output_values() for _, p in (v.layout or REPLICATED).placements
    )
    _require(block.final and reduced, f"{block.name} does not give a scalar that is reduced over all ranks")


def _require_layer(block: Block) -> None:
    roles, keys = [value.role for value in block.inputs], [output.key for output in block.outputs]
    inputs_fit = roles[:1] == ["residual"] and all(role is not None and ROLES[role].in_layers for role in roles[1:])
    _require(inputs_fit, f"{block.name} takes {_listed(roles)}")
    outputs_fit = keys[:1] == [("residual", None, None)] and set(keys[1:]) <= {
        *((role, None, None) for role in COUNTS),
        ("balance", None, None),
        ("probabilities", None, None),
        ("counted", None, None),
        ("choices", None, None),
    }
    _require(outputs_fit, f"{block.name} gives {_listed(role for role, *_ in keys)}")


def _require_gates_of_replay(block: Block) -> None:
    """Requires that replayed choices replace the choices that a gate made by the same scores."""
    producers = {value.name: op for op in block.ops for value in op.results}
    for op in (op for op in block.ops if isinstance(op, Replay)):
        scores, experts, _ = op.operands
        gate = producers.get(experts)
        results = {} if gate is None else dict(zip(gate.gives.split(), gate.results, strict=False))
        fits = gate is not None and gate.scores and gate.named(gate.operands)[gate.scores] == scores
        _require(bool(fits) and results["experts"].name == experts, f"%{experts}, which no gate chose by %{scores}")


def _require_handed_on(program: Program, call: Call, forward: Block) -> None:
    """Requires that `forward` passes its inputs on to a layer that has inputs of the same roles."""
    for name, value in zip(call.operands, program.block(call.block).inputs, strict=True):
        # A model numbers the segments that it is given.
        forwarded = None if value.role in (None, "residual", "segments") else forward.input(value.role)
        is_forwarded = forwarded is None or forwarded.name == name
        _require(is_forwarded, f"forward hands layer {call.layer} %{name} as {value.role}")


def _listed(roles: Iterable[object]) -> str:
    return ", ".join(map(str, roles)) or "nothing"


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise InternalError(complaint)
