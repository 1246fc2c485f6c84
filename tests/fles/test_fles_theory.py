"""Closed forms, quadrature and bad input of the theory functions."""
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit
from scipy.stats import norm

from iclr26.fles import best_steepness, gate_gap, saturation_threshold, suppression_ratio


def test_known_values():
    assert saturation_threshold(.1) == pytest.approx(2.19722, abs=1e-5)
    assert saturation_threshold(.01) == pytest.approx(4.59512, abs=1e-5)
    assert saturation_threshold(.01, gate="erf") == pytest.approx(norm.isf(.01), abs=1e-12)
    assert gate_gap(6, 4, 1) == pytest.approx(.015514, abs=1e-6)
    assert gate_gap(6, 4, .5) == pytest.approx(.071777, abs=1e-6)
    for s, r in ((1, .481796), (4, .147816), (256, .002165)): assert suppression_ratio(0, s) == pytest.approx(r, abs=1e-6)


@given(st.floats(1e-9, .999), st.floats(.01, 50), st.sampled_from(["sigmoid", "erf"]))
def test_threshold_is_sharp(eps, k, gate):
    x = saturation_threshold(eps, kappa_ho=k, gate=gate)
    complement = (lambda t: expit(-t)) if gate == "sigmoid" else norm.sf
    assert complement(k * x) == pytest.approx(eps, rel=1e-6)


@settings(max_examples=60)
@given(st.floats(.01, 100), st.floats(1.001, 50))
def test_best_steepness_is_the_maximum(x_j, factor):
    x_i = x_j * factor
    k, gap = best_steepness(x_i, x_j)
    assert gap == pytest.approx(gate_gap(x_i, x_j, k), rel=1e-12) and gap > 0
    grid = k * np.concatenate([np.geomspace(.01, .99, 40), np.geomspace(1.01, 100, 40)])
    assert max(gate_gap(x_i, x_j, g) for g in grid) < gap
    slope = lambda x: x * expit(k * x) * expit(-k * x)
    assert slope(x_i) == pytest.approx(slope(x_j), rel=1e-6)


def test_gap_does_not_cancel():
    assert gate_gap(60, 50, 1) == pytest.approx(math.exp(-50) - math.exp(-60), rel=1e-9)
    assert gate_gap(-50, -60, 1) == pytest.approx(math.exp(-50) - math.exp(-60), rel=1e-9)
    assert gate_gap(3, -2, 1.5) == pytest.approx(expit(4.5) - expit(-3), rel=1e-12)


@pytest.mark.parametrize("mu, sigma", [(0, 1), (1, 2), (-1, 8), (3, .5), (-2, .5)])
def test_suppression_by_sampling_free_integration(mu, sigma):
    x = np.linspace(mu - 12 * sigma, mu + 12 * sigma, 4_000_001)
    w, g = norm.pdf(x, mu, sigma), expit(x)
    r = (g * w)[x < 0].sum() / w[x < 0].sum() / ((g * w)[x > 0].sum() / w[x > 0].sum())
    assert suppression_ratio(mu, sigma) == pytest.approx(r, abs=1e-5)


@pytest.mark.parametrize("call", [lambda: saturation_threshold(0), lambda: saturation_threshold(1), lambda: saturation_threshold(math.nan), lambda: saturation_threshold(.1, kappa_ho=0),
                                  lambda: best_steepness(4, 6), lambda: best_steepness(4, 4), lambda: best_steepness(4, 0), lambda: best_steepness(math.inf, 1),
                                  lambda: suppression_ratio(0, 0), lambda: suppression_ratio(math.nan, 1), lambda: suppression_ratio(0, -1), lambda: suppression_ratio(100, 1),
                                  lambda: saturation_threshold(.1, gate="tanh")])
def test_bad_input(call):
    with pytest.raises(ValueError): call()
