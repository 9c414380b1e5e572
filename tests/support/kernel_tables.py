"""The tables of docs/kernels.md: the model's predictions for canonical layers, and beside published figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from support.layer_predictions import LayerPrediction, predict_layer, predict_schedules
from zipf_loads import zipf

from moec.codegen.kernels.model.model import Prediction, predict_pass
from moec.codegen.kernels.model.model_device import DEVICES
from moec.codegen.kernels.model.model_libraries import LARGE
from moec.codegen.kernels.model.model_loads import Load
from moec.codegen.kernels.model.model_tiles import ExpertLayer, Schedule
from moec.codegen.kernels.stored_tiles import choose
from moec.codegen.kernels.tile_rule import in_bulk
from moec.codegen.kernels.tiles import KERNELS, Kernel, Ways

H200 = DEVICES["h200"]
TOKENS = (1024, 8192, 32_768)


def swiglu(experts: int, dim: int, hidden: int, k: int) -> ExpertLayer:
    return ExpertLayer(experts=experts, dim=dim, hidden=hidden, gated=True, dtype="bf16", k=k)


LAYERS: Mapping[str, ExpertLayer] = {
    "Mixtral 8x7B": swiglu(8, 4096, 14_336, 2),
    "Qwen3-30B-A3B": swiglu(128, 2048, 768, 8),
    "OLMoE": swiglu(64, 2048, 1024, 8),
    "DeepSeek-V3": swiglu(256, 7168, 2048, 8),
    "gpt-oss-120b": swiglu(128, 2880, 2880, 4),
    "SonicMoE 7B, n 256": swiglu(128, 1536, 256, 8),
    "SonicMoE 7B, n 1024": swiglu(64, 4096, 1024, 4),
    "SonicMoE 7B, n 2048": swiglu(64, 4096, 2048, 4),
}

WIDE = Schedule(rows=128, columns=256, depth=64, warps=8, buffers=4, dots=2)
SQUARE = Schedule(rows=128, columns=128, depth=64, warps=8, buffers=4)
TWO_BUFFERS = Schedule(rows=128, columns=128, depth=64, warps=8, buffers=2)
BEFORE: dict[Kernel, Schedule] = {
    kernel: WIDE if kernel == "up" else TWO_BUFFERS if kernel.endswith("_weights") else SQUARE for kernel in KERNELS
}
"""The first generation: 128 x 128 everywhere, gate and up as two products, weights' gradients with two buffers."""

SONIC: dict[Kernel, Schedule] = dict.fromkeys(KERNELS, LARGE)
LIGER = Ways.parse(
    "up=128x256x64w8s3 down=128x256x64w8s3 down_backward=128x128x64w8s3 down_weights=128x128x64w8s3 "
    "up_backward=128x128x64w8s3 up_weights=128x128x64w8s3"
)
LIBRARY = Ways.parse(" ".join(f"{kernel}=grouped_mm" for kernel in KERNELS))


def rule(layer: ExpertLayer, tokens: int) -> Ways:
    """The ways that moec chooses on an H200 without tuned or shipped ones."""
    widths, rows = (layer.dim, layer.hidden), tokens * layer.k
    return choose(layer.dtype, rows, layer.experts, widths, layer.gated, device="h200", family="hopper", tuned={}).ways


def now(layer: ExpertLayer, load: Load, tokens: int) -> LayerPrediction:
    """The layer in the ways of the rule."""
    bulk = in_bulk(layer.dtype, (layer.dim, layer.hidden), "hopper")
    return predict_layer(rule(layer, tokens), layer, load, H200, bulk=bulk)


def uniform(layer: ExpertLayer, tokens: int) -> Load:
    return Load.uniform(tokens, layer.experts, layer.k)


# ---- canonical layers ------------------------------------------------------------------------------------


def layer_tables() -> Iterator[str]:
    """Padding and bytes, then blocks and predicted rates, as Markdown."""
    yield "Padding and memory traffic of the rule's tiles. `useful`: rows over rows of tiles, uniform and zipf(1.1)."
    yield ""
    columns = " | ".join(f"{kernel}, MB" for kernel in KERNELS)
    yield f"| layer | T | rows per expert | tile's rows | useful | {columns} |"
    yield "|---" * (5 + len(KERNELS)) + "|"
    for name, layer in LAYERS.items():
        for tokens in TOKENS:
            yield _traffic_row(name, layer, tokens)
    yield ""
    yield "Estimated blocks per multiprocessor, in the order of the columns above; TFLOP/s forward / backward of the"
    yield "first generation (`before`), of the rule's ways (`now`), of our passes around `F.grouped_mm` everywhere,"
    yield "and of a plain layer around it, with separate kernels for silu, products of rows and their gradients."
    yield ""
    yield "| layer | T | blocks | before | now | our grouped_mm | plain grouped_mm | bounds now |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, layer in LAYERS.items():
        for tokens in TOKENS:
            yield _rate_row(name, layer, tokens)
    yield ""
    yield from aims()


def aims() -> Iterator[str]:
    """What the kernels are to reach at 8,192 tokens, beside what is predicted."""
    for name, least in (("Qwen3-30B-A3B", "at least 345 / 200, and"), ("Mixtral 8x7B", "")):
        layer = LAYERS[name]
        ours = _rates(now(layer, uniform(layer, 8192), 8192))
        yield f"Aim for {name} at T 8,192: {least} more than plain `F.grouped_mm`. Predicted: {ours}, against".replace(
            "  ", " "
        )
        yield f"{plain_rates(layer, 8192)}."
        yield ""


def _traffic_row(name: str, layer: ExpertLayer, tokens: int) -> str:
    ways, load = rule(layer, tokens), uniform(layer, tokens)
    skewed = zipf(tokens, layer.experts, layer.k)
    useful = " / ".join(f"{each.padding_efficiency(ways.rows):.2f}" for each in (load, skewed))
    moved = _products(now(layer, load, tokens))
    cells = " | ".join(f"{moved[kernel].moved / 1e6:,.0f}" for kernel in KERNELS)
    return f"| {name} | {tokens:,} | {load.rows / layer.experts:,.0f} | {ways.rows} | {useful} | {cells} |"


def _rate_row(name: str, layer: ExpertLayer, tokens: int) -> str:
    load = uniform(layer, tokens)
    ours = now(layer, load, tokens)
    before = predict_schedules(BEFORE, layer, load, H200)
    library = predict_layer(LIBRARY, layer, load, H200)
    products = _products(ours)
    blocks = " ".join(str(products[kernel].blocks) for kernel in KERNELS)
    bounds = ", ".join(dict.fromkeys(products[kernel].bound for kernel in KERNELS))
    rates = " | ".join(_rates(each) for each in (before, ours, library))
    return f"| {name} | {tokens:,} | {blocks} | {rates} | {plain_rates(layer, tokens)} | {bounds} |"


def plain_rates(layer: ExpertLayer, tokens: int) -> str:
    """A layer of PyTorch's own operators around `F.grouped_mm`: each reads and writes whole tensors.

    Forward copies rows, then silu, gate times up, rows times weights; backward has the gradients of these, of the
    weights, and of the halves of gate and up. Router, counting and the last sum are taken from our layer.
    """
    load = uniform(layer, tokens)
    copied = predict_layer(LIBRARY, replace(layer, k=0), load, H200)
    rows = load.rows * layer.dim * layer.width
    hidden = load.rows * layer.hidden * layer.width
    passes = {"forward": (2 * rows, 2 * hidden, 3 * hidden, 2 * rows)}
    passes["backward"] = (2 * rows, 2 * rows, 2 * rows, 3 * hidden, 3 * hidden, 3 * hidden, 4 * hidden, 2 * rows)
    of_ours = {"forward": (3 * hidden,), "backward": (6 * hidden,)}
    said = []
    for direction in ("forward", "backward"):
        more, less = (sum(predict_pass(each, H200).seconds for each in of[direction]) for of in (passes, of_ours))
        said.append(f"{copied.flops(direction) / (copied.seconds(direction) + more - less) / 1e12:.0f}")
    return " / ".join(said)


def _products(found: LayerPrediction) -> dict[str, Prediction]:
    return {each.name: each.prediction for each in found.kernels}


def _rates(found: LayerPrediction) -> str:
    return f"{found.tflops('forward'):.0f} / {found.tflops('backward'):.0f}"


# ---- published figures -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A published rate, forward and backward (None: not published), and what the model takes for its kernels."""

    who: str
    device: str
    layer: ExpertLayer
    tokens: int
    published: tuple[int, int | None]
    ways: Ways | dict[Kernel, Schedule]

    def predicted(self) -> LayerPrediction:
        """By the model."""
        device, load = DEVICES[self.device], uniform(self.layer, self.tokens)
        if isinstance(self.ways, Ways):
            return predict_layer(self.ways, self.layer, load, device, bulk=self.ways is LIGER)
        return predict_schedules(self.ways, self.layer, load, device)

    def ratios(self) -> tuple[float, float | None]:
        """Predicted over published, forward and backward."""
        found, (forward, backward) = self.predicted(), self.published
        return found.tflops("forward") / forward, found.tflops("backward") / backward if backward else None


def _anchor(
    who: str,
    device: str,
    layer: ExpertLayer,
    tokens: int,
    forward: int,
    backward: int | None,
    ways: Ways | dict[Kernel, Schedule],
) -> Anchor:
    return Anchor(who=who, device=device, layer=layer, tokens=tokens, published=(forward, backward), ways=ways)


QWEN, MIXTRAL = LAYERS["Qwen3-30B-A3B"], LAYERS["Mixtral 8x7B"]
FINE, MIDDLE, COARSE = (layer for name, layer in LAYERS.items() if name.startswith("SonicMoE"))
ANCHORS = (
    _anchor("Liger, CuTe", "h200", QWEN, 8192, 345, 194, LIGER),
    _anchor("Liger, CuTe", "h200", MIXTRAL, 8192, 613, 406, LIGER),
    _anchor("Liger, Triton", "h100", QWEN, 8192, 295, 168, BEFORE),
    _anchor("Liger, Triton", "h100", QWEN, 32_768, 337, 242, BEFORE),
    _anchor("Triton 3.6, GH200", "h200", swiglu(8, 2048, 3072, 2), 8192, 443, None, BEFORE),
    _anchor("TransformerEngine", "h200", MIXTRAL, 8192, 553, 452, LIBRARY),
    _anchor("SonicMoE", "h100", FINE, 24_576, 365, 405, SONIC),
    _anchor("SonicMoE", "h100", MIDDLE, 32_768, 552, 555, SONIC),
    _anchor("SonicMoE", "h100", COARSE, 32_768, 597, 587, SONIC),
    _anchor("ScatterMoE", "h100", FINE, 24_576, 205, 212, BEFORE),
    _anchor("ScatterMoE", "h100", MIDDLE, 32_768, 368, 340, BEFORE),
    _anchor("ScatterMoE", "h100", COARSE, 32_768, 385, 370, BEFORE),
)


def anchor_table() -> Iterator[str]:
    """Published beside predicted rates, as Markdown."""
    yield "TFLOP/s forward / backward. The tiles are those of the kernels' source, as far as it says."
    yield ""
    yield "| kernels | device | D, F, E, k | T | published | predicted | predicted / published |"
    yield "|---|---|---|---|---|---|---|"
    for each in ANCHORS:
        layer, (forward, backward) = each.layer, each.published
        ratios = " / ".join(f"{ratio:.2f}" for ratio in each.ratios() if ratio is not None)
        shape = f"{layer.dim}, {layer.hidden}, {layer.experts}, {layer.k}"
        published = f"{forward} / {backward or '-'}"
        yield (
            f"| {each.who} | {each.device} | {shape} | {each.tokens:,} | {published} "
            f"| {_rates(each.predicted())} | {ratios} |"
        )
