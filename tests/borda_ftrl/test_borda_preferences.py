"Preferences, regret, environments and pair statistics against hand-computed values and brute force."
import math
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from iclr26.borda_ftrl import (Interval, PairStatistics, PreferenceEnv, borda_not_condorcet, borda_regret, borda_scores, borda_winner, condorcet_winner, no_condorcet,
                               preferences_from_losses, preferences_from_scores, shifted_borda, validate_preferences)

CYCLE = np.array([[.5, .9, .2], [.1, .5, .7], [.8, .3, .5]])


def preferences(max_arms=6):
    def build(u):
        P = np.triu(u, 1)
        return P + np.tril(1 - P.T, -1) + np.eye(len(u)) / 2
    return st.integers(2, max_arms).flatmap(lambda k: hnp.arrays(np.float64, (k, k), elements=st.floats(0, 1))).map(build)


def test_scores_by_hand():
    assert borda_scores(CYCLE) == pytest.approx([.55, .4, .55])
    assert shifted_borda(CYCLE) == pytest.approx([1.6 / 3, 1.3 / 3, 1.6 / 3])
    assert borda_winner(CYCLE) == 0 and condorcet_winner(CYCLE) is None


@given(preferences())
def test_score_identities(P):
    K, b, s = len(P), borda_scores(P), shifted_borda(P)
    assert b.mean() == pytest.approx(.5, abs=1e-9)
    assert s == pytest.approx(((K - 1) * b + .5) / K)
    c = condorcet_winner(P)
    if c is not None: assert b[c] > .5


@pytest.mark.parametrize("P, match", [
    ([[.5, .5]], "square"), ([.5], "square"), ([[.5]], "2 arms"), ([[.5, .5], [.5]], "square"), ([[.5, 1.2], [-.2, .5]], "0, 1"), ([[.5, .7], [.4, .5]], "0, 1"),
    ([[.6, .5], [.5, .5]], "0, 0"), ([[.5, .5, .5], [.5, .5, .3], [.5, .6, .5]], "1, 2"), ([[.5, .5, .5], [.5, .5, float("nan")], [.5, .5, .5]], "1, 2"),
    ([[.5, .5, float("nan")], [.5, .5, 2], [.5, .5, .5]], "0, 2")])
def test_bad_matrices_name_the_pair(P, match):
    with pytest.raises(ValueError, match=match): validate_preferences(P)


def test_validate_copies_and_tolerates():
    P = CYCLE.copy(); Q = validate_preferences(P); Q[0, 0] = 9
    assert P[0, 0] == .5
    P[0, 1] += 1e-6
    with pytest.raises(ValueError): validate_preferences(P)
    validate_preferences(P, atol=1e-5)


def test_families():
    for K in (3, 5, 9):
        P, C = borda_not_condorcet(K), no_condorcet(K)
        assert validate_preferences(P) is not None and (borda_winner(P), condorcet_winner(P)) == (0, 1)
        assert validate_preferences(C) is not None and (borda_winner(C), condorcet_winner(C)) == (0, None)
    assert borda_not_condorcet(4)[0].tolist() == [.5, .45, .95, .95] and borda_not_condorcet(4)[1].tolist() == [.55, .5, .55, .55]
    C = no_condorcet(4, 1 / 6)
    assert C[0, 1] == 1 and C[1, 2] == pytest.approx(2 / 3) and C[2, 0] == pytest.approx(2 / 3) and C[0, 3] == pytest.approx(5 / 6) and C[3, 3] == .5
    for call in (lambda: borda_not_condorcet(2), lambda: no_condorcet(2), lambda: no_condorcet(4, 0), lambda: no_condorcet(4, .2), lambda: no_condorcet(4, math.nan)):
        with pytest.raises(ValueError): call()


def test_links():
    P = preferences_from_scores([.4, 0, .1])
    assert P[0] == pytest.approx([.5, .7, .65]) and borda_scores(preferences_from_scores([.4, 0, 0, 0, 0])) == pytest.approx([.7, .45, .45, .45, .45])
    B = preferences_from_scores([1., 0.], "btl")
    assert B[0, 1] == pytest.approx(1 / (1 + math.exp(-1))) and validate_preferences(preferences_from_scores([900., 0., -900.], "btl")) is not None
    for bad in (lambda: preferences_from_scores([2, 0]), lambda: preferences_from_scores([0, math.inf]), lambda: preferences_from_scores([0, 1], "probit"), lambda: preferences_from_scores([1])):
        with pytest.raises(ValueError): bad()


def test_losses():
    P = preferences_from_losses([[1, 2, 3, 4], [1, 3, 2, 5]])
    assert P[0, 1] == (.5 + 1 + 0 + 1) / 4 and validate_preferences(P) is not None
    for bad in ([[1, 2]], [1, 2], [[1, math.nan], [1, 2]], np.zeros((2, 0))):
        with pytest.raises(ValueError): preferences_from_losses(bad)


@settings(max_examples=30)
@given(preferences(4), st.integers(1, 30), st.integers(0, 999))
def test_regret_is_its_definition(P, T, seed):
    rng = np.random.default_rng(seed)
    seq = np.stack([P if t % 3 else P[::-1, ::-1] for t in range(T)])
    xs, ys = rng.integers(0, len(P), (2, T))
    want = [max(sum(borda_scores(seq[t])[i] for t in range(n)) for i in range(len(P))) - sum((borda_scores(seq[t])[xs[t]] + borda_scores(seq[t])[ys[t]]) / 2 for t in range(n)) for n in range(1, T + 1)]
    assert borda_regret(seq, xs, ys) == pytest.approx(want, abs=1e-9)
    assert borda_regret(P, xs, ys).min() >= -1e-12
    assert borda_regret(P, xs, ys) == pytest.approx(borda_regret(np.stack([P] * T), ys, xs), abs=1e-12)


def test_regret_may_be_negative_and_rejects():
    P = preferences_from_scores([.4, 0])
    assert borda_regret(np.stack([P, P.T]), [0, 1], [0, 1])[-1] == pytest.approx(-.4)
    for bad in (lambda: borda_regret(P, [0, 1], [0]), lambda: borda_regret(np.stack([P]), [0, 1], [0, 1]), lambda: borda_regret(P, [2], [0]), lambda: borda_regret(P, [], []), lambda: borda_regret(P, [.5], [.5])):
        with pytest.raises(ValueError): bad()


A, B, C = preferences_from_scores([.4, 0]), preferences_from_scores([0, .2]), preferences_from_scores([.1, 0])


def test_phases_and_alternating():
    env = PreferenceEnv.phases([A, B, C], [2, 3, 1])
    assert [float(env.matrix(t)[0, 1]) for t in range(8)] == pytest.approx([.7, .7, .4, .4, .4, .55, .55, .55])
    env = PreferenceEnv.alternating([A, B], first=3, growth=2)
    lengths = [3, 6, 12, 24]
    want = np.concatenate([[k % 2] * n for k, n in enumerate(lengths)])
    assert [int(env.matrix(t)[0, 1] < .5) for t in range(45)] == want.tolist()
    env = PreferenceEnv.alternating([A, B, C])
    ends = np.cumsum([int(100 * 1.6**k) for k in range(8)])
    for k, e in enumerate(ends): assert np.array_equal(env.matrix(int(e) - 1), (A, B, C)[k % 3]) and np.array_equal(env.matrix(int(e)), (A, B, C)[(k + 1) % 3])


def test_corrupted_and_corruption():
    env = PreferenceEnv.corrupted(A, B, 3)
    assert env.corruption(2) == pytest.approx(2 * .3) and env.corruption(10) == pytest.approx(3 * .3) and np.array_equal(env.matrix(3), A)
    flags = [True, False, False, True, True]
    env = PreferenceEnv.corrupted(A, B, flags)
    assert [bool(env.matrix(t)[0, 1] < .5) for t in range(8)] == flags + [False] * 3
    assert env.corruption(4) == pytest.approx(.6) and env.corruption(99) == pytest.approx(.9) and env.corruption(0) == 0
    assert PreferenceEnv.stationary(A).corruption(50) == 0 and PreferenceEnv.stationary(A).corruption(50, B) == pytest.approx(15)
    with pytest.raises(ValueError, match="reference"): PreferenceEnv.phases([A], [1]).corruption(3)
    assert PreferenceEnv.phases([A, B], [2, 1]).corruption(5, A) == pytest.approx(.9)
    assert np.array_equal(PreferenceEnv.corrupted(A, B, 0).matrix(0), A)


def test_duel():
    env = PreferenceEnv.stationary(A)
    assert env.n_arms == 2 and env.duel(0, 1, 0, .69999) == 1 and env.duel(0, 1, 0, .70001) == 0
    rng = np.random.default_rng(0)
    assert abs(np.mean([env.duel(0, 1, t, rng) for t in range(4000)]) - .7) < .03
    with pytest.raises(ValueError): env.matrix(0)[0, 0] = 1
    for bad in (lambda: env.duel(0, 2, 0, .5), lambda: env.duel(0, 1, 0, 1.0), lambda: env.duel(-1, 1, 0, .5), lambda: env.matrix(-1), lambda: PreferenceEnv.phases([A], [1, 2]), lambda: PreferenceEnv.phases([A], [0]),
                lambda: PreferenceEnv.phases([A, CYCLE], [1, 1]), lambda: PreferenceEnv.alternating([A], first=0), lambda: PreferenceEnv.alternating([A], growth=.5), lambda: PreferenceEnv.alternating([]),
                lambda: PreferenceEnv.corrupted(A, B, -1), lambda: PreferenceEnv.corrupted(A, B, [0, 1]), lambda: PreferenceEnv.corrupted(A, CYCLE, 1)):
        with pytest.raises(ValueError): bad()


def test_pair_statistics_by_hand():
    s = PairStatistics(3)
    for o in (1, 1, 0, .5): s.record(0, 1, o)
    s.record(2, 0, 0); s.record(1, 1, 1)
    assert s.counts.tolist() == [[0, 4, 1], [4, 0, 0], [1, 0, 0]]
    assert s.win_rates[0, 1] == .625 and s.win_rates[1, 0] == .375 and s.win_rates[0, 2] == 1 and math.isnan(s.win_rates[1, 2]) and s.win_rates[1, 1] == .5
    b = s.borda(.9)
    half = math.sqrt(math.log(6 / .1) / 2 * (1 / 4 + 1) / 4)
    assert isinstance(b[0], Interval) and b[0].estimate == pytest.approx(.8125) and b[0].high - b[0].estimate == pytest.approx(half) == b[0].estimate - b[0].low
    assert math.isnan(b[1].estimate) and (b[1].low, b[1].high) == (-math.inf, math.inf) and s.leader() is None
    for bad in (lambda: s.record(0, 3, 1), lambda: s.record(0, 1, 2), lambda: s.record(0, 1, math.nan), lambda: s.borda(1), lambda: PairStatistics(1)):
        with pytest.raises(ValueError): bad()
    assert s.counts.sum() == 10


def test_leader_appears():
    s = PairStatistics(2)
    for k in range(400):
        s.record(0, 1, k % 4 != 0)
        if s.leader() is not None: break
    assert s.leader() == 0 and k > 10
    n, K = s.counts[0, 1], 2
    assert 2 * math.sqrt(math.log(2 * K / .05) / 2 / n) < 2 * (s.win_rates[0, 1] - .5)
