"""Diagnostics point at the cause: single faults in valid files (`benchmarks/planted_faults.py`)."""

from __future__ import annotations

from planted_faults import KINDS, Fault, corpus, diagnosed, first_points_at, mended, restored

from moec.grammar import load_text
from moec.grammar.diagnostics import Diagnostic

FAULTS: list[tuple[Fault, list[Diagnostic]]] = [(fault, diagnosed(fault.text)) for fault in corpus()]


def test_there_are_enough_of_each_kind() -> None:
    assert len(FAULTS) >= 300
    assert {fault.kind for fault, _ in FAULTS} == set(KINDS)


def test_every_fault_is_diagnosed() -> None:
    assert [fault.what for fault, found in FAULTS if not found] == []


def test_the_edited_line_is_pointed_at() -> None:
    assert sum(first_points_at(fault, found) for fault, found in FAULTS) >= 0.95 * len(FAULTS)


def test_suggestions_restore_what_was_misspelt() -> None:
    misspelt = [(fault, found) for fault, found in FAULTS if fault.kind == "misspelt"]
    assert sum(restored(fault, found) for fault, found in misspelt) >= 0.95 * len(misspelt)


def test_fixes_restore_the_meaning_of_a_misspelt_word_or_leave_it() -> None:
    misspelt = [(fault, mended(fault, found)) for fault, found in FAULTS if fault.kind == "misspelt"]
    changed = [(fault, text) for fault, text in misspelt if text != fault.text]
    assert len(changed) >= 0.6 * len(misspelt)
    assert [fault.what for fault, text in changed if load_text(text).spec != load_text(fault.original).spec] == []
