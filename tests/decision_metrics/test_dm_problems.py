"""Ski rental, one-max search, contract scheduling: definitions, invariants, faults."""
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from iclr26.decision_metrics import (ContractScheduling, OneMaxSearch, SkiRental, run_contract, run_onemax, run_ski, worst_ratio)

unit = st.floats(0, 1)


def cases():
    return [(SkiRental(10), 5.0, np.linspace(0.01, 90, 4001)), (SkiRental(3), 2.0, np.linspace(0.01, 30, 4001)), (OneMaxSearch(1000), 100.0, np.geomspace(1, 1000, 4001)),
            (ContractScheduling(), 4.0, np.linspace(1, 9, 4001)), (ContractScheduling.for_robustness(6), 6.0, np.linspace(1, 60, 4001))]


@pytest.mark.parametrize("problem, r, xs", cases(), ids=lambda v: getattr(v, "label", ""))
def test_robust_thresholds_are_above_the_ideal_and_below_r(problem, r, xs):
    lo, hi = problem.interval(r)
    for theta in np.linspace(lo, hi, 25):
        d, ratio = problem.distance(theta, xs, r), problem.ratio(theta, xs)
        assert d.min() >= -1e-12 and ratio.max() <= r * (1 + 1e-9) and ratio.min() >= 1
        assert np.allclose(d, ratio - problem.ideal_ratio(xs, r))


def test_just_outside_the_interval_is_not_robust():
    for p, r in ((SkiRental(10), 5), (OneMaxSearch(1000), 100)):
        lo, hi = p.interval(r)
        assert worst_ratio(p, lo - 1e-6) > r and worst_ratio(p, hi + 1e-6) > r
        assert worst_ratio(p, lo) <= r * (1 + 1e-9) and worst_ratio(p, hi) <= r * (1 + 1e-9)
    assert ContractScheduling.for_robustness(5).min_robustness == pytest.approx(5, rel=1e-12)


def test_published_values():
    ski = SkiRental(10)
    assert ski.interval(5) == (2.5, 40.0) and OneMaxSearch(1000).interval(100) == (10.0, 100.0) and ContractScheduling().interval(4) == (1.0, 2.0)
    assert ski.ideal_ratio(11, 5) == pytest.approx(1.1) and ski.ideal_ratio(12.5, 5) == 1.25 and ski.ideal_ratio(1e9, 5) == 1.25
    assert ski.ideal_ratio(10, 2) == 2 and ski.ideal_ratio(9.999, 2) == 1
    assert SkiRental(10).ideal_ratio(14, 2.3) == pytest.approx(2.3 / 1.3)      # m = b (r - 1) = 13 ends the waiting branch
    assert ContractScheduling().ideal_ratio(3.3, 4) == 2 and ContractScheduling().ideal_ratio(3.3, 6) == pytest.approx((6 - 12**.5) / 2)
    assert [p.min_robustness for p in (ski, OneMaxSearch(400), ContractScheduling())] == [2, 20, 4]
    assert [p.sense for p in (ski, OneMaxSearch(400), ContractScheduling())] == ["cost", "profit", "profit"]


@settings(deadline=None)
@given(unit, unit, unit)
def test_ideal_is_the_lower_envelope(a, b, c):
    r = 2 + 6 * a
    for p, x in ((SkiRental(10), 60 * b), (OneMaxSearch(1000), 1000**b)):
        r = max(r, p.min_robustness * (1 + c))
        lo, hi = p.interval(r)
        grid = np.unique(np.clip(np.r_[np.linspace(lo, hi, 3001), x, np.nextafter(x, np.inf)], lo, hi))
        assert p.ratio(grid, x).min() == pytest.approx(p.ideal_ratio(x, r), abs=1e-9)


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.integers(-5, 5))
def test_contract_phase_is_periodic(c, t, k):
    for p in (ContractScheduling(), ContractScheduling(3.0)):
        assert p.value(c * p.base**k, t) == pytest.approx(p.value(c, t), rel=1e-9) or abs(np.log(t / c) / np.log(p.base) % 1 - .5) > .5 - 1e-9


@given(st.floats(0.1, 50), st.floats(0, 200), st.floats(0.1, 20))
def test_ski_is_scale_free(T, x, b):
    near = abs(T - x) < 1e-9 * max(T, x)
    assert near or SkiRental(b).ratio(T, x) == pytest.approx(SkiRental(7 * b).ratio(7 * T, 7 * x), rel=1e-12)


def test_a_contract_that_completes_at_x_counts():
    p = ContractScheduling()
    assert p.value(10, 20) == 10 and p.value(10, 20 * (1 - 5e-13)) == 10 and p.value(10, 20 * (1 - 1e-11)) == 5
    q = ContractScheduling(3.0)
    for k in range(-20, 20): assert q.ratio(1.7, 1.7 * 3.0**k) == pytest.approx(1.5, rel=1e-11)


def test_shapes_and_types():
    p = SkiRental(10)
    assert isinstance(p.ratio(3, 4), float) and isinstance(p.opt(4), float)
    out = p.distance(np.array([[3.0], [40.0]]), np.array([1, 5, 50]), 5)
    assert out.shape == (2, 3) and out.dtype == np.float64
    assert p.ratio(1, 0) == 1 and p.ratio(0, 0) == np.inf and np.array_equal(p.ratio([0, 1], [0, 0]), [np.inf, 1])
    assert OneMaxSearch(10).ratio(3, np.array([], float)).shape == (0,)


@pytest.mark.parametrize("call, name", [
    (lambda: SkiRental(0), "b"), (lambda: SkiRental(np.nan), "b"), (lambda: OneMaxSearch(1), "M"), (lambda: ContractScheduling(1), "base"), (lambda: ContractScheduling.for_robustness(3.9), "r"),
    (lambda: SkiRental(10).interval(1.9), "r"), (lambda: OneMaxSearch(100).interval(9.9), "r"), (lambda: ContractScheduling(3).interval(4.4), "r"), (lambda: SkiRental(10).ideal_ratio(3, np.inf), "r"),
    (lambda: SkiRental(10).value(3, -1), "x"), (lambda: SkiRental(10).ratio(3, np.nan), "x"), (lambda: SkiRental(10).opt(np.inf), "x"), (lambda: SkiRental(10).ratio(np.nan, 3), "theta"),
    (lambda: OneMaxSearch(100).ratio(5, 0.5), "x"), (lambda: OneMaxSearch(100).ratio(5, 101), "x"), (lambda: OneMaxSearch(100).value(.5, 2), "theta"),
    (lambda: ContractScheduling().ratio(1, 0), "x"), (lambda: ContractScheduling().ratio(0, 1), "theta"), (lambda: SkiRental("ten"), "b"), (lambda: SkiRental(10).ratio(3, "long"), "x"),
    (lambda: run_ski(3, 10, [1, -1]), "usage"), (lambda: run_ski(3, 10, [np.nan]), "usage"), (lambda: run_ski(-3, 10, [1]), "T"), (lambda: run_onemax(3, []), "prices"),
    (lambda: run_onemax(3, [1, 0]), "prices"), (lambda: run_onemax(3, [1, np.inf]), "prices"), (lambda: run_contract(1, 0), "t"), (lambda: run_contract(0, 1), "c"), (lambda: run_contract(1, 1, 1), "base")])
def test_bad_input_names_the_argument(call, name):
    with pytest.raises(ValueError, match=rf"^{name} = "): call()


def test_message_names_value_and_minimum():
    with pytest.raises(ValueError, match=r"r = 1\.5.*>= 2 "): SkiRental(10).interval(1.5)
    with pytest.raises(ValueError, match=r"r = 20.*31\.6"): OneMaxSearch(1000).interval(20)


@given(st.lists(st.floats(0, 5), max_size=20), st.floats(0.01, 20), st.floats(0.1, 20))
def test_run_ski_matches_value_and_is_causal(usage, T, b):
    run, x = run_ski(T, b, usage), float(np.cumsum(usage)[-1]) if usage else 0.0
    assert run.cost == pytest.approx(SkiRental(b).value(T, x))
    assert (run.bought_at is None) == (x < T)
    if run.bought_at is not None: assert run_ski(T, b, usage[: run.bought_at + 1]) == run      # the future changes nothing


@given(st.lists(st.floats(1, 50), min_size=1, max_size=20), st.floats(1, 60))
def test_run_onemax_accepts_first_and_beats_the_worst_case(prices, T):
    run = run_onemax(T, prices)
    assert run.profit == prices[run.index] and run.optimum == max(prices) and run.ratio == pytest.approx(run.optimum / run.profit)
    assert all(p < T for p in prices[: run.index]) and run.profit >= OneMaxSearch(50).value(T, max(prices)) - 1e-12
    if run.profit >= T: assert run_onemax(T, prices[: run.index + 1]).index == run.index


def test_run_contract():
    run = run_contract(10, 15)
    assert (run.length, run.ratio, run.completion) == (5, 3, 10)
    assert run_contract(9, 30, base=3).completion == 27 and run_contract(9, 30, base=3).length == pytest.approx(18)
