"""Mistakes in files, as people make them who come from another system, with the message and what they have to do.

Each page has the file, what `moec check` prints, and the way out: `moec check --fix`, or the lines to change, in a
`diff` block. Either way a file without errors comes out.
"""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest

from moec.commands.fixes import apply_fixes
from moec.driver import check
from moec.grammar.diagnostics import Diagnostic, Severity, render

PAGES = sorted((Path(__file__).parent / "files").glob("*.md"))
PROMISE = re.compile(r"`moec check --fix` does (?:it|both)\.")
BY_IMPORT = {"json"}
"""Pages whose way out is another command."""
ROUNDS = 5


def parts(page: Path) -> tuple[str, str]:
    """The file and the printed text of a page."""
    found = dict(re.findall(r"```(\w+)\n(.*?)```", page.read_text(encoding="utf-8"), re.S))
    return found["moe"], found["text"]


def changes(page: Path) -> list[tuple[str, str]]:
    """The lines to take out of the file of a page, each group with the lines that come in their place."""
    groups = re.findall(
        r"((?:^-.*\n)+)((?:^\+.*\n)*)", page.read_text(encoding="utf-8").partition("```diff\n")[2], re.M
    )
    return [(re.sub(r"^-", "", old, flags=re.M), re.sub(r"^\+", "", new, flags=re.M)) for old, new in groups]


def errors(found: tuple[Diagnostic, ...] | list[Diagnostic]) -> list[Diagnostic]:
    return [diagnostic for diagnostic in found if diagnostic.severity is Severity.ERROR]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_mistake_in_a_file_has_the_message_of_its_page(page: Path, tmp_path: Path, update_golden: bool) -> None:
    file, printed = parts(page)
    path = tmp_path / "model.moe"
    path.write_text(file, encoding="utf-8")
    found = check(path)
    assert errors(found)
    assert all(diagnostic.help for diagnostic in errors(found) if not diagnostic.fix), "no way out"
    shown = render(found, width=120)
    if update_golden:
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace(f"```text\n{printed}```", f"```text\n{shown}```"), encoding="utf-8")
    else:
        assert printed == shown


def promised() -> list[Path]:
    """The pages that say that `moec check --fix` makes a good file."""
    return [page for page in PAGES if PROMISE.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", promised(), ids=lambda page: page.stem)
def test_a_fix_that_is_promised_leaves_no_error(page: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.moe"
    path.write_text(parts(page)[0], encoding="utf-8")
    left = mended(path)
    assert not left, render(left)


@pytest.mark.parametrize("page", [page for page in PAGES if changes(page)], ids=lambda page: page.stem)
def test_the_lines_of_a_page_make_a_good_file(page: Path, tmp_path: Path) -> None:
    file = parts(page)[0]
    path = tmp_path / "model.moe"
    path.write_text(file, encoding="utf-8")
    mended(path)
    assert errors(check(path)), "`moec check --fix` alone makes a good file: say so"
    for old, new in changes(page):
        assert file.count(old) == 1
        file = file.replace(old, new)
    path.write_text(file, encoding="utf-8")
    assert not errors(check(path)), render(check(path))


def test_every_page_has_a_way_out_that_is_tried() -> None:
    tried = [page.stem for page in PAGES if page in promised() or changes(page)]
    assert {page.stem for page in PAGES} - set(tried) == BY_IMPORT
    assert len(promised()) >= 28


def mended(path: Path) -> list[Diagnostic]:
    """The errors that are left once fixes are applied; every round leaves fewer, and none of a new code."""
    found = errors(check(path))
    for _ in range(ROUNDS):
        if not apply_fixes(path, found):
            break
        after = errors(check(path))
        assert len(after) < len(found), render(after)
        assert {each.code for each in after} <= {each.code for each in found}, render(after)
        found = after
    return found


GOOD = """\
model "small" {
  vocab   = 32_000
  dim     = 512
  context = 2048
  depth   = 4
  dtype   = bf16
  layers {
    attention = gqa(heads = 8, kv_heads = 2, rope = rope())
    moe {
      experts  = 8 * swiglu(1024)
      gate     = topk(1, normalize = true)
      capacity = factor(1.25)
      balance  = [switch_loss(0.01)]
    }
  }
}

train {
  batch     = 64
  sequence  = 2048
  optimizer = adamw(lr = 3e-4)
}
"""

SLIPS = {
    "vocab   =": "vocab_size =",
    "dim     = 512": "hidden_size = 512,",
    "context =": "contxt:",
    "depth   =": "num_layers =",
    "bf16": '"bfloat16"',
    "heads = 8,": "num_heads = 8",
    "kv_heads = 2": "kv_heds = 2",
    "rope = rope()": "rope = true",
    "8 * swiglu(1024)": "SwiGLU(1024) * 8",
    "topk(1, normalize": "top_k(1, norm_topk_prob",
    "factor(1.25)": "1.25x",
    "[switch_loss(0.01)]": "switch_los(0.01)",
    "batch     =": "global_batch_size ==",
    "sequence  = 2048": "seq_length = 2048 // tokens",
    "adamw(lr": "AdamW[learning_rate",
    "layers {": "layers = {",
    "moe {": "mo {",
}


@pytest.mark.parametrize("number", [1, 2])
def test_fixes_of_several_mistakes_never_make_another(number: int, tmp_path: Path) -> None:
    path = tmp_path / "model.moe"
    for chosen in combinations(SLIPS, number):
        text = GOOD
        for right in chosen:
            assert right in text
            text = text.replace(right, SLIPS[right], 1)
        path.write_text(text, encoding="utf-8")
        mended(path)
