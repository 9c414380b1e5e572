"""`to_text`: canonical, self-contained, and the inverse of loading."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from pydantic import ValidationError
from support.tables import each_row

from moec.grammar import Spec, load_file, load_text, to_text
from moec.grammar.format import formatted
from moec.grammar.source import Source
from moec.grammar.spec import (
    Cluster,
    Device,
    Dropless,
    DType,
    Experts,
    Factor,
    Layer,
    Level,
    Mha,
    Model,
    Moe,
    Parallel,
    RmsNorm,
    SwitchLoss,
    TopK,
    Train,
)
from moec.grammar.spec.experts import Gelu, SwiGLU
from moec.grammar.units import UNITS, exact, written

CASES = sorted(Path(__file__).parents[2].glob("cases/*.moe"))

CORE = Device(name="my core", kind="cpu", memory=3.0, bandwidth=1.5e9)
DENSE = Layer(attention=Mha(heads=2), ffn=Gelu(hidden=8))
SPARSE = Layer(
    attention=Mha(heads=2),
    moe=Moe(
        experts=Experts(count=4, body=SwiGLU(hidden=8)),
        gate=TopK(k=2, normalize=True),
        capacity=Dropless(),
        balance=(SwitchLoss(weight=0.02),),
    ),
)


def spec(*layers: Layer) -> Spec:
    return Spec(
        model=Model(name="m", vocab=9, dim=4, depth=len(layers), context=8, dtype=DType.FP32, layers=layers),
        cluster=Cluster(name="c", device=CORE, levels=(Level(name="n", size=2, latency=0.0),)),
        train=Train(batch=4, sequence=8),
        parallel=Parallel(ep=2),
    )


@each_row("path", CASES)
def test_a_file_reads_back_as_the_same_spec(path: Path) -> None:
    found = load_file(path).unwrap()
    text = to_text(found)
    again = load_text(text).unwrap()
    assert again == found
    assert to_text(again) == text
    assert again.has_model == found.has_model
    if found.has_model:
        assert len({id(layer) for layer in again.model.layers}) == len(set(found.model.layers))


def test_a_spec_made_in_python_is_written_as_a_person_would() -> None:
    assert to_text(spec(DENSE, SPARSE, DENSE)) == (
        """model "m" {
  vocab = 9
  dim = 4
  depth = 3
  context = 8
  dtype = fp32
  layers [0, 2] { attention = mha(heads = 2); ffn = gelu(8) }
  layers 1 {
    attention = mha(heads = 2)
    moe { experts = 4 * swiglu(8); gate = topk(2, normalize = true); balance = [switch_loss(0.02)] }
  }
}

device "my core" {
  kind = cpu
  memory = 3B
  bandwidth = 1.5GB/s
}

cluster "c" {
  device = "my core"
  level "n" { size = 2; latency = 0s }
}

train {
  batch = 4
  sequence = 8
}

parallel {
  ep = 2
}
"""
    )
    assert load_text(to_text(spec(DENSE, SPARSE, DENSE))).unwrap() == spec(DENSE, SPARSE, DENSE)


@each_row(
    ("order", "selectors"),
    [
        ("ddd", [""]),
        ("dss", ["0", "1..2"]),
        ("dsdsd", ["0..4 step 2", "[1, 3]"]),
        ("ddsddsd", ["[0..1, 3..4, 6]", "[2, 5]"]),
    ],
)
def test_equal_layers_share_a_block(order: str, selectors: list[str]) -> None:
    lines = to_text(spec(*({"d": DENSE, "s": SPARSE}[kind] for kind in order))).splitlines()
    found = [line.split("{")[0].split("layers")[1].strip() for line in lines if "layers" in line]
    assert found == selectors


def test_equal_layers_need_not_be_one_object() -> None:
    copies = [Layer(attention=Mha(heads=2), ffn=Gelu(hidden=8)) for _ in range(3)]
    assert to_text(spec(*copies)) == to_text(spec(DENSE, DENSE, DENSE))


@each_row(
    ("value", "dimension", "text"),
    [
        (80e9, "bytes", "80GB"),
        (2.0**32, "bytes", "4GiB"),
        (1.5 * 2**30, "bytes", "1.5GiB"),
        (1 / 3, "bytes/s", "0.3333333333333333B/s"),
        (2.7e-6, "s", "2.7us"),
        (5e-324, "s", "5e-324s"),
        (989.4e12, "FLOP/s", "989.4TFLOPS"),
        (1e-5, "", "1e-5"),
        (0.02, "", "0.02"),
        (14336, "", "14_336"),
        (1e300, "", "1e+300"),
    ],
)
def test_numbers_are_written_shortly_and_read_back_exactly(value: float, dimension: str, text: str) -> None:
    assert written(value, dimension) == text
    unit = next((unit for unit in sorted(UNITS, key=len, reverse=True) if text.endswith(unit)), "")
    read = exact(text.removesuffix(unit).replace("_", ""), unit)
    assert read is not None
    assert float(read) == value


@each_row(
    ("factor", "text"),
    [
        (Fraction(3, 10), "0.3"),
        (Fraction(5, 3), "5 / 3"),
        (Fraction(2), "2"),
        (Fraction(2**53 + 1), f"{2**53 + 1} / 1"),
        (Fraction(1, 2**62), f"1 / {2**62}"),
        (Fraction(2**63 - 1, 2**63 - 3), f"{2**63 - 1} / {2**63 - 3}"),
    ],
)
def test_fractions_are_decimals_where_these_are_exact_and_read_back(factor: Fraction, text: str) -> None:
    assert SPARSE.moe
    layer = SPARSE.replace(moe=SPARSE.moe.replace(capacity=Factor(factor=factor)))
    printed = to_text(spec(layer))
    assert f"capacity = factor({text})\n" in printed
    for laid_out in (printed, formatted(Source("x.moe", printed))):
        again = load_text(laid_out).unwrap()
        assert again == spec(layer)
        assert to_text(again) == printed


@each_row("label", ['a"b', "a\nb", "a\rb", "a\0b", "\ud800"])
def test_labels_that_no_text_can_hold_are_refused_by_the_schema(label: str) -> None:
    with pytest.raises(ValidationError):
        Level(name=label, size=1)


def test_defaults_are_left_out() -> None:
    assert "eps" not in to_text(spec(DENSE))
    changed = spec(DENSE)
    changed = changed.replace(model=changed.model.replace(norm=RmsNorm(eps=1e-6)))
    assert "norm = rms(eps = 1e-6)" in to_text(changed)
