"""Models of images in a job of one process: steps, counts of patches, and batches that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.image_plans import CHANNELS, CLASSES, IMAGE, PATCH, image_plan, image_spec, image_text
from support.plans import moe_text
from support.ways_to_run import gradients
from support.wrong_plans import bypass, change_op
from torch import Tensor

import moec
from moec.grammar import load_text
from moec.grammar.diagnostics import DiagnosticError
from moec.passes.cost.totals import activation_bytes, costs_of
from moec.passes.ir import ops as o
from moec.passes.ir.work.workload import Workload
from moec.runtime.errors import JobError
from moec.runtime.host.reference import reference, reference_program
from moec.runtime.inputs.forward_checks import same_shape
from moec.runtime.verify.verification import verify

BATCH = 8
PATCHES = (IMAGE // PATCH) ** 2


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    labels[:3] = -100
    return torch.randn(BATCH, CHANNELS, IMAGE, IMAGE, generator=generator), labels


def test_every_way_to_cut_a_batch_gives_one_gradient() -> None:
    """Also in a loss of one's own, and in one of log-probabilities; `-100` falls unevenly on the parts."""
    images, labels = batch()
    with moec.launch(image_plan(), device="cpu") as job:
        model = job.build()
        loss = job.step(model, images, labels)
        whole = gradients(model)

        def own(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
            return (F.cross_entropy(logits, labels, reduction="none", ignore_index=-100) * weights).sum()

        weights = {"weights": torch.ones(BATCH)}
        ways = {
            "micro-batches": lambda: job.step(model, images, labels, microbatches=3),
            "a loss": lambda: job.step(model, images, labels, loss=own, inputs=weights, count=valid, microbatches=2),
            "log-probabilities": lambda: job.step(model, images, labels, logprob_loss=lambda p, _: -p.sum()),
        }
        for name, step in ways.items():
            torch.testing.assert_close(step(), loss, rtol=1e-5, atol=1e-6, msg=name)
            require_close(gradients(model), whole, name)
        with job.accumulate(model, *labels.split(4)):
            for some, of in zip(images.split(4), labels.split(4), strict=True):
                model(some, of).loss.backward()
        require_close(gradients(model), whole, "accumulate")
        assert job.tokens == 5 * BATCH * PATCHES


def valid(labels: Tensor, weights: Tensor) -> int:
    return int((labels != -100).sum())


def require_close(found: dict[str, Tensor], expected: dict[str, Tensor], way: str) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{way}, {n}: {m}"
        )


def test_random_numbers_follow_the_image_and_not_the_micro_batch() -> None:
    images, labels = batch()
    with moec.launch(image_plan(gate="topk(2, jitter = 0.5)"), device="cpu") as job:
        model = job.build()
        model.set(seed=3, step=5)
        job.step(model, images, labels)
        whole = gradients(model)
        model.set(step=5)
        job.step(model, images, labels, microbatches=2)
        require_close(gradients(model), whole, "micro-batches")
        with pytest.raises(JobError) as error, job.accumulate(model, labels.view(2, 4)):
            pass
        assert error.value.diagnostics[0].help == "pass the labels of each micro-batch by themselves, `[batch]`"


def test_metrics_count_patches(tmp_path: Path) -> None:
    images, labels = batch()
    with (
        moec.launch(image_plan(beside="capacity = factor(0.5)"), device="cpu") as job,
        job.metrics(tmp_path / "run.jsonl") as metrics,
    ):
        model, optimizer = (model := job.build()), job.optimizer(model)
        for _ in range(2):
            metrics.step(model, job.step(model, images, labels), optimizer=optimizer)
            optimizer.step()
            optimizer.zero_grad()
    records = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [record["tokens"] for record in records] == [BATCH * PATCHES, 2 * BATCH * PATCHES]
    assert all(0 < record["drop_rate"]["1"] < 1 for record in records)


def test_a_model_in_bf16_takes_images_of_any_floating_dtype() -> None:
    images, labels = batch()
    model = reference(image_spec(dtype="bf16"))
    logits = [model(images.to(dtype), labels).logits for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    assert all(each.dtype == torch.bfloat16 and each.shape == (BATCH, CLASSES) for each in logits)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])  # pixels are rounded first in any case


def test_a_checkpoint_is_resumed(tmp_path: Path) -> None:
    images, labels = batch()
    with moec.launch(image_plan(), device="cpu") as job:
        model = job.build()
        optimizer = job.optimizer(model)
        job.step(model, images, labels)
        optimizer.step()
        job.save(tmp_path / "saved", model, optimizer)
        expected = model.eval()(images).logits
    with moec.launch(image_plan(), device="cpu") as job:
        model = job.build(seed=7)
        assert not torch.equal(model.eval()(images).logits, expected)
        job.load(tmp_path / "saved", model)
        assert torch.equal(model.eval()(images).logits, expected)


IMAGES, LABELS = batch()
WINDOWED = "mha(heads = 4, causal = false, grid = windows(2, shift = 1))"
WRONG = {
    "integers": (IMAGES.long(), LABELS, "images are torch.int64, and must be of a floating dtype"),
    "one channel less": (IMAGES[:, 1:], LABELS, r"images have shape \[8, 1, 8, 8\], and must be \[batch, 2, 8, 8\]"),
    "another size": (IMAGES[:, :, 1:], LABELS, r"images have shape \[8, 2, 7, 8\]"),
    "no batch": (IMAGES[0], LABELS, r"images have shape \[2, 8, 8\]"),
    "an array": (IMAGES.numpy(), LABELS, "images are of class ndarray"),
    "labels of tokens": (IMAGES, LABELS[:, None], r"labels have shape \[8, 1\], and must be \[batch\]"),
    "too few labels": (IMAGES, LABELS[1:], r"labels have shape \[7\], and must be \[batch\], one for each of 8 images"),
    "labels of floats": (IMAGES, LABELS.float(), "labels are torch.float32"),
    "a class too large": (IMAGES, torch.full_like(LABELS, 5), "labels contain the class 5, and classes are 0 to 4"),
    "a class below 0": (IMAGES, torch.full_like(LABELS, -1), r"labels contain the class -1.*ignored are -100\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_batch_is_refused_before_anything_is_computed(name: str) -> None:
    images, labels, words = WRONG[name]
    model = reference(image_spec())
    with pytest.raises(JobError, match=f"MOE0702.*{words}"):
        model(images, labels)


def test_words_of_ids_are_unknown_to_patches() -> None:
    for word in ("padding = 0", "separator = 0", "tied = true"):
        found = load_text(image_text(patches=f", {word}")).diagnostics
        assert [each.code for each in found] == ["MOE0201"]


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("dim = 16;", "dim = 16; vocab = 32;", "MOE0367"),
        ("head = classes(5)", "", "MOE0367"),
        ("topk(2, normalize = true)", "hash(2)", "MOE0367"),
        ("size = 2", "size = 3", "MOE0366"),
        ("dim = 16;", "dim = 16; context = 17;", "MOE0368"),
        ("batch = 8;", "batch = 8; sequence = 15;", "MOE0368"),
    ],
)
def test_words_that_contradict_images_are_refused(old: str, new: str, code: str) -> None:
    text = image_text(balance="[]")
    assert old in text
    assert [each.code for each in load_text(text.replace(old, new)).diagnostics] == [code]


def test_tokens_have_no_classes() -> None:
    patches, tokens = "embedding = patches(image = 8, size = 2, channels = 2)", "vocab = 8"
    text = image_text().replace(patches, tokens).replace("batch = 8;", "batch = 8; sequence = 8;")
    assert [each.code for each in load_text(text).diagnostics] == ["MOE0367"]


@pytest.mark.parametrize(
    "grid",
    [
        "causal = false, grid = windows(3)",
        "causal = false, grid = windows(8)",
        "causal = false, grid = windows(2, shift = 2)",
        "causal = false, grid = windows(4, shift = 2)",
        "grid = windows(2)",
        "causal = true, grid = windows(2)",
        "causal = false, window = 3, grid = windows(2)",
    ],
)
def test_windows_that_do_not_fit_the_grid_are_refused(grid: str) -> None:
    found = load_text(image_text(attention=f"mha(heads = 4, {grid})")).diagnostics
    assert {each.code for each in found} == {"MOE0369"}


def test_ranks_with_unequal_images_hear_of_images_and_of_what_needs_one_shape() -> None:
    words = same_shape(reference_program(image_spec(gate="soft(2)", balance="[]")), "images")
    told = words.format(least=[3, 2, 8, 8], most=[4, 2, 8, 8])
    assert told == (
        "images have shapes from [3, 2, 8, 8] to [4, 2, 8, 8] on the ranks, and must have one: slots follow from it"
    )


def test_one_window_of_the_whole_grid_is_accepted_without_a_shift() -> None:
    found = load_text(image_text(attention="mha(heads = 4, causal = false, grid = windows(4))")).diagnostics
    assert found == ()


def test_images_with_causal_attention_by_default_are_warned_of_and_nothing_else() -> None:
    """ViT attends to all patches (Dosovitskiy et al. 2020); an order of patches has to be written."""
    loaded = load_text(image_text(attention="mha(heads = 4)"))
    assert {(each.code, each.severity) for each in loaded.diagnostics} == {("MOE0367", "warning")}
    assert load_text(image_text(attention="mha(heads = 4, causal = true)")).diagnostics == ()


def test_a_patch_larger_than_the_image_is_the_one_mistake() -> None:
    text = image_text().replace("image = 8", "image = 2").replace("size = 2", "size = 4")
    assert [each.code for each in load_text(text).diagnostics] == ["MOE0366"]


def test_tokens_have_no_grid() -> None:
    text = moe_text(attention="mha(heads = 4, causal = false, grid = windows(2))")
    assert [each.code for each in load_text(text).diagnostics] == ["MOE0369"]


def test_a_window_of_another_size_or_place_is_found() -> None:
    plan = image_plan(ranks=4, tp=2, ep=2, attention="mha(heads = 4, causal = false, grid = windows(2, shift = 1))")
    for wrong in ({"shift": 0}, {"size": 4}, {"side": 8}):
        assert not verify(change_op(plan, "layers[1]", "windows", **wrong), float32=False).ok


def test_a_length_that_says_what_the_grid_says_is_allowed() -> None:
    text = (
        image_text().replace("batch = 8;", "batch = 8; sequence = 16;").replace("dim = 16;", "dim = 16; context = 16;")
    )
    assert load_text(text).unwrap().sequence == PATCHES


def test_a_faulty_plan_is_found() -> None:
    plan = image_plan(ranks=4, tp=2, ep=2)
    forward = plan.program.block("forward").ops
    (reduced,) = (op.results[0].name for op in forward if isinstance(op, o.AllReduce) and "mean" in op.operands[0])
    assert not verify(bypass(plan, "forward", reduced), float32=False).ok
    assert not verify(change_op(plan, "forward", "mean", length=PATCHES - 1), float32=False).ok


@pytest.mark.parametrize(
    "options",
    [{}, {"model": "norm = layer_norm()"}, {"patches": ", positions = none"}, {"attention": WINDOWED}],
    ids=str,
)
def test_the_reference_keeps_what_its_ops_say(options: dict[str, str]) -> None:
    spec = image_spec(**options, batch=32)
    model, program = reference(spec, seed=0), reference_program(spec)
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    generator = torch.Generator().manual_seed(0)
    images = torch.randn(32, CHANNELS, IMAGE, IMAGE, generator=generator)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(images, torch.randint(CLASSES, (32,), generator=generator))
    assert output.loss.requires_grad
    said = activation_bytes(program, costs_of(program, Workload.of(spec, program)))
    assert said == pytest.approx(sum(storage.nbytes() for storage in kept.values()), rel=2e-3)


# ---- a class token ---------------------------------------------------------------------------------------


TOKEN = {"image": 6, "pool": "first"}


def small_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    return torch.randn(BATCH, CHANNELS, 6, 6, generator=generator), labels


def test_a_model_with_a_class_token_counts_it_and_trains_in_micro_batches_alike() -> None:
    images, labels = small_batch()
    with moec.launch(image_plan(**TOKEN, gate="topk(2, jitter = 0.2)"), device="cpu") as job:
        model = job.build()
        model.set(seed=3, step=5)
        job.step(model, images, labels)
        assert job.tokens == BATCH * 10
        whole = gradients(model)
        assert whole["class_token.weight"].any()
        model.set(step=5)
        job.step(model, images, labels, microbatches=2)
        require_close(gradients(model), whole, "micro-batches")


def test_verify_finds_a_pooled_token_that_is_not_the_first() -> None:
    plan = image_plan(**TOKEN, ranks=2, tp=2, ep=2)
    assert verify(plan).ok
    blocks = []
    for block in plan.program.blocks:  # a mean in place of the first token, in the same layout
        ops = [
            o.MeanTokens(operands=op.operands, results=op.results, length=10, span=op.span)
            if isinstance(op, o.FirstToken)
            else op
            for op in block.ops
        ]
        blocks.append(replace(block, ops=tuple(ops)))
    report = verify(replace(plan, program=replace(plan.program, blocks=tuple(blocks))))
    assert not report.ok
    assert report.first_difference is not None
    assert report.first_difference.op == "mean_tokens"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"attention": "mha(heads = 4, causal = false, grid = windows(2))", "pool": "first"}, "MOE0344"),
        ({"model": "context = 16", "pool": "first"}, "MOE0368"),
        ({"ranks": 2, "tp": 2, "pool": "first"}, "MOE0319"),
        ({"attention": "mha(heads = 4, causal = false, window = 18)", "pool": "first"}, "MOE0362"),
        ({"pool": "last"}, "MOE0201"),
    ],
)
def test_what_a_class_token_does_not_go_with_is_refused(options: dict[str, object], code: str) -> None:
    with pytest.raises(DiagnosticError, match=code):
        image_plan(**options)


def test_with_a_class_token_the_context_is_one_longer() -> None:
    assert image_plan(pool="first", model="context = 17").spec.sequence == 17
