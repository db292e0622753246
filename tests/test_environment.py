"""The set-up behind `make` survives being killed, refused or moved. No index is asked."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.checkout
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = ROOT / "tools" / "environment.py"
    spec = importlib.util.spec_from_file_location("environment_tool", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "environment_tool", module)  # dataclasses look themselves up
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ATTEMPTS", 1)
    return module


@pytest.fixture
def home(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A real environment, but without pip: `answer` decides what its python does."""

    def venv(command: list[str], **options: object) -> "subprocess.CompletedProcess[bytes]":
        return run([*map(str, command), "--without-pip"], **options)  # type: ignore[call-overload]

    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", venv)
    home = tmp_path / ".venv"
    tool.Environment(home).create()
    monkeypatch.setattr(subprocess, "run", run)
    return home


def answer(home: Path, script: str) -> None:
    python = home / "bin" / "python"
    python.unlink()
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)


@pytest.fixture
def needs(tmp_path: Path) -> Path:
    path = tmp_path / "needs.txt"
    path.write_text("a==1\n")
    return path


def test_a_new_environment_works(tool: ModuleType, home: Path) -> None:
    assert tool.Environment(home).works()


def test_a_step_is_taken_once(tool: ModuleType, home: Path, needs: Path) -> None:
    step = tool.Step("a", "a", ("a",), (needs,))
    environment = tool.Environment(home)
    answer(home, "exit 0")
    assert not environment.has("a", environment.digest(needs))
    environment.take(step)
    assert environment.has("a", environment.digest(needs)) and environment.works()
    needs.write_text("a==2\n")
    assert not environment.has("a", environment.digest(needs)) and environment.works()


def test_a_refusal_leaves_it_whole(tool: ModuleType, home: Path, needs: Path) -> None:
    environment = tool.Environment(home)
    answer(home, '[ "$1" = -c ] || exit 1')
    with pytest.raises(SystemExit, match="run make again"):
        environment.take(tool.Step("a", "a", ("a",), (needs,)))
    assert environment.works() and not environment.has("a", environment.digest(needs))


def test_a_kill_makes_it_start_over(tool: ModuleType, home: Path, needs: Path) -> None:
    environment = tool.Environment(home)
    answer(home, '[ "$1" = -c ] || kill -9 $$')
    with pytest.raises(SystemExit):
        environment.take(tool.Step("a", "a", ("a",), (needs,)))
    assert not environment.works() and not environment.has("a", environment.digest(needs))


def test_a_moved_or_broken_one_is_made_anew(tool: ModuleType, home: Path) -> None:
    moved = home.rename(home.with_name("moved"))
    assert not tool.Environment(moved).works()
    moved.rename(home)
    assert tool.Environment(home).works()
    answer(home, "exit 127")
    assert not tool.Environment(home).works()
    (home / "bin" / "python").unlink()
    assert not tool.Environment(home).works()


def test_torch_comes_first(tool: ModuleType) -> None:
    first, *others = tool.steps("test")
    assert first.arguments[0].startswith("torch==") and first.name == "torch"
    assert [step.name for step in tool.steps("demo")] == [
        step.name for step in (first, *others) if step.name != "dev"
    ]
