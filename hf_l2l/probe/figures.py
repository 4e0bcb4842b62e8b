"""The record of what a machine reaches, and its form in JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class HardwareFigures:
    """What one device and its host reach. Rates are medians of measurements, or figures that a user gives."""

    device_name: str
    """What the device calls itself; of the CPU, the name of the processor."""
    device_memory_bytes: int | None
    """Bytes of memory of the device in all; None if it shares that of the host, or does not tell."""
    link_up: float | None
    """Bytes/s from host to device, nothing else under way: from page-locked memory if `page_locked`, else from
    pageable memory. None, as all of the link, if host and device share memory."""
    link_down: float | None
    """Bytes/s from device to host, nothing else under way."""
    link_up_both: float | None
    """Bytes/s from host to device while as many bytes go the other way."""
    link_down_both: float | None
    """Bytes/s from device to host while as many bytes go the other way."""
    dram: float
    """Bytes/s that the host reads and writes, both counted, while all its cores copy memory."""
    adamw_by_threads: Mapping[int, float]
    """Parameters/s that torch's fused AdamW updates on the host in fp32, by the number of threads."""
    flops: Mapping[str, float]
    """FLOP/s of one large matrix product on the device, by dtype: "fp32" (as torch is set, without TF32 by default),
    "bf16", "fp16". A dtype in which the device multiplies no matrices is left out."""
    page_locked: bool | None = None
    """Whether host memory could be page-locked; None if host and device share memory."""
    pageable: Mapping[str, float] = field(default_factory=dict)
    """Bytes/s from and to pageable memory: "up", "down", "up_both", "down_both"; empty if host and device share
    memory."""

    def to_json(self) -> str:
        """The figures as a JSON object with the names of the fields."""
        return json.dumps(asdict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> HardwareFigures:
        """The figures that `to_json` has written, or that stand under "probe" in the JSON of `hf-l2l env --probe`.

        Raises:
            ValueError: if the text is not such an object: a field is missing, unknown, or of another kind.
        """
        try:
            found: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"figures of the hardware must be JSON (got {text[:40]!r}: {error}){REMEDY}") from error
        if not isinstance(found, dict):
            raise ValueError(f"figures of the hardware must be a JSON object (got {text[:40]!r}){REMEDY}")
        found = found["probe"] if isinstance(found.get("probe"), dict) else found
        names = {each.name for each in fields(HardwareFigures)}
        if found.keys() != names:
            raise ValueError(
                f"figures of the hardware must have the fields {', '.join(sorted(names))} (got "
                f"{_difference(found.keys() - names, names - found.keys())}){REMEDY}"
            )
        threads = {_count(key): _rate("adamw_by_threads", v) for key, v in _object(found, "adamw_by_threads").items()}
        return HardwareFigures(
            device_name=str(found["device_name"]),
            device_memory_bytes=_or_none(found, "device_memory_bytes", int),
            **{name: _or_none(found, name, float) for name in LINK},
            dram=_rate("dram", found["dram"]),
            adamw_by_threads=threads,
            flops={str(key): _rate("flops", value) for key, value in _object(found, "flops").items()},
            page_locked=_flag(found["page_locked"]),
            pageable={str(key): _rate("pageable", value) for key, value in _object(found, "pageable").items()},
        )


LINK = ("link_up", "link_down", "link_up_both", "link_down_both")
"""The fields of the link."""

REMEDY = "; write them with: hf-l2l env --probe --json"


def _difference(unknown: set[str], missing: set[str]) -> str:
    told = [
        f"{what} {', '.join(sorted(names))}" for what, names in (("an unknown", unknown), ("no", missing)) if names
    ]
    return " and ".join(told)


def _object(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if not isinstance(found[name], dict):
        raise ValueError(f"{name} must be an object of rates by name (got {found[name]!r}){REMEDY}")
    given: Mapping[str, Any] = found[name]
    return given


def _rate(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a rate per second, above 0 and finite (got {value!r}){REMEDY}")
    return value


def _or_none(found: Mapping[str, Any], name: str, kind: type) -> Any:
    return None if found[name] is None else kind(_rate(name, found[name]))


def _count(key: str) -> int:
    if not key.isdecimal() or int(key) < 1:
        raise ValueError(f"adamw_by_threads must name numbers of threads of at least 1 (got {key!r}){REMEDY}")
    return int(key)


def _flag(value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"page_locked must be true, false or null (got {value!r}){REMEDY}")
    return value
