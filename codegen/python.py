"""A stage's graphs as readable Python, for people (`stages/0.py`). Never imported."""

from __future__ import annotations

from moec.codegen.graph import Arg, DTypeLiteral, Graph, Node, Ref, StageGraphs
from moec.codegen.operators import GETITEM


def python_text(stage: StageGraphs) -> str:
    """One function per graph, each line with its layout and the `.moe` line it serves."""
    head = f'"""Stage {stage.index}, for reading: moec runs stages/{stage.index}.json and never imports this file."""\n'
    return "\n\n".join([head, *(_function(graph) for graph in stage.graphs)]) + "\n"


def _function(graph: Graph) -> str:
    inputs = ", ".join(node.target for node in graph.nodes if node.op == "placeholder")
    name = "".join(c if c.isalnum() else "_" for c in graph.name).strip("_")
    lines = [f"def {name}(self, {inputs}):  # {graph.name}"]
    lines += [f"    {_line(node)}" for node in graph.nodes if node.op != "placeholder"]
    return "\n".join(lines)


def _line(node: Node) -> str:
    args = [_arg(a) for a in node.args] + [f"{name}={_arg(a)}" for name, a in sorted(node.kwargs.items())]
    match node.op:
        case "get_attr":
            text = f"{node.name} = self.{node.target}"
        case "call_module":
            text = f"{node.name} = self.{node.target}({', '.join(args)})"
        case "output":
            return f"return {', '.join(args)}"
        case _:
            call = f"{args[0]}[{args[1]}]" if node.target == GETITEM else f"torch.ops.{node.target}({', '.join(args)})"
            text = f"{node.name} = {call}"
    evaluated = f"in evaluation ({', '.join(_arg(a) for a in node.evaluation)})" if node.evaluation else None
    notes = [note for note in (node.layout, evaluated, node.span) if note]
    return f"{text}  # {', '.join(notes)}" if notes else text


def _arg(arg: Arg) -> str:
    match arg:
        case Ref():
            return arg.node
        case DTypeLiteral():
            return f"torch.{TORCH_DTYPES[arg.dtype]}"
        case tuple():
            return repr(list(arg))
    return repr(arg)


TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "int64": "int64"}
"""The language's names of dtypes, and torch's."""
