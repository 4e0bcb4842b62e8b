"""What other users of the machine, and others in the network, can see of a training and its checkpoints."""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from training import SAVING, l2l_trainer, plain_trainer


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(checkpoint: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (checkpoint, *checkpoint.iterdir())}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077], indirect=True, ids=oct)
def test_a_checkpoint_has_the_modes_of_transformers_trainer(tmp_path, monkeypatch, umask):
    written = torch.save
    staged: list[int] = []

    def save(state: Any, path: str, *args: Any) -> None:
        written(state, path, *args)
        staged.append(stat.S_IMODE(Path(path).parents[1].stat().st_mode))

    plain_trainer(tmp_path / "plain", **SAVING).train()
    monkeypatch.setattr(torch, "save", save)
    l2l_trainer(tmp_path / "ours", **SAVING).train()
    ours, theirs = (modes(tmp_path / name / "checkpoint-4") for name in ("ours", "plain"))
    own = {ours.pop(name) for name in ours.keys() - theirs.keys()}
    assert own == {0o666 & ~umask}  # the manifest above all
    assert ours == theirs and ours["checkpoint-4"] == 0o777 & ~umask
    assert set(staged) == {0o700} and len(staged) >= 8  # what is not finished is nobody else's


def listening() -> set[str]:
    """Inodes of this process's sockets that wait for connections, whoever has opened them."""
    own, found = set(), set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread has closed it
            own.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    for name in ("tcp", "tcp6"):
        rows = [line.split() for line in Path("/proc/self/net", name).read_text().splitlines()[1:]]
        found |= {row[9] for row in rows if row[3] == "0A"}  # TCP_LISTEN
    return own & found


class Listening(hf.TrainerCallback):
    """Looks while layers run and checkpoints are saved."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.times = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.times += 1
        self.found |= listening()

    on_save = on_step_end


SOCKETS: list[str] = []
sys.addaudithook(lambda event, args: SOCKETS.append(event) if event in ("socket.bind", "socket.listen") else None)


def test_nobody_can_connect_to_a_training(tmp_path):
    with socket.create_server(("127.0.0.1", 0)):
        assert len(listening()) == 1 and SOCKETS  # what would be found
    before, looks = listening(), Listening()
    SOCKETS.clear()
    l2l_trainer(tmp_path, callbacks=[looks], **SAVING).train()
    assert looks.times == 6 and looks.found == before and SOCKETS == []
