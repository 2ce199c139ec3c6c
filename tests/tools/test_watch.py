"""What `watch` reads from servers, and what it makes of it. Figures are worked out by hand from the metric texts."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest

from hf_specdec import SpecDecError
from hf_specdec.tools.intervals import wilson
from hf_specdec.tools.watch import fetch as fetching
from hf_specdec.tools.watch.compare import acceptance_of, compare
from hf_specdec.tools.watch.engines import Counts, Reading, read_metrics
from hf_specdec.tools.watch.fetch import FetchError, at, check_url, fetch
from hf_specdec.tools.watch.follow import follow
from hf_specdec.tools.watch.observe import Observed, between, since_start, together
from hf_specdec.tools.watch.servers import Server, read_response

from .stand_in import Reply, metrics, served


def interval(engine: str, **options: Any) -> Observed:
    return between(
        read_metrics(metrics(f"{engine}_before"), **options), read_metrics(metrics(f"{engine}_after"), **options), 20.0
    )


class TestFigures:
    def test_vllm(self) -> None:
        found = interval("vllm")
        assert found.engine == "vllm"
        assert found.models == ("Qwen/Qwen3-8B",)
        assert found.status == "active"
        assert found.counts == Counts(7640, 40, 2000, 10000, 5600, (1640, 1320, 1080, 860, 700))
        assert found.draft_acceptance_rate == pytest.approx(0.56)
        assert found.mean_acceptance_length == pytest.approx(3.8)
        assert found.mean_acceptance_length_of_drafts == pytest.approx(3.8)
        assert found.per_position_acceptance == pytest.approx(
            [1640 / 2000, 1320 / 1640, 1080 / 1320, 860 / 1080, 700 / 860]
        )
        assert found.tokens_per_second == pytest.approx(382)
        assert found.drafting_share == pytest.approx(1.0)
        assert found.notes() == []

    def test_llama_cpp(self) -> None:
        found = interval("llama_cpp")
        assert found.engine == "llama-cpp"
        assert found.draft_acceptance_rate == pytest.approx(2700 / 3800)
        assert found.mean_acceptance_length == pytest.approx(1 + 2700 / 1300)
        assert found.per_position_acceptance[0] == pytest.approx(1180 / 1300)

    def test_sglang_counts_tokens_and_verifications(self) -> None:
        found = interval("sglang")
        # 8000 tokens, 40 of them from prompts, 2600 one each from a verification
        assert found.counts.accepted == 8000 - 40 - 2600
        assert found.counts.drafted == 2600 * 5  # the gauge's 6 are 5 drafts and the token they start from
        assert found.draft_acceptance_rate == pytest.approx(5360 / 13000)
        assert found.mean_acceptance_length == pytest.approx(1 + 5360 / 2600)

    def test_tgi_leaves_prompts_out(self) -> None:
        found = interval("tgi")
        assert found.mean_acceptance_length == pytest.approx(1 + 1800 / 2970)
        assert found.draft_acceptance_rate is None
        assert "--num-draft-tokens" in found.notes()[0]
        assert interval("tgi", num_draft_tokens=2).draft_acceptance_rate == pytest.approx(1800 / (2970 * 2))

    def test_tgi_with_buckets_tells_how_many_it_drafts(self) -> None:
        found = since_start(read_metrics(metrics("tgi_2_buckets")))
        assert found.counts.drafted == (5000 - 50) * 2
        assert found.counts.accepted_at == (1800, 900)
        assert found.draft_acceptance_rate == pytest.approx(2700 / 9900)

    def test_steps_without_a_draft_count_for_the_length(self) -> None:
        # as n-gram drafts do: 100 steps with a draft and 200 accepted, 400 steps without
        text = (
            "vllm:generation_tokens_total 710\nvllm:time_to_first_token_seconds_count 10\n"
            "vllm:spec_decode_num_drafts_total 100\nvllm:spec_decode_num_draft_tokens_total 400\n"
            "vllm:spec_decode_num_accepted_tokens_total 200\n"
        )
        found = since_start(read_metrics(text))
        assert found.mean_acceptance_length == pytest.approx(1 + 200 / 500)
        assert found.mean_acceptance_length_of_drafts == pytest.approx(3.0)
        assert found.drafting_share == pytest.approx(0.2)

    def test_engines_and_models_are_summed(self) -> None:
        text = (
            "".join(
                f'vllm:spec_decode_num_{name}_total{{engine="{engine}",model_name="{model}"}} {count}\n'
                for engine, model in (("0", "a"), ("1", "a"), ("0", "b"))
                for name, count in (("drafts", 10), ("draft_tokens", 30), ("accepted_tokens", 12))
            )
            + 'vllm:spec_decode_num_drafts_created{engine="0",model_name="a"} 1.7e9\n'
        )
        found = since_start(read_metrics(text))
        assert found.counts.steps == 30
        assert found.models == ("a", "b")
        assert "a, b" in found.notes()[0]
        assert since_start(read_metrics(text, model="a")).counts.steps == 20
        with pytest.raises(SpecDecError, match="no model 'c' in these metrics; there are: a, b"):
            read_metrics(text, model="c")

    def test_the_counters_of_old_vllm(self) -> None:
        text = (
            "vllm:generation_tokens_total 300\nvllm:spec_decode_draft_acceptance_rate 0.5\n"
            "vllm:spec_decode_num_accepted_tokens_total 200\nvllm:spec_decode_num_draft_tokens_total 400\n"
            "vllm:spec_decode_num_emitted_tokens_total 300\n"
        )
        assert since_start(read_metrics(text)).mean_acceptance_length == pytest.approx(3.0)

    def test_counters_of_six_digits(self) -> None:
        def reading(drafted: str) -> Reading:
            return read_metrics(
                f"llamacpp:spec_decode_num_drafts_total 500000\nllamacpp:spec_decode_num_draft_tokens_total {drafted}\n"
                "llamacpp:spec_decode_num_accepted_tokens_total 900000\nllamacpp:tokens_predicted_total 1400000\n"
            )

        assert between(reading("1.50001e+06"), reading("1.50004e+06"), 1.0).rounded
        assert not between(reading("1.5e+06"), reading("1.51e+06"), 1.0).rounded
        assert not between(reading("950000"), reading("950030"), 1.0).rounded

    def test_two_intervals_as_one(self) -> None:
        once, twice = interval("vllm"), together(interval("vllm"), interval("vllm"))
        assert twice.counts.drafted == 20000
        assert twice.seconds == 40
        assert twice.draft_acceptance_rate == once.draft_acceptance_rate

    def test_as_json(self) -> None:
        for engine in ("vllm", "sglang", "llama_cpp", "tgi"):
            json.dumps(interval(engine).to_dict(), allow_nan=False)


class TestStatus:
    @pytest.mark.parametrize(
        ("text", "says", "status", "said"),
        [
            ("vllm_unused", None, "unused", "Loaded but never used: 3,620 tokens were generated"),
            ("vllm_off", False, "off", "--speculative-config"),
            ("llama_cpp_unused", True, "unused", "failed to initialize speculative decoding context"),
            ("llama_cpp_unused", None, "unused", "Loaded but never used"),
            ("llama_cpp_unused", False, "off", "--spec-type"),
            ("sglang_off", False, "off", "--speculative-algorithm"),
            ("sglang_off", None, "off", "--speculative-algorithm"),
            ("sglang_off", True, "unused", "Loaded but never used"),
            ("tgi_off", None, "off", "--speculate"),
        ],
    )
    def test_off_and_unused(self, text: str, says: bool | None, status: str, said: str) -> None:
        found = since_start(read_metrics(metrics(text)), says)
        assert found.status == status
        assert said in " ".join(found.notes())
        assert found.draft_acceptance_rate is None

    def test_nothing_generated(self) -> None:
        same = read_metrics(metrics("vllm_after"))
        found = between(same, same, 10.0)
        assert found.status == "idle"
        assert "Send it some requests" in found.notes()[0]

    def test_not_used_meanwhile(self) -> None:
        before = metrics("vllm_after")
        after = before.replace(
            'generation_tokens_total{engine="0",model_name="Qwen/Qwen3-8B"} 11260.0', "generation_tokens_total 12000"
        )
        found = between(read_metrics(before), read_metrics(after), 10.0)
        assert (found.status, found.spoken) == ("unused", "loaded but not used meanwhile")
        assert "740 tokens were generated" in found.notes()[0]

    def test_old_llama_cpp_does_not_count(self) -> None:
        found = since_start(read_metrics("llamacpp:tokens_predicted_total 5000\n"), says=True)
        assert found.status == "unknown"
        assert "--response" in found.notes()[0]

    def test_restart(self) -> None:
        found = between(read_metrics(metrics("vllm_after")), read_metrics(metrics("vllm_before")), 10.0)
        assert found.restarted
        assert found.counts.drafted == 5000  # since the restart
        assert "started anew" in found.notes()[0]

    def test_restart_that_lost_its_series(self) -> None:
        found = between(read_metrics(metrics("sglang_after")), read_metrics(metrics("sglang_off")), 10.0)
        assert found.restarted
        assert found.counts.tokens == 4000

    def test_a_drafted_width_that_changed_gives_no_rate_of_its_own(self) -> None:
        before = read_metrics(
            metrics("sglang_before").replace(
                'tokens{engine_type="unified",model_name="Qwen/Qwen3-8B",pp_rank="0",tp_rank="0"} 6.0',
                'tokens{tp_rank="0"} 4.0',
            )
        )
        found = between(before, read_metrics(metrics("sglang_after")), 10.0)
        assert before.width == 3
        assert found.counts.drafted is None
        assert found.draft_acceptance_rate == pytest.approx(0.42)
        assert "own gauge" in found.notes()[0]


class TestMalformed:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "no metrics of an engine"),
            ("up 1\n", "no metrics of an engine"),
            ("<!doctype html><title>Sign in</title>", "a web page, not Prometheus text"),
            ('{"error": {"code": 501}}', "JSON, not Prometheus text"),
            ("vllm:spec_decode_num_drafts_total 10\nvllm:spec_decode_num_dra", "were cut off; they end in 'vllm:spec"),
            ("vllm:spec_decode_num_drafts_total 10\nvllm:spec_decode_num_draft_tokens_total 40", "were cut off"),
            ("vllm:spec_decode_num_drafts_total many\n", "Line 1 of the metrics can't be read"),
            ("vllm:generation_tokens_total 5\nvllm:spec_decode_num_drafts_total\n", "Line 2"),
            ('vllm:spec_decode_num_drafts_total{engine="0 10\n', "Line 1"),
            ("vllm:spec_decode_num_drafts_total NaN\nvllm:spec_decode_num_draft_tokens_total 3\n", "says nan"),
            ("llamacpp:tokens_predicted_total -3\n", "says -3, which is no count"),
            ("llamacpp:tokens_predicted_total +Inf\n", "says inf"),
            ("llamacpp:tokens_predicted_total 1e308\n", "says 1e\\+308"),
            ("vllm:spec_decode_num_draft_tokens_total 30\n", "are missing"),
            ("vllm:generation_tokens_total 1\nsglang:generation_tokens_total 1\n", "Choose one with --engine"),
            (
                "vllm:spec_decode_num_drafts_total 10\nvllm:spec_decode_num_draft_tokens_total 40\n"
                "vllm:spec_decode_num_accepted_tokens_total 900\n",
                "contradict each other: 900 draft tokens accepted, 40 drafted",
            ),
            (
                'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="first"} 3\n',
                "no number in its label 'position'",
            ),
        ],
    )  # fmt: skip
    def test_one_line_says_what_is_wrong(self, text: str, message: str) -> None:
        with pytest.raises(SpecDecError, match=message) as raised:
            read_metrics(text)
        assert "\n" not in str(raised.value)

    def test_gauges_without_a_value_are_left_out(self) -> None:
        text = metrics("sglang_off").replace("} 0.0", "} NaN")
        assert since_start(read_metrics(text)).status == "off"

    def test_other_exporters_on_the_same_page_do_not_matter(self) -> None:
        text = "garbage garbage garbage\n# TYPE\n" + metrics("vllm_after")
        assert read_metrics(text).counts.steps == 3000

    def test_wrong_engine(self) -> None:
        with pytest.raises(SpecDecError, match="no metrics of SGLang"):
            read_metrics(metrics("vllm_after"), engine="sglang")

    def test_tgi_with_too_few_draft_tokens(self) -> None:
        with pytest.raises(SpecDecError, match="--num-draft-tokens"):
            since_start(read_metrics(metrics("tgi_after").replace("_sum 2700", "_sum 9000"), num_draft_tokens=1))


class TestFetch:
    @pytest.mark.parametrize(
        ("url", "expected"),
        [
            ("http://host:8000", "http://host:8000/metrics"),
            ("http://host:8000/", "http://host:8000/metrics"),
            ("http://host:8000/v1/", "http://host:8000/metrics"),
            ("https://host/llm/metrics", "https://host/llm/metrics"),
            ("http://host?model=a", "http://host/metrics?model=a"),
        ],
    )
    def test_addresses(self, url: str, expected: str) -> None:
        assert at(check_url(url), "/metrics") == expected

    @pytest.mark.parametrize(
        "url",
        [
            "localhost:8000",
            "file:///etc/passwd",
            "ftp://host",
            "http://",
            "http://host:99999",
            "http://[::1",
            "",
            "data:,x",
        ],
    )
    def test_only_http(self, url: str) -> None:
        with pytest.raises(SpecDecError, match="such as http://localhost:8000"):
            check_url(url)

    def test_no_password_in_the_url(self) -> None:
        with pytest.raises(SpecDecError, match="HF_SPECDEC_API_KEY") as raised:
            check_url("http://me:secret@host")
        assert "secret" not in str(raised.value)

    @pytest.mark.parametrize(
        ("reply", "message"),
        [
            (Reply("no", 401), "asks for a key"),
            (Reply("no", 403), "asks for a key"),
            (Reply("no", 500), "HTTP 500"),
            (Reply("abc", missing=5), "broke off"),
            (Reply(raw=b""), "broke off"),
            (Reply(raw=b"SSH-2.0-OpenSSH_9.2\r\n"), "doesn't answer as HTTP does"),
            (Reply(b"\xff\xfe\x00"), "is no text"),
            (Reply("", 302, {"Location": "/metrics"}), "redirects in a circle"),
            (
                Reply("", 302, {"Location": "http://elsewhere.invalid/metrics"}),
                "redirects to 'http://elsewhere.invalid",
            ),
            (Reply("", 302, {"Location": "file:///etc/passwd"}), "to what is no web address"),
        ],
    )
    def test_failures(self, reply: Reply, message: str) -> None:
        with served(reply) as server, pytest.raises(FetchError, match=message) as raised:
            fetch(server.url + "/metrics", timeout=2)
        assert "\n" not in str(raised.value)

    def test_redirect_on_the_same_host(self) -> None:
        with served(Reply("", 307, {"Location": "/other"}), other="vllm:x 1\n") as server:
            assert fetch(server.url + "/metrics") == "vllm:x 1\n"

    @pytest.mark.parametrize("reply", [Reply("late", delay=5), Reply("x" * 200, drip=True)])
    def test_timeout(self, reply: Reply) -> None:
        began = time.monotonic()
        with served(reply) as server, pytest.raises(FetchError, match="didn't answer within 0.3 s"):
            fetch(server.url + "/metrics", timeout=0.3)
        assert time.monotonic() - began < 4  # it gave up, rather than wait for the end

    def test_huge_answers_are_not_read_to_their_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fetching, "MOST_BYTES", 2**20)
        with served("x" * (2**20 + 1)) as server, pytest.raises(FetchError, match="more than 1 MiB"):
            fetch(server.url + "/metrics")

    def test_nothing_there(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        with pytest.raises(FetchError, match="connection refused"):
            fetch(f"http://127.0.0.1:{port}/metrics")

    def test_the_key_is_sent(self) -> None:
        with served("x 1\n") as server:
            fetch(server.url + "/metrics", key="abc")
            fetch(server.url + "/metrics")
        assert server.keys == ["Bearer abc", None]


class TestServers:
    @pytest.mark.parametrize("engine", ["vllm", "sglang", "llama_cpp", "tgi"])
    def test_two_readings(self, engine: str) -> None:
        with served(metrics(f"{engine}_before"), metrics(f"{engine}_after")) as server:
            watched = Server(server.url)
            (found,) = follow(watched, watched.read(), interval=0.05, seconds=0.05)
        assert isinstance(found, Observed)
        assert found.counts == interval(engine).counts

    def test_a_reading_that_fails_is_told_and_left_out(self) -> None:
        with served(metrics("vllm_before"), Reply("down", 503), metrics("vllm_after")) as server:
            watched = Server(server.url)
            readings = follow(watched, watched.read(), interval=0.01)
            failed, found = next(readings), next(readings)
        assert isinstance(failed, SpecDecError)
        assert isinstance(found, Observed)
        assert found.counts.drafted == 10000

    def test_llama_cpp_says_whether_it_speculates(self) -> None:
        for told, expected in (
            ([{"id": 0, "speculative": False}], False),
            ([{"speculative": True}], True),
            ({}, None),
        ):
            with served(metrics("llama_cpp_unused"), slots=json.dumps(told)) as server:
                watched = Server(server.url)
                assert watched.says(watched.read()) is expected

    def test_vllm_without_counters_is_off(self) -> None:
        with served(metrics("vllm_off")) as server:
            watched = Server(server.url)
            assert watched.says(watched.read()) is False
            assert server.asked == ["/metrics"]

    def test_sglang_without_metrics_tells_its_length(self) -> None:
        info = {
            "speculative_algorithm": "EAGLE3",
            "internal_states": [{"avg_spec_accept_length": 3.0}, {"avg_spec_accept_length": 2.0}],
        }
        with served(server_info=json.dumps(info)) as server:
            watched = Server(server.url)
            reading = watched.read()
            found = since_start(reading, watched.says(reading))
        assert (found.engine, found.status) == ("sglang", "active")
        assert found.mean_acceptance_length == pytest.approx(2.5)

    @pytest.mark.parametrize("length", [None, "long", -1, float("nan"), [2.0], True])
    def test_sglang_with_a_length_of_another_type(self, length: Any) -> None:
        info = {"speculative_algorithm": None, "internal_states": [{"avg_spec_accept_length": length}, 5]}
        with served(get_server_info=json.dumps(info)) as server:
            watched = Server(server.url)
            reading = watched.read()
            assert since_start(reading, watched.says(reading)).status == "off"

    def test_llama_cpp_without_metrics(self) -> None:
        with served(Reply("off", 501), slots='[{"speculative": true}]') as server:
            watched = Server(server.url)
            reading = watched.read()
            assert since_start(reading, watched.says(reading)).status == "unknown"

    def test_no_metrics_at_all(self) -> None:
        with served() as server:
            with pytest.raises(SpecDecError, match="HTTP 404.*--metrics"):
                Server(server.url).read()
            with pytest.raises(SpecDecError, match="--enable-metrics") as raised:
                Server(server.url, engine="sglang").read()
        assert "llama-cpp" not in str(raised.value)


class TestOneAnswer:
    def test_llama_cpp(self) -> None:
        answer = {"content": "…", "timings": {"predicted_n": 44, "draft_n": 60, "draft_n_accepted": 30}}
        found = since_start(read_response(json.dumps(answer)))
        assert found.status == "active"
        assert found.draft_acceptance_rate == pytest.approx(0.5)
        assert found.mean_acceptance_length == pytest.approx(
            1 + 30 / 13
        )  # 44 tokens: one from the prompt, 30 accepted

    def test_llama_cpp_without_drafts(self) -> None:
        assert since_start(read_response('{"timings": {"predicted_n": 44}}')).status == "unused"

    def test_sglang(self) -> None:
        meta = {
            "completion_tokens": 65, "spec_verify_ct": 20, "spec_num_proposed_drafts": 100, "spec_num_correct_drafts": 44
        }  # fmt: skip
        found = since_start(read_response(json.dumps([{"text": "…", "meta_info": meta}])))
        assert found.draft_acceptance_rate == pytest.approx(0.44)
        assert found.mean_acceptance_length == pytest.approx(1 + 44 / 20)

    def test_vllm(self) -> None:
        spec = {"num_spec_steps": 20, "num_draft_tokens": 100, "num_accepted_draft_tokens": 44}
        answer = {"usage": {"completion_tokens": 65}, "metrics": {"speculative_decoding": spec}}
        assert since_start(read_response(json.dumps(answer))).mean_acceptance_length == pytest.approx(3.2)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("data: {}", "isn't JSON"),
            ("[" * 10**5, "isn't JSON"),
            ("3", "tells nothing about drafts"),
            ('{"choices": [{"text": "a"}, 4]}', "tells nothing about drafts"),
            ('{"timings": {"predicted_n": "many"}}', "`predicted_n` in the answer must be a count, got 'many'"),
            ('{"timings": {"predicted_n": 4, "draft_n": -1}}', "`draft_n` in the answer must be a count"),
            ('{"metrics": {"speculative_decoding": {}}}', "`num_spec_steps` in the answer must be a count, got None"),
            ('{"timings": {"predicted_n": NaN}}', "must be a count, got nan"),
            ('{"timings": {"predicted_n": 1%s}}' % ("0" * 400), "must be a count"),
        ],
    )
    def test_malformed(self, text: str, message: str) -> None:
        with pytest.raises(SpecDecError, match=message):
            read_response(text)


class TestCompare:
    def report(self, **changes: Any) -> dict[str, Any]:
        acceptance = {
            "draft_acceptance_rate": 0.56, "draft_acceptance_rate_interval": [0.52, 0.6], "mean_acceptance_length": 3.8,
            "mean_acceptance_length_interval": [3.6, 4.0], "per_position": [0.82, 0.8, 0.82, 0.8, 0.81],
            "num_draft_tokens": 5, "families": None,
        }  # fmt: skip
        return {"kind": "check", "acceptance": acceptance | changes}

    @pytest.mark.parametrize(
        ("rate", "verdict"),
        [(0.56, "as measured"), (0.64, "as measured"), (0.7, "below"), (0.9, "far below"), (0.2, "above")],
    )
    def test_verdicts(self, rate: float, verdict: str) -> None:
        # vLLM's texts have a rate of .56
        changes = {"draft_acceptance_rate": rate, "draft_acceptance_rate_interval": [rate - 0.02, rate + 0.02]}
        found = compare(interval("vllm"), acceptance_of(self.report(**changes)))
        assert found.verdict == verdict
        assert bool(found.hints) == (verdict in ("below", "far below"))

    def test_another_draft_length_expects_another_rate(self) -> None:
        # 2 of the check's tokens at .9: rates .9 and (.9 + .81) / 2; the server drafts 5
        measured = self.report(
            num_draft_tokens=2,
            per_position=[0.9, 0.9],
            draft_acceptance_rate=0.855,
            draft_acceptance_rate_interval=None,
        )
        found = compare(interval("vllm"), acceptance_of(measured))
        assert found.expected == pytest.approx((sum(0.9**each for each in range(1, 6)) / 5,) * 2)
        assert "drafts 5.0 tokens a step, the check drafted 2" in found.hints[0]

    def test_sampled_requests_widen_what_is_expected(self) -> None:
        found = compare(interval("vllm"), acceptance_of(self.report(families={"A1": 0.6, "A2": 0.9})))
        assert found.expected is not None
        assert found.expected[0] == pytest.approx(sum(0.6**each for each in range(1, 6)) / 5 - 0.04)
        assert found.expected[1] == pytest.approx(0.6)

    def test_tgi_is_compared_by_length(self) -> None:
        found = compare(interval("tgi"), acceptance_of(self.report()))
        assert (found.figure, found.verdict) == ("mean_acceptance_length", "far below")

    def test_too_little_to_compare(self) -> None:
        few = since_start(Reading("vllm", Counts(100, 1, 20, 80, 40), exposed=True))
        found = compare(few, acceptance_of(self.report()))
        assert (found.verdict, found.observed) == ("not compared", None)
        assert (
            compare(since_start(read_metrics(metrics("vllm_off"))), self.report()["acceptance"]).verdict
            == "not compared"
        )

    @pytest.mark.parametrize(
        "record", [{}, {"kind": "bench"}, {"kind": "check", "acceptance": None}, {"kind": "check", "acceptance": {}}]
    )
    def test_nothing_to_compare_with(self, record: dict[str, Any]) -> None:
        with pytest.raises(SpecDecError, match="report of hf-specdec check"):
            acceptance_of(record)

    def test_broken_acceptance(self) -> None:
        with pytest.raises(SpecDecError, match="can't be read"):
            compare(interval("vllm"), {"draft_acceptance_rate": "high"})


def test_wilson() -> None:
    # Newcombe (1998), table I: 81 of 263
    low, high = wilson(81, 263)
    assert (low, high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 20)[0] == 0.0
