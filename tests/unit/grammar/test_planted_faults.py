"""Diagnostics point at the cause: single faults in valid files (`benchmarks/planted_faults.py`)."""

from __future__ import annotations

import pytest
from planted_faults import KINDS, PER_FILE, Fault, corpus, diagnosed, first_points_at, mended, restored
from support.session import extent

from moec.grammar import load_text
from moec.grammar.diagnostics import Diagnostic

Diagnosed = list[tuple[Fault, list[Diagnostic]]]


@pytest.fixture(scope="module")
def faults() -> Diagnosed:
    """Faults and their diagnostics."""
    return [(fault, diagnosed(fault.text)) for fault in corpus(per_file=PER_FILE if extent.everything else 8)]


def test_there_are_enough_of_each_kind(faults: Diagnosed) -> None:
    assert len(faults) >= 300
    assert {fault.kind for fault, _ in faults} == set(KINDS)


def test_every_fault_is_diagnosed(faults: Diagnosed) -> None:
    assert [fault.what for fault, found in faults if not found] == []


def test_the_edited_line_is_pointed_at(faults: Diagnosed) -> None:
    assert sum(first_points_at(fault, found) for fault, found in faults) >= 0.95 * len(faults)


@pytest.mark.slow  # a share of some hundred: of fewer it is chance
def test_suggestions_restore_what_was_misspelt(faults: Diagnosed) -> None:
    misspelt = [(fault, found) for fault, found in faults if fault.kind == "misspelt"]
    assert sum(restored(fault, found) for fault, found in misspelt) >= 0.95 * len(misspelt)


def test_fixes_restore_the_meaning_of_a_misspelt_word_or_leave_it(faults: Diagnosed) -> None:
    misspelt = [(fault, mended(fault, found)) for fault, found in faults if fault.kind == "misspelt"]
    changed = [(fault, text) for fault, text in misspelt if text != fault.text]
    assert len(changed) >= 0.6 * len(misspelt)
    assert [fault.what for fault, text in changed if load_text(text).spec != load_text(fault.original).spec] == []
