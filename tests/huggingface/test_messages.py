"""What is said of models that are not imported, of other formats, and where; which of two files of weights counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface.decoders import config_of, usual
from huggingface.equal import made, text
from huggingface.test_weights import VERSION, folder_of, require_refused
from safetensors.torch import load_file, save_file
from support.tables import each_row

import moec
from moec.grammar.diagnostics import DiagnosticError
from moec.runtime.huggingface.checkpoints import export_weights, import_weights

Keys = dict[str, Any]


def said_of(source: Any) -> str:
    """The first diagnostic of a config, with its help."""
    with pytest.raises(DiagnosticError) as caught:
        moec.from_hf(source)
    first = caught.value.diagnostics[0]
    return f"{first.message}; {first.help}"


@each_row(
    ("config", "words"),
    [
        ({"model_type": "qwen3_5_moe"}, "`qwen3_5_moe_text`, the decoder of `qwen3_5_moe`: its norms multiply"),
        ({"model_type": "llama4"}, "`llama4_text`, the decoder of `llama4`: a router's weights"),
        ({"model_type": "llava_next", "text_config": usual("mixtral")}, "from_hf(config['text_config'])` reads the"),
        ({"model_type": "internvl_chat", "llm_config": usual("qwen3_moe")}, "imports `qwen3_moe`, the decoder of"),
        ({"model_type": "mixtrel"}, "did you mean `mixtral`?"),
        ({"model_type": "qwen3_5"}, '`model_type` is "qwen3_5"; docs/huggingface.md'),
    ],
)
def test_what_is_not_imported_is_named(config: Keys, words: str) -> None:
    said = said_of(config)
    assert words in said
    assert ("did you mean" in said) == ("did you mean" in words)


def test_the_place_of_a_key_is_that_keys(tmp_path: Path) -> None:
    """Not that of the same key in another object, of a text, or of the first of two."""
    path = tmp_path / "config.json"
    values = {"note": 'a "hidden_size": 3', "vision_config": {"hidden_size": 8, "factor": 1}, **usual("mixtral")}
    wrong = {"hidden_size": "wide", "rope_parameters": {"rope_type": "linear", "factor": "x"}}
    path.write_text(json.dumps(values | wrong, indent=1))
    with pytest.raises(DiagnosticError) as caught:
        moec.from_hf(path)
    text_of = path.read_text()
    places = [
        text_of[found.span.start :].split(",")[0].split("\n")[0] for found in caught.value.diagnostics if found.span
    ]
    assert {'"hidden_size": "wide"', '"factor": "x"'} <= set(places)


def test_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\0\0\0\xff")
    module = moec.reference(moec.from_hf(usual("mixtral")))
    for source in (tmp_path, tmp_path / "model.gguf"):
        assert "GGUF is llama.cpp's format" in said_of(source)
        require_refused("MOE0905", "GGUF is llama.cpp's format", lambda source=source: moec.load_hf(module, source))


MXFP4 = "model.layers.0.mlp.experts.down_proj_blocks"


@each_row(
    ("name", "method"),
    [(MXFP4, "mxfp4"), ("model.layers.0.self_attn.q_proj.qweight", "GPTQ or AWQ"),
     ("model.layers.0.self_attn.q_proj.weight_scale_inv", "fp8")],
)  # fmt: skip
def test_quantised_weights_are_named(name: str, method: str) -> None:
    tensors = made("gpt_oss", **config_of("gpt_oss")).state_dict()
    module = moec.reference(moec.from_hf(usual("gpt_oss")))
    with pytest.raises(DiagnosticError) as caught:
        moec.load_hf(module, {**tensors, name: torch.zeros(2, dtype=torch.uint8)})
    (found,) = caught.value.diagnostics
    assert (found.code, f"quantised ({method}): it has {name}" in str(found.message)) == ("MOE0907", True)
    assert ("dequantize=True" in str(found.help)) == (method in ("mxfp4", "fp8"))
    with pytest.warns(UserWarning, match=r"weights are quantised \(mxfp4\).*Mxfp4Config"):
        moec.from_hf(usual("gpt_oss", quantization_config={"quant_method": "mxfp4"}))


def test_of_one_file_and_an_index_the_file_counts(tmp_path: Path) -> None:
    """As transformers chooses."""
    folder = folder_of(tmp_path / "both")
    one = {name: tensor + 1 for path in folder.glob("model-*") for name, tensor in load_file(path).items()}
    save_file(one, folder / "model.safetensors", metadata={"format": "pt"})
    module = moec.reference(moec.from_hf(folder))
    moec.load_hf(module, folder)
    assert torch.equal(dict(module.named_parameters())["norm.weight"], one["model.norm.weight"].float())
    import_weights(folder, tmp_path / "0", VERSION)
    export_weights(tmp_path / "0", tmp_path / "out", VERSION)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_name_that_no_file_can_have_is_a_diagnostic(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "theirs", files=False)
    module = moec.reference(moec.from_hf(folder))
    import_weights(folder, tmp_path / "0", VERSION)
    bad = "a\0b"
    require_refused("MOE0900", "null byte", lambda: moec.from_hf(bad))
    require_refused("MOE0900", "null byte", lambda: moec.save_hf(module, tmp_path / "1", like=bad))
    require_refused("MOE0909", "is no name", lambda: moec.save_hf(module, bad))
    require_refused("MOE0909", "is no name", lambda: export_weights(tmp_path / "0", Path(bad), VERSION))
    require_refused("MOE0804", "is no name", lambda: import_weights(folder, Path(bad), VERSION))
    require_refused("MOE0800", "is no name", lambda: export_weights(Path(bad), tmp_path / "1", VERSION))
    layout = tmp_path / "0" / "huggingface" / "moec-layout.json"
    layout.write_text(layout.read_text().replace("model.safetensors", "model\\u0000.safetensors"))
    require_refused("MOE0801", "no safetensors file", lambda: export_weights(tmp_path / "0", tmp_path / "1", VERSION))
    assert not (tmp_path / "1").exists()


def test_a_model_of_dense_layers_alone_is_saved(tmp_path: Path) -> None:
    theirs = made("deepseek_v3", **{**config_of("deepseek_v3"), "first_k_dense_replace": 3})
    theirs.save_pretrained(tmp_path / "theirs")
    ours = moec.reference(moec.from_hf(tmp_path / "theirs"))
    moec.load_hf(ours, tmp_path / "theirs")
    moec.save_hf(ours, tmp_path / "ours")
    again = type(theirs).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(text()).logits, theirs(text()).logits, rtol=1e-6, atol=1e-6)
