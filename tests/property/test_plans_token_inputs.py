"""Random models that take more than ids: routes of a rollout, packed texts. Every plan equals the unsharded model."""

from __future__ import annotations

from hypothesis import given
from random_specs import specs
from support.examples import examples
from support.verified import require_equal

from moec.grammar import load_text, to_text
from moec.grammar.spec import Spec

GATES = [
    "topk({k}, normalize = true)",
    "topk({k}, score = sigmoid, order = after)",
    "topk({k}, score = sigmoid, normalize = true, bias = online(0.01), jitter = 0.1)",
    "topk({k})",
]
MODELS = [
    "embedding = tokens(segments = true)",
    "embedding = tokens(segments = true, padding = 31, positions = learned)",
    "embedding = tokens(separator = 3, padding = 0)",
    "embedding = tokens(segments = true, padding = given)",
]
CAPACITIES = [
    "",
    "capacity = factor(0.6, min = 2)",
    "capacity = factor(0.5, eval = 1.5)",
    "capacity = dynamic(max = 0.8)",
    "capacity = factor(1.25); group = batch",
]


def replaying(spec: Spec) -> Spec:
    """`spec` with `train { replay = true }`."""
    text = to_text(spec)
    assert text.count("\ntrain {") == 1
    return load_text(text.replace("\ntrain {", "\ntrain {\n  replay = true", 1), name="replay.moe").unwrap()


@examples(3, 25)
@given(specs(max_ranks=16, max_layers=3, gates=GATES))
def test_every_plan_that_replays_routes_equals_the_unsharded_model(spec: Spec) -> None:
    require_equal(replaying(spec), float32=False)


@examples(3, 25)
@given(specs(max_ranks=16, max_layers=3, models=MODELS, capacities=CAPACITIES))
def test_every_plan_of_packed_texts_equals_the_unsharded_model(spec: Spec) -> None:
    require_equal(spec, float32=False)
