"""What decides starts without torch, and so does every package's front door."""

import subprocess
import sys

import pytest

import kvstrata

PROGRAM = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "cupy", "transformers"):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
import kvstrata

wanted = sys.argv[1:]
if wanted == ["packages"]:
    # onerror: a package that cannot be imported must not be passed over
    def fail(name):
        raise
    found = pkgutil.walk_packages(kvstrata.__path__, "kvstrata.", fail)
    wanted = [module.name for module in found if module.ispkg]
else:
    for name in list(wanted):
        inside = getattr(importlib.import_module(name), "__path__", [])
        wanted += [module.name for module in pkgutil.walk_packages(inside, f"{name}.")]
for name in wanted:
    importlib.import_module(name)
print(*wanted, sep="\\n")
"""


def imported(*arguments: str) -> list[str]:
    """The modules that a process without torch, cupy and transformers has imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_every_package_opens_without_torch() -> None:
    packages = set(imported("packages"))
    assert packages >= {"kvstrata.core", "kvstrata.store.policy", "kvstrata.tiers.nvme"}


@pytest.mark.parametrize(
    "module",
    [
        "kvstrata.core",
        "kvstrata.prefix_index",
        "kvstrata.store",
        "kvstrata.tiers.nvme",
        "kvstrata.transfer.move",
        "kvstrata.transfer.plan",
    ],
)
def test_deciding_needs_no_torch(module: str) -> None:
    assert module in imported(module)


def test_the_hook_would_notice() -> None:
    with pytest.raises(AssertionError, match="torch was imported"):
        imported("torch")


def test_the_front_door_is_as_listed() -> None:
    for name in kvstrata.__all__:
        assert getattr(kvstrata, name) is not None
    assert sorted(kvstrata.__all__) == sorted(set(kvstrata.__all__))
