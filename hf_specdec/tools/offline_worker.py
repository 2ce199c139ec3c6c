"""The process that generates in an offline job: a model, and batches to results."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch

import hf_specdec

from ..config import SpecConfig
from ..engine.compat import max_positions
from ..errors import SpecDecError
from ..stats import RowStats, SpecStats
from .loading import end_tokens, load_model, pad_batch, tokenize
from .offline_records import Batch, JobSettings, Record


# one text a prompt, one token after the other, whatever the model's own generation config says
ONE_TEXT = {"num_beams": 1, "num_return_sequences": 1, "penalty_alpha": 0.0}


class Worker:
    """Generates batches with one model on one device.

    A greedy text doesn't depend on the batch, and a sampled one depends on its seed alone (`SpecConfig.seed`), up to the
    rounding of half precision. So a job gives the same texts in any number of processes.
    """

    def __init__(self, settings: JobSettings, device: str | None = None) -> None:
        """Load the model.

        Args:
            settings: Of the job.
            device: Where to put it; `None` as in `load_model`.

        Raises:
            SpecDecError: If it can't be loaded, or the chat template that was asked for is missing.
        """
        self.settings = settings
        self.loaded = load_model(settings.model, dtype=settings.dtype, device=device)
        if settings.chat and self.loaded.tokenizer.chat_template is None:
            raise SpecDecError(f"The tokenizer of {settings.model!r} has no chat template. Use --no-chat.")
        self._ends = frozenset(end_tokens(self.loaded))

    def run(self, batch: Batch) -> dict[str, Any]:
        """Generate a batch.

        Args:
            batch: Records, good and bad.

        Returns:
            `batch`, its number, and `records`: for each record a pair of what goes to the output and its statistics.
        """
        done, groups = [], dict[int, list[tuple[Record, Any]]]()
        for record in batch.records:
            try:
                ids, most = self._encode(record)
            except SpecDecError as error:
                done.append(_failed(record, str(error)))
            else:
                groups.setdefault(most, []).append((record, ids))
        for most, group in groups.items():
            done += self._generate(group, most)
        return {"batch": batch.number, "records": done}

    def _encode(self, record: Record) -> tuple[Any, int]:
        """A record's tokens, and how many new ones it has room for."""
        if record.error is not None:
            raise SpecDecError(record.error)
        try:
            ids = tokenize(self.loaded, record.prompt, chat=self.settings.chat)["input_ids"][0]
        except Exception as error:  # whatever a chat template or a tokenizer throws, it is about this record
            raise SpecDecError(str(error) or type(error).__name__) from error
        most, limit = record.max_new_tokens or self.settings.max_new_tokens, max_positions(self.loaded.model)
        if limit is not None and len(ids) >= limit:
            raise SpecDecError(
                f"too long: the prompt has {len(ids)} tokens, the model room for {limit} with the answer"
            )
        return ids, most if limit is None else min(most, limit - len(ids))

    def _generate(self, group: list[tuple[Record, Any]], most: int) -> list[list[dict[str, Any]]]:
        """Generate records with the same number of new tokens; fewer at once where memory doesn't suffice."""
        try:
            return self._generate_together(group, most)
        except torch.OutOfMemoryError:
            pass  # what the failed try holds is only let go behind this block
        if self.loaded.model.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(group) == 1:
            return [_failed(group[0][0], "out of memory")]
        half = (len(group) + 1) // 2
        return self._generate(group[:half], most) + self._generate(group[half:], most)

    def _generate_together(self, group: list[tuple[Record, Any]], most: int) -> list[list[dict[str, Any]]]:
        settings, model = self.settings, self.loaded.model
        records = [record for record, _ in group]
        padded = pad_batch(self.loaded, [ids for _, ids in group])
        inputs = {name: tensor.to(model.device) for name, tensor in padded.items()}
        seeds = tuple(settings.row_seed(record) for record in records)
        options: dict[str, Any] = ONE_TEXT | {"max_new_tokens": most, "return_dict_in_generate": True}
        if settings.temperature > 0:
            options |= {"do_sample": True, "temperature": settings.temperature}
            torch.manual_seed(seeds[0] % 2**63)  # for what is decoded plainly
        else:
            options["do_sample"] = False
        began = time.perf_counter()
        if settings.off:
            output = model.generate(**inputs, **options, tokenizer=self.loaded.tokenizer)
            stats = SpecStats(drafter="off", total_seconds=time.perf_counter() - began)
        else:
            sampled = seeds if settings.temperature > 0 else None
            config = SpecConfig(draft_model=settings.draft, drafter=settings.drafter, seed=sampled)
            output = hf_specdec.generate(
                model, **inputs, **options, tokenizer=self.loaded.tokenizer, speculative=config
            )
            stats = output.spec_stats
        new = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        rows = stats.rows or [RowStats(num_emitted_tokens=self._count(tokens)) for tokens in new]
        return [
            [self._result(record, tokens[: row.num_emitted_tokens], most), _statistics(record, row, stats, len(rows))]
            for record, tokens, row in zip(records, new, rows, strict=True)
        ]

    def _count(self, tokens: list[int]) -> int:
        """Tokens up to and with the first end token."""
        return next((at + 1 for at, token in enumerate(tokens) if token in self._ends), len(tokens))

    def _result(self, record: Record, tokens: list[int], most: int) -> dict[str, Any]:
        stopped = len(tokens) < most or tokens[-1] in self._ends
        return {
            "index": record.index,
            "id": record.id,
            "text": self.loaded.tokenizer.decode(tokens, skip_special_tokens=True),
            "num_tokens": len(tokens),
            "finish_reason": "stop" if stopped else "length",
            "error": None,
        }


def _failed(record: Record, reason: str) -> list[dict[str, Any]]:
    """The result of a record that can't be generated."""
    result = {"text": None, "num_tokens": 0, "finish_reason": "error", "error": f"line {record.line}: {reason}"}
    return [{"index": record.index, "id": record.id} | result, _statistics(record, RowStats(), SpecStats())]


def _statistics(record: Record, row: RowStats, stats: SpecStats, rows: int = 1) -> dict[str, Any]:
    """A record's statistics; seconds and shares are those of the batch of `rows` that it was part of."""
    seconds = stats.total_seconds
    own = SpecStats(
        num_spec_steps=row.num_spec_steps,
        num_draft_tokens=row.num_draft_tokens,
        num_accepted_draft_tokens=row.num_accepted_draft_tokens,
    )
    return {"index": record.index, "id": record.id, "drafter": stats.drafter} | asdict(row) | {
        "mean_acceptance_length": own.mean_acceptance_length,
        "draft_acceptance_rate": own.draft_acceptance_rate,
        "draft_share": stats.draft_seconds / seconds if seconds else 0.0,
        "verify_share": stats.verify_seconds / seconds if seconds else 0.0,
        "batch_rows": rows,
        "batch_seconds": seconds,
        "fallback_reason": stats.fallback_reason,
    }  # fmt: skip
