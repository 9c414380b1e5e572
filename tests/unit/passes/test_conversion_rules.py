"""A conversion is declared in one class: which files name one, and what its class says beside placements."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from support.tables import each_row

from moec.passes.ir.op import operand_names
from moec.passes.ir.ops.conversion import Conversion, conversion_classes

ROOT = Path(__file__).parents[3]
SOURCES = [
    path for folder in ("grammar", "passes", "codegen", "runtime", "moec") for path in (ROOT / folder).rglob("*.py")
]
OF_ROWS = {"all_gather_rows": "AllGatherRows", "reduce_scatter_rows": "ReduceScatterRows"}


@cache
def words_of(path: Path) -> frozenset[str]:
    """The words in a source file."""
    return frozenset(re.findall(r"\w+", path.read_text(encoding="utf-8")))


def naming(*names: str) -> set[str]:
    """The source files in which one of these names stands."""
    return {str(path.relative_to(ROOT)) for path in SOURCES if not words_of(path).isdisjoint(names)}


@each_row("mnemonic", OF_ROWS)
def test_a_conversion_takes_three_source_files(mnemonic: str):
    assert naming(mnemonic, OF_ROWS[mnemonic]) == {
        "passes/ir/ops/ragged_conversions.py",
        "runtime/ops/ragged_collectives.py",
        "runtime/verify/cluster/shuffles.py",
    }


def test_the_pass_that_inserts_conversions_names_none():
    for kind in conversion_classes():
        for path in ("passes/place/communicate.py", "passes/fuse.py", "passes/ir/verifier.py"):
            assert path not in naming(kind.__name__), kind
        for path in ("runtime/verify/blame.py", "runtime/verify/judge.py", "runtime/verify/cluster/lockstep.py"):
            assert path not in naming(kind.__name__), kind


@each_row("kind", conversion_classes())
def test_backward_takes_the_operands_of_forward(kind: type[Conversion]):
    """The operators of both take as many tensors, for the others are those of forward."""
    attributes = {"dim": 1, "given": 0, "wanted": 1, "reverse": False}
    one = kind.over("tp", **{name: attributes[name] for name in kind.attribute_names() if name in attributes})
    back = one.backward()
    if not isinstance(back, Conversion):
        assert back in ("identity", "none")
        return
    assert back.axis == "tp"
    assert tensors(type(back)) == tensors(kind)
    assert back.carries >= kind.carries


def tensors(kind: type[Conversion]) -> int:
    required, optional = operand_names(kind)
    return len([name for name in required if name not in kind.typing]) + len(optional)
