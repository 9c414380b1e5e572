"""Plans that freeze random parts of a model, on random clusters, equal the unsharded model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.plans import moe_text
from support.verified import require_equal

from moec.grammar import load_text
from moec.grammar.spec import Spec
from moec.passes.lower.lower_frozen import PARTS

OPTIMIZERS = ["adamw(lr = 1e-3)", "sgd(lr = 0.1, momentum = 0.9)", "adafactor()", "muon()", "lion()"]


@st.composite
def frozen(draw: st.DrawFn) -> Spec:
    """A model with a shared and a residual feed-forward, of which at least one part trains."""
    ranks = draw(st.sampled_from([2, 4, 8]))
    ep, tp = (draw(st.sampled_from([d for d in (1, 2, 4) if ranks % d == 0])) for _ in range(2))
    trained = draw(st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=4, unique=True))
    words = ", ".join(part for part in PARTS if part not in trained)
    text = moe_text(
        ranks=ranks,
        tp=tp,
        ep=ep,
        zero=draw(st.integers(0, 3)),
        sequence_parallel=draw(st.booleans()),
        experts=ep * draw(st.integers(1, 2)) * 2,
        expert=draw(st.sampled_from(["lora(2, alpha = 3)", "swiglu(6, bias = true)"])),
        gate=draw(
            st.sampled_from(["topk(2)", "topk(1, jitter = 0.2)", "topk(2, score = sigmoid, bias = online(0.01))"])
        ),
        balance=draw(st.sampled_from(["[]", "[switch_loss(0.1)]"])),
        beside="shared = swiglu(8, gated = true); residual = gelu(8)" + draw(st.sampled_from(["", "; group = batch"])),
        bias=draw(st.sampled_from(["none", "all"])),
        qk_norm=draw(st.sampled_from([None, "head", "projection"])),
        model=draw(st.sampled_from(["", "embedding = tokens(positions = learned)", "norm = layer_norm()"])),
        optimizer=f"{draw(st.sampled_from(OPTIMIZERS))}; frozen = [{words}]",
        dtype=draw(st.sampled_from(["fp32", "bf16"])),
        batch=2 * ranks,
        sequence=tp * draw(st.integers(1, 3)),
        microbatches=draw(st.sampled_from([None, 2])),
        recompute=draw(st.sampled_from(["", "experts", "layer"])),
    )
    return load_text(text, name="tiny.moe").unwrap()


@examples(3, 25)
@given(frozen())
def test_a_model_with_frozen_parts_equals_the_unsharded_model(spec: Spec):
    report = require_equal(spec)
    assert report.max_gradient_error < 1e-12
