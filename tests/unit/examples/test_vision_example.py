"""The vision example learns to read digits."""

from __future__ import annotations

import re
import sys

import pytest
import torch
import vision


def accuracy(epochs: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> float:
    """The part of held-out images that the example says are right, after training for `epochs`."""
    monkeypatch.setattr(sys, "argv", ["vision.py", "--epochs", str(epochs)])
    threads = torch.get_num_threads()
    try:
        vision.main()
    finally:
        torch.set_num_threads(threads)
    (found,) = re.findall(r"held out: (\S+)% of 297 images are right", capsys.readouterr().out)
    return float(found) / 100


@pytest.mark.slow  # distributed/test_examples.py has one on two ranks
def test_a_short_training_reads_far_more_digits_than_chance(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert accuracy(3, monkeypatch, capsys) > 0.35


@pytest.mark.slow
def test_the_whole_training_reads_95_of_100_digits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert accuracy(20, monkeypatch, capsys) > 0.95


def test_no_held_out_digit_is_trained_on() -> None:
    trained, held_out = vision.load_digits()
    assert (len(trained.images), len(held_out.images)) == (1500, 297)
    assert trained.images.shape[1:] == (1, 8, 8)
    assert (float(trained.images.min()), float(trained.images.max())) == (-1, 1)
    assert {len(part.labels.unique()) for part in (trained, held_out)} == {10}
    of_epoch = torch.cat([labels for _, labels in vision.batches(trained, 100, 1)])
    assert torch.equal(of_epoch.bincount(), trained.labels.bincount())
