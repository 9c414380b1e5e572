"""Files that leave words of `parallel` open, to `auto` or to a list: a search chooses. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moec.grammar.checking.supported import unsupported
from moec.grammar.diagnostics import Diagnostic, DiagnosticError
from moec.grammar.spec import Measured, Spec, Trace
from moec.grammar.stated import (
    OF_LAYERS,
    WordOfLayers,
    open_words,
    pipeline_of,
    searched_words,
    stated_by_layer,
    with_words,
)

if TYPE_CHECKING:
    from moec.passes.pipeline import Compilation
    from moec.passes.search.candidate import Choice


def problems(spec: Spec) -> list[Diagnostic]:
    """What is not supported yet, else what breaks a rule of degrees, or may not be left open."""
    if refused := unsupported(spec):
        return refused
    try:
        if open_words(spec):
            from moec.passes.search.rules import require_choosable

            require_choosable(spec)
        else:
            from moec.passes.degrees.degrees import choose_degrees

            choose_degrees(spec)
    except DiagnosticError as error:
        return list(error.diagnostics)
    return []


def choice_of(spec: Spec) -> Choice | None:
    """What a search chooses for the open words of `spec`; None where it has none.

    Raises `DiagnosticError` where a word may not be open, and where no values keep the rules of degrees.
    """
    if not open_words(spec):
        return None
    from moec.passes.search.choose import choose

    return choose(spec)


def compile_chosen(spec: Spec, choice: Choice | None, stop_after: str | None = None) -> Compilation:
    """The passes on what a search chose for `spec`; on `spec` where nothing was open.

    Raises `DiagnosticError` as a compilation does; where no plan fits, it says that this one takes the least memory.
    """
    from moec.passes.pipeline import compile_program

    try:
        return compile_program(spec if choice is None else choice.chosen.spec, stop_after)
    except DiagnosticError as error:
        if choice is None or choice.fitting:
            raise
        end = f"; no plan of {choice.candidates:,} fits, and this one takes the least memory"
        help = "`moec plan` of the file says with which other words, or how many devices, it would fit"
        every = (found._replace(message=found.message + end, help=help) for found in error.diagnostics)
        raise DiagnosticError(every) from None


def stated(spec: Spec) -> Spec:
    """`spec` with the chosen values for its open words. Raises what `choice_of` does."""
    choice = choice_of(spec)
    return spec if choice is None else choice.chosen.spec


def without_open_words(spec: Spec) -> Spec:
    """`spec` with any values for its open words.

    Raises `DiagnosticError` for a file with `train` whose results depend on one.
    """
    if not open_words(spec):
        return spec
    from moec.passes.search.rules import require_choosable, with_first_values

    if spec.train is not None:
        require_choosable(spec)
    return with_first_values(spec)


def allows(file: Spec, plan: Spec) -> bool:
    """Whether `plan` is `file`, or has a value that it allows for each word that it leaves open."""
    chosen = {word: getattr(plan.parallel, word) for word in searched_words(file)}
    if set(OF_LAYERS).intersection(chosen):
        chosen["layers"] = plan.parallel.layers
        if not all(_allows_of_layers(file, plan, word) for word in OF_LAYERS):
            return False
    lists = {word: getattr(file.parallel, word) for word in open_words(file) if word not in OF_LAYERS}
    if pipeline_of(plan).pp == 1 and chosen.get("schedule") is None:
        lists.pop("schedule", None)  # one stage has no schedule
    if any(isinstance(values, tuple) and chosen[word] not in values for word, values in lists.items()):
        return False
    return with_words(_with_kept(file, plan), chosen) == plan


def _allows_of_layers(file: Spec, plan: Spec, word: WordOfLayers) -> bool:
    """Whether each layer of the plan has a value of a word that the file allows it."""
    stated, found = (stated_by_layer(spec, word) for spec in (file, plan))
    for number, moe in enumerate(file.subject.mixtures):
        if moe is None and word != "recompute":
            continue
        allowed, value = (of[number].value if number in of else None for of in (stated, found))
        values = allowed if isinstance(allowed, tuple) else (allowed,)
        if moe is None:  # these have no experts to compute again
            value, values = _without_experts(value), tuple(map(_without_experts, values))
        if value not in values and (value is None or "auto" not in values):
            return False
    return True


def _without_experts(recompute: object) -> object:
    return "none" if recompute == "experts" else recompute


def _with_kept(file: Spec, plan: Spec) -> Spec:
    """The file with what the plan keeps of its trace, if that is the plan's."""
    if file.train is None or plan.train is None:
        return file
    routing, kept = file.train.routing, plan.train.routing
    if isinstance(routing, Trace) and isinstance(kept, Measured) and kept.file == routing.path:
        return file.replace(train=file.train.replace(routing=kept))
    return file
