"""Exit codes, one line for a mistake, and nothing but JSON on stdout."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstrata.bench.harness import Result
from kvstrata.cli import app, main
from kvstrata.cli.commands import COMMANDS, Command
from kvstrata.core.errors import KVStrataError

Run = Callable[[argparse.Namespace], Result]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """Makes `kvstrata probe [--size N]` out of a function."""

    def install(run: Run) -> None:
        def add_arguments(parser: argparse.ArgumentParser) -> None:
            parser.add_argument("--size", type=int, default=1)

        module = SimpleNamespace(add_arguments=add_arguments, run=run)
        monkeypatch.setattr(Command, "load", lambda self: module)
        monkeypatch.setattr(app, "COMMANDS", (Command(("probe",), "a probe", "none"),))

    return install


def fine(args: argparse.Namespace) -> Result:
    return Result(data={"size": args.size}, text=f"size {args.size}")


def one_line(text: str) -> str:
    assert text.count("\n") == 1 and text.startswith("kvstrata: ")
    return text


def kvstrata(*words: str, code: str = "") -> "subprocess.CompletedProcess[str]":
    """A real process; `code` runs in it before main."""
    program = f"import sys; {code}; from kvstrata.cli import main; sys.exit(main({list(words)!r}))"
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )


def test_every_command_is_there() -> None:
    for command in COMMANDS:
        parser = argparse.ArgumentParser()
        module = command.load()
        module.add_arguments(parser)
        assert callable(module.run)


def test_text_by_default(command, capsys) -> None:
    command(fine)
    assert main(["probe", "--size", "3"]) == 0
    assert capsys.readouterr() == ("size 3\n", "")


def test_a_failed_check_is_1(command, capsys) -> None:
    command(lambda args: Result(data={}, text="bad", ok=False))
    assert main(["probe"]) == 1
    assert main(["probe", "--json"]) == 1
    assert capsys.readouterr().out == "bad\n{}\n"


def test_json_is_alone_on_stdout(command, capfd) -> None:
    def chatty(args: argparse.Namespace) -> Result:
        print("from Python")
        os.write(1, b"from C\n")
        subprocess.run(["echo", "from a child"], check=True)
        return Result(data={"a": (1, 2.5), "b": float("nan"), "c": {"d": None}}, text="unused")

    command(chatty)
    assert main(["probe", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == {"a": [1, 2.5], "b": None, "c": {"d": None}} and out.count("\n") == 1
    assert all(f"from {who}\n" in err for who in ("Python", "C", "a child"))


def test_numpy_goes_into_json(command, capsys) -> None:
    import numpy as np

    command(
        lambda args: Result(data={"x": np.float32(0.5), "n": np.int64(7), "p": Path("a")}, text="")
    )
    assert main(["probe", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"x": 0.5, "n": 7, "p": "a"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "say what to do: kvstrata {bench,demo,inspect,verify}"),
        (["bench"], "kvstrata bench {idle,ttft}"),
        (["bench", "--json"], "kvstrata bench {idle,ttft}"),
        (["--nonsense"], "say what to do"),
        (["demon"], "did you mean 'demo'?"),
        (["bench", "ttfz"], "did you mean 'ttft'?"),
        (["qqq"], "choose from bench, demo"),
        (["inspect"], "DIR"),
        (["inspect", "a", "b"], "unrecognized arguments: b"),
        (["verify", "--repare", "x"], "--repare"),
    ],
)
def test_bad_usage_is_one_line_and_2(words: list[str], says: str, capsys) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in one_line(err)


def test_a_bad_value_is_one_line_and_2(command, capsys) -> None:
    command(fine)
    assert main(["probe", "--size", "many"]) == 2
    assert "'many'" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KVStrataError("the directory is gone;\nmake it"), 2),
        (FileNotFoundError(2, "No such file or directory", "/nowhere"), 2),
        (ModuleNotFoundError("No module named 'gguf'", name="gguf"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
@pytest.mark.parametrize("flag", [[], ["--json"]])
def test_an_error_is_one_line(
    error: BaseException, code: int, flag: list[str], command, capsys
) -> None:
    def fails(args: argparse.Namespace) -> Result:
        raise error

    command(fails)
    assert main(["probe", *flag]) == code
    out, err = capsys.readouterr()
    assert out == "" and one_line(err)


def test_a_bug_is_not_hidden(command) -> None:
    def fails(args: argparse.Namespace) -> Result:
        raise ZeroDivisionError

    command(fails)
    with pytest.raises(ZeroDivisionError):
        main(["probe"])


@pytest.mark.parametrize(
    "words", [["--help"], ["inspect", "--help"], ["--version"], ["bench", "ttft", "--help"]]
)
def test_help_is_0(words: list[str], capsys) -> None:
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "kvstrata" in out and err == ""


def test_nobody_reads(tmp_path: Path) -> None:
    program = f"{sys.executable} -m kvstrata --help"
    done = subprocess.run(
        ["bash", "-c", f"{{ sleep 0.3; {program}; echo $? >code; }} | true"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == "" and (tmp_path / "code").read_text() == "141\n"


NO_TORCH = """
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "cupy", "transformers"):
            raise AssertionError(f"{name} was imported")
sys.meta_path.insert(0, Refuse())
"""


@pytest.mark.parametrize(
    "words", [["--help"], ["inspect", "--help"], ["inspect", "/nowhere"], ["verify", "/nowhere"]]
)
def test_starts_without_torch(words: list[str]) -> None:
    done = kvstrata(*words, code=f"exec({NO_TORCH!r})")
    assert done.returncode == (2 if "/nowhere" in words else 0), done.stderr
    if done.returncode:
        assert done.stdout == "" and "/nowhere" in one_line(done.stderr)


def test_openmp_is_passive_before_torch() -> None:
    done = kvstrata(
        "--help",
        code="import os; os.environ.pop('OMP_WAIT_POLICY', None); import atexit; "
        "atexit.register(lambda: print(os.environ['OMP_WAIT_POLICY']))",
    )
    assert done.stdout.endswith("passive\n")


@pytest.mark.parametrize(
    "words",
    [
        ["demo", "--repeats", "0"],
        ["demo", "--repeats", "-1"],
        ["bench", "ttft", "--pairs", "0"],
        ["bench", "idle", "--seconds", "inf"],
        ["bench", "idle", "--seconds", "nan"],
        ["bench", "idle", "--seconds", "-1"],
    ],
)
def test_a_number_that_cannot_be_meant_is_refused(words: list[str], capsys) -> None:
    assert main(words) == 2
    assert words[-1] in one_line(capsys.readouterr().err)
