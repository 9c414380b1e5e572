"""What a search found beside the plan that it chose, as numbers: `report.json` of a plan. Nothing that runs a plan
reads it; `moec plan` shows it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from moec.passes.cost.seconds import Term

if TYPE_CHECKING:
    from moec.grammar.spec import Spec
    from moec.passes.search.candidate import Candidate, Choice

GIGABYTE = 1e9


@dataclass(frozen=True, kw_only=True)
class _Numbers:
    """A part of the report, with the settings by which pydantic reads it and makes its JSON Schema."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "use_attribute_docstrings": True,
        "extra": "forbid",
        "strict": True,
        "allow_inf_nan": False,
    }


@dataclass(frozen=True, kw_only=True)
class PlannedCandidates(_Numbers):
    """The plans among which a search chose."""

    number: int
    fit: int
    """Those whose estimated memory fits, and at least those that were placed and fit; 0 if no placed one does."""


@dataclass(frozen=True, kw_only=True)
class OtherPlan(_Numbers):
    """The numbers of a plan: of the chosen one, or of another that is compared with it."""

    words: dict[str, int | str]
    """The words that its search states; of a search for `schedule` also `virtual`."""
    step_time_s: float
    terms: dict[Term, float]
    """Seconds by what takes them; they add up to the step."""
    memory_gb: float
    fits: bool


@dataclass(frozen=True, kw_only=True)
class UnusedValue(_Numbers):
    """A value of a list that no plan has."""

    word: str
    value: int | str
    broken_rule: str | None
    """The code, title and message of the rule that it breaks in the chosen plan; null where it breaks none there."""


@dataclass(frozen=True, kw_only=True)
class SearchReport(_Numbers):
    """What a search found: the plan that it chose, and the next ones."""

    candidates: PlannedCandidates
    chosen: OtherPlan
    runners_up: list[OtherPlan]
    """The next plans, the fastest first."""
    unused: list[UnusedValue]
    """The values of lists that no plan has."""

    def as_data(self) -> dict[str, Any]:
        """The content of `report.json`."""
        return asdict(self)


def other_plan(plan: Candidate) -> OtherPlan:
    """The numbers of a plan."""
    step = plan.prediction.step
    return OtherPlan(
        words=dict(plan.words),
        step_time_s=float(step.total),
        terms={term: float(seconds) for term, seconds in step.of.items()},
        memory_gb=float(plan.prediction.memory.peak.bytes.total) / GIGABYTE,
        fits=plan.prediction.fits,
    )


def report_of(spec: Spec, choice: Choice | None) -> SearchReport | None:
    """The report of what a search chose for the file `spec`; None for none."""
    if choice is None:
        return None
    from moec.passes.search.rules import unused_values

    return SearchReport(
        candidates=PlannedCandidates(number=choice.candidates, fit=choice.fitting),
        chosen=other_plan(choice.chosen),
        runners_up=[other_plan(other) for other in choice.runners_up],
        unused=[
            UnusedValue(
                word=word,
                value=value,
                broken_rule=None if rule is None else f"{rule.code}, {rule.title}: {rule.message}",
            )
            for word, value, rule in unused_values(spec, choice.chosen.spec)
        ],
    )
