"""Small defects put into the code one at a time, to see that the tests find them.

    python tests/helpers/mutants.py draw              # the list: tests/mutants/list.json
    python tests/helpers/mutants.py run old FOLDER    # which are found; goes on where it stopped
    python tests/helpers/mutants.py table             # found by each suite

FOLDER has what runs of the suite have left: in `cpu.coverage` and `sim.coverage` the tests that reach each line, in
the `.xml` beside it how long they took (pytest-cov with `--cov=hf_l2l --cov-branch --cov-context=test
--junitxml=FILE`). A mutant is run against the tests that reach its line, the quickest first, up to the first that
fails, in a copy of the checkout.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import math
import multiprocessing
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "mutants"
LIST = FOLDER / "list.json"
SUITES = ("old", "new")
SEED = 58
COUNTS = {
    **{"engine": 14, "eps": 12, "checkpoint": 12, "device": 8, "stash": 8, "optim": 8, "rows": 6, "logits": 6},
    **{"shared_eps": 6, "model": 6, "hf": 6, "runtime": 5, "plan": 5, "memory": 5, "budget": 3, "accumulation": 3},
    **{"ranks": 3, "state_tier": 2, "realtime": 2},
}
"""Mutants of each package."""
WAITS = {"wait", "wait_event", "wait_stream", "wait_for", "synchronize", "record", "record_event", "record_stream"}
SYNCS = {"fsync", "flush", "sync"}
COPIES = {"clone", "copy", "detach", "contiguous", "copy_", "deepcopy"}
# What is said: no test compares it word by word.
SAYS = {"add_note", "warn", "warning", "info", "debug", "print", "tell", "simplefilter", "filterwarnings"}
WEIGHTS = {"wait left out": 4, "file not synced": 4, "digest not compared": 4, "copy not made": 2, "call left out": 1}
"""Of kinds, where others have 2: what is rare, and costs most, is drawn more often."""
TURNED: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
FACTORS: dict[type, type] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult}
FACTORS[ast.FloorDiv] = ast.Mult
SLOWEST = 120
"""Seconds more than four times what they took, after which the tests of a mutant are ended: it has made one of them
wait forever, which finds it."""
ENDLESS = "a test that does not end"
FIRST = 3.0
"""Seconds that the tests which are run first take, each further part four times as many."""


@dataclass(frozen=True)
class Mutant:
    """A defect: what of a line is put in the place of what."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    kind: str
    before: str
    after: str

    @property
    def name(self) -> str:
        """For results."""
        return f"{self.file}:{self.line}:{self.column} {self.kind}"

    def applied(self, text: str) -> str:
        """The text of the file with it."""
        lines = text.splitlines(keepends=True)
        start = sum(len(line.encode()) for line in lines[: self.line - 1]) + self.column
        end = sum(len(line.encode()) for line in lines[: self.end_line - 1]) + self.end_column
        data = text.encode()
        assert data[start:end].decode() == self.before, f"{self.name}: the code has changed"
        return (data[:start] + self.after.encode() + data[end:]).decode()


def candidates(file: Path) -> Iterator[Mutant]:
    """All defects that a file can have."""
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    name = str(file.relative_to(ROOT))
    told = {node for each in ast.walk(tree) if isinstance(each, _TELLS) for node in ast.walk(each)}

    for node in ast.walk(tree):
        for kind, after in () if node in told else _defects(node):
            assert isinstance(node, ast.expr | ast.stmt)
            before = ast.get_source_segment(text, node)
            assert before is not None and node.end_lineno is not None and node.end_col_offset is not None
            yield Mutant(name, node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, kind, before, after)


_TELLS = (ast.Raise, ast.Assert, ast.JoinedStr, ast.AnnAssign, ast.Import, ast.ImportFrom)
"""What says something, or declares it: no behaviour."""


def _defects(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The kinds of defects that a node can have, each with the code of it."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        kind = "wait left out" if name in WAITS else "file not synced" if name in SYNCS else "call left out"
        if name not in SAYS:
            yield ("copy not made" if name in COPIES else kind), "pass"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in COPIES:
        if not node.args or node.func.attr == "deepcopy":
            yield "copy not made", ast.unparse(node.args[0] if node.args else node.func.value)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in TURNED:
        other = copy.deepcopy(node)
        other.ops = [TURNED[type(node.ops[0])]()]
        digest = re.search(r"digest|sha\d|checksum", ast.unparse(node)) is not None
        yield ("digest not compared" if digest else "condition turned"), f"({ast.unparse(other)})"
    if isinstance(node, ast.BoolOp):
        other_op = ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        yield "condition turned", f"({ast.unparse(other_op)})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "condition turned", f"({ast.unparse(node.operand)})"
    if isinstance(node, ast.BinOp) and type(node.op) in FACTORS and not _is_text(node):
        yield "factor wrong", f"({ast.unparse(ast.BinOp(node.left, FACTORS[type(node.op)](), node.right))})"
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        inside, other_slice = node.slice, None
        if isinstance(inside, ast.Constant) and isinstance(inside.value, int):
            other_slice = ast.Constant(inside.value + 1)
        if isinstance(inside, ast.Slice) and isinstance(inside.upper, ast.expr):
            upper = ast.BinOp(inside.upper, ast.Sub(), ast.Constant(1))
            other_slice = ast.Slice(inside.lower, upper, inside.step)
        if other_slice is not None:
            yield "index off by one", ast.unparse(ast.Subscript(node.value, other_slice, ast.Load()))
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "range" and len(node.args) == 1:
        yield "index off by one", f"range({ast.unparse(node.args[0])} - 1)"


def _is_text(node: ast.BinOp) -> bool:
    """Whether it may join texts, lists or paths."""
    is_path = r"path|folder|dir|name|file|root"
    return (isinstance(node.op, ast.Div) and re.search(is_path, ast.unparse(node), re.IGNORECASE) is not None) or any(
        isinstance(each, ast.JoinedStr | ast.List | ast.Tuple)
        or (isinstance(each, ast.Constant) and not isinstance(each.value, int | float))
        for each in (node.left, node.right)
    )


def draw() -> list[Mutant]:
    """Of each package as many as `COUNTS` says: first a kind of those that occur, then one of that kind."""
    draws, found = random.Random(SEED), []
    for package, count in COUNTS.items():
        by_kind: dict[str, list[Mutant]] = {}
        for file in sorted((ROOT / "hf_l2l" / package).rglob("*.py")):
            for each in candidates(file):
                by_kind.setdefault(each.kind, []).append(each)
        taken: list[Mutant] = []
        while len(taken) < count:
            kinds = sorted(by_kind)
            [kind] = draws.choices(kinds, [WEIGHTS.get(kind, 2) for kind in kinds])
            each = by_kind[kind].pop(draws.randrange(len(by_kind[kind])))
            if not by_kind[kind]:
                del by_kind[kind]
            if all((each.file, each.line) != (other.file, other.line) for other in taken):
                taken.append(each)
        found += taken
    return found


def listed() -> list[Mutant]:
    """Those that were drawn."""
    return [Mutant(**each) for each in json.loads(LIST.read_text(encoding="utf-8"))]


# ---- which tests reach a line


def reached(runs: Path) -> dict[str, list[str]]:
    """The tests that reach the lines of each mutant, after their device; a device alone where a process that they
    started does."""
    mutants = listed()
    found: dict[str, set[str]] = {each.name: set() for each in mutants}
    of_file: dict[str, set[str]] = {each.file: set() for each in mutants}
    for coverage in runs.glob("*.coverage"):
        with sqlite3.connect(coverage) as data:
            for file in of_file:
                by_line: dict[int, set[str]] = {}
                for name, *lines in data.execute(_ARCS, (f"%/{file}",)):
                    for line in lines:
                        by_line.setdefault(line, set()).add(f"{coverage.stem} {name.partition('|')[0]}")
                if coverage.stem == "sim":
                    of_file[file] |= set().union(*by_line.values()) - {"sim "}
                for each in (each for each in mutants if each.file == file):
                    found[each.name].update(*(by_line.get(line, ()) for line in range(each.line, each.end_line + 1)))
    # Threads that autograd makes for a device are not traced: where nothing was, it may be they that come by.
    return {each.name: sorted(found[each.name] or {*of_file[each.file], "sim "}) for each in mutants}


_ARCS = """select context, fromno, tono from arc join context on context.id = context_id join file on file.id = file_id
    where path like ?"""


def seconds_of(runs: Path) -> dict[str, float]:
    """How long each test took."""
    return {
        f"{file.stem} {case.get('classname', '').replace('.', '/')}.py::{case.get('name')}": float(case.get("time", 1))
        for file in runs.glob("*.xml")
        for case in ElementTree.parse(file).iter("testcase")
    }


STARTED = ("tests/ranks", "tests/checkpoint", "tests/realtime", "tests/state_tier")
"""Where tests start processes of their own, for lines that only those reach."""


def run_one(
    mutant: Mutant, tests: Sequence[str], seconds: dict[str, float], checkout: Path, most: float
) -> dict[str, object]:
    """Whether the tests find a mutant in `checkout`, which one does, and how many were run; "found" is None where
    those that took `most` seconds have not found it, and others reach it, too."""
    file = checkout / mutant.file
    whole = file.read_text(encoding="utf-8")
    begun, ran = time.monotonic(), 0
    earlier = {
        row["by"] for results in FOLDER.glob("*.jsonl") for row in rows_of(results) if row["name"] == mutant.name
    }
    # A line that a thread runs which lives for long has the context that was there when it began.
    order = list(dict.fromkeys([*(each for each in tests if "::" in each), *earlier.intersection(seconds)]))
    order.sort(key=lambda each: (each not in earlier, seconds.get(each, 1.0)))  # first what has found it before
    if len(order) < len(tests):
        package = mutant.file.split("/")[1]
        order += [f"cpu {each}" for each in (*STARTED, f"tests/{package}") if (checkout / each).exists()]
    takes = FIRST
    while order and time.monotonic() - begun < most:
        device = order[0].partition(" ")[0]
        there = [each for each in order if each.startswith(f"{device} ")]
        costs = [0.0, *accumulate(seconds.get(each, 60.0) + 0.02 for each in there)]
        some = [each for each, before in zip(there, costs, strict=False) if before < takes]
        limit = SLOWEST + 4 * costs[len(some)]
        try:
            file.write_text(mutant.applied(whole), encoding="utf-8")
            found = _first_failure(device, some, checkout, limit)
        finally:
            file.write_text(whole, encoding="utf-8")
        if found is not None and "not found: " in found:  # in a commit that has it no more
            order.remove(f"{device} {found.partition(f'{checkout}/')[2]}")
            continue
        if found in order and _first_failure(device, [found], checkout, SLOWEST) is not None:
            order.remove(found)  # it fails without the mutant, too
            continue
        if found is not None and "::" not in found and found != ENDLESS:  # nothing was said of a test
            assert _first_failure(device, some[:1], checkout, SLOWEST) is None, "pytest itself ends with an error"
        ran, takes = ran + len(some), 4 * takes
        order = [each for each in order if each not in some]
        if found is not None:
            break
    else:
        found = None
    is_found = True if found is not None else None if order else False
    return {"found": is_found, "by": found, "ran": ran, "seconds": round(time.monotonic() - begun)}


def _first_failure(device: str, tests: Sequence[str], checkout: Path, limit: float) -> str | None:
    with tempfile.NamedTemporaryFile("w+", suffix=".txt") as names, tempfile.TemporaryFile("w+") as said:
        names.write("\n".join(each.partition(" ")[2] for each in tests))
        names.flush()
        child = multiprocessing.get_context("fork").Process(
            target=_run_tests, args=(device, names.name, said.fileno(), checkout)
        )
        child.start()
        child.join(limit)
        is_endless = child.exitcode is None
        end_session(child.pid or 0)
        child.join()
        if is_endless:
            return ENDLESS
        said.seek(0)
        if child.exitcode in (0, 5):  # passed, or all of them are for other tiers
            return None
        failed = [line for line in said if line.startswith(("FAILED", "ERROR"))]
    if not failed:
        return f"exit code {child.exitcode}"
    return f"{device} {failed[0].split(' - ')[0].split(' ', 1)[1].strip()}"


def end_session(leader: int) -> None:
    """End what is left of a session: processes that tests have started may wait for one that has been ended."""
    for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
        with suppress(ProcessLookupError):
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)


def _run_tests(device: str, names: str, said: int, checkout: Path) -> None:
    """In a process that has imported all that is slow to import, and nothing of this package."""
    import pytest

    os.setsid()
    os.environ["L2L_TEST_DEVICE"] = device
    for stream in (1, 2):
        os.dup2(said, stream)
    os.chdir(checkout)
    sys.path[:] = [str(checkout), *(each for each in sys.path if not each.startswith(str(ROOT / "tests")))]
    imported = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # plugins of which a part has been
    words = ["-x", "-q", "--tb=no", "--no-header", *imported]
    if '"slow:' in Path("pyproject.toml").read_text(encoding="utf-8"):  # of a commit whose tests are marked
        words += ["-m", "not slow and not gpu"]
    os._exit(pytest.main([*words, f"@{names}"]))


def run(suite: str, runs: Path, share: tuple[int, int], commit: str, most: float) -> None:
    """Run the mutants that have no result yet against the tests of `commit`; `share` is which of how many parts."""
    results, reach = FOLDER / f"{suite}.jsonl", runs / "reached.json"
    known = {row["name"] for row in rows_of(results)}
    if not reach.exists():
        reach.write_text(json.dumps(reached(runs)), encoding="utf-8")
    tests, seconds = json.loads(reach.read_text(encoding="utf-8")), seconds_of(runs)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run([*git, "add", "--quiet", "--detach", str(checkout), commit], check=True)
        os.environ["PYTHONPATH"] = str(checkout)  # of programs that tests start
        for module in SLOW_TO_IMPORT:
            import_module(module)
        try:
            for each in listed()[share[0] :: share[1]]:
                if each.name not in known:
                    row = {"name": each.name, **run_one(each, tests[each.name], seconds, checkout, most)}
                    with results.open("a", encoding="utf-8") as file:
                        file.write(f"{json.dumps(row)}\n")
                    print(row, flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(checkout)], check=True)


SLOW_TO_IMPORT = ("torch", "transformers", "transformers.trainer", "accelerate", "datasets", "pytest")


def rows_of(results: Path) -> list[dict[str, Any]]:
    """What is known of each mutant that was run."""
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()] if results.exists() else []


def table() -> str:
    """How many of those that it was run against each suite finds, by package, in markdown."""
    suites = {
        suite: {row["name"]: bool(row["found"]) for row in rows_of(FOLDER / f"{suite}.jsonl")} for suite in SUITES
    }
    lines = [f"| package | mutants | {' | '.join(f'found by {suite}' for suite in suites)} |"]
    lines.append("| --- " * (2 + len(suites)) + "|")
    for package in (*COUNTS, ""):
        names = [each.name for each in listed() if each.file.startswith(f"hf_l2l/{package}")]
        ran = [[found[name] for name in names if name in found] for found in suites.values()]
        cells = [f"{sum(found)} of {len(found)}" for found in ran]
        lines.append(f"| {package or 'all'} | {len(names)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw, run or tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("draw")
    running = commands.add_parser("run")
    running.add_argument("suite", help="the name of the results: old or new")
    running.add_argument("runs", type=Path, metavar="FOLDER")
    running.add_argument("--share", type=int, nargs=2, default=(0, 1), metavar=("WHICH", "OF"))
    running.add_argument("--at", default="HEAD", metavar="COMMIT", help="whose tests, and whose code (this one's)")
    running.add_argument("--most", type=float, default=math.inf, metavar="SECONDS", help="for one of them")
    commands.add_parser("table")
    given = parser.parse_args(arguments)
    if given.command == "draw":
        LIST.parent.mkdir(exist_ok=True)
        LIST.write_text(json.dumps([asdict(each) for each in draw()], indent=1) + "\n", encoding="utf-8")
    elif given.command == "run":
        run(given.suite, given.runs, tuple(given.share), given.at, given.most)
    else:
        print(table())


if __name__ == "__main__":
    main()
