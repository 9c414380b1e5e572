"""`moec launch --slurm`: a batch script with one torchrun per node."""

from __future__ import annotations

import shlex

from moec.codegen.launch_command import PORT, shell_text
from moec.commands.launch import Launch

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
  torchrun --nnodes {nodes} --nproc-per-node {ranks} \\
  --rdzv-backend c10d --rdzv-endpoint "$HOST:$PORT" --rdzv-id "$SLURM_JOB_ID" \\
  {restarts}--log-dir "{name}-logs/$SLURM_JOB_ID" --tee 3 \\
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
        restarts="".join(f"{word} " for word in launch.restarts),
        script=shell_text(launch.script),
    )
