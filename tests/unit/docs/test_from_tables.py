"""The tables of docs/from come from the table of other systems' names, and what they say to write is good in a file."""

from __future__ import annotations

import re
from pathlib import Path

from support.tables import each_row

from moec.commands.explain import explain
from moec.grammar.diagnostics import Severity, render
from moec.grammar.foreign import shared
from moec.grammar.foreign.lookup import TABLES, key_of
from moec.grammar.foreign.pages import NO_FLAGS, PAGES, rows_of, tables
from moec.grammar.foreign.row import SYSTEMS, Row
from moec.grammar.load import load_text

FOLDER = Path(__file__).parents[3] / "docs" / "from"
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
BEGIN = "<!-- tables from grammar/foreign: pytest tests/unit/docs/test_from_tables.py --update-golden -->\n"
END = "<!-- end of the tables -->\n"
ROWS = [row for rows in (shared.ROWS, *TABLES.values()) for row in rows]


def test_there_is_a_page_for_each_system_that_was_read() -> None:
    assert sorted(TEXTS) == sorted(("README", *PAGES))
    assert {key for key, system in SYSTEMS.items() if system.read_at} == set(PAGES.values())


@each_row("page", PAGES)
def test_the_tables_are_current(page: str, update_golden: bool) -> None:
    before, mark, rest = TEXTS[page].partition(BEGIN)
    written, end, after = rest.partition(END)
    assert mark
    assert end
    if update_golden:
        (FOLDER / f"{page}.md").write_text(f"{before}{mark}\n{tables(page)}\n{end}{after}", encoding="utf-8")
    else:
        assert written == f"\n{tables(page)}\n", "run the tests with --update-golden"


@each_row("page", PAGES)
def test_every_name_of_a_page_is_explained_with_what_the_page_says(page: str) -> None:
    system = SYSTEMS[PAGES[page]]
    for row in rows_of(PAGES[page]):
        for name in row.names.split():
            found = explain(name)
            assert found.subject == key_of(name), name
            assert f" {system.name}" in found.markdown, name
            for form in (row.form, *(form for _, form in row.cases)):
                assert f"`{form.replace('{}', row.example)}`" in found.markdown or not form, name


def test_names_without_a_flag_are_names_of_megatrons() -> None:
    assert {name for row in rows_of("mg") for name in row.names.split()} >= NO_FLAGS


# ---- what changes numbers was read ------------------------------------------------------------------------

NUMBERS = ("model.layers.moe.gate", "model.layers.moe.capacity", "model.layers.moe.balance", "model.layers.attention")
"""Paths of words whose translation decides what a layer computes."""


def of_files() -> list[tuple[str, Row]]:
    """The rows of systems' own files."""
    return [(SYSTEMS[key].name, row) for key, rows in TABLES.items() for row in rows]


def test_every_row_that_changes_numbers_says_where_it_was_read() -> None:
    read = [row for _, row in of_files() if row.read]
    assert len(read) > 150
    for system, row in of_files():
        is_number = row.path.startswith(NUMBERS) or bool(row.differs or row.cases) or "no equal" in row.note
        assert row.read or not is_number or row.names in UNREAD, f"{system}: {row.names}"


UNREAD = {"attention_head_dim", "eos_token_id bos_token_id"}
"""Names without a meaning of their own in numbers: a width, and what separates texts."""


@each_row("row", [row for _, row in of_files() if row.differs])
def test_a_row_without_an_equal_says_so_on_its_page_and_in_messages(row: Row) -> None:
    assert not row.convert
    text = explain(row.names.split()[0]).markdown
    assert "here is no equal" in text
    assert row.differs.partition("{}")[0].lower() in text.lower()


def test_names_that_are_in_no_source_are_in_no_row() -> None:
    words = {key_of(name.partition(":")[0]) for row in ROWS for name in row.names.split()}
    assert not words & {"moe_router_norm_topk_prob", "moe_router_type", "hidden_size_per_token", "moe_top_2"}


# ---- what is written here -------------------------------------------------------------------------------

BLOCKS = {
    "model": {"vocab": "32", "dim": "4096", "context": "32_768", "depth": "32", "dtype": "bf16"},
    "layers": {"attention": "mha(heads = 32)"},
    "moe": {"experts": "64 * gelu(8)", "gate": "topk(2)"},
    "train": {"batch": "1024", "sequence": "4096"},
    "parallel": {},
}
"""A file without what the forms say: the names of each block."""
FURTHER = {
    "model": {"norm", "embedding", "head", "router_dtype"},
    "layers": {"ffn"},
    "moe": {"capacity", "balance", "shared", "residual", "overflow", "group"},
    "train": {"optimizer", "master"},
    "parallel": {
        *("tp", "ep", "etp", "pp", "cp", "dp", "zero", "recompute", "offload", "microbatches"),
        *("schedule", "virtual", "stages", "sequence_parallel"),
    },
}
NUMBERS_FOR = {
    r"\bWEIGHT\b": "0.01",
    r"\bCOEFFICIENT\b": "0.01",
    r"\bFACTOR\b": "1.25",
    r"\bWIDTH\b": "64",
    r"\bK\b": "8",
    r"\bNUMBER\b": "4",
    r"\{ … \}": "{ experts = 8 * gelu(8); gate = topk(2) }",
}
"""What stands for a number of the reader's, with a number."""
CLUSTER = """
cluster "c" {
  device = h100
  level "node" { size = 8; bandwidth = 450GB/s }
  level "rail" { size = 8; bandwidth = 50GB/s }
}
"""


def file_of(code: str) -> str:
    """A file with the code of a form, in the block to which it belongs."""
    for word, number in NUMBERS_FOR.items():
        code = re.sub(word, number, code)
    if code.startswith("rope = "):
        code = f"attention = gqa(heads = 32, kv_heads = 8, {code})"
    if code.startswith("attention = mla(heads = 128"):
        code = code.replace("heads = 128", "heads = 32")
    blocks = {block: dict(names) for block, names in BLOCKS.items()}
    ranges = cluster = ""
    name, equals, value = code.partition(" = ")
    block = next((each for each in blocks if name in blocks[each] or name in FURTHER[each]), "")
    if block and equals:
        blocks[block][name] = value
        if name in ("overflow", "capacity"):
            blocks["moe"].setdefault("capacity", "factor(1.25)")
        if "patches(" in value or name == "head":
            blocks["model"] |= {"embedding": value if "patches(" in value else "patches(image = 224, size = 16)"}
            blocks["model"]["head"] = value if name == "head" else "classes(10)"
            del blocks["model"]["vocab"], blocks["train"]["sequence"], blocks["model"]["context"]
            blocks["layers"]["attention"] = "mha(heads = 32, causal = false)"
    elif code.startswith("layers "):
        ranges = code
    elif code.startswith("level "):
        level = code if code.startswith('level "node"') else f'level "node" {{ size = 8 }}; {code}'
        cluster = f'cluster "c" {{ device = h100; {level} }}'
    else:
        assert code.startswith("adapt {"), f"{code} stands in no block of this test"
    said = {each: "; ".join(f"{name} = {value}" for name, value in blocks[each].items()) for each in blocks}
    mixture = "" if name == "ffn" else f"; moe {{ {said['moe']} }}"
    model = f'model "m" {{ {said["model"]}; layers {{ {said["layers"]}{mixture} }}; {ranges} }}'
    adapt = code if code.startswith("adapt {") else ""
    return f"{model}\n{cluster or CLUSTER}train {{ {said['train']} }}\nparallel {{ {said['parallel']} }}\n{adapt}\n"


STATED = {name for known in (*BLOCKS.values(), *FURTHER.values()) for name in known}


def statements(row: Row) -> list[str]:
    """The assignments that a row's note and its help for values name, with an example of the value."""
    spans = re.findall(r"`([^`]+)`", " ".join((row.note, row.differs, *row.but.values())))
    found = [span for span in spans if span.partition(" = ")[0] in STATED and " = " in span and "…" not in span]
    return [span.replace("{}", row.example or "1.25") for span in found]


FORMS = sorted(
    {
        (form.replace("{}", row.example), "not supported yet" in row.note)
        for row in ROWS
        for form in (row.form, *(form for _, form in row.cases))
        if form
    }
)


@each_row(("form", "later"), FORMS)
def test_what_is_written_here_is_good_in_a_file(form: str, later: bool) -> None:
    found = load_text(file_of(form)).diagnostics
    errors = [each for each in found if each.severity is Severity.ERROR]
    if later:
        assert {each.code for each in errors} <= {"MOE0202"}, render(errors)
    else:
        assert not errors, render(errors)


@each_row("statement", sorted({each for row in ROWS for each in statements(row)}))
def test_what_a_note_or_a_help_names_is_good_in_a_file(statement: str) -> None:
    errors = [each for each in load_text(file_of(statement)).diagnostics if each.severity is Severity.ERROR]
    assert not errors, render(errors)


def test_there_are_many_forms() -> None:
    assert len(FORMS) > 130
    assert len({each for row in ROWS for each in statements(row)}) > 40


@each_row("page", ["deepspeed", "huggingface", "megatron", "tutel"])
def test_a_page_says_in_which_block_a_group_stands(page: str) -> None:
    (line,) = re.findall(r"is a line of the `moe` block, .*: `(moe \{ …; .*group = rank \})`", TEXTS[page])
    filled = line.replace("…", "experts = 8 * gelu(8); gate = topk(2)")
    found = load_text(file_of(f"layers 0..31 {{ {filled} }}")).diagnostics
    assert {each.code for each in found} == {"MOE0315"}, render(found)  # the warning that it depends on the ranks
    balance = re.findall(r"balance = \[(.*)\]", line)[0]
    inside = f"balance = [{balance.replace(')', ', group = rank)')}]"
    assert any(each.severity is Severity.ERROR for each in load_text(file_of(inside)).diagnostics)


@each_row("wrong", ["gate = topk(2, normalise = true)", "embedding = tokens(tie = true)"])
def test_a_misspelt_form_is_found(wrong: str) -> None:
    assert any(each.severity is Severity.ERROR for each in load_text(file_of(wrong)).diagnostics)
