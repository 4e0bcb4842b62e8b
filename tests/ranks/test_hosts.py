"""Ranks on several hosts."""

from __future__ import annotations

import pytest

from host_cases import on_hosts
from rank_cases import MODELS, assert_same, trained

MODES = {
    "serial": {"eps_update": "serial"},
    "deferred": {"eps_update": "deferred"},
    "ubatches": {"ubatch_size": 2, "eps_update": "deferred"},
    "bf16": {"cmp": "bf16", "eps_update": "deferred"},
    "bf16 per sweep": {"cmp": "bf16", "host_copies": "per_sweep"},
    "fp16": {"cmp": "fp16", "eps_update": "deferred"},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["bert", "tied", "skipping", "large"])
@pytest.mark.parametrize("size", [2, 3])
def test_one_rank_on_each_host(pool, size, name, mode):
    alone = pool(1).run(trained, name, MODES[mode], size)[0]
    assert_same(pool(size).run(on_hosts, size, trained, name, MODES[mode], size), alone, on_one_host=False)
