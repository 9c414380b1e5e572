"""A model of images against a handwritten ViT with a mixture: logits, loss and every gradient."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from oracles.plain_parts import attention, gelu_ffn, of_layer, rms_norm, swiglu_mixture
from oracles.same import TIGHT, require_gradients, spread
from support.image_plans import CHANNELS, CLASSES, IMAGE, PATCH, image_spec
from torch import Tensor

from moec.runtime.host.reference import reference

ORACLE_OF = {
    "patches": "image size channels positions",
    "classes": "count",
    "windows": "size shift",
    "attention": "grid causal",
}

SIDE = IMAGE // PATCH
BATCH = 6


def swin_mask(size: int, shift: int) -> Tensor:
    """Which patches see each other in windows of a grid that is rolled by `shift`, as Swin's code has it: of patches
    that meet in a window only through the roll, each sees its own part alone. Bool [1, patches, patches]."""
    parts = torch.zeros(SIDE, SIDE)
    for row in range(SIDE):
        for column in range(SIDE):
            # Of the rolled grid: the last window's rows, and among them those that came from the other edge.
            bands = [0 if at < SIDE - size else 1 if at < SIDE - shift else 2 for at in (row, column)]
            parts[row, column] = 3 * bands[0] + bands[1]
    windows = torch.arange(SIDE) // size
    of_window = windows[:, None] * SIDE + windows[None]
    places = torch.arange(SIDE * SIDE).view(SIDE, SIDE).roll((-shift, -shift), (0, 1)).flatten()
    seen = torch.zeros(SIDE * SIDE, SIDE * SIDE, dtype=torch.bool)
    for of_query, query in zip(zip(of_window.flatten(), parts.flatten(), strict=True), places, strict=True):
        for of_key, key in zip(zip(of_window.flatten(), parts.flatten(), strict=True), places, strict=True):
            seen[query, key] = of_query == of_key
    return seen[None]


def vit(p: dict[str, Tensor], images: Tensor, masks: Sequence[Tensor | None] = (None, None)) -> Tensor:
    """Logits: a convolution whose kernel and stride are a patch, positions, two layers, the mean, a linear map."""
    x = F.conv2d(images, p["embedding.weight"], stride=PATCH)  # [batch, dim, row, column]
    x = x.permute(0, 2, 3, 1).reshape(len(images), SIDE * SIDE, -1)
    if "positions.weight" in p:
        x = x + p["positions.weight"]
    for number in range(2):
        of = of_layer(p, number)
        x = x + attention(of, rms_norm(x, of["attention_norm.weight"]), causal=False, mask=masks[number])
        h = rms_norm(x, of["ffn_norm.weight"])
        x = x + (gelu_ffn(of, h) if number == 0 else swiglu_mixture(of, h, 2))
    return rms_norm(x, p["norm.weight"]).mean(1) @ p["head.weight"].T + p["head.bias"]


def vit_with_class_token(p: dict[str, Tensor], images: Tensor) -> Tensor:
    """Dosovitskiy et al. 2020, equations 1 to 4: `[x_class; x_1 E; …] + E_pos`, and a linear map of LN(z⁰)."""
    patches = F.conv2d(images, p["embedding.weight"], stride=PATCH).flatten(2).transpose(1, 2)
    first = p["class_token.weight"][None, None].repeat(len(images), 1, 1)
    x = torch.cat([first, patches], 1)
    if "positions.weight" in p:
        x = x + p["positions.weight"][None]
    for number in range(2):
        of = of_layer(p, number)
        x = x + attention(of, rms_norm(x, of["attention_norm.weight"]), causal=False, mask=None)
        h = rms_norm(x, of["ffn_norm.weight"])
        x = x + (gelu_ffn(of, h) if number == 0 else swiglu_mixture(of, h, 2))
    return rms_norm(x[:, 0], p["norm.weight"]) @ p["head.weight"].T + p["head.bias"]


@pytest.mark.parametrize("positions", ["", ", positions = none"])
def test_a_class_token_before_the_patches_equals_the_handwritten_model(positions: str) -> None:
    ours = reference(image_spec(patches=positions, balance="[]", pool="first"), dtype=torch.float64)
    with torch.no_grad():
        token = ours.get_parameter("class_token.weight")
        token.normal_(generator=torch.Generator().manual_seed(8))
    p = spread(ours)
    assert p.get("positions.weight", torch.empty(SIDE * SIDE + 1)).shape[0] == SIDE * SIDE + 1
    images, labels = batch()
    output, logits = ours(images, labels), vit_with_class_token(p, images)
    torch.testing.assert_close(output.logits, logits, **TIGHT)
    F.cross_entropy(logits, labels, ignore_index=-100).backward()
    output.loss.backward()
    require_gradients(ours, p)


def test_the_class_token_is_routed_and_counts_in_the_balance_term() -> None:
    ours = reference(image_spec(balance="[switch_loss(0.25)]", pool="first"), dtype=torch.float64)
    with torch.no_grad():
        ours.get_parameter("layers.1.moe.gate.weight").zero_()
    images, labels = batch()
    output = ours(images, labels)
    assert int(ours.expert_counts[1].sum()) == 2 * BATCH * (SIDE * SIDE + 1)
    torch.testing.assert_close(output.aux_loss, torch.tensor(0.25, dtype=torch.float64), **TIGHT)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(BATCH, CHANNELS, IMAGE, IMAGE, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    labels[1] = -100
    return images, labels


@pytest.mark.parametrize("positions", ["", ", positions = none"])
def test_the_reference_equals_the_handwritten_model(positions: str) -> None:
    ours = reference(image_spec(patches=positions, balance="[]"), dtype=torch.float64)
    p = spread(ours)
    images, labels = batch()
    output, logits = ours(images, labels), vit(p, images)
    torch.testing.assert_close(output.logits, logits, **TIGHT)
    loss = F.cross_entropy(logits, labels, ignore_index=-100)
    torch.testing.assert_close(output.loss, loss, **TIGHT)
    output.loss.backward()
    loss.backward()
    require_gradients(ours, p)


@pytest.mark.parametrize(("size", "shifts"), [(2, (0, 1)), (2, (1, 0)), (4, (0, 0)), (1, (0, 0)), (2, (1, 1))])
def test_windows_of_a_grid_are_those_of_swin(size: int, shifts: tuple[int, int]) -> None:
    first, second = (f"mha(heads = 4, causal = false, grid = windows({size}, shift = {shift}))" for shift in shifts)
    ours = reference(image_spec(attention=first, second=second, balance="[]"), dtype=torch.float64)
    p = spread(ours)
    images, labels = batch()
    output, logits = ours(images, labels), vit(p, images, [swin_mask(size, shift) for shift in shifts])
    torch.testing.assert_close(output.logits, logits, **TIGHT)
    F.cross_entropy(logits, labels, ignore_index=-100).backward()
    output.loss.backward()
    if size > 1:  # a patch alone has no choice whom to see: queries and keys get no gradient
        require_gradients(ours, p)


def test_the_balance_term_is_a_mean_over_patches() -> None:
    """With equal probabilities of all experts the term is 1, whatever they choose, times its weight."""
    ours = reference(image_spec(balance="[switch_loss(0.25)]"), dtype=torch.float64)
    with torch.no_grad():
        ours.get_parameter("layers.1.moe.gate.weight").zero_()
    images, labels = batch()
    output = ours(images, labels)
    torch.testing.assert_close(output.aux_loss, torch.tensor(0.25, dtype=torch.float64), **TIGHT)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, labels, ignore_index=-100) + 0.25, **TIGHT)
