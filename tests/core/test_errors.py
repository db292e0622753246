"""The tree that is drawn at the top of ``core/errors.py`` is the tree there is."""

from __future__ import annotations

import re

import pytest

from kvstrata.core import errors
from kvstrata.core.errors import KVStrataError, MisuseError

NAMED = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
}


def drawn() -> dict[str, tuple[str, bool]]:
    """Name -> (name of its parent, whether it says "also a ValueError"), as drawn."""
    found: dict[str, tuple[str, bool]] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.fullmatch(r"(    +)(\w+Error)  +(\S.*)", line)
        if match is None:
            continue
        indent, name = len(match[1]), match[2]
        above = [(i, n) for i, n in above if i < indent]
        assert name not in found
        found[name] = (above[-1][1] if above else "Exception", "also a ValueError" in match[3])
        above.append((indent, name))
    return found


def test_the_drawn_tree_is_the_real_one() -> None:
    real = {
        name: (kind.__bases__[0].__name__, ValueError in kind.__bases__)
        for name, kind in NAMED.items()
    }
    assert drawn() == real


def test_every_error_is_ours_and_says_what_it_is() -> None:
    assert len(NAMED) == 9
    for kind in NAMED.values():
        assert issubclass(kind, KVStrataError) and kind.__doc__


@pytest.mark.parametrize("name", ["MisuseError", "ConfigError", "LayoutError", "ClosedError"])
def test_misuse_can_be_caught_as_a_value_error(name: str) -> None:
    with pytest.raises(ValueError, match="why"):
        raise NAMED[name]("why")


def test_a_lost_device_is_not_the_callers_fault() -> None:
    for name in ("FingerprintError", "DirectoryBusyError", "StorageError", "DeviceLostError"):
        assert not issubclass(NAMED[name], MisuseError | ValueError)
