"""`moec doctor` and `moec --version`: what is here, and what keeps training from working."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner
from support.tables import each_row

from moec.cli import app
from moec.commands import doctor_checks
from moec.commands.console.version import parsed


def moec(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moec", *arguments]
    environment = os.environ | variables
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder, env=environment)


def without_torch(folder: Path) -> str:
    """A folder for PYTHONPATH under which torch is neither importable nor installed."""
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "from importlib import metadata\n"
        "sys.modules['torch'] = None\n"
        "found = metadata.version\n"
        "def version(name):\n"
        "    if name == 'torch':\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "metadata.version = version\n"
    )
    return str(folder)


def test_this_machine_can_train(tmp_path):
    done = moec(tmp_path, "doctor", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"], done.stderr) == (0, True, "")
    names = {finding["name"] for finding in report["findings"]}
    assert {"Python", "torch", "numpy", "lark", "click", "gloo", "cores", "memory", "hostname", "tensorboard"} <= names
    assert all(finding["help"] for finding in report["findings"] if finding["state"] == "wrong")
    (tensorboard,) = (finding for finding in report["findings"] if finding["name"] == "tensorboard")
    missing = tensorboard["found"] == "not installed"
    assert re.fullmatch(r"[\d.]+|not installed", tensorboard["found"])
    assert ("pip install" in tensorboard["help"]) == missing


def test_without_torch_doctor_says_so_and_fails(tmp_path):
    done = moec(tmp_path, "doctor", PYTHONPATH=without_torch(tmp_path))
    assert done.returncode == 1
    assert re.search(
        r"✗ torch +not installed\n +→ training and `moec verify` need it: `pip install torch`", done.stdout
    )
    assert "training cannot work here; fix: torch" in done.stdout


def test_a_backend_that_is_none_is_wrong(monkeypatch):
    monkeypatch.setenv("MOEC_BACKEND", "nonsense")
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "MOEC_BACKEND must be one of" in done.stdout


def test_a_file_named_torch_is_found(tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('imported')\n")
    code = "import sys; sys.path.pop(0); from moec.commands.doctor_checks import installation\n"
    code += "print([f.found for f in installation() if f.state == 'wrong'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.stdout == "['hides the package torch']\n"


def test_folders_that_cannot_be_written_are_wrong(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    wrong = [finding for finding in doctor_checks.machine() if finding.state == "wrong"]
    assert [(one.name, one.help) for one in wrong] == [("Triton's cache", "set TRITON_CACHE_DIR to a folder that can")]


def test_a_name_without_an_address_is_wrong(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-machine.invalid")
    (found,) = doctor_checks.network()
    assert found.state == "wrong"
    assert found.help.startswith(
        "ranks find each other by it. One machine: add `127.0.0.1 no-such-machine.invalid` to /etc/hosts. "
        "Several nodes: add the address that the other nodes reach, or set GLOO_SOCKET_IFNAME"
    )


@each_row(("address", "state"), [("127.0.1.1", "note"), ("::1", "note"), ("10.0.0.5", "ok")])
def test_a_name_that_only_this_machine_reaches_is_noted(monkeypatch, address, state):
    monkeypatch.setattr("socket.getaddrinfo", lambda name, port: [(2, 1, 6, "", (address, 0))])
    (found,) = doctor_checks.network()
    assert found.state == state
    assert found.help.startswith("several nodes: the others cannot reach" if state == "note" else "")


def test_unknown_variables_of_moec_are_noted(monkeypatch):
    monkeypatch.setenv("MOEC_BACKENDS", "torch")
    assert ("MOEC_BACKENDS", "note") in [(found.name, found.state) for found in doctor_checks.variables()]


@each_row(
    ("version", "state", "help"),
    [
        (
            "2.10.1",
            "wrong",
            "moec needs torch 2.11 or newer (`pip install PATH` of moec's checkout or wheel chooses one)",
        ),
        ("2.11.0", "ok", ""),
        ("2.13.0+cpu", "ok", ""),
        ("2.14.0.dev2026", "note", "newer than what moec is tested with, 2.11 to 2.13"),
    ],
)
def test_versions_outside_of_the_tested_range_are_told_apart(monkeypatch, version, state, help):
    monkeypatch.setattr(doctor_checks, "installed", lambda package: version if package == "torch" else None)
    (found,) = (one for one in doctor_checks.versions() if one.name == "torch")
    assert (found.state, found.found, found.help) == (state, version, help)


@each_row(("text", "numbers"), [("2.13.0+cpu", (2, 13)), ("3.9", (3, 9)), ("2.12rc1", (2, 12)), ("4", (4, 0))])
def test_versions_are_read(text, numbers):
    assert parsed(text) == numbers


def test_the_version_names_what_moec_runs_on_without_importing_it(tmp_path):
    code = "import sys, moec.commands.console.version as v; print(v.version_line(v.versions()), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert re.fullmatch(
        r"moec \S+ \(Python \S+, torch \S+, (no triton|triton \S+); backends: torch.*\) False\n", done.stdout
    )
