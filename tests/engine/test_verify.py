"""The verification rules, enumerated: every draft, every accept pattern, compared with the target's own joint.

A rule is integrated as a black box. Its dependence on u_i is found by bisection, so no formula of the rule is used
here; the joint distribution of k + 1 tokens then has no sampling error, and 1e-10 is all that it may be off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hf_specdec.engine import verify
from hf_specdec.engine.sampling import Sampler
from hf_specdec.engine.verify import Verdict, accept_block, accept_matching, accept_tokens

from ..wrong_rules import WRONG_RULES, resample_from_p


Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Verdict]
EXACT = 1e-10
WRONG = 1e-3  # least error that a negative control must show
SIZES = [(V, k) for V in (2, 3, 4) for k in (1, 2, 3, 4)]
KINDS = ("random", "zeros", "equal", "close", "disjoint", "one_hot")
RULES: dict[str, Rule] = {"token": accept_tokens, "block": accept_block}


@dataclass(frozen=True)
class Table:
    """Context-dependent p and q: `p[i]` is `[V, …, V]` with i axes of context, then the token."""

    V: int
    k: int
    p: list[Tensor]
    q: list[Tensor]

    def drafts(self) -> Tensor:
        """Every draft, `[V^k, k]`."""
        return torch.tensor(list(product(range(self.V), repeat=self.k)))

    def along(self, laws: Sequence[Tensor], drafts: Tensor) -> Tensor:
        """The laws at every prefix of every draft, `[drafts, len(laws), V]`."""
        return torch.stack([law[tuple(drafts[:, :i].T)].expand(len(drafts), -1) for i, law in enumerate(laws)], 1)

    def joint(self) -> Tensor:
        """The target's distribution of k + 1 tokens, `[V^(k + 1)]`."""
        return self.continued(torch.ones(1, dtype=torch.float64), 0)

    def continued(self, mass: Tensor, length: int) -> Tensor:
        """Mass of prefixes of `length` tokens, `[V^length]`, continued by the target to k + 1 tokens."""
        for law in self.p[length:]:
            mass = (mass[:, None] * law.reshape(-1, self.V)).flatten()
        return mass


def make_table(V: int, k: int, kind: str, seed: int) -> Table:
    generator = torch.Generator().manual_seed(1000 * seed + 10 * V + k)

    def law(shape: tuple[int, ...], low: int) -> Tensor:
        weights = torch.randint(low, 10, shape, generator=generator).double()
        weights[..., 0] += weights.sum(-1) == 0
        return weights / weights.sum(-1, keepdim=True)

    p = [law((V,) * (i + 1), 0 if kind == "zeros" else 1) for i in range(k + 1)]
    q = [law((V,) * (i + 1), 0 if kind == "zeros" else 1) for i in range(k)]
    if kind == "equal":
        q = [each.clone() for each in p[:k]]
    elif kind == "close":
        q = [0.95 * a + 0.05 * b for a, b in zip(p, q, strict=False)]
    elif kind == "disjoint":
        even = (torch.arange(V) % 2 == 0).double()
        p = [each * even / (each * even).sum(-1, keepdim=True) for each in p]
        q = [each * (1 - even) / (each * (1 - even)).sum(-1, keepdim=True) for each in q]
    elif kind == "one_hot":
        q = [torch.nn.functional.one_hot(each.argmax(-1), V).double() for each in q]
    return Table(V, k, p, q)


def integrate(rule: Rule, p: Tensor, q: Tensor, drafts: Tensor, counts: Tensor) -> list[tuple[Tensor, Verdict]]:
    """Every accept pattern of a rule with its probability over u, found by bisection for each row."""
    rows, k = drafts.shape
    edges = torch.zeros(rows, k, dtype=torch.float64)
    for i in range(k):
        # the least that stands in position i's way: all before it pass, all behind it fail
        u = torch.zeros(rows, k, dtype=torch.float64)
        u[:, i + 1 :] = 1 - 1e-16
        low, high = torch.zeros(rows, dtype=torch.float64), torch.ones(rows, dtype=torch.float64)
        for _ in range(55):
            u[:, i] = (low + high) / 2
            passes = rule(p, q, drafts, counts, u).accepted > i
            low, high = torch.where(passes, u[:, i], low), torch.where(passes, high, u[:, i])
        edges[:, i] = high
    cells = []
    for pattern in product((True, False), repeat=k):
        below = torch.tensor(pattern).expand(rows, -1)
        chance = torch.where(below, edges, 1 - edges).prod(-1)
        cells.append((chance, rule(p, q, drafts, counts, torch.where(below, edges / 2, (1 + edges) / 2))))
    return cells


def enumerate_round(
    rule: Rule, tables: Sequence[Table], counts_of: Callable[[Table, Tensor, Tensor], Tensor] | None = None,
    draft_law: Callable[[Table], list[Tensor]] = lambda table: table.q,
) -> list[tuple[Tensor, float]]:  # fmt: skip
    """One round of many tables in a single batch, padded to the widest k and V.

    Args:
        rule: The rule.
        tables: The models.
        counts_of: Length of each draft from (table, drafts, q along them); the whole draft by default.
        draft_law: What drafts are really sampled from.

    Returns:
        For each table the joint distribution of its k + 1 tokens, and the expected number of tokens emitted.
    """
    V, k = max(table.V for table in tables), max(table.k for table in tables)
    parts = []
    for table in tables:
        drafts = table.drafts()
        q = table.along(table.q, drafts)
        counts = torch.full((len(drafts),), table.k) if counts_of is None else counts_of(table, drafts, q)
        chance = table.along(draft_law(table), drafts).gather(2, drafts[..., None]).squeeze(2).prod(-1)
        pad = (0, V - table.V, 0, k - table.k)
        # what lies behind a row's draft must not matter: fill it with a law that favours the last token
        p = torch.nn.functional.pad(table.along(table.p, drafts), pad)
        q = torch.nn.functional.pad(q, pad)
        p[:, table.k + 1 :, -1] = 1.0
        q[:, table.k :, 0] = 1.0
        parts.append((p, q, torch.nn.functional.pad(drafts, (0, k - table.k)), counts, chance))
    p, q, drafts, counts, chance = (torch.cat(each) for each in zip(*parts, strict=True))
    cells = integrate(rule, p, q, drafts, counts)
    results, start = [], 0
    for table in tables:
        size = table.V**table.k
        part = slice(start, start + size)
        start += size
        joint, length = torch.zeros(table.V ** (table.k + 1), dtype=torch.float64), 0.0
        for cell, verdict in cells:
            mass, accepted = cell[part] * chance[part], verdict.accepted[part]
            assert not (accepted > counts[part]).any()
            weights = verdict.weights[part] / verdict.weights[part].sum(-1, keepdim=True)
            assert not weights[mass > 1e-12, table.V :].any()
            length += float((mass * (accepted + 1)).sum())
            for kept in range(table.k + 1):
                here = torch.where(accepted == kept, mass, 0.0)[:, None] * weights[:, : table.V]
                # rows that share their first `kept` tokens stand next to each other
                prefixes = here.reshape(table.V**kept, -1, table.V).sum(1)
                joint += table.continued(prefixes.flatten(), kept + 1)
        results.append((joint, length))
    return results


def worst_error(rule: Rule, tables: Sequence[Table], **options: object) -> float:
    found = enumerate_round(rule, tables, **options)  # type: ignore[arg-type]
    return max(float((joint - table.joint()).abs().max()) for table, (joint, _) in zip(tables, found, strict=True))


def tables_of(V: int, k: int) -> list[Table]:
    return [make_table(V, k, kind, seed) for seed, kind in enumerate(KINDS)]


ALL = [table for V, k in SIZES for table in tables_of(V, k)]


def chance_accepted(table: Table, block: bool) -> float:
    """Σ_i P(the first i draft tokens are kept), from the papers' formulas."""
    drafts, expected = table.drafts(), 0.0
    p = table.along(table.p[:-1], drafts).gather(2, drafts[..., None]).squeeze(2)
    q = table.along(table.q, drafts).gather(2, drafts[..., None]).squeeze(2)
    kept = torch.ones(len(drafts), dtype=torch.float64)
    for i in range(table.k):
        ratio = torch.where(q[:, i] > 0, p[:, i] / q[:, i], 0.0)
        kept = (kept * ratio).clamp(max=1) if block else kept * ratio.clamp(max=1)
        expected += float((q.prod(-1) * kept).sum())
    return expected


@pytest.mark.parametrize(("V", "k"), SIZES)
@pytest.mark.parametrize("name", RULES)
def test_the_joint_is_the_targets_and_its_length_follows_the_formula(name: str, V: int, k: int) -> None:
    assert len(ALL) >= 50
    tables = tables_of(V, k)
    for table, (joint, length) in zip(tables, enumerate_round(RULES[name], tables), strict=True):
        assert (joint - table.joint()).abs().max() < EXACT
        assert length == pytest.approx(1 + chance_accepted(table, name == "block"), abs=EXACT)


@pytest.mark.parametrize("name", RULES)
def test_rows_of_different_length_share_a_batch(name: str) -> None:
    mixed = [table for table in ALL if table.V**table.k <= 81]
    assert len({table.k for table in mixed}) == 4
    assert worst_error(RULES[name], mixed) < EXACT


def test_block_never_accepts_less_than_token_and_the_same_for_point_masses() -> None:
    gains = []
    for V, k in SIZES:
        tables = tables_of(V, k)
        token, block = enumerate_round(accept_tokens, tables), enumerate_round(accept_block, tables)
        for kind, (_, short), (_, long) in zip(KINDS, token, block, strict=True):
            assert long >= short - EXACT
            if kind == "one_hot" or k == 1:
                assert long == pytest.approx(short, abs=EXACT)
            gains.append(long - short)
    assert max(gains) > 0.05


@pytest.mark.parametrize(("name", "accepted"), [("token", 10 / 9), ("block", 11 / 9)])
def test_the_motivating_example_of_block_verification(name: str, accepted: float) -> None:
    p, q = torch.tensor([1 / 3, 2 / 3]).double(), torch.tensor([2 / 3, 1 / 3]).double()
    p[0], q[1] = 1 - p[1], 1 - q[0]
    table = Table(2, 2, [p, p.expand(2, 2), p.expand(2, 2, 2)], [q, q.expand(2, 2)])
    [(joint, length)] = enumerate_round(RULES[name], [table])
    assert length - 1 == pytest.approx(accepted, abs=1e-7)
    assert (joint - table.joint()).abs().max() < EXACT


@pytest.mark.parametrize("name", RULES)
def test_equal_models_accept_everything(name: str) -> None:
    tables = [make_table(V, k, "equal", 5) for V, k in SIZES]
    for table in tables:
        [(_, length)] = enumerate_round(RULES[name], [table])
        assert length == pytest.approx(table.k + 1, abs=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_a_token_that_the_target_forbids_is_never_kept_even_at_u_zero(name: str) -> None:
    # torch.rand gives exactly 0 once in 2^24
    p = torch.tensor([[[0.0, 1.0], [0.0, 1.0], [0.5, 0.5]]])
    q = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]])
    for draft in ([0, 0], [0, 1], [1, 0]):
        verdict = RULES[name](p, q, torch.tensor([draft]), torch.tensor([2]), torch.zeros(1, 2))
        assert int(verdict.accepted) == draft.index(0)
        assert verdict.weights.tolist()[0][0] == 0.0


@pytest.mark.parametrize("name", RULES)
def test_what_stands_behind_a_rows_count_is_ignored(name: str) -> None:
    table = make_table(3, 4, "random", 3)
    drafts = table.drafts()
    p, q = table.along(table.p, drafts), table.along(table.q, drafts)
    torch.manual_seed(0)
    u, counts = torch.rand(len(drafts), 4).double(), torch.arange(len(drafts)) % 5
    behind = torch.arange(4) >= counts[:, None]
    other_p, other_q = p.clone(), q.clone()
    other_p[:, 1:][behind] = torch.tensor([0.1, 0.1, 0.8]).double()
    other_q[behind] = float("nan")
    first = RULES[name](p, q, drafts, counts, u)
    second = RULES[name](other_p, other_q, drafts.where(~behind, 0), counts, u)
    assert torch.equal(first.accepted, second.accepted)
    assert torch.equal(first.weights, second.weights)


# deterministic drafts


def matching_error(tables: Sequence[Table], match: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> float:
    """Sample-match on one fixed draft a table: enumerate the target's own choices at every position."""
    worst = 0.0
    for table in tables:
        draft = torch.stack([table.drafts()[7 % table.V**table.k]])
        laws = table.along(table.p, draft)[0]  # (k + 1, V)
        chosen = torch.tensor(list(product(range(table.V), repeat=table.k + 1)))
        chance = laws.T[chosen, torch.arange(table.k + 1)].prod(-1)
        counts = torch.full((len(chosen),), table.k)
        accepted, following = match(chosen, draft.expand(len(chosen), -1), counts)
        joint = torch.zeros_like(table.joint())
        for kept in range(table.k + 1):
            mass = torch.zeros(table.V ** (kept + 1), dtype=torch.float64)
            prefix = 0
            for token in draft[0, :kept].tolist():
                prefix = table.V * prefix + token
            mass.index_add_(0, table.V * prefix + following, torch.where(accepted == kept, chance, 0.0))
            joint += table.continued(mass, kept + 1)
        worst = max(worst, float((joint - table.joint()).abs().max()))
    return worst


def test_sample_match_is_exact_for_a_fixed_draft() -> None:
    assert matching_error(ALL, accept_matching) < EXACT


def test_sample_match_that_keeps_the_first_mismatch_fails_the_check() -> None:
    def off_by_one(chosen: Tensor, draft: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        accepted = torch.minimum(accept_matching(chosen, draft, counts)[0] + 1, counts)
        return accepted, chosen.gather(1, accepted[:, None]).squeeze(1)

    assert matching_error(ALL, off_by_one) > WRONG


def test_sample_match_of_rows_with_different_counts() -> None:
    chosen = torch.tensor([[4, 5, 6]]).expand(4, -1)
    draft = torch.tensor([[4, 5], [4, 5], [4, 5], [4, 9]])
    accepted, following = accept_matching(chosen, draft, torch.tensor([0, 1, 2, 2]))
    assert accepted.tolist() == [0, 1, 2, 1]
    assert following.tolist() == [4, 5, 6, 5]


@pytest.mark.parametrize("vocabulary", [5, 1000, 49152])
def test_ties_go_to_the_lowest_id(vocabulary: int) -> None:
    rows = SimpleNamespace(live=[0, 1], texts=[[1], [2]], num_new=lambda row: 0)
    sampler = Sampler(False, "auto", None, rows, torch.device("cpu"))  # type: ignore[arg-type]
    scores = torch.zeros(2, 3, vocabulary)
    scores[0, 0, [2, vocabulary - 1]] = 1.0
    scores[1, 1, [3, 4]] = 1.0
    draft, counts = torch.tensor([[2, 0], [0, 4]]), torch.tensor([2, 2])
    decision = sampler.decide(scores, draft, counts, None, rows)  # type: ignore[arg-type]
    assert decision.accepted.tolist() == [2, 1]
    assert decision.following.tolist() == [0, 3]


# a draft may be cut, but only on what is known before its token is drawn


def cut_before_draw(table: Table, drafts: Tensor, q: Tensor) -> Tensor:
    """Stop in front of the first position where the draft's most likely token is unlikely."""
    return (q.amax(-1) >= 0.45).long().cumprod(-1).sum(-1)


def cut_behind_unlikely(table: Table, drafts: Tensor, q: Tensor) -> Tensor:
    """Keep an unlikely token, stop behind it."""
    likely = q.gather(2, drafts[..., None]).squeeze(2) >= 0.4
    return torch.clamp(likely.long().cumprod(-1).sum(-1) + 1, max=table.k)


def cut_in_front_of_unlikely(table: Table, drafts: Tensor, q: Tensor) -> Tensor:
    """Drop a token after looking at it: biased."""
    return (q.gather(2, drafts[..., None]).squeeze(2) >= 0.4).long().cumprod(-1).sum(-1)


@pytest.mark.parametrize("cut", [cut_before_draw, cut_behind_unlikely])
@pytest.mark.parametrize("name", RULES)
def test_stops_that_do_not_look_ahead_are_exact(name: str, cut: Callable[[Table, Tensor, Tensor], Tensor]) -> None:
    tables = tables_of(3, 3) + tables_of(4, 2)
    lengths = [cut(table, table.drafts(), table.along(table.q, table.drafts())) for table in tables]
    assert len(set(torch.cat(lengths).tolist())) > 2
    assert worst_error(RULES[name], tables, counts_of=cut) < EXACT


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize(("verification", "rule"), [("auto", "block"), ("block", "block"), ("rejection", "token")])
def test_one_rule_for_drafts_of_any_length(
    monkeypatch: pytest.MonkeyPatch, verification: str, rule: str, width: int
) -> None:
    """How long a draft became may hang on what was drawn (it ends where it is unsure), so the rule must not."""
    used = []
    for name in ("block", "tokens"):
        accept = getattr(verify, f"accept_{name}")
        monkeypatch.setattr(verify, f"accept_{name}", lambda *given, a=accept, n=name: used.append(n) or a(*given))
    rows = SimpleNamespace(live=[0], texts=[[1]], num_new=lambda row: 0)
    sampler = Sampler(True, verification, 0, rows, torch.device("cpu"))  # type: ignore[arg-type]
    probs = torch.full((1, width, 4), 0.25)
    draft, counts = torch.zeros(1, width, dtype=torch.long), torch.tensor([width])
    sampler.decide(torch.zeros(1, width + 1, 4), draft, counts, probs, rows)  # type: ignore[arg-type]
    assert used == [{"block": "block", "token": "tokens"}[rule]]


def test_a_rule_chosen_by_length_fails_the_check() -> None:
    """Token rejection for short drafts and block verification for long ones: biased where the length hangs on a token."""

    def by_length(p: Tensor, q: Tensor, drafts: Tensor, counts: Tensor, u: Tensor) -> Verdict:
        block, token = accept_block(p, q, drafts, counts, u), accept_tokens(p, q, drafts, counts, u)
        long = counts >= 3
        return Verdict(
            torch.where(long, block.accepted, token.accepted), torch.where(long[:, None], block.weights, token.weights)
        )

    p = [[0.3, 0.7], [[0.8, 0.2], [0.3, 0.7]], torch.full((2, 2, 2), 0.5), torch.full((2, 2, 2, 2), 0.5)]
    q = [[0.7, 0.3], [[0.4, 0.6], [0.6, 0.4]], torch.full((2, 2, 2), 0.5)]
    table = Table(2, 3, *([torch.as_tensor(each).double() for each in laws] for laws in (p, q)))

    def ends_behind_zero(table: Table, drafts: Tensor, q: Tensor) -> Tensor:
        return torch.where(drafts[:, 1] == 0, 2, 3)

    [(joint, _)] = enumerate_round(by_length, [table], ends_behind_zero)
    assert float(joint[:8].sum()) == pytest.approx(0.18, abs=1e-7)  # instead of 0.3
    for rule in (accept_block, accept_tokens):
        [(joint, _)] = enumerate_round(rule, [table], ends_behind_zero)
        assert float(joint[:8].sum()) == pytest.approx(0.3, abs=1e-7)


# negative controls: rules that have been seen in the wild; each must fail the check that the right ones pass


@pytest.mark.parametrize("rule", WRONG_RULES)
@pytest.mark.parametrize("size", [(3, 3), (4, 2), (4, 3)])
def test_a_wrong_rule_fails_the_check(rule: Rule, size: tuple[int, int]) -> None:
    assert worst_error(rule, [make_table(*size, "random", 0)]) > WRONG


@pytest.mark.parametrize("name", RULES)
def test_an_argmax_draft_checked_against_soft_q_fails_the_check(name: str) -> None:
    def argmax(table: Table) -> list[Tensor]:
        return [torch.nn.functional.one_hot(law.argmax(-1), table.V).double() for law in table.q]

    assert worst_error(RULES[name], [make_table(3, 2, "random", 0)], draft_law=argmax) > WRONG


@pytest.mark.parametrize("name", RULES)
def test_dropping_a_token_after_looking_at_it_fails_the_check(name: str) -> None:
    assert worst_error(RULES[name], tables_of(3, 2), counts_of=cut_in_front_of_unlikely) > WRONG


@pytest.mark.parametrize(("rule", "first"), [(accept_tokens, 0.30), (accept_block, 0.30), (resample_from_p, 0.39)])
def test_the_often_printed_rule_gives_39_percent_instead_of_30(rule: Rule, first: float) -> None:
    p, q = torch.tensor([0.3, 0.7]).double(), torch.tensor([0.6, 0.4]).double()
    [(joint, _)] = enumerate_round(rule, [Table(2, 1, [p, p.expand(2, 2)], [q])])
    assert float(joint[:2].sum()) == pytest.approx(first, abs=1e-7)
