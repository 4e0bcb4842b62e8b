"""When rows are there: of the rows as they were downloaded, until their memory is used for others."""

from __future__ import annotations

import torch

from hf_l2l.stash.arrivals import Arrivals


def test_rows_have_the_point_of_their_download():
    arrivals, host = Arrivals(), torch.empty(6, 2)
    arrivals.begin(host)
    arrivals.add(host[:2], "first")
    arrivals.add(host[2:4], "second")
    assert [arrivals.of(host[i : i + 2], "last") for i in (0, 2, 4)] == ["first", "second", "last"]
    assert arrivals.of(host[:3], "last") == arrivals.of(host.view(-1)[:4], "last") == "last"


def test_memory_that_is_used_anew_has_other_rows():
    arrivals, memory = Arrivals(), torch.empty(12)
    for start in (6, 0):
        arrivals.begin(memory[start : start + 6])
        arrivals.add(memory[start : start + 2], f"from {start}")
    arrivals.begin(memory[:6].view(3, 2))
    arrivals.add(memory[:6], "whole")
    assert arrivals.of(memory[:2], "last") == "last" and arrivals.of(memory[6:8], "last") == "from 6"
    arrivals.add(memory[:2], "again")
    assert arrivals.of(memory[:2], "last") == "again"


def test_nothing_is_known_after_all_is_there():
    arrivals, host = Arrivals(), torch.empty(4)
    arrivals.begin(host)
    arrivals.add(host[:2], "first")
    arrivals.clear()
    assert arrivals.of(host[:2], None) is None
