"""The signatures of the operators that plans may name, against those that torch has for them."""

from __future__ import annotations

import pytest
import torch

from moec.codegen.fx import resolve
from moec.codegen.operators import GETITEM, SIGNATURES
from moec.runtime import operators  # noqa: F401  (registers torch.ops.moec.*)

KINDS = {
    "tensor": {"Tensor", "Optional[Tensor]"},
    "tensor_or_none": {"Optional[Tensor]"},
    "none": {"Optional[Tensor]"},
    "int": {"int", "number", "Optional[int]"},
    "ints": {"List[int]", "Optional[List[int]]"},
    "float": {"float", "number", "Optional[float]"},
    "bool": {"bool"},
    "dtype": {"int"},
    "group": {"str"},
    "score": {"str"},
    "activation": {"str"},
}
"""What a kind of argument may be in torch's own schema, which writes a dtype as an int."""


@pytest.mark.parametrize("target", sorted(SIGNATURES.keys() - {GETITEM}))
def test_a_signature_is_torchs_own(target: str):
    schema = resolve(target)._schema
    given = SIGNATURES[target]
    arguments = [argument for argument in schema.arguments if not argument.kwarg_only]
    for kind, argument in zip(given.positional, arguments, strict=False):
        assert str(argument.type) in KINDS[kind], (argument.name, kind)
    assert len(given.positional) <= len(arguments)
    assert all(argument.has_default_value() for argument in arguments[len(given.positional) :])
    by_name = {argument.name: argument for argument in schema.arguments}
    for name, kind in given.keywords.items():
        assert str(by_name[name].type) in KINDS[kind], name
    required = {a.name for a in schema.arguments if a.kwarg_only and not a.has_default_value()}
    assert required <= given.keywords.keys()


@pytest.mark.parametrize("target", sorted(SIGNATURES.keys() - {GETITEM}))
def test_no_operator_writes_its_inputs(target: str):
    schema = resolve(target)._schema
    assert not schema.is_mutable
    assert isinstance(resolve(target), torch._ops.OpOverload)
