"""What `parallel` states: its words for layers, of which a block of `layers` may have other ones, and its degrees."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from moec.grammar.diagnostics.diagnostic import Diagnostic
from moec.grammar.source import Span
from moec.grammar.spec import Spec
from moec.grammar.spec.parallel import ParallelLayers


class Stated(NamedTuple):
    """A value that the file states for some layers, and its span."""

    value: Any
    span: Span | None


class SharingDegrees(NamedTuple):
    """The degrees whose ranks share each sequence."""

    cp: int
    tp: int

    @property
    def sharers(self) -> int:
        """Number of ranks that share a sequence."""
        return self.cp * self.tp


WordOfLayers = Literal["ep", "etp", "recompute"]

OPEN_WORDS = ("pp", "dp", "cp", "tp", "ep", "etp", "zero", "recompute", "microbatches", "schedule")
"""The words of `parallel` that may be `auto` or a list."""

OF_LAYERS: tuple[WordOfLayers, ...] = ("ep", "etp", "recompute")
"""The words of `parallel` that may have other values for some layers."""


def open_words(spec: Spec) -> tuple[str, ...]:
    """The words of `parallel` that the file leaves open, for some layers or for all, for a search to choose."""
    return tuple(word for word in OPEN_WORDS if any(map(is_open, values_of(spec, word))))


def is_open(value: object) -> bool:
    """Whether a value of a word leaves it open."""
    return value == "auto" or isinstance(value, tuple)


def values_of(spec: Spec, word: str) -> list[Any]:
    """The values that a file states for a word, of all layers and of some; None is for none."""
    blocks = spec.parallel.layers if word in OF_LAYERS else ()
    return [getattr(block, word) for block in (spec.parallel, *blocks)]


def open_span(spec: Spec, word: str) -> Span | None:
    """Where a file leaves a word open."""
    blocks = (spec.parallel, *(spec.parallel.layers if word in OF_LAYERS else ()))
    return next((block.span(word) for block in blocks if is_open(getattr(block, word))), None)


def searched_words(spec: Spec) -> tuple[str, ...]:
    """The words that a search states: those that the file leaves open; with `schedule` also `virtual`, if the file does
    not state it, and with `ep` or `etp` also `layers`."""
    words = open_words(spec)
    if "schedule" in words and spec.parallel.virtual is None:
        words = (*words, "virtual")
    return (*words, "layers") if {"ep", "etp"}.intersection(words) else words


def blocks_without(blocks: Iterable[ParallelLayers], words: Collection[str]) -> tuple[ParallelLayers, ...]:
    """The blocks of layers without these words; one that then states nothing is left out."""
    found = (block.replace(**dict.fromkeys(words)) for block in blocks)
    return tuple(block for block in found if any(getattr(block, word) is not None for word in OF_LAYERS))


class GivenWords(NamedTuple):
    """Words of `parallel` that an argument of the command line gives, and their places in it."""

    values: Mapping[str, object]
    spans: Mapping[str, Span]
    whole: Span

    def only(self, word: str) -> GivenWords:
        """One of the words."""
        return self._replace(values={word: self.values[word]}, spans={word: self.spans[word]})

    def in_file(self, spec: Spec) -> Spec:
        """The file with these words instead of its own, those of some layers too."""
        layers = blocks_without(spec.parallel.layers, [word for word in OF_LAYERS if word in self.values])
        return spec.replace(parallel=spec.parallel.replace(self.spans, **{"layers": layers, **self.values}))

    def placed(self, diagnostic: Diagnostic) -> Diagnostic:
        """What the words break: at the whole argument, if it has no place there."""
        spans = (diagnostic.span, *(label.span for label in diagnostic.labels))
        here = any(span and span.source == self.whole.source for span in spans)
        return diagnostic if here else diagnostic._replace(span=self.whole)


def with_words(spec: Spec, words: Mapping[str, object]) -> Spec:
    """The file with these values for words of `parallel`."""
    return spec.replace(parallel=spec.parallel.replace(**words))


def number_of(degree: object) -> int | None:
    """A degree that the file states; None for none, and for a list or `auto`, which a search replaces."""
    return degree if isinstance(degree, int) else None


def sharing_degrees(spec: Spec) -> SharingDegrees:
    """`cp` and `tp`, stated or 1."""
    return SharingDegrees(number_of(spec.parallel.cp) or 1, number_of(spec.parallel.tp) or 1)


class StatedPipeline(NamedTuple):
    """The number of ranks of a pipeline, the stages of each, and its schedule; `pp` is 1 where there is none."""

    pp: int
    virtual: int
    schedule: str


def pipeline_of(spec: Spec) -> StatedPipeline:
    """The pipeline that a file states, with the defaults of the language."""
    parallel = spec.parallel
    schedule = "auto" if isinstance(parallel.schedule, tuple) else parallel.schedule or "one_f_one_b"
    virtual = parallel.virtual or STAGES_OF_RANK[schedule].default
    return StatedPipeline(number_of(parallel.pp) or 1, virtual, schedule)


class StagesOfRank(NamedTuple):
    """The number of stages that a schedule gives each rank: by default, or (`only`) always."""

    default: int
    only: bool = False

    def fitting(self, virtual: int) -> int:
        """`virtual` if the schedule takes it, else the number that it takes."""
        return self.default if self.only else virtual


STAGES_OF_RANK: Mapping[str, StagesOfRank] = {
    "gpipe": StagesOfRank(1, only=True),
    "one_f_one_b": StagesOfRank(1, only=True),
    "interleaved": StagesOfRank(2),
    "looped_bfs": StagesOfRank(2),
    "zero_bubble": StagesOfRank(1),
    "zero_bubble_v": StagesOfRank(2, only=True),
    "dual_pipe_v": StagesOfRank(2, only=True),
    "auto": StagesOfRank(1),
}
"""The stages of each rank by the word of `schedule`; of `auto` until a search has chosen."""


def stage_ranks(spec: Spec) -> int:
    """Number of ranks of a pipeline stage, which all degrees but `pp` factor: all ranks where there is no pipeline."""
    return max(1, spec.cluster.ranks // pipeline_of(spec).pp)


def data_parallel_size(spec: Spec) -> int:
    """Number of data-parallel ranks that divide the batch: `dp`, stated or default, if the degrees are valid."""
    return number_of(spec.parallel.dp) or max(1, stage_ranks(spec) // sharing_degrees(spec).sharers)


def stated_of_layers(spec: Spec, word: WordOfLayers) -> list[tuple[Sequence[int], Stated]]:
    """Every value of `word`, in the order of the file, with its layers; for a layer with several, the last counts."""
    all_layers, parallel = range(len(spec.model.layers if spec.has_model else spec.layers)), spec.parallel
    blocks = [(all_layers, parallel), *((block.layers or all_layers, block) for block in parallel.layers)]
    return [
        (layers, Stated(value, block.span(word)))
        for layers, block in blocks
        if (value := getattr(block, word)) is not None
    ]


def stated_by_layer(spec: Spec, word: WordOfLayers) -> Mapping[int, Stated]:
    """The value of `word` that counts for each layer with one."""
    return {number: stated for layers, stated in stated_of_layers(spec, word) for number in layers}
