"""A Program as one `torch.nn.Module`, sharded or not, for training scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moec.codegen.emit import Function, emit_function, site_of
from moec.grammar.printer import set_lines
from moec.grammar.spec import Spec
from moec.passes.guests.place_guests import guests_of, homes_only
from moec.passes.ir import STEP, Program, Role
from moec.passes.ir.interface import forwards, scalar_blocks, stages_of_layers, taken_role
from moec.runtime import ops  # noqa: F401  (registers torch.ops.moec.*)
from moec.runtime.calls import called
from moec.runtime.errors import JobError
from moec.runtime.guards.every_guard import look_at
from moec.runtime.guards.guard import LogitsGiven, ModelRecomputed, PassBegins, WrapperAsks
from moec.runtime.inputs.batches import ImageLimits, Limits, device_of
from moec.runtime.inputs.extra_inputs import AcceptedInputs, ExtraInputs
from moec.runtime.inputs.forward_checks import (
    counts_own_tokens,
    same_shape,
)
from moec.runtime.inputs.settings import complaint_about, initial_values, same_on_ranks
from moec.runtime.model.counters import Counters
from moec.runtime.model.forward_agreement import require_batch
from moec.runtime.model.generation.decoder import DecodingGraphs
from moec.runtime.model.generation.generate import Generated, generate
from moec.runtime.model.generation.sampling import Sampling
from moec.runtime.model.model_output import ModelOutput
from moec.runtime.model.origin import ModuleOrigin
from moec.runtime.model.plan_layer import Layer
from moec.runtime.model.run import Run
from moec.runtime.model.split_products import split_products
from moec.runtime.model.stage_evaluation import evaluate, require_evaluation
from moec.runtime.model.stage_pass import LayerElsewhere, counts_by_layer, of_whole_model, place_of_part, stage_in_words
from moec.runtime.model.state_updates import Updates
from moec.runtime.model.step_counts import StepCounts, is_step_pass
from moec.runtime.model.step_module import StepModule
from moec.runtime.model.top_level import TopLevel
from moec.runtime.refused_derivatives import in_vmap
from moec.runtime.weights.backward_pass import in_backward
from moec.runtime.weights.home import Home
from moec.runtime.weights.open_step import OpenStep
from moec.runtime.weights.state_dict_signing import refuse_foreign_state, sign_state


class PlanModule(StepModule):
    """This rank's part of a model. Parameters are named as in the plan (`layers.3.attention.q.weight`).

    Trained parameters are fp32 masters whatever the compute dtype; a job has frozen ones in the compute dtype. On
    several ranks they are DTensors. In evaluation mode (`eval()`) experts have the file's capacity for evaluation.
    """

    layers: nn.ModuleList

    def __init__(
        self, spec: Spec, program: Program, limits: Limits | ImageLimits, home: Home, *, float64: bool = False
    ) -> None:
        super().__init__()
        self._origin = ModuleOrigin(spec, program)
        self.settings = initial_values(home.seed)
        """Numbers that change without compiling again: `seed` and `step`. `set` changes them."""
        self.run = Run()
        """The training run that its checkpoints belong to. Current on rank 0 alone."""
        self._home, self.limits = home, limits
        self._open_step, self._counts = OpenStep(in_pipeline=len(program.stages) > 1), StepCounts()
        self.seen: set[object] = set()
        self.has_accumulated = False
        self._agreed_pass: tuple[Tensor, bool] | None = None
        self.layers = nn.ModuleList()
        routers: dict[int, list[str]] = {stage: [] for stage in home.stages}
        stage_of, functions = stages_of_layers(program), dict[str, Function]()
        at_home, functions_at_home = homes_only(program), dict[str, Function]()
        for layer in program.layers:
            stage, words = stage_of[layer.number], "\n".join(set_lines(spec.model.layers[layer.number]))
            if stage not in routers:
                self.layers.append(LayerElsewhere(layer.number, stage_in_words(program.stages[stage])))
                continue
            if layer.body not in functions:
                functions[layer.body] = emit_function(
                    program, layer.body, groups=home.groups, float64=float64, ways=home.ways
                )
                if program.splits_backward:
                    split_products(functions[layer.body].module)
                if guests_of(program.body(layer)):
                    functions_at_home[layer.body] = emit_function(
                        at_home, layer.body, groups=home.groups, float64=float64, ways=home.ways
                    )
            function, alone = functions[layer.body], functions_at_home.get(layer.body)
            self.layers.append(Layer(layer.number, function, home, self._open_step, words, alone))
            routers[stage] += [site_of(op, layer.number) for op in function.routers]
        self.tops = {
            stage: TopLevel(program, stage, sites, home, self, self._open_step, float64=float64)
            for stage, sites in routers.items()
        }
        self._scalars: dict[str, Function] = {
            name: emit_function(program, name, groups=home.groups, float64=float64) for name in scalar_blocks(program)
        }
        self.takes = AcceptedInputs.of(program)
        self.counters = Counters(self._scalars, limits, self.takes)
        self._decoding = DecodingGraphs(at_home, home.groups, float64=float64)
        self.placement_policy, self.homes = None, None
        self._updates = Updates(program, home, float64=float64)
        self.input_role = taken_role(program)
        self.draws = forwards(program)[0].input("sequences") is not None
        self._places_by_shape = counts_own_tokens(program)
        self._one_shape = same_shape(program, "images" if isinstance(limits, ImageLimits) else "tokens")
        self.num_tokens: int | Tensor = 0
        """Tokens of the last forward pass, without padding."""
        self.expert_counts: dict[int, Tensor] = {}
        """Rows that this rank's tokens sent to each expert in the last forward pass: layer → int64 `[experts]`."""
        self.head_counts: dict[int, Tensor] = {}
        """This rank's tokens' choices of each group of attention heads in the last forward pass: layer → int64."""
        self.choices_made: dict[int, Tensor] = {}
        """Choices of this rank's tokens in that pass, of layers where a token may make fewer than k: int64 `[1]`."""
        self.register_state_dict_post_hook(sign_state)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(refuse_foreign_state)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_drop_loads)  # type: ignore[no-untyped-call]

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        routes: Tensor | None = None,
        segments: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> ModelOutput:
        """tokens int64 `[batch, sequence]`, labels of the same shape, already shifted, −100 where ignored.

        `routes`, for a plan with `replay`: the experts of each token, int64 `[batch, sequence, mixtures, k]`, −1 for
        none; without them gates choose. `segments`, for a model that takes them: which of its sequence's texts each
        token belongs to, int64 `[batch, sequence]`, not descending; without them a sequence is one text. `padding`, for
        a model that takes it: bool or int64 `[batch, sequence]`, True or 1 for padding. Of a model of images, `tokens`
        are images `[batch, channels, height, width]` of any floating dtype, and labels classes `[batch]`.

        A pipeline runs evaluations alone, with labels and without gradients; other passes raise MOE0711.

        Raises `JobError` on every rank: for a wrong dtype, shape or id before any collective of the model, and for
        router logits that are NaN or infinite at the end of the pass, before any gradient.
        """
        self._home.require_running()
        in_stages = len(self.program.stages) > 1
        if in_stages:
            require_evaluation(self, labels)
        look_at(PassBegins(self, device_of(tokens).type))
        extra = ExtraInputs(routes, segments, padding)
        reads_values = require_batch(self, tokens, labels, extra)
        if in_stages:
            assert labels is not None
            return evaluate(self, tokens, labels, extra, reads_values=reads_values)
        if in_backward():
            ended_block = self.has_accumulated and self._counts.labels is None
            look_at(ModelRecomputed(self.draws and self.training, ended_block))
        self.num_tokens = self.counters.real_tokens(tokens, extra)
        inputs: dict[Role, Tensor] = {self.input_role: tokens, **self.takes.inputs(extra, tokens)}
        if (sequences := self.sequence_numbers(tokens, labels)) is not None:
            inputs["sequences"] = sequences
        results, complaint = self.tops[0].run(self, inputs, reads_values=reads_values)
        if self.training and self._counts.sequences is None:
            self.next_step()
        logits, balance = results["logits", None, None], results.get(("balance", None, None))
        chosen = results.get(("routes", None, None))
        counted = {} if in_vmap() else results  # vmap has separate counts for each of its examples
        self.expert_counts, self.head_counts, self.choices_made = counts_by_layer(counted)
        if labels is not None and is_step_pass(self.training):
            self._counts.add(labels)
        if self._is_training_step(labels):
            self._updates.add(counted)
            if self.placement_policy is not None and self._counts.sequences is not None:
                self.placement_policy.add(counted)
            self._home.count_pass(tokens, segments, inputs.get("real"))
        aux_loss = None if balance is None else self.aux_loss(balance, inputs.get("real", tokens))
        refuses = reads_values and not self._counts.skips
        if complaint is not None:
            logits = logits * torch.nan  # differentiable: with `skips` backward runs on every rank
        if labels is None:
            if refuses and self.tops[0].routers:
                self._home.checks.require("end of a forward pass", complaint)
            if self.training and self._counts.sequences is None and not self._home.shares_batch:
                look_at(LogitsGiven(logits, self._home.data_size, seen=self.seen))
            return ModelOutput(logits, aux_loss=aux_loss, routes=chosen)
        if complaint is not None:  # the loss sums over all ranks: NaN here is NaN on every rank
            labels = torch.zeros_like(labels)
        loss = self.loss(logits, labels)
        if refuses and loss.isnan():
            self._home.checks.require("end of a forward pass", complaint)
        if is_step_pass(self.training):
            self._counts.add_loss(loss if aux_loss is None else loss + aux_loss)
        total_loss = loss + aux_loss if self.training and aux_loss is not None else loss
        return ModelOutput(logits, total_loss, aux_loss, chosen)

    @of_whole_model
    @called("model.generate", max_length="`max_new_tokens` counts new tokens alone, without those of the prompt")
    def generate(
        self,
        tokens: Tensor | Sequence[Tensor],
        *,
        max_new_tokens: int,
        padding: Tensor | None = None,
        eos: int | Sequence[int] | None = None,
        stop: Sequence[Sequence[int]] | None = None,
        pad: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        sequences: Tensor | None = None,
    ) -> Generated:
        """New tokens for the prompts of this rank: int64 `[batch, sequence]`, or a list of int64 `[length]`.

        `padding` bool or int64 `[batch, sequence]`: True or 1 before or behind a prompt. A sequence ends with an `eos`
        or a `stop`, a run of ids, or after `max_new_tokens`; `pad` (default: `eos`, else 0) fills the result behind it.
        Without a `temperature` each token is that of the largest logit. With one it is drawn by softmax(logits /
        temperature) among the `top_k` best and those whose probabilities add up to `top_p`; it is a function of `seed`,
        the number of its sequence and its place, and does not depend on the rank. `sequences` int64 `[batch]` are these
        numbers (default: those of the ranks' prompts one after the other).

        It computes in evaluation mode and without gradients, and leaves the model's mode as it is. A collective: every
        rank of a job calls it, with its own prompts and the same options; ranks that share sequences with the same
        prompts.

        Raises `JobError` on every rank: MOE0741 for a model that cannot generate, MOE0742 for more tokens than its
        context, MOE0702, MOE0728 and MOE0740 for invalid prompts and options, MOE0708 and MOE0743 for logits that are
        not finite.
        """
        sampling = Sampling(temperature, top_k, top_p, seed)
        return generate(self, tokens, max_new_tokens, padding, (eos, stop, pad), sampling, sequences)

    def extra_repr(self) -> str:
        return self._origin.summary(self._home.signature())

    def _is_training_step(self, labels: Tensor | None) -> bool:
        """Whether this pass is part of a training step: not in evaluation, and not when computed again in backward."""
        # A reentrant checkpoint of the whole model runs its first pass without gradients. In `accumulate` it counts.
        needs_gradient = torch.is_grad_enabled() or (self._counts.labels is not None and labels is not None)
        return self.training and needs_gradient and not in_backward()

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of logits, divided by the labels of the step or of the pass."""
        step_labels, _ = self._counts.divisors(self.training)
        valid = step_labels if step_labels is not None else self.counters.labels(labels)
        loss: Tensor = self._scalars["loss"].module(logits, labels, valid)
        return loss

    def aux_loss(self, balance: Tensor, counted: Tensor) -> Tensor:
        """The balance terms of `balance`, divided by the tokens of the step, or by those of `counted`."""
        _, step_tokens = self._counts.divisors(self.training)
        count = step_tokens if step_tokens is not None else self.counters.tokens(counted)
        aux_loss: Tensor = self._scalars["aux_loss"].module(balance, count)
        return aux_loss

    def sequence_numbers(self, tokens: Tensor, labels: Tensor | None) -> Tensor | None:
        """The number of each sequence in the global batch of the step: int64 `[batch]`, the same for every sharding.

        None for a model that draws nothing. Raises `JobError` if the step has fewer sequences.
        """
        if not self.draws:
            return None
        return self._counts.number_sequences(tokens, self._home.data_rank, advance=self._is_training_step(labels))

    def set(self, **settings: int) -> None:
        """Changes settings: `seed` and `step`, whole numbers from 0 to 2^62, of which random numbers are functions.

        A new `step` is that of `job.steps` too, and at 0 `job.total_tokens` is 0 again; a lower one begins a new run.
        `job.step` adds 1 to `step`; so do `job.accumulate` and, outside of both, each forward pass in training.

        A collective: every rank of a job calls it with the same numbers, or `JobError` is raised on every rank.
        """
        self._home.require_running()
        self._home.checks.require("set", complaint_about(settings), same_on_ranks(settings))
        if STEP.name in settings:
            if settings[STEP.name] < self.settings[STEP.name]:
                self.run = self.run.branch()
            self._home.count_from(settings[STEP.name])
        self.settings.update(settings)

    @property
    def has_aux_loss(self) -> bool:
        """Whether the model has balance terms."""
        return "aux_loss" in self._scalars

    @property
    def spec(self) -> Spec:
        """The Spec of the file."""
        return self._origin.spec

    @property
    def program(self) -> Program:
        """The Program of its graphs."""
        return self._origin.program

    def __getattr__(self, name: str) -> Any:
        """Raises `AttributeError`, which says where a part of another pipeline stage is."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            program = self.__dict__["_origin"].program if "_origin" in self.__dict__ else None
            if program is not None and (place := place_of_part(program, name)):
                raise AttributeError(f"{error}: it is in {place}") from None
            raise

    # ---- for PyTorch -------------------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles each distinct layer and the losses with `torch.compile` and its options; nothing else.

        Raises `JobError` where a schedule computes gradients of weights apart: a compiled layer computes all at once.
        """
        if self.program.splits_backward:
            message = f"model.compile() under `schedule = {self.program.schedule}`, which puts gradients of weights off"
            raise JobError("MOE0711", message, "compile under `schedule = one_f_one_b`, which puts off none")
        own = [layer for layer in self.layers if isinstance(layer, Layer)]
        at_home = (layer.homes_only for layer in own if layer.homes_only is not None)
        layer_functions = (*(layer.function for layer in own), *at_home)
        other_functions = (*self._scalars.values(), *self._updates.functions())
        for module in dict.fromkeys(function.module for function in (*layer_functions, *other_functions)):
            module.compile(*args, **kwargs)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> None:
        """Raises `JobError`: DistributedDataParallel reads this attribute of the module that it wraps."""
        look_at(WrapperAsks("DistributedDataParallel"))


def _drop_loads(module: nn.Module, incompatible: object) -> None:
    assert isinstance(module, PlanModule)
    module.drop_loads()
