"""What people read of a call of `gpu.py`: the page, and the last lines of the output. Without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu_rows import Row

DIFFERS = 0.1
"""From which share on an estimate counts as wrong."""
NO_TIME = "no time was left"
"""Words of a part that had none: a failure only in a rehearsal."""
LONGEST = 11_000
"""Characters of the summary, so that it is easy to send."""
HEAD = (
    "model",
    "tokens per step",
    "trainer",
    "tokens/s",
    "of `trainer`",
    "step, s: mean, fastest, slowest, of how many",
    "device bytes, peak",
    "host bytes: peak of the process, least left",
    "of the peak FLOP/s",
    "waits, s: upload, download, update",
    "bound by",
    "attached in, s",
    "attention",
    "MHz, °C, W",
)


def size(num_bytes: float | None) -> str:
    """For people, in GiB, or MiB if it is less than one."""
    if num_bytes is None:
        return "-"
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def name_of(row: Row) -> str:
    """The trainer of a row, with what the host does not keep in full."""
    return ", ".join([row["title"], *(f"{key}={value}" for key, value in row["host_setting"].items())])


def of_trainer(row: Row, rows: Sequence[Row]) -> float | None:
    """How much a row reaches of the speed of plain Trainer with checkpointing; None where one of the two has none."""
    same = [each for each in rows if (each["model"], each["tokens"]) == (row["model"], row["tokens"])]
    base = next((each["tokens_per_s"] for each in same if each["mode"] == "trainer" and not each["failure"]), None)
    return None if base is None or row["failure"] else row["tokens_per_s"] / base


def case_line(row: Row, rows: Sequence[Row]) -> str:
    """A row of the table."""
    start = f"| {row['model']} | {row['tokens']:,} | {name_of(row)} "
    if row["failure"]:
        return f"{start}| {row['failure']} {'| - ' * (len(HEAD) - 4)}|"
    share, waits, clocks = of_trainer(row, rows), [row["upload_s"], row["download_s"], row["eps_s"]], row["clocks"]
    cells = (
        f"{row['tokens_per_s']:,.0f}",
        "-" if share is None else f"{share:.1%}",
        f"{row['mean_s']:.3f}, {row['fastest_s']:.3f}, {row['slowest_s']:.3f}, {row['steps']}",
        size(row["device_bytes"]),
        f"{size(row['host_bytes'])}, {size(row['least_available_host_bytes'])}",
        "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
        "-" if None in waits else ", ".join(f"{seconds:.3f}" for seconds in waits),
        row["bound"] or "-",
        "-" if row["attach_s"] is None else f"{row['attach_s']:.1f}",
        row["attention"],
        "-"
        if not clocks
        else ", ".join(clocks.get(key, "-") for key in ("clocks.sm", "temperature.gpu", "power.draw")),
    )
    return f"{start}| {' | '.join(cells)} |"


def case_table(rows: Sequence[Row]) -> str:
    """All rows, in markdown."""
    return "\n".join((f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|", *(case_line(row, rows) for row in rows)))


def of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    """The rows of a kind."""
    return [row for row in rows if row["kind"] == kind]


def failures(rows: Sequence[Row]) -> list[str]:
    """What failed, a line each."""
    rehearsed, found = False, []
    for row in of_kind(rows, "call"):
        rehearsed, assumed_s = row["rehearsal"], seconds(rows)[-1][2]
        if rehearsed and assumed_s > row["most_s"]:
            found.append(
                f"the plan: {assumed_s:.0f} s are assumed for an H100, at most {row['most_s']:.0f} s are there"
            )
    for row in of_kind(rows, "page"):
        found.append(f"gpu.md after {row['part']}: {row['failure']}")
    for row in of_kind(rows, "part"):
        if row["how"] != "ended" and (rehearsed or NO_TIME not in row["how"]):
            found.append(f"{row['name']}: {row['how']}")
    for row in of_kind(rows, "case"):
        if row["failure"] and (rehearsed or NO_TIME not in row["failure"]):
            found.append(f"{row['model']}, {row['tokens']:,} tokens, {row['title']}: {row['failure']}")
    for row in of_kind(rows, "test"):
        if row["outcome"] not in ("passed", "skipped"):
            last = row["message"].strip().splitlines()[-1:] or [""]
            found.append(f"{row['name']} {row['outcome']}: {last[0][:200]}")
    return found


def seconds(rows: Sequence[Row]) -> list[tuple[str, float, float]]:
    """By part, as taken and as the plan assumes for an H100, with the sum of all at the end; to start a process is a
    line of its own."""
    lines = []
    for row in of_kind(rows, "part"):
        if row["start_s"]:
            lines.append((f"a process for {row['name']}", row["start_s"], row["assumed_start_s"]))
        lines.append((row["name"], row["seconds"] - row["start_s"], row["assumed_s"]))
    lines += [("the end", 0.0, row["end_s"]) for row in of_kind(rows, "call")]
    return [*lines, ("all", sum(line[1] for line in lines), sum(line[2] for line in lines))]


def times(rows: Sequence[Row]) -> str:
    """The table of `seconds`."""
    head = ["| part | taken, s | assumed for an H100, s |", "|---|---|---|"]
    return "\n".join([*head, *(f"| {name} | {taken:.1f} | {assumed:.0f} |" for name, taken, assumed in seconds(rows))])


def tests_line(rows: Sequence[Row]) -> str:
    """How many tests there are of each outcome."""
    outcomes = [row["outcome"] for row in of_kind(rows, "test")]
    return f"{len(outcomes)} tests: {', '.join(f'{outcomes.count(o)} {o}' for o in dict.fromkeys(outcomes))}"


def summary(rows: Sequence[Row]) -> str:
    """The last lines of the output."""
    cases = of_kind(rows, "case")
    found = []
    for row in cases:
        start = f"{row['model']}, {row['tokens']:,} tokens, {name_of(row)}: "
        if row["failure"]:
            found.append(start + row["failure"])
            continue
        share = of_trainer(row, cases)
        found.append(
            f"{start}{row['tokens_per_s']:,.0f} tokens/s{'' if share is None else f' ({share:.0%})'}, device "
            f"{size(row['device_bytes'])}, host {size(row['host_bytes'])}; bound: {bound_of(row, rows)}"
        )
    found += [tests_line(rows), "", times(rows), ""]
    failed = failures(rows)
    found += [f"{len(failed)} failed:", *failed] if failed else ["nothing failed"]
    text = "\n".join(found)
    return text if len(text) <= LONGEST else f"...\n{text[-LONGEST:]}"


def bound_of(row: Row, rows: Sequence[Row]) -> str:
    """What bounds the step of a case, as far as that was measured."""
    if row["bound"] is None:
        on_device = " (the model is on the device: computation or kernel launches)"
        return f"not measured{'' if row['mode'] == 'fsdp2' else on_device}"
    profile = next(iter(of_kind(rows, "profile")), None)
    if row["bound"] == "compute" and profile is not None and (profile["busy_share"] or 1.0) < 1 - DIFFERS:
        return f"launches (the device is busy for {profile['busy_share']:.0%} of two layers under the profiler)"
    return str(row["bound"])


def against_the_estimate(row: Row) -> str:
    """A line of the table of estimates; what differs by more than a tenth is bold."""
    expected = row.get("expected") or {}
    step_s = expected.get("step_s")
    pairs = (
        (row["tokens_per_s"], None if step_s is None else row["tokens"] / step_s, lambda rate: f"{rate:,.0f}"),
        (row["device_bytes"], expected.get("device_bytes"), size),
        (row["host_bytes"], expected.get("host_bytes"), size),
    )
    cells = []
    for found, told, text in pairs:
        if found is None or told is None:
            cells.append("-")
            continue
        off = found / told - 1
        words = f"{text(found)}, estimate {text(told)}, {off:+.0%}"
        cells.append(f"**{words}**" if abs(off) > DIFFERS else words)
    return f"| {row['model']} | {row['tokens']:,} | {name_of(row)} | {' | '.join(cells)} |"


def page(rows: Sequence[Row], command: str) -> str:
    """All of it in markdown; `rows` may be those of a call that was cut."""
    call, where = (next(iter(of_kind(rows, kind)), None) for kind in ("call", "environment"))
    rehearsed = call is not None and call["rehearsal"]
    title = "A few minutes of a GPU" if where is None else f"A few minutes of {where['device']}"
    parts = [f"# {title}{', a rehearsal: its figures mean nothing' if rehearsed else ''}", ""]
    parts += list(environment_lines(where)) if where is not None else ["The environment was not written."]
    cases, failed = of_kind(rows, "case"), failures(rows)
    parts += ["", "## What failed", "", *([f"- {line}" for line in failed] or ["Nothing."])]
    parts += ["", "## Trainings", ""]
    parts += [
        "Random weights and tokens; micro-batches of 8,192 tokens, except those of the plan; the mean is over the "
        "steps that are named.",
        "",
    ]
    parts += [case_table(cases), "", "## What bounds them, and what the estimate said", ""]
    parts += [
        "The estimate is the package's own, of these options, with the rates of the probe. Of `Trainer` it is the "
        "device's peak alone, to which the gradients of earlier micro-batches are added; with bf16 weights, and of "
        f"FSDP2, there is none. What differs by more than {DIFFERS:.0%} is bold.",
        "",
        *("| model | tokens per step | trainer | tokens/s | device, peak | host, peak |", "|---" * 6 + "|"),
        *(against_the_estimate(row) for row in cases if not row["failure"]),
        "",
    ]
    parts += [
        f"- {r['model']}, {r['tokens']:,}, {r['title']}: {bound_of(r, rows)}." for r in cases if not r["failure"]
    ]
    parts += ["", *(f"{row['title']}: {row['plan']}." for row in cases if row.get("plan"))]
    parts += ["", "## Two layers under the profiler", "", *profile_lines(rows), "", "## Rates", ""]
    parts += ["| what | values |", "|---|---|"]
    for row in of_kind(rows, "probe"):
        values = ", ".join(f"{key} {shown(value)}" for key, value in row.items() if key not in ("kind", "name"))
        parts.append(f"| {row['name']} | {values} |")
    parts += ["", "## Tests", "", *test_lines(rows), "", "## Parts", ""]
    parts += ["| part | how it ended | seconds | of them, to start a process |", "|---|---|---|---|"]
    for row in of_kind(rows, "part"):
        parts.append(f"| {row['name']} | {row['how']} | {row['seconds']:.1f} | {row['start_s']:.1f} |")
    return "\n".join([*parts, "", "```bash", command, "```", ""])


def environment_lines(where: Row) -> Iterator[str]:
    """The machine, in lines."""
    yield f"- {where['date']}, {where['device']} with {size(where['device_bytes'])}, driver {where['driver'] or '-'}"
    yield (
        f"- {where['cpu']}: {where['cores']} cores as the system counts them, {where['usable_cores']} usable, "
        f"{where['physical_cores'] or '-'} without hyperthreads; {where['update_threads']} threads for updates"
    )
    yield f"- {size(where['host_bytes'])} of host memory, {size(where['available_host_bytes'])} available"
    pages = ", ".join(f"{name}: {value}" for name, value in where["huge_pages"].items())
    yield f"- huge pages: {pages or 'not told'}; clocks at the start: {where['clocks'] or 'not told'}"
    yield f"- {', '.join(f'{name} {version}' for name, version in where['versions'].items())}"


def profile_lines(rows: Sequence[Row]) -> Iterator[str]:
    """How busy the device was, and with what."""
    for row in of_kind(rows, "profile"):
        share = "-" if row["busy_share"] is None else f"{row['busy_share']:.0%}"
        yield (
            f"Forward and backward take {1e3 * row['seconds']:.1f} ms under the profiler, with {row['kernels']} "
            f"kernels, one of which ran in {share} of the time from the first to the last. The longest, in ms:"
        )
        yield ""
        yield from (f"- {1e3 * each['seconds']:.2f} `{each['name']}`" for each in row["longest"])


def test_lines(rows: Sequence[Row]) -> Iterator[str]:
    """How many passed, what failed and why, and the slowest."""
    tests = of_kind(rows, "test")
    yield f"{tests_line(rows)}."
    for row in tests:
        if row["outcome"] not in ("passed", "skipped"):
            yield from ("", f"`{row['name']}` {row['outcome']}:", "", "```", row["message"], "```")
    slowest = sorted(tests, key=lambda row: -row["seconds"])[:5]
    yield from ("", "The slowest:", "", *(f"- {row['seconds']:.1f} s `{row['name']}`" for row in slowest))


def shown(value: Any) -> str:
    """A value for people."""
    if isinstance(value, float):
        return f"{value / 1e9:,.2f} G" if abs(value) >= 1e8 else f"{value:,.4g}"
    return str(value)
