"""A converted file gets its name only if nothing else has it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from support.checkpoint_drafts import WEIGHT, Draft

from moec.runtime.checkpoint import convert
from moec.runtime.checkpoint.format.reading import Checkpoint
from moec.runtime.errors import JobError


def no_links(*_: Any, **__: Any) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.fixture(params=["hard links", "no hard links"])
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no hard links":
        monkeypatch.setattr(os, "link", no_links)


@pytest.mark.usefixtures("links")
def test_a_file_that_is_made_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, target = Checkpoint(Draft(tmp_path / "100").write()), tmp_path / "m.safetensors"
    copy: Callable[..., None] = convert._copy

    def and_another(*arguments: Any) -> None:
        copy(*arguments)
        target.write_text("another")

    monkeypatch.setattr(convert, "_copy", and_another)
    with pytest.raises(JobError, match="MOE0803"):
        convert.to_safetensors(checkpoint, target)
    assert target.read_text() == "another"
    assert sorted(os.listdir(tmp_path)) == ["100", "m.safetensors"]


@pytest.mark.usefixtures("links")
def test_a_file_gets_its_name(tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    convert.to_safetensors(Checkpoint(Draft(tmp_path / "100").write()), target)
    assert (load_file(target)["weight"] == WEIGHT).all()
    assert sorted(os.listdir(tmp_path)) == ["100", "m.safetensors"]
