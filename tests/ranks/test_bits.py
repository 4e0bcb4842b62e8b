"""n ranks with b rows each have the bits of one process that accumulates n batches of b rows."""

from __future__ import annotations

from typing import Any

import pytest
from rank_cases import MODELS, assert_same, trained

MODES: dict[str, dict[str, Any]] = {
    "serial": {"eps_update": "serial"},
    "deferred": {"eps_update": "deferred"},
    "ubatches": {"ubatch_size": 2, "eps_update": "deferred"},
    "bf16": {"cmp": "bf16", "eps_update": "deferred"},
    "bf16 per sweep": {"cmp": "bf16", "host_copies": "per_sweep"},
    "16-bit gradients and state": {"cmp": "bf16", "grad_dtype": "16bit", "moment_dtype": "bf16"},
    "fp16": {"cmp": "fp16", "eps_update": "deferred"},
    "host stash": {"stash": "host", "ubatch_size": 2},
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("albert", "dropout")])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_on_the_host(pool, size, name, mode):
    alone = pool(1).run(trained, name, MODES[mode], size)[0]
    assert_same(pool(size).run(trained, name, MODES[mode], size), alone)
