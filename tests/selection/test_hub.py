"""Reading and fetching checkpoints, against a real HTTP server that can misbehave, the local cache and folders."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from hf_specdec.selection import hub as hubs
from hf_specdec.selection.candidates import Repository
from hf_specdec.selection.hub import HubProblem, cached, describe, download, excluded_reason, search, tokenizer_folder

from .family import DRAFT, INSTRUCT, TOKEN, changed, checkpoint
from .hub_server import HubServer


WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def _only_safe_files(hub: HubServer) -> Iterator[None]:
    """Whatever a test does: no file is asked for that could run code, or that nobody needs."""
    yield
    assert not [request for request in hub.requests if request.name.endswith((".bin", ".py", ".pt", ".gguf", ".md"))]


def silent(text: str) -> None:
    """An announcement that nobody reads."""


def kind_of(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(HubProblem) as caught:
        call(*args, **kwargs)
    return str(caught.value.kind)


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


# What is read


def test_a_repository_is_described_without_its_weights(hub: HubServer) -> None:
    found = describe(INSTRUCT)
    assert (found.source, found.complete, found.gated) == ("hub", False, False)
    assert found.config["num_hidden_layers"] == 8
    assert found.revision == hub.repositories[INSTRUCT].main
    files = hub.repositories[INSTRUCT].commits[found.revision]
    assert found.files == tuple(files)
    assert found.weights_bytes == sum(len(data) for name, data in files.items() if name.endswith(".safetensors"))
    assert set(hub.asked()) == {"info", "config.json"}


def test_a_revision_is_pinned(hub: HubServer) -> None:
    first = hub.repositories[DRAFT].main
    found = describe(DRAFT)
    hub.push(DRAFT, changed(checkpoint(32, 2), note="new"))
    assert describe(DRAFT).config["note"] == "new"
    assert "note" not in describe(DRAFT, revision=first).config
    folder = download(found, announce=silent)  # what was described, whatever main is by now
    assert folder.name == first
    assert not (folder.parents[1] / "refs" / "main").exists()  # main isn't whole here
    assert kind_of(describe, DRAFT, revision="v9") == "missing"


def test_a_tokenizer_comes_alone(hub: HubServer) -> None:
    folder = tokenizer_folder(describe(DRAFT))
    assert folder is not None
    assert (folder / "tokenizer.json").is_file()
    assert (folder / "chat_template.jinja").is_file()
    assert not (folder / WEIGHTS).exists()
    before = len(hub.requests)
    assert tokenizer_folder(describe(DRAFT, local_files_only=True)) == folder
    assert len(hub.requests) == before
    bare = changed(checkpoint(32, 2), without=("tokenizer.json", "tokenizer_config.json"))
    hub.push("acme/Wordless", bare)
    assert tokenizer_folder(describe("acme/Wordless")) is None


def test_a_search_finds_what_drafts_come_from(hub: HubServer) -> None:
    found = search("acme", ["tiny", "instruct"])
    assert [repository.id for repository in found] == [
        INSTRUCT,
        "acme/Tiny-1.7B-Instruct",
        DRAFT,
        "acme/Tiny-0.5B-Instruct",
    ]
    assert all(repository.config["hidden_size"] and repository.revision for repository in found)
    assert all(repository.problem is None and repository.weights_bytes for repository in found)
    assert search("acme", ["Nothing"]) == []
    assert search("nobody", []) == []


def test_a_search_reads_all_pages_up_to_its_limit(hub: HubServer) -> None:
    hub.page = 3
    assert len(search("acme", ["Tiny"])) == 6
    assert len(hub.asked("list")) == 4
    assert len(search("acme", ["Tiny"], limit=2)) == 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Tiny-0.6B-Instruct-AWQ", "quantised (awq)"),
        ("Tiny-0.6B-Instruct-FP8", "FP8 in its name"),
        ("Tiny-0.4B-Instruct", "no safetensors"),
        ("Tiny-0.3B-Instruct", "code from its repository"),
        ("Tiny-Encoder", "no causal language model"),
        ("Tiny-0.6B-Instruct", None),
        ("Tiny-8B-Instruct", None),
    ],
)
def test_why_a_repository_is_excluded(hub: HubServer, name: str, reason: str | None) -> None:
    found = excluded_reason(describe(f"acme/{name}"))
    assert found is None if reason is None else found is not None and reason in found


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"files": ("adapter_config.json", "adapter_model.safetensors")}, "an adapter"),
        ({"files": ("tiny-q4_0.gguf",)}, "GGUF"),
        ({"tags": ("4-bit", "mlx")}, "tag 4-bit"),
        ({"id": "a/Tiny-1B-bnb-4bit"}, "bnb"),
        ({"id": "a/Tiny-1B-GPTQ-Int4"}, "GPTQ"),
        ({"id": "a/Tiny-1B-MLX-8bit"}, "MLX"),
        ({"id": "a/Tiny-1B-onnx"}, "onnx"),
        ({"id": "a/Tiny-1B.w4a16"}, "w4a16"),
        ({"config": {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}}, "draft head"),
        ({"config": {"architectures": ["LlamaForCausalLMEagle3"]}}, "no causal"),
        ({"config": {"architectures": ["T5ForConditionalGeneration"]}}, "no causal"),
        ({"config": {}}, "no architecture named"),
        ({"id": "google/gemma-3-1b-it-qat-q4_0-unquantized"}, None),
        ({"id": "HuggingFaceTB/SmolLM2-135M-Instruct", "tags": ("onnx",)}, None),
        ({"config": {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"vocab_size": 9}}}, None),
        (
            {
                "config": {
                    "model_type": "phi3",
                    "architectures": ["Phi3ForCausalLM"],
                    "auto_map": {"AutoConfig": "configuration_phi3.C"},
                }
            },
            None,
        ),
    ],
)
def test_what_names_tags_and_configurations_give_away(hub: HubServer, changes: dict, reason: str | None) -> None:
    plain = Repository("org/Tiny-1B", {"architectures": ["LlamaForCausalLM"]}, "hub", files=(WEIGHTS,))
    found = excluded_reason(replace(plain, **changes))
    assert found is None if reason is None else found is not None and reason in found


# Folders


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def test_a_folder_is_described_and_never_fetched(hub: HubServer, tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", checkpoint(32, 2))
    found = describe(str(folder))
    assert (found.source, found.complete, found.folder, found.revision) == ("path", True, folder, None)
    assert tokenizer_folder(found) == folder
    assert download(found, announce=pytest.fail) == folder
    (folder / WEIGHTS).unlink()
    write(folder, {"pytorch_model.bin": b"\x80"})
    assert not describe(str(folder)).complete
    assert kind_of(download, describe(str(folder)), announce=pytest.fail) == "unusable"
    assert not hub.requests


@pytest.mark.parametrize(
    "id", ["../secrets", "acme/../../etc", "/no/such/folder", "~root", "acme\\tiny", "a/b/c", "", "x\0y", "acme/.."]
)
def test_ids_that_are_paths_are_refused(hub: HubServer, id: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert kind_of(describe, id) in ("missing", "unusable")
    assert not hub.requests


@pytest.mark.parametrize("config", [b"", b"{", b"[1]", b"\xff\xfe", b'{"a":' + b"[" * 200_000, None])
def test_a_bad_configuration_is_one_clear_error(hub: HubServer, config: bytes | None, tmp_path: Path) -> None:
    files = {} if config is None else {"config.json": config}
    hub.push("acme/Odd", files | {WEIGHTS: b""})
    assert kind_of(describe, "acme/Odd") == "unusable"
    assert kind_of(describe, str(write(tmp_path / "odd", files))) == "unusable"


def test_a_huge_configuration_is_not_fetched(hub: HubServer, tmp_path: Path) -> None:
    huge = b'{"a": 1}' + b" " * 5_000_000
    hub.push("acme/Huge", {"config.json": huge})
    assert kind_of(describe, "acme/Huge") == "unusable"
    assert hub.asked() == ["info"]
    assert kind_of(describe, str(write(tmp_path / "huge", {"config.json": huge}))) == "unusable"


# Downloads


def test_a_download_is_announced_before_the_first_byte_of_weights(hub: HubServer) -> None:
    said: list[str] = []

    def announce(text: str) -> None:
        said.append(text)
        assert not hub.asked("cdn")

    folder = download(describe(INSTRUCT), announce=announce)
    assert said == [f"downloading {INSTRUCT}, 5.1 MB, to {constants.HF_HUB_CACHE}"]
    assert hub.asked("cdn") == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    repository = hub.repositories[INSTRUCT]
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == repository.commits[repository.main]
    assert [found.id for found in cached()] == [INSTRUCT]
    assert download(describe(INSTRUCT), announce=pytest.fail) == folder  # nothing is left to do


def test_a_download_is_what_transformers_loads_offline_by_name(hub: HubServer, monkeypatch: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = next(repository for repository in search("acme", ["0.6B-Instruct"]) if repository.id == DRAFT)
    folder = download(found, announce=silent)
    assert {file.name for file in folder.iterdir()} == set(checkpoint(32, 2))  # no README, no code
    offline(monkeypatch)
    before = len(hub.requests)
    assert AutoModelForCausalLM.from_pretrained(folder).config.num_hidden_layers == 2
    assert len(AutoTokenizer.from_pretrained(folder)) == 320
    described = describe(DRAFT)
    assert (described.source, described.complete, described.folder) == ("cache", True, folder)
    assert (folder.parents[1] / "refs" / "main").read_text() == described.revision
    assert download(described, announce=pytest.fail) == tokenizer_folder(described) == folder
    assert len(hub.requests) == before


def test_only_what_is_absent_is_fetched_and_announced(hub: HubServer) -> None:
    folder = download(describe(INSTRUCT), announce=silent)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert cached() == []
    asked = len(hub.asked("cdn"))
    for blob in (folder.parents[1] / "blobs").iterdir():  # and one blob was cut short by something else
        if (
            blob.stat().st_size > 1_000_000
            and blob.name == (folder / "model-00003-of-00003.safetensors").resolve().name
        ):
            blob.write_bytes(blob.read_bytes()[:-10])
    said: list[str] = []
    download(describe(INSTRUCT), announce=said.append)
    assert "5.1 MB" not in said[0]
    assert "MB" in said[0]
    assert "model-00001-of-00003.safetensors" not in hub.asked("cdn")[asked:]
    assert [found.id for found in cached()] == [INSTRUCT]


def test_second_copies_of_the_weights_are_left_alone(hub: HubServer) -> None:
    files = checkpoint(32, 2)
    hub.push("acme/Twice", files | {"consolidated.safetensors": files[WEIGHTS], "original/model.safetensors": b""})
    found = describe("acme/Twice")
    assert found.weights_bytes == len(files[WEIGHTS])
    download(found, announce=silent)
    assert hub.asked("cdn") == [WEIGHTS]


@pytest.mark.parametrize("name", ["Tiny-0.4B-Instruct", "Tiny-0.3B-Instruct"])
def test_pickled_weights_and_custom_code_are_refused(hub: HubServer, name: str) -> None:
    with pytest.raises(HubProblem, match=r"safetensors|code from its repository"):
        download(describe(f"acme/{name}"), announce=pytest.fail)
    assert not hub.asked("cdn")


def test_an_index_that_names_other_files_is_refused(hub: HubServer) -> None:
    index = b'{"metadata": {}, "weight_map": {"a": "../../../secret.safetensors", "b": "model-00001-of-00002.safetensors"}}'
    files = changed(checkpoint(32, 2), without=(".safetensors",)) | {"model.safetensors.index.json": index}
    hub.push("acme/Lost", files | {"model-00001-of-00002.safetensors": checkpoint(32, 2)[WEIGHTS]})
    found = describe("acme/Lost")
    assert found.folder is not None
    (found.folder / "../../../secret.safetensors").write_bytes(checkpoint(32, 2)[WEIGHTS])
    assert kind_of(download, found, announce=silent) == "unusable"
    assert cached() == []


# Faults


@pytest.mark.parametrize("fault", ["slow", "429", "500", "drop", "nonsense"])
def test_a_look_up_ends_in_time_and_with_its_reason(hub: HubServer, fault: str, monkeypatch: Any) -> None:
    if fault == "slow":
        monkeypatch.setattr(hubs, "METADATA_SECONDS", 0.3)
    kinds = {"slow": "network", "429": "server", "500": "server", "drop": "network", "nonsense": "server"}
    hub.fail("acme", fault)
    assert kind_of(search, "acme", ["Tiny"]) == kinds[fault]
    hub.fail(DRAFT, fault, on="info")
    assert kind_of(describe, DRAFT) == kinds[fault]
    if fault != "nonsense":
        hub.fail(INSTRUCT, fault, on="config.json")
        assert kind_of(describe, INSTRUCT) == kinds[fault]


def test_a_server_that_asks_for_patience_gets_a_little(hub: HubServer, monkeypatch: Any) -> None:
    hub.fail("acme", "429", times=1, retry_after=1)
    hub.fail(DRAFT, "500", on="config.json", times=2)
    assert DRAFT in [repository.id for repository in search("acme", ["Tiny"]) if not repository.problem]


def test_one_bad_repository_spoils_no_search(hub: HubServer, monkeypatch: Any) -> None:
    monkeypatch.setattr(hubs, "METADATA_SECONDS", 2.0)
    hub.fail(DRAFT, "slow", on="config.json")
    hub.repositories["acme/Tiny-0.6B"].readers = (TOKEN,)
    problems = {repository.id: repository.problem for repository in search("acme", ["Tiny"])}
    assert "no answer" in str(problems.pop(DRAFT))
    assert "gated" in str(problems.pop("acme/Tiny-0.6B"))
    assert len(problems) == 4
    assert set(problems.values()) == {None}


@pytest.mark.parametrize("fault", ["429", "500", "slow", "drop"])
def test_weights_that_are_refused_are_not_announced(hub: HubServer, fault: str, monkeypatch: Any) -> None:
    found = describe(DRAFT)
    tokenizer_folder(found)
    if fault == "slow":
        monkeypatch.setattr(hubs, "METADATA_SECONDS", 0.3)
    hub.fail(DRAFT, fault, on="*.safetensors")
    assert kind_of(download, found, announce=pytest.fail) in ("server", "network")
    assert cached() == []


@pytest.mark.parametrize("fault", ["cut", "short", "500"])
def test_half_a_download_is_no_checkpoint(hub: HubServer, fault: str) -> None:
    hub.fail(INSTRUCT, fault, on="cdn")
    said: list[str] = []
    assert kind_of(download, describe(INSTRUCT), announce=said.append) in ("network", "server")
    assert len(said) == 1
    assert cached() == []
    assert not describe(INSTRUCT).complete
    assert not describe(INSTRUCT, local_files_only=True).complete
    hub.faults.clear()
    download(describe(INSTRUCT), announce=silent)
    assert [found.id for found in cached()] == [INSTRUCT]


def test_a_download_that_breaks_once_goes_on(hub: HubServer) -> None:
    hub.fail(DRAFT, "cut", on="cdn", times=1)
    assert hubs.complete(download(describe(DRAFT), announce=silent))
    assert hub.asked("cdn") == [WEIGHTS, WEIGHTS]  # the second request was for the rest


def test_weights_that_are_damaged_at_the_source_are_refused(hub: HubServer) -> None:
    files = checkpoint(32, 2)
    hub.push("acme/Damaged", files | {WEIGHTS: files[WEIGHTS][:-100]})
    with pytest.raises(HubProblem, match="damaged"):
        download(describe("acme/Damaged"), announce=silent)
    assert cached() == []


def test_no_connection(hub: HubServer, monkeypatch: Any) -> None:
    folder = download(describe(DRAFT), announce=silent)
    listed = describe(INSTRUCT)
    hub.stop()
    assert kind_of(search, "acme", ["Tiny"]) == "network"
    assert kind_of(describe, "acme/Tiny-8B") == "network"
    assert kind_of(download, listed, announce=pytest.fail) == "network"
    assert describe(DRAFT).folder == folder  # the cache answers
    assert describe(DRAFT).source == "cache"


# Consent


def test_a_gated_repository_says_what_to_do(hub: HubServer, monkeypatch: Any) -> None:
    hub.repositories[DRAFT].readers = (TOKEN,)
    with pytest.raises(HubProblem, match=f"gated.*{DRAFT}.*HF_TOKEN") as caught:
        describe(DRAFT)
    assert caught.value.kind == "gated"
    assert kind_of(describe, DRAFT, token="hf_another") == "gated"
    found = describe(DRAFT, token=TOKEN)
    assert found.gated
    assert kind_of(download, found, announce=pytest.fail) == "gated"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    download(found, announce=silent)
    assert {request.token for request in hub.requests if request.what == "cdn"} == {None}  # the token stays at home
    monkeypatch.delenv("HF_TOKEN")
    assert describe(DRAFT).complete  # it is on this disk by now


def test_a_repository_that_is_not_there(hub: HubServer) -> None:
    with pytest.raises(HubProblem, match="private"):
        describe("acme/Nothing")
    assert kind_of(describe, "acme/Nothing", token=TOKEN) == "missing"


# The cache


def test_offline_only_the_cache_is_asked(hub: HubServer, monkeypatch: Any) -> None:
    listed = describe(INSTRUCT)
    folder = download(describe(DRAFT), announce=silent)
    before = len(hub.requests)
    for how in ({"local_files_only": True}, {}):
        if not how:
            offline(monkeypatch)
            assert hubs.is_offline()
            assert kind_of(search, "acme", ["Tiny"]) == "offline"
        assert describe(DRAFT, **how).folder == folder
        assert describe(INSTRUCT, **how).config["num_hidden_layers"] == 8
        assert kind_of(describe, "acme/Tiny-8B", **how) == "offline"
        assert kind_of(describe, DRAFT, revision="v9", **how) == "offline"
        assert kind_of(tokenizer_folder, listed, **how) == "offline"
        assert kind_of(download, listed, announce=pytest.fail, **how) == "offline"
        assert kind_of(download, describe(INSTRUCT, **how), announce=pytest.fail, **how) == "offline"
    assert [found.id for found in cached()] == [DRAFT]
    assert len(hub.requests) == before


def test_the_cache_lists_whole_causal_models_of_an_author(hub: HubServer) -> None:
    assert cached() == []  # there is no cache yet
    for id in (DRAFT, "vast/Large-7B-Instruct", f"{DRAFT}-AWQ", "acme/Tiny-Encoder"):
        download(describe(id), announce=silent)
    describe("acme/Tiny-8B")
    found = cached()
    assert [repository.id for repository in found] == [DRAFT, "vast/Large-7B-Instruct"]
    assert all(repository.complete and repository.source == "cache" for repository in found)
    assert found[0].weights_bytes == len(checkpoint(32, 2)[WEIGHTS])
    assert [repository.id for repository in cached(["VAST"])] == ["vast/Large-7B-Instruct"]
    assert cached([]) == []


def test_a_whole_commit_is_preferred_to_a_newer_one_of_which_only_the_configuration_is_here(hub: HubServer) -> None:
    folder = download(describe(DRAFT), announce=silent)
    hub.push(DRAFT, changed(checkpoint(32, 2), note="new"))
    newer = describe(DRAFT)
    assert not newer.complete
    assert newer.revision is not None
    (folder.parents[1] / "refs" / "main").write_text(newer.revision)  # as loading the configuration by name does
    assert cached()[0].folder == folder == describe(DRAFT, local_files_only=True).folder
    assert describe(DRAFT, revision=newer.revision, local_files_only=True).config["note"] == "new"


def test_a_cache_with_debris_is_still_read(hub: HubServer) -> None:
    folder = download(describe(DRAFT), announce=silent)
    place = folder.parents[1]
    (place / "refs" / "main").write_text("f" * 40)  # a reference to nothing
    (place / "snapshots" / ("e" * 40)).mkdir()
    (folder / "extra.json").symlink_to(place / "blobs" / "gone")
    (place.parent / "models--no").write_text("a file")
    write(place.parent / "models--odd--config" / "snapshots" / "1", {"config.json": b"{", WEIGHTS: b"x" * 9})
    assert [found.id for found in cached()] == [DRAFT]


def test_a_cache_that_cannot_be_written(hub: HubServer, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file"))
    assert kind_of(describe, DRAFT) == "disk"


def test_the_environment_is_obeyed(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories[DRAFT].readers = (TOKEN,)
    code = (
        "import sys; from hf_specdec.selection import hub\n"
        f"found = hub.describe({DRAFT!r})\n"
        "hub.download(found, announce=print)\n"
        "print(found.source, 'torch' in sys.modules)"
    )
    environment = {key: value for key, value in os.environ.items() if not key.upper().endswith("_PROXY")}
    environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
    done = []
    for change in ({}, {"HF_HUB_OFFLINE": "1", "HF_TOKEN": ""}):
        run = subprocess.run([sys.executable, "-c", code], env=environment | change, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        done.append(run.stdout.splitlines())
    assert done[0] == [f"downloading {DRAFT}, 158 kB, to {tmp_path / 'home' / 'hub'}", "hub False"]
    assert done[1] == ["cache False"]
