"""Limits on a Program's text, and the form of names. A reader checks both before any type rule runs."""

from __future__ import annotations

import keyword
import re

MAX_TEXT = 64 * 2**20
"""Characters of a text."""
MAX_LINE = 2**20
"""Characters of a line. `add` over the balance terms of 10,000 layers has 150,000."""
MAX_BLOCKS = 10_010
"""Blocks: the language allows 10,000 layers, and `forward` and the losses are blocks too."""
MAX_LAYER = 999_999
"""The highest number of a layer."""
MAX_MESHES = 10_001
MAX_MICROBATCHES = 2**31
MAX_STAGES = 10_000
MAX_AXES = 64
MAX_RANKS = 2**20
MAX_OPS = 100_000
"""Ops of one block."""
MAX_EXPANDED_OPS = 1_000_000
"""Ops of a Program; the ops of a block count once per call. The language's largest model, 10,000 layers with every
feature, has 670,000."""
MAX_OPERANDS = 100_000
"""Operands, results or attributes' items of one op, inputs or parameters of one block."""
MAX_RANK = 8
"""Dims of a shape."""
MAX_DIM = 2**31
MAX_ELEMENTS = 2**60
"""Elements of a value, over its constant dims."""
MAX_DIGITS = 19
"""Digits of an integer: those of 2⁶³."""
MAX_NESTING = 4
"""Lists inside one another in an attribute."""
MAX_NAME = 100
MAX_QUOTED = 1_000
"""Characters of a Program's name or of a file's."""
MAX_SOURCE_LINE = 2**31
MAX_SETTING = 2**62

MAX_LABEL = 60_000
LABEL = r"[a-z][a-z0-9_.\[\], ]*"
"""Names of blocks and meshes: `layers[4..31]`, `experts[1..23 step 2]`."""
AXIS = r"[a-z]{1,10}"

_NAME = re.compile(r"[a-z][a-z0-9_]*+(\.[a-z0-9][a-z0-9_]*+)*+")

# fmt: off
MODULE_ATTRIBUTES = frozenset({
    "add_module", "apply", "bfloat16", "buffers", "call_super_init", "children", "compile", "cpu", "cuda", "double",
    "dump_patches", "eval", "extra_repr", "float", "forward", "get_buffer", "get_extra_state", "get_parameter",
    "get_submodule", "half", "ipu", "load_state_dict", "modules", "mtia", "named_buffers", "named_children",
    "named_modules", "named_parameters", "parameters", "register_backward_hook", "register_buffer",
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook", "register_load_state_dict_post_hook", "register_load_state_dict_pre_hook",
    "register_module", "register_parameter", "register_state_dict_post_hook", "register_state_dict_pre_hook",
    "requires_grad_", "set_extra_state", "set_submodule", "share_memory", "state_dict", "to", "to_empty", "train",
    "training", "type", "xpu", "zero_grad",
})
# fmt: on
"""Public attributes of `torch.nn.Module`, which a parameter's name must not replace."""

_RESERVED = MODULE_ATTRIBUTES.union(keyword.kwlist)


def is_setting_name(text: str) -> bool:
    """Whether `text` may name a setting. Settings are not module attributes, so no name is reserved."""
    return len(text) <= MAX_NAME and text.isascii() and text.isalpha() and text.islower()


def is_name(text: str) -> bool:
    """Whether `text` may name a value or a parameter: lower case, dotted, with no reserved or private part."""
    return len(text) <= MAX_NAME and bool(_NAME.fullmatch(text)) and _RESERVED.isdisjoint(text.split("."))
