"""Names of other systems: each leads to a word that there is, is written as the schema wants, and hides no word."""

from __future__ import annotations

import pytest
from support.tables import each_row

from moec.grammar.alias_table import WORDS
from moec.grammar.aliases import Alias, alias, aliases, synonym
from moec.grammar.diagnostics import DiagnosticError
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
ALIASES = sorted(aliases().values(), key=lambda found: found.word)


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


def test_there_are_a_hundred_names_of_nine_systems() -> None:
    assert len(ALIASES) > 100
    assert len({system for found in ALIASES for system in found.systems}) == 9


@each_row("found", ALIASES)
def test_every_alias_leads_to_a_word_that_there_is(found: Alias) -> None:
    if not found.path:
        assert found.note
        return
    assert leads_to(found.path)
    assert f"`{found.written()}`" in found.said()
    assert not found.plain or f"it is called `{found.name}`" in found.said()


@each_row("found", [each for each in ALIASES if each.path])
def test_every_form_is_written_as_the_language_is(found: Alias) -> None:
    text = found.written().replace("{ … }", "{ }")
    assert "{}" not in text
    tree, diagnostics = parse(Source("form", text))
    assert not diagnostics
    assert tree
    for statement in tree.body:
        match statement:
            case Assignment(name=name):
                assert name.text == found.head
                assert name.text in found.path
            case Block(kind=kind):
                assert kind.text in found.path


def test_no_alias_hides_a_word_of_the_language() -> None:
    assert not real_words() & set(aliases())
    assert not real_words() & set(WORDS)


def test_every_synonym_leads_to_a_word_that_there_is() -> None:
    assert set(WORDS.values()) <= real_words()


def test_flags_and_capitals_name_the_same_alias() -> None:
    assert alias("--num-experts") is alias("num_experts") is not None
    assert synonym("BFloat16") == "bf16"
    assert alias("nonsense") is None
    assert synonym("nonsense") is None


@each_row(
    ("written", "help"),
    [
        ("moe { use_residual = false }", "leave it out: that is the default here"),
        ("moe { drop_tokens = False }", "write `capacity = dropless()`, the default: no token is dropped"),
        ("moe { drop_tokens = true }", "`capacity = factor(1.25)`; full experts then drop tokens"),
        ("moe { capacity_factor = 1.25 }", "`capacity = factor(1.25)`; DeepSpeed and Megatron count"),
        ("moe { router_aux_loss_coef = 0.02 }", "`balance = [switch_loss(WEIGHT)]`; WEIGHT is 0.02 * k / L"),
        ("moe { shared = 0 }", "for none, leave `shared` out"),
        ("moe { shared = 1 }", "write `shared = swiglu(WIDTH)`"),
        ("moe { moe_aux_loss_coeff = 0.01 }", "`balance = [switch_loss(0.01)]`; the same value, with `group = rank`"),
        ("moe { is_gshard_loss = false }", "`balance = [importance_loss(0.005), load_loss(0.005)]`"),
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
