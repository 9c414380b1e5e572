"""Plain data as JSON and tensors. Nothing is pickled, and reading makes nothing but plain data.

A tree is null, a bool, a number, a string, or an object with one key that says what it is:
`{"list": […]}`, `{"dict": [[key, value], …]}`, `{"tensor": 3}`, `{"float": "nan"}`.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from moec.runtime.checkpoint.format.parts import DTYPE_NAMES
from moec.runtime.errors import JobError

MAX_DEPTH = 50
MAPPINGS: dict[str, type] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple}
_WORDS = {cls: word for word, cls in (MAPPINGS | SEQUENCES).items()}
DATA = "docs/checkpoints.md has data that needs no position to go on; a StatefulDataLoader of torchdata has one"
SUPPORTED = "None, bools, numbers, strings, bytes, tensors, and lists, tuples and dicts of them"


def encode(value: Any, place: str, tensors: list[Tensor], depth: int = 0) -> Any:
    """`value` as a tree; its tensors are appended to `tensors`. `place` names it in messages: `extra["epoch"]`.

    Raises `JobError` MOE0808 for a value of any other type.
    """
    kind = type(value)
    if depth > MAX_DEPTH:
        raise _refusal(f"{place} is nested more than {MAX_DEPTH} deep, or contains itself")
    if kind is str and not _is_text(value):
        raise _refusal(f"{place} is a string with half a surrogate pair")
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is bytes:
        return {"bytes": value.hex()}
    if isinstance(value, Tensor):
        return {"tensor": _number_tensor(value, place, tensors)}
    if kind in (list, tuple):
        items = [encode(item, f"{place}[{i}]", tensors, depth + 1) for i, item in enumerate(value)]
        return {_WORDS[kind]: items}
    if kind in _WORDS:
        pairs = []
        for key, item in value.items():
            if key is not None and (type(key) not in (bool, int, str) or (type(key) is str and not _is_text(key))):
                raise _refusal(f"{place} has a key of type {type(key).__qualname__}: {key!r:.80}")
            pairs.append([key, encode(item, f"{place}[{key!r:.80}]", tensors, depth + 1)])
        return {_WORDS[kind]: pairs}
    if isinstance(value, DataLoader):
        raise JobError("MOE0808", f"{place} is a DataLoader of torch, which has no position", DATA)
    raise _refusal(f"{place} is of type {kind.__module__}.{kind.__qualname__}")


def _number_tensor(tensor: Tensor, place: str, tensors: list[Tensor]) -> int:
    if isinstance(tensor, DTensor) or tensor.is_meta or tensor.is_sparse or tensor.is_quantized:
        raise JobError(
            "MOE0808",
            f"{place} is a part of a sharded tensor, or another tensor that is not plain",
            "a module of the plan, such as an average of the model, is a model: `job.save(other_path, average.module)`",
        )
    if tensor.dtype not in DTYPE_NAMES:
        raise _refusal(f"{place} is a tensor of {tensor.dtype}")
    tensors.append(tensor.detach())
    return len(tensors) - 1


def _is_text(value: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def _refusal(message: str) -> JobError:
    return JobError("MOE0808", message, f"a checkpoint stores {SUPPORTED}; give it the parts that make up the value")


def decode(tree: Any, tensor: Callable[[int], Tensor]) -> Any:
    """The value of a tree; `tensor` gives each tensor. Raises `ValueError` for JSON that `encode` does not write."""
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if not isinstance(tree, dict) or len(tree) != 1:
        raise ValueError("a tree is a scalar or an object with one key")
    ((word, content),) = tree.items()
    if word == "float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if word == "bytes" and isinstance(content, str):
        return bytes.fromhex(content)
    if word == "tensor" and type(content) is int:
        return tensor(content)
    if not isinstance(content, list):
        raise ValueError(f"there is no {str(word)[:20]!r}")
    if word in SEQUENCES:
        return SEQUENCES[word](decode(item, tensor) for item in content)
    if word in MAPPINGS:
        return MAPPINGS[word]({_key(pair): decode(pair[1], tensor) for pair in content})
    raise ValueError(f"there is no {str(word)[:20]!r}")


def _key(pair: Any) -> Any:
    if not isinstance(pair, list) or len(pair) != 2 or isinstance(pair[0], dict | list | float):
        raise ValueError("a dict is a list of keys and values")
    return pair[0]
