"""`moec launch --run`, and the printed command on two "nodes" of one machine: real torchrun, real ranks."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.plans import moe_plan
from support.preloaded import environment, python

NOISE = ("torch/distributed", "ChildFailedError", "Sending process", "OMP_NUM_THREADS", "elastic", "W1", "E1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("launch")
    moe_plan(ranks=2, ep=2).save(made / "tiny.plan")
    return made


def launch(folder: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(f"import os, sys, time\nrank = int(os.environ['RANK'])\n{script}\n")
    command = [python(), "-m", "moec", "launch", "tiny.plan", "--run", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=environment())


def test_output_of_ranks_stays_and_nothing_is_added(folder: Path):
    done = launch(folder, "print('out', rank, sys.argv[1:]); print('err', rank, file=sys.stderr)", "train.py", "--lr=3")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["out 0 ['--lr=3']", "out 1 ['--lr=3']"]
    assert sorted(done.stderr.splitlines()) == ["err 0", "err 1"]


def test_an_exception_is_shown_once_with_its_rank(folder: Path):
    done = launch(folder, "raise KeyError('mine')", "--logs", "logs")
    assert done.returncode == 1
    first, *_, error, where = done.stderr.splitlines()
    assert re.fullmatch(r"rank (0|1) has raised an exception( \(rank (0|1) too\))?:", first)
    assert error == "KeyError: 'mine'"
    assert done.stderr.count("Traceback") == 1
    assert where == "what every rank wrote to stderr is below logs"
    assert any("KeyError" in log.read_text() for log in (folder / "logs").rglob("stderr.log"))
    assert not any(noise in done.stderr for noise in NOISE)


def test_an_exception_of_one_rank_inside_of_a_job_is_one_message(folder: Path):
    script = (
        "import moec, torch\nwith moec.launch('tiny.plan', device='cpu') as job:\n    model = job.build()\n"
        "    if rank == 1: raise ValueError('mine')\n    ids = torch.zeros(4, 8).long(); job.step(model, ids, ids)"
    )
    done = launch(folder, script)
    assert done.returncode == 1
    assert done.stderr.startswith("rank 1 has raised an exception:\nTraceback")
    assert done.stderr.count("ValueError: mine") == 1
    assert not any(noise in done.stderr for noise in NOISE)


def test_a_diagnostic_is_shown_once(folder: Path):
    done = launch(folder, "import moec\nwith moec.launch('tiny.plan', device='cpu') as job: moec.load('none.plan')")
    assert done.returncode == 1
    assert done.stderr.count("error[MOE0600]") == 1
    assert "Traceback" not in done.stderr
    assert not any(noise in done.stderr for noise in NOISE)


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [("sys.exit(7)", 7, "exit status 7"), ("os.kill(os.getpid(), 9)", 137, "SIGKILL")],
)
def test_a_rank_that_ends_without_a_word_is_named(folder: Path, end: str, status: int, said: str):
    done = launch(folder, f"if rank == 1: {end}\ntime.sleep(600)")
    assert done.returncode == status
    assert done.stderr.startswith("error[MOE0915]")
    assert "rank 1 ended" in done.stderr
    assert said in done.stderr


def test_a_signal_after_a_caught_exception_is_named(folder: Path):
    script = "import traceback\nif rank == 1:\n    try: raise ValueError('caught')\n"
    script += "    except ValueError: traceback.print_exc()\n    os.kill(os.getpid(), 9)\ntime.sleep(600)"
    done = launch(folder, script)
    assert done.returncode == 137
    assert "rank 1 ended by SIGKILL; before that, it wrote: ValueError: caught" in done.stderr
    assert "has raised" not in done.stderr


def test_a_last_line_is_shown_once_and_its_rank_named(folder: Path):
    done = launch(folder, "if rank == 1: sys.exit('bad config: no data')\ntime.sleep(600)")
    assert done.returncode == 1
    said = " ".join(done.stderr.split())  # lines are folded to the terminal's width
    assert said.startswith("bad config: no data error[MOE0915]")
    assert said.count("bad config: no data") == 1
    assert "rank 1 ended with exit status 1; the line above is the last that it wrote" in said


def test_the_exit_status_is_the_scripts_without_stderr(folder: Path):
    (folder / "train.py").write_text("import sys; sys.exit(5)\n")
    command = f"{shlex.quote(python())} -m moec launch tiny.plan --run 2>&-"
    assert subprocess.run(command, shell=True, timeout=300, cwd=folder, env=environment()).returncode == 5


def test_ranks_are_started_again(folder: Path):
    script = "n = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\nif n < 2 and rank: raise KeyError(n)\nprint('fine', n)"
    done = launch(folder, script, "--max-restarts", "2")
    assert done.returncode == 0
    assert "fine 2" in done.stdout
    assert [line for line in done.stderr.splitlines() if line.startswith("the ranks")] == [
        "the ranks are started again (restart 1)",
        "the ranks are started again (restart 2)",
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks(folder: Path, number: signal.Signals):
    (folder / "train.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    command = [python(), "-m", "moec", "launch", "tiny.plan", "--run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=folder, env=environment(), text=True, **pipes)
    assert process.stdout is not None
    ranks = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(number)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert said == f"ended by {number.name}, and all ranks with it\n"
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)


def wait_for_server(port: int) -> None:
    """Waits until a process listens at `port`."""
    until = time.monotonic() + 300
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("localhost", port)):
            return
        time.sleep(0.02)
    pytest.fail(f"nobody listens at {port}")


def test_the_printed_command_starts_a_plan_on_two_nodes(tmp_path: Path):
    """Two torchruns of this machine meet at one port, as two nodes would, and the plan's ranks make a step."""
    moe_plan(ranks=2, ep=2).save(tmp_path / "tiny.plan")
    (tmp_path / "train.py").write_text(
        "import moec, torch\n"
        "with moec.launch('tiny.plan', device='cpu') as job:\n"
        "    ids = torch.arange(64).reshape(8, 8) % 32\n"
        "    mine = ids.chunk(job.data_size)[job.data_rank]\n"
        "    print(job.rank, job.world_size, f'{job.step(job.build(seed=1), mine, mine).item():.5f}', flush=True)\n"
    )
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    command = [python(), "-m", "moec", "launch", "tiny.plan", "--per-node", "1", "--host", "localhost"]
    shown = subprocess.run([*command, "--port", str(port)], capture_output=True, text=True, cwd=tmp_path, check=True)
    (line,) = [line for line in shown.stdout.splitlines() if not line.startswith("#")]
    with_torchrun = environment(PATH=f"{Path(python()).parent}:{os.environ['PATH']}")
    options = {"shell": True, "cwd": tmp_path, "env": with_torchrun, "text": True}
    nodes = []
    for _ in range(2):
        nodes.append(subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options))
        wait_for_server(port)
    told = [node.communicate(timeout=300) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], told
    words = sorted(out.split() for out, _ in told)
    assert [word[:2] for word in words] == [["0", "2"], ["1", "2"]]
    assert words[0][2] == words[1][2]
