"""`moec.load_for` names what is wrong with a file."""

from pathlib import Path

import pytest
from support.plans import moe_plan

import moec


def test_a_mistake_in_a_file_is_raised_itself(tmp_path: Path) -> None:
    file = tmp_path / "wrong.moe"
    file.write_text('model "wrong" { vocabs = 32 }', encoding="utf-8")
    four = moe_plan(ranks=4, ep=4)
    with pytest.raises(moec.DiagnosticError) as error:
        moec.load_for(3, four, file)
    assert "MOE0201" in [each.code for each in error.value.diagnostics]
    with pytest.raises(moec.DiagnosticError, match="MOE0001"):
        moec.load_for(3, four, tmp_path / "missing.moe")


def test_degrees_that_do_not_fit_are_a_reason_among_several_and_the_error_of_the_only_one() -> None:
    four = moe_plan(ranks=4, ep=4)
    spec = moe_plan(ranks=8, ep=8).spec
    with pytest.raises(moec.DiagnosticError, match=r"MOE0810.*no plan is for 3 ranks"):
        moec.load_for(3, four, spec)
    with pytest.raises(moec.DiagnosticError, match=r"MOE031"):
        moec.load_for(3, spec)
