"""What the blocks of a whole Program are called, take and give: what jobs, layers and `moec verify` rely on.

`forward` runs the layers. A model's gives `logits` first, a layer's `y`; both may give `balance` (the weighted balance
terms, a scalar) and `counts_3` (rows per expert of layer 3). Beside it stand blocks that give one scalar each.
"""

from __future__ import annotations

import re

from moec.grammar.diagnostics import InternalError
from moec.passes.ir.layout import REPLICATED, Partial
from moec.passes.ir.ops import Call
from moec.passes.ir.program import Block, Program

FORWARD = "forward"

MODEL_RESULT, LAYER_RESULT = "logits", "y"
"""What `forward` gives first: of a model, and of a layer."""

BALANCE = "balance"
COUNTS = re.compile(r"counts_(?P<layer>[0-9]{1,6})")

LOSS_BLOCKS = {"valid_labels": ("labels",), "loss": ("logits", "labels", "valid")}
"""The blocks of a model's loss, and what they take."""

BALANCE_BLOCKS = {"num_tokens": None, "aux_loss": ("balance", "num_tokens")}
"""The blocks of the balance terms, where there are any. `num_tokens` takes what `forward` does."""


def first_result(program: Program) -> str:
    """What `forward` gives first."""
    return program.block(FORWARD).outputs[0]


def scalar_blocks(program: Program) -> tuple[str, ...]:
    """The blocks beside `forward` that give one scalar each. A layer has no loss."""
    loss = tuple(LOSS_BLOCKS) if first_result(program) == MODEL_RESULT else ()
    return loss + tuple(BALANCE_BLOCKS) if BALANCE in program.block(FORWARD).outputs else loss


def layer_calls(program: Program) -> tuple[Call, ...]:
    """The calls of layers, in the order in which `forward` runs them."""
    return tuple(op for op in program.block(FORWARD).ops if isinstance(op, Call))


def layers_by_block(program: Program) -> dict[str, list[int]]:
    """The numbers of the layers that run each block; blocks that no layer runs have none."""
    found: dict[str, list[int]] = {block.name: [] for block in program.blocks}
    for call in layer_calls(program):
        found[call.block].append(call.layer)
    return found


def has_interface(program: Program) -> None:
    """The blocks are those that a job runs, and take and give what it expects. Raises `InternalError`."""
    _require(FORWARD in program.block_map, "there is no block called forward")
    forward = program.block(FORWARD)
    _require(len(forward.inputs) == 1, "forward takes more than tokens, or x")
    first, *others = forward.outputs or ("",)
    _require(first in (MODEL_RESULT, LAYER_RESULT), "forward does not give logits, or y, first")
    _require(len(set(others)) == len(others), "forward gives one result twice")
    _require(all(name == BALANCE or COUNTS.fullmatch(name) for name in others), "forward gives an unknown result")
    names = scalar_blocks(program)
    for name in names:
        _require(name in program.block_map, f"there is no block called {name}")
        _require_scalar(program.block(name), forward)
    layers = [call.layer for call in layer_calls(program)]
    _require(layers == list(range(len(layers))), "forward does not call the layers 0, 1, … once each, in order")
    known = {FORWARD, *names, *(call.block for call in layer_calls(program))}
    unknown = sorted(set(program.block_map) - known)
    _require(not unknown, f"nothing runs the block {unknown[0] if unknown else ''}")


def _require_scalar(block: Block, forward: Block) -> None:
    wanted = {**LOSS_BLOCKS, **BALANCE_BLOCKS}[block.name]
    taken = tuple(value.name for value in block.inputs)
    _require(taken == (wanted or tuple(value.name for value in forward.inputs)), f"{block.name} takes {taken}")
    scalar = len(block.outputs) == 1 and block.output_values()[0].shape == ()
    _require(scalar, f"{block.name} does not give one scalar")
    _require(not block.parameters, f"{block.name} has parameters")
    reduced = not any(
        isinstance(p, Partial) for v in block.output_values() for _, p in (v.layout or REPLICATED).placements
    )
    _require(block.final and reduced, f"{block.name} does not give a scalar that is reduced over all ranks")


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise InternalError(complaint)
