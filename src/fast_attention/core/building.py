"""Compiles the core with the system's C++ compiler, against the headers of the installed torch."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fast_attention import files
from fast_attention.core import MARK, SOURCE, read_mark, stamp

COMPILERS = ("c++", "g++", "clang++")
OLDEST = {"GCC": 9, "clang": 10}  # C++17, vector types and their conversions
X86 = platform.machine().lower() in ("x86_64", "amd64")
# What torch checks before it reports AVX2 or AVX512, and no more: the loader chooses by that report.
WIDTHS = {
    4: [],
    8: ["-mavx2", "-mfma", "-mf16c"],
    16: ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mprefer-vector-width=512"],
}
ALL = tuple(WIDTHS) if X86 else (4,)  # the narrowest is in every file
COMMON = [
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-Wno-psabi",
]
# Loops that are worth it are vectors already, and products are called, not inlined: both make the file a third smaller.
FAST = ["-O2", "-ftree-vectorize", "-fvect-cost-model=very-cheap", "--param", "inline-unit-growth=10", "-DNDEBUG"]
SMALL = ["-Os", "-DNDEBUG"]  # what no call spends its time in
SANITIZED = ["-O2", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SANITIZED += ["-DFAST_ATTENTION_SANITIZE"]  # every piece of memory is an allocation of just its size
TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # the file serves torch 2.11 and every later one


class NotBuilt(Exception):
    """The core was not built; the message says why in one line, and ``output`` is what the compiler said."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


class NoCompiler(NotBuilt):
    """There is no C++ compiler that can build the core."""


def up_to_date(file: Path, widths: Sequence[int]) -> bool:
    """Whether a file was built from the sources in this package, with these widths at least."""
    mark = read_mark(file)
    return mark is not None and mark[0] == stamp() and {*widths} <= {*mark[1]}


def build(file: Path, widths: Sequence[int], sanitize: bool = False) -> None:
    """Compile the sources into ``file``, which is replaced once everything succeeded.

    Raises:
        NotBuilt: No compiler, one that is too old or fails, no headers, or a folder that cannot be written.
    """
    compiler = [*find_compiler(), *COMMON, *(SANITIZED if sanitize else [])]
    fast, small = ([], []) if sanitize else (FAST, SMALL)
    torch = _torch_folder()
    try:
        with files.atomic(file) as partial, tempfile.TemporaryDirectory() as folder:
            partial.touch()  # a read-only folder is found before a minute of compiling
            mark = Path(folder) / "mark.cpp"
            mark.write_text(_mark(widths), encoding="utf-8")
            # Narrow vectors first: of equal inline functions the linker keeps the first, which must run everywhere.
            tables = " ".join(f"X({width})" for width in sorted(widths))
            library = [f"-DFAST_ATTENTION_WIDTHS(X)={tables}", TARGET, "-isystem", str(torch / "include")]
            units = [(mark, []), (SOURCE / "library.cpp", library + small)]
            for width in sorted(widths):
                tuned = small if width == 4 and len(widths) > 1 else fast
                units.append((SOURCE / "kernels.cpp", [f"-DFAST_ATTENTION_WIDTH={width}", *WIDTHS[width], *tuned]))
            stripped = [] if sanitize else ["-s"]
            objects = [f"{folder}/{number}.o" for number in range(len(units))]
            commands = [
                [*compiler, *flags, "-c", str(source), "-o", to]
                for (source, flags), to in zip(units, objects, strict=True)
            ]
            cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
            with ThreadPoolExecutor(cores) as pool:
                for _ in pool.map(_run, reversed(commands)):  # the longest first
                    pass
            _run([*compiler, "-shared", *stripped, *objects, f"-L{torch / 'lib'}", "-ltorch_cpu", "-o", str(partial)])
    except OSError as error:
        raise NotBuilt(f"{error.filename or file.parent} cannot be written ({error.strerror})") from None


def _mark(widths: Sequence[int]) -> str:
    """The source of the text by which the loader knows a file."""
    text = MARK.format(stamp=stamp(), widths=" ".join(str(width) for width in sorted(widths)))
    return (
        f'extern "C" __attribute__((used, visibility("default"))) const char fast_attention_core_mark[] = "{text}";\n'
    )


def find_compiler() -> list[str]:
    """The command of the C++ compiler: ``CXX`` where it is set, else the first of ``COMPILERS`` on the path.

    Raises:
        NoCompiler: There is none, or it is too old or unknown.
    """
    chosen = shlex.split(os.environ.get("CXX", ""))
    names = chosen[:1] or COMPILERS
    path = next((path for path in map(shutil.which, names) if path), None)
    if path is None:
        raise NoCompiler(f"there is no C++ compiler ({', '.join(names)})")
    command = [path, *chosen[1:]]
    try:
        macros = _run([*command, "-dM", "-E", "-x", "c++", os.devnull])
    except (NotBuilt, OSError) as error:
        raise NoCompiler(f"{path} does not run: {error}") from None
    versions = dict(re.findall(r"#define (__GNUC__|__clang_major__) (\d+)", macros))
    name, version = ("clang", "__clang_major__") if "__clang_major__" in versions else ("GCC", "__GNUC__")
    if int(versions.get(version, 0)) < OLDEST[name]:
        is_one = f"{name} {versions[version]}" if version in versions else "neither GCC nor clang"
        needed = " or ".join(f"{name} {oldest}" for name, oldest in OLDEST.items())
        raise NoCompiler(f"{path} is {is_one}; {needed} is needed, or newer")
    return command


def sanitizers() -> list[str]:
    """The libraries that must be loaded before everything else where a sanitized core is loaded (``LD_PRELOAD``)."""
    names = ("libasan.so", "libubsan.so", "libstdc++.so")
    return [_run([*find_compiler(), f"-print-file-name={name}"]).strip() for name in names]


def _torch_folder() -> Path:
    """The folder of the installed torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NotBuilt("torch is not installed")
    folder = Path(spec.origin).parent
    if not (folder / "include" / "torch" / "csrc" / "stable" / "library.h").exists():
        raise NotBuilt(f"the torch in {folder} has no headers of its stable interface")
    return folder


def _run(command: Sequence[str]) -> str:
    """Run a command of the compiler and return what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode:
        words = done.stderr.strip()
        first = next((line for line in words.splitlines() if "error" in line), words.partition("\n")[0])
        raise NotBuilt(f"the compiler failed: {first or f'exit status {done.returncode}'}", words)
    return done.stdout
