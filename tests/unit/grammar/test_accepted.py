"""Warnings that a comment accepts, before `moec fmt` and after."""

from __future__ import annotations

import pytest
from support.plans import moe_text

from moec.grammar import load_text
from moec.grammar.format import formatted
from moec.grammar.source import Source


def codes(text: str) -> list[str]:
    return [found.code for found in load_text(text).diagnostics]


def test_a_comment_accepts_warnings_of_its_statement_by_code_and_no_error() -> None:
    text = moe_text(gate="topk(2)", balance="[switch_loss(0.1)]", beside="group = rank", ranks=4)
    assert codes(text) == ["MOE0315"]
    for comment, warns in {
        "# accept: MOE0315": False,
        "# as the paper's runs; accept: MOE0321, MOE0315, which counts so": False,
        '# accept: MOE0315, as "Paper" counts': False,
        "# accept: MOE0321": True,
        "# accept: MOE03150": True,
        "# do not accept: MOE0315": True,
    }.items():
        assert codes(text.replace("group = rank", f"group = rank  {comment}\n")) == ["MOE0315"] * warns
    assert codes(f"# accept: MOE0315\n{text}") == ["MOE0315"]
    assert not load_text(text.replace("group = rank", "group = ranks  # accept: MOE0202\n")).spec


ACCEPT = "# accept: MOE0315, MOE0322"
MIXTURE = "experts = 4 * swiglu(8); gate = topk(2); group = rank"


@pytest.mark.parametrize(
    ("moe", "left"),
    [
        (f"moe {{ {MIXTURE}; capacity = factor(1) }} }}  {ACCEPT}", []),
        (f"moe {{ {ACCEPT}\n {MIXTURE}; capacity = factor(1) }} }}", []),
        (f"moe {{ {MIXTURE}; capacity = factor(1) {ACCEPT}\n }} }}", ["MOE0315"]),
        (f"moe {{ {MIXTURE}; capacity = factor(1, {ACCEPT}\n eval = 2) }} }}", ["MOE0315"]),
        (f"moe {{ {MIXTURE}; capacity = factor( {ACCEPT}\n 1, eval = 2) }} }}", ["MOE0315"]),
        (f"moe {{ {MIXTURE} {ACCEPT}\n capacity = factor(1) }} }}", ["MOE0322"]),
        (f"moe {{\n {ACCEPT}\n {MIXTURE}; capacity = factor(1) }} }}", ["MOE0315", "MOE0322"]),
        (f"moe {{ {MIXTURE}; capacity = factor(1) }} }}\n {ACCEPT}", ["MOE0315", "MOE0322"]),
    ],
)
def test_laid_out_again_a_file_accepts_the_same_warnings(moe: str, left: list[str]) -> None:
    layers = f"layers {{ attention = mha(heads = 4); {moe}"
    cluster = 'cluster "c" { device = cpu; level "p" { size = 2 } }'
    text = f'model "m" {{ vocab = 32; dim = 16; depth = 2; context = 8; {layers} \n}}\n{cluster}'
    again = formatted(Source("m", text))
    assert again != text
    for written in (text, again):
        assert codes(written) == left, written
