"""`moec weights import` and `export`: the same bytes back, trained checkpoints, bad input, kills."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface.decoders import ROWS, config_of
from huggingface.equal import BATCH, made, text
from safetensors.torch import load_file, save_file
from support.combinations import some
from transformers import AutoModelForCausalLM

import moec
from moec import entry
from moec.codegen.plan import Plan
from moec.grammar.diagnostics import DiagnosticError
from moec.grammar.printer import model_text
from moec.runtime.errors import JobError
from moec.runtime.huggingface.checkpoints import export_weights, import_weights
from moec.runtime.model.module import PlanModule

VERSION = "test"
CLUSTER = 'cluster "here" { device = cpu; level "process" { size = 1 } }'


def folder_of(
    path: Path, model_type: str = "mixtral", *, dtype: torch.dtype = torch.bfloat16, files: bool = True
) -> Path:
    """A folder as it is downloaded: several files of weights, and a tokenizer."""
    made(model_type, **config_of(model_type)).to(dtype).save_pretrained(path, max_shard_size="30KB" if files else "5GB")
    (path / "tokenizer.json").write_text('{"version": "1.0",   "added_tokens": []}')
    (path / "merges.txt").write_bytes(b"#version: 0.2\r\nt h\n")
    return path


def require_same_files(one: Path, two: Path) -> None:
    assert sorted(os.listdir(one)) == sorted(os.listdir(two))
    for name in os.listdir(one):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


@pytest.mark.parametrize("model_type", some(list(ROWS), [*ROWS][::2]))
def test_an_import_and_an_export_give_back_the_same_bytes(model_type: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "theirs", model_type)
    import_weights(folder, tmp_path / "checkpoint", VERSION)
    export_weights(tmp_path / "checkpoint", tmp_path / "again", VERSION)
    require_same_files(folder, tmp_path / "again")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_come_back_too(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "theirs", dtype=dtype, files=False)
    import_weights(folder, tmp_path / "checkpoint", VERSION)
    export_weights(tmp_path / "checkpoint", tmp_path / "again", VERSION)
    require_same_files(folder, tmp_path / "again")


def test_files_may_be_links_as_in_a_downloads_cache(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for path in folder.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    import_weights(tmp_path / "snapshot", tmp_path / "checkpoint", VERSION)
    export_weights(tmp_path / "checkpoint", tmp_path / "again", VERSION)
    require_same_files(folder, tmp_path / "again")


def test_parameters_pass_in_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few rows each, so that a slab begins in the middle of a tensor's heads and experts."""
    monkeypatch.setattr("moec.runtime.huggingface.row_blocks.ROW_BLOCK_BYTES", 3000)
    for model_type in ("deepseek_v3", "dbrx", "gpt_oss"):
        folder = folder_of(tmp_path / model_type, model_type)
        import_weights(folder, tmp_path / f"{model_type}.checkpoint", VERSION)
        export_weights(tmp_path / f"{model_type}.checkpoint", tmp_path / f"{model_type}.again", VERSION)
        require_same_files(folder, tmp_path / f"{model_type}.again")


def plan_of(folder: Path) -> Plan:
    """A plan of the folder's model for one rank, with an optimizer."""
    train = f"train {{ batch = {BATCH}; sequence = 24; optimizer = adamw(lr = 1e-2) }}"
    return moec.compile(f"{model_text(moec.from_hf(folder))}{CLUSTER}\n{train}\n")


def test_a_trained_checkpoint_becomes_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "theirs", "deepseek_v3", dtype=torch.float32)
    plan = plan_of(folder)
    import_weights(folder, tmp_path / "0", VERSION, plan)
    tokens = text()
    with moec.launch(plan, device="cpu") as job:
        model = job.build()
        optimizer = job.optimizer(model)
        job.load(tmp_path / "0", model)
        before = model.eval()(tokens).logits
        model.train()
        for _ in range(2):
            job.step(model, tokens, tokens.roll(-1, 1))
            optimizer.step()
            optimizer.zero_grad()
        job.save(tmp_path / "2", model, optimizer).wait()
        after = model.eval()(tokens).logits
    with torch.no_grad():
        torch.testing.assert_close(before, theirs(folder)(tokens).logits, rtol=0, atol=1e-5)
    export_weights(tmp_path / "2", tmp_path / "like", VERSION, like=folder)
    export_weights(tmp_path / "2", tmp_path / "plan", VERSION, plan=plan)
    assert (tmp_path / "like" / "merges.txt").read_bytes() == (folder / "merges.txt").read_bytes()
    for exported in ("like", "plan"):
        with torch.no_grad():
            logits = theirs(tmp_path / exported)(tokens).logits
        torch.testing.assert_close(logits, after, rtol=0, atol=2e-5)
    assert (before - after).abs().max() > 1e-2


def theirs(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def test_a_checkpoint_that_says_no_architecture_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "theirs")
    plan = plan_of(folder)
    with moec.launch(plan, device="cpu") as job:
        model = job.build()
        job.save(tmp_path / "0", model).wait()
    require_refused("MOE0908", "--like DIR", lambda: export_weights(tmp_path / "0", tmp_path / "out", VERSION))
    other = folder_of(tmp_path / "other", "qwen3_moe")
    require_refused("MOE0805", "", lambda: export_weights(tmp_path / "0", tmp_path / "out", VERSION, like=other))
    assert not (tmp_path / "out").exists()


def require_refused(code: str, words: str, act: Callable[[], object]) -> None:
    with pytest.raises(DiagnosticError) as raised:
        act()
    first = raised.value.diagnostics[0]
    assert first.code == code, raised.value
    assert words in f"{first.message} {first.help}"


def test_tensors_of_further_predictions_are_left_out_and_named(tmp_path: Path) -> None:
    """Of layers beyond the model's depth, as DeepSeek-V3's last one: transformers does not load them either."""
    folder = folder_of(tmp_path / "theirs", "deepseek_v3", files=False)
    tensors = load_file(folder / "model.safetensors")
    more = {
        "model.layers.3.enorm.weight": torch.ones(32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    save_file({**tensors, **more}, folder / "model.safetensors", metadata={"format": "pt"})
    done = import_weights(folder, tmp_path / "checkpoint", VERSION)
    assert set(done.left_out) == set(more)
    exported = export_weights(tmp_path / "checkpoint", tmp_path / "again", VERSION)
    assert set(exported.left_out) == set(more)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


# ---- bad input -------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def long_header(path: Path) -> None:
    path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])


def no_header(path: Path) -> None:
    path.write_bytes(b"\x02\0\0\0\0\0\0\0[]")


def changed(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return act


NAME = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
WRONG: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "cut": (cut, "MOE0905", "model.safetensors is damaged"),
    "a header longer than the file": (long_header, "MOE0905", "model.safetensors is damaged"),
    "a header that is a list": (no_header, "MOE0905", "model.safetensors is damaged"),
    "empty": (lambda path: path.write_bytes(b""), "MOE0905", "model.safetensors is damaged"),
    "missing tensor": (changed(lambda t: t.pop(NAME)), "MOE0906", f"has no {NAME}"),
    "extra tensor": (changed(lambda t: t.update(more=torch.ones(1))), "MOE0906", "which the model does not have"),
    "wrong shape": (
        changed(lambda t: t.update({NAME: torch.ones(20, 16)})), "MOE0907", "[20, 16] in model.safetensors, [20, 32]",
    ),
    "transposed": (changed(lambda t: t.update({NAME: t[NAME].T.contiguous()})), "MOE0907", "is [32, 20]"),
    "int8": (changed(lambda t: t.update({NAME: t[NAME].to(torch.int8)})), "MOE0907", f"{NAME} is int8"),
    "fp8": (changed(lambda t: t.update({NAME: t[NAME].to(torch.float8_e4m3fn)})), "MOE0907", "is float8_e4m3fn"),
    "fp64": (changed(lambda t: t.update({NAME: t[NAME].double()})), "MOE0907", f"{NAME} is float64"),
    "gone": (lambda path: path.unlink(), "MOE0905", "neither model.safetensors nor"),
    "a pickle": (lambda path: path.rename(path.with_name("pytorch_model.bin")), "MOE0905", "save_pretrained"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "MOE0905", ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_files_are_refused_and_nothing_is_loaded(kind: str, tmp_path: Path) -> None:
    act, code, words = WRONG[kind]
    folder = folder_of(tmp_path / "theirs", files=False)
    act(folder / "model.safetensors")
    module = moec.reference(moec.from_hf(folder))
    assert isinstance(module, PlanModule)
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    require_refused(code, words, lambda: moec.load_hf(module, folder))
    assert all(torch.equal(before[name], parameter) for name, parameter in module.named_parameters())
    require_refused(code, words, lambda: import_weights(folder, tmp_path / "checkpoint", VERSION))
    assert sorted(os.listdir(tmp_path)) == ["theirs"]


OTHER_FOLDERS = "missing tensor", "extra tensor", "wrong shape", "int8"


@pytest.mark.parametrize("kind", OTHER_FOLDERS)
def test_no_export_is_like_a_folder_of_other_tensors(kind: str, tmp_path: Path) -> None:
    """It would lack tensors, have headers of other shapes, or have weights cast to int8."""
    act, code, words = WRONG[kind]
    folder, checkpoint = folder_of(tmp_path / "theirs", files=False), tmp_path / "checkpoint"
    import_weights(folder, checkpoint, VERSION)
    act(folder / "model.safetensors")
    require_refused(code, words, lambda: export_weights(checkpoint, tmp_path / "out", VERSION, like=folder))
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "theirs"]


INDEXES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "outside of the folder": (
        lambda i: i["weight_map"].update({NAME: "../model.safetensors"}),
        "not a file of the folder",
    ),
    "an absolute path": (lambda i: i["weight_map"].update({NAME: "/etc/passwd"}), "not a file of the folder"),
    "a file that is not there": (lambda i: i["weight_map"].update({NAME: "x.safetensors"}), "No such file"),
    "another file": (lambda i: i["weight_map"].update(dict.fromkeys([NAME], other_file(i))), "has no tensor"),
    "a tensor left out": (lambda i: i["weight_map"].pop(NAME), "does not have"),
    "no map": (lambda i: i.pop("weight_map"), "is not an index"),
    "a list": (lambda i: i.update(weight_map=[1]), "is not an index"),
}


def other_file(index: dict[str, Any]) -> str:
    return next(file for file in index["weight_map"].values() if file != index["weight_map"][NAME])


@pytest.mark.parametrize("kind", INDEXES)
def test_wrong_indexes_are_refused(kind: str, tmp_path: Path) -> None:
    change, words = INDEXES[kind]
    folder = folder_of(tmp_path / "theirs")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    require_refused("MOE0905", words, lambda: import_weights(folder, tmp_path / "checkpoint", VERSION))
    assert not (tmp_path / "checkpoint").exists()


def test_weights_of_another_config_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "theirs")
    module = moec.reference(moec.from_hf(folder_of(tmp_path / "other", "qwen3_moe")))
    require_refused("MOE0908", "is another model than qwen3_moe", lambda: moec.load_hf(module, folder))
    plan = plan_of(tmp_path / "other")
    require_refused("MOE0908", "", lambda: import_weights(folder, tmp_path / "checkpoint", VERSION, plan))


OTHER_K = {"num_experts_per_tok": 3}


def test_a_config_of_another_k_is_a_warning(tmp_path: Path) -> None:
    """The tensors fit: a model may go on with another k, or longer positions, than it came with."""
    folder = folder_of(tmp_path / "theirs")
    config = json.loads((folder / "config.json").read_text())
    other = moec.reference(moec.from_hf(config | OTHER_K | {"rms_norm_eps": 0.001}))
    every = r"`norm\.eps` is .*, and in the model 0\.001; .*`moe\.gate\.k` of layers 0\.\.2 is 2, and in the model 3"
    with pytest.warns(UserWarning, match=every):
        moec.load_hf(other, folder)
    same = moec.reference(moec.from_hf(folder))
    moec.load_hf(same, folder)
    assert all(torch.equal(*pair) for pair in zip(other.parameters(), same.parameters(), strict=True))
    (folder / "config.json").unlink()
    with pytest.warns(UserWarning, match=r"has no config\.json"):
        moec.load_hf(other, folder)


def test_an_export_of_another_mathematics_warns(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "theirs")
    import_weights(folder, tmp_path / "0", VERSION)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | OTHER_K))
    done = export_weights(tmp_path / "0", tmp_path / "out", VERSION, like=folder)
    (note,) = done.notes
    assert note.code == "MOE0805"
    assert "topk(2" in note.message
    assert "topk(3" in note.message
    assert not export_weights(tmp_path / "0", tmp_path / "same", VERSION).notes


def test_online_biases_are_saved_in_fp32(tmp_path: Path) -> None:
    """Choices follow from them, and their steps are smaller than what bf16 keeps."""
    made("deepseek_v3", **config_of("deepseek_v3")).save_pretrained(tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    module = moec.reference(moec.from_hf(tmp_path / "theirs"))
    moec.load_hf(module, tmp_path / "theirs")
    moec.save_hf(module, tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(theirs[name], ours[name])
    assert ours["lm_head.weight"].dtype == torch.bfloat16


def test_more_layers_than_the_model_has_are_refused(tmp_path: Path) -> None:
    """But for as many as the config says predict further tokens."""
    folder = folder_of(tmp_path / "theirs", "deepseek_v3", files=False)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    module = moec.reference(moec.from_hf(folder))
    require_refused("MOE0906", "model.layers.2.", lambda: moec.load_hf(module, folder))
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    moec.load_hf(module, folder)


def test_a_pipe_is_no_config(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    require_refused("MOE0900", "is no file", lambda: moec.from_hf(tmp_path))


def test_nothing_is_replaced(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "theirs")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine")
    require_refused("MOE0803", "exists", lambda: import_weights(folder, tmp_path / "there", VERSION))
    import_weights(folder, tmp_path / "checkpoint", VERSION)
    require_refused("MOE0909", "exists", lambda: export_weights(tmp_path / "checkpoint", tmp_path / "there", VERSION))
    assert os.listdir(tmp_path / "there") == ["file"]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "theirs", "there"]


def test_a_save_that_another_rank_stops_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has its temporary folder by the time it hears of the other rank's error."""

    def stop(module: object, error: object) -> None:
        assert error is None
        assert os.listdir(tmp_path / "saved")
        raise JobError("MOE0710", "rank 1: norm.weight is no longer a parameter of the model")

    monkeypatch.setattr("moec.runtime.huggingface.save._require_none", stop)
    (tmp_path / "saved").mkdir()
    module = moec.reference(moec.from_hf(folder_of(tmp_path / "theirs")))
    require_refused("MOE0710", "rank 1", lambda: moec.save_hf(module, tmp_path / "saved" / "0"))
    assert not os.listdir(tmp_path / "saved")


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    import_weights(folder_of(tmp_path / "theirs"), tmp_path / "checkpoint", VERSION)
    shard = tmp_path / "checkpoint" / "rank-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    require_refused("MOE0801", "digest", lambda: export_weights(tmp_path / "checkpoint", tmp_path / "out", VERSION))
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "theirs"]


@contextmanager
def full_disk() -> Iterator[None]:
    """The system's limit of a file's size, which is reached in the middle of writing."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("what", ["import", "export"])
def test_a_disk_that_is_full_leaves_nothing(what: str, tmp_path: Path) -> None:
    folder, act, code = folder_of(tmp_path / "theirs", files=False), import_weights, "MOE0804"
    if what == "export":
        import_weights(folder, tmp_path / "checkpoint", VERSION)
        folder, act, code = tmp_path / "checkpoint", export_weights, "MOE0909"
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(DiagnosticError, match=code), full_disk():
        act(folder, tmp_path / "out", VERSION)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_kill_in_the_middle_leaves_no_checkpoint(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "theirs")
    slowly = {"advance": lambda _: time.sleep(0.05)}
    process = multiprocessing.get_context("fork").Process(
        target=import_weights, args=(folder, tmp_path / "checkpoint", VERSION), kwargs=slowly
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forks with running threads
        process.start()
    while not any(name.startswith(".") for name in os.listdir(tmp_path)):
        assert process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "checkpoint").exists()
    import_weights(folder, tmp_path / "checkpoint", VERSION)
    export_weights(tmp_path / "checkpoint", tmp_path / "again", VERSION)
    require_same_files(folder, tmp_path / "again")


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of(Path("theirs"))

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moec", *arguments])
        with pytest.raises(SystemExit) as stopped:
            entry.main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    capsys.readouterr()
    code, out, err = run("weights", "import", "theirs", "0")
    assert (code, err) == (0, "")
    assert out.startswith("wrote 0, 30 tensors, 1")
    assert run("checkpoint", "verify", "0")[0] == 0
    assert run("weights", "export", "0", "again")[:2] == (0, "wrote again, 78 tensors, 97.3 kB\n")
    require_same_files(Path("theirs"), Path("again"))
    assert run("import", "hf", "theirs", "-o", "model.moe")[0] == 0
    assert run("check", "model.moe")[0] == 0
    assert run("import", "hf", "theirs", "-o", "model.moe")[0] == 1
    assert run("weights", "export", "0", "more", "--architecture", "mixtral")[0] == 2
    assert run("weights", "import", "nowhere", "1")[0] == 1
    code, out, err = run("compile", "model.moe", "-o", "plan")
    assert code == 0, err
    assert run("weights", "export", "0", "more", "--plan", "plan", "--architecture", "qwen3_moe")[0] == 1
    named = "--plan", "plan", "--architecture", "mixtral"
    assert run("weights", "export", "0", "more", "--like", "theirs", *named)[0] == 2
    assert run("weights", "export", "0", "more", *named)[0] == 0
