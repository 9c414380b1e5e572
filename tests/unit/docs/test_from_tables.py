"""The tables of docs/from: every name is known to the table of aliases, and what is written here is good in a file."""

from __future__ import annotations

import re
from pathlib import Path

from support.tables import each_row

from moec.commands.explain import explain
from moec.grammar.aliases import alias
from moec.grammar.diagnostics import Severity, render
from moec.grammar.load import load_text
from moec.grammar.words_in_words import words

FOLDER = Path(__file__).parents[3] / "docs" / "from"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
WORDS = words()
SYSTEMS = ("deepspeed", "huggingface", "megatron", "tutel")
NOT_NAMES_OF_OURS = {"k", "is_postscore", "seeds", "result_func", "scan_expert_func"}
"""Arguments of theirs that the table of aliases leaves out: `k` is a word here too, the others are Python's side."""


def lines(page: str, heading: str = "") -> list[list[str]]:
    """The cells of each row of a table, the page's first or that under `heading`."""
    text = PAGES[page]
    text = text.partition(f"## {heading}\n")[2].partition("\n## ")[0] if heading else text.partition("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]


def names(rows: list[list[str]]) -> list[tuple[str, str]]:
    """Each name of theirs, with the second cell of its row."""
    found = [(name, row[1]) for row in rows for name in re.findall(r"`([^`]+)`", row[0])]
    return [(name, cell) for name, cell in found if name not in NOT_NAMES_OF_OURS]


EQUIVALENT = [(page, name, here) for page in SYSTEMS for name, here in names(lines(page))]
ELSEWHERE = [(page, name) for page in SYSTEMS for name, _ in names(lines(page, "Elsewhere, or not at all"))]
CELLS = sorted({(row[1], "not supported yet" in "".join(row[2:])) for page in SYSTEMS for row in lines(page)})
"""What is written here, and whether the row says that it is not supported yet."""


def test_there_is_a_page_for_each_system() -> None:
    assert sorted(PAGES) == ["README", *SYSTEMS]
    assert len(EQUIVALENT) > 100
    assert len(ELSEWHERE) > 15
    assert len(CELLS) > 60


@each_row(("page", "name", "here"), EQUIVALENT)
def test_a_name_of_theirs_is_found_where_the_page_says(page: str, name: str, here: str) -> None:
    found = alias(name)
    if (same := name.lstrip("-").replace("-", "_")) in WORDS:  # `--weight-decay`: the same word here
        assert re.search(rf"\b{same}\b", here)
        assert explain(name).subject == same
        return
    assert found is not None, f"{name} is in no row of the table of aliases"
    assert found.path, f"{name}: {found.note}"
    words = set(re.findall(r"\w+", here))
    assert words & {found.name, found.head, *found.path[-2:]}, f"{name} is `{found.written()}`"


@each_row(("page", "name"), ELSEWHERE)
def test_a_name_that_is_elsewhere_or_nowhere_has_no_word_in_the_table_of_aliases(page: str, name: str) -> None:
    found = alias(name)
    assert found is not None, f"{name} is in no row of the table of aliases"
    assert not found.path


# ---- what is written here -------------------------------------------------------------------------------

BLOCKS = {
    "model": {"vocab": "32", "dim": "4096", "context": "32_768", "depth": "32", "dtype": "bf16"},
    "layers": {"attention": "mha(heads = 32)"},
    "moe": {"experts": "64 * gelu(8)", "gate": "topk(2)"},
    "train": {"batch": "1024", "sequence": "4096"},
    "parallel": {},
}
"""A file without what the cells say: the names of each block."""
FURTHER = {
    "model": {"norm", "embedding"},
    "layers": {"ffn"},
    "moe": {"capacity", "balance", "shared", "residual", "overflow"},
    "train": {"optimizer"},
    "parallel": {"tp", "ep", "etp", "pp", "cp", "zero", "recompute", "offload", "microbatches", "sequence_parallel"},
}
CALLS = {
    "rope": "attention = gqa(heads = 32, kv_heads = 8, rope = {})",
    "gqa": "attention = {}",
    "mla": "attention = {}",
    "topk": "gate = {}",
    "factor": "capacity = {}",
    "switch_loss": "balance = [{}]",
    "gelu": "experts = 16 * {}",
    "adamw": "optimizer = {}",
}
"""Where a call stands that a cell shows by itself."""
LEFT_OUT = {
    "gqa": "heads = 32, kv_heads = 8",
    "mla": "heads = 32, kv_rank = 512, nope_dim = 128, rope_dim = 64, value_dim = 128",
    "topk": "8",
}
"""What `…` stands for at the beginning of a call."""
CLUSTER = """
cluster "c" {
  device = h100
  level "node" { size = 8; bandwidth = 450GB/s }
  level "rail" { size = 8; bandwidth = 50GB/s }
}
"""


def file_of(cell: str) -> str:
    """A file with the code of a cell, in the block to which it belongs."""
    (code, *_) = re.findall(r"`([^`]+)`", cell)
    code = code.replace("{ … }", "{ experts = 8 * gelu(8); gate = topk(2) }").replace("= …", "= 1")
    call = code.partition("(")[0]
    if call in CALLS:
        given = set(re.findall(r"(\w+) =", code))
        rest = ", ".join(each for each in LEFT_OUT.get(call, "").split(", ") if each.partition(" =")[0] not in given)
        code = CALLS[call].format(code.replace("…", rest))
    elif code.startswith("rope = "):
        code = CALLS["rope"].format(code.removeprefix("rope = "))
    blocks = {block: dict(names) for block, names in BLOCKS.items()}
    ranges = ""
    name, equals, value = code.partition(" = ")
    block = next((each for each in blocks if name in blocks[each] or name in FURTHER[each]), "")
    if block and equals:
        blocks[block][name] = value
        if name == "overflow":
            blocks["moe"]["capacity"] = "factor(1.25)"
    elif code.startswith("layers "):
        ranges = code
    else:
        assert code.startswith("adapt {"), f"{code} stands in no block of this test"
    said = {each: "; ".join(f"{name} = {value}" for name, value in blocks[each].items()) for each in blocks}
    mixture = "" if name == "ffn" else f"; moe {{ {said['moe']} }}"
    model = f'model "m" {{ {said["model"]}; layers {{ {said["layers"]}{mixture} }}; {ranges} }}'
    adapt = code if code.startswith("adapt {") else ""
    return f"{model}\n{CLUSTER}train {{ {said['train']} }}\nparallel {{ {said['parallel']} }}\n{adapt}\n"


@each_row(("cell", "later"), CELLS)
def test_what_is_written_here_is_good_in_a_file(cell: str, later: bool) -> None:
    found = load_text(file_of(cell)).diagnostics
    errors = [each for each in found if each.severity is Severity.ERROR]
    if later:
        assert {each.code for each in errors} <= {"MOE0202"}, render(errors)
    else:
        assert not errors, render(errors)


@each_row("page", SYSTEMS)
def test_a_page_says_in_which_block_a_group_stands(page: str) -> None:
    (line,) = re.findall(r"is a line of the `moe` block, .*: `(moe \{ …; .*group = rank \})`", PAGES[page])
    filled = line.replace("…", "experts = 8 * gelu(8); gate = topk(2)")
    found = load_text(file_of(f"`layers 0..31 {{ {filled} }}`")).diagnostics
    assert {each.code for each in found} == {"MOE0315"}, render(found)  # the warning that it depends on the ranks
    balance = re.findall(r"balance = \[(.*)\]", line)[0]
    inside = f"`balance = [{balance.replace(')', ', group = rank)')}]`"
    assert any(each.severity is Severity.ERROR for each in load_text(file_of(inside)).diagnostics)


@each_row("wrong", ["`gate = topk(2, normalise = true)`", "`embedding = tokens(tie = true)`"])
def test_a_misspelt_cell_is_found(wrong: str) -> None:
    assert any(each.severity is Severity.ERROR for each in load_text(file_of(wrong)).diagnostics)
