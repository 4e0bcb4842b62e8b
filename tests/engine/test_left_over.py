"""After many steps there is no more of anything than after a few: threads, files, tensors."""

from __future__ import annotations

import pytest

import left_over
from hf_l2l import detach_l2l
from update_cases import toy_under


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", ["serial", "deferred", "eager"])
def test_steps_leave_nothing(mode):
    """3,000 of them are a part of `make soak`."""
    threads = left_over.own_threads()
    model, eps, optimizer, batch = toy_under("cpu", mode)
    found = []
    for step in range(60):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            eps.synchronize()
            found.append(left_over.counts())
    left_over.assert_flat(found)
    detach_l2l(model)
    assert left_over.own_threads() <= threads
