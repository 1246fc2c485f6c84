"""Difference weights, counting and theory parameters against independent sources."""
import math
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from iclr26.f2sa_p import fd_coefficients, fd_nodes, max_feasible_nu, sfo_per_step, theory_parameters, truncation_constant


def test_nodes_as_documented():
    assert [fd_nodes(p) for p in (1, 2, 3, 4)] == [(0, 1), (-1, 1), (-1, 0, 1, 2), (-2, -1, 1, 2)]


def test_printed_tables():
    F = Fraction
    assert fd_coefficients(1, exact=True) == {0: -1, 1: 1}
    assert fd_coefficients(2, exact=True) == {-1: F(-1, 2), 1: F(1, 2)}
    assert fd_coefficients(4, exact=True) == {-2: F(1, 12), -1: F(-2, 3), 1: F(2, 3), 2: F(-1, 12)}
    assert [fd_coefficients(10, exact=True)[j] for j in range(1, 6)] == [F(5, 6), F(-5, 21), F(5, 84), F(-5, 504), F(1, 1260)]


@given(st.integers(1, 24))
def test_order_conditions_hold_exactly_and_no_further(p):
    alpha = fd_coefficients(p, exact=True)
    assert list(alpha) == list(fd_nodes(p)) and all(w for w in alpha.values())
    for m in range(p + 1): assert sum(w * j**m for j, w in alpha.items()) == (m == 1)
    assert sum(w * j ** (p + 1) for j, w in alpha.items()) != 0
    assert all(abs(j * w) <= 1 for j, w in alpha.items())
    assert all(isinstance(w, Fraction) for w in alpha.values())
    assert fd_coefficients(p) == {j: float(w) for j, w in alpha.items()}


@given(st.integers(1, 16))
def test_truncation_constant_is_the_error_on_the_first_missed_monomial(p):
    # h(s) = s^(p+1): h^(p+1) = (p+1)!, nu = 1, error = |sum alpha j^(p+1)|
    error = abs(sum(w * j ** (p + 1) for j, w in fd_coefficients(p, exact=True).items()))
    assert error == truncation_constant(p) * math.factorial(p + 1)


@pytest.mark.parametrize("p", [2, 4, 6, 8, 10])
def test_even_orders_equal_central_differences_of_findiff(p):
    findiff = pytest.importorskip("findiff")
    table = findiff.coefficients(deriv=1, acc=p)["center"]
    theirs = {int(j): float(w) for j, w in zip(table["offsets"], table["coefficients"]) if j}
    assert fd_coefficients(p).keys() == theirs.keys()
    assert all(math.isclose(fd_coefficients(p)[j], theirs[j], rel_tol=1e-9, abs_tol=1e-12) for j in theirs)


@pytest.mark.parametrize("p", [3, 5, 7])
def test_odd_orders_equal_findiff_on_the_same_offsets(p):
    findiff = pytest.importorskip("findiff")
    offsets = list(range(-(p // 2), p // 2 + 2))
    table = findiff.coefficients(deriv=1, offsets=offsets)
    assert all(math.isclose(fd_coefficients(p)[j], float(w), rel_tol=1e-8) for j, w in zip(offsets, table["coefficients"]))


@pytest.mark.parametrize("call", [fd_nodes, fd_coefficients, truncation_constant, lambda p: sfo_per_step(p, 10), lambda p: max_feasible_nu(p, 1.0, 1.0),
                                  lambda p: theory_parameters(.1, p, 2, 1, 1, 1, 1)])
def test_bad_p(call):
    for p in (0, -3):
        with pytest.raises(ValueError, match="p must"): call(p)
    for p in (True, 2.0, "2", None):
        with pytest.raises(TypeError, match="p must"): call(p)


def test_counts():
    assert (sfo_per_step(1, 10), sfo_per_step(2, 10), sfo_per_step(3, 10)) == (33, 44, 77)
    assert sfo_per_step(2, 10, 3, upper_depends_on_x=False) == 40 + 6
    assert sfo_per_step(3, 10, 2, upper_depends_on_x=False) == 70 + 8


def test_feasible_nu():
    assert max_feasible_nu(1, 1, 1) == math.inf and max_feasible_nu(2, 1.0, 2.0) == .25 and max_feasible_nu(5, 1.0, 1.0) == .25
    with pytest.raises(ValueError, match="strong_convexity"): max_feasible_nu(2, -1.0, 1.0)


@pytest.mark.parametrize("p", [1, 2, 3, 6])
def test_theory_parameters_follow_their_formulas(p):
    eps, kappa, L, sigma, Delta, R, Lbar = .05, 3.0, 2.0, .7, 1.5, 4.0, 5.0
    out = theory_parameters(eps, p, kappa, L, sigma, Delta, R, Lbar=Lbar)
    nu = (eps / (Lbar * kappa ** (2 * p + 1))) ** (1 / p)
    assert math.isclose(out["nu"], nu)
    assert out["S"] == math.ceil((sigma / nu / eps) ** 2) and out["T"] == math.ceil(Delta * L * kappa**3 / eps**2)
    assert out["K"] == math.ceil((kappa * sigma / nu / eps) ** 2 * math.log(R * L * kappa / (nu * eps)))
    assert math.isclose(out["eta_y"], (L / kappa) * (nu * eps) ** 2 / (L * sigma) ** 2) and math.isclose(out["eta_x"], eps / (L * kappa**3))
    assert out["sfo_total"] == out["T"] * sfo_per_step(p, out["K"], out["S"])


def test_theory_parameters_edge_cases():
    quiet = theory_parameters(.1, 2, 2.0, 4.0, 0.0, 1.0, 1.0)
    assert quiet["K"] == quiet["S"] == 1 and quiet["eta_y"] == .25
    for name, args in dict(eps=(0, 2, 2, 1, 1, 1, 1), kappa=(.1, 2, .5, 1, 1, 1, 1), sigma=(.1, 2, 2, 1, -1, 1, 1), R=(.1, 2, 2, 1, 1, 1, math.nan)).items():
        with pytest.raises(ValueError, match=name): theory_parameters(*args)
