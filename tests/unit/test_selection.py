"""Which cases a run of the tests has: no choice depends on a name, and nothing is in neither of the devices' runs."""

from __future__ import annotations

import itertools

import pytest

from tiers import chosen, few

CASES = list(range(5))


@pytest.mark.parametrize("folder", ["engine", "trainer"])
def test_cases_are_dealt_to_the_cpu_and_the_simulated_accelerator(folder):
    cpu, sim = (chosen(CASES, (), folder, device=device, is_all=False) for device in ("cpu", "sim"))
    assert sorted(cpu + sim) == CASES and abs(len(cpu) - len(sim)) == 1
    assert chosen(CASES[:1], (), folder, device="cpu", is_all=False) == CASES[:1]
    assert chosen(CASES[:1], (), folder, device="sim", is_all=False) == CASES[:1]


def test_all_of_them_run_where_one_device_has_the_folder_and_with_all():
    assert chosen(CASES, (), "unit", device="cpu", is_all=False) == CASES
    assert chosen(CASES, (), "engine", device="cuda", is_all=False) == CASES
    for device, mark in itertools.product(("cpu", "sim", "cuda"), ("nightly", "cpu_suffices")):
        assert chosen(CASES, [mark], "engine", device=device, is_all=True) == CASES


@pytest.mark.parametrize(
    ("mark", "cpu", "sim"), [("nightly", [], []), ("cpu_suffices", CASES, []), ("on_a_device", [], CASES)]
)
def test_a_mark_decides_for_all_cases_of_a_test(mark, cpu, sim):
    assert chosen(CASES, [mark], "engine", device="cpu", is_all=False) == cpu
    assert chosen(CASES, [mark], "engine", device="sim", is_all=False) == sim


@pytest.mark.parametrize("together", [1, 2])
def test_a_few_combinations_have_what_occurs_together_in_any(together):
    every = [each for each in itertools.product("abcd", range(3), (False, True)) if each != ("a", 0, True)]
    some = few(every, together)
    assert len(some) < len(every)

    def within(combinations):
        return {part for each in combinations for part in itertools.combinations(enumerate(each), together)}

    assert within(some) == within(every)
