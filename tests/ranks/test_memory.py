"""The memory that ranks find before they train: masters that they share are there already."""

from __future__ import annotations

from typing import Any

import pytest
from torch import distributed

from hf_l2l import L2LConfig
from hf_l2l.memory import host_limits
from hf_l2l.memory.memory_estimate import estimate
from host_cases import on_hosts
from models import bert
from rank_trainer import trained


def in_a_host_of(num_bytes: int, folder: str) -> int | str:
    """Train where so many bytes are available; the first rank holds all masters, and the others none."""

    def held() -> int:
        return 2**40 if distributed.get_rank() == 0 else 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_limits, "available_host_bytes", lambda: num_bytes)
        patch.setattr(host_limits, "own_bytes", held)
        try:
            found: dict[str, Any] = trained("bert", "l2l", folder, {"optim": "adamw_torch"})
        except MemoryError as error:
            return str(error)
        return int(found["step"])


NEED = estimate(bert(), L2LConfig())
STATE = NEED.gradients + NEED.moments + 2**12  # AdamW's step counters, too


def test_masters_that_the_first_rank_has_read_are_there_for_all(pool, tmp_path):
    assert pool(2).run(in_a_host_of, STATE, str(tmp_path)) == [4, 4]


def test_too_little_for_gradients_and_moments_is_refused_by_all(pool, tmp_path):
    for said in pool(2).run(in_a_host_of, NEED.moments, str(tmp_path)):
        assert "training needs" in str(said) and "is available" in str(said)


def test_two_hosts_need_half_of_gradients_and_moments_each(pool, tmp_path):
    assert pool(2).run(on_hosts, 2, in_a_host_of, STATE // 2, str(tmp_path)) == [4, 4]
