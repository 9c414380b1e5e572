"""Parameter counts that the makers of the library's models published, beside what the counts include."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from moec.driver import run_passes, to_spec
from moec.passes.cost.parameter_counts import ParameterCounts, count_parameters

UNITS = {"M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Counts as published, such as `46.7B`; `digits` and `active_digits`: the significant ones, if not all are.

    `without`: the parts that the published counts leave out; `active_without`: those of the active count alone.
    `layers_more`: layers like the last one that the published counts have and the library's model has not.
    `decoder`: the published model is an encoder and a decoder, ours the decoder without attention to the encoder.
    """

    total: str
    active: str = ""
    source: str
    digits: int = 0
    active_digits: int = 0
    without: tuple[str, ...] = ()
    active_without: tuple[str, ...] = ()
    layers_more: int = 0
    decoder: bool = False

    @property
    def note(self) -> str:
        """What the published counts leave out or add, in words."""
        named = {"embedding": "the embedding", "head": "the output head"}
        notes = [f"both without {' and '.join(named[part] for part in self.without)}"] if self.without else []
        if self.active_without:
            notes.append(f"active without {' and '.join(named[part] for part in self.active_without)}")
        if self.layers_more:
            notes.append("with the layer that predicts the token after the next")
        if self.decoder:
            notes.append("with the encoder")
        return "; ".join(notes)


NO_LOOKUP = ("embedding",)
NO_VOCABULARY = ("embedding", "head")

PUBLISHED: dict[str, Published] = {
    "dbrx": Published(total="132B", active="36B", source="model card"),
    "deepseek_moe_16b": Published(total="16.4B", active="2.8B", source="arXiv 2401.06066"),
    "deepseek_v2": Published(total="236B", active="21B", source="arXiv 2405.04434"),
    "deepseek_v2_lite": Published(
        total="15.7B", active="2.4B", source="arXiv 2405.04434, appendix B", active_without=NO_LOOKUP
    ),
    "deepseek_v3": Published(total="671B", active="37B", source="arXiv 2412.19437"),
    "dots1": Published(total="142B", active="14B", source="arXiv 2506.05767"),
    "ds_moe_1_3b_128e": Published(total="52B", active="1.3B", source="arXiv 2201.05596, table 1"),
    "ds_moe_350m_128e": Published(total="13B", active="350M", active_digits=2, source="arXiv 2201.05596, table 1"),
    "ernie_4_5_21b_a3b": Published(total="21B", active="3B", source="model card"),
    "glm_4_5": Published(
        total="355B", active="32B", source="arXiv 2508.06471, table 1", without=NO_VOCABULARY, layers_more=1
    ),
    "glm_4_5_air": Published(total="106B", active="12B", source="arXiv 2508.06471, table 1", without=NO_VOCABULARY),
    "gpt_oss_120b": Published(
        total="116.83B", active="5.13B", source="arXiv 2508.10925, table 1", active_without=NO_LOOKUP
    ),
    "gpt_oss_20b": Published(
        total="20.91B", active="3.61B", source="arXiv 2508.10925, table 1", active_without=NO_LOOKUP
    ),
    "granite_3_1b_a400m": Published(total="1.3B", active="400M", active_digits=1, source="model card"),
    "granite_3_3b_a800m": Published(total="3.3B", active="800M", active_digits=1, source="model card"),
    "gshard_600b_decoder": Published(total="600B", digits=1, source="arXiv 2006.16668", decoder=True),
    "hunyuan_a13b": Published(total="80B", active="13B", source="model card"),
    "kimi_k2": Published(total="1T", active="32B", source="model card"),
    "minimax_m2": Published(total="230B", active="10B", digits=2, source="model card", active_without=NO_LOOKUP),
    "mixtral_8x22b": Published(total="141B", active="39B", source="announcement, April 2024"),
    "mixtral_8x7b": Published(total="46.7B", active="12.9B", source="announcement, December 2023"),
    "olmoe_1b_7b": Published(total="6.9B", active="1.3B", source="arXiv 2409.02060"),
    "pr_moe_1_3b": Published(total="31B", source="arXiv 2201.05596, table 4"),
    "pr_moe_350m": Published(total="4B", source="arXiv 2201.05596, table 4"),
    "qwen1_5_moe_a2_7b": Published(total="14.3B", active="2.7B", source="model card"),
    "qwen2_57b_a14b": Published(total="57.4B", active="14.2B", source="model card"),
    "qwen3_235b_a22b": Published(total="235B", active="22B", source="arXiv 2505.09388"),
    "qwen3_30b_a3b": Published(total="30.5B", active="3.3B", source="model card"),
    "switch_base_128_decoder": Published(total="7B", source="arXiv 2101.03961, table 9", decoder=True),
    "switch_c_decoder": Published(total="1571B", source="arXiv 2101.03961, table 9", decoder=True),
    "v_moe_h14_every2": Published(total="7.2B", source="arXiv 2106.05974, table 2"),
    "v_moe_h14_last5": Published(total="2.7B", source="arXiv 2106.05974, table 2"),
    "v_moe_l16_every2": Published(total="3.4B", source="arXiv 2106.05974, table 2"),
}


@cache
def counts_of(name: str) -> ParameterCounts:
    """The parameters of a model of the library."""
    spec = to_spec(f'use "models/{name}"\n')
    return count_parameters(run_passes(spec).program, spec)


def as_published(name: str) -> tuple[float, float]:
    """Our total and active parameters, of what the published counts include."""
    published, counts = PUBLISHED[name], counts_of(name)
    total, active = counts.whole.total, counts.whole.active
    for part in published.without:
        total, active = total - counts.outside[part].total, active - counts.outside[part].active
    active -= sum(counts.outside[part].active for part in published.active_without)
    last = max(counts.layers, key=lambda layer: layer.layers[-1])
    total, active = (
        total + published.layers_more * last.one_layer.total,
        active + published.layers_more * last.one_layer.active,
    )
    if published.decoder:  # the embedding is shared, and attention to the encoder is as large as attention
        of_encoder = sum(len(layer.layers) * layer.parts["attention"].total for layer in counts.layers)
        total = 2 * total - counts.outside["embedding"].total + of_encoder
    return total, active


def last_digit(text: str, digits: int = 0) -> tuple[float, float]:
    """A published count as a number, and the value of its last significant digit: `46.7B` is 46.7e9 and 0.1e9."""
    number, unit = text[:-1], UNITS[text[-1]]
    whole, _, fraction = number.partition(".")
    step = 10.0 ** -len(fraction) if not digits else 10.0 ** (len(whole) - digits)
    return float(number) * unit, step * unit
