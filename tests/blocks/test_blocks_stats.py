"Oracles, properties and faults of `iclr26.blocks.stats`."
import math, subprocess, sys
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats as sps
from iclr26.blocks.stats import (Interval, bootstrap_ci, energy_distance, frechet_distance, paired_bootstrap, seed_interval, spearman)


def test_interval_is_a_value():
    i = Interval(1.0, 0.5, 2.0)
    assert i == Interval(1.0, 0.5, 2.0) and 0.5 in i and 2.1 not in i
    with pytest.raises(Exception): i.low = 3


def test_seed_interval_is_student_t():
    v = np.random.default_rng(0).normal(3, 2, 7)
    low, high = sps.t.interval(0.9, 6, loc=v.mean(), scale=sps.sem(v))
    got = seed_interval(v, confidence=0.9)
    assert got.estimate == pytest.approx(v.mean()) and got.low == pytest.approx(low) and got.high == pytest.approx(high)


def test_seed_interval_one_value_and_coverage():
    assert seed_interval([4.0]) == Interval(4.0, -math.inf, math.inf)
    rng = np.random.default_rng(1)
    covered = np.mean([0 in seed_interval(rng.normal(size=4), 0.8) for _ in range(2000)])
    assert abs(covered - 0.8) < 0.04


def test_paired_bootstrap_against_normal_theory():
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=(2, 400))
    d = a - b
    got = paired_bootstrap(a, b, n=20000)
    half = 1.96 * d.std() / 20
    assert got.estimate == pytest.approx(d.mean())
    assert got.low == pytest.approx(d.mean() - half, abs=0.01) and got.high == pytest.approx(d.mean() + half, abs=0.01)


def test_paired_bootstrap_exact_two_points():
    # two differences 0 and 1: resampled means are 0, 1/2, 1 with probability 1/4, 1/2, 1/4
    assert paired_bootstrap([0, 1], [0, 0], n=4000, confidence=0.6) == Interval(0.5, 0.0, 1.0)
    assert paired_bootstrap([0, 1], [0, 0], n=4000, confidence=0.2) == Interval(0.5, 0.5, 0.5)


def test_bootstrap_ci_equals_paired_and_vectorised_equals_loop():
    v = np.random.default_rng(3).exponential(size=61)
    assert bootstrap_ci(v, seed=5) == paired_bootstrap(v, np.zeros(61), seed=5)
    loop = bootstrap_ci(v, lambda x: float(np.median(x)), n=500, seed=4)
    fast = bootstrap_ci(v, np.median, n=500, seed=4)
    assert loop == fast


def test_bootstrap_of_rows():
    x = np.random.default_rng(0).normal(size=(40, 2))
    r = bootstrap_ci(x, lambda rows: float(np.corrcoef(rows.T)[0, 1]), n=400)
    assert r.low < r.estimate < r.high and r.estimate == pytest.approx(np.corrcoef(x.T)[0, 1])


def test_blocks_do_not_change_the_draws(monkeypatch):
    from iclr26.blocks import stats
    v = np.random.default_rng(3).normal(size=50)
    whole = bootstrap_ci(v, n=300)
    monkeypatch.setattr(stats, "_BLOCK", 137)
    assert bootstrap_ci(v, n=300) == whole


@pytest.mark.parametrize("f", [lambda s: paired_bootstrap([1, 2, 5.3, 7.1, 9, 4], [0, 1, 1.2, 3, 2.7, 8], seed=s), lambda s: bootstrap_ci([1, 2, 5.3, 7.7, 9.1], seed=s, n=200),
                               lambda s: spearman(range(9), [3, 1, 2, 5, 4, 7, 6, 9, 8], seed=s, n=200)])
def test_same_seed_same_interval(f):
    assert f(0) == f(0)
    assert f(0) != f(1) or f(0) != f(2) or f(0) != f(3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=3, max_size=25))
def test_spearman_matches_scipy_with_ties(pairs):
    a, b = map(np.array, zip(*pairs))
    if len(set(a)) < 2 or len(set(b)) < 2:
        with pytest.raises(ValueError, match="different"): spearman(a, b, n=10)
        return
    got = spearman(a, b, n=50)
    assert got.estimate == pytest.approx(sps.spearmanr(a, b).statistic, abs=1e-12)
    assert -1 <= got.low <= got.high <= 1
    assert spearman(np.exp(a), b, n=10).estimate == pytest.approx(got.estimate, abs=1e-12)


def test_energy_distance_by_definition():
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(7, 2, 3)), rng.normal(size=(5, 2, 3)) + 1
    dist = lambda p, q: np.array([[np.linalg.norm(i - j) for j in q] for i in p])
    v = 2 * dist(x, y).mean() - dist(x, x).mean() - dist(y, y).mean()
    u = 2 * dist(x, y).mean() - dist(x, x).sum() / 42 - dist(y, y).sum() / 20
    assert energy_distance(x, y) == pytest.approx(v, abs=1e-12)
    assert energy_distance(x, y, unbiased=True) == pytest.approx(u, abs=1e-12)


def test_energy_distance_1d_is_twice_the_cramer_distance():
    a, b = np.random.default_rng(5).normal(size=(2, 30))
    assert energy_distance(a, b) == pytest.approx(sps.energy_distance(a, b)**2, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 8), st.integers(2, 8), st.integers(0, 10**6))
def test_energy_distance_properties(n, m, seed):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, 2)), rng.normal(size=(m, 2))
    d = energy_distance(x, y)
    assert d >= 0 and d == pytest.approx(energy_distance(y, x), abs=1e-12) and energy_distance(x, x) <= 1e-12
    assert energy_distance(3 * x + 1, 3 * y + 1) == pytest.approx(3 * d, abs=1e-9)


def test_frechet_against_sqrtm_and_closed_form():
    from scipy.linalg import sqrtm
    rng = np.random.default_rng(6)
    x, y = rng.normal(size=(60, 4)) @ rng.normal(size=(4, 4)), rng.normal(size=(50, 4)) + 1
    sx, sy = np.cov(x.T), np.cov(y.T)
    want = ((x.mean(0) - y.mean(0))**2).sum() + np.trace(sx + sy - 2 * np.real(sqrtm(sx @ sy)))
    assert frechet_distance(x, y) == pytest.approx(want, rel=1e-8)
    a, b = rng.normal(size=40), rng.normal(2, 3, size=30)
    assert frechet_distance(a[:, None], b[:, None]) == pytest.approx((a.mean() - b.mean())**2 + (a.std(ddof=1) - b.std(ddof=1))**2)


def test_frechet_singular_and_invariances():
    rng = np.random.default_rng(7)
    x, y = rng.normal(size=(2, 6, 40))
    q, _ = np.linalg.qr(rng.normal(size=(40, 40)))
    assert frechet_distance(x, x) < 1e-12
    assert frechet_distance(x @ q + 5, y @ q + 5) == pytest.approx(frechet_distance(x, y), rel=1e-9)
    assert frechet_distance(x, y) == pytest.approx(frechet_distance(y, x), rel=1e-12)


def test_torch_tensors_and_types():
    torch = pytest.importorskip("torch")
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    assert energy_distance(x, x + 1) == pytest.approx(energy_distance(x.numpy(), (x + 1).numpy()), rel=1e-6)
    assert seed_interval(torch.tensor([1., 2.], dtype=torch.bfloat16, requires_grad=True)).estimate == 1.5
    assert paired_bootstrap(torch.tensor([True, False]), [False, False]).estimate == 0.5
    for f in (energy_distance(x, x + 1), frechet_distance(x, x + 1), seed_interval(x[:, 0]).low): assert type(f) is float


@pytest.mark.parametrize("call, name", [
    (lambda: seed_interval([]), "values"), (lambda: seed_interval([1, math.nan]), "values"), (lambda: seed_interval([[1, 2]]), "values"),
    (lambda: seed_interval([1, 2], confidence=1), "confidence"), (lambda: seed_interval(["a"]), "values"),
    (lambda: paired_bootstrap([1, 2], [1]), "lengths"), (lambda: paired_bootstrap([], []), "a"), (lambda: paired_bootstrap([1], [math.inf]), "b"),
    (lambda: paired_bootstrap([1], [1], n=0), "n:"), (lambda: bootstrap_ci([]), "values"), (lambda: bootstrap_ci([1, math.inf]), "values"),
    (lambda: bootstrap_ci([1, 2], lambda v: math.nan, n=3), "statistic"), (lambda: bootstrap_ci([1, 2], confidence=0), "confidence"),
    (lambda: spearman([1, 2, 3], [1, 2]), "lengths"), (lambda: spearman([1], [1]), "2 pairs"), (lambda: spearman([1, 1], [1, 2]), "a:"),
    (lambda: spearman([1, math.nan], [1, 2]), "a"), (lambda: energy_distance([1.], [1., 2.]), "x"), (lambda: energy_distance([1., 2.], [[1, 2], [3, 4]]), "width"),
    (lambda: energy_distance([1., 2.], [1., math.nan]), "y"), (lambda: frechet_distance([[1., 2]], [[1., 2], [3, 4]]), "x"),
    (lambda: frechet_distance([[1.], [2]], [[1., 2], [3, 4]]), "width"), (lambda: frechet_distance([[1.], [2]], [[1.], [math.inf]]), "y"),
])
def test_bad_input_is_named(call, name):
    with pytest.raises(ValueError, match=name): call()


def test_import_is_light():
    code = "import sys, iclr26.blocks.stats; bad = {'torch', 'scipy.stats', 'matplotlib', 'pandas', 'numba'} & set(sys.modules); assert not bad, bad"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).returncode == 0
