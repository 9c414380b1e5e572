"""Options of attention that cannot stand together are refused, each at its place."""

from __future__ import annotations

from support.tables import each_row

from moec.driver import compile as compile_source
from moec.grammar import load_text

MODEL = """
model "m" {{
  vocab = 64; dim = 32; depth = 2; context = 16{context}
  layers {{ attention = {attention}; ffn = gelu(8) }}
}}
"""


def refused(attention: str, context: str = "") -> list[tuple[str, str]]:
    """The code of each diagnostic and the text that it points at."""
    text = MODEL.format(attention=attention, context=context)
    loaded = load_text(text)
    return [(d.code, text[d.span.start : d.span.end] if d.span else "") for d in loaded.diagnostics]


def rope(**options: str) -> str:
    return f"mha(heads = 4, rope = rope({', '.join(f'{name} = {value}' for name, value in options.items())}))"


@each_row(
    ("attention", "found"),
    [
        (rope(fraction="0.1"), [("MOE0360", "0.1")]),
        (rope(fraction="0.4"), [("MOE0360", "0.4")]),
        (rope(fraction="0.5"), []),
        (
            rope(scaling="longrope(short = [1], long = [1, 2, 3, 4, 5], original = 4)"),
            [("MOE0361", "[1]"), ("MOE0361", "[1, 2, 3, 4, 5]")],
        ),
        (rope(fraction="0.5", scaling="longrope(short = [1, 2], long = [1, 2], original = 4)"), []),
        (
            rope(fraction="0.5", scaling="longrope(short = [1, 2, 3, 4], long = [1, 2], original = 4)"),
            [("MOE0361", "[1, 2, 3, 4]")],
        ),
        (
            rope(scaling="longrope(short = [1, 1, 1, 1], long = [1, 1, 1, 1], original = 1)"),
            [("MOE0364", "1")],
        ),
        (
            rope(scaling="yarn(2, original = 4, beta_fast = 0.5)"),
            [("MOE0364", "yarn(2, original = 4, beta_fast = 0.5)")],
        ),
        (rope(scaling="yarn(2, original = 4, beta_slow = 40)"), [("MOE0364", "40")]),
        (rope(theta="1", scaling="yarn(2, original = 4)"), [("MOE0364", "1")]),
        (rope(scaling="llama3(2, original = 4, low = 4)"), [("MOE0364", "4")]),
    ],
)
def test_what_cannot_stand_together_is_refused_at_its_place(attention: str, found: list[tuple[str, str]]) -> None:
    assert refused(attention) == found


MLA = "mla(heads = 4, kv_rank = 8, nope_dim = 4, rope_dim = {}, value_dim = 4, {})"


@each_row(
    ("attention", "found"),
    [
        (MLA.format(4, "rope = rope()"), []),
        (MLA.format(4, "qk_norm = head, clip = 8, rope = rope()"), [("MOE0363", "head"), ("MOE0363", "8")]),
        (MLA.format(4, "rope = rope(fraction = 0.25)"), [("MOE0363", "0.25")]),
        (MLA.format(3, "rope = rope()"), [("MOE0303", "rope()")]),
        (MLA.format(4, "bias = all, rope = rope()"), []),
        (MLA.format(3, "bias = all"), [("MOE0374", "3")]),
        (MLA.format(4, "rope = rope(scaling = llama3(2, original = 4, low = 5))"), [("MOE0364", "5")]),
        (MLA.format(4, "window = 17, rope = rope()"), [("MOE0362", "17")]),
        (MLA.format(4, "kv_heads = 2"), [("MOE0201", "kv_heads")]),
    ],
)
def test_latent_attention_refuses_what_it_does_not_have(attention: str, found: list[tuple[str, str]]) -> None:
    assert refused(attention) == found


@each_row("window", [16, 17])
def test_a_window_longer_than_the_context_is_refused(window: int) -> None:
    found = [("MOE0362", "17")] if window > 16 else []
    assert refused(f"mha(heads = 4, window = {window})") == found


IMAGES = """
model "m" {{
  dim = 32; depth = 2{context}
  embedding = patches(image = 12, size = 4, channels = 1)
  head = classes(3)
  layers {{ attention = {attention}; ffn = gelu(8) }}
}}
{train}
"""


@each_row("window", [9, 10])
@each_row("context", ["", "; context = 9"])
@each_row("train", ["", "train { batch = 2 }"])
def test_a_window_longer_than_an_images_patches_is_refused(window: int, context: str, train: str) -> None:
    """3 x 3 patches: the length of every sequence, whatever else the file says."""
    for causal in ("true", "false"):
        text = IMAGES.format(
            attention=f"mha(heads = 4, causal = {causal}, window = {window})", context=context, train=train
        )
        found = [(d.code, text[d.span.start : d.span.end] if d.span else "") for d in load_text(text).diagnostics]
        assert found == ([("MOE0362", "10")] if window > 9 else [])


@each_row("window", [8, 9])
def test_without_a_context_the_longest_sequence_is_that_of_training(window: int) -> None:
    text = MODEL.format(attention=f"mha(heads = 4, window = {window})", context="").replace("; context = 16", "")
    found = load_text(f"{text}train {{ batch = 2; sequence = 8 }}").diagnostics
    assert [d.code for d in found] == (["MOE0362"] if window > 8 else [])


def test_a_window_of_an_images_grid_is_no_larger_than_the_grid() -> None:
    for size, code in ((3, []), (4, ["MOE0369"]), (6, ["MOE0369"])):
        word = f"mha(heads = 4, causal = false, grid = windows({size}))"
        text = IMAGES.format(attention=word, context="", train="")
        assert [d.code for d in load_text(text).diagnostics] == code


@each_row("scaling", ["ntk(1e30, original = 1)", "ntk(2)", "yarn(1, original = 1)", "linear(1e38)"])
def test_the_ends_of_the_ranges_compile(scaling: str) -> None:
    """Two dims turn, the fewest, and factors are large."""
    compile_source(MODEL.format(attention=f"mha(heads = 16, rope = rope(scaling = {scaling}))", context=""))
    compile_source(MODEL.format(attention=rope(theta="1e38", scaling=scaling), context=""))
