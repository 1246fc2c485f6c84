"""Distances, worst ratios and CVaR against grids, quadrature and hand-computed values."""
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats
from scipy.integrate import quad

from iclr26.decision_metrics import (ContractScheduling, Distribution, Interval, OneMaxSearch, Point, SkiRental, alpha_consistency, avg_distance, custom_weight, cvar, gaussian_weight,
                                     linear_weight, max_distance, point_weight, risk_value, uniform_weight, worst_ratio)

SKI, ONEMAX, CONTRACT = SkiRental(10), OneMaxSearch(1000), ContractScheduling()
WEIGHTS = {"uniform": uniform_weight(), "linear": linear_weight(6, 16, 30), "gaussian": gaussian_weight(16, 4),
           "steps": custom_weight(lambda x: np.where(np.abs(x - 16) < 3.3, 1.0, np.where(np.abs(x - 16) < 7, .6, .1)), 16)}
THETAS = [(SKI, 5, t) for t in (2.5, 6.1, 10, 17, 33)] + [(ONEMAX, 60, t) for t in (17, 24, 58)] + [(CONTRACT, 4, t) for t in (6, 8.7, 11)] + [(ContractScheduling(1.5), 5, 7.0), (SkiRental(10), 2.2, 9)]


def dense(theta, n=20_001):
    "Grid of [6, 30] with points on both sides of the switches."
    return np.unique(np.clip(np.r_[np.linspace(6, 30, n), [theta * k * (1 - 1e-12) for k in (1, 2, 4)], np.nextafter(theta, 0), 30], 6, 30))


@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
@pytest.mark.parametrize("p, r, theta", THETAS, ids=str)
def test_distances_against_a_grid(p, r, theta, weight):
    w, x = WEIGHTS[weight], dense(theta)
    d = p.distance(theta, x, r) * w(x)
    top = max_distance(p, theta, r, (6, 30), w, check=False)
    assert d.max() - 1e-9 <= top <= d.max() + 5e-3
    cuts = np.unique(np.clip([theta / 2, theta, 2 * theta, 4 * theta, *(theta * 1.5**np.arange(-2, 5)), 10, 12.5, 12, 16, 22 / 1.2, 12.7, 19.3, 9, 23, 1000 / 60], 6, 30))
    mean = sum(quad(lambda v: p.distance(theta, v, r) * float(w(np.array(v))), a, b, limit=200)[0] for a, b in zip(np.r_[6, cuts], np.r_[cuts, 30]) if b - a > 1e-9) / 24
    assert avg_distance(p, theta, r, (6, 30), w, check=False) == pytest.approx(mean, abs=2e-6)


def test_published_values():
    assert [avg_distance(SKI, T, 5, (0, 40)) for T in (2.5, 5, 10)] == pytest.approx([.2535295, .3302, .5703125], abs=5e-5)
    assert max_distance(ONEMAX, 10, 100, (1, 50)) == pytest.approx(4)
    assert max_distance(CONTRACT, 10, 4, (10, 18)) == pytest.approx(1.6)
    c = np.sqrt(124)
    assert avg_distance(CONTRACT, c, 4, (10, 18)) == pytest.approx((c + 124 / c) / 8 - 2)


def test_one_sided_limits_count_only_inside_the_range():
    assert max_distance(ONEMAX, 20, 100, (1, 50)) == pytest.approx(19)          # x -> 20 from below
    assert max_distance(ONEMAX, 20, 100, (20, 50)) == pytest.approx(1.5)        # 20 itself is accepted
    assert max_distance(ONEMAX, 50, 100, (20, 50)) == pytest.approx(49)         # the limit at the right end
    assert max_distance(SKI, 8, 5, (2, 8)) == pytest.approx(18 / 8 - 1)         # the closed right end is bought
    assert max_distance(SKI, 9, 5, (2, 8)) == 0
    assert max_distance(CONTRACT, 10, 4, (8, 10)) == pytest.approx(2)


def test_infinite_range_of_ski_rental():
    for T in (2.5, 7, 10, 22, 40):
        assert max_distance(SKI, T, 5, (0, np.inf)) == pytest.approx(max_distance(SKI, T, 5, (0, 1e5)))
        assert worst_ratio(SKI, T, (0, np.inf)) == pytest.approx(worst_ratio(SKI, T))
    assert max_distance(SKI, 2.5, 5, (0, np.inf), gaussian_weight(100, 5)) == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match="finite"): max_distance(SKI, 5, 5, (0, np.inf), custom_weight(lambda x: 0 * x + 1, 5))


def test_point_weight_is_the_value_at_y():
    for p, r, t, y in ((SKI, 5, 6, 15), (ONEMAX, 100, 20, 30), (CONTRACT, 4, 11, 13)):
        assert max_distance(p, t, r, (1, 40), point_weight(y), check=False) == p.distance(t, y, r)


@settings(deadline=None, max_examples=60)
@given(st.floats(2.6, 39), st.floats(0, 30), st.floats(.5, 40))
def test_maximum_is_at_least_the_mean_and_both_are_nonnegative(T, l, width):
    for w in (None, linear_weight(l, l + width / 3, l + width)):
        top, mean = max_distance(SKI, T, 5, (l, l + width), w), avg_distance(SKI, T, 5, (l, l + width), w)
        assert top >= mean - 1e-12 and mean >= -1e-12


@pytest.mark.parametrize("call, name", [
    (lambda: max_distance(SKI, 1, 5, (0, 9)), "theta"), (lambda: avg_distance(SKI, 41, 5, (0, 9)), "theta"), (lambda: max_distance(ONEMAX, 5, 100, (1, 9)), "theta"),
    (lambda: max_distance(SKI, 5, 5, (9, 9)), "R"), (lambda: max_distance(SKI, 5, 5, (-1, 9)), "R"), (lambda: max_distance(ONEMAX, 20, 100, (1, 1001)), "R"), (lambda: max_distance(ONEMAX, 20, 100, (1, np.inf)), "R"),
    (lambda: max_distance(CONTRACT, 2, 4, (0, 9)), "R"), (lambda: max_distance(CONTRACT, 2, 4, (1, np.inf)), "R"), (lambda: avg_distance(SKI, 5, 5, (0, np.inf)), "R"), (lambda: max_distance(SKI, 5, 5, 9), "R"),
    (lambda: max_distance(SKI, 5, 5, (np.nan, 9)), "R"), (lambda: max_distance(CONTRACT, 0, 4, (1, 9)), "theta"), (lambda: avg_distance(SKI, 5, 5, (0, 9), point_weight(5)), "weight"),
    (lambda: max_distance(SKI, 5, 5, (0, 9), lambda x: x), "weight"), (lambda: max_distance(SKI, 5, 5, (0, 9), point_weight(10)), "R"), (lambda: max_distance(SKI, 5, 1, (0, 9)), "r"),
    (lambda: max_distance(SKI, 5, 5, (0, 9), custom_weight(lambda x: 1 + x, 5)), "custom_weight"), (lambda: avg_distance(SKI, 5, 5, (0, 9), custom_weight(lambda x: (x / 9) ** 2, 5)), "custom_weight"),
    (lambda: linear_weight(3, 2, 5), "l"), (lambda: linear_weight(1, 6, 5), "u"), (lambda: gaussian_weight(1, 0), "sigma"), (lambda: point_weight(np.nan), "y"), (lambda: custom_weight(3, 1), "fn"),
    (lambda: Interval(1, 2, 3), "y"), (lambda: Interval(2, 3, 3), "u"), (lambda: Interval.tolerance(5, 0), "delta"), (lambda: Interval.tolerance(-5, .1), "y"), (lambda: Point(np.inf), "y"),
    (lambda: Distribution([]), "samples"), (lambda: Distribution([1, np.nan]), "samples"), (lambda: Distribution([1, 2], [1]), "weights"), (lambda: Distribution([1, 2], [1, -1]), "weights"),
    (lambda: Distribution([1, 2], [0, 0]), "weights"), (lambda: Distribution(stats.poisson(3)), "source"), (lambda: cvar([1, 2], 1), "alpha"), (lambda: cvar([1, 2], -.1), "alpha"), (lambda: cvar([1, 2], .1, tail="both"), "tail"),
    (lambda: risk_value(SKI, 5, Distribution(stats.norm(5, 1)), .1), "dist"), (lambda: risk_value(ONEMAX, 20, Distribution([.5, 2]), .1), "dist"), (lambda: risk_value(CONTRACT, 1, Distribution([0, 2]), .1), "dist"),
    (lambda: risk_value(CONTRACT, 1, Distribution(stats.lomax(.9)), 0), "dist"), (lambda: risk_value(SKI, 5, [1, 2], .1), "dist"), (lambda: alpha_consistency(SKI, 5, Distribution([0, 0]), .1), "dist"), (lambda: risk_value(SKI, -1, Distribution([1]), .1), "theta")])
def test_bad_input_names_the_argument(call, name):
    with pytest.raises(ValueError, match=rf"^{name} = "): call()


def test_theta_outside_the_interval_with_check_off():
    assert max_distance(SKI, 1, 5, (0, 9), check=False) == pytest.approx(10)      # x = 1: pays 11 instead of 1


def test_cvar_splits_atoms():
    assert cvar([1, 2, 3, 4], .6) == pytest.approx(3.625) and cvar([4, 2, 1, 3], .6, tail="lower") == pytest.approx(1.375)
    assert cvar([5, 1], .5, weights=[1, 3]) == pytest.approx(3) and cvar([7], .99) == 7 and cvar([1, 2, 9], 0) == 4


laws = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=10).filter(lambda v: sum(w for _, w in v) > 0)


@given(laws, st.sampled_from([0, .1, .5, .77, .99, 1 - 1e-9]))
def test_cvar_equals_rockafellar_uryasev(law, alpha):
    x, w = np.array(law, float).T
    p = w / w.sum()
    assert cvar(x, alpha, w) == pytest.approx(min(t + (p * np.maximum(x - t, 0)).sum() / (1 - alpha) for t in x), rel=1e-6, abs=1e-6)
    assert cvar(x, alpha, w, tail="lower") == pytest.approx(-cvar(-x, alpha, w), abs=1e-9)
    assert cvar(x, alpha, w) >= cvar(x, 0, w) - 1e-9 and cvar(2 * x + 3, alpha, w) == pytest.approx(2 * cvar(x, alpha, w) + 3, abs=1e-9)
    assert p @ x - 1e-9 <= cvar(x, alpha, w) <= x[w > 0].max() + 1e-9


@pytest.mark.parametrize("p, thetas", [(SKI, (2.5, 7, 14, 30)), (ONEMAX, (2, 7, 15, 40)), (CONTRACT, (4, 5.5, 7)), (ContractScheduling(1.4), (4.0, 5.0))], ids=["ski", "onemax", "contract", "contract 1.4"])
def test_risk_of_laws_against_their_own_samples(p, thetas):
    tail = "upper" if p.sense == "cost" else "lower"
    for law in (stats.uniform(4, 16), stats.triang(.3, 4, 16), stats.beta(2, 5, loc=4, scale=30), stats.truncexpon(3, loc=4, scale=8)):
        xs = law.ppf((np.arange(40_000) + .5) / 40_000)
        for alpha in (0, .9):
            for t in thetas:
                assert risk_value(p, t, Distribution(law), alpha) == pytest.approx(cvar(p.value(t, xs), alpha, tail=tail), rel=1e-4)
                best = p.opt(xs).mean()
                ratio = cvar(p.value(t, xs), alpha, tail=tail) / best
                assert alpha_consistency(p, t, Distribution(law), alpha) == pytest.approx(ratio if p.sense == "cost" else 1 / ratio, rel=1e-4)


@settings(deadline=None)
@given(st.lists(st.floats(1, 900), min_size=1, max_size=30), st.sampled_from([0, .25, .5, .9]))
def test_risk_of_samples_is_exact(xs, alpha):
    for p, t in ((SKI, 11.3), (ONEMAX, 37.7), (CONTRACT, 5.1)):
        want = cvar(p.value(t, np.array(xs)), alpha, tail="upper" if p.sense == "cost" else "lower")
        assert risk_value(p, t, Distribution(xs[::-1]), alpha) == pytest.approx(want, rel=1e-9)


def test_atoms_on_a_completion_or_threshold_count_as_reached():
    assert risk_value(CONTRACT, 10, Distribution([20.0, 40.0]), 0) == pytest.approx((10 + 20) / 2)
    assert risk_value(ONEMAX, 20, Distribution([20.0, 40.0]), 0) == pytest.approx(20)
    assert risk_value(SKI, 20, Distribution([20.0, 15.0]), 0) == pytest.approx((30 + 15) / 2)


def test_uniform_closed_forms():
    l, u, a, T, b = 4.0, 36.0, .3, 20.0, 10.0
    q = l + a * (u - l)
    law = Distribution(stats.uniform(l, u - l))
    assert risk_value(SKI, T, law, a) == pytest.approx(((T * T - q * q) / 2 + (T + b) * (u - T)) / (u - q))
    assert risk_value(SKI, 40, law, a) == pytest.approx((u + q) / 2) and risk_value(SKI, 5, law, a) == pytest.approx(15)
    assert risk_value(ONEMAX, T, law, a) == pytest.approx(T - (T - 1) * .5 / .7) and risk_value(ONEMAX, 30, law, a) == 1
    c = Distribution(stats.uniform(10, 8))
    assert risk_value(CONTRACT, 12, c, .3) == pytest.approx(6 - 3 * .25 / .7) and risk_value(CONTRACT, 17, c, .3) == pytest.approx(17 / 4)


def test_far_tail_keeps_precision():
    for law in (stats.uniform(4, 6), stats.triang(.5, 4, 6)):
        assert risk_value(SKI, 30, Distribution(law), 1 - 1e-12) == pytest.approx(10, rel=1e-5)
    assert cvar([1, 2, 3], 1 - 1e-15) == pytest.approx(3, rel=1e-9)


def test_unbounded_laws():
    law = stats.lognorm(.5, scale=12)
    xs = law.ppf((np.arange(400_000) + .5) / 400_000)
    for p, t in ((SKI, 25), (CONTRACT, 9)):
        assert risk_value(p, t, Distribution(law), .2) == pytest.approx(cvar(p.value(t, xs), .2, tail="upper" if p is SKI else "lower"), rel=2e-4)


def test_worst_ratio():
    assert worst_ratio(SKI, 2.5) == 5 and worst_ratio(SKI, 40) == 5 and worst_ratio(SKI, 0) == np.inf
    assert worst_ratio(ONEMAX, 10) == 100 and worst_ratio(CONTRACT, 3.3) == 4
    assert worst_ratio(ONEMAX, 20, (5, 60)) == pytest.approx(20) and worst_ratio(ONEMAX, 20, (20, 60)) == 3 and worst_ratio(CONTRACT, 10, (10, 15)) == pytest.approx(3)


def test_prediction_attributes():
    i = Interval.tolerance(10, .3)
    assert (i.y, i.l, i.u) == (10, 7, 13) and Interval(3, 0, np.inf).u == np.inf and Point(4).y == 4
    assert Distribution([3, 1, 2], [1, 0, 2]).support == (2, 3) and Distribution(stats.uniform(2, 3)).support == (2, 5)
