"""`moec launch --run`: torchrun on this machine, without its own messages."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from pathlib import Path

from moec.commands.console.output import show
from moec.commands.console.rank_output import RankOutput
from moec.commands.launching.launch import Launch
from moec.grammar.diagnostics import Diagnostic, DiagnosticError, diagnose


def run(launch: Launch, logs: Path | None) -> int:
    """Starts all ranks here and waits for them; returns the script's exit status, 128 + N for signal N.

    The ranks write to stdout themselves, and to stderr too, except that of their tracebacks one is shown
    (`RankOutput`). All of stderr is saved below `logs` (default: a temporary folder, removed if the script succeeds).
    Raises `DiagnosticError` before it starts anything: MOE0916, MOE0918.
    """
    if sys.stderr is None:  # closed by the shell: `2>&-`
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    _require_here(launch)
    folder = Path(tempfile.mkdtemp(prefix=f"moec-{launch.name}-")) if logs is None else logs
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // launch.hosts.processes_per_node)))
    status = _start(launch, folder)
    if status == 0 and logs is None:
        shutil.rmtree(folder, ignore_errors=True)
    return status


def _start(launch: Launch, folder: Path) -> int:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # What `--standalone` stands for, with an id that this run alone has: torchrun names its folder of logs by it.
    run_id = f"{launch.name}-{uuid.uuid4().hex[:12]}"
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", run_id]
    arguments_of_plan = [word for word in launch.argv[1 : -len(launch.script)] if word != "--standalone"]
    words = [*meeting, *arguments_of_plan, "--redirects", "2", "--log-dir", str(folder), *launch.script]
    arguments = torchrun.parse_args(words)  # type: ignore[no-untyped-call]
    logging.disable(logging.CRITICAL)  # of this process: torchrun reports what is reported below
    output = RankOutput(folder, run_id, sys.stderr)
    output.start()
    try:
        torchrun.run(arguments)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        first_rank, failure = error.get_first_failure()
        rank, status = int(first_rank), int(failure.exitcode)
        raised = {int(rank_key) for rank_key, failure in error.failures.items() if failure.exitcode == 1}
        if output.finish(rank, status, raised=raised):
            print(f"what every rank wrote to stderr is below {folder}", file=sys.stderr)
        else:
            logs = [path for path in output.logs() if path.parts[-2] == str(rank)]
            last, is_above = output.last_line(rank), output.shows_last_line(rank)
            show([failed(rank, status, last, logs[-1] if logs else folder, is_above=is_above)], "full")
        return 128 - status if status < 0 else status
    except SignalException as error:
        output.finish(None)
        print(f"ended by {signal.Signals(error.sigval).name}, and all ranks with it", file=sys.stderr)
        return 128 + int(error.sigval)
    except KeyboardInterrupt:
        output.finish(None)
        return 128 + signal.SIGINT
    output.finish(None, succeeded=True)
    return 0


def _require_here(launch: Launch) -> None:
    """Raises `DiagnosticError` where the plan's ranks, or the script, are not for this machine alone."""
    ranks = launch.plan.world_size
    if launch.hosts.nodes > 1:
        raise DiagnosticError(
            [
                diagnose(
                    "MOE0916",
                    None,
                    f"the plan is for {launch.sizes}, and `--run` starts ranks on this machine only",
                    help=f"without `--run` you get the command for every node; `--nodes 1` puts all {ranks} ranks here",
                )
            ]
        )
    script = Path(launch.script[0])
    if not script.is_file():
        help = "check its name, and that it is in this folder"
        if launch.script[0] == "train.py":  # the default
            help = "name the training script after the plan"
        raise DiagnosticError([diagnose("MOE0918", None, f"no file {script}", help=help)])
    if launch.plan.spec.cluster.device.kind != "cpu":
        import torch

        gpus = torch.cuda.device_count()
        if 0 < gpus < ranks:  # without any GPU, ranks run on the CPU
            message = f"the plan is for {ranks} ranks with a GPU each, and there {'is' if gpus == 1 else 'are'} {gpus}"
            help = (
                f"compile the file for a cluster of {gpus}, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to try it on CPUs"
            )
            raise DiagnosticError([diagnose("MOE0916", None, message, help=help)])


def failed(rank: int, status: int, last: str, log: Path, *, is_above: bool = False) -> Diagnostic:
    """MOE0915, for a rank whose end no exception or diagnostic explains. `last`: its last line on stderr.

    `is_above`: that line is the last on the screen, such as the text of `sys.exit("…")`.
    """
    if status == -signal.SIGKILL:
        help = "the system kills what takes too much memory: see `dmesg`, and the memory in `moec compile`'s summary"
    elif last:
        help = f"all that it wrote to stderr is in {log}"
    else:
        help = f"{log} is empty: look for what ends the process, such as `sys.exit`"
    end = f"by {_signal_name(-status)}" if status < 0 else f"with exit status {status}"
    if not last:
        wrote = ", without a diagnostic or an exception"
    elif is_above and status > 0:
        wrote = "; the line above is the last that it wrote"
    else:
        wrote = f"; before that, it wrote: {last}" if status < 0 else f"; the last line that it wrote: {last}"
    return diagnose("MOE0915", None, f"rank {rank} ended {end}{wrote}", help=help)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
