"""The document of each part of `gpu.py`, from the rows that there are."""

from __future__ import annotations

from typing import Any

from benchmarks.environment import description
from benchmarks.gpu_rows import Row
from benchmarks.throughput_report import check_text, table, with_shares


def document(part: str, rows: list[Row], command: str) -> str:
    """The result of a `part` in markdown; `rows` may be those of a run that was cut."""
    where = next((row for row in rows if row["kind"] == "environment"), None)
    end = next((row for row in rows if row["kind"] == "end"), None)
    rehearsed = any(row["kind"] == "start" and row["rehearsal"] for row in rows)
    how = "did not end" if end is None else f"ended {end['how']}, status {end['status']}, {end['seconds']:.0f} s"
    return "\n".join(
        (
            f"# {part}{', a rehearsal: its figures mean nothing' if rehearsed else ''}",
            "",
            "## Environment",
            "",
            "It was not written." if where is None else description(where),
            "",
            "## Result",
            "",
            f"The part {how}.",
            "",
            *BODIES[part](rows),
            "",
            "## To reproduce",
            "",
            "```bash",
            command,
            "```",
            "",
        )
    )


def of_probe(rows: list[Row]) -> list[str]:
    """A line per row: what, and the values."""
    found = ["| what | values |", "|---|---|"]
    for row in rows:
        if row["kind"] == "row":
            values = ", ".join(f"{key} {shown(value)}" for key, value in row.items() if key not in ("kind", "name"))
            found.append(f"| {row['name']} | {values} |")
    return found


def shown(value: Any) -> str:
    """A value for people."""
    if isinstance(value, float):
        return f"{value / 1e9:,.2f} G" if abs(value) >= 1e8 else f"{value:,.4g}"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def of_tests(rows: list[Row]) -> list[str]:
    """How many passed, what failed and why, and the slowest."""
    tests = [row for row in rows if row["kind"] == "row"]
    outcomes = [row["outcome"] for row in tests]
    bad = [row for row in tests if row["outcome"] not in ("passed", "skipped")]
    found = [f"{len(tests)} tests: {', '.join(f'{outcomes.count(o)} {o}' for o in dict.fromkeys(outcomes))}."]
    for row in bad:
        found += ["", f"`{row['name']}` {row['outcome']}:", "", "```", row["message"], "```"]
    slowest = sorted(tests, key=lambda row: -row["seconds"])[:5]
    return [*found, "", "The slowest:", "", *(f"- {row['seconds']:.1f} s `{row['name']}`" for row in slowest)]


def of_bench(rows: list[Row]) -> list[str]:
    """The table of all groups of cases, what was compared before, and groups that did not end well."""
    settings = [row for row in rows if row["kind"] == "settings"]
    checks = [row for row in rows if row["kind"] == "check"]
    cases = [row for row in rows if row["kind"] == "row"]
    found = [check_text(checks, settings[0]["checked_steps"] if settings else 0), ""]
    found += ["Random weights and tokens; speeds are means over the steps that the column of step times names.", ""]
    found += [table(with_shares(cases)), ""]
    for row in rows:
        if row["kind"] == "resident":
            ratio, times = row["ratio"], row["milliseconds"]
            found += [
                f"A BERT that fits whole ({row['environment']['command']}): a step of `L2LTrainer` takes "
                f"{times['L2LTrainer']:.2f} ms, one of `Trainer` {times['Trainer']:.2f} ms, {ratio:.3f} in pairs.",
                "",
            ]
    found += [f"- `{row['options']}`: {row['how']}." for row in rows if row["kind"] == "group"]
    return found


BODIES = {"probe": of_probe, "tests": of_tests, "bench": of_bench}
"""Part -> the lines of its result."""
