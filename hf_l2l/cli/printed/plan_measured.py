"""What `hf-l2l plan --measured TRACE` prints: each layer's time in a real run beside that of the plan.

The plan is that of one device which runs layer to layer, at its peak, and with the rows of `--batch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hf_l2l.cli.command import digits_text
from hf_l2l.report.traced_steps import TracedLayer, TracedSteps
from hf_l2l.scale import Degrees, Method, Usage
from hf_l2l.scale.l2l import LayerTimes

if TYPE_CHECKING:
    from hf_l2l.scale import Cluster, TransformerShape

PARTS = ("forward", "backward", "upload", "update")
Compared = dict[str, float | None]
""" "measured" and "plan" in seconds, and their "ratio"; None for what the trace does not have."""


class Beside:
    """A run and its plan, part by part."""

    def __init__(self, found: TracedSteps, shape: TransformerShape, cluster: Cluster, rows: int) -> None:
        """
        Raises:
            ValueError: if the run had another number of layers than `shape`.
        """
        if len(found.layers) != shape.layers:
            raise ValueError(
                f"--measured must be of a run of MODEL, which has {shape.layers} layers (got {len(found.layers)} in "
                "the trace); give the model of that run"
            )
        self.found, self.cluster, self.rows = found, cluster, rows
        times = LayerTimes.of(shape, cluster, rows)
        self.plan = {
            "forward": times.forward,
            "backward": times.forward + times.backward,
            "upload": 2 * times.upload,
            "update": times.host_update / shape.layers,
        }
        step = Usage(shape, cluster, Method.L2L, Degrees(micro_batch=1, micro_batches=rows)).step_seconds
        self.step = _compared(found.step, step)

    def layer(self, layer: TracedLayer) -> dict[str, Compared]:
        """The parts of one layer."""
        return {part: _compared(getattr(layer, part), self.plan[part]) for part in PARTS}

    def total(self) -> dict[str, Compared]:
        """Of all layers together; updates also have what is updated besides."""
        layers = self.found.layers
        measured: dict[str, float | None] = {
            "forward": sum(each.forward for each in layers),
            "backward": sum(each.backward for each in layers),
            "upload": sum(each.upload or 0 for each in layers) or None,
            "update": self.found.update,
        }
        return {part: _compared(measured[part], len(layers) * self.plan[part]) for part in PARTS}

    def as_json(self) -> dict[str, object]:
        """The field `measured`."""
        return {
            "steps": self.found.steps,
            "rows": self.rows,
            "step": self.step,
            "total": self.total(),
            "layers": [{"name": each.name, **self.layer(each)} for each in self.found.layers],
        }

    def lines(self) -> Iterator[str]:
        """A table, in milliseconds."""
        rows = [("layer", *(text for part in PARTS for text in (f"{part} ms", "plan", "ratio")))]
        rows += [(each.name, *_texts(self.layer(each))) for each in self.found.layers]
        rows.append(("all", *_texts(self.total())))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for name, *texts in rows:
            cells = [text.rjust(width) for text, width in zip(texts, widths[1:], strict=True)]
            yield "  ".join([name.ljust(widths[0]), *cells])
        counted = f"{self.found.steps} steps" if self.found.steps > 1 else "one step"
        took, plan = (1000 * seconds for seconds in (self.found.step, self.step["plan"] or 0.0))
        yield (
            f"\nMeans of {counted} with {self.rows:,} rows. A step took {digits_text(took)} ms; the plan, of one "
            f"{self.cluster.hardware.name} at its peak, is {digits_text(plan)} ms.\n"
            "Parts without a time are not in the trace. What is outside the layers is in the run's step and in its "
            "update of all, not in the plan."
        )


def _compared(measured: float | None, plan: float) -> Compared:
    return {"measured": measured, "plan": plan, "ratio": None if measured is None else measured / plan}


def _texts(parts: Mapping[str, Compared]) -> Iterator[str]:
    for part in PARTS:
        measured, plan, ratio = parts[part].values()
        assert plan is not None
        yield "-" if measured is None else digits_text(1000 * measured)
        yield digits_text(1000 * plan)
        yield "-" if ratio is None else digits_text(ratio)
