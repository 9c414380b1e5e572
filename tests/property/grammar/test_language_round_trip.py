"""Spec(to_text(spec)) == spec, whatever the Spec."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moec.grammar import Spec, check, load_text, to_text
from moec.grammar import spec as s

count = st.integers(1, 2**40)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
weight = st.floats(min_value=0, allow_infinity=False)
fraction = st.floats(0, 1, exclude_min=True, exclude_max=True)
label = st.text(st.characters(codec="utf-8", exclude_characters='"\r\n\0'), max_size=12)

rope = st.none() | st.builds(s.Rope, theta=positive)
body = st.builds(s.SwiGLU, hidden=count) | st.builds(s.Gelu, hidden=count)
losses = st.builds(s.SwitchLoss, weight=weight) | st.builds(s.ZLoss, weight=weight)


@st.composite
def attentions(draw: st.DrawFn) -> s.Gqa | s.Mha:
    kv_heads, shared, half = draw(st.integers(1, 64)), draw(st.integers(1, 8)), draw(st.integers(1, 128))
    if draw(st.booleans()):
        return s.Gqa(heads=kv_heads * shared, kv_heads=kv_heads, head_dim=2 * half, rope=draw(rope))
    return s.Mha(heads=kv_heads, head_dim=2 * half, rope=draw(rope))


@st.composite
def mixtures(draw: st.DrawFn) -> s.Moe:
    experts = draw(st.integers(1, 512))
    gate = s.TopK(
        k=draw(st.integers(1, experts)),
        score=draw(st.sampled_from(["softmax", "sigmoid"])),
        order=draw(st.sampled_from(["before", "after"])),
        normalize=draw(st.booleans()),
    )
    balance = tuple(draw(st.lists(losses, max_size=3)))
    return s.Moe(experts=s.Experts(count=experts, body=draw(body)), gate=gate, balance=balance)


layers = st.builds(s.Layer, attention=attentions(), ffn=body) | st.builds(
    s.Layer, attention=attentions(), moe=mixtures()
)
peaks = st.builds(s.Peak, **{name: st.none() | positive for name in s.Peak.model_fields})
devices = st.builds(
    s.Device, name=label, kind=st.sampled_from(["cpu", "cuda", "hip"]), memory=positive, bandwidth=positive, peak=peaks
)
levels = st.builds(s.Level, name=label, size=count, bandwidth=st.none() | positive, latency=st.none() | weight)
clusters = st.builds(
    s.Cluster,
    name=label,
    device=devices,
    levels=st.lists(levels, min_size=1, max_size=4, unique_by=lambda level: level.name).map(tuple),
)
optimizers = st.builds(s.AdamW, lr=positive, beta1=fraction, beta2=fraction, eps=positive, weight_decay=weight)
routings = st.builds(s.Uniform) | st.builds(s.Zipf, s=weight)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    kinds = draw(st.lists(layers, min_size=1, max_size=3))
    stack = tuple(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=12)))
    context = draw(count)
    model = s.Model(
        name=draw(label),
        vocab=draw(count),
        dim=draw(count),
        depth=len(stack),
        context=context,
        dtype=draw(st.sampled_from(s.DType)),
        norm=s.RmsNorm(eps=draw(fraction)),
        embedding=s.TokenEmbedding(tied=draw(st.booleans())),
        layers=stack,
    )
    train = s.Train(
        batch=draw(count),
        sequence=draw(st.integers(1, context)),
        optimizer=draw(optimizers),
        routing=draw(routings),
    )
    parallel = s.Parallel(dp=draw(st.none() | count), ep=draw(st.none() | count))
    return Spec(model=model, cluster=draw(clusters), train=draw(st.none() | st.just(train)), parallel=parallel)


@settings(max_examples=150, deadline=None)
@given(spec=specs())
def test_a_spec_reads_back_from_its_text(spec: Spec) -> None:
    assert check(spec) == []
    text = to_text(spec)
    loaded = load_text(text)
    assert loaded.diagnostics == ()
    assert loaded.spec == spec
    assert to_text(loaded.spec) == text
    assert len({id(layer) for layer in loaded.spec.model.layers}) == len(set(spec.model.layers))
