"""Rules between values that are valid alone but not together.

Each rule names both places. The resolver applies a rule as soon as it has the values, so that other mistakes do not
hide it; `check` applies all rules to a Spec made in Python. The `place` pass checks degrees and ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from moec.grammar.checking.attention_rules import latent, rotary, windows
from moec.grammar.checking.capacity_rules import capacities
from moec.grammar.checking.group_gate_rules import group_gates
from moec.grammar.checking.guest_rules import without_effect
from moec.grammar.checking.head_mixture_rules import head_mixture
from moec.grammar.checking.mixture_rules import gated, mixture
from moec.grammar.checking.model_rules import model_forms
from moec.grammar.checking.parallel_rules import microbatches_and_recomputation
from moec.grammar.checking.pooled_rules import balance_over_layers
from moec.grammar.checking.rank_rules import degrees_without_experts, dependent_on_ranks
from moec.grammar.checking.token_rules import token_inputs
from moec.grammar.checking.topology_rules import topology_problems
from moec.grammar.checking.training_rules import frozen_parts, measured_lists, optimizer_options
from moec.grammar.device_groups import device_groups
from moec.grammar.diagnostics.codes import diagnose
from moec.grammar.diagnostics.diagnostic import Diagnostic, labels_at
from moec.grammar.source import Span
from moec.grammar.spec import Attention, LayerModule, Mixture, Mla, Moa, Moe, Spec, TokenEmbedding
from moec.grammar.suggest import advice, divisor_near


def check(spec: Spec) -> list[Diagnostic]:
    """Every rule, over a whole Spec."""
    model, train = spec.model, spec.train
    problems = over_parts(spec)
    if not spec.has_model:
        return problems
    if len(model.layers) != model.depth:
        message = f"`depth` is {model.depth}, and there are {len(model.layers)} layers"
        problems.append(diagnose("MOE0306", model.span("depth"), message))
    for layer in {id(layer): layer for layer in model.layers}.values():
        if not layer.ffn and not layer.moe:
            problems.append(diagnose("MOE0305", layer.span(), "a layer has no `ffn` or `moe`"))
        if layer.ffn and layer.moe:
            problems.append(diagnose("MOE0309", layer.span("moe"), "a layer has both"))
        problems += attention(layer.attention, model.dim, model.span("dim"))
        problems += gated(layer.ffn, layer.moe)
        if layer.moe:
            problems += mixture(layer.moe)
    for block in spec.parallel.layers:
        for first, last in ((block.layers[0], block.layers[-1]),) if block.layers else ():
            problems += selected(first, last, block.span(), model.depth, model.span("depth"))
    if model.length is not None:  # images have no ids, and `model_forms` compares their lengths
        return problems
    if isinstance(model.embedding, TokenEmbedding) and model.vocab is not None:
        problems += special_ids(model.embedding, model.vocab, model.span("vocab"))
    sequence = (train.sequence, train.span("sequence")) if train and train.sequence else None
    problems += lengths((model.context, model.span("context")), sequence, model.span())
    return problems


def over_parts(spec: Spec) -> list[Diagnostic]:
    """The rules between distant parts of a file, which need the whole Spec."""
    return [
        *modules(spec),
        *capacities(spec),
        *group_gates(spec),
        *topology_problems(spec),
        *windows(spec),
        *device_groups(spec),
        *dependent_on_ranks(spec),
        *degrees_without_experts(spec),
        *microbatches_and_recomputation(spec),
        *model_forms(spec),
        *optimizer_options(spec.train),
        *measured_lists(spec.train),
        *frozen_parts(spec),
        *token_inputs(spec),
        *balance_over_layers(spec),
        *without_effect(spec),
    ]


def special_ids(embedding: TokenEmbedding, vocab: int, vocab_span: Span | None) -> Iterator[Diagnostic]:
    """The ids of padding and of separators are in the vocabulary."""
    for name, id, use in (
        ("padding", embedding.padding_id, "pads with"),
        ("separator", embedding.separator, "ends a text with"),
    ):
        if id is not None and id >= vocab:
            yield diagnose(
                "MOE0324",
                embedding.span(name),
                f"ids are 0 to {vocab - 1}",
                labels=labels_at((vocab_span, f"{vocab} ids")),
                help=f"give the id that your tokenizer {use}, or a larger `vocab` that holds it",
            )


def attention(node: Attention, dim: int | None, dim_span: Span | None) -> Iterator[Diagnostic]:
    """Heads against each other and against the model's width (`None` where that is not known)."""
    if isinstance(node, Moa):
        yield from head_mixture(node)
    kv_heads = getattr(node, "kv_heads", None)
    # What a width of equal heads leaves over; heads with a width of their own leave nothing.
    left = 0 if isinstance(node, Mla) or node.head_dim is not None or dim is None else dim % node.heads
    heads = divisor_near(dim, node.heads) if dim and left else node.heads
    if kv_heads and node.heads % kv_heads:
        help = f"set `kv_heads = {divisor_near(heads, kv_heads)}`"
        if heads != node.heads:
            help = f"with `heads = {heads}`, {help}" if heads % kv_heads else f"`heads = {heads}` mends this too"
        yield diagnose(
            "MOE0301",
            node.span("kv_heads"),
            f"{node.heads} query heads cannot share {kv_heads} evenly",
            labels=labels_at((node.span("heads"), f"{node.heads} query heads")),
            help=help,
        )
    if isinstance(node, Mla):
        yield from latent(node)
        if node.rope and node.rope_dim % 2:
            label = labels_at((node.span("rope_dim"), f"{node.rope_dim} dimensions have positions"))
            help = f"set `rope_dim = {node.rope_dim + 1}`"
            yield diagnose("MOE0303", node.span("rope"), "it turns pairs of dimensions", labels=label, help=help)
        elif node.rope and node.rope.fraction == 1:
            yield from rotary(node.rope, node.rope_dim, node.span("rope_dim"))
        return
    if left:
        yield diagnose(
            "MOE0302",
            node.span("heads"),
            f"{dim} / {node.heads} leaves {left} over",
            labels=labels_at((dim_span, f"the model is {dim} wide")),
            help=f"set `heads = {heads}`, or give the heads' width with `head_dim`",
        )
        return
    width = node.head_dim or (dim // node.heads if dim else None)
    if node.rope and width:
        yield from rotary(node.rope, width, node.span("head_dim") if node.head_dim else node.span("heads"))
    if node.rope and width and width % 2 and node.rope.fraction == 1:
        of_what = f"heads are {width} wide" if node.head_dim else f"{dim} / {node.heads} makes heads {width} wide"
        yield diagnose(
            "MOE0303",
            node.span("rope"),
            "it turns pairs of dimensions",
            labels=labels_at((node.span("head_dim" if node.head_dim else "heads"), of_what)),
            help=f"set `head_dim = {width + 1}`",
        )


def modules(spec: Spec) -> Iterator[Diagnostic]:
    """Mixtures by name: declared, of the model's width, not inside themselves; and one subject in a file."""
    declared = {module.name: module for module in spec.layers}
    inside = {name: list(_mixtures(module.moe)) for name, module in declared.items()}
    layers = list({id(layer): layer for layer in spec.model.layers}.values()) if spec.has_model else []
    used = [one for layer in layers if layer.moe for one in _mixtures(layer.moe)]
    used += [one for mixtures in inside.values() for one in mixtures]
    for one in used:
        if one.name not in declared:
            help = advice(one.name, declared) or f'declare it: `layer "{one.name}" {{ moe {{ … }} }}`'
            yield diagnose("MOE0201", one.span("name"), f"no `layer` is called `{one.name}`", help=help)
    circular = _circular({name: {one.name for one in references} for name, references in inside.items()})
    for module in declared.values():
        if module.name in circular:
            message = f"`{module.name}` contains itself"
            yield diagnose("MOE0217", module.span("name"), message)
        yield from gated(None, module.moe)
        yield from mixture(module.moe)
        if spec.has_model and module.dim is not None and module.dim != spec.model.dim:
            label = labels_at((spec.model.span("dim"), f"the model is {spec.model.dim} wide"))
            yield diagnose("MOE0316", module.span("dim"), f"{module.dim} wide", labels=label, help="leave `dim` out")
    if not spec.has_model:
        yield from _subject(spec, {one.name for one in used})


def _subject(spec: Spec, used: set[str]) -> Iterator[Diagnostic]:
    """Without a model the subject is the one layer that no other contains."""
    subjects: list[LayerModule] = [module for module in spec.layers if module.name not in used]
    for other in subjects[1:]:
        label = labels_at((subjects[0].span(), "this one could be the file's subject"))
        yield diagnose("MOE0205", other.span(), "so could this one", labels=label, help="a file has one subject")
    for module in subjects[:1]:
        if module.dim is None:
            yield diagnose("MOE0203", module.span(), "a layer by itself needs `dim`")


def _mixtures(moe: Moe) -> Iterator[Mixture]:
    return (part.body for part in moe.parts if isinstance(part.body, Mixture))


def _circular(inside: dict[str, set[str]]) -> set[str]:
    """The names that contain themselves.

    They remain after removing, again and again, names that contain no other, and then names that no other contains.
    """
    left = {name: {inner for inner in references if inner in inside} for name, references in inside.items()}
    for _ in range(2):
        around: dict[str, set[str]] = {name: set() for name in left}
        for name, references in left.items():
            for inner in references:
                around[inner].add(name)
        todo = [name for name, references in left.items() if not references]
        while todo:
            gone = todo.pop()
            del left[gone]
            for outer in around.pop(gone):
                left[outer].discard(gone)
                if not left[outer]:
                    todo.append(outer)
        left = {name: around[name] for name in left}  # the other way round
    return set(left)


def lengths(
    context: tuple[int | None, Span | None], sequence: tuple[int, Span | None] | None, model: Span | None
) -> Iterator[Diagnostic]:
    """`context` against `train.sequence`; each is (value, place), and one of them must be there."""
    if sequence is None:
        if context[0] is None:
            help = "give `context` in `model`, or `sequence` in a `train` block"
            yield diagnose("MOE0308", model, "neither `context` nor `train.sequence`", help=help)
    elif context[0] is not None and sequence[0] > context[0]:
        yield diagnose(
            "MOE0307",
            sequence[1],
            f"sequences of {sequence[0]}",
            labels=labels_at((context[1], f"a context of {context[0]}")),
            help=f"make `context` at least {sequence[0]}, or `sequence` at most {context[0]}",
        )


def selected(first: int, last: int, span: Span | None, depth: int, depth_span: Span | None) -> Iterator[Diagnostic]:
    """A selector picks existing layers."""
    if first > last:
        yield diagnose("MOE0306", span, f"{first}..{last} is no layer: a range goes upwards")
    elif last >= depth:
        help = f"a range includes its last layer, and the last one is {depth - 1}"
        if first == last == depth:
            help = f"for all layers write `layers {{ … }}`; the last one is {depth - 1}"
        yield diagnose(
            "MOE0306",
            span,
            f"layers are numbered 0..{depth - 1}",
            labels=labels_at((depth_span, f"{depth} layers")),
            help=help,
        )
