"""Large and endless texts are refused soon and in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.session import extent

MIB = 2**20
MANY = 10**6 if extent.everything else 150_000
"""More of anything than a text may have."""
HEAD = 'program "p" {\n  mesh "dense" {dp = 2}\n'
BLOCK = '\n  block "b" (%x: fp32[1] @ replicate as residual) {\n'
RETURN = "    return %x as loss\n  }\n"
RESULT = ": fp32[1] @ replicate\n"


def each(count: int, line: Callable[[int], str]) -> str:
    return "".join(line(i) for i in range(count))


def weights(items: str) -> str:
    return f"{HEAD}{BLOCK}    %y = weighted_sum %x {{weights = {items}}} {RESULT}"


def doubling(blocks: int) -> str:
    """Each block calls the one before twice: the last runs 2 to the power of `blocks` ops."""

    def block(i: int) -> str:
        called = f'{{block = "b{i - 1}", layer = 0}}'
        calls = (
            f"    %y = call %x {called} {RESULT}    %z = call %y {called} {RESULT}"
            if i
            else f"    %y = add %x {RESULT}"
        )
        return BLOCK.replace('"b"', f'"b{i}"') + calls + RETURN

    return HEAD + each(blocks, block) + "}\n"


def chain(length: int) -> str:
    """A chain of copies whose end many ops read: each reader must not walk the chain."""
    copies = each(length, lambda i: f"    %c{i} = copy_to %{f'c{i - 1}' if i else 'x'} {{axis = dp}} {RESULT}")
    readers = each(length, lambda i: f"    %d{i} = add %c{length - 1} {RESULT}")
    return f"{HEAD}{BLOCK}{copies}{readers}{RETURN}}}\n"


LARGE: dict[str, tuple[Callable[[], str], str]] = {
    "64 MiB and a character": (lambda: "a" * (64 * MIB + 1), "more than 67_108_864 characters"),
    "a line of 64 MiB": (lambda: "a" * (64 * MIB - 1) + "\n", "more than 1_048_576 characters"),
    "64 MiB of empty lines": (lambda: HEAD + "\n" * (63 * MIB), "a block is wanted"),
    "64 MiB without an end": (lambda: HEAD + BLOCK + " " * (63 * MIB), "the text ends within a line"),
    "many meshes": (lambda: HEAD + each(MANY, lambda i: f'  mesh "m{i}" {{a = 1}}\n'), "10_001 meshes"),
    "many parameters": (
        lambda: HEAD + BLOCK + each(MANY, lambda i: f"    parameter @p{i}: fp32[1] = ones\n"),
        "100_000 parameters",
    ),
    "many ops": (lambda: HEAD + BLOCK + each(MANY, lambda i: f"    %a{i} = add %x {RESULT}"), "100_000 ops"),
    "many blocks": (
        lambda: HEAD + each(MANY * 7 // 10, lambda i: BLOCK.replace('"b"', f'"b{i}"') + RETURN),
        "10_010 blocks",
    ),
    "2^60 calls": (lambda: doubling(60), "1_000_000 ops, counted as often as they run"),
    "2^9999 calls": (lambda: doubling(10_000), "1_000_000 ops, counted as often as they run"),
    "a mesh of 900,000 digits": (lambda: HEAD.replace("dp = 2", f"dp = {'9' * 900_000}"), "the size of an axis"),
    "a shape of 300,000 dims": (lambda: HEAD + BLOCK.replace("[1]", f"[1{', 1' * 300_000}]"), "more than 8 dims"),
    "lists 10,000 deep": (lambda: weights("[" * 10_000 + "]" * 10_000), "more than 4 lists"),
    "200,000 numbers": (lambda: weights(f"[0.0{', 0.0' * 200_000}]"), "more than 100_000 items"),
    "a million outputs": (
        lambda: f"{HEAD}{BLOCK}    return %x as loss{', %x as loss' * 10**6}\n",
        "1_048_576 characters",
    ),
    "80,000 outputs of one role": (
        lambda: f"{HEAD}{BLOCK}    return %x as loss{', %x as loss' * 80_000}\n  }}\n}}\n",
        "the stages run []",
    ),
    "250,000 operands": (lambda: f"{HEAD}{BLOCK}    %y = add %x{', %x' * 250_000} {RESULT}", "100_000 operands"),
    "250,000 results": (lambda: f"{HEAD}{BLOCK}    {'%y, ' * 250_000}%y = add %x {RESULT}", "a type for each result"),
    "a million backslashes": (lambda: 'program "' + "\\" * (10**6 + 1) + '" {\n', "is wanted"),
    "150,000 brackets": (lambda: HEAD + BLOCK.replace("(%x", "(" + ') at "' * 150_000), "an input and its type"),
    "500,000 braces": (lambda: HEAD + BLOCK + "    %y = add %x" + " {" * 500_000 + "\n", "an attribute is wanted"),
    "a chain of copies": (lambda: chain(45_000 if extent.everything else 15_000), "is summed over dp twice"),
}  # fmt: skip

ALIKE = (
    "a line of 64 MiB", "64 MiB of empty lines", "64 MiB without an end", "2^9999 calls", "a million backslashes",
    "150,000 brackets", "500,000 braces",
)  # fmt: skip
"""What a limit refuses that another fault meets too, or no limit but the grammar: slow."""

READ_IN_A_PROCESS = """
import json, pathlib, re, sys, time
from moec.grammar.diagnostics import InternalError
from moec.passes.ir import IrError
from moec.passes.ir.texts.parse import parse_program
from moec.passes.ir.verifier import check_program
found = []
for path in sys.argv[1:]:
    text = pathlib.Path(path).read_text()
    started = time.process_time()
    try:
        check_program(parse_program(text))
        found.append(["accepted", 0])
    except (IrError, InternalError) as error:
        found.append([str(error), time.process_time() - started])
    del text
# Not `resource`: its peak counts the process that forked this one.
peak = int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) / 1024
json.dump([found, peak], sys.stdout)
"""


def refused_soon(folder: Path, faults: Sequence[str]) -> None:
    """Reads the texts in a process of their own, one after the other."""
    files = [folder / f"{number}.ir" for number in range(len(faults))]
    for file, fault in zip(files, faults, strict=True):
        file.write_text(LARGE[fault][0]())
    command = [sys.executable, "-c", READ_IN_A_PROCESS, *map(str, files)]
    found, peak = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    print(f"{peak:.0f} MiB")
    for fault, (message, seconds) in zip(faults, found, strict=True):
        print(f"{fault}: {seconds:.2f} s: {message}")
        assert LARGE[fault][1] in message
        assert len(message) < 400
        # Measured: 1 s and 130 MiB at most, Python, pydantic and two copies of the text among them.
        assert seconds < 10
    assert peak < 200


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")


@needs_proc
def test_large_texts_are_refused_soon_and_in_little_memory(tmp_path: Path):
    refused_soon(tmp_path, [fault for fault in LARGE if fault not in ALIKE])


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("fault", LARGE)
def test_a_large_text_is_refused_soon_and_in_little_memory(tmp_path: Path, fault: str):
    refused_soon(tmp_path, [fault])
