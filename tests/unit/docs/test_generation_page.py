"""docs/generation.md: its code generates, and its codes have pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "generation.md").read_text(encoding="utf-8")


def test_the_code_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    text = (ROOT / "examples" / "first.moe").read_text(encoding="utf-8")
    (tmp_path / "first.moe").write_text(re.sub(r"size = \d+", "size = 1", re.sub(r"ep = \d+", "ep = 1", text)))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(code, names)  # noqa: S102 - our own page
    assert names["best"].tokens.shape == (2, 8)
    assert names["drawn"].lengths.tolist() == [len(new) for new in names["drawn"]]
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_codes_have_pages() -> None:
    for code in re.findall(r"MOE\d{4}", PAGE):
        assert (ROOT / "tests" / "diagnostics" / f"{code}.md").exists()
