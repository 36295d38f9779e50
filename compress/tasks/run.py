"""Running tasks of lm-evaluation-harness, given by name or as YAML files, with an engine."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from engine.errors import CompressError, DataError, OptionError
from engine.generation.generate import Engine
from engine.progress import Progress, no_progress


def require() -> None:
    """Raise OptionError if lm-evaluation-harness is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise OptionError("tasks need lm-evaluation-harness; install it with `pip install moe-compress[tasks]`") from error


def run_tasks(
    engine: Engine, names: list[str], *, limit: int | None = None, progress: Progress = no_progress
) -> dict[str, Any]:
    """Return the harness's results by task.

    limit: number of examples per task, the first ones. Raises OptionError if the harness is not installed, and DataError
    for tasks that it does not know or whose data it cannot read.
    """
    require()
    import lm_eval

    from compress.tasks.harness_model import HarnessModel

    model = HarnessModel(engine, progress)
    try:
        known = _task_manager(all(Path(name).is_file() for name in names))
        results = lm_eval.simple_evaluate(model=model, tasks=names, task_manager=known, limit=limit)
    except CompressError:
        raise
    except Exception as error:  # several libraries raise errors for unknown names and data that cannot be downloaded
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DataError(
            f"tasks {','.join(names)}: lm-evaluation-harness failed ({reason}); check names and network"
        ) from error
    scores: dict[str, Any] = results["results"]
    return scores


@cache
def _task_manager(only_files: bool) -> Any:
    """Return the available tasks, cached for all models: the harness reads thousands of files for its own tasks."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=not only_files)
