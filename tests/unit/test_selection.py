"""Which cases a run of the tests has: no choice depends on a name, and nothing is in neither of the devices' runs."""

from __future__ import annotations

import itertools

from tiers import ONLY, chosen, few

CASES = list(range(5))


def test_cases_are_dealt_to_the_devices_and_a_mark_decides_for_all():
    for count in range(2, 12):
        dealt = [chosen([*range(count)], (), "engine", device=device, is_all=False) for device in ("cpu", "sim")]
        assert sorted(dealt[0] + dealt[1]) == [*range(count)] and len(dealt[0]) >= len(dealt[1]) >= max(1, count // 4)
    for device, folder, cases in (("cpu", "trainer", [0]), ("sim", "trainer", [0]), ("cpu", "unit", CASES)):
        assert chosen(cases, (), folder, device=device, is_all=False) == cases
    for mark, devices in {"nightly": (), "cpu_suffices": ("cpu", "cuda"), **ONLY}.items():
        for device in ("cpu", "sim", "cuda"):
            expected = CASES if device in devices else []
            assert chosen(CASES, [mark], "engine", device=device, is_all=False) == expected, (mark, device)
            assert chosen(CASES, [mark], "engine", device=device, is_all=True) == (
                CASES if mark not in ONLY else expected
            )


def test_a_few_combinations_have_what_occurs_together_in_any():
    every = [each for each in itertools.product("abcd", range(3), (False, True)) if each != ("a", 0, True)]
    for together in (1, 2):
        some = few(every, together)
        within = [
            {part for each in combinations for part in itertools.combinations(enumerate(each), together)}
            for combinations in (some, every)
        ]
        assert len(some) < len(every) and within[0] == within[1]
