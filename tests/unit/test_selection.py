"""Which cases a run of the tests has: no choice depends on a name, and nothing is in neither of the devices' runs."""

from __future__ import annotations

import itertools

from tiers import chosen, few

CASES = list(range(5))
MARKS = {
    "nightly": (),
    "cpu_suffices": ("cpu",),
    "on_the_host": ("cpu",),
    "on_a_device": ("sim", "cuda"),
    "on_sim": ("sim",),
    "not_on_cuda": ("cpu", "sim"),
}
"""Mark -> the devices on which `make test` has all cases of a test."""


def test_cases_are_dealt_to_the_devices_and_a_mark_decides_for_all():
    for count in range(2, 12):
        dealt = [chosen([*range(count)], (), "engine", device=device, is_all=False) for device in ("cpu", "sim")]
        assert sorted(dealt[0] + dealt[1]) == [*range(count)] and len(dealt[0]) >= len(dealt[1]) >= max(1, count // 4)
    for device in ("cpu", "sim"):
        assert chosen(CASES[:1], (), "trainer", device=device, is_all=False) == CASES[:1]
    assert chosen(CASES, (), "unit", device="cpu", is_all=False) == CASES
    assert chosen(CASES, (), "engine", device="cuda", is_all=False) == CASES
    for mark, devices in MARKS.items():
        for device in ("cpu", "sim", "cuda"):
            expected = CASES if device in devices else []
            assert chosen(CASES, [mark], "engine", device=device, is_all=False) == expected, (mark, device)
    for device, mark in itertools.product(("cpu", "sim", "cuda"), ("nightly", "cpu_suffices")):
        assert chosen(CASES, [mark], "engine", device=device, is_all=True) == CASES


def test_a_few_combinations_have_what_occurs_together_in_any():
    every = [each for each in itertools.product("abcd", range(3), (False, True)) if each != ("a", 0, True)]
    for together in (1, 2):
        some = few(every, together)
        assert len(some) < len(every)
        within = [
            {part for each in combinations for part in itertools.combinations(enumerate(each), together)}
            for combinations in (some, every)
        ]
        assert within[0] == within[1]
