"""The command `python -m hf_l2l.verify`: checks families, and writes the table of the results."""

from __future__ import annotations

import argparse
import difflib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_l2l.verify.checks import Report, verify
from hf_l2l.verify.families import GROUPS, Groups
from hf_l2l.verify.family import Family
from hf_l2l.verify.table import as_json, line, markdown, summary


def main(arguments: Sequence[str] | None = None, groups: Groups = GROUPS) -> int:
    """Run the command; returns its exit status: 1 if anything is red.

    Args:
        arguments: those of the command line; None for the process's own.
        groups: the families there are.
    """
    parser = make_parser()
    asked = parser.parse_args(arguments)
    known = {family.name: family for group in groups.values() for family in group}
    unknown = [name for name in asked.names if name not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=3)
        meant = f"did you mean {' or '.join(near)}?" if near else "--list shows all names"
        parser.error(f"NAME must be a family that is known (got {unknown[0]!r}); {meant}")
    chosen = {kind: [f for f in group if not asked.names or f.name in asked.names] for kind, group in groups.items()}
    if asked.list:
        for kind, group in chosen.items():
            print(f"{kind}: {', '.join(family.name for family in group)}")
        return 0
    reports = {kind: [_told(family, silent=asked.json) for family in group] for kind, group in chosen.items() if group}
    every = [report for group in reports.values() for report in group]
    print(as_json(every) if asked.json else summary(every))
    if asked.write is not None:
        asked.write.parent.mkdir(parents=True, exist_ok=True)
        asked.write.write_text(markdown(reports, _command(arguments)))
    return int(any(report.status == "red" for report in every))


def _command(arguments: Sequence[str] | None) -> str:
    return shlex.join(["python", "-m", "hf_l2l.verify", *(sys.argv[1:] if arguments is None else arguments)])


def _told(family: Family, *, silent: bool) -> Report:
    report = verify(family)
    if not silent:
        print(line(report), flush=True)
    return report


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_l2l.verify",
        description="Check which families of transformers run layer to layer: tiny "
        "random models, on the CPU, to which weights and inputs are copied as to an accelerator; none is used.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="families to check; without a name, all")
    parser.add_argument("--list", action="store_true", help="list the families and check none")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table to this file, in markdown")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
