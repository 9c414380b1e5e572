"""The record of a run of the virtual cluster: its nodes with their values, and the errors that stop it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from moec.codegen.emit import info_of
from moec.passes.ir import Op, Value

PerRank = list[Any]


@dataclass(frozen=True, slots=True)
class RecordedNode:
    """A node that has run: the path of its module (`layers.1.`), and its value on every rank."""

    path: str
    fx_node: fx.Node
    values: PerRank

    @property
    def key(self) -> str:
        """The node's name in its block."""
        return info_of(self.fx_node).key

    @property
    def op(self) -> Op | None:
        """The op that it is part of; None for inputs and parameters."""
        return info_of(self.fx_node).op

    @property
    def value(self) -> Value | None:
        """The value or parameter of the Program that it computes, if any."""
        return info_of(self.fx_node).value

    @property
    def used(self) -> list[str]:
        """The keys of the nodes that it uses."""
        return [info_of(node).key for node in self.fx_node.all_input_nodes]


FAILURES = (RuntimeError, ValueError, IndexError, TypeError, AttributeError, ArithmeticError)
"""Exceptions of operators for invalid inputs."""


class StepError(Exception):
    """A node could not run because of its inputs: the plan is wrong at this node or before it."""

    def __init__(self, path: str, node: fx.Node, error: Exception) -> None:
        info = info_of(node)
        value = info.value or (info.op.results[0] if info.op is not None else None)
        super().__init__(f"{path}{value.name if value is not None else info.key}: {error}")
        self.path, self.node = path, node


class BackwardError(Exception):
    """The backward pass could not run to its end: a gradient does not fit its op."""
