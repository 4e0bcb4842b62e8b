"""`hf-l2l verify MODEL`: a tiny copy of a model, layer to layer against plain torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_l2l.cli.command import GOOD, MODEL_FAILS, Command, add_json, add_model, print_json, quiet

if TYPE_CHECKING:
    from hf_l2l.verify.family import Family
    from hf_l2l.verify.results import Result
    from hf_l2l.verify.tiny.copies import TinyCopy

COMPARED = ("gradients", "boundary", "evaluation", "generate", "LoRA", "saving")
"""Checks that compare tensors with a tolerance, and so can find the same bits."""


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--device",
        default="cpu",
        help="where layers run: cpu, to which weights are copied as to an accelerator (the default); sim, a simulated "
        "accelerator; or a device of this machine, such as cuda. Plain torch runs on the CPU",
    )
    add_json(parser)


def _run(options: argparse.Namespace) -> int:
    if options.device == "sim":
        from hf_l2l import testing

        try:
            testing.enable_simulated_accelerator()  # before any backward
        except RuntimeError as error:  # there is another accelerator
            raise ValueError(f"--device sim: {error}") from error
    from hf_l2l.devices import execution_device

    try:
        device = str(execution_device(options.device))
    except ValueError as error:  # it says what to do in a program, where None is another device
        rule = str(error).rpartition("; ")[0]
        raise ValueError(f"{rule}; leave out --device for the CPU, or name one of hf-l2l env") from error
    from hf_l2l.model_source import load_shapes
    from hf_l2l.verify.tiny.copies import tiny_copy

    quiet()
    model: Any = load_shapes(
        options.model, model_class=options.model_class, trust_remote_code=options.trust_remote_code
    )
    if type(model).__module__.partition(".")[0] != "transformers":
        raise ValueError(
            f"verify makes tiny copies of classes of transformers (got {type(model).__name__}, which comes with the "
            "model); compare the model in a test of your own, with attach_l2l"
        )
    copied = tiny_copy(model.config, type(model).__name__)
    status, checks = _checked(copied.family, device)
    found = {
        "model": options.model,
        "class_name": copied.family.model_class,
        "family": copied.of_family,
        "device": device,
        "sizes": dict(copied.family.sizes),
        "carried": list(copied.carried),
        "left_out": list(copied.left_out),
        "notes": list(copied.notes),
        "status": status,
        "checks": checks,
    }
    if options.json:
        print_json(found)
    else:
        print("\n".join(_lines(found, copied)))
    return GOOD if status == "green" else MODEL_FAILS


def _checked(family: Family, device: str) -> tuple[str, dict[str, dict[str, str]]]:
    """The status, and a verdict with its text for each check."""
    from hf_l2l.verify.checks import verify

    report = verify(family, device=device)
    if not report.results:
        raise ValueError(f"a tiny copy must train without L2L ({report.reason}); choose another class with --class")
    again = [name for name in COMPARED if report.results[name].status == "ok"]
    exact = verify(replace(family, exact=True), again, device).results
    return report.status, {name: _verdict(result, exact.get(name)) for name, result in report.results.items()}


def _verdict(result: Result, exact: Result | None) -> dict[str, str]:
    """A check's verdict: what it found with a tolerance, and without one where it compares tensors."""
    if result.status == "red":
        return {"verdict": "differs", "text": result.text}
    if result.status != "ok" or exact is None:
        return {"verdict": result.status, "text": "" if result.status == "ok" else result.text}
    if exact.status == "red":
        return {"verdict": "within tolerance", "text": exact.text.replace("is wrong by", "differs by")}
    return {"verdict": "exact", "text": "" if exact.status == "ok" else exact.text}


def _lines(found: Mapping[str, Any], copied: TinyCopy) -> Iterator[str]:
    begun = "the config itself, made small" if copied.of_family is None else f"the family {copied.of_family!r}"
    yield f"{found['model']}: a tiny {found['class_name']} on {found['device']}, of {begun}"
    if copied.of_family is not None:
        yield f"  taken from the config: {', '.join(copied.carried) or 'nothing that differs'}"
    if copied.left_out:
        yield f"  not taken, since it does not fit: {', '.join(copied.left_out)}"
    yield from (f"  {note}" for note in copied.notes)
    for name, check in found["checks"].items():
        yield f"{name:14} {check['verdict']:17} {check['text']}".rstrip()
    yield {
        "green": "green: layer to layer computes what plain torch does",
        "refused": "refused: the engine does not run this model, and says why",
        "red": "red: layer to layer computes something else",
    }[found["status"]]


COMMAND = Command(
    "verify",
    "compare a tiny copy of a model with random weights, layer to layer, with plain torch",
    "verify bert-base-cased --class AutoModelForSequenceClassification",
    _add_flags,
    _run,
)
