"""Files that leave words of `parallel` open, to `auto` or to a list: a search chooses. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moec.grammar.checking.supported import unsupported
from moec.grammar.diagnostics import Diagnostic, DiagnosticError
from moec.grammar.spec import Measured, Spec, Trace
from moec.grammar.stated import open_words, pipeline_of, searched_words, with_words

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
        raise DiagnosticError(found._replace(message=found.message + end) for found in error.diagnostics) from None


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
    lists = {word: getattr(file.parallel, word) for word in open_words(file)}
    if "recompute" in chosen:  # some layers may compute something else again
        chosen["layers"] = plan.parallel.layers
        found = {chosen["recompute"], *(block.recompute for block in plan.parallel.layers)}
        words = lists.pop("recompute")
        # Layers without experts compute nothing again where others do their experts.
        known = {*words, *(["none"] if "experts" in words else [])} if isinstance(words, tuple) else found
        if not found <= known or any(block.ep or block.etp for block in plan.parallel.layers):
            return False
    if pipeline_of(plan).pp == 1 and chosen.get("schedule") is None:
        lists.pop("schedule", None)  # one stage has no schedule
    if any(isinstance(values, tuple) and chosen[word] not in values for word, values in lists.items()):
        return False
    return with_words(_with_kept(file, plan), chosen) == plan


def _with_kept(file: Spec, plan: Spec) -> Spec:
    """The file with what the plan keeps of its trace, if that is the plan's."""
    if file.train is None or plan.train is None:
        return file
    routing, kept = file.train.routing, plan.train.routing
    if isinstance(routing, Trace) and isinstance(kept, Measured) and kept.file == routing.path:
        return file.replace(train=file.train.replace(routing=kept))
    return file
