"""The schema, derived from annotations: words, kinds, bounds, descriptions, sources."""

from __future__ import annotations

from collections.abc import Iterator

from moec.grammar.schema import BlockKind, CallKind, ListKind, ProductKind, fields
from moec.grammar.spec import ClusterText, Device, Gqa, Layer, Level, Model, Moe, Spec, Zipf
from moec.grammar.spec.base import Node, field_names
from moec.grammar.suggest import advice, distance, nearest


def reachable(cls: type[Node], seen: dict[str, type[Node]]) -> dict[str, type[Node]]:
    if cls.word not in seen:
        seen[cls.word] = cls
        for field in fields(cls).values():
            for inner in inner_classes(field.kinds):
                reachable(inner, seen)
    return seen


def inner_classes(kinds: tuple[object, ...]) -> Iterator[type[Node]]:
    for kind in kinds:
        match kind:
            case CallKind():
                yield from kind.classes.values()
            case BlockKind() | ProductKind():
                yield kind.cls
            case ListKind():
                yield from inner_classes(kind.items)


ALL = reachable(Device, reachable(ClusterText, reachable(Spec, {})))


def test_fields_are_known_by_the_words_they_are_written_by() -> None:
    assert list(fields(ClusterText)) == ["from", "nodes", "device", "level"]
    assert list(fields(Layer)) == ["attention", "ffn", "moe"]
    assert "layers" in fields(Model)
    assert "name" not in fields(Level)
    assert fields(Zipf)["s"].required


def test_bounds_units_and_defaults_come_from_the_models() -> None:
    (number,) = fields(Level)["bandwidth"].kinds
    assert str(number.unit) == "bytes/s"  # type: ignore[union-attr]
    assert [str(bound) for bound in fields(Level)["size"].kinds[0].bounds] == ["at least 1"]  # type: ignore[union-attr]
    assert fields(Gqa)["head_dim"].default is None
    assert not fields(Moe)["balance"].required


def test_every_field_and_model_is_described() -> None:
    for cls in ALL.values():
        assert cls.__doc__
        assert cls.source or cls.form != "call", f"{cls.word}: where was it described first?"
        assert all(field.description for field in fields(cls).values() if cls is not Spec and not field.block)


def test_no_field_hides_what_every_node_has() -> None:
    common = {name for name in vars(Node) if not name.startswith("__")}
    for cls in ALL.values():
        assert not common & set(field_names(cls))


def test_the_nearest_name_is_a_plausible_slip() -> None:
    assert nearest("haeds", ["heads", "kv_heads"]) == "heads"
    assert nearest("swigl", ["swiglu", "gelu"]) == "swiglu"
    assert nearest("Softmax", ["softmax", "sigmoid"]) == "softmax"
    assert nearest("foo", ["heads", "rope"]) is None
    assert nearest("x", ["y"]) is None
    assert distance("ab", "ba", 2) == 1
    assert distance("kitten", "sitting", 3) == 3
    assert distance("a", "abcdef", 2) == 3


def test_advice_lists_what_is_allowed() -> None:
    assert advice("rops", ["rope", "heads"]) == "did you mean `rope`? allowed here: heads, rope"
    assert advice("zzz", []) == ""
