"""Clusters and devices: the library, `from`, `nodes`, and which of several clusters is used."""

from __future__ import annotations

from support.tables import each_row

from moec.grammar import load_text
from moec.grammar.load import Loaded
from moec.grammar.printer import to_text
from moec.grammar.resolve.library import library_names, library_text
from moec.grammar.spec import Cluster, DeviceRates, LevelRates

MODEL = """
model "m" {
  vocab = 256; dim = 64; depth = 1; context = 128
  layers { attention = mha(heads = 4); ffn = gelu(8) }
}
"""

NUMBERLESS = ("clusters/one_rank", "clusters/rtx_4090_pc")


def load(text: str) -> Loaded:
    return load_text(MODEL + text)


def cluster(text: str) -> Cluster:
    return load(text).unwrap().cluster


def codes(text: str) -> list[str]:
    return [diagnostic.code for diagnostic in load(text).diagnostics]


def sizes(found: Cluster) -> dict[str, int]:
    return {level.name: level.size for level in found.levels}


def test_without_a_cluster_there_is_one_rank_on_a_cpu() -> None:
    found = cluster("")
    assert (found.name, found.device.name, found.ranks) == ("one_rank", "cpu", 1)
    assert sizes(found) == {"node": 1}


@each_row("name", library_names("clusters"))
def test_every_cluster_of_the_library_is_good(name: str) -> None:
    found = cluster(f'use "clusters/{name}"')
    assert found.name == name
    assert found.levels[-1].size == 1


@each_row("path", [f"{folder}/{name}" for folder in ("clusters", "devices") for name in library_names(folder)])
def test_every_cluster_and_device_of_the_library_says_where_its_numbers_are_from(path: str) -> None:
    head = library_text(path).partition(path.split("/")[0][:-1] + ' "')[0]
    assert "# " in head
    assert any(year in head for year in map(str, range(2020, 2027))) or path in NUMBERLESS


@each_row("name", library_names("devices"))
def test_every_device_of_the_library_is_good(name: str) -> None:
    found = cluster(f'cluster "c" {{ device = {name}; level "node" {{ size = 2 }} }}')
    assert found.device.name == name
    assert found.device.peak.bf16


SMALL = "kind = cpu; memory = 1GB; bandwidth = 1GB/s"


def test_what_is_achieved_has_defaults_and_says_that_it_was_measured() -> None:
    text = f"""
        device "d" {{ {SMALL} }}
        device "measured" {{ {SMALL}; achieved {{ half_rows = 0; optimizer = 60B }} }}
        cluster "a" {{
          device = d; level "n" {{ size = 2; bandwidth = 1GB/s; achieved {{ ring = 1 }} }}; level "r" {{ size = 1 }}
        }}
        """
    plain = cluster(text)
    assert (plain.device.achieved, plain.levels[1].achieved, plain.is_calibrated) == (None, None, False)
    assert plain.device.rates == DeviceRates()
    assert plain.levels[1].rates == LevelRates()
    assert (plain.levels[0].rates.ring, plain.levels[0].rates.all_to_all) == (1.0, 0.7)
    one = cluster(text + 'cluster "b" { from = a; device = measured }')
    assert (one.device.rates.half_rows, one.device.rates.optimizer, one.device.rates.launch) == (0, 60, 5e-6)
    assert one.is_calibrated
    assert not cluster(text + 'cluster "b" { from = a; device = measured; nodes = 2 }').is_calibrated
    empty = 'cluster "b" { from = a; device = measured; nodes = 2; level "r" { achieved { } } }'
    assert not cluster(text + empty).is_calibrated  # of a bandwidth that nobody knows
    empty = empty.replace("achieved", "bandwidth = 1GB/s; achieved")
    assert cluster(text + empty).is_calibrated
    spec = load(text + empty).unwrap()
    assert load_text(to_text(spec)).unwrap() == spec


def test_nodes_multiply_the_outermost_level() -> None:
    found = cluster('use "clusters/dgx_h100"\ncluster "four" { from = dgx_h100; nodes = 4 }')
    assert (found.name, sizes(found), found.ranks) == ("four", {"node": 8, "rail": 4}, 32)
    assert found.device.name == "h100"
    assert sizes(cluster('cluster "c" { device = cpu; nodes = 3; level "node" { size = 2 } }')) == {"node": 6}


def test_from_may_be_chained_and_changed() -> None:
    found = cluster(
        """
        use "clusters/dgx_h100"
        cluster "a" { from = dgx_h100; nodes = 4 }
        cluster "b" { from = a; nodes = 2; device = b200; level "rail" { bandwidth = 100GB/s } }
        cluster "c" { from = b; level "pod" { size = 16; bandwidth = 12.5GB/s } }
        """
    )
    assert sizes(found) == {"node": 8, "rail": 8, "pod": 16}
    assert found.device.name == "b200"
    assert (found.levels[1].bandwidth, found.levels[1].latency) == (100e9, 5e-6)


def test_the_last_cluster_read_is_used() -> None:
    one = 'cluster "one" { device = cpu; level "n" { size = 1 } }\n'
    two = 'cluster "two" { device = cpu; level "n" { size = 2 } }\n'
    assert cluster(one + two).name == "two"
    assert cluster(two + one).name == "one"
    assert cluster(one + 'use "clusters/dgx_h100"').name == "dgx_h100"


def test_from_may_name_a_later_cluster() -> None:
    found = cluster(
        'cluster "big" { from = small; nodes = 2 }\ncluster "small" { device = cpu; level "n" { size = 3 } }'
    )
    assert found.name == "small"


def test_a_declared_device_is_used_also_under_a_built_in_name() -> None:
    device = 'device "h100" { kind = cpu; memory = 1GB; bandwidth = 1GB/s }'
    found = cluster(f'{device}\ncluster "c" {{ device = "h100"; level "n" {{ size = 1 }} }}')
    assert (found.device.kind, found.device.memory) == ("cpu", 1e9)


def test_spans_lead_into_the_library_and_to_the_use() -> None:
    found = cluster('use "clusters/dgx_h100"\ncluster "four" { from = dgx_h100; nodes = 4 }')
    assert str(found.levels[0].span("bandwidth")) == "library:clusters/dgx_h100.moe:8"
    assert str(found.levels[1].span("size")) == "<text>:7"
    assert str(found.device.span("memory")) == "library:devices/h100.moe:5"
    assert str(found.span()) == "<text>:7"


@each_row(
    ("text", "expected"),
    [
        ('cluster "c" { device = h10; level "n" { size = 1 } }', ["MOE0201"]),
        ('cluster "c" { from = dgx_h100 }', ["MOE0201"]),
        ('cluster "c" { from = c }', ["MOE0216"]),
        ('cluster "c" { from = d }\ncluster "d" { from = c }', ["MOE0216"]),
        ('cluster "c" { level "n" { size = 1 } }', ["MOE0203"]),
        ('cluster "c" { device = cpu }', ["MOE0203"]),
        ('cluster "c" { device = cpu; level "n" { size = 1 }; level "n" { size = 2 } }', ["MOE0205"]),
        ('cluster "c" { device = cpu; level { size = 1 } }', ["MOE0212"]),
        ('cluster "c" { device = cpu; level "n" { } }', ["MOE0203"]),
        ('cluster "c" { device = cpu; nodes = 0; level "n" { size = 2 } }', ["MOE0207"]),
        ('device "d" { kind = tpu; memory = 1GB; bandwidth = 1GB/s }', ["MOE0201"]),
        ('device "d" { kind = cpu }\n', ["MOE0203"]),
        ('device "d" { kind = cpu; memory = 1GB; bandwidth = 1GB/s }\n' * 2, ["MOE0205"]),
        ('cluster "c" { device = cpu; level "n" { size = 1 } }\n' * 2, ["MOE0205"]),
        (f'device "d" {{ {SMALL}; achieved {{ products = 1.01 }} }}', ["MOE0207"]),
        (f'device "d" {{ {SMALL}; achieved {{ attention = 0 }} }}', ["MOE0207"]),
        (f'device "d" {{ {SMALL}; achieved {{ half_rows = -1 }} }}', ["MOE0207"]),
        (f'device "d" {{ {SMALL}; achieved {{ optimizer = 52 }} }}', ["MOE0208"]),
        (f'device "d" {{ {SMALL}; achieved {{ ring = 0.5 }} }}', ["MOE0201"]),
        ('cluster "c" { device = cpu; level "n" { size = 2; achieved { all_to_all = 1.5 } } }', ["MOE0207"]),
    ],
)
def test_one_mistake_gives_one_diagnostic(text: str, expected: list[str]) -> None:
    assert codes(text) == expected


def test_a_cluster_of_the_library_that_is_not_used_is_pointed_out() -> None:
    (diagnostic,) = load('cluster "c" { from = dgx_h100 }').diagnostics
    assert 'use "clusters/dgx_h100"' in diagnostic.help
