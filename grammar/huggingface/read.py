"""A `config.json`, or the dict of one, to a `Spec`. Needs neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moec.grammar.checking.rules import check
from moec.grammar.checking.supported import unsupported
from moec.grammar.diagnostics import Diagnostic, DiagnosticError, Severity, diagnose
from moec.grammar.folder_kinds import HUGGING_FACE
from moec.grammar.huggingface.around import DECODERS, TEXT, decoder_config
from moec.grammar.huggingface.balance_note import note_balance
from moec.grammar.huggingface.config import Config
from moec.grammar.huggingface.families import BY_TYPE
from moec.grammar.huggingface.family import Family
from moec.grammar.huggingface.quantised import READS, method_of, way_out
from moec.grammar.resolve.files import read_source, source_of
from moec.grammar.source import Source, Span
from moec.grammar.spec import Cluster, Device, Level, Model, Spec
from moec.grammar.suggest import meant

CONFIG = HUGGING_FACE
DOCS = "docs/huggingface.md lists every architecture"

INERT = frozenset(
    [
        "architectures",
        "model_type",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "initializer_range",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "eod_token_id",
        "decoder_start_token_id",
        "output_router_logits",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "router_aux_loss_coef",
        "aux_loss_alpha",
        "seq_aux",
        "ep_size",
        "pretraining_tp",
        "_name_or_path",
        "name_or_path",
        "auto_map",
        "quantization_config",
        "attn_implementation",
        "experts_implementation",
        "_attn_implementation",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "chunk_size_feed_forward",
        "prefix",
        "finetuning_task",
        "id2label",
        "label2id",
        "task_specific_params",
        "problem_type",
        "tokenizer_class",
        "is_encoder_decoder",
        "is_decoder",
        "add_cross_attention",
        "tie_encoder_decoder",
        "pruned_heads",
        "torchscript",
        "use_bfloat16",
        "cross_attention_hidden_size",
        "begin_suppress_tokens",
        "suppress_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "output_scores",
        "return_dict_in_generate",
        "tf_legacy_loss",
        "num_beam_groups",
        "diversity_penalty",
        "attention_dropout_prob",
        "_experts_implementation",
        "for_sampling",
        "model_max_length",
    ]
)
"""Keys of every config that do not change what the network computes in evaluation."""


@dataclass(frozen=True, slots=True)
class Imported:
    """A model of Hugging Face as moec's: the Spec, the family that names its tensors, the config, and warnings.

    `inside`: it is the decoder inside of another model, whose files have more; `config` is the decoder's.
    """

    spec: Spec
    family: Family
    config: Mapping[str, Any]
    notes: tuple[Diagnostic, ...]
    inside: bool = False


ConfigSource = str | Path | Mapping[str, Any] | tuple[Mapping[str, Any], Source]
"""A folder, a file, a dict, or a dict with the text that it was read from."""


def read_config(source: ConfigSource) -> Imported:
    """The model of a folder with a `config.json`, of such a file, or of its dict.

    The cluster is one CPU process: replace it before compiling for another. Raises `DiagnosticError`: MOE0900 where
    there is no config, MOE0901 for an architecture that moec does not know, MOE0902 for keys that are missing or have a
    wrong kind of value, MOE0903 for what moec cannot express; all of 0902 and 0903 at once.
    """
    values: Mapping[str, Any]
    text: Source | None
    if isinstance(source, tuple):
        values, text = source
    else:
        values, text = (source, None) if isinstance(source, Mapping) else _parsed(Path(source))
    whole = Config(values, text)
    config = decoder_config(whole)
    family = _family(config)
    _note_files(whole)
    model = _model(family, config)
    note_balance(whole, model)
    config.notes += [note for note in whole.notes if note not in config.notes]
    spec = Spec(model=model, cluster=LOCAL)
    wrong = [diagnostic for diagnostic in check(spec) if diagnostic.severity is Severity.ERROR] + unsupported(spec)
    if wrong:
        raise DiagnosticError([_config_diagnostic(config, diagnostic) for diagnostic in wrong])
    notes = (*config.all_notes(), *config.unread(INERT | family.ignored))
    return Imported(spec, family, dict(config.values), notes, inside=config is not whole)


GGUF = "GGUF is llama.cpp's format, and moec reads a `config.json` with safetensors"
NO_GGUF = "download the model that the file was made of: `hf download MODEL --local-dir DIR`"

LOCAL = Cluster(
    name="local",
    device=Device(name="host", kind="cpu", memory=float(1 << 50), bandwidth=1e10),
    levels=(Level(name="process", size=1),),
)
"""One process, whose memory no plan exceeds: the caller names the cluster."""


def _parsed(path: Path) -> tuple[Mapping[str, Any], Source]:
    """The config at `path`, with its text for diagnostics."""
    try:
        if path.suffix == ".gguf" or (path.is_dir() and not (path / CONFIG).exists() and any(path.glob("*.gguf"))):
            raise DiagnosticError([diagnose("MOE0900", None, f"{path}: {GGUF}", help=NO_GGUF)])
        file = path / CONFIG if path.is_dir() else path
        is_other = file.exists() and not file.is_file()
    except OSError as error:  # a name that is too long
        raise DiagnosticError([diagnose("MOE0900", None, f"{str(path)[:60]}…: {error.strerror}")]) from None
    if is_other:  # a pipe would wait for ever
        raise DiagnosticError([diagnose("MOE0900", None, f"{file} is no file")])
    source, wrong = read_source(file, str(file))
    if source is None:
        reason = wrong[0].message or wrong[0].title
        help = f"give a model's folder or its `{CONFIG}`; `hf download MODEL --local-dir DIR` gets one"
        raise DiagnosticError([diagnose("MOE0900", None, f"{file}: {reason}", help=help)])
    return parsed_text(source)


def parsed_config(content: bytes, name: str) -> tuple[Mapping[str, Any], Source]:
    """The config in `content`, called `name` in diagnostics. Raises MOE0900."""
    source, wrong = source_of(content, name)
    if source is None:
        raise DiagnosticError([diagnose("MOE0900", None, f"{name}: {wrong[0].message or wrong[0].title}")])
    return parsed_text(source)


def parsed_text(source: Source) -> tuple[Mapping[str, Any], Source]:
    """The object of a JSON text. Raises MOE0900 for another text."""
    try:
        values = json.loads(source.text, parse_constant=float)
    except (ValueError, RecursionError) as error:
        at = getattr(error, "pos", 0)
        message = f"it is not JSON: {getattr(error, 'msg', 'nested too deeply')}"
        raise DiagnosticError([diagnose("MOE0900", Span(source, at, min(at + 1, len(source.text))), message)]) from None
    if not isinstance(values, dict):
        raise DiagnosticError([diagnose("MOE0900", Span(source, 0, 0), "it is JSON, but no object with keys")])
    return values, source


def _family(config: Config) -> Family:
    """The family of the config's `model_type`. Raises MOE0901."""
    word = config.word("model_type")
    config.require_sound()
    family = BY_TYPE.get(word)
    if family is not None:
        return family
    from moec.grammar.huggingface.kept_out import AROUND_KEPT_OUT, KEPT_OUT

    key, inner = _decoder_in(config)
    inner = inner or AROUND_KEPT_OUT.get(word, "")
    if word in KEPT_OUT:
        message, help = f"moec cannot express `{word}`: {KEPT_OUT[word]}", DOCS
    elif inner in KEPT_OUT:
        message, help = f"moec cannot express `{inner}`, the decoder of `{word}`: {KEPT_OUT[inner]}", DOCS
    elif inner in BY_TYPE or inner in DECODERS:
        message = f"moec imports `{inner}`, the decoder of `{word}`, but not out of this model"
        help = f"`moec.from_hf(config[{key!r}])` reads the decoder, `moec.load_hf(module, model)` its weights"
    else:
        best = meant(word, BY_TYPE)
        message = f'`{config.named("model_type")}` is "{word}"'
        help = f"did you mean `{best}`? {DOCS}" if best else DOCS
    if config.has("auto_map"):
        message += "; its own code (`auto_map`) is never run"
    raise DiagnosticError([diagnose("MOE0901", config.span("model_type"), message, help=help)])


def _decoder_in(config: Config) -> tuple[str, str]:
    """The key of an inner config with a model type of text, `text_config` first, and that type."""
    for key in sorted(config.values, key=lambda key: key != TEXT):
        value = config.values[key]
        has_text = isinstance(value, Mapping) and (key == TEXT or "vocab_size" in value)
        inner = value.get("model_type") if has_text else None
        if isinstance(inner, str):
            return key, inner
    return "", ""


def _note_files(config: Config) -> None:
    """Warns of remote code and quantised weights, of which an architecture needs neither."""
    if config.has("auto_map"):
        config.note("auto_map", "code of the model's folder is not run: moec has this architecture itself")
    if config.has("quantization_config"):
        method = method_of(config.values["quantization_config"])
        key = config.named("quantization_config")
        config.warn(
            "quantization_config", f"`{key}`: its weights are quantised ({method}), and {READS}: {way_out(method)}"
        )


def _model(family: Family, config: Config) -> Model:
    """The model that the family reads. Raises all mistakes at once."""
    from pydantic import ValidationError

    try:
        model = family.model_of(config)
    except (ValidationError, ArithmeticError, ValueError) as error:
        config.require_sound()  # a placeholder does not fit
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        field = ".".join(str(part) for part in first["loc"])
        message = f"its keys make no model of moec's: {field + ' ' if field else ''}{first['msg']}"
        raise DiagnosticError([diagnose("MOE0903", config.span("model_type"), message)]) from error
    config.require_sound()
    return model


def _config_diagnostic(config: Config, diagnostic: Diagnostic) -> Diagnostic:
    """The diagnostic of a broken rule of the language, at the config."""
    message = f"{diagnostic.title}: {diagnostic.message}" if diagnostic.message else diagnostic.title
    return diagnose("MOE0903", config.span("model_type"), f"{diagnostic.code}, {message}", help=diagnostic.help)
