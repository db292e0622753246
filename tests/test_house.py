"""Rules of the house that no linter holds."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.checkout
ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("core", "prefix_index", "tiers", "kernels", "transfer", "store", "engines", "bench")
LONGEST = 400
FRONT_DOOR = [
    "MLA",
    "BlockPool",
    "BlockTable",
    "ClosedError",
    "Completion",
    "ConfigError",
    "DeviceLostError",
    "DirectoryBusyError",
    "FingerprintError",
    "FullAttention",
    "Hit",
    "KVGroup",
    "KVModel",
    "KVSpec",
    "KVStrataError",
    "LayoutError",
    "Match",
    "MisuseError",
    "Polled",
    "Prefix",
    "Sequence",
    "SlidingWindow",
    "StorageError",
    "Store",
    "StoreConfig",
    "Ticket",
    "__version__",
    "dtype",
    "open_store",
]


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(part in ROOMS for part in path.relative_to(ROOT / folder).parts[:-1]):
                yield path


CODE = [*sources(*ROOMS), *sources("src/kvstrata")]


def names(path: Path, *, imports_only: bool = False) -> Iterator[tuple[int, str]]:
    """Every imported or dotted name in a file, with its line."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom(module=str(module)):
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
            case ast.Attribute(value=ast.Name(id=owner), attr=attribute) if not imports_only:
                yield node.lineno, f"{owner}.{attribute}"


def places(paths: list[Path], bad: tuple[str, ...]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in paths
        for line, name in names(path)
        if any(f"{name}.".startswith(f"{word}.") for word in bad)
    ]


def test_the_search_sees_the_code() -> None:
    assert len(CODE) > 20
    assert places([Path(__file__)], ("ast.walk",)) != []


def test_we_never_pickle() -> None:
    pickles = (
        "pickle",
        "cPickle",
        "cloudpickle",
        "dill",
        "marshal",
        "shelve",
        "joblib",
        "torch.load",
        "torch.save",
    )
    assert places(CODE, pickles) == []


def test_no_environment_variable_below_the_engines() -> None:
    below = [*sources("core", "prefix_index", "tiers", "kernels", "transfer", "store")]
    assert places(below, ("os.environ", "os.environb", "os.getenv", "os.putenv")) == []


def test_policies_see_the_vocabulary_and_nothing_else() -> None:
    policies = sources("store/policy")
    seen = {name for path in policies for _, name in names(path, imports_only=True)}
    allowed = ("kvstrata.core.", "kvstrata.store.policy.")
    ours = {name for name in seen if name.startswith("kvstrata")}
    assert seen and {name for name in ours if not name.startswith(allowed)} == set()


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_reads_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST


def test_the_front_door() -> None:
    import kvstrata

    assert sorted(kvstrata.__all__) == sorted(FRONT_DOOR)
