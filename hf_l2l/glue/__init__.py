"""The GLUE tasks and their metrics, and the comparison of two training runs.

Its names load when they are used: the metric needs the packages of the extra `glue`.
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
