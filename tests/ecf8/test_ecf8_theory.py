"""Exponent entropy: closed forms, independent quadrature, Monte Carlo, invalid arguments."""
import math

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from iclr26.ecf8 import theory as th


# ---------------------------------------------------------------- two-sided geometric law and the claimed bounds

@given(st.floats(0.02, 2.0))
def test_two_sided_geometric_entropy_is_the_sum(alpha):
    k, q = np.arange(-4000, 4001), 2.0**-alpha
    p = (1 - q) / (1 + q) * q ** np.abs(k)
    assert th.two_sided_geometric_entropy(alpha) == pytest.approx(-special.xlogy(p, p).sum() / math.log(2), abs=1e-9)


def test_printed_values_of_the_claimed_theorem():
    assert th.two_sided_geometric_entropy(1.0) == pytest.approx(2.9183, abs=5e-5) and th.paper_bounds(1.0)[1] == 2.0
    assert th.two_sided_geometric_entropy(0.5) == pytest.approx(3.9573, abs=5e-5) and th.paper_bounds(0.5)[1] == pytest.approx(1.7071, abs=5e-5)
    assert th.paper_bounds(2.0) == pytest.approx((1.6, 8 / 3))
    assert th.two_sided_geometric_entropy(2.0) == pytest.approx(math.log2(5 / 3) + 16 / 15)


def test_violation_threshold_by_a_second_method():
    with mp.workdps(30):
        H = lambda a: mp.log((1 + 2**-a) / (1 - 2**-a), 2) + 2 * a * 2**-a / (1 - 4**-a)
        root = mp.findroot(lambda a: H(a) - a / (1 - 2**-a), (1.2, 1.8), solver="anderson")
    assert th.violation_alpha() == pytest.approx(float(root), abs=1e-12) and abs(float(root) - 1.47603) < 1e-4


@given(st.floats(1e-6, 2.0))
def test_upper_bound_is_violated_exactly_below_the_threshold(alpha):
    low, high = th.paper_bounds(alpha)
    assert low < th.two_sided_geometric_entropy(alpha)
    if abs(alpha - th.violation_alpha()) > 1e-9: assert (th.two_sided_geometric_entropy(alpha) > high) == (alpha < th.violation_alpha())


# ---------------------------------------------------------------- the stable law

@pytest.mark.parametrize("alpha, cdf", [(2.0, lambda x: special.erf(x / 2)), (1.0, lambda x: 2 / np.pi * np.arctan(x))])
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**-40, 3e5])
def test_exponent_law_against_closed_forms(alpha, cdf, scale):
    k, p = th.stable_exponent_pmf(alpha, scale)
    assert p == pytest.approx(np.diff(cdf(2.0 ** np.append(k, k[-1] + 1) / scale)), abs=1e-13)
    assert p.sum() == pytest.approx(1, abs=1e-13)


@pytest.mark.parametrize("alpha", [0.5, 0.8, 1.3, 1.8])
def test_distribution_against_zolotarev_integral(alpha):
    """Nolan's integral for the distribution function shares nothing with the Mellin inversion."""
    with mp.workdps(20):
        def cdf(x):
            r = mp.mpf(alpha) / (alpha - 1)
            V = lambda t: (mp.cos(t) / mp.sin(alpha * t)) ** r * mp.cos((alpha - 1) * t) / mp.cos(t)
            part = 2 / mp.pi * mp.quad(lambda t: mp.exp(-(mp.mpf(x) ** r) * V(t)), [0, 0.2, 0.8, 1.3, mp.pi / 2])
            return part if alpha < 1 else 1 - part
        for x in (0.25, 1.0, 3.0):
            assert float(th.stable_abs_cdf(math.log2(x), alpha)) == pytest.approx(float(cdf(x)), abs=1e-8)


@pytest.mark.parametrize("alpha, value", [(1.0, 3.1945), (2.0, 2.5435), (1.5, 2.8188), (0.5, 3.9524)])
def test_entropy_exact_against_samples(alpha, value):
    exact = th.stable_exponent_entropy(alpha)
    assert exact == pytest.approx(value, abs=1e-4)
    assert th.stable_exponent_entropy(alpha, method="mc", n=1_000_000, seed=3) == pytest.approx(exact, abs=5e-3)


def test_monte_carlo_is_reproducible_and_crosses_chunks():
    a, b = (th.stable_exponent_entropy(1.2, method="mc", n=1_000_001, seed=7) for _ in range(2))
    assert a == b != th.stable_exponent_entropy(1.2, method="mc", n=1_000_001, seed=8)
    assert th.stable_exponent_entropy(1.2, method="mc", n=1) == 0.0


def test_sampler_follows_the_law():
    for alpha in (0.6, 1.0, 1.7, 2.0):
        z = th.sample_log2_abs_stable(alpha, 20_000, np.random.default_rng(0))
        assert np.isfinite(z).all()
        assert stats.kstest(z, lambda v: th.stable_abs_cdf(v, alpha)).pvalue > 1e-3


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.5, 1.8, 1.95, 2.0])
def test_left_tail_halves_and_right_tail_follows_alpha(alpha):
    k, p = th.stable_exponent_pmf(alpha)
    law = dict(zip(k.tolist(), p))
    assert law[-25] / law[-24] == pytest.approx(0.5, abs=1e-3)                  # not 2^-alpha
    f0 = math.gamma(1 + 1 / alpha) / math.pi
    assert law[-24] == pytest.approx(2 * f0 * 2.0**-24, rel=1e-3)
    if alpha < 1.9: assert law[13] / law[12] == pytest.approx(2.0**-alpha, abs=0.01)
    if alpha == 2.0: assert law[3] / law[2] < 1e-3


def test_entropy_grows_as_tails_get_heavier():
    H = [th.stable_exponent_entropy(a) for a in np.linspace(0.3, 2, 35)]
    assert (np.diff(H) < 0).all()


# ---------------------------------------------------------------- T-A

def brute_h(cdf, low=-60, high=60, steps=400_000):
    """h(Y + U) by a plain midpoint sum in ordinary arithmetic."""
    y = low + (np.arange(steps) + 0.5) * (high - low) / steps
    g = cdf(y) - cdf(y - 1)
    return -special.xlogy(g, g).sum() * (high - low) / steps / math.log(2)


@pytest.mark.parametrize("value, cdf", [
    (2.544207, lambda z: special.erf(2.0 ** np.asarray(z) / math.sqrt(2))),
    (2.831953, lambda z: -np.expm1(-(2.0 ** np.asarray(z)))),
    (3.194519, lambda z: 2 / np.pi * np.arctan(2.0 ** np.asarray(z)))])
def test_dither_identity_three_ways(value, cdf):
    quadrature, phases, brute = th.dithered_exponent_entropy(cdf), th.phase_mean_entropy(cdf), brute_h(cdf)
    assert quadrature == pytest.approx(value, abs=6e-7)
    assert phases.mean() == pytest.approx(quadrature, abs=1e-8) and brute == pytest.approx(quadrature, abs=1e-8)


def test_dither_identity_in_thirty_digits():
    with mp.workdps(30):
        def entropy(u):
            cdf = lambda k: mp.erf(mp.mpf(2) ** (k - u) / mp.sqrt(2))
            p = [cdf(k + 1) - cdf(k) for k in range(-80, 6)]
            return -mp.fsum(q * mp.log(q, 2) for q in p if q > 0)
        mean = mp.fsum(entropy(mp.mpf(i) / 16) for i in range(16)) / 16  # the trapezoid rule is spectral on a period
    assert float(mean) == pytest.approx(2.5442072669730935, abs=1e-12)
    assert th.phase_mean_entropy(lambda z: special.erf(2.0 ** np.asarray(z) / math.sqrt(2))).mean() == pytest.approx(float(mean), abs=1e-11)


def test_phase_ripple_of_the_gaussian():
    ripple = th.phase_mean_entropy(lambda z: special.erf(2.0 ** np.asarray(z) / math.sqrt(2)), 512)
    assert ripple.min() == pytest.approx(2.5422, abs=2e-4) and ripple.max() == pytest.approx(2.5462, abs=2e-4)


# ---------------------------------------------------------------- T-B

@pytest.mark.parametrize("alpha, value", [(0.5, 4.0237), (1.0, 3.2390), (1.5, 2.9120), (1.8, 2.8031), (2.0, 2.7504)])
def test_log_variance_bound(alpha, value):
    bound = th.log_variance_bound(alpha)
    assert bound == pytest.approx(value, abs=5e-5)
    dithered = np.mean([th.stable_exponent_entropy(alpha, 2.0 ** (i / 8)) for i in range(8)])
    assert dithered < bound < dithered + 0.25


@settings(max_examples=25, deadline=None)
@given(st.floats(0.1, 2.0), st.floats(1.0, 2.0))
def test_bound_holds_everywhere(alpha, scale):
    assert th.stable_exponent_entropy(alpha, scale) < th.log_variance_bound(alpha)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.5, 2.0])
def test_log_variance_from_the_moment_function_and_from_samples(alpha):
    with mp.workdps(40):
        moment = lambda s: mp.log(mp.mpf(2) ** s * mp.gamma((1 + s) / 2) * mp.gamma(1 - s / alpha) / (mp.sqrt(mp.pi) * mp.gamma(1 - s / 2)))
        variance = mp.diff(moment, 0, 2) / mp.log(2) ** 2
    assert th.log2_abs_variance(alpha) == pytest.approx(float(variance), rel=1e-12)
    assert th.sample_log2_abs_stable(alpha, 400_000, np.random.default_rng(1)).var() == pytest.approx(float(variance), rel=0.02)


# ---------------------------------------------------------------- E4M3

def test_magnitudes_are_those_of_the_format():
    stored = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert (th.e4m3_magnitudes() == stored).all()


@pytest.mark.parametrize("std", [1e-3, 0.01, 0.04, 1.0, 77.0, 1000.0])
def test_gaussian_fp8_entropy_against_rounded_samples(std):
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(1_000_000, generator=g) * std).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    exponent, byte = th.gaussian_fp8_entropy(std)
    assert exponent == pytest.approx(th.entropy_bits(np.bincount((x >> 3) & 15)), abs=3e-3)
    assert byte == pytest.approx(th.entropy_bits(np.bincount(x)), abs=3e-3)


def test_gaussian_fp8_limits():
    assert th.gaussian_fp8_entropy(0.01)[0] == pytest.approx(0.610, abs=5e-4)
    assert th.gaussian_fp8_entropy(1e-30) == (0.0, 1.0) and th.gaussian_fp8_entropy(1e30) == pytest.approx((0.0, 1.0), abs=1e-9)


@pytest.mark.parametrize("scaling, scale_shape", [("block", (2, 3)), ("row", (130, 1)), ("raw", (1, 1))])
def test_fp8_casts(scaling, scale_shape):
    w = torch.randn(130, 260, generator=torch.Generator().manual_seed(1))
    w[5] = 0
    fp8 = th.to_fp8(w, scaling)
    assert fp8.values.dtype == torch.float8_e4m3fn and tuple(fp8.scale.shape) == scale_shape
    back = th.from_fp8(fp8)
    assert (back - w).norm() / w.norm() < 0.05 and torch.isfinite(back).all() and not back[5].any()
    if scaling == "row": assert (fp8.values.float().abs().amax(1)[torch.arange(130) != 5] == 448).all()
    if scaling == "block": assert fp8.values.float()[:128, :128].abs().max() == 448 == fp8.values.float()[128:, 256:].abs().max()


def test_fp8_cast_saturates_and_refuses():
    assert th.to_fp8(torch.full((2, 2), 1e6), "raw").values.float().eq(448).all()
    with pytest.raises(ValueError, match="scaling='tile'"): th.to_fp8(torch.ones(2, 2), "tile")
    with pytest.raises(ValueError, match="NaN or infinity"): th.to_fp8(torch.tensor([[float("nan")]]))
    with pytest.raises(ValueError, match="expected a matrix"): th.to_fp8(torch.ones(3))


# ---------------------------------------------------------------- sizes, throughput, tail estimates

def test_size_formula_of_the_notes():
    assert th.bits_per_weight(2.7183) == pytest.approx(6.8935, abs=5e-5)
    assert th.bits_per_weight(2.7183, 16, 256) == pytest.approx(6.8086, abs=5e-5)
    assert th.bits_per_weight(2.7183, 16, 256, gaps=False) == pytest.approx(6.7236, abs=5e-5)


def test_brute_force_by_hand():
    assert th.brute_force_mean_length([4, 2, 1, 1], 3) == 1.75 and th.brute_force_mean_length([4, 2, 1, 1], 2) == 2.0
    assert th.brute_force_mean_length([1, 1, 1], 2) == pytest.approx(5 / 3) and th.brute_force_mean_length([7], 3) == 1.0
    assert th.brute_force_mean_length([1] * 5, 2) == math.inf


def test_deepseek_batches():
    t = th.throughput_gain(640, 623, 530 / 623, 17 / 2, bandwidth=1.0, whole=True)
    assert (t.batch0, t.batch1) == (2, 12) and t.gain == 6.0
    assert th.throughput_gain(640, 623, 530 / 623, 17 / 2, bandwidth=1.0).batch1 == pytest.approx(110 / 8.5)


def test_throughput_needs_room_and_batches():
    assert th.throughput_gain(100, 10, 0.86, 1, per_item=1.0, decode=5.0).gain < 1      # compute bound: only the decode is felt
    assert th.throughput_gain(100, 95, 0.86, 1, bandwidth=1.0).gain == pytest.approx((100 - 0.86 * 95) / 5)
    assert th.throughput_gain(100, 95, 0.86, 1, bandwidth=1.0, decode=10.0, max_batch=5).gain < 1  # equal batch
    with pytest.raises(ValueError, match="budget=10"): th.throughput_gain(10, 10, 0.86, 1, bandwidth=1.0)
    with pytest.raises(ValueError, match="takes time"): th.throughput_gain(10, 1, 0.86, 1)


def test_tail_estimates_recover_the_index():
    rng = np.random.default_rng(0)
    pareto = rng.pareto(1.5, 400_000) + 1
    assert th.hill_alpha(pareto, 0.05) == pytest.approx(1.5, abs=0.03)
    for alpha in (0.8, 1.4, 1.9):
        x = np.exp2(np.minimum(th.sample_log2_abs_stable(alpha, 300_000, rng), 900)) * rng.choice([-1, 1], 300_000)
        assert th.mcculloch_alpha(x) == pytest.approx(alpha, abs=0.03)
    gauss = rng.normal(size=300_000)
    assert th.mcculloch_alpha(gauss) > 1.97 and th.hill_alpha(gauss) > 5
    with pytest.raises(ValueError, match="at least ten"): th.hill_alpha(gauss[:100])
    with pytest.raises(ValueError, match="quartiles"): th.mcculloch_alpha(np.ones(10))
    with pytest.raises(ValueError, match="distinct"): th.hill_alpha(np.ones(10_000))


# ---------------------------------------------------------------- invalid arguments

@pytest.mark.parametrize("function", [th.two_sided_geometric_entropy, th.paper_bounds, th.stable_exponent_entropy, th.log_variance_bound])
@pytest.mark.parametrize("alpha", [0, -1, 2.0000001, float("nan"), float("inf")])
def test_alpha_outside_its_range(function, alpha):
    with pytest.raises(ValueError, match="alpha="): function(alpha)


@pytest.mark.parametrize("std", [0, -1.0, float("nan"), float("inf")])
def test_bad_std(std):
    with pytest.raises(ValueError, match="std="): th.gaussian_fp8_entropy(std)


def test_bad_entropy_arguments():
    with pytest.raises(ValueError, match="scale="): th.stable_exponent_entropy(1.0, scale=0)
    with pytest.raises(ValueError, match="scale="): th.stable_exponent_entropy(1.0, scale=float("nan"), method="mc")
    with pytest.raises(ValueError, match="method='cf'"): th.stable_exponent_entropy(1.0, method="cf")
    with pytest.raises(ValueError, match="n=0"): th.stable_exponent_entropy(1.0, method="mc", n=0)
