"""The plan folder: deterministic to the byte, written whole or not at all."""

from pathlib import Path

import pytest
from support.plans import moe_plan, moe_text

from moec.codegen.folder import PlanError, plan_files
from moec.codegen.reading import read_plan
from moec.driver import compile as compile_source
from moec.driver import load


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_plan_reads_back_as_itself(tmp_path):
    plan = moe_plan()
    loaded = read_plan(plan.save(tmp_path / "tiny.plan"))
    assert loaded == plan
    assert loaded.spec == plan.spec


def test_equal_layers_in_blocks_of_their_own_survive_being_printed(tmp_path):
    text = moe_text(depth=3)
    body = text[text.index("  layers 1..2 {") : text.index('}\ncluster "here"')]
    apart = text.replace(body, body.replace("1..2", "1") + body.replace("1..2", "2"))
    plan = compile_source(apart)
    assert [block.name for block in plan.program.blocks][1:3] == ["layers[1]", "layers[2]"]
    assert load(plan.save(tmp_path / "apart.plan"), trust_nothing=True) == plan
    assert compile_source(plan.spec) == plan


def test_two_compilations_of_one_file_give_identical_bytes_wherever_it_lies(tmp_path):
    trees = []
    for folder in ("here", "there/below"):
        file = tmp_path / folder / "tiny.moe"
        file.parent.mkdir(parents=True)
        file.write_text(moe_text())
        trees.append(tree(compile_source(file).save(tmp_path / folder / "out.plan")))
    assert trees[0] == trees[1]


def test_files_hold_neither_a_time_nor_a_path(tmp_path):
    files = plan_files(moe_plan())
    assert set(files) == {"plan.json", "spec.moe", "program.ir"}
    assert not [name for name, content in files.items() if str(tmp_path).encode() in content]


def test_every_layer_and_op_cites_its_line():
    lines = plan_files(moe_plan())["program.ir"].decode().splitlines()
    (route,) = (line for line in lines if "= route " in line)
    assert route.endswith(" at 11")
    assert lines[0] == 'program "tiny" from "tiny.moe" {'


def test_identical_layers_share_one_block():
    small, large = (moe_plan(depth=depth).program.blocks for depth in (3, 40))
    assert len(small) == len(large) == 7
    assert len(large[1].ops) == len(small[1].ops)


def test_a_new_plan_replaces_an_old_one(tmp_path):
    target = tmp_path / "tiny.plan"
    moe_plan(ep=2).save(target)
    moe_plan(ep=4).save(target)
    assert read_plan(target).meshes["experts[1..2]"].size("ep") == 4
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.plan"]


def test_what_is_not_a_plan_is_never_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years of work")
    with pytest.raises(PlanError, match="MOE0603"):
        moe_plan().save(tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter").read_text() == "years of work"


def test_a_failed_write_leaves_the_old_plan_and_no_rubbish(tmp_path, monkeypatch):
    target = moe_plan(ep=2).save(tmp_path / "tiny.plan")
    before = tree(target)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(PlanError, match=r"MOE0604.*No space left"):
        moe_plan(ep=4).save(target)
    assert tree(target) == before
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.plan"]


def test_an_unwritable_place_is_a_diagnostic(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="MOE0604"):
        moe_plan().save(tmp_path / "file" / "below.plan")
