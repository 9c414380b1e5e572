"""The library's models: each is good by itself and under `use`, and a file has one model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.tables import each_row

from moec.driver import run_passes, to_spec
from moec.grammar import load_text
from moec.grammar.printer import model_text
from moec.grammar.resolve.library import library_names

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "grammar" / "library" / "models"
NAMES = library_names("models")
WARNINGS = {"gshard_600b_decoder": ["MOE0322"]}
"""GShard's queues let second choices of earlier tokens depend on later tokens' first choices."""


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.moe").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_every_model_compiles_under_use(name: str) -> None:
    loaded = load_text(f'use "models/{name}"\n')
    assert [found.code for found in loaded.diagnostics] == WARNINGS.get(name, [])
    spec = loaded.unwrap()
    assert spec.subject.name == name
    assert spec.subject.dtype == "bf16"
    assert run_passes(spec).program.blocks


@each_row(
    ("name", "said"),
    {
        "mixtral_8x7b": ["theta = 1_000_000", "topk(2, normalize = true)"],
        "qwen3_30b_a3b": ["eps = 1e-6", "theta = 1_000_000", "topk(8, normalize = true)"],
        "deepseek_v3": ["eps = 1e-6", "yarn(40, original = 4096", "scale = 2.5", "groups = 8, keep_groups = 4"],
        "deepseek_v2": ["eps = 1e-6", "yarn(40, original = 4096", "scale = 16", "groups = 8, keep_groups = 3"],
        "kimi_k2": ["eps = 1e-6", "theta = 50_000", "yarn(32, original = 4096", "score = sigmoid", "scale = 2.827"],
        "gpt_oss_120b": ["theta = 150_000", "yarn(32, original = 4096", "window = 128, sinks = true", "order = after"],
        "olmoe_1b_7b": ["topk(8)", "qk_norm = projection"],
        "dbrx": ["theta = 500_000", "clip = 8", "topk(4, normalize = true"],
        "glm_4_5": ["theta = 1_000_000, fraction = 0.5", "score = sigmoid", "scale = 2.5"],
    }.items(),
)
def test_what_no_parameter_counts_is_as_published(name: str, said: list[str]) -> None:
    """In each model's own config.json on Hugging Face."""
    text = " ".join(model_text(load_text(f'use "models/{name}"\n').unwrap()).split()).replace("( ", "(")
    assert [words for words in said if words not in text] == [], text


@each_row("name", NAMES)
def test_every_model_says_its_source_and_declares_one_block(name: str) -> None:
    text = text_of(name)
    comment, _, rest = text.partition(f'"{name}"')
    assert re.search(r"config\.json of [\w.-]+/[\w.-]+|arXiv \d{4}\.\d{5}|ATC 2023", comment)
    assert re.findall(r"^(\w+) ", rest, re.MULTILINE) == []


def test_the_library_compiles_without_torch() -> None:
    code = (
        "import sys; from moec.driver import run_passes, to_spec\n"
        "run_passes(to_spec('use \"models/deepseek_v3\"\\n'))\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_used_model_trains_on_the_files_cluster() -> None:
    uses = 'use "models/olmoe_1b_7b"\nuse "clusters/dgx_h100"\n'
    spec = to_spec(f"{uses}train {{ batch = 8; sequence = 512 }}\nparallel {{ ep = 8 }}\n")
    assert (spec.model.name, spec.cluster.name, spec.sequence) == ("olmoe_1b_7b", "dgx_h100", 512)
    assert spec.parallel.ep == 8


OWN = 'model "m" { vocab = 4; context = 4; dim = 8; depth = 1; layers { attention = mha(heads = 2); ffn = gelu(4) } }\n'


@pytest.mark.parametrize("text", [f'use "models/dbrx"\n{OWN}', f'{OWN}use "models/dbrx"\n'])
def test_a_model_beside_a_used_model_is_refused_with_a_way_to_edit_it(text: str) -> None:
    loaded = load_text(text)
    (found,) = loaded.diagnostics
    assert (found.code, loaded.spec) == ("MOE0205", None)
    assert "moec init --from dbrx" in found.help
    places = {str(span.source.name) for span in (found.span, *(label.span for label in found.labels)) if span}
    assert "library:models/dbrx.moe" in places


def test_two_used_models_are_refused() -> None:
    (found,) = load_text('use "models/dbrx"\nuse "models/dots1"\n').diagnostics
    assert (found.code, found.help) == ("MOE0205", "keep one of them")
    assert '`model "dbrx"`' in found.message


def test_one_model_may_be_used_twice() -> None:
    assert load_text('use "models/dbrx"\nuse "models/dbrx"\n').unwrap().model.name == "dbrx"


@each_row(
    ("written", "help", "fix"),
    [
        ("models/mixtal_8x7b", "did you mean `models/mixtral_8x7b`?", ['"models/mixtral_8x7b"']),
        ("models/mixtral_8x7", "did you mean `models/mixtral_8x7b`?", []),
        ("models/nothing_like_it", "`moec init --list` lists", []),
        ("elsewhere/x", "`moec init --list` lists", []),
    ],
)
def test_an_unknown_model_is_pointed_out_with_the_nearest(written: str, help: str, fix: list[str]) -> None:
    (found,) = load_text(f'use "{written}"\n').diagnostics
    assert found.code == "MOE0009"
    assert help in found.help
    assert [edit.text for edit in found.fix] == fix
