"""Runs a long part of the tests: `make soak PART=updates`; without a name, the parts are listed.

A part is a module `soak_<part>` beside this one, with a first line that says what it checks, and two functions:

    run(seed)       one row of the result as JSON, of which the seed decides all; "failure" is None or a sentence
    document(rows)  title, words and table of the result in markdown (`page`), without environment and command

It may have a third one, `picture(rows, file)`, which draws them, and `RUNS`, the number of its runs unless `--runs` is
given. Finished rows are kept in `soak_results/<part>.jsonl` with the state of the code that they are about. A repeated
call does not run them again, except for those that failed.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import description, environment
from benchmarks.measured import table

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]


def parts() -> dict[str, str]:
    """Name of a part -> the first line of its docstring."""
    files = {file.stem.removeprefix("soak_"): file for file in sorted(Path(__file__).parent.glob("soak_*.py"))}
    return {name: str(ast.get_docstring(ast.parse(f.read_text()))).splitlines()[0] for name, f in files.items()}


def page(title: str, words: str, head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """What a part says of its rows."""
    return "\n".join([f"# {title}", "", words.strip(), *table(head, lines)])


def code_state() -> str:
    """A digest of the package and of what the parts are made of: rows of another code are not counted."""
    digest = hashlib.sha256()
    for file in sorted((*(ROOT / "hf_l2l").rglob("*.py"), *(ROOT / "tests").rglob("*.py"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def finished(file: Path, settings: Row) -> dict[int, Row]:
    """By seed, the rows without a failure that earlier calls have written; a line that was cut off is no row."""
    found = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if entry["settings"] == settings and entry["row"]["failure"] is None:
            found[entry["row"]["seed"]] = entry["row"]
    return found


def rows_of(part: Any, seeds: range, file: Path, settings: Row) -> list[Row]:
    """The rows of all seeds: those of earlier calls, and those that this one runs and writes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and not file.read_bytes().endswith(b"\n"):
        file.write_bytes(file.read_bytes() + b"\n")  # the last call was stopped within a line
    found: list[Row] = []
    for seed in seeds:
        row = finished(file, settings).get(seed)  # read again: another call may share the work
        if row is None:
            row = {"seed": seed, **part.run(seed)}
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"settings": settings, "row": row}) + "\n")
            print(f"seed {seed}: {row['failure'] or 'passed'}", file=sys.stderr)
        found.append(row)
    return found


def document(part: Any, rows: list[Row], command: str) -> str:
    """The file for `benchmarks/results`."""
    failures = [f"- seed {row['seed']}: {row['failure']}" for row in rows if row["failure"] is not None]
    head, _, rest = part.document(rows).partition("\n")
    failed = "\n".join(failures or ["No run failed."])
    return f"""{head}

## Environment

{description(environment("soak", []))}

State of the code: {code_state()}.

## Result

{rest.strip()}

{failed}

## To reproduce

```bash
{command}
```
"""


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=[*parts(), ""], default="", help="which; left out: list them")
    parser.add_argument("--runs", type=int, help="seeds are 0 to one less than this (300, or what the part says)")
    parser.add_argument("--first", type=int, default=0, help="the seed to begin with: two calls can share the work")
    parser.add_argument("--rows", type=Path, default=ROOT / "soak_results", help="folder of the finished rows")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the document")
    parser.add_argument("--hardware", default=f"{os.cpu_count()}cores", help="what the document's name says of it")
    options = parser.parse_args(arguments)
    for name, given, least in (("runs", options.runs, 1), ("first", options.first, 0)):
        if given is not None and given < least:
            parser.error(f"--{name} must be at least {least} (got {given})")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is left of a part and write its document; 1 if a row failed."""
    options = parsed(arguments)
    if not options.part:
        print("make soak PART=<part> [SOAK_RUNS=300]")
        for name, what in parts().items():
            print(f"  {name:12}{what}")
        return 0
    import torch
    import transformers

    part = importlib.import_module(f"soak_{options.part}")
    settings = {"code": code_state(), "torch": torch.__version__, "transformers": transformers.__version__}
    runs = options.runs or getattr(part, "RUNS", 300)
    kept = options.rows / f"{options.part}.jsonl"
    rows_of(part, range(min(options.first, runs), runs), kept, settings)
    rows = rows_of(part, range(runs), kept, settings)
    month = environment("soak", [])["date"][:7].replace("-", "")
    file = options.results / f"soak_{options.part}_{options.hardware}_{month}.md"
    file.write_text(document(part, rows, f"make soak PART={options.part} SOAK_RUNS={runs}"), encoding="utf-8")
    if hasattr(part, "picture"):
        part.picture(rows, file.with_suffix(".png"))
    failed = [row for row in rows if row["failure"] is not None]
    print(f"{len(rows)} runs, {len(failed)} failed: {file}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
