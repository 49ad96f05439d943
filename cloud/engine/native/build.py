"""Builds the kernels for this very processor, once, and keeps them."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from cloud.engine.errors import EngineError

__all__ = ["build_kernels", "find_compiler"]

SOURCE = Path(__file__).with_name("kernels.cpp")
_BUILD_TIMEOUT_S = 120.0
# The first that works. The last ones leave out what a compiler may not have: threads, then
# the processor's own instructions. Never -ffast-math: what is not finite has to stay so.
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared")
_LOOSE = ("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math")
_OWN = ("-march=native", *_LOOSE)
_VARIANTS = (
    ("-mprefer-vector-width=512", "-fopenmp", *_OWN),
    ("-fopenmp", *_OWN),
    _OWN,
    (),
)


def find_compiler() -> str:
    """The C++ compiler: $CXX, else what the machine has.

    Raises:
        EngineError: there is none.
    """
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    for name in filter(None, names):
        if found := shutil.which(name):
            return found
    raise EngineError("no C++ compiler: install g++ or clang++, or name one in CXX")


def build_kernels(folder: Path) -> Path:
    """The library of the kernels, from `folder` where it was built before.

    Raises:
        EngineError: there is no compiler, it fails, or the folder cannot be written.
    """
    compiler = find_compiler()
    library = folder / f"kernels-{_key(compiler)}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / "kernels.so"
            _compile(compiler, built)
            built.replace(library)  # At once: another process may build the same.
    except OSError as error:
        raise EngineError(f"{folder} cannot be written: {error}") from error
    return library


def _compile(compiler: str, target: Path) -> None:
    said = ""
    for variant in _VARIANTS:
        # torch's own OpenMP: a second one would bring a second set of threads.
        openmp = _torch_openmp() if "-fopenmp" in variant else []
        command = [compiler, *_FLAGS, *variant, "-o", str(target), str(SOURCE), *openmp]
        if "-fopenmp" in variant and not openmp:
            continue
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            said = f"took longer than {_BUILD_TIMEOUT_S:g} s"
            break
        if done.returncode == 0:
            return
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = lines[0] if lines else f"exited with status {done.returncode}"
    raise EngineError(f"{compiler} does not build {SOURCE}: {said}")


def _torch_openmp() -> list[str]:
    folder = Path(torch.__file__).with_name("lib")
    return [str(path) for path in sorted(folder.glob("libgomp*.so*"))[:1]]


def _key(compiler: str) -> str:
    """Another for each source, compiler, torch and processor."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout
    parts = (SOURCE.read_text(), compiler, version, torch.__version__, _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What tells processors with other instructions apart; a cache may be shared."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # Not Linux.
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))
