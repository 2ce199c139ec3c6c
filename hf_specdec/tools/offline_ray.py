"""Ray as the engine of an offline job: batches to actors, results back as they come, in any order.

The driver alone writes, so the nodes need no common disk; they need the package, and the model where its name says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import SpecDecError
from .offline_records import Batch, JobSettings, Record


MOST_BLOCKS = 10_000  # results arrive block by block; beyond this many, a block is several batches


class Actor:
    """A worker in a process of Ray's, with a GPU of its own where the cluster has any."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from .offline_worker import Worker

        self._worker = Worker(JobSettings(**settings))

    def __call__(self, rows: dict[str, Any]) -> dict[str, list[str]]:
        return {"done": [json.dumps(self._worker.run(_read(text))) for text in rows["batch"]]}


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
        import ray
        import ray.data
    except ImportError as error:
        raise SpecDecError(f"--engine ray needs Ray ({error}). Install: pip install 'hf-specdec[ray]'") from error
    started = not ray.is_initialized()
    if started:
        ray.init(include_dashboard=False)  # the cluster that RAY_ADDRESS names, else a new one on this machine
    ray.data.DataContext.get_current().enable_progress_bars = False
    gpus = int(ray.cluster_resources().get("GPU", 0))
    try:
        done = ray.data.from_items(
            [{"batch": _write(batch)} for batch in work], override_num_blocks=min(count, MOST_BLOCKS)
        ).map_batches(
            Actor,
            fn_constructor_args=(settings.to_dict(),),
            batch_size=1,
            concurrency=workers or max(gpus, 1),
            num_gpus=1 if gpus else 0,
            num_cpus=1,
        )
        for row in done.iter_rows():
            yield json.loads(row["done"])
    except ray.exceptions.RayError as error:
        raise SpecDecError(f"A Ray worker failed: {_cause(error)}") from error
    finally:
        if started:
            ray.shutdown()


def _write(batch: Batch) -> str:
    return json.dumps({"number": batch.number, "records": [record.to_dict() for record in batch.records]})


def _read(text: str) -> Batch:
    fields = json.loads(text)
    return Batch(fields["number"], tuple(Record(**record) for record in fields["records"]))


def _cause(error: BaseException) -> str:
    """The last line of a remote traceback, which says what went wrong there."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
