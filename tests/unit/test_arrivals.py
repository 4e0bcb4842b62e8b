"""When rows are there: of the rows as they were sent, until their memory is used for others."""

from __future__ import annotations

import torch

from hf_l2l.stash.arrivals import Arrivals


def test_rows_have_the_point_of_their_copy():
    arrivals, memory = Arrivals(), torch.empty(6, 2)
    assert arrivals.of(memory) == []
    arrivals.begin(memory)
    arrivals.add(memory[:2], "first")
    arrivals.add(memory[2:4], "second")
    assert [arrivals.of(memory[i : i + 2]) for i in (0, 2)] == [["first"], ["second"]]
    # Rows that were cut in another way, or not sent at all, are there when all are.
    assert (
        arrivals.of(memory[:3]) == arrivals.of(memory.view(-1)[:4]) == arrivals.of(memory[4:]) == ["first", "second"]
    )
    arrivals.add(memory[4:], None)  # it was there at once
    assert arrivals.of(memory[4:]) == [] and arrivals.of(memory) == ["first", "second"]


def test_memory_that_is_used_anew_has_other_rows():
    arrivals, memory = Arrivals(), torch.empty(12)
    for start in (6, 0):
        arrivals.begin(memory[start : start + 6])
        arrivals.add(memory[start : start + 2], f"from {start}")
    arrivals.begin(memory[:6].view(3, 2))
    arrivals.add(memory[:6], "whole")
    assert arrivals.of(memory[:2]) == ["whole"] and arrivals.of(memory[6:8]) == ["from 6"]
    arrivals.add(memory[:2], "again")
    assert arrivals.of(memory[:2]) == ["again"]


def test_memory_that_lies_across_earlier_memory_replaces_it():
    arrivals, memory = Arrivals(), torch.empty(12)
    for start in (0, 4, 8):
        arrivals.begin(memory[start : start + 4])
        arrivals.add(memory[start : start + 4], f"from {start}")
        arrivals.was_read(memory[start : start + 4], f"read {start}")
    arrivals.begin(memory[3:9], "allocated")
    assert arrivals.free(memory[4:6]) == ["allocated", "read 8", "read 4", "read 0"]
    assert arrivals.of(memory[:3]) == arrivals.of(memory[10:]) == []  # their memory is no more theirs
    arrivals.add(memory[3:9], "across")
    assert arrivals.of(memory[4:6]) == ["across"]


def test_nothing_is_known_after_all_is_there():
    arrivals, host = Arrivals(), torch.empty(4)
    arrivals.begin(host)
    arrivals.add(host[:2], "first")
    arrivals.settle()
    assert arrivals.of(host[:2]) == []
