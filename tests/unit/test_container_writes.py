"""What has changed in containers, and is written into others like them."""

from __future__ import annotations

import torch

from hf_l2l.model.container_writes import Containers, containers_of, write


def test_only_what_has_changed_is_written():
    """What was there before keeps its place, and its identity."""
    first, second, new = torch.zeros(1), torch.ones(1), torch.ones(2)
    seen = {"a": first, "items": [first, second]}
    containers = Containers(([seen], {}))
    assert containers.written() == []
    seen["b"] = seen.pop("a")
    seen["items"].insert(0, new)
    theirs = {"a": "first", "items": ["first", "second"]}
    items = theirs["items"]
    write(containers.written(), containers_of(([theirs], {})))
    assert theirs == {"items": [new, "first", "second"], "b": first} and theirs["items"] is items
