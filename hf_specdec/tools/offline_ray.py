"""Ray as the engine of an offline job: batches to actors, results back as they come, in any order.

The driver alone writes, so the nodes need no common disk; they need the package, and the model where its name says.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

from ..errors import SpecDecError
from .offline_records import Batch, JobSettings, Record


MOST_BLOCKS = 10_000  # results arrive block by block; beyond this many, a block is several batches


class Actor:
    """A worker in a process of Ray's, with a GPU of its own where the cluster has any.

    The settings come with the batches, so that a model that can't be loaded fails the job and not the actor, which Ray
    would start again and again.
    """

    def __init__(self) -> None:
        self._worker: Any = None

    def __call__(self, rows: dict[str, Any]) -> dict[str, list[str]]:
        done = []
        for text in rows["batch"]:
            fields = json.loads(text)
            if self._worker is None:
                from .offline_worker import Worker

                self._worker = Worker(JobSettings(**fields["settings"]))
            batch = Batch(fields["number"], tuple(Record(**record) for record in fields["records"]))
            done.append(json.dumps(self._worker.run(batch)))
        return {"done": done}


def generate_with_ray(
    settings: JobSettings, work: Iterable[Batch], count: int, workers: int | None
) -> Iterator[dict[str, Any]]:
    """Generate batches with Ray Data.

    Args:
        settings: Of the job.
        work: The batches.
        count: How many there are.
        workers: Actors; `None` is one a GPU, or one.

    Yields:
        What `Worker.run` returns, in the order in which batches are finished.

    Raises:
        SpecDecError: If Ray isn't installed, or a worker fails.
    """
    try:
        ray, data = import_module("ray"), import_module("ray.data")
    except ImportError as error:
        raise SpecDecError(f"--engine ray needs Ray ({error}). Install: pip install 'hf-specdec[ray]'") from error
    started = not ray.is_initialized()
    if started:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody asked to report this job
        # the cluster that RAY_ADDRESS names or that runs on this machine, else a new one
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    try:
        finished = data.from_items(
            [{"batch": _to_json(settings, batch)} for batch in work], override_num_blocks=min(count, MOST_BLOCKS)
        ).map_batches(
            Actor,
            batch_size=1,
            compute=data.ActorPoolStrategy(size=workers or max(gpus, 1)),
            num_cpus=1,
            num_gpus=1 if gpus else 0,
        )
        for row in finished.iter_rows():
            yield json.loads(row["done"])
    except ray.exceptions.RayError as error:
        raise SpecDecError(f"A Ray worker failed: {_cause(error)}") from error
    finally:
        if started:
            ray.shutdown()


def _to_json(settings: JobSettings, batch: Batch) -> str:
    records = [record.to_dict() for record in batch.records]
    return json.dumps({"settings": settings.to_dict(), "number": batch.number, "records": records})


def _cause(error: BaseException) -> str:
    """The last line of a remote traceback, which says what went wrong there."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
