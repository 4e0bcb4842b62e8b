"""Records what fixed runs compute, and compares it after a change that is to change nothing.

    python tests/helpers/golden.py record before.json            # on the commit before
    python tests/helpers/golden.py compare before.json           # on the one after, on the same machine
    python tests/helpers/golden.py compare before.json --meant meant.json

`--quick` runs one case of each kind, for a look after every step; a recording of all cases serves for it, too. `--only
WORD` runs the cases whose name has the word. The cases are in `golden_cases.py`, with the table that spells their
options as they are called today; how they run, and what of them is kept, is in `golden_runs.py`.

`--meant FILE` names a list of differences that are meant: `[{"case": "sim: resident*", "section": "copies",
"what": "up *", "reason": "..."}]`. `case`, `section` and `what` are patterns, of one line that is printed, so that an
entry for one file hides no other. An entry that nothing differs for, although a case that it fits was run, is an
error, too: what it announces has not happened.

The bits depend on the machine and on torch, so that no recording is kept with the tests.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

HELPERS = Path(__file__).resolve().parent
ROOT = HELPERS.parents[1]
if not __package__:  # run as a script: neither the package nor the helpers are where Python looks for modules
    sys.path[:0] = [str(ROOT), str(HELPERS)]

from golden_cases import Case, cases, quick  # noqa: E402

SHARDS = {"sim": 3, "sim ranks": 1, "cpu ranks": 1, "cpu": 1}
"""Where cases run -> over how many processes they are spread, of which two run at once. The longest first."""
VERSIONS = ("torch", "transformers", "accelerate", "numpy")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


class Difference(NamedTuple):
    """One thing that differs in a section of a case."""

    case: str
    section: str
    what: str

    def __str__(self) -> str:
        return f"{self.case}: {self.section}: {self.what}"


# ---- running


def chosen(options: argparse.Namespace) -> list[Case]:
    """The cases that are asked for."""
    found = [case for case in cases() if options.only is None or options.only in case.name]
    return quick(found) if options.quick else found


def shards(where: str, options: argparse.Namespace) -> int:
    """Over how many processes the cases there are spread: few ones are not worth the imports of several."""
    return 1 if options.quick or options.only else SHARDS[where]


def run_part(options: argparse.Namespace) -> None:
    """Run a part of the cases in this process, and write their records. In ranks, each writes a file of its own."""
    import torch
    from torch import distributed

    from golden_runs import run

    torch.set_num_threads(1)
    if "sim" in options.where:
        from hf_l2l.testing import enable_simulated_accelerator

        enable_simulated_accelerator()  # before anything else may run a backward
    rank, suffix = 0, ""
    if "ranks" in options.where:
        distributed.init_process_group("gloo", timeout=timedelta(seconds=60))  # of a rank whose peer has failed
        rank = distributed.get_rank()
        suffix = f" (rank {rank})"
    mine = [case for case in chosen(options) if case.where == options.where]
    mine = mine[options.shard :: shards(options.where, options)]
    found: dict[str, Any] = {}
    folder = Path(options.folder)
    for number, case in enumerate(mine):
        started = time.monotonic()
        try:
            found[case.name + suffix] = run(case, folder / str(number))
        except Exception as error:  # noqa: BLE001  # of this case; the others are of use all the same
            found[case.name + suffix] = {"keeps": ["failed"], "failed": f"{type(error).__name__}: {error}"[:500]}
            traceback.print_exc()
            if suffix:
                break  # the other rank may be in the midst of this case
        print(f"{time.monotonic() - started:6.1f} s  {case.name}", file=sys.stderr, flush=True)
    folder.with_name(f"{folder.name}.{rank}.json").write_text(json.dumps(found))


def record(options: argparse.Namespace) -> dict[str, Any]:
    """Run all cases that are asked for, two processes at a time; returns name -> record."""
    wanted = {case.where for case in chosen(options)}
    parts = [(where, shard) for where in SHARDS if where in wanted for shard in range(shards(where, options))]
    with tempfile.TemporaryDirectory(prefix="golden_") as scratch:

        def run(part: tuple[str, int]) -> dict[str, Any]:
            where, shard = part
            folder = Path(scratch, f"{where} {shard}")
            (folder.with_suffix(".figures")).write_text(_figures())
            asked = ["run", "--where", where, "--shard", str(shard), "--folder", str(folder)]
            asked += ["--quick"] if options.quick else []
            asked += ["--only", options.only] if options.only is not None else []
            launcher = TORCHRUN if "ranks" in where else ()
            done = subprocess.run(
                [sys.executable, *launcher, __file__, *asked],
                env={**os.environ, **_surroundings(folder.with_suffix(".figures"))},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            files = sorted(Path(scratch).glob(f"{folder.name}.*.json"))
            if done.returncode != 0 or not files:
                raise RuntimeError(f"the process of {where} ended with {done.returncode}:\n{done.stderr[-4000:]}")
            if options.verbose:
                print("\n".join(line for line in done.stderr.splitlines() if " s  " in line), file=sys.stderr)
            if "Traceback" in done.stderr:
                print(done.stderr[-4000:], file=sys.stderr)
            return {name: made for file in files for name, made in json.loads(file.read_text()).items()}

        with ThreadPoolExecutor(2) as two:
            return {name: made for found in two.map(run, parts) for name, made in found.items()}


def _figures() -> str:
    """Figures of a machine, so that a plan does not depend on what this one reaches just now."""
    from budgeted import FIGURES

    return str(FIGURES.to_json())


def _surroundings(figures: Path) -> dict[str, str]:
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "0",
        "HF_L2L_FIGURES": str(figures),
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(HELPERS))),
    }


def versions() -> dict[str, str]:
    """Of what bits depend on beside the machine."""
    from importlib.metadata import version

    return {package: version(package) for package in VERSIONS}


# ---- comparing


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[Difference]:
    """What differs between the records of the cases that both have, and cases that are gone."""
    found = [Difference(name, "case", "it is in the recording only") for name in before if name not in after]
    for name, old in before.items():
        new = after.get(name)
        for section in dict.fromkeys([*old["keeps"], *new["keeps"]]) if new is not None else ():
            entries = _section(old.get(section), new.get(section))
            found += [Difference(name, section, what) for what in entries]
    return found


def _section(old: Any, new: Any) -> Iterator[str]:
    """What differs, for people; of a list of steps, in the first one that does."""
    if old is None or new is None:
        yield f"{'there is none any more' if new is None else 'it was not there before'}{_text(new or old)}"
    elif isinstance(old, list):
        for number, (was, now) in enumerate(zip(old, new, strict=False), 1):
            if was != now:
                yield from (f"first at step {number} of {len(old)}: {entry}" for entry in _entries(was, now))
                return
        if len(old) != len(new):
            yield f"{len(new)} steps instead of {len(old)}"
    elif isinstance(old, dict):
        yield from _entries(old, new)
    elif old != new:
        yield f"{old} -> {new}"


def _entries(old: dict[str, Any], new: dict[str, Any], path: str = "") -> Iterator[str]:
    for name in dict.fromkeys([*old, *new]):
        was, now = old.get(name), new.get(name)
        if name not in new:
            yield f"{path}{name} is gone"
        elif name not in old:
            yield f"{path}{name} is new"
        elif isinstance(was, dict) and isinstance(now, dict):
            yield from _entries(was, now, f"{path}{name}: ")
        elif was != now:
            yield f"{path}{name} {was} -> {now}"


def _text(value: Any) -> str:
    return f": {value}" if isinstance(value, str) else ""


PATTERNS = ("case", "section", "what")


def split(
    found: Iterable[Difference], meant: Sequence[dict[str, str]], ran: Collection[str]
) -> tuple[list[Difference], list[dict[str, str]]]:
    """The differences that are not meant, and the entries of the list, for cases that were `ran`, without any."""
    used: set[int] = set()
    left = []
    for difference in found:
        words = dict(zip(PATTERNS, difference, strict=True))
        fits = {
            number
            for number, entry in enumerate(meant)
            if all(fnmatch.fnmatchcase(words[key], entry[key]) for key in PATTERNS)
        }
        used |= fits
        left += [] if fits else [difference]
    unused = [entry for number, entry in enumerate(meant) if number not in used]
    return left, [entry for entry in unused if fnmatch.filter(ran, entry["case"])]


def meant_of(file: Path | None) -> list[dict[str, str]]:
    """The list of differences that are meant.

    Raises:
        ValueError: an entry lacks a pattern or a reason.
    """
    entries = json.loads(file.read_text()) if file is not None else []
    for entry in entries:
        lacks = [key for key in (*PATTERNS, "reason") if not str(entry.get(key, "")).strip()]
        if lacks:
            raise ValueError(
                f"each entry of a list of meant differences needs case, section, what and reason (got "
                f"{json.dumps(entry)}, without {', '.join(lacks)}); add it"
            )
    return list(entries)


def compare(made: dict[str, Any], after: dict[str, Any], meant: Sequence[dict[str, str]]) -> list[str]:
    """Lines about what is wrong; none if all is as it is to be.

    Args:
        made: a recording, with the versions it was made with.
        after: name -> record of today's cases.
        meant: the list of meant differences.
    """
    if made["versions"] != versions():
        return [f"the recording is of {made['versions']}, and this is {versions()}: record again with these versions"]
    left, unused = split(differences(made["cases"], after), meant, list(after))
    lines = [str(each) for each in left]
    return lines + [f"meant, and yet nothing differs: {json.dumps(entry)}" for entry in unused]


def leaves(value: Any) -> int:
    """How many numbers and digests a record has."""
    if isinstance(value, dict):
        return sum(leaves(each) for each in value.values())
    return sum(leaves(each) for each in value) if isinstance(value, list) else 1


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("record", "compare", "run"), help='"run" is for processes of the others')
    parser.add_argument("file", nargs="?", type=Path, help="of the recording")
    parser.add_argument("--quick", action="store_true", help="one case of each kind")
    parser.add_argument("--only", help="cases whose name has this word")
    parser.add_argument("--meant", type=Path, help="with compare: a list of differences that are meant")
    parser.add_argument("--verbose", action="store_true", help="tell the seconds of each case")
    for name in ("where", "folder"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--shard", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.action != "run" and options.file is None:
        parser.error(f"{options.action} needs the file of a recording")
    if options.action == "compare" and not options.file.is_file():
        parser.error(f"compare needs a recording (got {options.file}, which is no file); make one with record")
    if not chosen(options):
        parser.error(f"--only must be a word of the name of a case (got {options.only!r}), such as 'sim: resident'")
    if options.meant is not None and options.action != "compare":
        parser.error("--meant is for compare")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Record or compare; 0 if nothing is wrong."""
    options = parsed(arguments)
    if options.action == "run":
        run_part(options)
        return 0
    meant, made = meant_of(options.meant), None
    if options.action == "compare":  # a file that cannot be read is told before minutes of work
        made = json.loads(options.file.read_text())
    started = time.monotonic()
    after = record(options)
    took = f"{len(after)} cases, {leaves(after)} numbers, {time.monotonic() - started:.0f} s"
    if made is None:
        failed = [f"{name}: {case['failed']}" for name, case in after.items() if "failed" in case]
        if failed:
            print("nothing is recorded, since these fail:", *failed, sep="\n")
            return 1
        options.file.write_text(json.dumps({"versions": versions(), "cases": after}, indent=1))
        print(f"recorded: {took}, {options.file.stat().st_size / 1024:.0f} KiB")
        return 0
    names = {case.name for case in chosen(options)}
    known = {name: case for name, case in made["cases"].items() if name.partition(" (rank")[0] in names}
    if not (options.quick or options.only):
        known = made["cases"]  # a case that is gone is a difference
    lines = compare({**made, "cases": known}, after, meant)
    new = [name for name in after if name not in known]
    print(f"compared: {took}", *lines, sep="\n")
    if new:
        print(f"{len(new)} cases are not in the recording, and compared with nothing:", *new, sep="\n")
    if lines:
        print(f"{len(lines)} differences that are not meant")
    else:
        print("equal" if len(new) < len(after) else "nothing was compared")
    return int(bool(lines) or len(new) == len(after) or (bool(new) and bool(options.quick or options.only)))


if __name__ == "__main__":
    sys.exit(main())
