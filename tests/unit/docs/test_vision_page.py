"""docs/vision.md: its files compile, and its code trains the first of them."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import moec

PAGE = (Path(__file__).parents[3] / "docs" / "vision.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_code_trains_the_file_above_it() -> None:
    def loader(rank: int, ranks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(rank))
        return [(images, torch.arange(4))]

    names: dict[str, object] = {"moec": moec, "plan": moec.compile(blocks("moe")[0]), "loader": loader}
    exec(blocks("python")[0], names)  # noqa: S102 - our own page
    assert names["model"](names["images"]).logits.shape == (4, 10)
    assert names["loss"] > 0
