"""``world`` is the module next door: nothing in the tests is importable by name."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

WORLD = Path(__file__).with_name("world.py")


@pytest.fixture(scope="session")
def world() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kvstrata_nvme_world", WORLD)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def opened(world: ModuleType, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens tiers (in ``tmp_path / "nvme"`` unless told) and closes them all in the end."""
    made: list[Any] = []

    def make(path: Path | None = None, **settings: Any) -> Any:
        made.append(world.World(str(path or tmp_path / "nvme"), **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()
