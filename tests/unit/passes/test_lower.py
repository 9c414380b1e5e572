"""lower: the reference semantics."""

from support.plans import layer_spec, moe_plan, moe_spec, moe_text
from support.tables import each_row

from moec.codegen.emit import emit_graph, target_name
from moec.driver import compile as compile_source
from moec.driver import load
from moec.grammar import load_text, to_text
from moec.passes.degrees.expert_slices import whole_experts
from moec.passes.degrees.stated_degrees import mixtures_of
from moec.passes.ir.ops import PermutePadded
from moec.passes.ir.texts.text import print_program
from moec.passes.lower.lower_model import lower
from moec.passes.pipeline import compile_program
from moec.runtime.host.reference import reference_program

GRAPHS = ("forward", "valid_labels", "loss", "num_tokens", "aux_loss")


def test_layers_that_are_one_object_share_one_block():
    program = lower(moe_spec(depth=6))
    assert [block.name for block in program.blocks] == ["layers[0]", "layers[1..5]", *GRAPHS]


def test_a_dense_model_has_no_balance_and_no_token_count():
    program = lower(moe_spec(balance="[]"))
    assert [block.name for block in program.blocks[-3:]] == ["forward", "valid_labels", "loss"]
    assert [op.mnemonic for op in program.block("loss").ops] == ["cross_entropy", "mean"]


@each_row(
    ("options", "whole"),
    [({}, []), ({"gate": "soft"}, ["soft"]), ({"gate": "smear"}, ["smear"]), ({"expert": "lora(4)"}, ["lora"])],
)
def test_etp_cuts_the_experts_that_are_not_listed_as_whole(options: dict[str, str], whole: list[str]):
    spec = moe_spec(balance="[]", beside="group = sequence", ep=2, etp=2, **options)
    assert list(whole_experts(spec, mixtures_of(spec))) == whole
    cuts = {axis for block in lower(spec).blocks for p in block.parameters for axis, _ in p.shard}
    assert ("etp" in cuts) == (whole == [])


def test_the_router_and_the_losses_are_at_least_fp32():
    block = lower(moe_spec(dtype="bf16")).block("layers[1..2]")
    assert block.scope["rows"].dtype == "bf16"
    assert block.scope["logits"].dtype == "fp32"
    assert block.scope["balance"].dtype == "fp32"


def test_every_op_and_parameter_of_a_layer_keeps_its_line():
    block = lower(moe_spec()).block("layers[1..2]")
    lines = {op.mnemonic: op.span.line for op in block.ops if op.span}
    assert {op.mnemonic for op in block.ops} == set(lines)
    assert (lines["rope"], lines["route"], lines["expert_mlp"], lines["z_loss"]) == (8, 11, 10, 12)
    assert all(parameter.span for parameter in block.parameters)


def test_projections_into_the_residual_stream_start_smaller_with_depth():
    block = lower(moe_spec(depth=8)).block("layers[1..7]")
    stds = {p.name: p.init.std for p in block.parameters}
    assert stds["attention.q.weight"] == 0.02
    assert stds["attention.o.weight"] == stds["moe.experts.down.weight"] == 0.02 / 4


def test_norm_weights_do_not_decay_and_all_others_do():
    parameters = [p for block in lower(moe_spec()).blocks for p in block.parameters]
    assert {p.name for p in parameters if not p.decays} == {"attention_norm.weight", "ffn_norm.weight", "norm.weight"}


def test_biases_start_as_zeros_and_do_not_decay_whatever_their_shape():
    block = lower(moe_spec(bias="all", beside="shared = swiglu(4, bias = true)")).block("layers[1..2]")
    biases = {p.name: p for p in block.parameters if p.name.endswith(".bias")}
    assert biases.keys() == {f"attention.{part}.bias" for part in "qkvo"} | {
        "moe.shared.up.bias",
        "moe.shared.down.bias",
    }
    assert biases["attention.q.bias"].shape == (4, 4)
    assert {(p.init.kind, p.decays) for p in biases.values()} == {("zeros", False)}


@each_row(("kind", "shapes"), [("head", [(4,), (4,)]), ("projection", [(4, 4), (2, 4)])])
@each_row("norm", ["rms(eps = 1e-4)", "layer_norm(eps = 1e-4)"])
def test_queries_and_keys_are_normed_after_their_biases_and_before_rope(
    kind: str, shapes: list[tuple[int, ...]], norm: str
):
    spec = moe_spec(qk_norm=kind, bias="qkv", model=f"norm = {norm}")
    block = lower(spec).block("layers[1..2]")
    for name, shape in zip("qk", shapes, strict=True):
        made = [op for op in block.ops if op.results[0].name.split(".")[0] == name]
        assert [op.mnemonic for op in made] == ["linear", "add_bias", "rms_norm", "rope"]
        weight = block.scope[f"@attention.{name}_norm.weight"]
        assert (weight.shape, weight.init.kind, weight.decays) == (shape, "ones", False)
        assert (made[2].eps, made[2].span.line) == (1e-4, 8)
    assert "attention.v_norm.weight" not in {p.name for p in block.parameters}


def test_a_parameter_says_where_it_is_declared_which_dim_an_axis_cuts():
    program = lower(moe_spec(bias="all", beside="shared = swiglu(4, bias = true)"))
    cut = {p.name: dict(p.shard) for block in program.blocks for p in block.parameters if p.shard}
    heads, hidden, vocabulary = ("q.weight", "k.weight", "v.weight", "q.bias", "k.bias", "v.bias"), {"tp": 1}, {"tp": 0}
    assert cut == {
        **{f"attention.{name}": {"tp": 0} for name in heads},
        "attention.o.weight": {"tp": 1},
        **{f"{path}.{name}.weight": hidden for path in ("ffn", "moe.shared") for name in ("up", "down")},
        "moe.shared.up.bias": hidden,
        "moe.experts.up.weight": {"ep": 0, "etp": 2},
        "moe.experts.down.weight": {"ep": 0, "etp": 2},
        "embedding.weight": vocabulary,
        "head.weight": vocabulary,
    }


def test_a_tied_head_has_no_parameter_of_its_own():
    forward = lower(moe_spec(model="embedding = tokens(tied = true)")).block("forward")
    assert [p.name for p in forward.parameters] == ["embedding.weight", "norm.weight"]
    assert next(op for op in forward.ops if op.mnemonic == "linear").operands[1] == "@embedding.weight"


@each_row(
    ("factor", "parts", "whole"),
    [("0.1 * 3", 3, 10), ("0.3", 3, 10), ("5 / 3", 5, 3), ("1.25", 5, 4), ("0.1 + 0.2", 3, 10)],
)
def test_a_capacity_reaches_the_program_as_the_fraction_that_is_written(factor: str, parts: int, whole: int):
    spec = moe_spec(beside=f"capacity = factor({factor})")
    for one in (spec, load_text(to_text(spec)).unwrap()):
        (permute,) = (op for op in lower(one).block("layers[1..2]").ops if isinstance(op, PermutePadded))
        assert (permute.parts, permute.whole, permute.eval_parts, permute.eval_whole) == (parts, whole, parts, whole)


def test_a_stored_plan_compiles_to_itself_with_a_capacity_that_no_decimal_equals(tmp_path):
    plan = moe_plan(beside="capacity = dynamic(max = 5 / 3)")
    plan.save(tmp_path / "p.plan")
    assert load(tmp_path / "p.plan", trust_nothing=True).spec == plan.spec


def test_a_model_of_width_one_compiles():
    text = moe_text(dim=1, depth=2).replace("heads = 4", "heads = 1").replace("kv_heads = 2", "kv_heads = 1")
    plan = compile_source(text.replace("rope = rope(theta = 1e4), ", ""))
    assert (32, 1) in {parameter.shape for parameter in plan.parameters.values()}  # the embedding


DEGREES = [{"ranks": 1, "ep": 1}, {"ranks": 8, "ep": 4}, {"ranks": 8, "ep": 2, "tp": 2}, {"ranks": 8, "ep": 8, "tp": 4}]


@each_row("group", ["sequence", "batch", "rank"])
@each_row("capacity", ["dropless", "factor(1.25, eval = 2.0)", "dynamic()", "dynamic(max = 1.5)"])
def test_the_lowered_program_depends_on_no_degree(capacity: str, group: str):
    beside = f"capacity = {capacity}; group = {group}; shared = swiglu(8)"
    programs = [lower(moe_spec(beside=beside, **degrees)) for degrees in DEGREES]
    assert {print_program(program, spans=False) for program in programs} == {print_program(programs[0], spans=False)}
    assert all(program == programs[0] for program in programs)
    layers = [lower(layer_spec(beside=beside, ranks=ranks, ep=ep)) for ranks, ep in ((1, 1), (4, 2), (8, 8))]
    assert all(program == layers[0] for program in layers)


@each_row("group", ["sequence", "batch", "rank"])
def test_choices_are_counted_by_group_and_data_ranks_are_those_of_the_mesh(group: str):
    dims = {"sequence": "batch", "batch": 1, "rank": "data_ranks"}
    program = compile_program(moe_spec(ranks=8, tp=2, ep=2, beside=f"group = {group}")).program
    choices = program.block("layers[1..2]").scope["choices"]
    assert choices.shape == (dims[group], 8)
    assert str(choices.layout) == ("dp:partial(sum)" if group == "batch" else "dp:shard(0)") + " tp:partial(sum)"


def test_the_reference_is_told_how_many_data_ranks_there_are():
    def groups(ranks: int, tp: int) -> int:
        program = reference_program(moe_spec(ranks=ranks, tp=tp, ep=1, beside="group = rank"))
        graph = emit_graph(program, program.block("layers[1..2]"))
        (node,) = (n for n in graph.nodes if target_name(n) == "moec.count_choices.default")
        return node.args[-1]

    assert [groups(1, 1), groups(4, 1), groups(8, 2)] == [1, 4, 4]


PADDED = "embedding = tokens(padding = 3)"


def test_a_mixture_is_told_which_tokens_are_real_and_a_dense_layer_is_not():
    program = lower(moe_spec(model=PADDED))
    inputs = {block.name: [value.name for value in block.inputs] for block in program.blocks}
    assert inputs["layers[0]"] == ["x"]
    assert inputs["layers[1..2]"] == ["x", "real"]
    ops = {op.mnemonic: op for op in program.block("layers[1..2]").ops}
    experts = ops["mask_choices"].results[0].name
    assert ops["permute"].attributes()["some_are_none"]
    assert ops["permute"].operands[1] == ops["count_choices"].operands[0] == experts
    assert all(ops[loss].named(ops[loss].operands)["real"] == "real" for loss in ("switch_loss", "z_loss"))
    assert [op.mnemonic for op in program.block("num_tokens").ops] == ["count_real_tokens"]


def test_without_a_padding_id_or_a_mixture_nothing_is_masked():
    dense = moe_spec(model=PADDED).replace(
        model=moe_spec(model=PADDED).model.replace(depth=1, layers=moe_spec().model.layers[:1])
    )
    for program in (lower(moe_spec()), lower(dense)):
        ops = [op for block in program.blocks for op in block.ops]
        assert not {op.mnemonic for op in ops} & {"real_tokens", "count_real_tokens", "mask_choices"}
        assert not any(op.attributes().get("some_are_none") for op in ops)
