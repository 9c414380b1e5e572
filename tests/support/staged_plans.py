"""Plans of pipelines from specs that state the ranks of one stage; the rules of degrees are bypassed."""

from __future__ import annotations

from moec.codegen.plan import Plan, make_plan
from moec.grammar.spec import Spec
from moec.passes.degrees.degrees import choose_degrees
from moec.passes.pipeline import compile_program


def staged_plan(
    spec: Spec, pp: int = 2, virtual: int = 1, schedule: str = "one_f_one_b", last_layers: tuple[int, ...] = ()
) -> Plan:
    """The plan of a pipeline; `spec` says on what ranks one of its stages runs."""
    degrees = choose_degrees(spec)._replace(pp=pp, virtual=virtual, schedule=schedule, last_layers=last_layers)
    return make_plan(spec, compile_program(spec, degrees=degrees).program, "0")
