"""Names of other systems: each leads to a word that there is, is written as the schema wants, and hides no word.

A name with several meanings shows each system's, and is replaced where all are equal.
"""

from __future__ import annotations

import pytest
from support.tables import each_row

from moec.commands.explain import explain
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.foreign.lookup import Meaning, alias, aliases, elsewhere, near, synonym
from moec.grammar.foreign.values import NEAR, OURS, WORDS
from moec.grammar.load import load_text
from moec.grammar.schema import BlockKind, CallKind, Field, ListKind, ProductKind, WordKind, fields
from moec.grammar.source import Source
from moec.grammar.spec import Adapt, ClusterText, Device, LayerModule, Model, Parallel, Train
from moec.grammar.spec.base import Node
from moec.grammar.syntax.parser import parse
from moec.grammar.syntax.tree import Assignment, Block

BLOCKS: dict[str, type[Node]] = {
    cls.word: cls for cls in (Model, LayerModule, ClusterText, Device, Train, Parallel, Adapt)
}
ALIASES = aliases()
MEANINGS = [meaning for word in sorted(ALIASES) for meaning in ALIASES[word].meanings]


def inside(known: Field) -> dict[str, type[Node]]:
    """The calls that may stand in a field, by their words; a block and a product under the empty word."""
    found: dict[str, type[Node]] = {}
    kinds = list(known.kinds)
    for kind in kinds:
        match kind:
            case CallKind():
                found |= kind.classes
            case BlockKind():
                found[""] = kind.cls
            case ProductKind():
                found[""] = kind.cls
                kinds += fields(kind.cls)["body"].kinds
            case ListKind():
                kinds += kind.items
    return found


def leads_to(path: tuple[str, ...]) -> bool:
    """Whether the words of `path` lead from a block of a file to a field."""
    cls, calls = BLOCKS.get(path[0]), dict[str, type[Node]]()
    for word in path[1:]:
        if cls is not None and word in fields(cls):
            calls = inside(fields(cls)[word])
            cls = calls.get("")
        elif word in calls:
            cls, calls = calls[word], {}
        else:
            return False
    return True


def real_words() -> set[str]:
    """Every word of the language: of blocks, names, calls and values."""
    found, queue, seen = set(BLOCKS), list(BLOCKS.values()), set()
    while queue:
        cls = queue.pop()
        if cls in seen:
            continue
        seen.add(cls)
        for word, known in fields(cls).items():
            inner = inside(known)
            queue += inner.values()
            found |= {word, *inner} - {""}
            found |= {value for kind in known.kinds if isinstance(kind, WordKind) for value in kind.values}
    return found


def test_there_are_hundreds_of_names_of_nine_systems() -> None:
    assert 300 < len(ALIASES) < 600  # more would be too many to look for a slip of the keyboard
    assert len({system for found in ALIASES.values() for system in found.systems}) == 9


@each_row("found", MEANINGS)
def test_every_meaning_leads_to_a_word_that_there_is(found: Meaning) -> None:
    if not found.path:
        assert found.row.note
        assert not found.row.form
        return
    assert leads_to(found.path)
    assert f"`{found.written()}`" in found.said()
    assert not found.plain or f"it is called `{found.name}`" in found.said()
    for when, form in found.cases():
        assert f"{when}: `{form}`" in found.said()


@each_row(("found", "form"), [(found, form) for found in MEANINGS if found.path for form in found.forms()])
def test_every_form_is_written_as_the_language_is(found: Meaning, form: str) -> None:
    text = form.replace("{ … }", "{ }")
    assert "{}" not in text
    tree, diagnostics = parse(Source("form", text))
    assert not diagnostics
    assert tree
    for statement in tree.body:
        match statement:
            case Assignment(name=name):
                assert form != found.written() or name.text == found.head
                assert name.text in (*found.path, "embedding")
            case Block(kind=kind):
                assert kind.text in found.path or kind.text == "layers"


def test_no_name_hides_a_word_of_the_language() -> None:
    assert real_words() & set(ALIASES) == OURS
    assert all(alias(word) is None and elsewhere(word) is not None for word in OURS)
    assert not real_words() & set(WORDS)


def test_no_value_has_both_an_equal_and_none() -> None:
    assert not set(WORDS) & set(NEAR)


def test_every_synonym_leads_to_a_word_that_there_is() -> None:
    assert set(WORDS.values()) <= real_words()


def test_flags_and_capitals_name_the_same_alias() -> None:
    assert alias("--num-experts") is alias("num_experts") is not None
    assert synonym("BFloat16") == "bf16"
    assert alias("nonsense") is None
    assert synonym("nonsense") is None
    assert near("nonsense") is None


# ---- several systems, several meanings --------------------------------------------------------------------


@each_row(
    ("name", "shown"),
    [
        (
            "top_k",
            {
                "torchtitan": "gate = topk(2, score = sigmoid)",
                "FastMoE": "gate = topk(2, order = after, bias = learned)",
            },
        ),
        (
            "capacity_factor",
            {
                "DeepSpeed": "capacity = factor(1.25, eval = 1, min = 4, order = random)",
                "Tutel": "capacity = factor(FACTOR)",
            },
        ),
        ("vocab_size", {"Hugging Face and torchtitan": "vocab = 32_000", "Megatron": "vocab = 32_000"}),
        ("adam_beta2", {"Megatron and Hugging Face": "optimizer = adamw(beta2 = 0.95)"}),
    ],
)
def test_a_name_of_several_systems_shows_what_it_is_in_each(name: str, shown: dict[str, str]) -> None:
    found = ALIASES[name]
    assert {meaning.named: meaning.written() for meaning in found.meanings} == shown
    page, help = explain(name).markdown, found.said()
    for system, form in shown.items():
        assert f"A word of {system}" in page
        assert f"`{form}`" in page
        assert f"`{form}`" in help
        assert system in help or len(shown) == 1
    assert help.startswith("systems differ. ") == (len(shown) > 1)


def test_systems_that_differ_in_what_they_default_to_alone_have_one_form() -> None:
    help = ALIASES["lr"].said("3e-4")
    assert help.count("`optimizer = adamw(lr = 3e-4)`") == 1
    assert "Megatron: the rate that" in help
    assert "torchtitan: its other numbers" in help


def fixes(text: str) -> list[str]:
    """The texts that `check --fix` puts in, of the first error of an unknown name."""
    found = next(each for each in load_text(text).diagnostics if each.code == "MOE0201")
    return [edit.text for edit in found.fix]


@each_row(
    ("line", "put_in"),
    [
        ("model { hidden_size = 64 }", ["dim"]),  # the same in every system
        ("model { vocab_size = 64 }", []),  # Megatron pads it
        ("model { layers { moe { top_k = 2 } } }", []),
        ("model { layers { moe { gate = topk(top_k = 2) } } }", []),
        ("model { layers { moe { gate = topk(num_experts_per_tok = 2) } } }", []),
        ("model { layers { moe { gate = topk(2, norm_topk_prob = true) } } }", ["normalize"]),
        ("model { layers { moe { gate = topk(1, normalize_gate = true) } } }", []),  # no effect in Tutel, 1 here
        ("model { layers { moe { gate = topk(2, moe_input_jitter_eps = 0.1) } } }", []),  # in evaluation too
        ("model { layers { moe { moe_expert_capacity_factor = 1.25 } } }", []),  # drops others for k >= 2
        ("model { layers { moe { capacity = factor(capacity_factor = 1.25) } } }", []),  # Tutel rounds twice
        ("model { layers { moe { capacity = factor(1.25, min_capacity = 4) } } }", ["min"]),
        ("model { layers { moe { moe_shared_expert_intermediate_size = 64 } } }", []),  # gelu without `--swiglu`
        ("model { rms_norm_eps = 1e-5 }", []),  # a layer norm in Phi-3.5-MoE
        ("model { tie_word_embeddings = true }", ["embedding = tokens(tied = true)"]),
        ("model { layers { attention = gqa(num_attention_heads = 8, kv_heads = 2) } }", ["heads"]),
        ("model { layers { attention = gqa(heads = 8, kv_heads = 2, rope_theta = 1e6) } }", []),  # or neighbours turn
        ("model { layers { attention = gqa(heads = 8, kv_heads = 2, rope = rope(rope_theta = 1e6)) } }", ["theta"]),
        ("model { layers { attention = gqa(heads = 8, kv_heads = 2, window_size = 4096) } }", []),  # without the token
        ("model { layers { attention = gqa(heads = 8, kv_heads = 2, sliding_window = 4096) } }", ["window"]),
        ("train { optimizer = adamw(adam_beta2 = 0.9) }", ["beta2"]),
        ("parallel { tensor_model_parallel_size = 2 }", ["tp"]),
    ],
)
def test_only_what_is_equal_in_every_system_is_replaced(line: str, put_in: list[str]) -> None:
    block, rest = line.split(" ", 1)
    label = ' "m"' if block == "model" else ""
    assert fixes(f"{block}{label} {rest}") == put_in


@each_row(("order", "nearest"), [("probs", "weighs most: `weight`"), ("position", "nearest is `sequence`")])
def test_an_order_of_another_system_is_not_replaced(order: str, nearest: str) -> None:
    found = load_text(f'model "m" {{ layers {{ moe {{ capacity = factor(1.25, order = {order}) }} }} }}').diagnostics
    (said,) = (each for each in found if order in each.message)
    assert nearest in said.help
    assert not said.fix


@each_row("name", ["--rotary-scaling-divisor", "moe_jitter", "num_experts_per_group", "routed_scaling", "--window"])
def test_a_name_that_is_merely_near_has_no_page(name: str) -> None:
    with pytest.raises(DiagnosticError) as raised:
        explain(name)
    assert [found.code for found in raised.value.diagnostics] == ["MOE0015"]


def test_a_flag_has_no_page_of_a_word_that_means_something_else() -> None:
    assert "`job.build(seed=…)`" in explain("--seed").markdown
    assert "`hash`" in explain("seed").markdown
    assert "`hash`" not in explain("--seed").markdown


@each_row(
    ("name", "says"),
    [
        ("--rotary-scaling-factor", "scaling = yarn("),
        ("--mtp-num-layers", "no equal: moec has no multi-token prediction"),
        ("moe_jitter_eps", "There is no equal"),
        ("--recompute-granularity", "for `selective` leave it out"),
        ("--recompute-activations", "it is `--recompute-granularity selective`"),
        ("output_router_logits", "adds no auxiliary loss in training"),
        ("swiglu_limit", "clamp = 7.0, alpha = 1.702"),
        ("has_fc1_bias", "experts = 16 * relu(16_384, bias = true)"),
        ("--use-rope-scaling", "scaling = llama3(8, original = 8192)"),
        ("--quick-geglu", "1 is added to the other factor"),
        ("--window-size", "the left number there does not count the token itself"),
        ("k", "A word of DeepSpeed"),
        ("global_aux_loss", "`switch_loss` with `group = batch`"),
        ("sinkhorn", "no gate here balances by Sinkhorn"),
    ],
)
def test_options_that_were_missing_or_misleading_say_what_they_are(name: str, says: str) -> None:
    assert says.lower() in explain(name).markdown.lower()


@each_row(
    ("written", "help"),
    [
        ("moe { use_residual = false }", "leave it out: that is the default here"),
        ("moe { drop_tokens = False }", "write `capacity = dropless()`, the default: no token is dropped"),
        ("moe { drop_tokens = true }", "`capacity = factor(1.0, min = 4, order = random)`, for `True`"),
        ("moe { capacity_factor = 1.25 }", "DeepSpeed: here it is `capacity = factor(1.25, eval = 1, min = 4, order"),
        (
            "moe { router_aux_loss_coef = 0.02 }",
            "`balance = [switch_loss(WEIGHT, over = model)]`; WEIGHT is 0.02 * k, for",
        ),
        ("moe { shared = 0 }", "for none, leave `shared` out"),
        ("moe { shared = 1 }", "write `shared = swiglu(WIDTH)`"),
        ("moe { moe_aux_loss_coeff = 0.01 }", "`balance = [switch_loss(0.01)]`; with `--moe-router-load"),
        (
            "moe { is_gshard_loss = false }",
            "balance = [importance_loss(WEIGHT, of = all), load_loss(WEIGHT, of = probabilities)]`",
        ),
        ("attention = mha(heads = 4, attention_bias = none)", "leave it out: that is the default here"),
        (
            "moe { balance = [aux_loss(0.01)] }",
            "the term is `switch_loss`; for k = 2 DeepSpeed's",
        ),
        ("moe { balance = [load_balance_loss(0.01)] }", "the term is `switch_loss`; for k = 2"),
        ('moe { gate = "top3" }', "write `topk(3, normalize = true)` if a token's 3 weights add to 1"),
    ],
)
def test_a_value_that_the_form_is_not_written_for_has_a_help_of_its_own(written: str, help: str) -> None:
    with pytest.raises(DiagnosticError) as raised:
        load_text(f'model "m" {{ layers {{ {written} }} }}').unwrap()
    helped = [found for found in raised.value.diagnostics if help in found.help]
    assert helped, [found.help for found in raised.value.diagnostics]
    assert not any(found.fix for found in helped)


@each_row(
    ("block", "written", "help"),
    [
        ('model "m"', "dense = 1", "write `layers 0 { ffn = swiglu(WIDTH) }` in `model`"),
        ('model "m"', "bf16 = false", "write `dtype = fp32` in `model`"),
        ("train", "fp16 = true", "moec does not train in fp16 yet"),
        ("train", "clip = 0.5", "`job.clip_grad_norm_(model, 0.5)`"),
        ("train", "seed = 7", "`job.build(seed=7)`"),
    ],
)
def test_a_word_of_the_language_can_be_another_systems_in_a_block_without_it(
    block: str, written: str, help: str
) -> None:
    with pytest.raises(DiagnosticError) as raised:
        load_text(f"{block} {{ {written} }}").unwrap()
    (found,) = (each for each in raised.value.diagnostics if help in each.help)
    assert found.code == "MOE0201"


@each_row(
    ("depth", "help"),
    [
        ("12.000", "a point begins a fraction: write `12_000`, or `12`"),
        ("14.336", "a point begins a fraction: write `14_336`"),
        ("1.000_000", "a point begins a fraction: write `1_000_000`, or `1`"),
        ("0.500", ""),
        ("1.5", ""),
    ],
)
def test_a_point_between_thousands_is_told_of(depth: str, help: str) -> None:
    with pytest.raises(DiagnosticError) as raised:
        load_text(f'model "m" {{ depth = {depth} }}').unwrap()
    (found,) = (each for each in raised.value.diagnostics if each.code == "MOE0206")
    assert found.help == help
