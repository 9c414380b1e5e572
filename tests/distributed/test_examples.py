"""The training examples run unchanged, and print the expected lines."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support.ranks.gloo_pool import GlooPool

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> list[str]:
    """What the example prints on this rank."""
    import contextlib
    import importlib
    import io

    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [f"{name}.py", *arguments]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        importlib.import_module(name).main()
    return said.getvalue().splitlines()


@pytest.mark.parametrize("ranks", [1, 4])
def test_accumulation_gives_one_gradient_three_ways(gloo: GlooPool, ranks: int) -> None:
    first, *others = gloo.run(ranks, run, "accumulate", "--ranks", str(ranks), initialize=False)
    differences = [float(number) for line in first for number in re.findall(r"difference (\S+)", line)]
    assert len(differences) == 2
    assert max(differences) < 1e-5
    assert not any(others)


def test_averaged_weights_are_evaluated(gloo: GlooPool) -> None:
    first, _ = gloo.run(2, run, "ema", "--ranks", "2", "--steps", "6", initialize=False)
    losses = [float(number) for line in first for number in re.findall(r": (\d\.\d+)", line)]
    assert len(losses) == 2
    assert max(losses) < 6


def test_a_student_learns_from_a_teacher_under_another_plan(gloo: GlooPool) -> None:
    first, *_ = gloo.run(4, run, "custom_loss", "--steps", "12", initialize=False)
    losses = [float(number) for line in first for number in re.findall(r"loss (\d+\.\d+)", line)]
    assert len(losses) == 2
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_vision_mixture_learns_to_read_digits(gloo: GlooPool, ranks: int) -> None:
    """Every rank computes the same images' classes; the first one says how many are right."""
    first, *others = gloo.run(ranks, run, "vision", "--epochs", "2", initialize=False)
    (right,) = re.findall(r"held out: (\S+)% of 297 images are right", "\n".join(first))
    assert float(right) > 30
    assert not any(others)


def test_a_checkpoint_of_two_ranks_writes_the_same_text_on_one(gloo: GlooPool, tmp_path: Path) -> None:
    data = tmp_path / "data.txt"
    data.write_text("the cat sat on the mat and the dog sat on the log\n" * 200)
    arguments = ["--steps", "12", "--data", str(data), "--folder", str(tmp_path / "checkpoints"), "--bytes", "30"]
    arguments += ["--prompt", "the cat ", "--prompt", "dog"]
    first, second = gloo.run(2, run, "generate", *arguments, initialize=False)
    (alone,) = gloo.run(1, run, "generate", *arguments, initialize=False)
    assert not second
    assert first[0].startswith("training on data.txt") or "data.txt" in first[0]
    text = "\n".join(first[1:]).partition("\n\n60 new bytes in ")[0]
    assert text.startswith("the cat ▸")
    assert "\n".join(alone).partition("\n\n60 new bytes in ")[0] == text
    (greedy,) = gloo.run(1, run, "generate", *arguments, "--temperature", "0", "--line", initialize=False)
    assert "\n".join(greedy).partition("\n\n")[0] != text
