"""`hf-l2l env`: versions, devices, page-locking and limits for a bug report, and the rates of the machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError
from typing import Any

import hf_l2l
from hf_l2l.cli.command import GOOD, Command, add_json, count_text, print_json


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--probe", action="store_true", help="measure link, host memory, AdamW and matrix products for a few seconds"
    )
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        help="with --probe: the device, such as cuda:1; without it, the current one",
    )
    add_json(parser)


def _run(options: argparse.Namespace) -> int:
    if options.device is not None and not options.probe:
        raise ValueError(
            f"--device names the device that --probe measures (got --device {options.device} without --probe); add "
            "--probe, or leave --device out"
        )
    from hf_l2l import surroundings

    parts: dict[str, Callable[[], Any]] = {
        "versions": surroundings.versions,
        "unsupported": _unsupported,
        "system": surroundings.system,
        "devices": surroundings.devices,
        "page_locking": surroundings.page_locking,
        "host": surroundings.host,
        "variables": surroundings.variables,
    }
    found = {name: _or_failure(part) for name, part in parts.items()}
    found["probe"] = _probed(options.device) if options.probe else None
    if options.json:
        print_json(found)
    else:
        print("\n".join(_lines(found)))
    return GOOD


def _unsupported() -> str | None:
    """What is wrong with the versions, in one sentence; None if they are supported."""
    try:
        hf_l2l.check_versions(hf_l2l.TESTED)
    except (ImportError, PackageNotFoundError) as error:
        return str(error)
    return None


def _or_failure(part: Callable[[], Any]) -> Any:
    """What `part` finds, or why it does not: a report of a machine on which something is broken says the rest."""
    try:
        return part()
    except (RuntimeError, ValueError, AttributeError, ImportError, OSError) as error:
        return f"failed: {type(error).__name__}: {error}"


def _probed(device: str | None) -> dict[str, Any]:
    from hf_l2l.probe.rates import probe

    figures: dict[str, Any] = json.loads(probe(device).to_json())
    return figures


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    for title, part in found.items():
        if part is None or part == {}:
            continue
        yield f"{title.replace('_', '-')}:"
        if isinstance(part, str):
            yield f"  {part}"
        elif isinstance(part, list):
            yield from (f"  {', '.join(_pairs(each))}" for each in part)
            if not part:
                yield "  none: layers run on the CPU"
        else:
            yield from (f"  {pair}" for pair in _pairs(part))


def _pairs(part: Mapping[str, Any]) -> Iterator[str]:
    """Names and values for people: sizes of memory in GiB, rates with their units."""
    from hf_l2l.runtime.tensors import size_text

    for name, value in part.items():
        shown = value
        if value is None:
            shown = "-"
        elif name.endswith("_bytes"):
            shown = size_text(value)
        elif isinstance(value, Mapping):
            shown = ", ".join(f"{key} {_rate(name, each)}" for key, each in value.items()) or "-"
        elif isinstance(value, float):
            shown = _rate(name, value)
        yield f"{name.removesuffix('_bytes')}: {shown}"


def _rate(name: str, value: float) -> str:
    unit = {"adamw_by_threads": "parameters/s", "flops": "FLOP/s"}.get(name, "bytes/s")
    return f"{count_text(value, 'G')} {unit}"


COMMAND = Command(
    "env",
    "show versions, devices, page-locking and limits of this machine for a bug report, and measure its rates",
    "env --probe",
    _add_flags,
    _run,
)
