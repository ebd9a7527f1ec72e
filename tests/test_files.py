"""Files that belong together: a process that is killed while it saves leaves what was there, or what it wrote."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fast_attention import files, from_pretrained, swap
from tests.integrations.test_swap import build

STEPS = ("replace", "rename", "unlink", "rmdir")


class Killed(BaseException):
    """Ends a process in the middle, as far as its files go."""


def _swapped() -> Any:
    model = build("Llama")
    swap(model, "Local(window=4)")
    return model


def _save_sharded(model: Any, folder: Path) -> None:
    model.save_pretrained(folder, max_shard_size="60KB")


def _save_whole(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)


KINDS: dict[str, tuple[Any, Any, Any, Any]] = {
    "a swapped one, then in shards": (_swapped, _save_whole, _save_sharded, from_pretrained),
    "a swapped one in shards, then whole": (_swapped, _save_sharded, _save_whole, from_pretrained),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_process_killed_while_it_saves_leaves_the_old_model_or_the_new(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_model, save, save_again, load = KINDS[kind]
    model = build_model()

    def numbered(number: int) -> Any:
        for parameter in model.parameters():
            parameter.data.fill_(number)
        return model

    def number_of(folder: Path) -> set[float]:
        return {x for parameter in load(folder).parameters() for x in parameter.flatten().tolist()}

    outcomes, done = [], False
    for last in range(20):
        folder, beside = tmp_path / str(last), tmp_path / f"{last} beside"
        save(numbered(0), folder)
        if done := _is_done(lambda folder=folder: save_again(numbered(1), folder), last, monkeypatch):
            break
        shutil.copytree(folder, beside)
        outcomes.append(number_of(beside))
        save_again(numbered(2), folder)
        assert number_of(folder) == {2}
        assert not list(folder.glob(".*.complete"))
    assert done
    assert outcomes == sorted(outcomes, key=max)
    assert {max(x) for x in outcomes} == {0, 1}
    assert all(len(x) == 1 for x in outcomes)


def _is_done(write: Callable[[], None], last: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run it, killed before change ``last`` of a name; whether it was done before."""
    steps = [0]

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **settings: Any) -> Any:
            if steps[0] == last:
                raise Killed
            steps[0] += 1
            return change(*args, **settings)

        return run

    with monkeypatch.context() as patch:
        for name in STEPS:
            patch.setattr(os, name, counted(getattr(os, name)))
        patch.setattr(shutil, "rmtree", lambda *args, **settings: None)
        try:
            write()
        except Killed:
            return False
    return True


def test_who_locks_a_folder_deletes_what_killed_processes_left_half_written(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint.1.part").write_text("half")
    (tmp_path / ".model.2.part").mkdir()
    (tmp_path / ".model.2.part" / "config.json").write_text("half")
    (tmp_path / ".model.complete").mkdir()
    with files.locked(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {files.LOCK, ".model.complete"}


def test_a_folder_that_was_locked_for_nothing_is_gone_again(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="refused"), files.locked(tmp_path / "a" / "b"):
        raise ValueError("refused")
    assert not [*tmp_path.iterdir()]
    (tmp_path / "a").mkdir()
    with files.locked(tmp_path / "a"):
        pass
    with files.locked(tmp_path / "c" / "d"):
        (tmp_path / "c" / "file").touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "c", "file"]


def test_a_folder_is_locked_by_one_at_a_time(tmp_path: Path) -> None:
    with files.locked(tmp_path), pytest.raises(files.InUse, match=f"in use by process {os.getpid()}"):
        files.locked(tmp_path).__enter__()
    with files.locked(tmp_path):
        pass
