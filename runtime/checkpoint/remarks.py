"""Warnings after loading a checkpoint: what differs in this script, and what was not loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from moec.codegen.plan import Plan
from moec.grammar.checking.rank_rules import with_results_of_ranks
from moec.grammar.diagnostics.codes import CODES
from moec.runtime.checkpoint.extras import unread
from moec.runtime.checkpoint.model_fields import differences
from moec.runtime.checkpoint.optimizer_state import PlainState, scalars_of

if TYPE_CHECKING:
    from moec.runtime.checkpoint.loading import Loading

MAX_NAMED = 5
WITHOUT_DATA = (LRScheduler, Optimizer, nn.Module, GradScaler)
"""Classes of extras whose state does not depend on the data rank."""
SCHEDULED = frozenset(("lr", "momentum", "betas", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"))
"""Options of a group that a scheduler changes. It does not change `initial_lr`."""


def remarks(
    loading: Loading, plan: Plan, optimizer: Optimizer | None, extras: Mapping[str, Any], *, resumes: bool
) -> Iterator[str]:
    """The warnings about a checkpoint that was loaded."""
    index, call = loading.checkpoint.index, "job.resume" if resumes else "job.load"
    if others := differences(index.model, plan.spec):
        yield f"the model has the same shapes, but computes something else: {first_of(others)}"
    if resumes and index.optimizer is not None and optimizer is None:
        yield f"its optimizer, a {index.optimizer.kind}, was not loaded: give job.resume one"
    if loading.changed_options:
        yield (
            f"the optimizer was made with other options: {first_of(loading.changed_options)}. Those of the checkpoint "
            "go on: to change one, set it in `optimizer.param_groups` after loading"
        )
    if loading.plain is not None and loading.plain.is_reordered:
        yield from _group_order_remarks(loading, loading.plain.groups, extras)
    yield from _scheduler_remarks(extras)
    if resumes or optimizer is not None or extras:  # else the script wants the model alone
        not_loaded = [name for name in unread(loading, returned=not resumes) if name not in extras]
        if not_loaded:
            name = not_loaded[0]
            yield f"not loaded: {', '.join(not_loaded)}; give {call} an object for each, such as `{name}={name}`"
    data_size = loading.checkpoint.head.data_size
    sizes = f"saved with {data_size} data ranks, and here are {plan.data_size}"
    if data_size != plan.data_size and (resumes or optimizer is not None):
        for diagnostic in with_results_of_ranks(plan.spec):
            yield f"{sizes}: {CODES[diagnostic.code]} ({diagnostic.code}); {diagnostic.help}"
    own_extras = [name for name, receiver in extras.items() if not isinstance(receiver, WITHOUT_DATA)]
    if own_extras and data_size != plan.data_size:
        yield (
            f"{', '.join(own_extras)}: {sizes}. A position in a data rank's own part of the data would skip some data "
            "and repeat other; a count over all ranks, such as `job.total_tokens`, goes on"
        )
    if resumes and loading.keeps_random_states:
        yield f"torch's random states were {sizes}: each rank keeps the state that it has"


def changed_options(optimizer: Optimizer, stored: PlainState) -> list[str]:
    """The options in which a script's optimizer differs from the checkpoint's. Call it before they are put back.

    For options that a scheduler changes, it compares the values that both optimizers were made with; they count as
    equal if the checkpoint's groups have the same values as the script's.
    """
    made, defaults = stored.made, scalars_of(optimizer.defaults)
    groups = [
        (scalars_of(stored.options[number]), scalars_of(group))
        for number, group in zip(stored.groups, optimizer.param_groups, strict=True)
    ]
    changed = {
        key: (made[key], defaults[key])
        for key in made.keys() & defaults.keys()
        if made[key] != defaults[key] and any(there.get(key) != here.get(key) for there, here in groups)
    }
    for there, here in groups:
        for key in (there.keys() & here.keys()) - SCHEDULED - changed.keys():
            if there[key] != here[key]:
                changed["lr" if key == "initial_lr" else key] = there[key], here[key]
    return [f"{key} {there}, here {here}" for key, (there, here) in sorted(changed.items())]


def first_of(words: Sequence[str]) -> str:
    """The first of several remarks, and how many more there are."""
    more = f"; and {len(words) - MAX_NAMED} more" if len(words) > MAX_NAMED else ""
    return f"{'; '.join(words[:MAX_NAMED])}{more}"


def _scheduler_remarks(extras: Mapping[str, Any]) -> Iterator[str]:
    """Warns of loaded schedulers whose optimizer has another learning rate, which would stay wrong."""
    for name, scheduler in extras.items():
        if not isinstance(scheduler, LRScheduler) or not hasattr(scheduler, "_last_lr"):
            continue
        last = [float(rate) for rate in scheduler.get_last_lr()]
        rates = [float(group["lr"]) for group in scheduler.optimizer.param_groups]
        if last != rates:
            yield (
                f"{name} is at lr {_listed(last)}, and its optimizer at lr {_listed(rates)}: load the "
                "optimizer that the scheduler was made with too"
            )


def _listed(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates))


def _group_order_remarks(loading: Loading, order: Sequence[int], extras: Mapping[str, Any]) -> Iterator[str]:
    """Warns that groups of the optimizer are in another order, if an object was loaded that may count groups."""
    index = loading.checkpoint.index
    assert index.optimizer is not None
    objects = [name for name in extras if index.extras[name].loads]
    if not objects:
        return
    groups = index.optimizer.groups
    moved = [f"group {there} is group {here} here" for here, there in enumerate(order) if here != there]
    first = next(there for here, there in enumerate(order) if here != there)
    if groups[first].parameters:
        moved[0] += f", that of {groups[first].parameters[0]}"
    yield (
        f"the optimizer's groups are in another order than in the checkpoint, whose {first_of(moved)}. Options went to "
        f"the groups with the same parameters, but a scheduler counts groups by number ({', '.join(objects)}): make "
        "the groups in the checkpoint's order"
    )
