"""The tables of docs/from, one page for each system that has one, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moec.grammar.foreign import shared
from moec.grammar.foreign.lookup import TABLES
from moec.grammar.foreign.row import SYSTEMS, Row

PAGES = {"deepspeed": "ds", "fastmoe": "fm", "huggingface": "hf", "megatron": "mg", "torchtitan": "tt", "tutel": "tu"}
"""The pages by name, with the keys of their systems."""
NO_FLAGS = frozenset(
    (
        "padded_vocab_size",
        "params_dtype",
        "share_embeddings_and_output_weights",
        "num_moe_experts",
        "num_microbatches",
        "data_parallel_size",
        "world_size",
        "mlp",
        "output_layer",
    )
)
"""Names of Megatron's in the shared rows that no flag has."""


def rows_of(key: str) -> Iterator[Row]:
    """The rows of a system, with the names that it has."""
    for row in shared.ROWS:
        parts = (name.partition(":") for name in row.names.split())
        names = [_written(name, key) for name, _, keys in parts if key in keys.split(",")]
        if names:
            yield row._replace(names=" ".join(names))
    yield from TABLES[key]


def tables(page: str) -> str:
    """Both tables of a page: what is written here, and what is elsewhere or not at all."""
    key = PAGES[page]
    rows = list(rows_of(key))
    here = [(_names(row), _here(row), _notes(row), row.read) for row in rows if row.path]
    elsewhere = [(_names(row), _filled(row, row.note), row.read) for row in rows if not row.path]
    lines = [f"Read in {SYSTEMS[key].read_at}.", "", *_table(("there", "here", "", "read in"), here), ""]
    lines += ["## Elsewhere, or not at all", "", *_table(("there", "where, or why not", "read in"), elsewhere)]
    return "\n".join(lines) + "\n"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = [head, ("---",) * len(head), *rows]
    return ["".join(f"| {cell} " if cell else "| " for cell in line) + "|" for line in lines]


def _written(name: str, key: str) -> str:
    """A name of a shared row as the system writes it."""
    return f"--{name.replace('_', '-')}" if key == "mg" and name not in NO_FLAGS else name


def _names(row: Row) -> str:
    return ", ".join(f"`{name}`" for name in row.names.split())


def _filled(row: Row, text: str) -> str:
    return text.replace("{}", row.example or "…")


def _here(row: Row) -> str:
    """The form, with the block to which it belongs where that is neither the model nor in it."""
    block, _, _ = row.path.partition(".")
    of = f" of `{block}`" if block in ("train", "parallel") else ""
    return ("no equal; nearest " if row.differs else "") + f"`{_filled(row, row.form)}`{of}"


def _notes(row: Row) -> str:
    cases = (f"{when}: `{form}`" for when, form in row.cases)
    return _filled(row, "; ".join(filter(None, (row.when, row.differs, *cases, row.note))))
