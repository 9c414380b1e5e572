"""Every diagnostic's code and title. A code keeps its meaning for ever; a retired one is not given out again.

MOE00xx: files. MOE01xx: syntax. MOE02xx: names, types and values. MOE03xx: rules between values, of which
MOE0310 to MOE0319 are the mesh's (the `place` pass makes them). MOE04xx: limits. MOE06xx: plan folders. MOE07xx:
jobs, `verify` and `tune`.
Each has a page under `tests/diagnostics/`, which is its test as well.
"""

from __future__ import annotations

from collections.abc import Iterable

from moec.grammar.diagnostics.model import Diagnostic, Edit, Label, Severity
from moec.grammar.source import Span

CODES: dict[str, str] = {
    "MOE0001": "cannot read the file",
    "MOE0002": "this is a folder, not a file",
    "MOE0003": "the file is not UTF-8 text",
    "MOE0004": "the file has a NUL character in it",
    "MOE0005": "the file begins with a byte order mark",
    "MOE0006": "lines end in carriage return and newline",
    "MOE0007": "the file says nothing",
    "MOE0008": "the file is too large",
    "MOE0009": "no such file to use",
    "MOE0010": "files use each other in a circle",
    "MOE0011": "this path cannot be used",
    "MOE0012": "the file has tabs",
    "MOE0013": "there is a file already",
    "MOE0014": "cannot write the file",
    "MOE0015": "no such word or code",
    "MOE0101": "syntax error",
    "MOE0102": "unexpected character",
    "MOE0103": "the text is not closed",
    "MOE0104": "the bracket is not closed",
    "MOE0105": "nothing is open that this could close",
    "MOE0106": "nested too deeply",
    "MOE0107": "the number is out of range",
    "MOE0108": "a number begins with 0",
    "MOE0201": "unknown name",
    "MOE0202": "not supported yet",
    "MOE0203": "a required name is missing",
    "MOE0204": "given twice",
    "MOE0205": "declared twice",
    "MOE0206": "wrong kind of value",
    "MOE0207": "value out of bounds",
    "MOE0208": "wrong unit",
    "MOE0209": "unknown unit",
    "MOE0210": "wrong arguments",
    "MOE0211": "written the wrong way",
    "MOE0212": "wrong label or selector",
    "MOE0213": "no such `let`",
    "MOE0214": "a `let` may only use those above it",
    "MOE0215": "this cannot be computed",
    "MOE0216": "clusters are made from each other in a circle",
    "MOE0217": "a mixture is inside itself",
    "MOE0301": "query heads are not a multiple of key and value heads",
    "MOE0302": "the heads do not divide the model's width",
    "MOE0303": "rotary positions need an even head width",
    "MOE0304": "more experts per token than there are",
    "MOE0305": "a layer is incomplete",
    "MOE0306": "no such layer",
    "MOE0307": "sequences are longer than the context",
    "MOE0308": "nothing says how long sequences are",
    "MOE0309": "`ffn` and `moe` share one slot",
    "MOE0310": "the degrees do not multiply to the cluster's ranks",
    "MOE0311": "expert-parallel degree does not divide the expert count",
    "MOE0312": "a degree does not divide the ranks",
    "MOE0313": "the batch does not divide over the data-parallel ranks",
    "MOE0314": "only a shared expert is gated",
    "MOE0315": "results depend on the number of data-parallel ranks",
    "MOE0316": "a mixture's width is not the model's",
    "MOE0317": "groups of experts do not fit",
    "MOE0318": "tensor-parallel degree does not divide what it shards",
    "MOE0319": "a sequence does not divide over the tensor-parallel ranks",
    "MOE0320": "`eval` gives fewer places than `min`",
    "MOE0324": "the padding id is outside of the vocabulary",
    "MOE0401": "too many layers",
    "MOE0402": "too many experts",
    "MOE0403": "too large once its constants are replaced",
    "MOE0404": "too many files",
    "MOE0405": "`layers` blocks overlap too much",
    "MOE0600": "there is no plan here",
    "MOE0601": "this plan cannot be trusted",
    "MOE0602": "this plan has another format",
    "MOE0603": "the output would replace something that is not a plan",
    "MOE0604": "the plan cannot be written",
    "MOE0700": "not supported yet by a job",
    "MOE0701": "the number of processes is not the plan's number of ranks",
    "MOE0702": "the model cannot take this batch",
    "MOE0703": "this plan is too large to verify",
    "MOE0704": "replicas of a parameter have drifted apart",
    "MOE0705": "a rank has died or stalled",
    "MOE0706": "nothing here to measure this plan's kernels on",
    "MOE0707": "the kernels asked for cannot run here",
    "MOE0708": "a router's logits are NaN or infinite",
}


def diagnose(
    code: str,
    span: Span | None,
    message: str = "",
    *,
    labels: Iterable[Label] = (),
    help: str = "",
    severity: Severity = Severity.ERROR,
    fix: Iterable[Edit] = (),
) -> Diagnostic:
    """The diagnostic `code`, with its registered title."""
    return Diagnostic(
        code=code,
        title=CODES[code],
        span=span,
        message=message,
        labels=tuple(labels),
        help=help,
        severity=severity,
        fix=tuple(fix),
    )
