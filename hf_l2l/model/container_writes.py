"""What a call writes into the lists and dicts that it was given.

Arguments are taken apart on their way to a layer or to the model, and put together again, so that a call gets other
containers than its caller has: the forward of each ubatch, and its recompute. What is written into them is part of
what the call returns: tensors get their gradients and rows as its outputs do, and all of it is written into the
containers of the caller once.
"""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Collection, MutableMapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

_NESTING = (list, deque, tuple, dict, UserDict)

Contents = list[Any] | dict[Any, Any]
Written = list[tuple[int, Contents]]
"""The numbers of containers that have other contents than before, and these; `Same` stands for what was there."""


@dataclass(frozen=True)
class Same:
    """What was in the container before, at an index or key."""

    key: Any


def containers_of(value: Any, leaves: Collection[Any] = ()) -> list[Any]:
    """The lists and dicts in nested arguments, in a fixed order: structures that are alike have as many. Those among
    the `leaves`, which are not taken apart, are left out."""
    found, left, apart = [], [value], {id(leaf) for leaf in leaves}
    while left:
        each = left.pop()
        if id(each) in apart or not isinstance(each, _NESTING):
            continue
        if not isinstance(each, tuple):
            found.append(each)
        left += reversed([*each.values()] if isinstance(each, dict | UserDict) else [*each])
    return found


class Containers:
    """The containers of some arguments, and what was in them at first."""

    def __init__(self, arguments: Any, leaves: Collection[Any] = ()) -> None:
        self.all = containers_of(arguments, leaves)
        self._before = [contents_of(each) for each in self.all]

    def written(self) -> Written:
        """What is in them now, of those that have been written into."""
        pairs = enumerate(zip(self.all, self._before, strict=True))
        return [
            (number, now) for number, (each, old) in pairs if (now := difference(old, contents_of(each))) is not None
        ]


def write(written: Written, containers: Sequence[Any]) -> None:
    """Write into other containers what was written into theirs."""
    for number, contents in written:
        write_into(containers[number], contents)


def write_into(container: Any, contents: Contents) -> None:
    """Write into a container what was written into another one, or into itself before that was taken away."""
    old = contents_of(container)
    if isinstance(contents, dict):
        put(container, {key: old[key] if isinstance(value, Same) else value for key, value in contents.items()})
    else:
        put(container, [old[value.key] if isinstance(value, Same) else value for value in contents])


def contents_of(container: Any) -> Contents:
    """What is in a list, a deque or a mapping now."""
    return dict(container) if isinstance(container, MutableMapping) else list(container)


def put(container: Any, contents: Contents) -> None:
    """Give a container these contents, in this order; what it has already is not written again."""
    if isinstance(contents, dict):
        for key in [key for key in container if key not in contents]:
            del container[key]
        if [*container] != [*contents][: len(container)]:  # the order is another one
            container.clear()
        for key, value in contents.items():
            if key not in container or container[key] is not value:
                container[key] = value
    else:
        container.clear()
        container.extend(contents)


def difference(old: Contents, new: Contents) -> Contents | None:
    """The new contents, with `Same` for what was there; None if nothing has changed."""
    if isinstance(new, dict):
        assert isinstance(old, dict), "the same container as before"
        if [*old] == [*new] and all(map(is_, old.values(), new.values())):
            return None
        return {key: Same(key) if key in old and old[key] is value else value for key, value in new.items()}
    if len(old) == len(new) and all(map(is_, old, new)):
        return None
    places = {id(value): index for index, value in enumerate(old)}
    return [Same(places[id(value)]) if id(value) in places else value for value in new]
