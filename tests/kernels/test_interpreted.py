"""The rendered kernels against plain torch, in Triton's interpreter: `conftest.py` runs it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def require_passed(run: Future[tuple[int, str]]) -> None:
    code, said = run.result()
    assert code == 0, said[-8000:]
    assert " passed" in said
    assert "skipped" not in said


@pytest.mark.parametrize("files", ["operators", "plans", "capacities"])
def test_rendered_kernels_agree_with_plain_torch_in_the_interpreter(
    files: str, interpreted: Callable[[str], Future[tuple[int, str]]]
) -> None:
    require_passed(interpreted(files))


@pytest.mark.slow
def test_every_case_agrees_in_every_dtype_in_the_interpreter(interpreter: Any) -> None:
    require_passed(interpreter.start("-m", "slow", HERE / "conformance"))


@pytest.mark.slow
def test_the_tiles_of_every_canonical_layer_agree_in_the_interpreter(interpreter: Any) -> None:
    require_passed(interpreter.start("-m", "slow", HERE / "interpreted_tiles.py"))
