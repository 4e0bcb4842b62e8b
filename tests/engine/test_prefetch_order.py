"""What is fetched while a layer computes, as a table."""

from __future__ import annotations

import pytest

from hf_l2l.device.prefetch import fetched_in_backward, fetched_in_forward

FORWARD = [
    # called last time, called now -> fetched while each of them computes
    ("", "abc", [None, None, None]),
    ("abc", "abc", ["b", "c", None]),
    ("abc", "ac", ["b", None]),  # a layer was dropped
    ("ac", "abc", ["c", None, None]),  # and is back
    ("aaa", "aaa", ["a", "a", None]),  # the same layer, several times
    ("abab", "abab", ["b", "a", "b", None]),
    ("abcd", "abd", ["b", "c", None]),
    ("abc", "bc", ["c", None]),  # the model begins elsewhere
    ("ab", "abc", ["b", None, None]),
]

BACKWARD = [
    # called, the lowest call that is trained -> fetched while each of them computes, the last one first
    ("abc", 0, ["b", "a", None]),
    ("abc", 1, ["b", None]),
    ("abc", 2, [None]),
    ("aa", 0, ["a", None]),
]


@pytest.mark.parametrize(("last_time", "now", "fetched"), FORWARD)
def test_forward(last_time, now, fetched):
    assert [fetched_in_forward(last_time, number, layer) for number, layer in enumerate(now)] == fetched


@pytest.mark.parametrize(("called", "lowest", "fetched"), BACKWARD)
def test_backward(called, lowest, fetched):
    numbers = reversed(range(lowest, len(called)))
    assert [fetched_in_backward(called, number, lowest) for number in numbers] == fetched
