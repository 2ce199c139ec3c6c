"""Two processes that decode together: one model held between them, or one lock-step of forwards.

Every group of processes runs all of its scenarios once and writes what came out; the tests look at that. A rank that waits
for another one in vain is ended with a traceback, which shows the scenario, and fails every test of its group.
"""

from __future__ import annotations

import faulthandler
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_specdec
from hf_specdec import Draft, Drafter, DraftModel, Hybrid, SpecConfig, routing
from hf_specdec.engine import clock, compat
from hf_specdec.engine.ranks import ALONE, Ranks

from .plain import ends_apart, new_tokens, options, plain_texts
from .tiny import exact_pair, ragged_prompts, tiny_model


pytestmark = pytest.mark.slow

PATIENCE = 120.0  # seconds without a result after which a rank must be waiting in vain
LIMIT = 300.0  # seconds for all results, on a machine that has much else to do
VOCABULARY = 96
RANKS = (0, 1)
DRAFTERS = ("prompt_lookup", "recycling", "draft_model", "draft_model fixed", "hybrid", "none")
SAMPLED = ("prompt_lookup", "draft_model", "hybrid")
VERIFICATIONS = ("auto", "rejection", "coupled")
SHORT = 12  # tokens
Results = dict[str, dict[str, Any]]


def prompts_of(rank: int = 0) -> dict[str, torch.Tensor]:
    """Three prompts of different lengths, others for each rank."""
    prompts = ragged_prompts(3, longest=24 + 6 * rank, vocabulary=VOCABULARY)
    prompts["input_ids"][:, -8:-4] = prompts["input_ids"][:, -4:]  # something to look up
    return prompts


def run_ranks(work: Callable[[int, Path], Results], folder: Path) -> list[Results]:
    """What `work` gives on two ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "hf_specdec", "tests.test_ranks"])
    started = multiprocessing.start_processes(_rank, (work, folder), nprocs=2, join=False, start_method="forkserver")
    until = time.monotonic() + LIMIT
    while not started.join(timeout=max(until - time.monotonic(), 0.1)):
        if time.monotonic() > until:
            for process in started.processes:
                process.kill()
            pytest.fail("the ranks wait for each other")
    return [json.loads((folder / f"{work.__name__}{rank}.json").read_text()) for rank in RANKS]


def watch() -> None:
    """Something was reached: wait for the next as long again."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True)


def _rank(rank: int, work: Callable[[int, Path], Results], folder: Path) -> None:
    watch()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{work.__name__}", rank=rank, world_size=2)
    watch()
    (folder / f"{work.__name__}{rank}.json").write_text(json.dumps(work(rank, folder)))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and its draft, saved."""
    folder = tmp_path_factory.mktemp("ranks")
    target, draft = exact_pair(layers=1, noise=0.3, vocab_size=VOCABULARY)
    target.save_pretrained(folder / "target")
    draft.save_pretrained(folder / "draft")
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    """What one process says without speculation: greedy texts of each rank's prompts, and tokens that end them apart."""
    target = AutoModelForCausalLM.from_pretrained(folder / "target").eval()
    texts = [plain_texts(target, prompts_of(rank)) for rank in RANKS]
    ends = [ends_apart(each) for each in texts]
    return {"target": target, "texts": texts, "short": [text[:SHORT] for text in texts[0]], "ends": ends}


def config_of(name: str, draft: Any, **fields: Any) -> SpecConfig:
    """A configuration by the name of its drafter."""
    if name == "draft_model fixed":
        fields |= {"draft_length": "fixed", "num_draft_tokens": 4}
    name = name.split()[0]
    return SpecConfig(drafter=name, draft_model=draft if name in ("draft_model", "hybrid") else None, **fields)


class Breaks(Drafter):
    """Drafts the same token again and again, until it breaks."""

    name = "breaks"

    def __init__(self, after: int) -> None:
        self.after = after

    def propose(self, rows: Any, length: int) -> Draft:
        self.after -= 1
        if self.after < 0:
            raise RuntimeError("broken")
        return Draft.from_lists([[5] * length] * len(rows.live))


class StopsAt:
    """A stopping criterion that has its own idea of when it is time."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@contextmanager
def patched(*patches: tuple[Any, str, Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for where, name, value in patches:
            patch.setattr(where, name, value)
        yield


def said(model: Any, prompts: dict[str, torch.Tensor], output: Any) -> dict[str, Any]:
    """What a call came to, for a file."""
    watch()
    stats = hf_specdec.last_stats(model)
    return {
        "texts": new_tokens(output, prompts),
        "reason": stats.fallback_reason,
        "forwards": stats.num_target_forwards,
        "drafted": stats.num_draft_tokens,
        "accepted": stats.num_accepted_draft_tokens,
        "calibration": stats.calibration_seconds,
        "eager": stats.eager_reason,
    }


def tensor_parallel(rank: int, folder: Path) -> Results:
    """One model between two ranks."""
    shard = DistributedConfig(tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder / "target", distributed_config=shard).eval()
    draft = AutoModelForCausalLM.from_pretrained(folder / "draft").eval()
    sharded_draft = AutoModelForCausalLM.from_pretrained(folder / "draft", distributed_config=shard).eval()
    prompts, results = prompts_of(), {}

    def generate(name: str, speculative: Any, **changes: Any) -> None:
        output = hf_specdec.generate(model, **prompts, **options(**changes), speculative=speculative)
        results[name] = said(model, prompts, output)

    ends, _, never = json.loads((folder / "ends.json").read_text())
    for name in DRAFTERS:
        generate(f"ending {name}", config_of(name, draft), eos_token_id=ends)
    for name in SAMPLED:
        torch.manual_seed(rank)  # what is drawn where no seed is given
        generate(f"sampled {name}", config_of(name, draft), do_sample=True, max_new_tokens=SHORT)
        generate(f"seeded {name}", config_of(name, draft, seed=1), do_sample=True, max_new_tokens=SHORT)
    for verification in VERIFICATIONS:
        fixed = config_of("draft_model fixed", draft, verification=verification)
        generate(f"verified {verification}", fixed, do_sample=True, max_new_tokens=SHORT)
    adaptive = config_of("draft_model", draft)
    for slow in RANKS:
        hf_specdec.reset(model)
        factor = 100 if rank == slow else 1
        with patched((clock, "now", lambda factor=factor: factor * time.perf_counter())):
            for turn in range(2):
                generate(f"slow clock {slow} {turn}", adaptive)
    for broken in RANKS:
        breaks = SpecConfig(drafter=Breaks(3 if rank == broken else 100), draft_length="fixed", num_draft_tokens=3)
        generate(f"broken {broken}", breaks)
    stops = StopsAt(prompts["input_ids"].shape[1] + (7 if rank == 0 else 12))
    generate("stopping", adaptive, stopping_criteria=[stops], eos_token_id=never)
    logits = compat.all_token_logits
    with patched((compat, "all_token_logits", lambda output: logits(output).roll(rank, -1))):
        generate("other logits", config_of("draft_model fixed", draft))
    with patched((routing, "plain_reason", lambda *_: "a test" if rank else None)):
        generate("refused by 1", adaptive, max_new_tokens=SHORT)
    generate("draft on 0", adaptive if rank == 0 else "prompt_lookup", max_new_tokens=SHORT)
    generate("sharded draft", config_of("draft_model", sharded_draft), max_new_tokens=SHORT)
    generate("sharded drafter", SpecConfig(drafter=DraftModel(sharded_draft)), max_new_tokens=SHORT)
    generate("compiled", SpecConfig(compile=True), max_new_tokens=SHORT)
    hf_specdec.enable(model)
    output = model.generate(
        **prompts, **options(eos_token_id=ends), speculative=adaptive, return_dict_in_generate=True
    )
    results["enabled"] = said(model, prompts, output.sequences)
    model._device_mesh = None
    generate("unknown sharding", adaptive, max_new_tokens=SHORT)
    return results


def lockstep(rank: int, folder: Path) -> Results:
    """Two ranks with prompts of their own, and half of the weights each."""
    shard = DistributedConfig(fsdp_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder / "target", distributed_config=shard).eval()
    draft = AutoModelForCausalLM.from_pretrained(folder / "draft").eval()
    sharded_draft = AutoModelForCausalLM.from_pretrained(folder / "draft", distributed_config=shard).eval()
    prompts, results, calls = prompts_of(rank), {}, []
    model.register_forward_pre_hook(lambda *_: calls.append(1))

    def note(name: str, output: Any, used: dict[str, torch.Tensor] = prompts) -> None:
        results[name] = said(model, used, output) | {"calls": len(calls)}
        calls.clear()

    def generate(name: str, speculative: Any, **changes: Any) -> None:
        note(name, hf_specdec.generate(model, **prompts, **options(**changes), speculative=speculative))

    ends = json.loads((folder / "ends.json").read_text())[rank]
    for name in DRAFTERS:
        generate(f"greedy {name}", config_of(name, draft), max_new_tokens=(24, 9)[rank])
        generate(f"ending {name}", config_of(name, draft), eos_token_id=ends)
    adaptive = config_of("draft_model", draft)
    generate("chunked", adaptive, prefill_chunk_size=5)
    output = hf_specdec.generate(
        model, **prompts, **options(eos_token_id=ends), return_dict_in_generate=True, speculative=adaptive
    )
    note("with cache", output.sequences)
    results["with cache"]["slots"] = compat.seq_length(output[compat.CACHE])
    given = dict(prompts)
    if rank:  # padded on the right, which is decoded plainly
        given = {name: torch.cat([each[:1, 8:], 0 * each[:1, :2]], 1) for name, each in prompts.items()}
    output = hf_specdec.generate(model, **given, **options(), speculative=adaptive)
    note("refused by 1", output, given)
    generate("sharded draft", config_of("draft_model", sharded_draft))
    generate("sharded drafter", SpecConfig(drafter=Hybrid(DraftModel(sharded_draft))))
    generate("switched off", False)
    custom = hf_specdec.decoder(speculative=adaptive)
    note("decoder", model.generate(**prompts, **options(max_new_tokens=(SHORT, 1)[rank]), custom_generate=custom))
    hf_specdec.enable()
    note("enabled", model.generate(**prompts, **options(max_new_tokens=(9, SHORT)[rank]), speculative=adaptive))
    model = tiny_model("mistral")
    fully_shard(model.model)
    fully_shard(model)
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    generate("sharded by hand", adaptive, max_new_tokens=(9, SHORT)[rank])
    generate("said otherwise", adaptive, max_new_tokens=SHORT, synced_gpus=False)
    return results


@pytest.fixture(scope="module")
def team(folder: Path, plain: dict[str, Any]) -> list[Results]:
    """Results of `tensor_parallel`."""
    never = next(token for token in range(VOCABULARY) if not any(token in text for text in plain["texts"][0]))
    (folder / "ends.json").write_text(json.dumps([*plain["ends"], never]))
    return run_ranks(tensor_parallel, folder)


@pytest.fixture(scope="module")
def synced(folder: Path, plain: dict[str, Any]) -> list[Results]:
    """Results of `lockstep`."""
    (folder / "ends.json").write_text(json.dumps(plain["ends"]))
    return run_ranks(lockstep, folder)


def ended(texts: list[list[int]], ends: list[int]) -> list[list[int]]:
    """The texts as `generate` gives them if these tokens end a row: padded with zeros."""
    stops = [next((at + 1 for at, token in enumerate(text) if token in ends), len(text)) for text in texts]
    longest = max(stops)
    return [text[:stop] + [0] * (longest - stop) for text, stop in zip(texts, stops, strict=True)]


def test_the_scenarios_say_something(plain: dict[str, Any]) -> None:
    """Rows end at different steps, and ranks have different texts."""
    for texts, ends in zip(plain["texts"], plain["ends"], strict=True):
        lengths = {sum(map(bool, text)) for text in ended(texts, ends)}
        assert len(lengths) == 3
    assert plain["texts"][0] != plain["texts"][1]


def test_ranks_of_a_team_are_identical(team: list[Results]) -> None:
    for name, result in team[0].items():
        assert result["texts"] == team[1][name]["texts"], name
        assert result["forwards"] == team[1][name]["forwards"], name
        assert result["drafted"] == team[1][name]["drafted"], name
        assert result["accepted"] == team[1][name]["accepted"], name


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_team_says_what_one_process_says(team: list[Results], plain: dict[str, Any], drafter: str) -> None:
    found = team[0][f"ending {drafter}"]
    assert found["texts"] == ended(plain["texts"][0], plain["ends"][0])
    assert found["reason"] is None
    if drafter in ("draft_model fixed", "recycling"):
        assert found["accepted"] > 0


def test_a_team_samples_what_one_process_samples(team: list[Results], plain: dict[str, Any]) -> None:
    alone = hf_specdec.generate(
        plain["target"], **prompts_of(), **options(do_sample=True, max_new_tokens=SHORT),
        speculative=config_of("none", None, seed=1),
    )  # fmt: skip
    assert team[0]["seeded prompt_lookup"]["texts"] == new_tokens(alone, prompts_of())
    for drafter in SAMPLED:
        assert team[0][f"sampled {drafter}"]["texts"] != team[0][f"seeded {drafter}"]["texts"]
    for verification in VERIFICATIONS:
        assert team[0][f"verified {verification}"]["accepted"] > 0


@pytest.mark.parametrize("slow", RANKS)
def test_clocks_may_differ(team: list[Results], plain: dict[str, Any], slow: int) -> None:
    for turn in range(2):
        found = team[0][f"slow clock {slow} {turn}"]
        assert found["texts"] == plain["texts"][0]
        assert found["calibration"] == 0


def test_a_broken_drafter_is_given_up_by_all(team: list[Results], plain: dict[str, Any]) -> None:
    for broken in RANKS:
        assert team[0][f"broken {broken}"]["texts"] == plain["texts"][0]
    # of rank 1 no draft is wanted
    assert [found["broken 1"]["reason"] for found in team] == [None, None]
    assert "RuntimeError: broken" in team[0]["broken 0"]["reason"]
    assert team[1]["broken 0"]["reason"] == "the leading rank has given up its drafter"
    assert 0 < team[1]["broken 0"]["drafted"] < team[1]["broken 1"]["drafted"]


def test_the_leader_says_when_to_stop(team: list[Results], plain: dict[str, Any]) -> None:
    assert team[1]["stopping"]["texts"] == [text[:7] for text in plain["texts"][0]]


def test_the_leader_s_logits_count(team: list[Results], plain: dict[str, Any]) -> None:
    assert team[1]["other logits"]["texts"] == plain["texts"][0]
    assert team[1]["other logits"]["accepted"] > 0


def test_all_or_none_of_a_team_speculate(team: list[Results], plain: dict[str, Any]) -> None:
    assert [found["refused by 1"]["reason"] for found in team] == ["another rank can't speed up its call", "a test"]
    assert team[0]["refused by 1"]["texts"] == plain["short"]


def test_forwards_of_a_team_are_not_compiled(team: list[Results], plain: dict[str, Any]) -> None:
    assert "other processes" in team[0]["compiled"]["eager"]
    assert team[0]["compiled"]["texts"] == plain["short"]


def test_a_draft_may_be_on_the_leader_alone(team: list[Results], plain: dict[str, Any]) -> None:
    assert team[1]["draft on 0"]["texts"] == plain["short"]
    assert team[1]["draft on 0"]["reason"] is None


def test_what_is_spread_in_other_ways_is_decoded_plainly(team: list[Results], plain: dict[str, Any]) -> None:
    for found in team:
        assert "load it whole" in found["sharded draft"]["reason"]
        assert found["sharded drafter"] == found["sharded draft"]
        assert "spread over processes" in found["unknown sharding"]["reason"]
        assert found["sharded draft"]["texts"] == found["unknown sharding"]["texts"] == plain["short"]


def test_a_team_through_the_hook(team: list[Results], plain: dict[str, Any]) -> None:
    assert team[1]["enabled"]["texts"] == ended(plain["texts"][0], plain["ends"][0])
    assert team[1]["enabled"]["reason"] is None


def test_ranks_in_lockstep_run_as_many_forwards(synced: list[Results]) -> None:
    for name, result in synced[0].items():
        assert result["calls"] == synced[1][name]["calls"] > 0, name
        assert result["calibration"] == 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_lockstep_says_what_one_process_says(synced: list[Results], plain: dict[str, Any], drafter: str) -> None:
    for rank, found in enumerate(synced):
        texts = plain["texts"][rank]
        assert found[f"greedy {drafter}"]["texts"] == [text[: (24, 9)[rank]] for text in texts]
        assert found[f"ending {drafter}"]["texts"] == ended(texts, plain["ends"][rank])
        assert found[f"greedy {drafter}"]["reason"] is None
        if drafter == "draft_model fixed":
            assert found[f"greedy {drafter}"]["accepted"] > 0
    greedy = [found[f"greedy {drafter}"] for found in synced]
    assert greedy[1]["forwards"] < greedy[1]["calls"]  # the rank that was done went on


def test_lockstep_with_forwards_outside_of_rounds(synced: list[Results], plain: dict[str, Any]) -> None:
    for rank, found in enumerate(synced):
        texts = plain["texts"][rank]
        assert found["chunked"]["texts"] == texts
        whole = ended(texts, plain["ends"][rank])
        assert found["with cache"]["texts"] == whole
        assert found["with cache"]["slots"] == prompts_of(rank)["input_ids"].shape[1] + len(whole[0]) - 1
        assert found["chunked"]["reason"] is found["with cache"]["reason"] is None


def test_all_or_none_in_lockstep_speculate(synced: list[Results], plain: dict[str, Any]) -> None:
    assert synced[0]["refused by 1"]["texts"] == plain["texts"][0]
    assert synced[0]["refused by 1"]["reason"] == "another rank can't speed up its call"
    assert "padded on the right" in synced[1]["refused by 1"]["reason"]
    for rank, found in enumerate(synced):
        assert "load it whole" in found["sharded draft"]["reason"]
        assert found["sharded drafter"] == found["sharded draft"]
        assert found["sharded draft"]["texts"] == plain["texts"][rank]


def test_every_door_knows_of_the_lockstep(synced: list[Results], plain: dict[str, Any]) -> None:
    for rank, found in enumerate(synced):
        texts = plain["texts"][rank]
        assert found["switched off"]["texts"] == texts
        assert found["decoder"]["texts"] == [text[: (SHORT, 1)[rank]] for text in texts]
        assert found["enabled"]["texts"] == [text[: (9, SHORT)[rank]] for text in texts]
        assert found["decoder"]["reason"] is found["enabled"]["reason"] is None


def test_a_model_sharded_by_hand(synced: list[Results]) -> None:
    model = tiny_model("mistral")
    for rank, found in enumerate(synced):
        texts = plain_texts(model, prompts_of(rank), max_new_tokens=SHORT)
        assert found["sharded by hand"]["texts"] == [text[: (9, SHORT)[rank]] for text in texts]
        assert found["sharded by hand"]["reason"] is None
        assert found["said otherwise"]["texts"] == texts
        assert "spread over processes" in found["said otherwise"]["reason"]


def test_one_process_talks_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("broadcast", "all_reduce", "get_rank", "get_world_size"):
        monkeypatch.setattr(dist, name, lambda *_, name=name, **__: pytest.fail(f"calls {name}"))
    model, prompts = tiny_model(), ragged_prompts(2)
    assert Ranks.of(model, True, torch.device("cpu")) is ALONE
    hf_specdec.generate(model, **prompts, **options())
    assert hf_specdec.last_stats(model).lean_forward


def test_pipelines_are_decoded_plainly() -> None:
    model = tiny_model()
    model.config.distributed_config = DistributedConfig(pp_size=2)
    assert "pipeline" in compat.sharding_reason(model, False)
