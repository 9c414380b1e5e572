"""Files: the paths of `use`, and inputs that are not `.moe` files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.tables import each_row

from moec.grammar import DiagnosticError, load_file, load_text, render
from moec.grammar.load import Loaded
from moec.grammar.resolve.files import MAX_BYTES
from moec.grammar.resolve.uses import MAX_USE_DEPTH

LAYERS = "layers { attention = mha(heads = 4); ffn = gelu(width) }"
MODEL = f'model "m" {{ vocab = 256; dim = 64; depth = 2; context = 128; {LAYERS} }}\n'


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder / next(iter(files))


def load(folder: Path, files: dict[str, str]) -> Loaded:
    return load_file(write(folder, files))


def codes(loaded: Loaded) -> list[str]:
    return [diagnostic.code for diagnostic in loaded.diagnostics]


def test_use_finds_files_beside_the_one_that_says_it(tmp_path: Path) -> None:
    files = {
        "main.moe": 'use "parts/model"\ntrain { batch = 2; sequence = 8 }',
        "parts/model.moe": 'use "width.moe"\n' + MODEL,
        "parts/width.moe": "let width = 32",
    }
    spec = load(tmp_path, files).unwrap()
    assert spec.model.layers[0].ffn
    assert spec.model.layers[0].ffn.hidden == 32
    assert spec.train


def test_source_names_are_relative_to_the_main_file(tmp_path: Path) -> None:
    files = {
        "here/main.moe": 'use "../common/width"\nuse "model"\nuse "clusters/dgx_h100"',
        "here/model.moe": MODEL,
        "common/width.moe": "let width = 32",
    }
    spec = load(tmp_path, files).unwrap()
    assert str(spec.model.span()) == "model.moe:1"
    assert str(spec.cluster.span()) == "library:clusters/dgx_h100.moe:6"
    files["common/width.moe"] = "let width = 3us"
    text = render(load(tmp_path, files).diagnostics)
    assert "--> model.moe:1:" in text
    assert "::: ../common/width.moe:1:13" in text
    assert str(tmp_path) not in text


def test_a_file_used_twice_is_read_once(tmp_path: Path) -> None:
    files = {
        "main.moe": 'use "a"\nuse "b"\nuse "a"\n' + MODEL,
        "a.moe": 'use "w"',
        "b.moe": 'use "w"',
        "w.moe": "let width = 4",
    }
    assert codes(load(tmp_path, files)) == []


def test_an_error_in_a_used_file_is_shown_there(tmp_path: Path) -> None:
    loaded = load(tmp_path, {"main.moe": f'use "w"\n{MODEL}', "w.moe": "let width = = 4\nlet x = 1 1"})
    assert {d.span.source.name for d in loaded.diagnostics if d.code == "MOE0101" and d.span} == {"w.moe"}
    assert codes(loaded).count("MOE0101") == 2


def test_a_model_in_two_files_is_a_duplicate(tmp_path: Path) -> None:
    head = "let width = 4\n"
    (diagnostic,) = load(tmp_path, {"main.moe": f'{head}use "m"\n{MODEL}', "m.moe": MODEL}).diagnostics
    assert (diagnostic.code, str(diagnostic.span)) == ("MOE0205", "main.moe:3")
    assert str(diagnostic.labels[0].span) == "m.moe:1"


@each_row(
    "files",
    [
        {"a.moe": 'use "a"'},
        {"a.moe": 'use "b"', "b.moe": 'use "a"'},
        {"a.moe": 'use "x/b"', "x/b.moe": 'use "c"', "x/c.moe": 'use "../a"'},
    ],
)
def test_circles_are_found(tmp_path: Path, files: dict[str, str]) -> None:
    assert codes(load(tmp_path, files)) == ["MOE0010"]


def test_a_chain_of_uses_is_bounded(tmp_path: Path) -> None:
    files = {f"f{i}.moe": f'use "f{i + 1}"' for i in range(MAX_USE_DEPTH + 5)}
    assert codes(load(tmp_path, files)) == ["MOE0404"]


@each_row("path", ["", "/etc/passwd", "a\\b", "C:/x", "x" * 5000, "a\0b"])
def test_paths_that_are_no_relative_paths_are_refused(tmp_path: Path, path: str) -> None:
    loaded = load(tmp_path, {"main.moe": f'use "{path}"\n'})
    assert codes(loaded) in (["MOE0011"], ["MOE0004"])


def test_a_link_out_of_the_folder_is_refused_unless_dots_are_written(tmp_path: Path) -> None:
    write(tmp_path, {"secret/w.moe": "let width = 4", "here/main.moe": f'use "w"\n{MODEL}'})
    (tmp_path / "here" / "w.moe").symlink_to(tmp_path / "secret" / "w.moe")
    assert "MOE0011" in codes(load_file(tmp_path / "here" / "main.moe"))
    write(tmp_path, {"here/main.moe": f'use "../secret/w"\n{MODEL}'})
    assert codes(load_file(tmp_path / "here" / "main.moe")) == []


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.moe").symlink_to(tmp_path / "b.moe")
    (tmp_path / "b.moe").symlink_to(tmp_path / "a.moe")
    assert codes(load(tmp_path, {"main.moe": 'use "a"'})) == ["MOE0011"]
    assert codes(load_file(tmp_path / "a.moe")) == ["MOE0001"]


def test_a_used_file_that_cannot_be_read_does_not_make_the_model_missing(tmp_path: Path) -> None:
    assert codes(load(tmp_path, {"main.moe": 'use "model"'})) == ["MOE0009"]
    (tmp_path / "model.moe").mkdir()
    assert codes(load(tmp_path, {"main.moe": 'use "model"'})) == ["MOE0002"]


@each_row(
    ("data", "expected"),
    [
        (b"", "MOE0007"),
        (b"# only\n\n# comments\n", "MOE0007"),
        (b"\xff\xfem\x00", "MOE0003"),
        (b"model\x00", "MOE0004"),
        (b"\xef\xbb\xbf", "MOE0007"),
        (b"#" * (MAX_BYTES + 1), "MOE0008"),
        (b"let x = 1", "MOE0203"),
        (bytes(range(256)), "MOE0003"),
        (b"\x01\x02\r\r", "MOE0102"),
    ],
)
def test_bytes_that_are_no_model(tmp_path: Path, data: bytes, expected: str) -> None:
    path = tmp_path / "main.moe"
    path.write_bytes(data)
    loaded = load_file(path)
    assert expected in codes(loaded)
    assert loaded.spec is None


def test_a_byte_order_mark_and_carriage_returns_are_warnings_only(tmp_path: Path) -> None:
    path = tmp_path / "main.moe"
    path.write_bytes(b"\xef\xbb\xbflet width = 4\r\n" + MODEL.encode() + b"\r\n")
    loaded = load_file(path)
    assert codes(loaded) == ["MOE0005", "MOE0006"]
    assert loaded.spec


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = write(tmp_path, {"main.moe": MODEL})
    path.chmod(0)
    assert codes(load_file(path)) == ["MOE0001"]


@each_row("path", ["missing.moe", "no/such/folder.moe", "x" * 5000, "nul\0.moe"])
def test_paths_that_lead_nowhere(path: str) -> None:
    assert codes(load_file(path)) == ["MOE0001"]


def test_a_text_can_use_the_library_and_a_folder_if_it_is_given(tmp_path: Path) -> None:
    write(tmp_path, {"w.moe": "let width = 4"})
    assert codes(load_text('use "clusters/dgx_h100"\nlet width = 4\n' + MODEL)) == []
    assert codes(load_text('use "w"\n' + MODEL, folder=tmp_path)) == []
    assert "MOE0009" in codes(load_text('use "w"\n' + MODEL))


def test_half_a_surrogate_pair_is_no_text() -> None:
    assert codes(load_text('model "\ud800" { }')) == ["MOE0003"]


def test_unwrap_raises_with_every_diagnostic() -> None:
    with pytest.raises(DiagnosticError) as caught:
        load_text("x = 1\ny = 2").unwrap()
    assert len(caught.value.diagnostics) == 2


def test_loading_never_imports_torch_numpy_or_lark() -> None:
    program = (
        "import sys; from moec.grammar import load_text, render, to_text;"
        "render(load_text('x').diagnostics); to_text; print(sorted({'torch', 'numpy', 'lark'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


GOOD = MODEL + "let width = 128\n"


def test_an_error_in_a_used_file_shows_the_way_there(tmp_path: Path) -> None:
    files = {"main.moe": 'use "a"\n' + GOOD, "a.moe": 'use "b"\n', "b.moe": "let x = = 1\n"}
    (diagnostic,) = load(tmp_path, files).diagnostics
    assert str(diagnostic.span) == "b.moe:1"
    assert [str(label.span) for label in diagnostic.labels] == ["a.moe:1", "main.moe:1"]


def test_tabs_between_words_are_a_warning_and_in_comments_are_not() -> None:
    assert codes(load_text(GOOD + "# a\tb\n")) == []
    assert codes(load_text(GOOD.replace(" ", "\t", 1))) == ["MOE0012"]
