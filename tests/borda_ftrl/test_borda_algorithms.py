"Protocol, state, baselines and the two back ends."
import json, math
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from iclr26.borda_ftrl import (BordaConfidenceBound, DExp3, DExp3HighProb, ExploreThenCommit, HybridFTRLBorda, PreferenceEnv, RegretTable, UniformPair, VersatileDB, borda_not_condorcet,
                               borda_regret, no_condorcet, preferences_from_scores, simulate)

MAKERS = {"hybrid": lambda **k: HybridFTRLBorda(4, **k), "product": lambda **k: HybridFTRLBorda(4, exploration="product", estimator="raw", **k), "shannon": lambda **k: HybridFTRLBorda(4, regularizer="shannon", **k),
          "ito": lambda **k: HybridFTRLBorda(4, schedule="ito", schedule_constants=(1, .5), **k), "dexp3": lambda **k: DExp3(4, 500, **k), "hp": lambda **k: DExp3HighProb(4, 500, **k),
          "bcb": lambda **k: BordaConfidenceBound(4, 500, **k), "etc": lambda **k: ExploreThenCommit(4, 500, rounds=40, **k), "uniform": lambda **k: UniformPair(4, **k), "versatile": lambda **k: VersatileDB(4, **k)}
SPREAD = preferences_from_scores([.9, .2, .1, 0])


def play(a, n, rng, P=SPREAD):
    pairs = []
    for _ in range(n):
        x, y = a.select(); pairs.append((x, y))
        a.update(float(rng.random() < P[x, y]))
    return pairs


@pytest.mark.parametrize("name", MAKERS)
def test_protocol(name):
    a = MAKERS[name](seed=1)
    assert a.n_arms == 4 and a.t_ == 0
    with pytest.raises(RuntimeError): a.update(1)
    pair = a.select()
    assert a.select() == pair and a.select((.1, .2, .3)) == pair and all(0 <= i < 4 and isinstance(i, int) for i in pair)
    before = json.dumps(a.get_state())
    for bad in (1.5, -.1, math.nan, math.inf):
        with pytest.raises(ValueError): a.update(bad)
    for bad in ("1", None, [1, 2]):
        with pytest.raises((TypeError, ValueError)): a.update(bad)
    assert json.dumps(a.get_state()) == before
    a.update(True); a.select(); a.update(np.float64(.5))
    assert a.t_ == 2 and 0 <= a.recommend() < 4
    for bad in ((.1, .2), (.1, .2, 1.0), (-.1, .2, .3), (.1, .2, math.nan)):
        with pytest.raises(ValueError): a.select(bad)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("pending", [False, True])
def test_state_round_trip_through_json(name, pending):
    a, rng = MAKERS[name](seed=2), np.random.default_rng(0)
    play(a, 60, rng)
    if pending: a.select()
    b = MAKERS[name](seed=99)
    b.set_state(json.loads(json.dumps(a.get_state(), allow_nan=False)))
    assert b.t_ == a.t_ == 60
    outcomes = np.random.default_rng(5)
    draws = [float(v) for v in outcomes.random(80)]
    left, right = [], []
    for v in draws:
        for alg, log in ((a, left), (b, right)): log.append(alg.select()); alg.update(float(v < .6))
    assert left == right and a.recommend() == b.recommend() and a.get_state() == b.get_state()


def test_state_of_another_generator_and_settings():
    a = HybridFTRLBorda(3, exploration="product", stability_constant=.05, seed=np.random.Generator(np.random.MT19937(3)))
    play(a, 20, np.random.default_rng(0), preferences_from_scores([.5, 0, 0]))
    b = HybridFTRLBorda(3); b.set_state(json.loads(json.dumps(a.get_state())))
    assert b.exploration == "product" and b.stability_constant_ == .05 and [a.select(), a.exploration_rate_] == [b.select(), b.exploration_rate_]


def test_set_state_rejects_and_leaves_alone():
    a = HybridFTRLBorda(3, seed=0); a.select()
    before = a.get_state()
    good = HybridFTRLBorda(3, seed=1).get_state()
    for bad in (DExp3(3, 10).get_state(), HybridFTRLBorda(4).get_state(), {}, None, {**good, "generator": {}}, {k: v for k, v in good.items() if k != "state"}):
        with pytest.raises(ValueError): a.set_state(bad)
    assert a.get_state() == before


@pytest.mark.parametrize("name", MAKERS)
def test_clone_is_fresh_and_seeded(name):
    a = MAKERS[name](seed=3)
    first = play(a, 50, np.random.default_rng(0))
    c = a.clone(seed=3)
    assert type(c) is type(a) and c.t_ == 0 and play(c, 50, np.random.default_rng(0)) == first
    assert repr(c) == repr(a)


def test_exact_pairs_from_uniforms():
    assert UniformPair(4).select((.9, .26, .99)) == (1, 3)
    assert ExploreThenCommit(4, 100).select((0, .26, .4)) == (1, 2) and ExploreThenCommit(4, 100).select((0, .99, .99)) == (3, 2) and BordaConfidenceBound(4, 100).select((0, 0, 0)) == (0, 1)
    a = HybridFTRLBorda(4)
    assert a.select((.0, .999, .0)) == (3, 0)


@pytest.mark.parametrize("call", [lambda: HybridFTRLBorda(1), lambda: HybridFTRLBorda(3, exploration="x"), lambda: HybridFTRLBorda(3, estimator="x"), lambda: HybridFTRLBorda(3, schedule="x"),
                                  lambda: HybridFTRLBorda(3, regularizer="x"), lambda: HybridFTRLBorda(3, stability_constant=0), lambda: HybridFTRLBorda(3, bias_constant=-1),
                                  lambda: HybridFTRLBorda(3, schedule_constants=(1, 0)), lambda: HybridFTRLBorda(3, schedule_constants=3), lambda: DExp3(3, 0), lambda: DExp3(3, 10, eta=0), lambda: DExp3(3, 10, gamma=2),
                                  lambda: DExp3HighProb(3, 10, delta=0), lambda: BordaConfidenceBound(3, 10, delta=1), lambda: BordaConfidenceBound(3, 0), lambda: ExploreThenCommit(3, 10, rounds=0),
                                  lambda: ExploreThenCommit(1, 10), lambda: UniformPair(1), lambda: VersatileDB(1), lambda: DExp3(2.5, 10)])
def test_bad_settings(call):
    with pytest.raises(ValueError): call()


def test_dexp3_by_hand():
    K, T = 3, 1000
    a = DExp3(K, T)
    eta = (math.log(K) / (T * math.sqrt(K))) ** (2 / 3)
    assert a.eta_ == pytest.approx(eta) and a.gamma_ == pytest.approx(math.sqrt(eta * K))
    s = np.zeros(K)
    for u, o in (((0, .1, .5), 1), ((0, .9, .2), 0), ((0, .4, .4), 1)):
        q = np.exp(eta * s) / np.exp(eta * s).sum(); pi = (1 - a.gamma_) * q + a.gamma_ / K
        cdf = np.cumsum(pi); x, y = (int(np.argmax(cdf > v * cdf[-1])) for v in u[1:])
        assert a.select(u) == (x, y) and a.probabilities_ == pytest.approx(q)
        a.update(o); s[x] += o / (K * pi[x] * pi[y])
        assert a.scores_ == pytest.approx(s)
    h = DExp3HighProb(K, T, delta=.2)
    bonus = math.sqrt(math.log(K / .2) / (K * T))
    x, _ = h.select((0, .1, .1)); h.update(0)
    assert h.scores_ == pytest.approx(np.full(K, bonus * K))


def test_bcb_by_hand():
    a = BordaConfidenceBound(3, 200, delta=.05)
    assert a.confidence_width(7) == pytest.approx(2 * math.sqrt(3 / 7 * math.log(2 * 3 * 200 / .05)))
    a, rng = BordaConfidenceBound(2, 100, delta=.5), np.random.default_rng(0)
    sums, t = np.zeros(2), 0
    while a.committed_ is None and t < 5000:
        x, y = a.select(tuple(rng.random(3))); assert x != y
        a.update(x == 0); t += 1
        sums[x] += 2 * (x == 0)
        low, high = sums / t - a.confidence_width(t), sums / t + a.confidence_width(t)
        assert (a.committed_ == 0) == bool(low[0] >= high[1])
    assert a.committed_ == 0 and a.select() == (0, 0) and a.recommend() == 0


def test_explore_then_commit():
    assert ExploreThenCommit(5, 1000).rounds_ == math.ceil(5 ** (1 / 3) * 100)
    a = ExploreThenCommit(4, 500, rounds=200, seed=0)
    pairs = play(a, 260, np.random.default_rng(0))
    assert all(x != y for x, y in pairs[:200]) and set(pairs[200:]) == {(0, 0)}


def test_versatile_db_first_rounds():
    a = VersatileDB(3, seed=0)
    assert a.probabilities_ == pytest.approx(np.full((2, 3), 1 / 3))
    x, y = a.select((0, .5, .9)); a.update(0)
    p = a.probabilities_
    L = np.zeros(3); L[x] = 3.
    eta = 2 / math.sqrt(2)
    z = L - 2 / (eta * np.sqrt(p[0]))
    assert p.sum(1) == pytest.approx([1, 1]) and np.ptp(z) < 1e-9 and p[1] == pytest.approx([1 / 3] * 3)


def test_versatile_goes_to_the_condorcet_winner():
    table = simulate(PreferenceEnv.stationary(borda_not_condorcet(3)), VersatileDB(3), 6000, seeds=[0, 1])
    assert table.recommended.tolist() == [1, 1] and table.probabilities.shape == (2, 3) and table.probabilities.sum(1) == pytest.approx([1, 1])


BACKENDS = [HybridFTRLBorda(5), HybridFTRLBorda(5, exploration="product"), HybridFTRLBorda(5, stability_constant=.03, bias_constant=.4), DExp3(5, 800), BordaConfidenceBound(5, 30), UniformPair(5)]


@pytest.mark.parametrize("algorithm", BACKENDS, ids=repr)
def test_backends_agree(algorithm):
    pytest.importorskip("numba")
    for env in (PreferenceEnv.alternating([preferences_from_scores([.8, 0, 0, .1, 0]), preferences_from_scores([0, .4, 0, 0, .3])], first=7, growth=1.3),
                PreferenceEnv.corrupted(borda_not_condorcet(5), no_condorcet(5), np.random.default_rng(0).random(700) < .3)):
        p, n = (simulate(env, algorithm, 900, seeds=[3, 8], checkpoints=[1, 2, 50, 51, 900], backend=b) for b in ("python", "numba"))
        assert n.regret == pytest.approx(p.regret, abs=1e-9) and n.probabilities == pytest.approx(p.probabilities, abs=1e-9) and n.recommended.tolist() == p.recommended.tolist()
        assert isinstance(n, RegretTable) and n.algorithm == type(algorithm).__name__ and n.regret.shape == (2, 5)


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 12), st.integers(0, 10**6), st.integers(1, 400))
def test_backends_agree_anywhere(K, seed, T):
    pytest.importorskip("numba")
    rng = np.random.default_rng(seed)
    env = PreferenceEnv.stationary(preferences_from_scores(rng.random(K)))
    p, n = (simulate(env, HybridFTRLBorda(K), T, seeds=[seed], backend=b) for b in ("python", "numba"))
    assert n.regret == pytest.approx(p.regret, abs=1e-9) and n.probabilities == pytest.approx(p.probabilities, abs=1e-9)


def test_simulate_is_its_definition():
    env, T = PreferenceEnv.phases([preferences_from_scores([.4, 0, 0]), preferences_from_scores([0, 0, .9])], [100, 1]), 300
    U = np.random.default_rng(12).random((T, 4))
    a, xs, ys = HybridFTRLBorda(3), [], []
    for t, u in enumerate(U):
        x, y = a.select(u[:3]); xs.append(x); ys.append(y); a.update(float(u[3] < env.matrix(t)[x, y]))
    want = borda_regret(np.stack([env.matrix(t) for t in range(T)]), xs, ys)
    for kwargs in ({"seeds": [12]}, {"seeds": [0], "uniforms": U}, {"seeds": [0], "uniforms": U[None], "backend": "python"}):
        table = simulate(env, HybridFTRLBorda(3), T, checkpoints=range(1, T + 1), **kwargs)
        assert table.regret[0] == pytest.approx(want, abs=1e-9) and table.recommended[0] == a.recommend() and table.probabilities[0] == pytest.approx(a.probabilities_, abs=1e-9)


def test_blocks_and_checkpoints_do_not_matter(monkeypatch):
    from iclr26.borda_ftrl import simulation
    env = PreferenceEnv.stationary(no_condorcet(4))
    whole = simulate(env, HybridFTRLBorda(4), 5000, seeds=[1, 2, 3])
    monkeypatch.setattr(simulation, "_BLOCK", 61)
    parts = simulate(env, HybridFTRLBorda(4), 5000, seeds=[1, 2, 3], checkpoints=[10, 4000])
    assert parts.recommended.tolist() == whole.recommended.tolist() and (parts.probabilities == whole.probabilities).all()


def test_anytime():
    "T rounds, then T more through the saved state, equal 2T."
    env, T = PreferenceEnv.stationary(preferences_from_scores([.4, 0, 0])), 200
    U = np.random.default_rng(4).random((2 * T, 4))
    def go(a, rows, t0):
        for t, u in enumerate(rows): x, y = a.select(u[:3]); a.update(env.duel(x, y, t0 + t, float(u[3])))
    whole, first, second = HybridFTRLBorda(3, seed=0), HybridFTRLBorda(3, seed=0), HybridFTRLBorda(3)
    go(whole, U, 0); go(first, U[:T], 0); second.set_state(json.loads(json.dumps(first.get_state()))); go(second, U[T:], T)
    assert second.get_state()["state"] == whole.get_state()["state"]


def test_identical_arms_and_duplicates_of_the_best():
    coin = simulate(PreferenceEnv.stationary(np.full((6, 6), .5)), HybridFTRLBorda(6), 20000, seeds=[0, 1], checkpoints=[1, 77, 20000])
    assert (coin.regret == 0).all() and np.abs(coin.probabilities - 1 / 6).max() < .15
    twins, lone = (simulate(PreferenceEnv.stationary(preferences_from_scores(u)), HybridFTRLBorda(5), 20000, seeds=range(6)).mean()[0] for u in ([.4, .4, 0, 0, 0], [.4, 0, 0, 0, 0]))
    assert twins < 2 * lone


@pytest.mark.parametrize("K", [2, 50, 200])
def test_extreme_numbers_of_arms(K):
    u = np.zeros(K); u[0] = 1
    table = simulate(PreferenceEnv.stationary(preferences_from_scores(u)), HybridFTRLBorda(K), 60000, seeds=[0])
    assert np.isfinite(table.regret).all() and table.recommended[0] == 0 and abs(table.probabilities.sum() - 1) < 1e-12


def test_sure_winner_of_two_stays_finite():
    a = HybridFTRLBorda(2, seed=0)
    for _ in range(3000):
        x, y = a.select(); a.update(.5 if x == y else float(x == 0))
    assert math.isfinite(a.beta_) and a.recommend() == 0 and np.isfinite(a.probabilities_).all() and a.newton_iterations_ / a.t_ <= 5


def test_learns_beats_uniform_and_dexp3():
    env, T = PreferenceEnv.stationary(borda_not_condorcet(5)), 100_000
    ours, theirs, none = (simulate(env, a, T, seeds=range(4)) for a in (HybridFTRLBorda(5), DExp3(5, T), UniformPair(5)))
    assert (ours.recommended == 0).all() and ours.mean()[0] < .5 * theirs.mean()[0] < none.mean()[0]
    low, high = ours.band()
    assert low[0] < ours.mean()[0] < high[0] and ours.std()[0] == pytest.approx(ours.regret[:, 0].std(ddof=1))


@pytest.mark.parametrize("kwargs, error", [({"T": 0}, ValueError), ({"seeds": []}, ValueError), ({"algorithm": HybridFTRLBorda(4)}, ValueError), ({"checkpoints": [5, 5]}, ValueError), ({"checkpoints": [0]}, ValueError),
                                           ({"checkpoints": [11]}, ValueError), ({"checkpoints": []}, ValueError), ({"checkpoints": [1.5]}, ValueError), ({"backend": "cuda"}, ValueError), ({"uniforms": np.zeros((10, 3))}, ValueError),
                                           ({"uniforms": np.ones((10, 4))}, ValueError), ({"seeds": [0, 1], "uniforms": np.zeros((10, 4))}, ValueError), ({"env": np.eye(3)}, TypeError),
                                           ({"algorithm": HybridFTRLBorda(3, estimator="raw"), "backend": "numba"}, ValueError), ({"algorithm": VersatileDB(3), "backend": "numba"}, ValueError),
                                           ({"algorithm": DExp3HighProb(3, 10), "backend": "numba"}, ValueError)])
def test_simulate_rejects(kwargs, error):
    call = {"env": PreferenceEnv.stationary(preferences_from_scores([.4, 0, 0])), "algorithm": HybridFTRLBorda(3), "T": 10, "seeds": [0], **kwargs}
    with pytest.raises(error): simulate(call.pop("env"), call.pop("algorithm"), call.pop("T"), **call)


def test_without_numba(monkeypatch):
    import builtins
    real = builtins.__import__
    def fake(name, *args, **kwargs):
        if name == "numba": raise ImportError("no numba")
        return real(name, *args, **kwargs)
    monkeypatch.setattr(builtins, "__import__", fake)
    env = PreferenceEnv.stationary(preferences_from_scores([.4, 0, 0]))
    assert simulate(env, HybridFTRLBorda(3), 50, seeds=[0]).regret.shape == (1, 1)
    with pytest.raises(ImportError, match="numba"): simulate(env, HybridFTRLBorda(3), 50, seeds=[0], backend="numba")


def test_import_is_light():
    import subprocess, sys
    code = "import sys, iclr26.borda_ftrl; bad = {'torch', 'numba', 'matplotlib', 'pandas', 'sklearn'} & set(sys.modules); assert not bad, bad"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
