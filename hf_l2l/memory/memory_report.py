"""`MemoryReport`: bytes by tier and name, as a dict and as a table."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from html import escape

import torch

from hf_l2l.runtime.tensors import size_text, tensor_bytes

TOTAL, PAGE_LOCKED = "total", "page-locked"

Bytes = dict[str, int]
""" "now" and "peak" -> bytes."""


class MemoryReport(dict[str, dict[str, Bytes]]):
    """Where the bytes are: tier ("device", "host") -> name -> {"now": bytes, "peak": bytes}. Of several devices, the
    first one is "device", and the others have their names: "cuda:1".

    `print` shows a table, and so does a notebook. In each tier the names add up to "total". Where layers run on the
    CPU, there is no tier "device". The peak of the device is what it held when it held most, since the model was
    attached. On the host, each name has a peak of its own. A tier "of which" has what is "page-locked" of the host.
    """

    def __init__(
        self,
        title: str,
        devices: dict[str, dict[str, Bytes]],
        host: dict[str, Bytes],
        page_locked: Bytes,
        note: str = "",
    ) -> None:
        """Of the names of each tier; totals are added. `title` and `note` are shown above and below the table."""
        tiers = {**devices, "host": host}
        super().__init__({tier: {**names, TOTAL: _sum(names)} for tier, names in tiers.items()})
        self["of which"] = {PAGE_LOCKED: page_locked}
        self.title = title
        self.note = note

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Tier, name, and the bytes now and at the peak; names that never had any are left out."""
        for tier, names in self.items():
            for name, size in names.items():
                if size["now"] or size["peak"] or name == TOTAL:
                    yield tier, name, size_text(size["now"]), size_text(size["peak"])

    def __str__(self) -> str:
        lines = [self.title, f"{'':<42}{'now':>12}{'peak':>12}"]
        lines += [f"{tier:<10}{name:<32}{now:>12}{peak:>12}" for tier, name, now, peak in self._rows()]
        return "\n".join([*lines, self.note] if self.note else lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join("<tr>" + "".join(f"<td>{escape(each)}</td>" for each in row) + "</tr>" for row in self._rows())
        note = f"<tfoot><tr><td colspan='4'>{escape(self.note)}</td></tr></tfoot>" if self.note else ""
        return (
            f"<table><caption>{escape(self.title)}</caption>"
            "<thead><tr><th></th><th>memory</th><th>now</th><th>peak</th></tr></thead>"
            f"<tbody>{rows}</tbody>{note}</table>"
        )


def _sum(names: dict[str, Bytes]) -> Bytes:
    return {when: sum(size[when] for size in names.values()) for when in ("now", "peak")}


class HostTable:
    """A table of the tensors in host memory, for people: kinds, how many there are of each, and their bytes."""

    HEAD = ("in host memory", "tensors", "size")

    def __init__(self, name: str, tensors: Mapping[str, Collection[torch.Tensor]], locked_bytes: int) -> None:
        self.title = name + (f"; {size_text(locked_bytes)} page-locked" if locked_bytes else "")
        self.rows = [
            (kind, str(len(found)), size_text(tensor_bytes(found)))
            for kind, found in tensors.items()
            if found or kind != "copies"
        ]

    def __str__(self) -> str:
        lines = [f"{kind:<16}{count:>8}{size:>12}" for kind, count, size in (self.HEAD, *self.rows)]
        return "\n".join([self.title, *lines])

    def html(self) -> str:
        """As a notebook shows it."""
        head = "".join(f"<th>{each}</th>" for each in self.HEAD)
        rows = "".join("<tr>" + "".join(f"<td>{each}</td>" for each in row) + "</tr>" for row in self.rows)
        return f"<table><caption>{self.title}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


class ShownAsTable:
    """Of objects that a shell and a notebook show as a `HostTable`."""

    def host_table(self) -> HostTable:
        """What is shown."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return str(self.host_table())

    def _repr_html_(self) -> str:
        return self.host_table().html()
