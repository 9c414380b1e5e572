"""What people write by habit of other languages: one error with a way out, and a fix only where the meaning is sure."""

from __future__ import annotations

from pathlib import Path

from support.tables import each_row

from moec.commands.fixes import edited
from moec.driver import check_text
from moec.grammar.diagnostics import Diagnostic, Severity

FILE = """model "m" {
  vocab = 256; dim = 64; depth = 2; dtype = fp32
  layers {
    attention = mha(heads = 4, rope = rope())
    moe { experts = 8 * swiglu(128); gate = topk(2); balance = [switch_loss(0.01)] }
  }
}
cluster "laptop" { device = cpu; level "process" { size = 4 } }
train { batch = 8; sequence = 64; optimizer = adamw(lr = 1e-4) }
parallel { ep = 2 }
"""


def errors(text: str) -> list[Diagnostic]:
    found = check_text(text, "m.moe", Path.cwd(), {})
    return [diagnostic for diagnostic in found if diagnostic.severity is Severity.ERROR]


def fixed(text: str) -> str:
    return edited(text, [diagnostic.fix for diagnostic in errors(text)])


SURE = {
    "a label with a colon": ('model "m" {', 'model "m": {', "leave the `:` out", 'model "m" {'),
    "thousands": ("vocab = 256", "vocab = 32,000", "write `32_000`", "vocab = 32_000"),
    "millions": ("vocab = 256", "vocab = 1,000,000", "write `1_000_000`", "vocab = 1_000_000"),
    "a unit in words": (
        "size = 4",
        "size = 4; bandwidth = 450 GB/sec",
        "a unit comes right after its number: `450GB/s`",
        "size = 4; bandwidth = 450GB/s",
    ),
    "two statements": ("dim = 64;", "dim = 64", "a statement ends with its line, or with `;`", "dim = 64;"),
    "a list in a product": (
        "8 * swiglu(128)",
        "8 * [swiglu(128)]",
        "one value, without brackets: `8 * swiglu(128)`",
        "8 * swiglu(128)",
    ),
}


@each_row("name", SURE)
def test_a_habit_with_one_meaning_is_fixed(name: str) -> None:
    old, new, help, right = SURE[name]
    text = FILE.replace(old, new, 1)
    assert text != FILE
    assert [diagnostic.help for diagnostic in errors(text)] == [help]
    assert fixed(text) == FILE.replace(old, right, 1)
    assert errors(fixed(text)) == []


PLAIN = {
    "an optimizer of PyTorch": ("adamw(", "torch.optim.AdamW(", "names have none, `bf16`"),
    "a dictionary": ("topk(2)", "{k: 2, scale: 1}", "a value with settings is a call, `topk(2)`"),
    "a flag": ("dtype = fp32", "dtype = fp32\n--num-experts 8", "a statement is `name = value`"),
    "a comment of C": ('model "m"', '/* a model */\nmodel "m"', "a comment begins with `#`"),
    "a fence": ('model "m"', '```moe\nmodel "m"', "leave it out"),
    "an argument without brackets": ("topk(2)", "topk 2", "arguments stand in parentheses"),
    "an argument in brackets": ("topk(2)", "topk[2]", "arguments stand in parentheses"),
    "a percentage": ("0.01", "1%", "write a fraction"),
    "a power of ten": ("1e-4", "10^-4", "`1e-4`"),
    "a variable of a shell": ("ep = 2", "ep = $EP", "`moec compile --let NAME=…`"),
    "an unfinished merge": (
        "depth = 2;",
        "\n<<<<<<< HEAD\ndepth = 2;\n=======\ndepth = 3;\n>>>>>>> x\n",
        "keep one of",
    ),
    "an anchor of YAML": ("layers {", "layers: *default", "a block is written in braces"),
}


@each_row("name", PLAIN)
def test_a_notation_that_is_not_read_is_a_syntax_error_with_a_way_out_and_no_fix(name: str) -> None:
    old, new, help = PLAIN[name]
    text = FILE.replace(old, new, 1)
    assert text != FILE
    found = errors(text)
    assert help in found[0].help, found[0].help
    assert found[0].fix == ()


VALUES = {
    "experts of one kind": ("num_experts = 8; moe_intermediate_size = 128", ["`experts = 8 * swiglu(128)`"] * 2),
    "heads": (
        "num_attention_heads = 8; num_key_value_heads = 2",
        ["`attention = gqa(heads = 8, kv_heads = 2, rope = rope())`"] * 2,
    ),
    "heads alone": (
        "num_key_value_heads = 2",
        ["`attention = gqa(heads = HEADS, kv_heads = 2, rope = rope())`"],
    ),
    "heads and a window": (
        "num_attention_heads = 32; num_key_value_heads = 8; sliding_window = 4096",
        [
            *["`attention = gqa(heads = 32, kv_heads = 8, rope = rope())`"] * 2,
            "`attention = gqa(heads = HEADS, kv_heads = KV_HEADS, window = 4096, rope = rope())`",
        ],
    ),
    "a width of experts is none of others": (
        "n_shared_experts = 2; moe_intermediate_size = 1408",
        ["`shared = swiglu(WIDTH)`", "`experts = COUNT * swiglu(1408)`"],
    ),
    "experts of one device": (
        "num_expert = 2; d_hidden = 128",
        ["all experts of a layer, not of one device's", "`experts = COUNT * gelu(128, bias = true)`"],
    ),
    "choices": ("num_experts_per_tok = 2; norm_topk_prob = true", ["`gate = topk(2, normalize = true)`"] * 2),
    "choices alone": ("num_experts_per_tok = 2", ["in Mixtral, MiniMax, Hunyuan and DBRX"]),
}


@each_row("name", VALUES)
def test_names_beside_each_other_give_one_form(name: str) -> None:
    given, forms = VALUES[name]
    found = errors(FILE.replace("depth = 2;", f"depth = 2; {given};", 1))
    assert [form in diagnostic.help for form, diagnostic in zip(forms, found, strict=True)] == [True] * len(forms), [
        diagnostic.help for diagnostic in found
    ]


WORDS = {
    "a yes for a number": (
        "topk(2)",
        "topk(2, noise = true)",
        "expected a number, found `true`",
        "write a number: standard deviation",
    ),
    "none for a number": (
        "dtype = fp32",
        "dtype = fp32; context = null",
        "expected a number, found `null`",
        "for none, leave `context` out",
    ),
    "a name of a block": (
        "swiglu(128)",
        "swiglu(dim * 2)",
        "no `let` of this name",
        "`dim` of `model` cannot be used in expressions: write `let dim = …` at the top of the file",
    ),
    "a yes beside words": ("ep = 2", "ep = 2; zero = true", "`true` is not known here", "write a whole number"),
    "a rest of -1": (
        "ep = 2",
        "ep = 2; dp = -1",
        "must be at least 1, and is -1",
        "leave `dp` out, and moec fills it in",
    ),
    "a number of shared experts": (
        "topk(2)",
        "topk(2); shared = 2",
        "expected `swiglu`, `geglu`, `gelu`, `relu`, `relu2`, `silu`, …, found a number",
        "write `shared = swiglu(2 * WIDTH)`: 2 feed-forwards of one width are one of 2 times that width",
    ),
    "a call as a switch": (
        "topk(2)",
        "topk(2); dropless = true",
        "`dropless` is not known here",
        "it belongs in `capacity = dropless()`",
    ),
    "an option of what is given": (
        "optimizer = adamw(lr = 1e-4)",
        "optimizer = adamw(lr = 1e-4); momentum = 0.9",
        "`momentum` is not known here",
        "it belongs in `optimizer = sgd(momentum = 0.9)` (or `muon(…)`); `optimizer` is given already: say it there",
    ),
    "a quoted word in a list": (
        "switch_loss(0.01)",
        '"switch_loss"',
        "expected `switch_loss`, `gshard_loss`, `importance_loss`, `load_loss`, `sequence_loss`, `device_loss`, …, "
        "found a text",
        "without quotes: `switch_loss(…)`",
    ),
    "a number times a width": (
        "8 * swiglu(128)",
        "8x128",
        "expected a product such as `8 * swiglu(14_336)` or a list of these, found a number",
        "a product has a `*`: write `8 * swiglu(128)`",
    ),
    "a unit of bits behind a blank": (
        "size = 4",
        "size = 4; bandwidth = 450 Gb/s",
        "expected `}` or the end of the line, found `Gb`",
        "moec counts bytes, of 8 bits each: write `56.25GB/s`",
    ),
    "a kind of experts as a switch": (
        "topk(2)",
        "topk(2); swiglu = true",
        "`swiglu` is not known here",
        "it belongs in `experts = 8 * swiglu(WIDTH)`; `experts` is given already: say it there",
    ),
    "no balance": ("[switch_loss(0.01)]", "none", "", "for none, leave `balance` out"),
    "all layers by their number": (
        "layers {",
        "layers 2 {",
        "layers are numbered 0..1",
        "for all layers write `layers",
    ),
    "no cluster": (
        'cluster "laptop" { device = cpu; level "process" { size = 4 } }',
        "",
        "1 / 2 is not whole",
        "without a `cluster` there is one rank: declare yours",
    ),
    "two levels of one name": (
        "level ",
        'level "process" { size = 2 } level ',
        'there is a `level "process"` already',
        "keep one of them, or give one another name",
    ),
}


@each_row("name", WORDS)
def test_a_value_that_does_not_fit_says_what_to_write(name: str) -> None:
    old, new, message, help = WORDS[name]
    text = FILE.replace(old, new, 1)
    assert text != FILE
    (found,) = errors(text)
    assert message in found.message
    assert found.help.startswith(help), found.help


def test_constants_may_be_named_like_words_of_python() -> None:
    text = FILE.replace('model "m"', 'let for = 8; let print = 2; let import = 64\nmodel "m"').replace("8 *", "for *")
    assert errors(text) == []
    assert [found.help for found in errors(text.replace('"m" {', '"m": {'))] == ["leave the `:` out"]


NOT_READ = {
    "a class with other defaults, in quotes": ("adamw(lr = 1e-4)", '"AdamW"', '"AdamW"'),
    "a comment beside an apostrophe": ('"m" {', "\"Bob's\" { // is not 8's", "\"Bob's\" { # is not 8's"),
    "a comment inside of a text": ('"m"', "'m // y'", '"m // y"'),
    "an optimizer's class with other defaults": ("adamw(", "AdamW(", "AdamW("),
    "one with the defaults that differ": (
        "adamw(lr = 1e-4)",
        "AdamW(lr = 1e-4, beta2 = 0.999, weight_decay = 0.01)",
        "adamw(lr = 1e-4, beta2 = 0.999, weight_decay = 0.01)",
    ),
    "a division by a name": ("dim = 64", "dim = 128 // heads\n", "dim = 128 // heads\n"),
    "a blank in a number": ("swiglu(128)", "swiglu(4 096)", "swiglu(4 096)"),
    "a constant before a number": ("vocab = 256", "vocab = n 256", "vocab = n 256"),
    "a decimal comma": ("size = 4", "size = 0,004", "size = 0,004"),
    "betas": ("lr = 1e-4", "lr = 1e-4, betas = (0.9, 0.95)", "lr = 1e-4, beta1 = 0.9, beta2 = 0.95"),
}


@each_row("name", NOT_READ)
def test_what_looks_like_a_habit_keeps_its_meaning(name: str) -> None:
    old, new, right = NOT_READ[name]
    assert fixed(FILE.replace(old, new, 1)) == FILE.replace(old, right, 1)


def test_each_habit_of_a_file_is_counted_apart() -> None:
    text = FILE.replace("depth = 2", "depth == 2").replace("vocab = 256", "vocab: 256")
    assert [found.message for found in errors(text)] == [
        "`:` has no meaning in a .moe file",
        "`==` compares in other languages",
    ]
    (found,) = errors(FILE.replace("vocab = 256", "vocab == 256").replace("dim = 64", "dim == 64"))
    assert found.message == "`==` compares in other languages (2 times in this file, here first)"


def test_a_misspelt_let_is_no_missing_semicolon() -> None:
    (found,) = errors(FILE.replace('model "m"', 'lt n = 4\nmodel "m"'))
    assert found.help == "did you mean `let`?"
