"""`recompute`: the same numbers from fewer saved activations; choices are kept, counts and states advance once."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.combinations import some
from support.plans import layer_text, moe_plan
from support.ways_to_run import gradients
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import moec
from moec.codegen.emit import recompute as recompute_module
from moec.runtime.backends.torch import torch_backend
from moec.runtime.job.job import Job
from moec.runtime.model.module import PlanModule
from moec.runtime.verify.cluster.virtual import VirtualCluster

ONE = {"ranks": 1, "ep": 1}
WORDS = ("none", "experts", "layer")
ONLINE = "topk(2, score = sigmoid, normalize = true, bias = online(0.01))"
FILES: dict[str, dict[str, Any]] = {
    "fp32": {
        "model": "embedding = tokens(padding = 3)",
        "layers": [
            "",
            "moe { capacity = factor(0.75); group = batch }",
            "moe { capacity = dynamic(max = 1.1); shared = swiglu(8) }",
            "moe { gate = topk(2, jitter = 0.2) }",
            "moe { gate = topk(2, noise = 0.7) }",
            f"moe {{ gate = {ONLINE} }}",
            "moe { gate = hash(2); balance = [] }",
        ],
    },
    "bf16": {"dtype": "bf16", "expert": "swiglu(16, bias = true)"},
}
"""Layers of every kind in one model."""


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens, labels = (torch.randint(32, (8, 8), generator=generator) for _ in range(2))
    labels[torch.rand(8, 8, generator=generator) < 0.3] = -100
    return tokens, labels


def two_steps(**options: Any) -> dict[str, Any]:
    """Losses, gradients, states, loads and drop rates of two steps."""
    found: dict[str, Any] = {}
    with moec.launch(moe_plan(**ONE, **options), device="cpu") as job:
        model = job.build(seed=1)
        for step in range(2):
            found[f"loss {step}"] = job.step(model, *batch(step))
            found |= {f"{name} {step}": buffer.clone() for name, buffer in model.named_buffers()}
            found |= {f"load {layer} {step}": load for layer, load in job.expert_loads(model).items()}
            found |= {f"drop {layer} {step}": torch.tensor(rate) for layer, rate in job.drop_rates(model).items()}
        found |= gradients(model)
    return found


@pytest.mark.parametrize("file", FILES)
def test_recomputation_changes_no_gradient_no_count_and_no_state(file: str) -> None:
    wanted = two_steps(**FILES[file], microbatches=2)
    for word in WORDS[1:]:
        found = two_steps(**FILES[file], microbatches=2, recompute=word)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value), (word, name)


# ---- what is saved -----------------------------------------------------------------------------------------


def saved_bytes(run: Callable[[], object]) -> int:
    """Bytes of the storages that autograd saves while `run` runs."""
    storages: dict[int, Any] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()  # kept: no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for storage in storages.values())


SHRINKING: list[tuple[dict[str, int], str]] = [
    ({"ep": 1}, ""),
    ({"ep": 1}, "capacity = factor(1.25)"),
    ({"ep": 2}, ""),
    ({"ep": 2, "tp": 2}, "capacity = factor(1.25)"),
    ({"ep": 2, "tp": 2}, "capacity = dynamic()"),
]


@pytest.mark.parametrize("place", some(range(5), [0, 3]))
def test_activations_shrink_from_none_to_experts_to_layer(place: int) -> None:
    """By the experts' pre-activations; then to the inputs of layers and what the router chose."""
    degrees, beside = SHRINKING[place]
    sizes: dict[str, int] = {}
    for word in WORDS:
        plan = moe_plan(ranks=2, **degrees, beside=beside, recompute=word, expert="swiglu(64)")
        with moec.launch(moe_plan(**ONE, expert="swiglu(64)"), device="cpu") as job:
            parameters = {name: p.detach() for name, p in job.build(seed=1).named_parameters()}
        cluster = VirtualCluster(plan, parameters)
        shares = [batch()[0].chunk(plan.data_size)[plan.data_rank(rank)] for rank in range(2)]
        step = cluster.step(shares, shares)
        sizes[word] = saved_bytes(lambda step=step: step.run(before="backward"))
    hidden = 2 * 64 * 2 * 2 * 64 * 4  # mixtures, tokens, choices, parts, width, bytes: at least
    assert sizes["none"] - sizes["experts"] >= hidden
    assert sizes["layer"] < sizes["experts"] / 2


def test_evaluation_and_no_grad_save_nothing_more_and_give_the_same() -> None:
    logits = []
    for word in WORDS:
        with moec.launch(moe_plan(**ONE, recompute=word), device="cpu") as job:
            model = job.build(seed=1).eval()
            with torch.no_grad():
                assert saved_bytes(lambda model=model: model(*batch())) == 0
            logits.append(model(batch()[0]).logits)
    assert all(torch.equal(one, logits[0]) for one in logits)


def test_weights_that_a_saved_tensor_hook_replaces_are_not_held() -> None:
    """A layer takes its weights as inputs: who gathers them may drop them after forward, and gather again."""
    held: list[weakref.ref[Tensor]] = []

    def gathered(weight: Tensor) -> Tensor:
        copied = weight * 1.0
        held.append(weakref.ref(copied))
        return copied

    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
    x = torch.randn(3, 4, requires_grad=True)

    def drop(tensor: Tensor) -> Callable[[], Tensor]:
        index = next((i for i, ref in enumerate(held) if ref() is tensor), None)
        return (lambda: tensor) if index is None else lambda: weights[index].detach() * 1.0

    with torch.autograd.graph.saved_tensors_hooks(drop, lambda make: make()):
        y = recompute_module.recomputed(lambda x, a, b: (x @ a).tanh() @ b, x, *map(gathered, weights))
    assert all(ref() is None for ref in held)
    y.sum().backward()
    found = [p.grad for p in (x, *weights)]
    wanted = torch.autograd.grad(((x @ weights[0]).tanh() @ weights[1]).sum(), (x, *weights))
    torch.testing.assert_close(found, list(wanted))


# ---- the choices -------------------------------------------------------------------------------------------


class Counted:
    """`route` of plain torch that counts its calls and, once `drifts`, chooses other experts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.drifts = 0, False
        self._route = torch_backend.route
        monkeypatch.setattr(torch_backend, "route", self)

    def __call__(self, logits: Tensor, *rest: Any) -> Any:
        self.calls += 1
        return self._route(-logits if self.drifts else logits, *rest)


def drifted(counted: Counted, model: PlanModule) -> dict[str, Tensor]:
    """Gradients of a step whose router would choose other experts in backward."""
    counted.calls, counted.drifts = 0, False
    model.zero_grad()
    loss = model(*batch()).loss
    counted.drifts = True
    assert loss is not None
    loss.backward()
    return gradients(model)


def test_the_routers_choices_are_kept_and_never_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tie that falls the other way, or scores that changed by rounding, move no row to another expert."""
    counted = Counted(monkeypatch)
    options = {**ONE, "beside": "capacity = factor(1.0)"}
    with moec.launch(moe_plan(**options), device="cpu") as job:
        wanted = drifted(counted, job.build(seed=1))
    for word in ("layer", "experts"):
        with moec.launch(moe_plan(**options, recompute=word), device="cpu") as job:
            found = drifted(counted, job.build(seed=1))
        assert counted.calls == 2
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_choices_that_are_computed_again_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    monkeypatch.setattr(recompute_module, "_is_kept", lambda func: False)
    with moec.launch(moe_plan(**ONE), device="cpu") as job:
        wanted = drifted(counted, job.build(seed=1))
    with moec.launch(moe_plan(**ONE, recompute="layer"), device="cpu") as job:
        found = drifted(counted, job.build(seed=1))
    assert counted.calls == 4
    assert not all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_gate_with_scores_is_an_operator_whose_choices_are_kept() -> None:
    assert {"moec::route", "aten::topk"} <= recompute_module.KEPT


# ---- PyTorch around it ---------------------------------------------------------------------------------------


def plain(job: Job, model: PlanModule) -> dict[str, Tensor]:
    model(*batch()).loss.backward()
    return gradients(model)


def twice(job: Job, model: PlanModule) -> dict[str, Tensor]:
    loss = model(*batch()).loss / 2
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


def by_autograd(job: Job, model: PlanModule) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(model(*batch()).loss, list(named.values()))
    return dict(zip(named, found, strict=True))


def copied(job: Job, model: PlanModule) -> dict[str, Tensor]:
    other = copy.deepcopy(model)
    model(*batch(1))
    return plain(job, other)


def in_a_users_checkpoint(job: Job, model: PlanModule) -> dict[str, Tensor]:
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)
    found = plain(job, model)
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in found.items()}


def whole_in_a_checkpoint(job: Job, model: PlanModule) -> dict[str, Tensor]:
    checkpoint(lambda: model(*batch()).loss, use_reentrant=False).backward()
    return gradients(model)


def after_an_exception(job: Job, model: PlanModule) -> dict[str, Tensor]:
    """Backward runs out of memory in the middle of a layer's recomputation."""
    norm, calls = torch_backend.count_choices, []

    def failing(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:  # two layers in forward, then the last one again
            raise RuntimeError("out of memory")
        return norm(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "count_choices", failing)
        loss = model(*batch()).loss
        with pytest.raises(RuntimeError, match="out of memory"):
            loss.backward()
    model.zero_grad()
    return plain(job, model)


def partly_frozen(job: Job, model: PlanModule) -> dict[str, Tensor]:
    model.layers[1].requires_grad_(False)
    return plain(job, model)


USES = (plain, twice, by_autograd, copied, in_a_users_checkpoint, whole_in_a_checkpoint, partly_frozen)


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_pytorch_around_a_recomputed_layer_works_as_around_any(use: Callable[[Job, PlanModule], Any]) -> None:
    found = {}
    for word in WORDS:
        with moec.launch(moe_plan(**ONE, recompute=word, gate=ONLINE), device="cpu") as job:
            found[word] = use(job, job.build(seed=1))
    for word in WORDS[1:]:
        assert found[word].keys() == found["none"].keys()
        assert all(torch.equal(found[word][name], value) for name, value in found["none"].items()), word


def test_after_an_exception_in_the_middle_of_recomputation_the_next_step_is_right() -> None:
    options = {**ONE, "recompute": "layer"}
    with moec.launch(moe_plan(**options), device="cpu") as job:
        wanted, found = plain(job, job.build(seed=1)), after_an_exception(job, job.build(seed=1))
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_only_the_stated_layers_recompute_and_others_share_their_block() -> None:
    plan = moe_plan(**ONE, depth=5, recompute="layers 2..3 { recompute = layer } layers 3 { recompute = experts }")
    calls = [op for op in plan.program.block("forward").ops if hasattr(op, "block")]
    assert [plan.program.block(op.block).recompute for op in calls] == ["none", "none", "layer", "experts", "none"]
    assert calls[1].block == calls[4].block
    assert plan.program.block(calls[1].block).ops == plan.program.block(calls[2].block).ops


def test_a_layer_in_a_host_recomputes_too() -> None:
    x, found = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0)), []
    for word in WORDS:
        layer = moec.layer(layer_text(ranks=None, tail=f"parallel {{ recompute = {word} }}"))
        given = x.clone().requires_grad_()
        y = layer(given)
        (y.square().sum() + layer.aux_loss).backward()
        size = saved_bytes(lambda layer=layer, given=given: layer(given))
        found.append((size, [y, given.grad, *gradients(layer).values()]))
    sizes = [size for size, _ in found]
    assert sizes[2] < sizes[1] < sizes[0]
    for _, values in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(values, found[0][1], strict=True))
