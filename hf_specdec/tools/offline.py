"""Offline jobs: a file of prompts to a file of texts, in one process or many, resumable after a kill.

Every process cuts the input into the same batches. In one process and under a launcher (`accelerate launch`, `torchrun`)
each rank generates its share of those that the first one finds unfinished; ranks wait for each other at the start
alone, and the first one puts everything in order at the end. With Ray, actors generate, and the process that was called
writes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..errors import SpecDecError
from .offline_files import JobFiles
from .offline_records import Batch, JobSettings, batches, inspect_input, read_records


FORMAT = 1  # to be raised when the same input gives other batches or other texts
SECONDS_BETWEEN_LOOKS = 0.5
START = timedelta(minutes=10)  # within which all ranks must be there

Results = Iterator[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Launch:
    """This process among those of a launcher.

    Attributes:
        rank: Its number, from 0.
        size: How many there are.
        local: Its number on this machine.
    """

    rank: int = 0
    size: int = 1
    local: int = 0

    @classmethod
    def from_environment(cls) -> Launch:
        """Read what `accelerate launch` and `torchrun` set."""
        given = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
        return cls() if None in given else cls(*(int(value or 0) for value in given))

    @contextmanager
    def together(self) -> Iterator[Callable[[list[int] | None], list[int] | None]]:
        """A block in which ranks meet.

        Yields:
            A function that waits for every rank and returns what the first one passes.
        """
        if self.size == 1:
            yield lambda value: value
            return
        from torch import distributed

        distributed.init_process_group("gloo", timeout=START)

        def share(value: list[int] | None) -> list[int] | None:
            box = [value]
            distributed.broadcast_object_list(box, src=0)
            distributed.barrier()  # nobody leaves before all have it
            return box[0]

        try:
            yield share
        finally:
            distributed.destroy_process_group()

    @property
    def device(self) -> str | None:
        """The rank's own accelerator; `None` in one process, where the loader decides."""
        if self.size == 1:
            return None
        import torch

        on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
        # a build for an accelerator names one where there is none
        kind = None if on_cpu or not torch.accelerator.is_available() else torch.accelerator.current_accelerator()
        return "cpu" if kind is None else f"{kind.type}:{self.local % torch.accelerator.device_count()}"


def run_job(
    settings: JobSettings,
    prompts: Path,
    out: Path,
    *,
    restart: bool = False,
    engine: str = "local",
    workers: int | None = None,
    tell: Callable[[int, int, int], None] | None = None,
    warn: Callable[[str], None] | None = None,
) -> dict[str, Any] | None:
    """Generate a text for every record of a file.

    Args:
        settings: What the texts depend on.
        prompts: JSON lines, as `read_records` takes them.
        out: Where one record a prompt goes, in order, once all are there; next to it the statistics.
        restart: Start over, whatever there is.
        engine: `"local"`: this process, or all that a launcher started; `"ray"`: actors of a Ray cluster.
        workers: Ray actors; `None` is one a GPU, or one.
        tell: Called with the finished records, all records, and the tokens generated since the call.
        warn: Called with a line for every record that is skipped.

    Returns:
        The summary; `None` on all ranks but the first.

    Raises:
        SpecDecError: If the prompts can't be read, the output belongs to another job, or the model can't be loaded.
    """
    began, launch = time.perf_counter(), Launch.from_environment()
    if engine == "ray" and launch.size > 1:
        raise SpecDecError("Ray starts its own workers. Run --engine ray without a launcher.")
    files, first = JobFiles(out), launch.rank == 0
    if prompts.resolve() in [path.resolve() for path in (files.out, files.stats, files.manifest)]:
        raise SpecDecError(f"The job would write to its prompts, the same file, {prompts}. Name another output.")
    digest, num_records = inspect_input(prompts)
    num_batches = -(-num_records // settings.batch_size)
    fixed = settings.to_dict() | {"prompts_sha256": digest, "format": FORMAT}
    try:
        pending = _open_together(files, fixed, restart, num_batches, launch)
        mine = frozenset(pending[launch.rank :: launch.size])
        if not first and not mine:
            return None
        if first and (summary := files.summary()) is not None:
            return summary | {"generated_records": 0}
        before, known = files.num_records, files.num_tokens

        def look() -> int:
            finished = len(files.scan())
            if tell is not None:
                tell(files.num_records, num_records, files.num_tokens - known)
            return finished

        work = (batch for batch in batches(read_records(prompts), settings.batch_size) if batch.number in mine)
        results = _ray(settings, work, len(mine), workers) if engine == "ray" else _local(settings, work, launch)
        written = 0
        with files.writer(launch.rank) as writer:
            for result in results:
                writer.append(result)
                written += 1
                _warn_of_errors(result, warn)
                if first:
                    look()
        if written < len(mine):
            raise SpecDecError(
                f"{prompts} has fewer records than before. Pass a file that stays as it is, not a pipe."
            )
        if not first:
            return None
        while look() < num_batches:  # other ranks are still at it
            time.sleep(SECONDS_BETWEEN_LOOKS)
        seconds, tokens = time.perf_counter() - began, files.num_tokens - known
        summary = {
            "out": str(files.out),
            "stats": str(files.stats),
            "generated_records": files.num_records - before,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
        } | summarise(files.merge(num_batches))
        files.complete(fixed, summary)
        return summary
    finally:
        if first:
            files.close()


def _open_together(
    files: JobFiles, settings: dict[str, Any], restart: bool, num_batches: int, launch: Launch
) -> list[int]:
    """Open the job on the first rank; what it finds unfinished holds for all, whatever others see on their disks."""
    error: SpecDecError | OSError | None = None
    pending: list[int] | None = None
    with launch.together() as share:
        if launch.rank == 0:
            try:
                files.open(settings, restart)
                finished = range(num_batches) if files.summary() is not None else files.scan()
                pending = [number for number in range(num_batches) if number not in finished]
            except (SpecDecError, OSError) as caught:
                error = caught
        pending = share(pending)
    if pending is None:
        raise error or SpecDecError("The first rank couldn't open the job; it says why.")
    return pending


def _local(settings: JobSettings, work: Iterable[Batch], launch: Launch) -> Results:
    worker = None
    for batch in work:
        if worker is None:  # nothing is loaded where nothing is left to do
            from .offline_worker import Worker

            worker = Worker(settings, launch.device)
        yield worker.run(batch)


def _ray(settings: JobSettings, work: Iterable[Batch], count: int, workers: int | None) -> Results:
    from .offline_ray import generate_with_ray

    return generate_with_ray(settings, work, count, workers) if count else iter(())


def _warn_of_errors(result: dict[str, Any], warn: Callable[[str], None] | None) -> None:
    for record, _ in result["records"]:
        if record["error"] is not None and warn is not None:
            warn(f"record {record['index']} is skipped: {record['error']}")


def summarise(pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Sum up records and their statistics.

    Args:
        pairs: As in the output and the statistics file.
    """
    from ..stats import SpecStats

    own, records, errors, seconds = SpecStats(), 0, 0, 0.0
    for record, row in pairs:
        records += 1
        errors += record["error"] is not None
        own.num_emitted_tokens += record["num_tokens"]
        own.num_spec_steps += row["num_spec_steps"]
        own.num_draft_tokens += row["num_draft_tokens"]
        own.num_accepted_draft_tokens += row["num_accepted_draft_tokens"]
        share = row["batch_seconds"] / row["batch_rows"]
        seconds += share
        own.draft_seconds += share * row["draft_share"]
        own.verify_seconds += share * row["verify_share"]
    return {
        "records": records,
        "errors": errors,
        "tokens": own.num_emitted_tokens,
        "mean_acceptance_length": own.mean_acceptance_length,
        "draft_acceptance_rate": own.draft_acceptance_rate,
        "draft_share": own.draft_seconds / seconds if seconds else 0.0,
        "verify_share": own.verify_seconds / seconds if seconds else 0.0,
    }
