"""Makes Triton's interpreter nearly twice as fast: it leaves out work whose result nothing reads."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.language as tl
    from triton.runtime import interpreter

    # It computes every sum and product of integers twice, to look for overflow, and tells of one only when it debugs.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)

    # Each call of a kernel or of a device function replaces the language's builtins. Here they stay replaced.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    nothing_to_restore = interpreter._LangPatchScope()
    interpreter._patch_lang = lambda fn: nothing_to_restore

    _dtypes: dict[str, Any] = {}
    _get_np_dtype = interpreter._get_np_dtype

    def _kept_dtype(of: Any) -> Any:
        """The dtype of numpy, which Triton looks up in a dict that it makes anew each time."""
        scalar = of.scalar
        if scalar.name not in _dtypes:
            _dtypes[scalar.name] = _get_np_dtype(scalar)
        return _dtypes[scalar.name]

    interpreter._get_np_dtype = _kept_dtype
