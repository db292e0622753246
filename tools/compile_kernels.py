"""Compiles every kernels/csrc/*.cu to a cubin per GPU generation, without a GPU or a CUDA toolkit.

Needs the extra `nvrtc` (the compiler and its headers; no torch, no driver). Prints one line for
each file and generation; exits with 1 when one does not compile or holds no kernel, and when there
is no file at all.
"""

import re
import sys
from pathlib import Path

import cupy
from cupy.cuda import nvrtc

SOURCES = Path(__file__).resolve().parent.parent / "kernels" / "csrc"
SITE = Path(cupy.__file__).parent.parent
INCLUDE = (
    SOURCES,
    SITE / "nvidia/cu13/include",  # cuda_bf16.h, cuda_fp16.h
    SITE / "cupy/_core/include/cupy/_cccl/libcudacxx",  # cuda/std/*
)
GENERATIONS = (80, 90, 100)


def compile_one(source: Path, generation: int) -> bytes:
    """The cubin of `source` for sm_<generation>; raises ValueError with the compiler's log."""
    includes = [f"-I{folder}" for folder in INCLUDE]
    options = (f"--gpu-architecture=sm_{generation}", "--std=c++17", *includes)
    program = nvrtc.createProgram(source.read_text(), source.name, [], [])
    try:
        nvrtc.compileProgram(program, options)
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        raise ValueError(f"{error}\n{nvrtc.getProgramLog(program)}") from None
    finally:
        nvrtc.destroyProgram(program)


def main() -> int:
    sources = sorted(SOURCES.glob("*.cu"))
    failed = not sources
    if failed:
        print(f"no *.cu in {SOURCES}", file=sys.stderr)
    for source in sources:
        for generation in GENERATIONS:
            try:
                cubin = compile_one(source, generation)
            except ValueError as error:
                print(f"{source.name} sm_{generation}: FAILED\n{error}", file=sys.stderr)
                failed = True
                continue
            kernels = set(re.findall(rb"\.text\.([A-Za-z_]\w*)", cubin))
            size = f"{len(kernels)} kernels, {len(cubin)} bytes"
            print(f"{source.name} sm_{generation}: {size}", flush=True)
            failed |= not kernels
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
