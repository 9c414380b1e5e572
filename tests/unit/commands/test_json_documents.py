"""`--json`: stdout holds one document of the documented schema, and errors are a list of diagnostics on stderr."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from pydantic import TypeAdapter
from running import Ran, Run
from support.checkpoint_drafts import Draft
from support.plans import moe_text
from support.tables import each_row

from moec.cli import app
from moec.commands.schemas import type_of


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command with its path."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
        else:
            yield path + name, command


ALL = dict(commands(app))


@each_row("name", sorted(ALL))
def test_every_command_has_the_two_spellings(name: str) -> None:
    spellings = {spelling for parameter in ALL[name].params for spelling in parameter.opts}
    assert {"--format", "--json"} <= spellings


def document(ran: Ran, name: str, status: int = 0) -> Any:
    """The JSON on stdout, which is one of the documents `name`."""
    assert (ran.status, ran.err) == (status, "")
    TypeAdapter(type_of(name)).validate_json(ran.out)
    return json.loads(ran.out)


def test_a_good_file_has_an_empty_list(moec: Run, starter: Path) -> None:
    assert document(moec("check", "--json", "model.moe"), "diagnostics") == []


def test_the_mistakes_of_check_are_on_stdout(moec: Run, starter: Path) -> None:
    starter.write_text(starter.read_text().replace("topk", "tokp").replace("ep = 4", "ep = 3"))
    found = document(moec("check", "--json", "model.moe"), "diagnostics", status=1)
    assert found[0]["fix"][0]["text"] == "topk"
    assert found[0]["page"] == "moec explain MOE0201"


@pytest.mark.parametrize("command", ["compile", "inspect"])
def test_a_command_that_a_mistake_stops_prints_nothing_on_stdout(moec: Run, starter: Path, command: str) -> None:
    starter.write_text("model {{")
    ran = moec(command, "--json", "model.moe")
    assert (ran.status, ran.out) == (1, "")
    TypeAdapter(type_of("diagnostics")).validate_json(ran.err)


def test_fmt_goes_on_after_a_file_with_mistakes(moec: Run, starter: Path) -> None:
    Path("bad.moe").write_text("model {{")
    ran = moec("fmt", "--json", "bad.moe", "model.moe")
    assert ran.status == 1
    assert [found["file"] for found in json.loads(ran.out)] == ["model.moe"]
    TypeAdapter(type_of("diagnostics")).validate_json(ran.err)
    assert {found["span"]["file"] for found in json.loads(ran.err)} == {"bad.moe"}
    assert moec("fmt", "--json", "bad.moe").out == "[]\n"


def test_fmt_says_what_it_did(moec: Run, starter: Path) -> None:
    starter.write_text(starter.read_text().replace("  depth", "     depth"))
    (found,) = document(moec("fmt", "--json", "--diff", "model.moe"), "fmt", status=1)
    assert (found["changed"], found["written"]) == (True, False)
    assert found["diff"].startswith("--- model.moe\n+++ ")
    (found,) = document(moec("fmt", "--json", "model.moe"), "fmt")
    assert (found["changed"], found["written"], found["diff"]) == (True, True, None)


def test_fmt_of_stdin_has_the_text(moec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a=1;b=2")))
    (found,) = document(moec("fmt", "--json", "-"), "fmt")
    assert (found["text"], found["written"]) == ("a = 1\nb = 2\n", False)


def test_init_says_what_it_wrote(moec: Run) -> None:
    found = document(moec("init", "--json", "mine.moe"), "init")
    assert found["text"] == Path("mine.moe").read_text()
    assert found["next"] == ["moec check mine.moe", "moec compile mine.moe"]


def test_the_library_is_a_list(moec: Run) -> None:
    found = document(moec("init", "--list", "--json"), "init-list")
    mixtral = next(each for each in found if each["name"] == "mixtral_8x7b")
    assert (mixtral["total"], mixtral["experts"]) == (46_702_792_704, "8E-2K-0S")


def test_an_imported_model_is_a_document(moec: Run) -> None:
    config = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    config |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 256}
    config |= {"max_position_embeddings": 128, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e6}
    Path("config.json").write_text(json.dumps(config))
    ran = moec("import", "hf", "config.json", "--json", "-o", "mine.moe")
    TypeAdapter(type_of("import-hf")).validate_json(ran.out)
    assert json.loads(ran.out)["text"] == Path("mine.moe").read_text()
    if ran.err:
        TypeAdapter(type_of("diagnostics")).validate_json(ran.err)


def test_compile_has_the_summary_as_numbers(moec: Run) -> None:
    Path("tiny.moe").write_text(moe_text(ranks=8, ep=8, mixtures=((8, 2), (16, None), (32, 4), (8, 2))))
    found = document(moec("compile", "--json", "tiny.moe"), "compile")
    assert (found["plan"], found["ranks"], found["degrees"]["dp"]) == ("tiny.plan", 8, 8)
    spread = [(each["layers"], each["ep"], each["edp"]) for each in found["degrees"]["experts"]]
    assert spread == [([1, 4], 2, 4), ([2], 8, 1), ([3], 4, 2)]
    assert 0 < found["per_rank"]["state_bytes"] < found["per_rank"]["peak_bytes"] < found["per_rank"]["device_bytes"]
    assert found["per_rank"]["parameters"] < found["parameters"]
    assert Path(found["plan"], "plan.json").is_file()
    loaded = document(moec("load", "--json", "tiny.plan"), "load")
    assert (loaded["name"], loaded["ranks"]) == (found["name"], 8)
    tuned = document(moec("tune", "--json", "tiny.plan"), "tune")
    assert (tuned["plan"], tuned["shapes"]) == (None, [])


@each_row("stage", ["ast", "spec", "ir", "placed", "fx", "kernels"])
def test_an_emitted_stage_is_the_same_text(moec: Run, starter: Path, stage: str) -> None:
    found = document(moec("compile", "--json", "model.moe", "--emit", stage), "compile-emit")
    assert (found["stage"], found["text"]) == (stage, moec("compile", "model.moe", "--emit", stage).out)


def test_checkpoints_are_documents(moec: Run) -> None:
    Path("all").mkdir()
    Draft(Path("all", "100")).write()
    found = document(moec("checkpoint", "inspect", "--json", "all/100"), "checkpoint-inspect")
    assert found["tensors"]["model/weight"]["shape"] == [4, 6]
    (listed,) = document(moec("checkpoint", "inspect", "--json", "all"), "checkpoint-inspect-folder")["checkpoints"]
    assert (listed["name"], listed["latest"]) == ("100", True)
    assert document(moec("checkpoint", "verify", "--json", "all/100"), "checkpoint-verify")["ok"]
    written = document(
        moec("checkpoint", "convert", "--json", "all/100", "-o", "one.safetensors"), "checkpoint-convert"
    )
    assert (written["output"], written["tensors"]) == ("one.safetensors", None)
    assert "step 1" in written["left_out"]


def test_versions_are_a_document(moec: Run) -> None:
    for option in (["--json"], ["--format", "json"]):
        found = document(moec("--version", *option), "version")
        assert found["python"] == sys.version.split()[0]


def test_a_format_before_the_command_is_the_commands(moec: Run, starter: Path) -> None:
    assert moec("--json", "check", "model.moe").out == moec("check", "--json", "model.moe").out == "[]\n"
    behind = moec("check", "--format", "concise", "none.moe")
    for before in (["--format", "concise"], ["--format=concise"]):
        assert moec(*before, "check", "none.moe") == behind
    assert moec("--json", "checkpoint", "verify", "none") == moec("checkpoint", "verify", "--json", "none")
    alone = moec("--json")
    assert (alone.status, alone.out) == (2, "")
    assert "--json comes after the command" in json.loads(alone.err)[0]["message"]


def test_every_view_of_inspect_is_a_document(moec: Run, starter: Path) -> None:
    lines = document(moec("inspect", "--json", "model.moe"), "inspect-file")
    place = {"file": "model.moe", "line": 7, "column": 13, "lets": [], "equal_at": []}
    assert {"text": "  vocab = 256", "origin": "file"} | place in lines
    assert any(line["origin"] == "default" and line["file"] is None for line in lines)
    assert moec("compile", "model.moe").status == 0
    assert document(moec("inspect", "--json", "model.plan"), "inspect-plan")["groups"]["ep[1..3]"] == [[0, 1, 2, 3]]
    assert document(moec("inspect", "--json", "model.plan", "--rank", "1"), "inspect-rank")["data_rank"] == 1
    for view, options in (("graph", ("--graph", "dot")), ("fx", ("--fx",))):
        found = document(moec("inspect", "--json", "model.plan", *options), "inspect-text")
        assert (found["view"], found["text"] + "\n") == (view, moec("inspect", "model.plan", *options).out)
    assert document(moec("inspect", "--json", "--params", "model.plan"), "inspect-params")["ranks"] == 4
    assert document(moec("inspect", "--json", "--memory", "model.plan"), "inspect-memory")["layers"][0]["copies"] >= 0
    assert document(moec("inspect", "--json", "--kernels", "model.plan"), "inspect-kernels")["layers"] == []
