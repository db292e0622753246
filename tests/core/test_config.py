"""Settings: what is written comes back, and what cannot be meant is refused in one line."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.config import NvmeConfig, PolicyConfig, StoreConfig, TransferConfig, parse_size
from kvstrata.core.errors import ConfigError

EVERY: dict[str, dict[str, object]] = {
    "hbm": {"cache": False},
    "dram": {"capacity": "3GiB", "chunk": "64 MiB", "verify_one_in": 1},
    "nvme": {
        "path": "/var/cache/k v",
        "quota": "1.5TiB",
        "extent": 2 << 20,
        "codec": "zstd",
        "write": "demote",
        "threads": 9,
        "force": True,
    },
    "policy": {"eviction": "lru", "admission": "all"},
    "transfer": {"threads": 3, "timeout": 2.5, "queue": "512KiB"},
}
"""Every setting there is, each unlike its default wherever there is a choice."""
SIZES = {
    ("dram", "capacity"): 3 << 30,
    ("dram", "chunk"): 64 << 20,
    ("nvme", "quota"): 3 << 39,
    ("transfer", "queue"): 512 << 10,
}


def toml(tree: dict[str, dict[str, object]]) -> str:
    def text(value: object) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        return f'"{value}"' if isinstance(value, str) else repr(value)

    return "".join(
        f"[{table}]\n" + "".join(f"{key} = {text(value)}\n" for key, value in keys.items())
        for table, keys in tree.items()
    )


def refused(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        StoreConfig.from_dict(tree)
    assert str(error.value).isprintable()
    return str(error.value)


def refused_file(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        StoreConfig.from_toml(path)
    assert str(error.value).isprintable() and str(path) in str(error.value)
    return str(error.value)


# -- what is written comes back -------------------------------------------------------------------


def test_every_field_goes_through_toml(tmp_path: Path) -> None:
    file = tmp_path / "kvstrata.toml"
    file.write_text(toml(EVERY), encoding="utf-8")
    config = StoreConfig.from_toml(file)
    assert config == StoreConfig.from_dict(EVERY) == StoreConfig.from_toml(str(file))
    read = dataclasses.asdict(config)
    for table, keys in EVERY.items():
        for key, value in keys.items():
            assert read[table][key] == SIZES.get((table, key), value), (table, key)
            assert type(read[table][key]) is type(SIZES.get((table, key), value))


def test_the_test_above_names_every_field_and_no_default() -> None:
    default = StoreConfig()
    for table in dataclasses.fields(StoreConfig):
        section = getattr(default, table.name)
        hints = typing.get_type_hints(type(section))
        assert set(EVERY[table.name]) == set(hints)
        for key, hint in hints.items():
            choice = typing.get_args(hint) if typing.get_origin(hint) is Literal else (1, 2)
            if len(choice) > 1:
                assert EVERY[table.name][key] != getattr(section, key)


def test_nothing_given_is_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "empty.toml"
    file.write_text("", encoding="utf-8")
    assert StoreConfig.from_toml(file) == StoreConfig() == StoreConfig.from_dict({"dram": {}})


def test_one_setting_leaves_the_others_alone() -> None:
    config = StoreConfig.from_dict({"nvme": {"path": "/x"}})
    assert config == StoreConfig(nvme=NvmeConfig(path="/x"))


def test_a_whole_number_will_do_for_seconds() -> None:
    config = StoreConfig.from_dict({"transfer": {"timeout": 5}})
    assert config.transfer.timeout == 5.0 and type(config.transfer.timeout) is float


@pytest.mark.parametrize("key", ["codec", "write"])
def test_every_word_of_a_choice_is_accepted(key: str) -> None:
    words = typing.get_args(typing.get_type_hints(NvmeConfig)[key])
    assert len(words) == 2
    for word in words:
        assert getattr(StoreConfig.from_dict({"nvme": {key: word}}).nvme, key) == word


# -- what is not known ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tree,message",
    [
        ({"drm": {}}, "unknown setting drm; did you mean dram?"),
        ({"dram": {"capacty": 1}}, "unknown setting dram.capacty; did you mean dram.capacity?"),
        ({"nvme": {"Path": ""}}, "unknown setting nvme.Path; did you mean nvme.path?"),
        ({"transfer": {"time_out": 1}}, "did you mean transfer.timeout?"),
        ({"hbm": {"zzz": 1}}, "unknown setting hbm.zzz; known: cache"),
        ({"zzz": 1}, "unknown setting zzz; known: hbm, dram, nvme, policy, transfer"),
        ({"capacity": "1GiB"}, "unknown setting capacity; known: hbm, dram"),
    ],
)
def test_an_unknown_setting_names_the_nearest_known(tree: dict[str, Any], message: str) -> None:
    assert message in refused(tree)


def test_a_key_with_a_line_break_is_still_one_line() -> None:
    assert refused({"a\nb": 1}).startswith("unknown setting a\\nb;")
    assert refused({"dram": {"capa\tcity": 1}}).startswith("unknown setting dram.capa\\tcity;")


# -- what has the wrong type ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "tree,message",
    [
        ({"dram": 3}, "dram must be a table, got 3"),
        ({"dram": [{}]}, "dram must be a table, got [{}]"),
        ({"hbm": {"cache": 1}}, "hbm.cache must be bool, got 1"),
        ({"hbm": {"cache": "true"}}, "hbm.cache must be bool, got 'true'"),
        ({"nvme": {"threads": True}}, "nvme.threads must be int, got True"),
        ({"nvme": {"threads": 2.0}}, "nvme.threads must be int, got 2.0"),
        ({"nvme": {"threads": "2"}}, "nvme.threads must be int, got '2'"),
        ({"nvme": {"path": 1}}, "nvme.path must be str, got 1"),
        ({"nvme": {"force": 0}}, "nvme.force must be bool, got 0"),
        ({"transfer": {"timeout": True}}, "transfer.timeout must be float, got True"),
        ({"transfer": {"timeout": "1s"}}, "transfer.timeout must be float, got '1s'"),
        ({"transfer": {"timeout": 10**400}}, "transfer.timeout is too large a number"),
        ({"nvme": {"codec": "lz4"}}, "nvme.codec must be one of none, zstd, got 'lz4'"),
        ({"nvme": {"codec": ["none\n"]}}, "nvme.codec must be one of none, zstd"),
        ({"policy": {"eviction": "LRU"}}, "policy.eviction must be one of lru, got 'LRU'"),
        ({"policy": {"admission": None}}, "policy.admission must be one of all, got None"),
        ({"dram": {"capacity": True}}, "dram.capacity: True is not a size"),
        ({"dram": {"capacity": 1.5}}, "dram.capacity: 1.5 is not a size"),
        ({"dram": {"capacity": None}}, "dram.capacity: None is not a size"),
        ({"dram": {"capacity": "8GB"}}, "dram.capacity: '8GB' is not a size; write bytes or KiB"),
        ({"dram": {"capacity": "8\nGB"}}, "dram.capacity: '8\\nGB' is not a size"),
        ({"nvme": {"quota": -1}}, "nvme.quota: -1 is not a size; it must not be negative"),
    ],
)
def test_a_value_of_the_wrong_type_says_which_and_what(tree: dict[str, Any], message: str) -> None:
    assert message in refused(tree)


# -- what is out of bounds ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "table,key,least,below",
    [
        ("dram", "chunk", 1 << 20, (1 << 20) - 1),
        ("dram", "verify_one_in", 0, -1),
        ("nvme", "extent", 1 << 20, (1 << 20) - 1),
        ("nvme", "threads", 1, 0),
        ("transfer", "threads", 1, 0),
        ("transfer", "timeout", 0.001, 0.0),
        ("transfer", "timeout", 0.001, float("nan")),
        ("transfer", "timeout", 0.001, float("-inf")),
    ],
)
def test_the_least_is_accepted_and_less_is_not(
    table: str, key: str, least: float, below: float
) -> None:
    config = StoreConfig.from_dict({table: {key: least}})
    assert getattr(getattr(config, table), key) == least
    assert refused({table: {key: below}}) == f"{table}.{key} must be {least} or more, got {below}"


def test_bounds_hold_for_settings_from_python_too() -> None:
    with pytest.raises(ConfigError, match="transfer.threads must be 1 or more, got 0"):
        StoreConfig(transfer=TransferConfig(threads=0))


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        StoreConfig().policy = PolicyConfig()  # type: ignore[misc]


# -- files that cannot be read --------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"[dram",
        b"dram = \n",
        b"[dram]\ncapacity = 1\ncapacity = 2\n",
        b"[dram]\n[dram]\n",
        b'x = "a\nb"',
        b"x = " + b"1" * 5000,
        b"x = " + b"[" * 20000,
    ],
    ids=["open", "no value", "twice", "table twice", "line break", "digits", "deep"],
)
def test_what_is_not_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    assert "is not TOML" in refused_file(tmp_path / "bad.toml", content)


def test_what_is_not_text_is_refused(tmp_path: Path) -> None:
    assert "cannot read the configuration" in refused_file(tmp_path / "bad.toml", b"# \xff\xfe")


@pytest.mark.parametrize("name", ["missing.toml", ".", "no\nline/x.toml", "nul\0.toml"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration") as error:
        StoreConfig.from_toml(tmp_path / name)
    assert str(error.value).isprintable()


def test_a_wrong_setting_in_a_file_is_not_called_bad_toml(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text("[dram]\ncapacity = '1GB'\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^dram\.capacity: '1GB' is not a size"):
        StoreConfig.from_toml(file)


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text,nbytes",
    [
        (0, 0),
        (17, 17),
        ("17", 17),
        ("17B", 17),
        (" 17 B ", 17),
        ("1KiB", 1024),
        ("1kib", 1024),
        ("1 KIB", 1024),
        ("512MiB", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("1.5 GiB", 3 << 29),
        ("0.25TiB", 1 << 38),
        ("0.0001KiB", 0),
        (2**53 + 1, 2**53 + 1),
        (str(2**53 + 1), 2**53 + 1),
        (10**400, 10**400),
    ],
)
def test_a_size_is_bytes_or_has_a_binary_unit(text: str | int, nbytes: int) -> None:
    size = parse_size(text)
    assert size == nbytes and type(size) is int


@given(number=st.integers(0, 2**70), unit=st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_units_are_powers_of_1024(number: int, unit: str) -> None:
    power = 1 + ["KiB", "MiB", "GiB", "TiB"].index(unit)
    assert parse_size(f"{number}{unit}") == number * 1024**power
    assert parse_size(f"{number}.5{unit}") == number * 1024**power + 1024**power // 2


@pytest.mark.parametrize(
    "text",
    ["GB", "1GB", "1 KB", "1MB", "1TB", "1G", "1k", "1Mib s", "", " ", "-1", "-1GiB", "+1"]
    + ["1e3", "1,5GiB", ".5GiB", "1.GiB", "0x10", "1 2", "inf", "nan", "1PiB", True, False, None]
    + ["1\nGB", [1]],
)
def test_anything_else_is_not_a_size(text: Any) -> None:
    with pytest.raises(ConfigError, match="is not a size") as error:
        parse_size(text)
    assert str(error.value).isprintable() and repr(text) in str(error.value)


def test_a_negative_number_is_not_a_size() -> None:
    with pytest.raises(ConfigError, match="must not be negative"):
        parse_size(-1)
