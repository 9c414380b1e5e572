"""The wheel and the source distribution, built and installed outside of the repository, without a network."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from test_packaging import FOLDERS

ROOT = Path(__file__).parents[2]
BUILT = ("pyproject.toml", "README.md", "moec", "grammar", "passes", "codegen", "runtime", "tests/diagnostics")
"""What a build reads of the repository."""
BUILD = "import sys, setuptools.build_meta as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"


def succeed(*command: str | Path, cwd: Path, **variables: str) -> str:
    """The stdout of a command that must succeed."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=kept | variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, into: Path) -> Path:
    """Builds a "wheel" or an "sdist" of `source` with this environment's setuptools."""
    return into / succeed(sys.executable, "-c", BUILD, kind, str(into), cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution of a copy of the repository, and the wheel built from what it contains."""
    folder = tmp_path_factory.mktemp("build")
    copy = folder / "copy"
    copy.mkdir()
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z", *BUILT], cwd=ROOT, capture_output=True, check=True
    )
    for name in tracked.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    sdist = build("sdist", copy, folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return sdist, build("wheel", unpacked, folder)


@pytest.fixture(scope="module")
def installed(archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment with the wheel; torch and the other packages are this environment's."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    succeed(*pip, "--disable-pip-version-check", archives[1], cwd=folder)
    site = Path(succeed(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "bin"


def test_a_source_distribution_has_what_a_build_reads_and_no_more(archives):
    with tarfile.open(archives[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tops = {name.partition("/")[0] for name in names} - {""}
    folders = {"moec", "grammar", "passes", "codegen", "runtime", "tests", "moec.egg-info"}
    assert tops == folders | {"pyproject.toml", "README.md", "setup.cfg", "PKG-INFO"}
    assert all(name.startswith("tests/diagnostics") for name in names if name.startswith("tests/"))
    assert not any("__pycache__" in name for name in names)


def test_a_wheel_has_every_file_of_the_packages(archives):
    with zipfile.ZipFile(archives[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {
        "/".join((*package.split("."), *file.relative_to(ROOT / folder).parts))
        for package, folder in FOLDERS.items()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }
    assert names == expected


@pytest.mark.slow
def test_an_installed_moec_does_what_the_repository_does(installed: Path, tmp_path: Path):
    moec = installed / "moec"
    where = succeed(installed / "python", "-c", "import moec; print(moec.__file__)", cwd=tmp_path)
    assert where.startswith(str(installed.parent))
    succeed(moec, "init", "first.moe", cwd=tmp_path)
    succeed(moec, "init", "mixtral.moe", "--from", "mixtral_8x7b", cwd=tmp_path)
    succeed(moec, "check", "first.moe", "mixtral.moe", cwd=tmp_path)
    assert "MOE0311" in succeed(moec, "explain", "MOE0311", cwd=tmp_path)
    assert "moec" in succeed(installed / "python", "-m", "moec", "--version", cwd=tmp_path)
    succeed(moec, "compile", "first.moe", cwd=tmp_path)
    assert "equals the unsharded model" in succeed(moec, "verify", "first.plan", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert "mixtral_8x7b" in succeed(moec, "init", "--list", cwd=tmp_path)


@pytest.mark.slow
def test_an_installed_moec_renders_its_kernels(installed: Path, tmp_path: Path):
    """Templates are data files of a package."""
    text = (ROOT / "grammar" / "library" / "models" / "qwen3_30b_a3b.moe").name.removesuffix(".moe")
    succeed(installed / "moec", "init", "m.moe", "--from", text, cwd=tmp_path)
    assert "@triton.jit" in succeed(installed / "moec", "compile", "--emit=kernels", "m.moe", cwd=tmp_path)


@pytest.mark.slow
def test_a_users_script_is_checked_by_mypy_against_the_installed_types(installed: Path, tmp_path: Path):
    (tmp_path / "user.py").write_text(
        "import moec\n"
        "plan = moec.load('first.plan')\n"
        "reveal_type(plan.world_size)\n"
        "reveal_type(moec.verify(plan).ok)\n"
        "moec.launch(plan, timeout='long')\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(installed / "python"), "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    said = [line for line in done.stdout.splitlines() if line.startswith("user.py")]
    assert [line.partition(": ")[2].replace("builtins.", "") for line in said[:2]] == [
        'note: Revealed type is "int"',
        'note: Revealed type is "bool"',
    ]
    assert "timeout" in said[2]
    assert "float" in said[2]
    assert len(said) == 3
