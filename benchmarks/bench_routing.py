"""Routing by every gate of the language, forward and backward, relative to `topk(2)`: ratios of alternated runs.

The gates are those of the schema; one that nothing compiles yet is skipped by its mark. A gate runs as its lowering and
emission make it, on 8,192 tokens and 64 experts, from the tokens' vectors (`--dim`, small by default, so that the
router's product does not hide the choice) to weights, experts and probabilities. In each round every gate runs once;
the figures are the ratios of the fastest and of the median runs, in processor time, which other programs disturb less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import get_args

import torch
from report import Row, median, parser, report
from torch import Tensor

from moec.codegen.emit import emit_function
from moec.grammar import load_text
from moec.grammar.checking.supported import unsupported
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.schema import fields
from moec.grammar.spec import Spec
from moec.grammar.spec.base import Node
from moec.grammar.spec.gates import Gate, Smear, Soft, TopK
from moec.passes.degrees.degrees import choose_degrees
from moec.passes.ir import Output, Value
from moec.passes.lower.block_builder import Builder
from moec.passes.lower.gates import lower_gate
from moec.passes.lower.gates.placed_topology import with_places
from moec.passes.lower.lower_model import lower
from moec.runtime import ops

TOKENS, EXPERTS, LIMIT = 8192, 64, 1.3
PLAIN = "topk(2)"
REQUIRED = {"k": "2"}
"""Values of fields that a gate must have."""
OPTIONS = {
    "score": "score = sigmoid",
    "order": "order = after",
    "normalize": "normalize = true",
    "scale": "scale = 2.5",
    "bias": "bias = online(0.001)",
    "groups": "groups = 8, keep_groups = 4",
    "group_score": "groups = 8, keep_groups = 4, group_score = max",
    "jitter": "jitter = 0.01",
    "noise": "noise = 0.1",
}
"""A value of each option of `topk`, with what it needs."""
MORE = (
    "topk(2, bias = learned, order = after)",
    "topk(2, score = sigmoid, normalize = true, scale = 2.5, groups = 8, keep_groups = 4, bias = online(0.001))",
    "topology(2, share = 0.25)",
)

Run = Callable[[], float]


def gates() -> Iterator[str]:
    """A call of each gate, and of `topk` with each of its options."""
    yield PLAIN
    for kind in get_args(Gate):
        if kind in (Soft, Smear):  # their tokens choose no experts
            continue
        needed = [f"{REQUIRED[name]}" for name, field in fields(kind).items() if field.required]
        call = f"{kind.word}({', '.join(needed)})" if needed else kind.word
        if call != PLAIN:
            yield call
    yield from (f"topk(2, {OPTIONS[name]})" for name in fields(TopK) if name in OPTIONS)
    yield from MORE


def spec_of(gate: str, dim: int) -> Spec | None:
    """A model whose mixture has this gate; None where moec does not compile it yet."""
    text = f"""
    model "routed" {{
      vocab = 64; dim = {dim}; depth = 1; dtype = fp32; context = {TOKENS}
      layers {{ attention = mha(heads = 1); moe {{ experts = {EXPERTS} * gelu(8); gate = {gate} }} }}
    }}
    cluster "here" {{
      device = cpu
      level "node" {{ size = 2; bandwidth = 4GB/s }}
      level "rail" {{ size = 2; bandwidth = 1GB/s }}
    }}
    """
    try:
        spec = load_text(text).unwrap()
    except DiagnosticError:
        return None
    return None if unsupported(spec) else spec


def routing(spec: Spec, dim: int) -> Run:
    """Runs the gate's ops once, forward and backward; returns seconds of processor time."""
    degrees = choose_degrees(spec)
    layer = with_places(spec, degrees).model.layers[0]
    assert layer.moe is not None
    gate: Node = layer.moe.gate
    program = lower(spec, degrees)
    block = program.block(next(iter(program.layer_blocks)))
    shape = (1, TOKENS)
    given = {
        "h": Value(name="h", shape=(*shape, dim), dtype="fp32", role="residual"),
        "tokens": Value(name="tokens", shape=shape, dtype="int64", role="tokens"),
        "keys": Value(name="keys", shape=shape, dtype="int64", role="keys"),
    }
    b = Builder(block.name, tuple(given.values()), block.span)
    gated = lower_gate(b, spec.subject, gate, EXPERTS, "h", {"tokens": "tokens", "keys": "keys"}, ordered=False)
    results = [name for name in (gated.w, gated.p) if name is not None]
    alone = b.block([Output(name, "residual") for name in results])
    function = emit_function(
        replace(program, blocks=tuple(alone if x is block else x for x in program.blocks)), block.name
    )
    draw = torch.Generator().manual_seed(0)
    ids, zero = torch.randint(64, shape, generator=draw), torch.tensor(0)
    x = torch.randn(*shape, dim, generator=draw, requires_grad=True)
    values = {"training": 1, "seed": 0, "step": 0}
    arguments: list[Tensor] = [x, ids, ops.token_keys(ids, torch.zeros(1, dtype=torch.int64), zero, zero), zero]
    arguments += [torch.tensor(values.get(name, 0)) for name in function.settings]
    arguments += [torch.zeros([int(d) for d in state.shape]) for state in function.states]
    for parameter in alone.parameters:
        arguments.append(torch.randn(parameter.shape, generator=draw).mul_(dim**-0.5).requires_grad_())

    def run() -> float:
        start = time.process_time()
        found = function.module(*arguments)
        outputs = [y for y in (found if isinstance(found, tuple) else (found,)) if y.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
        seconds = time.process_time() - start
        for argument in arguments:
            argument.grad = None
        return seconds

    return run


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--dim", type=int, default=16, help="width of the tokens' vectors")
    options.add_argument("--rounds", type=int, default=40)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--only", default="", help="the gates whose calls begin with one of these (a; b)")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    asked = [gate for gate in gates() if gate == PLAIN or gate.startswith(tuple(chosen.only.split("; ")))]
    specs = {gate: spec_of(gate, chosen.dim) for gate in asked}
    runs = {gate: routing(spec, chosen.dim) for gate, spec in specs.items() if spec is not None}
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {gate: [] for gate in runs}
    for _ in range(chosen.rounds):
        for gate, run in runs.items():
            seconds[gate].append(run())
    plain = seconds[PLAIN]
    rows = [Row(PLAIN, min(plain) * 1e3, "ms")]
    for gate, times in seconds.items():
        if gate != PLAIN:
            rows.append(Row(f"{gate}: fastest", min(times) / min(plain), "×", LIMIT))
            rows.append(Row(f"{gate}: median", median(times) / median(plain), "×", LIMIT))
    rows.append(Row("gates that are not compiled yet", sum(spec is None for spec in specs.values())))
    report(f"Routing of {TOKENS:,} tokens to {EXPERTS} experts, vectors of {chosen.dim}", rows, chosen.json)


if __name__ == "__main__":
    main()
