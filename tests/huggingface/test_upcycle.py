"""Sparse upcycling: what experts begin as, that the mixture computes what the dense model does, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface.decoders import config_of
from huggingface.equal import both, text
from safetensors.torch import load_file, save_file
from torch import Tensor

import moec
from moec import entry
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.printer import model_text
from moec.grammar.spec import Spec
from moec.runtime.huggingface.upcycle import Upcycling, upcycle

VERSION, HIDDEN, EXPERTS = "test", 24, 6
CLUSTER = 'cluster "here" { device = cpu; level "process" { size = 1 } }\n'


def sparse(folder: Path, moe: str = "", *, layers: str = "") -> Spec:
    """The file of the folder's model with `moe` in its layers, or in those of the selector."""
    moe = moe or f"experts = {EXPERTS} * swiglu({HIDDEN}); gate = topk(2, normalize = true)"
    lines = model_text(moec.from_hf(folder)).rstrip().removesuffix("}")
    return moec.compile(f"{lines}layers {layers} {{ moe {{ {moe} }} }}\n}}\n{CLUSTER}").spec


def loaded(spec: Spec, checkpoint: Path) -> Any:
    with moec.launch(moec.compile(spec), device="cpu") as job:
        model = job.build(seed=5)
        job.load(checkpoint, model)
    whole = moec.reference(spec)
    whole.load_state_dict(model.state_dict())
    return whole.eval()


def parameters(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_mixture_of_copies_computes_what_the_dense_model_does(model_type: str, tmp_path: Path) -> None:
    pair = both(tmp_path / "dense", model_type, **config_of(model_type))
    spec = sparse(tmp_path / "dense")
    upcycle(tmp_path / "dense", spec, tmp_path / "0", VERSION, Upcycling())
    model = loaded(spec, tmp_path / "0")
    with torch.no_grad():
        expected = pair.theirs(text()).logits
    torch.testing.assert_close(model(text()).logits.detach(), expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
    router = parameters(model)["layers.1.moe.gate.weight"]
    assert router.std() > 0.005


def test_biases_of_feed_forwards_are_copied_too(tmp_path: Path) -> None:
    pair = both(tmp_path / "dense", "llama", **config_of("llama", "biases of feed-forwards"))
    moe = f"experts = {EXPERTS} * swiglu({HIDDEN}, bias = true); gate = topk(3, normalize = true)"
    spec = sparse(tmp_path / "dense", moe)
    upcycle(tmp_path / "dense", spec, tmp_path / "0", VERSION, Upcycling())
    expected = pair.ours(text()).logits.detach()
    torch.testing.assert_close(loaded(spec, tmp_path / "0")(text()).logits.detach(), expected, rtol=0, atol=2e-5)


def test_layers_that_stay_dense_are_copied(tmp_path: Path) -> None:
    pair = both(tmp_path / "dense", "llama", **config_of("llama"))
    spec = sparse(tmp_path / "dense", layers="1..2 step 1")
    upcycle(tmp_path / "dense", spec, tmp_path / "0", VERSION, Upcycling())
    model = parameters(loaded(spec, tmp_path / "0"))
    ours = parameters(pair.ours)
    assert torch.equal(model["layers.0.ffn.up.weight"], ours["layers.0.ffn.up.weight"])
    for number in (1, 2):
        for part in ("up", "down"):
            experts = model[f"layers.{number}.moe.experts.{part}.weight"]
            dense = ours[f"layers.{number}.ffn.{part}.weight"]
            assert all(torch.equal(expert, dense) for expert in experts)


def test_slices_add_up_to_the_feed_forward(tmp_path: Path) -> None:
    """Under a gate that weighs all alike, copies of three slices are the feed-forward."""
    pair = both(tmp_path / "dense", "llama", **config_of("llama"))
    spec = sparse(tmp_path / "dense", f"experts = 6 * swiglu({HIDDEN // 3}); gate = topk(6, normalize = true)")
    upcycle(tmp_path / "dense", spec, tmp_path / "0", VERSION, Upcycling(split=True))
    model = loaded(spec, tmp_path / "0")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("moe.gate.weight"):
                parameter.zero_()
    expected = pair.ours(text()).logits.detach()
    torch.testing.assert_close(model(text()).logits.detach(), expected, rtol=0, atol=5e-5)
    up = parameters(model)["layers.0.moe.experts.up.weight"]
    dense = parameters(pair.ours)["layers.0.ffn.up.weight"]
    assert torch.equal(up[4], dense[:, 8:16])
    assert torch.equal(up[1], up[4])


def test_a_token_begins_with_all_slices_of_a_copy(tmp_path: Path) -> None:
    """The slices of one copy have one router: with as many choices as slices the mixture is the dense model."""
    pair = both(tmp_path / "dense", "llama", **config_of("llama"))
    spec = sparse(tmp_path / "dense", f"experts = 9 * swiglu({HIDDEN // 3}); gate = topk(3, normalize = true)")
    done = upcycle(tmp_path / "dense", spec, tmp_path / "0", VERSION, Upcycling(split=True))
    assert not done.notes
    expected = pair.ours(text()).logits.detach()
    torch.testing.assert_close(loaded(spec, tmp_path / "0")(text()).logits.detach(), expected, rtol=0, atol=5e-5)


def test_what_does_not_begin_as_the_dense_model_is_a_warning(tmp_path: Path) -> None:
    both(tmp_path / "dense", "llama", **config_of("llama"))
    spec = sparse(tmp_path / "dense", f"experts = 6 * swiglu({HIDDEN // 3}); gate = topk(2)")
    done = upcycle(tmp_path / "dense", spec, tmp_path / "0", VERSION, Upcycling(split=True))
    assert [note.code for note in done.notes] == ["MOE0910"] * 2
    assert "do not add up to 1" in done.notes[0].message
    assert "do not make whole copies" in done.notes[1].message


def test_noise_makes_experts_differ_by_its_deviation(tmp_path: Path) -> None:
    pair = both(tmp_path / "dense", "llama", **config_of("llama"))
    spec = sparse(tmp_path / "dense")
    for name, how in {
        "a": Upcycling(noise=0.01),
        "b": Upcycling(noise=0.01),
        "c": Upcycling(noise=0.01, seed=1),
    }.items():
        upcycle(tmp_path / "dense", spec, tmp_path / name, VERSION, how)
    a, b, c = (parameters(loaded(spec, tmp_path / name)) for name in "abc")
    for part in ("up", "down"):
        name = f"layers.1.moe.experts.{part}.weight"
        noise = a[name] - parameters(pair.ours)[f"layers.1.ffn.{part}.weight"]
        assert abs(float(noise.std()) / 0.01 - 1) < 0.05
        assert abs(float(noise.mean())) < 0.001
        assert not torch.equal(noise[0], noise[1])
        assert torch.equal(a[name], b[name])
        assert not torch.equal(a[name], c[name])
    assert torch.equal(a["layers.1.attention.q.weight"], parameters(pair.ours)["layers.1.attention.q.weight"])


def test_dropped_units_are_the_same_in_gate_up_and_down_and_drawn_like_those_they_replace(tmp_path: Path) -> None:
    both(
        tmp_path / "dense", "llama", **config_of("llama") | {"intermediate_size": 64, "hidden_size": 64, "head_dim": 16}
    )
    (file,) = (tmp_path / "dense").glob("*.safetensors")
    tensors = load_file(file)
    save_file({name: tensor + 5 * ("gate_proj" in name) for name, tensor in tensors.items()}, file, {"format": "pt"})
    spec = sparse(tmp_path / "dense", "experts = 8 * swiglu(64); gate = topk(2)")
    upcycle(tmp_path / "dense", spec, tmp_path / "0", VERSION, Upcycling(drop=0.5))
    source = moec.reference(moec.from_hf(tmp_path / "dense"))
    moec.load_hf(source, tmp_path / "dense")
    model, dense = parameters(loaded(spec, tmp_path / "0")), parameters(source)
    up, down = (model[f"layers.1.moe.experts.{part}.weight"] for part in ("up", "down"))
    dense_up, dense_down = (dense[f"layers.1.ffn.{part}.weight"] for part in ("up", "down"))
    kept_by_expert = []
    for expert in range(8):
        kept = (up[expert] == dense_up).all(-1)
        assert torch.equal(kept[0], kept[1])
        assert torch.equal(kept[0], (down[expert] == dense_down).all(0))
        assert int(kept[0].sum()) == 32
        kept_by_expert.append(kept[0])
        dropped = ~kept[0]
        for new, old in ((up[expert][0], dense_up[0]), (up[expert][1], dense_up[1])):
            assert abs(float(new[dropped].std() / old[dropped].std()) - 1) < 0.1
            assert abs(float(new[dropped].mean() - old[dropped].mean())) < 0.1
    assert len({tuple(kept.tolist()) for kept in kept_by_expert}) > 1


def test_a_checkpoint_of_moec_is_a_source_too(tmp_path: Path) -> None:
    pair = both(tmp_path / "dense", "qwen3", **config_of("qwen3"))
    plan = moec.compile(f"{model_text(moec.from_hf(tmp_path / 'dense'))}{CLUSTER}")
    with moec.launch(plan, device="cpu") as job:
        model = job.build()
        moec.load_hf(model, tmp_path / "dense")
        job.save(tmp_path / "saved", model).wait()
    spec = sparse(tmp_path / "dense")
    upcycle(tmp_path / "saved", spec, tmp_path / "0", VERSION, Upcycling())
    expected = pair.ours(text()).logits.detach()
    torch.testing.assert_close(loaded(spec, tmp_path / "0")(text()).logits.detach(), expected, rtol=0, atol=2e-5)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    """Its tensors have the shapes of the file's model; what it computes is another thing."""
    both(tmp_path / "dense", "llama", **config_of("llama"))
    text = model_text(moec.from_hf(tmp_path / "dense"))
    with moec.launch(moec.compile(f"{text.replace('swiglu', 'geglu')}{CLUSTER}"), device="cpu") as job:
        job.save(tmp_path / "saved", job.build()).wait()
    with pytest.raises(DiagnosticError, match=r"MOE0910.*geglu"):
        upcycle(tmp_path / "saved", sparse(tmp_path / "dense"), tmp_path / "0", VERSION, Upcycling())
    assert not (tmp_path / "0").exists()


def test_a_file_without_a_mixture_is_refused(tmp_path: Path) -> None:
    both(tmp_path / "dense", "llama", **config_of("llama"))
    layer = 'layer "one" { dim = 8; moe { experts = 2 * gelu(4); gate = topk(1) } }'
    for source in (moec.from_hf(tmp_path / "dense"), moec.compile(f"{layer}\n{CLUSTER}").spec):
        with pytest.raises(DiagnosticError, match="MOE0910"):
            upcycle(tmp_path / "dense", source, tmp_path / "0", VERSION, Upcycling())


REFUSED = {
    "another width": ("experts = 4 * swiglu(20); gate = topk(1)", Upcycling(), "20 wide"),
    "wider": ("experts = 4 * swiglu(48); gate = topk(1)", Upcycling(split=True), "48 wide"),
    "no multiple of slices": ("experts = 4 * swiglu(8); gate = topk(1)", Upcycling(split=True), "no multiple of the 3"),
    "narrower": ("experts = 6 * swiglu(8); gate = topk(1)", Upcycling(), "--split"),
    "shared": ("experts = 4 * swiglu(24); gate = topk(1); shared = swiglu(24)", Upcycling(), "`shared`"),
    "residual": ("experts = 4 * swiglu(24); gate = topk(1); residual = swiglu(24)", Upcycling(), "`residual`"),
    "no activation": ("experts = 4 * linear; gate = topk(1)", Upcycling(), "without an activation"),
    "another activation": ("experts = 4 * gelu(24); gate = topk(1)", Upcycling(), "cannot be copies"),
    "biases": ("experts = 4 * swiglu(24, bias = true); gate = topk(1)", Upcycling(), "has no layers.0.ffn.up.bias"),
    "drop": ("", Upcycling(drop=1.5), "--drop"),
    "noise": ("", Upcycling(noise=-1.0), "--noise"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    moe, how, words = REFUSED[name]
    both(tmp_path / "dense", "llama", **config_of("llama"))
    with pytest.raises(DiagnosticError) as error:
        upcycle(tmp_path / "dense", sparse(tmp_path / "dense", moe), tmp_path / "0", VERSION, how)
    first = error.value.diagnostics[0]
    assert first.code == "MOE0910"
    assert words in f"{first.message} {first.help}"
    assert not (tmp_path / "0").exists()


def test_another_model_is_refused(tmp_path: Path) -> None:
    both(tmp_path / "dense", "llama", **config_of("llama"))
    both(tmp_path / "other", "qwen3", **config_of("qwen3"))
    with pytest.raises(DiagnosticError, match=r"MOE0910.*qk_norm"):
        upcycle(tmp_path / "dense", sparse(tmp_path / "other"), tmp_path / "0", VERSION, Upcycling())


def test_a_mixture_is_no_dense_model(tmp_path: Path) -> None:
    both(tmp_path / "mixture", "mixtral", **config_of("mixtral"))
    spec = moec.from_hf(tmp_path / "mixture")
    with pytest.raises(DiagnosticError, match=r"MOE0910.*layer 0 .*dense model has no feed-forward"):
        upcycle(tmp_path / "mixture", spec, tmp_path / "0", VERSION, Upcycling())


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    both(tmp_path / "dense", "llama", **config_of("llama"))
    monkeypatch.chdir(tmp_path)
    text = model_text(moec.from_hf("dense"))
    assert f"ffn = swiglu({HIDDEN})" in text
    moe = f"moe {{ experts = 8 * swiglu({HIDDEN // 2}); gate = topk(4) }}"
    Path("model.moe").write_text(f"{text.replace(f'ffn = swiglu({HIDDEN})', moe)}\n{CLUSTER}")
    arguments = ["weights", "upcycle", "dense", "model.moe", "-o", "0", "--split", "--noise", "0.01", "--drop", "0.25"]
    monkeypatch.setattr(sys, "argv", ["moec", *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        entry.main()
    assert not stopped.value.code
    assert capsys.readouterr().out.startswith("wrote 0, ")
    spec = moec.compile("model.moe").spec
    assert loaded(spec, Path("0"))(torch.ones(1, 4, dtype=torch.int64)).logits.isfinite().all()
