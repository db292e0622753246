"""The very text of paged.cu, compiled for the host, against the reference."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstrata.kernels import cuda, reference

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: the index arithmetic of paged.cu is not checked here")
    folder = tmp_path_factory.mktemp("paged")
    (folder / "paged.cu").write_text(cuda.source())
    library = folder / "paged.so"
    subprocess.run(
        [
            compiler, "-O1", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror",
            "-fsanitize=alignment", "-fno-sanitize-recover=all",
            f'-DPAGED_CU="{folder / "paged.cu"}"', "-x", "c++", str(HERE / "shim.cpp"),
            "-o", str(library),
        ],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(library))


def _launch(kernels: Any, gather: bool, case: Any) -> None:
    if not len(case.blocks):
        return
    table = cuda.segment_table(case.pages, case.layer)
    grid = (ctypes.c_uint * 3)(*cuda.grid(len(case.blocks), len(table), int(table[:, 2].max())))
    pointers = [table.ctypes.data, case.blocks.ctypes.data, case.rows.ctypes.data]
    kernels.launch(
        int(gather),
        grid,
        32,
        *map(ctypes.c_void_p, pointers),
        ctypes.c_void_p(case.packed.data_ptr()),
        ctypes.c_longlong(case.packed.stride(0)),
    )


@pytest.mark.parametrize("start", range(0, 600, 100))
def test_equals_the_reference(kernels, random_case, same, start) -> None:
    for seed in range(start, start + 100):
        case = random_case(seed)
        ids = torch.from_numpy(case.blocks), torch.from_numpy(case.rows)
        _launch(kernels, True, case)
        reference.gather(case.twin, ids[0], case.packed_twin, ids[1], case.layer)
        assert same(case), f"gather, seed {seed}"
        case.packed.copy_(torch.randint(0, 256, case.packed.shape))
        case.packed_twin.copy_(case.packed)
        _launch(kernels, False, case)
        reference.scatter(case.twin, ids[0], case.packed_twin, ids[1], case.layer)
        assert same(case), f"scatter, seed {seed}"


def test_wrapper_and_source_agree_on_the_slice() -> None:
    found = re.search(r"SLICE = (\d+);", cuda.source())
    assert found is not None and int(found[1]) == cuda.SLICE
    assert cuda.SLICE % 16 == 0


def test_the_source_needs_no_header() -> None:
    assert "#include" not in cuda.source()
