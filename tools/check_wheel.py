"""Holds a built wheel against the checkout: check_wheel.py WHEEL

Every package that pyproject.toml names is in it exactly once, with every module that stands in its
folder; so are the CUDA sources and py.typed; and nothing in it becomes importable by another name.
"""

import sys
import tomllib
import zipfile
from collections import Counter
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent


def expected() -> set[str]:
    """The paths that the checkout says the wheel must hold."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = setuptools["package-dir"]
    paths = {"kvstrata/py.typed"}
    for package in setuptools["packages"]:
        top = max((name for name in folders if f"{package}.".startswith(f"{name}.")), key=len)
        folder = ROOT.joinpath(folders[top], *package.removeprefix(top).strip(".").split("."))
        inside = package.replace(".", "/")
        paths |= {f"{inside}/{module.name}" for module in folder.glob("*.py")}
        for pattern in setuptools["package-data"].get(package, ()):
            paths |= {
                f"{inside}/{file.relative_to(folder).as_posix()}" for file in folder.glob(pattern)
            }
    return paths


def complaints(wheel: Path) -> list[str]:
    """What is wrong with `wheel`, one line each."""
    held = Counter(zipfile.ZipFile(wheel).namelist())
    found = [f"missing: {path}" for path in sorted(expected() - held.keys())]
    found += [f"held {count} times: {path}" for path, count in held.items() if count > 1]
    for path in held:
        top = PurePosixPath(path).parts[0]
        if top != "kvstrata" and not top.endswith(".dist-info"):
            found.append(f"not under kvstrata: {path}")
    code = {path for path in held if path.endswith(".py")}
    found += [f"not in the checkout: {path}" for path in sorted(code - expected())]
    if not any(path.endswith(".cu") for path in held):
        found.append("no CUDA source")
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: check_wheel.py WHEEL")
    wrong = complaints(Path(sys.argv[1]))
    for line in wrong:
        print(line, file=sys.stderr)
    print(Path(sys.argv[1]).name, f"{len(wrong)} complaints" if wrong else "is as it should be")
    sys.exit(bool(wrong))
