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

    Settings come with the batches and errors go back as results, so that a model that can't be loaded ends the job with
    one line; an actor that fails is started again and again.
    """

    def __init__(self) -> None:
        self._worker: Any = None

    def __call__(self, rows: dict[str, Any]) -> dict[str, list[str]]:
        return {"done": [json.dumps(self._run(json.loads(text))) for text in rows["batch"]]}

    def _run(self, fields: dict[str, Any]) -> dict[str, Any]:
        from .offline_worker import Worker

        try:
            self._worker = self._worker or Worker(JobSettings(**fields["settings"]))
            batch = Batch(fields["number"], tuple(Record(**record) for record in fields["records"]))
            done: dict[str, Any] = self._worker.run(batch)
        except SpecDecError as error:
            return {"error": str(error)}
        return done


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
        SpecDecError: If Ray isn't installed, or a worker can't do its work.
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
            result = json.loads(row["done"])
            if "error" in result:
                raise SpecDecError(result["error"])
            yield result
    finally:
        if started:
            ray.shutdown()


def _to_json(settings: JobSettings, batch: Batch) -> str:
    records = [record.to_dict() for record in batch.records]
    return json.dumps({"settings": settings.to_dict(), "number": batch.number, "records": records})
