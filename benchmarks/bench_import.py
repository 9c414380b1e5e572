"""Import of DeepSeek-V3's 61 layers × 256 experts (45 thousand tensors of toy widths) and back: seconds and memory.

Each step is a process of its own: `moec import hf`, `moec.load_hf` into the unsharded model, `moec weights import` and
`export`. The tensors lie in 163 files, as DeepSeek-V3's do.
"""

from __future__ import annotations

import filecmp
import json
import tempfile
from pathlib import Path

import numpy as np
from commands import Ran, run_moec, run_python
from report import Row, parser, report
from safetensors.numpy import save_file

LIMIT_SECONDS, LIMIT_BYTES = 20, 2e9
FILES = 163
CONFIG = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 128, "hidden_size": 16,
    "intermediate_size": 32, "moe_intermediate_size": 8, "num_hidden_layers": 61, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 4, "qk_nope_head_dim": 4, "n_group": 8,
    "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "dtype": "float32",
}  # fmt: skip
LOAD = """
import resource, sys, time
import moec
started = time.perf_counter()
module = moec.reference(moec.from_hf(sys.argv[1]))
made = time.perf_counter()
moec.load_hf(module, sys.argv[1])
print(f"{made - started:.2f} s to make the module, {time.perf_counter() - made:.2f} s to load it")
"""


def main() -> None:
    options = parser(__doc__)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folder = root / "hf"
        count = write_folder(folder)
        steps = {
            "moec import hf": run_moec("import", "hf", str(folder), "-o", str(root / "model.moe")),
            "moec.load_hf, with the module made": run_python("-c", LOAD, str(folder)),
            "moec weights import": run_moec("weights", "import", str(folder), str(root / "checkpoint")),
            "moec weights export": run_moec("weights", "export", str(root / "checkpoint"), str(root / "again")),
        }
        _, differ, errors = filecmp.cmpfiles(folder, root / "again", [path.name for path in folder.iterdir()], False)
        if differ or errors:
            raise SystemExit(f"the export differs from what was imported: {[*differ, *errors][:3]}")
    print(steps["moec.load_hf, with the module made"].output.strip())
    rows = [row for what, ran in steps.items() for row in rows_of(what, ran)]
    report(f"{count} tensors in {FILES} files", rows, chosen.json)


def rows_of(what: str, ran: Ran) -> list[Row]:
    return [
        Row(f"{what}: the whole command", ran.seconds, "s", LIMIT_SECONDS),
        Row(f"{what}: peak memory", ran.peak_bytes / 1e6, "MB", LIMIT_BYTES / 1e6),
    ]


def write_folder(folder: Path) -> int:
    """A folder as it would be downloaded; returns the number of its tensors."""
    from moec.grammar.huggingface.read import read_config
    from moec.runtime.huggingface.checkpoints import plan_of, shapes_of

    imported = read_config(CONFIG)
    shapes = shapes_of(plan_of(imported.spec, "benchmark"))
    rules = [rule for rule in imported.family.rules(imported.spec.model, None) if rule.written]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator, weight_map = np.random.default_rng(0), {}
    each = -(-len(rules) // FILES)
    for number in range(FILES):
        file = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        part = rules[number * each : (number + 1) * each]
        save_file(
            {rule.name: generator.standard_normal(rule.shape(shapes), np.float32) for rule in part}, folder / file
        )
        weight_map |= {rule.name: file for rule in part}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return len(rules)


if __name__ == "__main__":
    main()
