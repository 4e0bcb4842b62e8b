"""Fine-tuning on GLUE: the tasks and their metrics, and the parts of `run_glue_l2l.py`.

Of the script: its options and those that are retired, the data and the head of the model, the metrics of a
prediction, the comparison of two training runs, and what it says on errors. The names below load when they are used:
`metric` needs the packages of the extra `glue`, and imports them; the other modules import none of them at the top.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_l2l.glue.metric import HUB_DATASET, OTHER_DATA, TASKS, GlueMetric, Task, measures

__all__ = ["HUB_DATASET", "OTHER_DATA", "TASKS", "GlueMetric", "Task", "measures"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from hf_l2l.glue import metric

        return getattr(metric, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
