"""Which ranks of a cluster are processes of one machine, and the torchrun command that follows from it."""

from __future__ import annotations

import shlex

import pytest
from support.plans import moe_plan

from moec.codegen.launch_command import shell_text, torchrun_command
from moec.grammar import load_text
from moec.grammar.spec import Cluster
from moec.passes.place.hosts import Hosts, hosts_of

MODEL = """
model "m" { vocab = 32; dim = 16; depth = 1; dtype = bf16; layers { attention = mha(heads = 2); ffn = swiglu(16) } }
train { batch = 1152; sequence = 8 }
"""
LIBRARY = ("dgx_h100", "mi300x_platform", "gb200_nvl72", "gb300_nvl72")


def cluster(text: str) -> Cluster:
    uses = "".join(f'use "clusters/{name}"\n' for name in LIBRARY if name in text)
    uses += 'use "devices/h100"\n' * ("device = h100" in text)
    loaded = load_text(f"{uses}{MODEL}\n{text}")
    assert loaded.spec is not None, [str(d) for d in loaded.diagnostics]
    return loaded.spec.cluster


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ('cluster "c" { from = dgx_h100; nodes = 4 }', Hosts(4, 8)),
        ('cluster "c" { from = dgx_h100 }', Hosts(1, 8)),
        ('cluster "c" { from = mi300x_platform; nodes = 2 }', Hosts(2, 8)),
        ('cluster "c" { from = gb200_nvl72; nodes = 2 }', Hosts(36, 4)),
        ('cluster "c" { from = gb300_nvl72 }', Hosts(18, 4)),
        ('cluster "c" { device = cpu; level "process" { size = 4 } }', Hosts(1, 4)),
        ('cluster "c" { device = cpu; level "process" { size = 2 }; level "desk" { size = 3 } }', Hosts(3, 2)),
        (
            'cluster "c" { device = cpu; level "socket" { size = 2 }; level "node" { size = 3 };'
            ' level "rail" { size = 2 } }',
            Hosts(2, 6),
        ),
        ('cluster "c" { device = h100; level "rack" { size = 16 } }', Hosts(1, 16, is_stated=False)),
        ('cluster "c" { device = h100; level "rack" { size = 1 } }', Hosts(1, 1)),
    ],
)
def test_a_machine_is_what_the_node_level_joins_and_else_the_innermost_level(text: str, hosts: Hosts):
    assert hosts_of(cluster(text)) == hosts


def test_one_node_takes_a_free_port():
    words = torchrun_command(moe_plan(ranks=4), ["my train.py", "--lr", "$x"])
    assert words == ["torchrun", "--standalone", "--nproc-per-node", "4", "my train.py", "--lr", "$x"]
    assert shell_text(words) == "torchrun --standalone --nproc-per-node 4 'my train.py' --lr '$x'"


def test_several_nodes_meet_at_the_first_node():
    words = torchrun_command(moe_plan(ranks=4), ["train.py", "$HOST:29500"], hosts=Hosts(2, 2))
    assert shell_text(words) == (
        "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d "
        "--rdzv-endpoint \"$HOST:29500\" train.py '$HOST:29500'"
    )
    assert shlex.split(shell_text(words)) == words
