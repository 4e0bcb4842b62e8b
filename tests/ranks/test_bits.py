"""n ranks with b rows each have the bits of one process that accumulates n batches of b rows."""

from __future__ import annotations

import pytest

from rank_cases import MODELS, MODES, assert_same, trained, trained_on_two


@pytest.mark.one_in(240)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("albert", "dropout")])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_on_the_host(pool, size, name, mode):
    alone = pool(1).run(trained, name, MODES[mode], size)[0]
    assert_same(pool(size).run(trained, name, MODES[mode], size), alone)


@pytest.mark.one_in(80)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["bert", "t5", "llama", "tied", "skipping"])
@pytest.mark.parametrize("size", [2, 3])
def test_on_the_simulated_accelerator(pool, size, name, mode):
    alone = pool(1, sim=True).run(trained, name, MODES[mode], size)[0]
    assert_same(pool(size, sim=True).run(trained, name, MODES[mode], size), alone)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("sim", [False, True])
@pytest.mark.parametrize("name", ["bert", "skipping", "large"])
def test_micro_steps_are_added_to_one_sum(pool, name, sim):
    """The order of batches is the same: of each micro-step, those of the ranks in their order."""
    given = name, {"eps_update": "deferred"}, 2, 2, 3
    assert_same(pool(2, sim=sim).run(trained, *given), pool(1, sim=sim).run(trained, *given)[0])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sim", [False, True])
def test_a_layer_that_is_called_several_times(pool, sim):
    """One process adds call after call, a rank all its calls and then those of the ranks: the same to rounding."""
    found = pool(2, sim=sim).run(trained, "albert", {"eps_update": "deferred"}, 2)
    alone = pool(1, sim=sim).run(trained, "albert", {"eps_update": "deferred"}, 2)[0]
    assert found[0]["norms"] == found[1]["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["losses"][0] == alone["losses"][0][0]


@pytest.mark.one_in(16)
@pytest.mark.parametrize("sim", [False, True])
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("name", ["bert", "skipping", "tied", pytest.param("large", marks=pytest.mark.slow)])
def test_eager_updates(pool, name, accumulated, sim):
    given = name, {"eps_update": "eager"}, 2, 3, accumulated, None
    assert_same(pool(2, sim=sim).run(trained, *given), pool(1, sim=sim).run(trained, *given)[0])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options", [{"resident": "shell", "resident_layers": 1}, {"kept_weights": 1, "kept_graphs": 1}]
)
def test_copies_that_stay_on_the_device(pool, options):
    """Their masters are on the host, where ranks update them; each rank has its own copies on its device."""
    options = {"resident_update": "host", **options} if "resident" in options else options
    given = "bert", {"eps_update": "deferred", **options}, 2
    assert_same(pool(2, sim=True).run(trained, *given), pool(1, sim=True).run(trained, *given)[0])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_two_ranks_with_two_devices_each(pool, name):
    """Rank r runs layers on devices r and r + 2 in turn; the bits are those of one process on two devices."""
    options = {"eps_update": "deferred", "ubatch_size": 2, "head_device": "first"}
    alone = pool(1, sim=True).run(trained, name, {**options, "device": ("sim:0", "sim:1")}, 2)[0]
    found = pool(2, sim=True).run(trained_on_two, name, options, 2)
    assert_same(found, alone)
