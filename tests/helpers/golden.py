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
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

HELPERS = Path(__file__).resolve().parent
ROOT = HELPERS.parents[1]
if not __package__:  # run as a script: neither the package nor the helpers are where Python looks for modules
    sys.path[:0] = [str(ROOT), str(HELPERS)]

from golden_cases import Case, cases, quick  # noqa: E402

SHARDS = {"sim": 3, "sim ranks": 1, "cpu ranks": 1, "cpu": 1}
"""Where cases run -> over how many processes they are spread, of which two run at once. The longest first."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": os.pathsep.join((str(ROOT), str(HELPERS))),
}


class Difference(NamedTuple):
    """One thing that differs in a section of a case."""

    case: str
    section: str
    what: str


# ---- running


def chosen(options: argparse.Namespace) -> list[Case]:
    """The cases that are asked for."""
    found = [case for case in cases() if options.only in case.name]
    return quick(found) if options.quick else found


def run_part(options: argparse.Namespace) -> None:
    """Run a part of the cases in this process, and write their records. In ranks, each writes a file of its own."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    if "sim" in options.where:
        from hf_l2l.testing import enable_simulated_accelerator

        enable_simulated_accelerator()  # before anything else may run a backward
    from golden_runs import run

    rank, suffix = 0, ""
    if "ranks" in options.where:
        distributed.init_process_group("gloo", timeout=timedelta(seconds=60))  # of a rank whose peer has failed
        rank = distributed.get_rank()
        suffix = f" (rank {rank})"
    mine = [case for case in chosen(options) if case.where == options.where]
    found: dict[str, Any] = {}
    folder = Path(options.folder)
    for number, case in enumerate(mine[options.shard :: options.of]):
        try:
            found[case.name + suffix] = run(case, folder / str(number))
        except Exception as error:  # noqa: BLE001  # of this case; the others are of use all the same
            found[case.name + suffix] = {"keeps": ["failed"], "failed": f"{type(error).__name__}: {error}"[:500]}
            traceback.print_exc()
            if suffix:
                break  # the other rank may be in the midst of this case
    folder.with_name(f"{folder.name}.{rank}.json").write_text(json.dumps(found))


def record(options: argparse.Namespace) -> dict[str, Any]:
    """Run all cases that are asked for, two processes at a time; returns name -> record."""
    from budgeted import FIGURES

    are_few = options.quick or options.only  # and not worth the imports of several processes
    shards = dict.fromkeys(SHARDS, 1) if are_few else SHARDS
    wanted = {case.where for case in chosen(options)}
    parts = [(where, shard) for where in SHARDS if where in wanted for shard in range(shards[where])]
    with tempfile.TemporaryDirectory(prefix="golden_") as scratch:
        figures = Path(scratch, "figures")  # so that a plan does not depend on what this machine reaches just now
        figures.write_text(FIGURES.to_json())

        def run(part: tuple[str, int]) -> dict[str, Any]:
            where, shard = part
            folder = Path(scratch, f"{where} {shard}")
            asked = ["run", f"--where={where}", f"--shard={shard}", f"--of={shards[where]}", f"--folder={folder}"]
            asked += [f"--only={options.only}", *(["--quick"] if options.quick else [])]
            done = subprocess.run(
                [sys.executable, *(TORCHRUN if "ranks" in where else ()), __file__, *asked],
                env={**os.environ, **ENVIRONMENT, "HF_L2L_FIGURES": str(figures)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            files = sorted(Path(scratch).glob(f"{folder.name}.*.json"))
            if done.returncode != 0 or not files:
                raise RuntimeError(f"the process of {where} ended with {done.returncode}:\n{done.stderr[-4000:]}")
            if "Traceback" in done.stderr:
                print(done.stderr[-4000:], file=sys.stderr)
            return {name: made for file in files for name, made in json.loads(file.read_text()).items()}

        with ThreadPoolExecutor(2) as two:
            return {name: made for found in two.map(run, parts) for name, made in found.items()}


def versions() -> dict[str, str]:
    """Of what bits depend on beside the machine."""
    return {package: version(package) for package in ("torch", "transformers", "accelerate", "numpy")}


# ---- comparing


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[Difference]:
    """What differs between the records of the cases that both have, and cases that are gone."""
    found = [Difference(name, "case", "it is in the recording only") for name in before if name not in after]
    for name, old in before.items():
        new = after.get(name, {"keeps": ()})
        for section in dict.fromkeys([*old["keeps"], *new["keeps"]]) if name in after else ():
            was, now, told = old.get(section), new.get(section), ""
            if was == now:
                continue
            if isinstance(was, list) and isinstance(now, list):  # of steps: the first one that differs
                pairs = list(zip_longest(was, now, fillvalue={}))
                number = next(number for number, (a, b) in enumerate(pairs) if a != b)
                (was, now), told = pairs[number], f"first at step {number + 1} of {len(old[section])}: "
            was, now = flat(was), flat(now)
            for path in dict.fromkeys([*was, *now]):
                if path not in was or path not in now or was[path] != now[path]:
                    what = f"{told}{path}{was.get(path, 'nothing')} -> {now.get(path, 'nothing')}"
                    found.append(Difference(name, section, what))
    return found


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Path in a record -> the number or digest that is there; {} of a file of which nothing is kept."""
    if not isinstance(value, dict) or not value:
        return {path: value}
    return {inside: leaf for name in value for inside, leaf in flat(value[name], f"{path}{name}: ").items()}


PATTERNS = ("case", "section", "what")


def meant_of(file: Path) -> list[dict[str, str]]:
    """The list of differences that are meant.

    Raises:
        ValueError: an entry lacks a pattern or a reason.
    """
    entries: list[dict[str, str]] = json.loads(file.read_text())
    for entry in entries:
        lacks = [key for key in (*PATTERNS, "reason") if not str(entry.get(key, "")).strip()]
        if lacks:
            raise ValueError(
                f"each entry of a list of meant differences needs case, section, what and reason (got "
                f"{json.dumps(entry)}, without {', '.join(lacks)}); add it"
            )
    return entries


def told(found: Sequence[Difference], meant: Sequence[dict[str, str]], ran: Collection[str]) -> list[str]:
    """Lines about differences that are not meant, and about entries, for cases that were `ran`, without any."""

    def fits(entry: dict[str, str], difference: Difference) -> bool:
        return all(fnmatch.fnmatchcase(getattr(difference, key), entry[key]) for key in PATTERNS)

    lines = [": ".join(each) for each in found if not any(fits(entry, each) for entry in meant)]
    for entry in meant:
        if fnmatch.filter(ran, entry["case"]) and not any(fits(entry, each) for each in found):
            lines.append(f"meant, and yet nothing differs: {json.dumps(entry)}")
    return lines


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("record", "compare", "run"), help='"run" is for processes of the others')
    parser.add_argument("file", nargs="?", type=Path, help="of the recording")
    parser.add_argument("--quick", action="store_true", help="one case of each kind")
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--meant", type=Path, help="with compare: a list of differences that are meant")
    for name, kind in (("where", str), ("folder", str), ("shard", int), ("of", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
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
    meant = meant_of(options.meant) if options.meant else []  # a wrong list is told before minutes of work
    made = json.loads(options.file.read_text()) if options.action == "compare" else None
    if made is not None and made["versions"] != versions():
        print(f"the recording is of {made['versions']}, and this is {versions()}: record again with these versions")
        return 1
    started = time.monotonic()
    after = record(options)
    took = f"{len(after)} cases, {time.monotonic() - started:.0f} s"
    if made is None:
        failed = [f"{name}: {case['failed']}" for name, case in after.items() if "failed" in case]
        if failed:
            print("nothing is recorded, since these fail:", *failed, sep="\n")
            return 1
        options.file.write_text(json.dumps({"versions": versions(), "cases": after}, indent=1))
        print(f"recorded: {took}")
        return 0
    names = {case.name for case in chosen(options)}
    # A case that is gone is a difference, unless few of them are run.
    are_few = options.quick or bool(options.only)
    is_known = {name: not are_few or name.partition(" (rank")[0] in names for name in made["cases"]}
    known = {name: case for name, case in made["cases"].items() if is_known[name]}
    lines = told(differences(known, after), meant, list(after))
    new = [name for name in after if name not in known]
    print(f"compared: {took}", *lines, sep="\n")
    if new:
        print(f"{len(new)} cases are not in the recording, and compared with nothing:", *new, sep="\n")
    if lines:
        print(f"{len(lines)} differences that are not meant")
    else:
        print("equal" if len(new) < len(after) else "nothing was compared")
    return int(bool(lines) or len(new) == len(after) or (bool(new) and are_few))


if __name__ == "__main__":
    sys.exit(main())
