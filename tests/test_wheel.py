"""What is installed is what is here: the wheel and the source distribution, built, compared, unpacked and run."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from fast_attention import core

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
DIST_INFO = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
KINDS = {".py", ".typed", ".html", ".css", ".js", ".csv", ".cpp", ".h"}
LARGEST = 900_000  # bytes of a wheel, which holds code and no data


def build(source: Path, kinds: list[str], to: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(to)]
    done = subprocess.run([*command, *(f"-t{kind}" for kind in kinds)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel, a source distribution and what that unpacks to."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, ["wheel", "sdist"], folder)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as packed:
        packed.extractall(folder / "unpacked", filter="data")
    return folder


def held(folder: Path) -> dict[str, str]:
    """The files of a folder's wheel and their hashes."""
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return {name: hashlib.sha256(wheel.read(name)).hexdigest() for name in wheel.namelist()}


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    ignored = {*(SOURCE / "fast_attention").rglob("__pycache__/*"), *core.FILE.parent.glob("_core.*.so")}
    files = [path for path in (SOURCE / "fast_attention").rglob("*") if path.is_file() and path not in ignored]
    wanted = {str(path.relative_to(SOURCE)): path for path in files}
    own = held(built)
    kept = {name: own.pop(name) for name in [*own] if name.split("/")[0].endswith(".dist-info")}
    assert own == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in wanted.items()}
    assert {path.suffix for path in files} <= KINDS
    assert "fast_attention/py.typed" in own
    assert {name.split("/", 1)[1] for name in kept} == DIST_INFO
    assert next(built.glob("*.whl")).stat().st_size < LARGEST


def test_the_metadata_names_every_extra(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("METADATA"))
        said = message_from_bytes(wheel.read(name))
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*said.get_all("Provides-Extra", [])} == {*declared["optional-dependencies"]}
    assert said["Requires-Python"] == declared["requires-python"]


def test_the_source_distribution_makes_the_same_wheel(built: Path, tmp_path: Path) -> None:
    build(next((built / "unpacked").iterdir()), ["wheel"], tmp_path)
    assert held(tmp_path) == held(built)


def test_the_wheel_works_where_the_source_is_not(built: Path, tmp_path: Path) -> None:
    """With the packages of these tests, whose own link to the source is not read (``-S``)."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path)]
    subprocess.run([*pip, str(next(built.glob("*.whl")))], check=True)
    path = os.pathsep.join([str(tmp_path), sysconfig.get_path("purelib")])
    command = [sys.executable, "-S", str(ROOT / "tests" / "installed.py"), "lab", "hf", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
