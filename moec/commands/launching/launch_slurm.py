"""`moec launch --slurm`: a batch script with one torchrun per node."""

from __future__ import annotations

import shlex

from moec.codegen.launch_command import PORT, Expanded, shell_text, torchrun_command
from moec.commands.launching.launch import Launch

TEMPLATE = """\
#!/bin/bash
# {sizes} for {path}. Submit it with `sbatch`; add your --partition, --account and --time there or below.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}# Whole nodes: all CPUs, and all memory.
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output={name}-%j.log
#SBATCH --open-mode=append
# Queued again after a node failure or a preemption: `job.resume` goes on from the last checkpoint.
#SBATCH --requeue
# SIGTERM two minutes before the time limit: `job.checkpoint(…, on_signal=signal.SIGTERM)` saves and ends.
#SBATCH --signal=TERM@120
set -euo pipefail

# torchrun must be on the PATH:
# source /path/to/venv/bin/activate, or module load …

hosts=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
export HOST="${{hosts[0]}}" PORT={port}
# Cores of a node over its ranks.
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$((SLURM_CPUS_ON_NODE > {ranks} ? SLURM_CPUS_ON_NODE / {ranks} : 1))}}"

# One torchrun per node, with all its cores: srun would give it one. Each rank's output is in its own file too.
srun --cpus-per-task="$SLURM_CPUS_ON_NODE" --kill-on-bad-exit=1 \\
  {torchrun} \\
  {script}
"""


def slurm_script(launch: Launch) -> str:
    """The batch script, for bash."""
    ranks = launch.hosts.processes_per_node
    gpus = launch.plan.spec.cluster.device.kind != "cpu"
    port = f"$(({PORT} + SLURM_JOB_ID % 1000))" if launch.port is None else str(launch.port)
    return TEMPLATE.format(
        sizes=launch.sizes,
        path=shlex.quote(str(launch.path)).replace("\n", " "),
        name=launch.name,
        nodes=launch.hosts.nodes,
        ranks=ranks,
        gpus=f"#SBATCH --gpus-per-node={ranks}\n" if gpus else "",
        port=port,
        torchrun=shell_text(_torchrun(launch)),
        script=shell_text(launch.script),
    )


def _torchrun(launch: Launch) -> list[str]:
    """The torchrun command without the script. Ranks meet under the job's number, on one node too."""
    logs = Expanded(f"{launch.name}-logs/$SLURM_JOB_ID")
    options = ["--rdzv-id", Expanded("$SLURM_JOB_ID"), *launch.restarts, "--log-dir", logs, "--tee", "3"]
    return torchrun_command(
        launch.plan, (), hosts=launch.hosts, host="$HOST", port="$PORT", options=options, standalone=False
    )
