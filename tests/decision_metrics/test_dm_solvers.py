"""Optimisers against grids, closed forms, certificates; baselines; the predecessor."""
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats

from iclr26.decision_metrics import (ContractScheduling, Distribution, Interval, OneMaxSearch, Point, SkiRental, avg_distance, custom_weight, evaluate, gaussian_weight, lambda_rule, linear_weight,
                                     lower_bound, max_distance, optimize, pareto_optimal, performance_profile, point_weight, predecessor_experiment, predecessor_score, randomized_ski_cost, risk_value,
                                     robust_only, tolerance_optimal, worst_ratio)

SKI, ONEMAX, CONTRACT = SkiRental(10), OneMaxSearch(1000), ContractScheduling()
unit = st.floats(0, 1)


def draw(kind, v):
    "Problem, r and y, l, u from five numbers of [0, 1]."
    a, b, c, d, e = v
    if kind == "ski":
        p = SkiRental(1 + 40 * a); y = p.b * (.2 + 4 * b)
        return p, 2.05 + 6 * c, y, y * .95 * d, y * (1.05 + 2 * e)
    if kind == "onemax":
        M = 10 ** (1 + 3 * a); l, y, u = np.sort(M ** np.array([b, c, d]))
        return OneMaxSearch(M), M ** (.52 + .3 * e), y, l, max(u, l * 1.01) if l * 1.01 <= M else M
    y = 10 ** (3 * b - 1)
    p = ContractScheduling() if a < .5 else ContractScheduling.for_robustness(4 + 3 * a)
    return p, 4 + 3 * a, y, y * (.4 + .59 * d), y * (1.01 + 1.2 * e)


def thetas(p, r, l, n=400):
    return np.linspace(l, p.base * l * (1 - 1e-9), n) if isinstance(p, ContractScheduling) else np.linspace(*p.interval(r), n)


@pytest.mark.parametrize("measure", ["max", "avg"])
@pytest.mark.parametrize("kind", ["ski", "onemax", "contract"])
@settings(deadline=None, max_examples=12)
@given(st.tuples(unit, unit, unit, unit, unit), st.sampled_from(["uniform", "linear", "gaussian", "custom"]))
def test_no_robust_threshold_is_better(kind, measure, v, weight):
    p, r, y, l, u = draw(kind, v)
    if not l * 1.001 < u or not l <= y <= u: return
    w = {"uniform": None, "linear": linear_weight(l, y, u), "gaussian": gaussian_weight(y, (u - l) / 4), "custom": custom_weight(lambda x: np.maximum(1 - np.abs(x - y) / (2 * (u - l)), 0) ** 2, y)}[weight]
    res, f = optimize(p, r, Interval(y, l, u), measure, weight=w), max_distance if measure == "max" else avg_distance
    assert res.value <= min(f(p, t, r, (l, u), w, check=False) for t in thetas(p, r, l, 60)) + 1e-6
    assert res.value == pytest.approx(f(p, res.theta, r, (l, u), w), abs=1e-8)
    assert worst_ratio(p, res.theta) <= r * (1 + 1e-9) and res.interval == p.interval(r)
    for a, b in res.ties:
        for t in {a, (a + b) / 2, b}: assert f(p, t, r, (l, u), w, check=False) <= res.value + 1e-7
    assert res.ties[0][0] <= res.theta <= res.ties[-1][1]


@pytest.mark.parametrize("kind", ["ski", "onemax", "contract"])
@settings(deadline=None, max_examples=25)
@given(st.tuples(unit, unit, unit, unit, unit), st.sampled_from(["uniform", "triang", "beta", "samples"]), st.sampled_from([0, .3, .8, .97]), st.integers(0, 99))
def test_no_robust_threshold_has_lower_risk(kind, v, law, alpha, seed):
    p, r, y, l, u = draw(kind, v)
    if not l * 1.001 < u or not l <= y <= u: return
    rng = np.random.default_rng(seed)
    dist = Distribution({"uniform": stats.uniform(l, u - l), "triang": stats.triang((y - l) / (u - l), loc=l, scale=u - l), "beta": stats.beta(2, 3, loc=l, scale=u - l),
                         "samples": rng.uniform(l, u, 12)}[law])
    res, sign = optimize(p, r, dist, "cvar", alpha=alpha), 1 if p.sense == "cost" else -1
    grid = min(sign * risk_value(p, t, dist, alpha) for t in thetas(p, r, dist.support[0], 200))
    assert sign * res.value <= grid + 1e-6 * max(1, abs(grid))
    assert res.value == pytest.approx(risk_value(p, res.theta, dist, alpha), rel=1e-8) and worst_ratio(p, res.theta) <= r * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(unit, unit, unit, unit)
def test_closed_and_numeric_agree(a, b, c, alpha):
    l = 1 + 60 * a; u = l * (1.05 + .9 * b)
    jobs = [(ONEMAX, 32 + 200 * c, Interval(l, l, u), m, {}) for m in ("max", "avg")] + [(CONTRACT, 4.0, Interval(l, l, u), m, {}) for m in ("max", "avg")]
    jobs += [(p, r, Distribution(stats.uniform(l, u - l)), "cvar", {"alpha": .95 * alpha}) for p, r in ((SKI, 2.1 + 6 * c), (ONEMAX, 32 + 200 * c), (CONTRACT, 4.0))]
    r = 2.7 + 6 * c
    if 20 + 70 * a >= 10 * r / (r - 1): jobs.append((SKI, r, Interval(10, 0, 20 + 70 * a), "avg", {}))
    for p, r, prediction, measure, extra in jobs:
        x, y = (optimize(p, r, prediction, measure, method=m, **extra) for m in ("closed", "numeric"))
        assert (x.method, y.method) == ("closed", "numeric") and x.value == pytest.approx(y.value, abs=1e-7)
        if len(x.ties) == len(y.ties) == 1: assert x.theta == pytest.approx(y.theta, rel=1e-4)


def test_minimum_close_to_an_end_of_the_interval():
    r, R = 2.7 + 6 * .97265625, Interval(10, 0, 20 + 70 * .64453125)          # the stationary point is 0.001 above b / (r - 1)
    closed, numeric = (optimize(SKI, r, R, "avg", method=m) for m in ("closed", "numeric"))
    assert numeric.value == pytest.approx(closed.value, abs=1e-12) and numeric.theta == pytest.approx(closed.theta, rel=1e-6)
    assert closed.theta > closed.interval[0]


def test_published_optima():
    assert optimize(SKI, 5, Interval(15, 0, 40), "avg").theta == 2.5
    never = optimize(SKI, 5, Interval(15, 0, 25), "avg")
    assert never.theta == 40 and never.ties == ((np.nextafter(25, 30), 40.0),) and never.method == "closed"
    s = 10 / optimize(SKI, 5, Interval(15, 0, 30), "avg").theta
    assert np.log(s) - s + 2 == pytest.approx(0, abs=1e-12)
    best = optimize(ONEMAX, 100, Interval(30, 1, 50))
    assert (best.theta, best.value) == (10, pytest.approx(4))
    assert optimize(ONEMAX, 100, Interval(300, 5, 900)).theta == pytest.approx((-8 + np.sqrt(64 + 3600)) / 2)
    T = optimize(ONEMAX, 100, Interval(30, 1, 400), "avg").theta
    assert 2 * T**3 - T**2 - 400**2 == pytest.approx(0, abs=1e-6)
    assert optimize(CONTRACT, 4, Interval(14, 10, 18), "avg").theta == pytest.approx(np.sqrt(124)) and optimize(CONTRACT, 4, Interval(14, 10, 17), "avg").theta == 10
    assert optimize(CONTRACT, 4, Interval(14, 10, 18)).theta == 10 and optimize(CONTRACT, 4, Interval(14, 10, 18)).value == pytest.approx(1.6)
    assert optimize(ONEMAX, 100, Distribution(stats.uniform(15, 60)), "cvar", alpha=.2).theta == pytest.approx((.8 * 60 + 16) / 2)
    assert optimize(CONTRACT, 4, Distribution(stats.uniform(10, 8)), "cvar", alpha=.1).theta == pytest.approx(12.2)
    assert optimize(SKI, 5, Distribution(stats.lomax(2, scale=8)), "cvar", alpha=0).theta == pytest.approx(12, rel=1e-6)      # hazard 2 / (8 + x) = 1 / 10


def test_ties_and_open_ends():
    flat = optimize(CONTRACT, 4, Interval(14, 10, 25))
    assert flat.theta == 10 and flat.ties == ((10.0, np.nextafter(20.0, 0)),) and flat.value == pytest.approx(2)
    low = optimize(ONEMAX, 100, Interval(5, 2, 8))                     # nothing in R may be accepted: every threshold is as good
    assert low.theta == 10 and low.ties == ((10, 100),) and low.value == 0
    wait = optimize(SKI, 5, Interval(5, 3, 8))
    assert wait.theta == 40 and wait.ties == ((np.nextafter(8, 9), 40),) and wait.value == 0
    open_end = optimize(SKI, 5, Distribution([6.0, 6.0, 6.0, 6.0, 38.0]), "cvar", alpha=0)      # just after the atom, never at it
    assert open_end.theta == np.nextafter(6, 7) and risk_value(SKI, 6, Distribution([6.0] * 4 + [38.0]), 0) > open_end.value + 1
    assert optimize(ONEMAX, 100, Distribution([20.0, 30, 40]), "cvar", alpha=0).theta in (20, 30, 40)


def test_point_prediction():
    for p, r, ys in ((SKI, 5, (4, 10, 11, 12.5, 30)), (SKI, 2.2, (9, 11, 12.5)), (ONEMAX, 100, (3, 10, 60, 400)), (CONTRACT, 4, (3, 17.0))):
        for y in ys:
            res = optimize(p, r, Point(y))
            po = pareto_optimal(p, r, y, refined=True)
            assert p.distance(res.theta, y, r) == pytest.approx(p.distance(po, y, r), abs=1e-12) and res.value == pytest.approx(0, abs=1e-12)
            via = optimize(p, r, Interval(y, max(y * .6, 1), y * 1.4), weight=point_weight(y))
            assert via.value == pytest.approx(res.value, abs=1e-12)
    assert [pareto_optimal(SKI, 5, y) for y in (9, 10, 11, 12.4)] == [40, 2.5, 2.5, 2.5] and [pareto_optimal(SKI, 5, y, refined=True) for y in (9, 10, 12.4, 12.5)] == [40, 40, 40, 2.5]
    assert optimize(SKI, 5, Point(11)).theta == 40 and [pareto_optimal(ONEMAX, 100, y) for y in (2, 50, 500)] == [10, 50, 100] and pareto_optimal(CONTRACT, 4, 7.5) == 7.5


@pytest.mark.parametrize("call, name", [
    (lambda: optimize(SKI, 5, Interval(5, 1, 9), "cvar", alpha=.1), "prediction"), (lambda: optimize(SKI, 5, Distribution([1]), "max"), "prediction"), (lambda: optimize(SKI, 5, Point(3), "avg"), "prediction"),
    (lambda: optimize(SKI, 5, Point(3), weight=gaussian_weight(3, 1)), "prediction"), (lambda: optimize(SKI, 5, Distribution([1]), "cvar"), "alpha"), (lambda: optimize(SKI, 5, Distribution([1]), "cvar", alpha=1), "alpha"),
    (lambda: optimize(SKI, 5, Interval(5, 1, 9), alpha=.1), "alpha"), (lambda: optimize(SKI, 5, Distribution([1]), "cvar", alpha=.1, weight=gaussian_weight(3, 1)), "weight"), (lambda: optimize(SKI, 5, Point(3), "mean"), "measure"),
    (lambda: optimize(SKI, 5, Point(3), method="magic"), "method"), (lambda: optimize(SKI, 5, Interval(5, 1, 9), method="closed"), "method"), (lambda: optimize(SKI, 5, Interval(5, 1, 90), "avg", method="closed"), "method"),
    (lambda: optimize(ONEMAX, 100, Interval(5, 1, 9), weight=linear_weight(1, 5, 9), method="closed"), "method"), (lambda: optimize(CONTRACT, 4, Interval(5, 4, 9), method="closed"), "method"),
    (lambda: optimize(ONEMAX, 100, Distribution(stats.triang(.5, 3, 9)), "cvar", alpha=0, method="closed"), "method"), (lambda: optimize(SKI, 1.9, Point(3)), "r"), (lambda: optimize("ski", 5, Point(3)), "problem"),
    (lambda: optimize(SKI, 5, Interval(5, 1, np.inf), "avg"), "R"), (lambda: optimize(ONEMAX, 100, Interval(5, .5, 9)), "R"), (lambda: optimize(ONEMAX, 100, Point(.5)), "x"), (lambda: optimize(SKI, 5, Interval(5, 1, 9), "avg", weight=point_weight(5)), "weight"),
    (lambda: tolerance_optimal(SKI, 5, (9, 1)), "R"), (lambda: lambda_rule(10, 5, 0), "lam"), (lambda: lambda_rule(10, 5, 1.1), "lam"), (lambda: lambda_rule(0, 5, 1), "b"), (lambda: pareto_optimal(SKI, 5, -1), "x"),
    (lambda: lower_bound(SKI, 5, Point(3)), "prediction"), (lambda: predecessor_score(3.9, .1, 5, 5), "r"), (lambda: predecessor_score(4, 1, 5, 5), "buffer"), (lambda: predecessor_score(4, .1, 0, 5), "predicted"), (lambda: predecessor_score(4, .1, 5, 0), "t"),
    (lambda: evaluate(SKI, {"a": 3}, [1, 2], [[1, 2]]), "xs"), (lambda: evaluate(SKI, {"a": 3}, [np.nan], [[1, 2]]), "ys"), (lambda: predecessor_experiment(H=0), "H"), (lambda: predecessor_experiment(buffers=(1.2,)), "buffers")])
def test_bad_input_names_the_argument(call, name):
    with pytest.raises(ValueError, match=rf"^{name} = "): call()


def test_infinite_range():
    res = optimize(SKI, 5, Interval(15, 3, np.inf))
    grid = [max_distance(SKI, t, 5, (3, np.inf)) for t in np.linspace(2.5, 40, 500)]
    assert res.value <= min(grid) + 1e-6 and res.method == "numeric"


@pytest.mark.parametrize("measure", ["max", "avg"])
@pytest.mark.parametrize("p, r, R", [(SKI, 5, (15, 4, 30)), (SKI, 3, (9, 2, 16)), (ONEMAX, 100, (60, 15, 90)), (CONTRACT, 4, (14, 10, 18)), (ContractScheduling(2.5), 5, (14, 10, 18))], ids=str)
def test_certificate(p, r, R, measure):
    w = linear_weight(R[1], R[0], R[2])
    bound, res = lower_bound(p, r, Interval(*R), measure, weight=w, tol=1e-5), optimize(p, r, Interval(*R), measure, weight=w)
    assert res.value - 2e-5 <= bound <= res.value + 1e-12
    f = max_distance if measure == "max" else avg_distance
    assert bound <= min(f(p, t, r, R[1:], w, check=False) for t in thetas(p, r, R[1], 150))


def test_tolerance_rule():
    assert tolerance_optimal(ONEMAX, 100, (2, 900)).theta == pytest.approx(30) and tolerance_optimal(ONEMAX, 100, (40, 90)).theta == 40
    for p, r, R in ((SKI, 5, (12, 30)), (SKI, 5, (5, 60)), (ONEMAX, 60, (20, 500)), (CONTRACT, 4, (10, 15))):
        res = tolerance_optimal(p, r, R)
        assert res.value == pytest.approx(worst_ratio(p, res.theta, R), abs=1e-8)
        assert res.value <= min(worst_ratio(p, t, R) for t in thetas(p, r, R[0], 300)) + 1e-6 and worst_ratio(p, res.theta) <= r * (1 + 1e-9)


def test_simple_rules():
    assert (robust_only(SKI), robust_only(ONEMAX), robust_only(CONTRACT)) == (10, np.sqrt(1000), 1)
    assert lambda_rule(10, 10, .5) == 5 and lambda_rule(10, 9, .5) == 20 and lambda_rule(10, 12, .33, integer=True) == 4
    assert randomized_ski_cost(10, [4, 30]) == pytest.approx([4 * np.e / (np.e - 1), 10 * np.e / (np.e - 1)])
    for lam in (.2, .5, 1):                                       # robustness 1 + 1 / lam (Purohit et al.)
        assert max(worst_ratio(SKI, lambda_rule(10, y, lam)) for y in (3, 30)) == pytest.approx(1 + 1 / lam)


def test_profile_and_evaluate():
    xs = np.array([5.0, 11, 30])
    prof = performance_profile(SKI, [2.5, 10], xs, 5)
    assert prof.ratios.shape == (2, 3) and prof.distance == pytest.approx(prof.ratios - prof.ideal) and prof.ideal == pytest.approx([1, 1.1, 1.25])
    scores = evaluate(SKI, {"buy at b": 10.0, "follow": lambda y: 2.5 if y >= 10 else 40.0}, [5, 20], [[4, 6], [15, 30]])
    assert scores["buy at b"].mean_value == pytest.approx((4 + 6 + 20 + 20) / 4) and scores["follow"].worst_ratio == pytest.approx(1.25) and scores["follow"].mean_ratio == pytest.approx((1 + 1 + 1.25 + 1.25) / 4)


def naive_score(r, buffer, predicted, t, legacy):
    "The predecessor's rule written as loops."
    base = (r + (r * r - 4 * r) ** .5) / 2
    target = (1 - buffer) * predicted
    if legacy: target = int(target + .5)
    if target <= 0: return 0
    total, k = 0.0, 0
    while total < target: total += base**k; k += 1
    scale, done, longest, k = target / total, 0.0, 0.0, 0
    while done + scale * base**k <= t * (1 + 1e-12): done += scale * base**k; longest = scale * base**k; k += 1
    return int(longest + 1e-9) if legacy else longest


@given(st.sampled_from([4.0, 4.5, 6.0]), st.sampled_from([0, .05, .1, .3]), st.integers(1, 10**6), st.integers(1, 10**6), st.booleans())
def test_predecessor_score_against_loops(r, buffer, predicted, t, legacy):
    assert predecessor_score(r, buffer, predicted, t, legacy) == pytest.approx(naive_score(r, buffer, predicted, t, legacy), rel=1e-9)


def test_predecessor_experiment():
    a, b = predecessor_experiment(n_times=300, n_noise=300, seed=3), predecessor_experiment(n_times=300, n_noise=300, seed=3)
    assert a == b and list(a) == [.05, .1, .2, .3]
    for p, (gain, strong) in {.05: (79.22, 55.24), .1: (88.71, 66.43), .2: (74.73, 50.04), .3: (57.04, 28.47)}.items():
        assert a[p] == pytest.approx((gain, strong), abs=6)
    assert predecessor_score(4, 0, 100, .1) == 0


@pytest.mark.parametrize("seed", range(6))
def test_extreme_parameters(seed):
    "Huge and tiny scales, r at its minimum, needle-thin and very wide ranges, far tails: finite, robust, consistent, without a warning."
    import warnings
    rng = np.random.default_rng(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in ("ski", "onemax", "contract") * 4:
            if kind == "ski":
                b = 10 ** rng.uniform(-6, 8); p, r = SkiRental(b), rng.choice([2.0, 2 + 1e-9, 2.3, 1e3, 1e8]); y = b * 10 ** rng.uniform(-3, 3); l, u = rng.choice([0.0, y * .5, y * .999999]), y * rng.choice([1.0000001, 1.5, 50, np.inf])
            elif kind == "onemax":
                M = rng.choice([1.0001, 2.0, 1e6, 1e12]); p, r = OneMaxSearch(M), rng.choice([np.sqrt(M), M, 2 * M]); l, y, u = np.sort(M ** rng.random(3))
            else:
                r = rng.choice([4.0, 4.0001, 100.0]); p = ContractScheduling.for_robustness(r) if rng.random() < .5 else CONTRACT; y = 10 ** rng.uniform(-9, 9); l, u = y * rng.choice([1e-6, .3, .9999]), y * rng.choice([1.00001, 1.9, 1e5])
            r = float(r)
            for measure, f in (("max", max_distance), ("avg", avg_distance)):
                if measure == "avg" and np.isinf(u): continue
                for w in (None, linear_weight(l, y, u if np.isfinite(u) else 2 * y)):
                    res = optimize(p, r, Interval(y, l, u), measure, weight=w)
                    assert res.value > -1e-9 and worst_ratio(p, res.theta) <= r * (1 + 1e-9) and res.value == pytest.approx(f(p, res.theta, r, (l, u), w), rel=1e-7, abs=1e-7)
            if np.isinf(u): continue
            for dist in (Distribution(stats.uniform(l, u - l)), Distribution(stats.triang((y - l) / (u - l), loc=l, scale=u - l)), Distribution(rng.uniform(l, u, 3))):
                for alpha in (0, 1 - 1e-9):
                    res = optimize(p, r, dist, "cvar", alpha=alpha)
                    assert np.isfinite(res.value) and res.value == pytest.approx(risk_value(p, res.theta, dist, alpha), rel=1e-6) and worst_ratio(p, res.theta) <= r * (1 + 1e-9)
