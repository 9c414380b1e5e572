"""The summary of `moec compile`: a rank's parameters, saved activations and bytes sent."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.image_plans import image_text
from support.plans import moe_text

from moec.commands.inspecting.summary import summary
from moec.driver import compile as compile_source


def lines_of(text: str) -> list[str]:
    """The summary of the plan of a file's text."""
    plan = compile_source(text)
    return summary(plan, plan.program, Path("a.plan"), 0.1).splitlines()


def test_activations_are_those_of_a_ranks_sequences() -> None:
    (line,) = (line for line in lines_of(moe_text(batch=8, sequence=8)) if "activations of" in line)
    assert line.endswith(" parameters; activations of 2 sequences, kept for backward: 56.4 kB")


def test_the_next_command_is_torchrun_or_launch_where_nobody_says_what_a_node_is() -> None:
    text = moe_text(ranks=4, batch=8)
    assert "then `torchrun --standalone --nproc-per-node 4 train.py` with" in lines_of(text)[-1]
    rack = text.replace('level "node"', 'level "rack"')
    assert "then `moec launch a.plan --per-node N train.py` with" in lines_of(rack)[-1]


def test_a_model_of_images_counts_images() -> None:
    found = "\n".join(lines_of(image_text(ranks=2, tp=1, batch=8, microbatches=2)))
    assert "activations of 2 images, kept" in found
    assert "a step    8 images, " in found
    assert "in 2 micro-batches of 2 images per rank" in found
    assert "sequence" not in found


def test_the_busiest_rank_keeps_more_activations() -> None:
    text = moe_text(experts=4, sequence=32).replace("sequence = 32;", "sequence = 32; routing = zipf(1);")
    (line,) = (line for line in lines_of(text) if "activations of" in line)
    assert line.endswith(" on the busiest rank")


def test_the_peak_of_a_step_and_its_place_are_said_and_the_load_that_fits() -> None:
    text = moe_text(ep=4, batch=64, sequence=32)
    (line,) = (line for line in lines_of(text) if line.startswith("  memory"))
    assert line.endswith(" MB of 4.29 GB at the peak of a step, in the backward of layer 2")
    device = 'device "small" { kind = cpu; memory = 2.3MB; bandwidth = 10GB/s }\n'
    small = lines_of(device + text.replace("device = cpu", "device = small"))
    assert any("it fits while no rank's experts get more than" in line for line in small)


@pytest.mark.parametrize(("vocab", "warned"), [(32, False), (33, True)])
def test_a_vocabulary_that_tp_does_not_divide_is_warned_of(vocab: int, warned: bool) -> None:
    lines = lines_of(moe_text(tp=2).replace("vocab = 32", f"vocab = {vocab}"))
    found = [line for line in lines if "warning" in line]
    whole = "  warning   tp = 2 does not divide the vocabulary: every rank has all of it; `vocab = 34` would be divided"
    assert found == ([whole] if warned else [])
