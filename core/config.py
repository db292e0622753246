"""One typed tree of settings, from TOML or from Python.

    [dram]
    capacity = "8GiB"

    [nvme]
    path = "/var/cache/kvstrata"
    quota = "200GiB"

Every table and key is a field of a dataclass below; an unknown one is an error that names the
nearest known. Sizes are bytes, or text with KiB, MiB, GiB, TiB.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NewType

from kvstrata.core.errors import ConfigError

Size = NewType("Size", int)
"""Bytes; in TOML also text such as "8GiB"."""

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_size(text: str | int) -> Size:
    """Bytes from a whole number or from text such as "512MiB" or "1.5 GiB".

    Raises ConfigError for anything else, decimal units (GB) included, since they are ambiguous.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        number, unit = Fraction(text), ""
    else:
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
        if found is None or found[2].upper() not in _UNITS:
            raise ConfigError(f"{text!r} is not a size; write bytes or KiB, MiB, GiB, TiB")
        number, unit = Fraction(found[1]), found[2].upper()
    if number < 0:
        raise ConfigError(f"{text!r} is not a size; it must not be negative")
    return Size(int(number * _UNITS[unit]))


@dataclass(frozen=True, slots=True)
class HbmConfig:
    """Blocks of the engine's own pool that stay cached there after their request has ended.

    Only for pools that kvstrata allocates (``BlockPool``); an engine with a cache of its own keeps
    it, and registers its tensors.
    """

    cache: bool = True


@dataclass(frozen=True, slots=True)
class DramConfig:
    """The DRAM tier: an arena that is pinned where CUDA is and allocated chunk by chunk."""

    capacity: Size = Size(4 << 30)
    chunk: Size = Size(1 << 30)
    """Bytes allocated at once: the tier opens with the first chunk and grows in the background."""
    verify_one_in: int = 64
    """Loads from DRAM verify the checksum of one block in so many; 1 verifies all, 0 none."""


@dataclass(frozen=True, slots=True)
class NvmeConfig:
    """The NVMe tier; off while ``path`` is empty."""

    path: str = ""
    quota: Size = Size(32 << 30)
    """Physical bytes that everything below ``path`` may take together."""
    extent: Size = Size(1 << 30)
    """Bytes of an extent file; they are grown one at a time."""
    codec: Literal["none", "zstd"] = "none"
    write: Literal["through", "demote"] = "through"
    """``through`` writes a block in the background as soon as DRAM has it, so it survives a crash;
    ``demote`` writes it only when DRAM needs the room, or at close."""
    threads: int = 4
    """Requests in flight to the device."""
    force: bool = False
    """Accept a network file system, where durability is whatever the server says it is."""


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Which blocks stay, and which go down."""

    eviction: Literal["lru"] = "lru"
    admission: Literal["all"] = "all"


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Bounds of the transfer engine."""

    threads: int = 2
    """Copy workers a direction; on CUDA each has a stream and a packed buffer of 64 MiB."""
    timeout: float = 30.0
    """Seconds after which a load that has not completed is reported as failed."""
    queue: Size = Size(4 << 30)
    """Bytes of stores waiting for the engine; beyond them a save is refused, never a load."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Everything a Store can be told."""

    hbm: HbmConfig = field(default_factory=HbmConfig)
    dram: DramConfig = field(default_factory=DramConfig)
    nvme: NvmeConfig = field(default_factory=NvmeConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)

    def __post_init__(self) -> None:
        at_least: list[tuple[str, float, float]] = [
            ("dram.chunk", self.dram.chunk, 1 << 20),
            ("dram.verify_one_in", self.dram.verify_one_in, 0),
            ("nvme.extent", self.nvme.extent, 1 << 20),
            ("nvme.threads", self.nvme.threads, 1),
            ("transfer.threads", self.transfer.threads, 1),
            ("transfer.timeout", self.transfer.timeout, 0.001),
        ]
        for name, value, least in at_least:
            if not value >= least:  # a NaN is not either
                raise ConfigError(f"{name} must be {least} or more, got {value}")

    @classmethod
    def from_dict(cls, tree: Mapping[str, object]) -> StoreConfig:
        """The settings in a nested dict, as ``tomllib`` gives it. Raises ConfigError."""
        config: StoreConfig = _build(cls, tree, "")
        return config

    @classmethod
    def from_toml(cls, path: str | Path) -> StoreConfig:
        """The settings in a TOML file. Raises ConfigError, also where the file cannot be read."""
        named = _line(path)
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or NUL in the path
            raise ConfigError(f"cannot read the configuration {named}: {error}") from error
        try:
            tree = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # tomllib lets some of Python's own through
            raise ConfigError(f"{named} is not TOML: {error}") from error
        return cls.from_dict(tree)


def _line(text: object) -> str:
    """The text on one line, whatever is in it."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


def _build(cls: type, tree: Mapping[str, object], where: str) -> Any:
    hints = typing.get_type_hints(cls)
    for key in tree:
        if key not in hints:
            near = difflib.get_close_matches(key, hints, 1)
            hint = f"did you mean {where}{near[0]}?" if near else f"known: {', '.join(hints)}"
            raise ConfigError(f"unknown setting {where}{_line(key)}; {hint}")
    return cls(**{key: _value(hints[key], value, where + key) for key, value in tree.items()})


def _value(hint: Any, value: object, where: str) -> object:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} must be a table, got {value!r}")
        return _build(typing.cast(type, hint), value, where + ".")
    if hint is Size:
        if not isinstance(value, str | int):
            raise ConfigError(f"{where}: {value!r} is not a size; write bytes or KiB, MiB, GiB")
        try:
            return parse_size(value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    if typing.get_origin(hint) is Literal:
        allowed = typing.get_args(hint)
        if value not in allowed:
            raise ConfigError(f"{where} must be one of {', '.join(allowed)}, got {value!r}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{where} is too large a number") from None
    plain = hint if not isinstance(hint, types.UnionType) else typing.get_args(hint)
    if not isinstance(value, plain) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where} must be {getattr(hint, '__name__', hint)}, got {value!r}")
    return value
