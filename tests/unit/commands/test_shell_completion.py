"""Shell completion: bash asks as it asks for a user, and installing it is one file and one line."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from running import Run

from moec.cli.completing import script_of

BASH = shutil.which("bash")

ASK = """
moec() { "$PYTHON" -m moec "$@"; }
compopt() { echo option "$@"; }  # only a shell with a prompt has options of a running completion
source ./script
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_moec_completion moec
printf '%s\\n' "${COMPREPLY[@]}"
"""

ASKED = {
    ("moec", ""): ["check", "fmt", "explain", "compile", "checkpoint", "weights"],
    ("moec", "comp"): ["compile"],
    ("moec", "checkpoint", "v"): ["verify"],
    ("moec", "compile", "--print"): ["--print-ir-after"],
    ("moec", "compile", "--emit", "p"): ["placed"],
    ("moec", "compile", "--stop-after", "sh"): ["shard"],
    ("moec", "inspect", "--graph", ""): ["mermaid", "dot"],
    ("moec", "check", "--format", "g"): ["github"],
    ("moec", "check", ""): ["model.moe", "other.moe"],
    ("moec", "compile", "sub/"): ["sub/inner.moe"],
    ("moec", "verify", ""): ["model.plan"],
    ("moec", "inspect", "mod"): ["model.moe", "model.plan"],
    ("moec", "explain", "swi"): ["switch", "switch_loss"],
    ("moec", "explain", "moe031"): ["MOE0311"],
    ("moec", "init", "--from", "mixtral"): ["mixtral_8x7b"],
}
EXACT = {("moec", "comp"), ("moec", "check", ""), ("moec", "verify", ""), ("moec", "compile", "sub/")}


@pytest.fixture
def folder(tmp_path: Path, starter: Path) -> Path:
    (tmp_path / "other.moe").write_text("")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "inner.moe").write_text("")
    (tmp_path / "model.plan").mkdir()
    (tmp_path / "model.plan" / "plan.json").write_text("{}")
    return tmp_path


@pytest.mark.skipif(BASH is None, reason="there is no bash")
@pytest.mark.parametrize("words", ASKED, ids=" ".join)
def test_bash_completes(moec: Run, folder: Path, words: tuple[str, ...]) -> None:
    (folder / "script").write_text(moec("--show-completion", "bash").out)
    assert BASH is not None
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    ran = subprocess.run(
        [BASH, "--norc", "-c", ASK, "bash", *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    found = [line for line in lines if line and not line.startswith("option ")]
    assert set(ASKED[words]) <= set(found)
    if words in EXACT:
        assert found == ASKED[words]
    if words[1] in ("check", "verify") and "--format" not in words:
        assert "option -o filenames -o plusdirs" in lines


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_installing_twice_adds_one_line(moec: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shell: str) -> None:
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    start = tmp_path / f".{shell}rc"
    start.write_text("alias l=ls")
    first, second = moec("--install-completion"), moec("--install-completion", shell)
    assert (first.status, second.status) == (0, 0)
    assert "Usage" not in first.out
    script = moec("--show-completion", shell).out
    if shell == "fish":
        assert (tmp_path / ".config/fish/completions/moec.fish").read_text() == script
        assert start.read_text() == "alias l=ls"
        return
    file = tmp_path / f".local/share/moec/completion.{shell}"
    assert file.read_text().endswith(script)
    assert start.read_text() == f'alias l=ls\nsource "{file}"  # moec --install-completion\n'
    assert "reads it already" in second.out


def test_a_script_is_shown_by_itself(moec: Run) -> None:
    ran = moec("--show-completion", "fish")
    assert (ran.status, ran.out, ran.err) == (0, script_of("fish"), "")


def test_a_shell_that_is_not_known_is_refused(moec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    ran = moec("--install-completion")
    assert (ran.status, ran.out) == (2, "")
    assert "the shell is tcsh; name one that is known: bash, zsh, fish" in ran.err


def test_a_home_that_cannot_be_written_is_a_diagnostic(
    moec: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    ran = moec("--install-completion", "bash")
    assert ran.status == 1
    assert "MOE0014" in ran.err
    assert "moec --show-completion" in ran.err
