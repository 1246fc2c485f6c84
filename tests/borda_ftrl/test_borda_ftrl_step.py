"The FTRL step, the estimators and the schedule against brute force, closed forms and the statements of the proof."
import json, math
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.optimize import brentq
from scipy.special import expit
from iclr26.borda_ftrl import (HybridFTRLBorda, estimate_losses, hybrid_entropy, hybrid_ftrl_step, loss_moments, pair_probabilities, shannon_ftrl_step, shifted_borda, stability_term,
                               borda_not_condorcet, entropy_bound, follow, PreferenceEnv, preferences_from_scores)


def random_preferences(K, rng):
    P = np.triu(rng.random((K, K)), 1)
    return P + np.tril(1 - P.T, -1) + np.eye(K) / 2


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 200), st.floats(-3, 8), st.floats(-3, 6), st.integers(0, 10**6), st.one_of(st.none(), st.floats(-1e12, 1e12)))
def test_step_sums_to_one(K, scale, log_beta, seed, lam0):
    L = np.random.default_rng(seed).uniform(-1, 1, K) * 10**scale
    step = hybrid_ftrl_step(L, 10**log_beta, lam0=lam0)
    assert abs(step.q.sum() - 1) <= 1e-12 and (step.q >= 0).all() and step.iterations <= 100
    order = np.argsort(L)
    assert (np.diff(step.q[order]) <= 1e-15).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 20), st.integers(0, 10**6), st.floats(-1, 2))
def test_step_matches_brentq_and_is_shift_invariant(K, seed, log_beta):
    beta, L = 10**log_beta, np.random.default_rng(seed).normal(size=K) * 5
    step = hybrid_ftrl_step(L, beta)
    root = brentq(lambda m: expit((m - L) / beta).sum() - 1, L.min() - beta * math.log(K + 1) - 1e-9, L.max() - beta * math.log(K - 1) + 1e-9 if K > 2 else L.max() + 1e-9, xtol=1e-13)
    assert step.q == pytest.approx(expit((root - L) / beta), abs=1e-9)
    assert step.q == pytest.approx(expit((step.lam - L) / beta), abs=1e-11)
    shifted = hybrid_ftrl_step(L + 1e6, beta)
    assert shifted.q == pytest.approx(step.q, abs=1e-7 / beta)


def test_step_closed_forms():
    for gap, beta in ((0, 1), (3, 2), (40, .5), (-7, 3)):
        assert hybrid_ftrl_step([0, gap], beta).q[0] == pytest.approx(1 / (1 + math.exp(-gap / (2 * beta))), abs=1e-13)
    assert hybrid_ftrl_step(np.full(7, 3.3), 2.).q == pytest.approx(np.full(7, 1 / 7), abs=1e-14)
    assert shannon_ftrl_step([0, 2], 2.) == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e)])
    huge = hybrid_ftrl_step([1e8, 1e8 + 1e-3, 2e8], 1e-3)
    assert huge.q[0] == pytest.approx(1 / (1 + math.exp(-.5)), abs=1e-4)


def test_warm_start_changes_nothing_but_the_work():
    L = np.random.default_rng(0).uniform(0, 30, 10)
    cold = hybrid_ftrl_step(L, 4.)
    for lam0 in (cold.lam, cold.lam + .1, -1e300, 1e300, math.inf, math.nan):
        assert hybrid_ftrl_step(L, 4., lam0=lam0).q == pytest.approx(cold.q, abs=1e-12)
    assert hybrid_ftrl_step(L, 4., lam0=cold.lam).iterations == 1


@pytest.mark.parametrize("call", [lambda: hybrid_ftrl_step([1.], 1), lambda: hybrid_ftrl_step([1, math.nan], 1), lambda: hybrid_ftrl_step([1, math.inf], 1), lambda: hybrid_ftrl_step([1, 2], 0),
                                  lambda: hybrid_ftrl_step([1, 2], -1), lambda: hybrid_ftrl_step([1, 2], math.inf), lambda: hybrid_ftrl_step([1, 2], math.nan), lambda: hybrid_ftrl_step([[1, 2]], 1),
                                  lambda: shannon_ftrl_step([1, math.nan], 1), lambda: shannon_ftrl_step([1, 2], 0), lambda: hybrid_entropy([.5, .6]), lambda: hybrid_entropy([1.5, -.5]),
                                  lambda: stability_term([.5, .5], [1, 2, 3], 1), lambda: stability_term([.5, .5], [1, math.nan], 1), lambda: pair_probabilities([.5, .5], 1.5),
                                  lambda: pair_probabilities([.5, .5], .1, "both"), lambda: estimate_losses(0, 2, 1, .1, 2), lambda: estimate_losses(0, 1, 2, .1, 2), lambda: estimate_losses(0, 1, 1, 0, 2),
                                  lambda: estimate_losses(0, 1, 1, .5, 2, "best"), lambda: estimate_losses(0, 1, 1, .5, 1), lambda: loss_moments(np.full((2, 2), .5), [1., 0.], 0.),
                                  lambda: loss_moments(np.full((3, 3), .5), [.5, .5], .1)])
def test_bad_input(call):
    with pytest.raises(ValueError): call()


def test_entropy_values():
    assert hybrid_entropy([1, 0, 0]) == 0 and hybrid_entropy([.5, .5]) == pytest.approx(2 * math.log(2))
    assert hybrid_entropy([1 / 3] * 3) == pytest.approx(-3 * (math.log(1 / 3) / 3 + 2 / 3 * math.log(2 / 3)))
    rng = np.random.default_rng(0)
    for _ in range(300):
        q = rng.dirichlet(np.ones(rng.integers(2, 15)) * .3)
        assert 0 <= hybrid_entropy(q) <= entropy_bound(q) + 1e-12


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 5), st.integers(0, 10**6), st.floats(.01, 1), st.sampled_from(["joint", "product"]), st.sampled_from(["symmetric", "centred", "raw"]))
def test_estimators_are_unbiased_and_bounded(K, seed, gamma, exploration, estimator):
    rng = np.random.default_rng(seed)
    P, q = random_preferences(K, rng), rng.dirichlet(np.ones(K))
    Pr = pair_probabilities(q, gamma, exploration)
    assert Pr.sum() == pytest.approx(1) and np.allclose(Pr, Pr.T)
    mean, second = np.zeros(K), np.zeros(K)
    for x in range(K):
        for y in range(K):
            for o in (0, 1):
                l = estimate_losses(x, y, o, Pr[x, y], K, estimator)
                w = Pr[x, y] * (P[x, y] if o else 1 - P[x, y])
                mean += w * l; second += w * l**2
    m = loss_moments(P, q, gamma, exploration=exploration, estimator=estimator)
    assert m.mean == pytest.approx(mean, abs=1e-12) and m.second == pytest.approx(second, rel=1e-12)
    assert m.mean == pytest.approx(-(shifted_borda(P) - (0 if estimator == "raw" else .5)), abs=1e-12)
    c = {"symmetric": 1 / 8, "centred": 1 / 4, "raw": 1}[estimator]
    if exploration == "joint": assert (m.second <= c * K / gamma * (1 + 1e-9)).all()


def test_draws_keep_estimates_unbiased_and_roles_swap():
    assert estimate_losses(1, 0, 1, .2, 3).tolist() == estimate_losses(0, 1, 0, .2, 3).tolist() == pytest.approx([.5 / 1.2, -.5 / 1.2, 0])
    assert not estimate_losses(2, 0, .5, .1, 3).any() and not estimate_losses(1, 1, 1, .1, 3).any()
    half = (estimate_losses(0, 1, 1, .2, 3, "raw") + estimate_losses(0, 1, 0, .2, 3, "raw")) / 2
    assert estimate_losses(0, 1, .5, .2, 3, "raw") == pytest.approx(half)
    assert (estimate_losses(1, 0, 1, .2, 3, "raw") != estimate_losses(0, 1, 0, .2, 3, "raw")).any()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.floats(-1, 3))
def test_stability_term(seed, log_beta):
    rng = np.random.default_rng(seed); beta = 10**log_beta
    q = rng.dirichlet(np.ones(4)); q = np.clip(q, 1e-6, None); q /= q.sum()
    l = rng.uniform(-1, 1, 4) * beta
    theta = np.log(q / (1 - q))
    direct = beta * (np.logaddexp(0, theta - l / beta) - np.logaddexp(0, theta) + l / beta * q)
    stab = stability_term(q, l, beta)
    assert stab == pytest.approx(direct, abs=1e-9 * beta)
    assert (stab >= 0).all() and (stab <= np.exp(np.abs(l) / beta) / 2 * q * (1 - q) * l**2 / beta * (1 + 1e-9) + 1e-12 * beta).all()


def test_stability_at_the_corners_is_finite():
    assert stability_term([1., 0.], [5., -2000.], 1.) == pytest.approx([0, 0], abs=1e-12)
    assert np.isfinite(stability_term([.5, .5], [1000., -1000.], .5)).all()
    s = stability_term([.5, .5], [-1000., 0], 1.)[0]
    assert s == pytest.approx(np.logaddexp(0, 1000) - math.log(2) - 500)


def test_joint_holds_where_product_fails():
    coin, K, gamma = np.full((4, 4), .5), 4, .01
    for e in (1e-2, 1e-4, 1e-6):
        q = np.array([1 - 3 * e, e, e, e])
        joint, product = ((q * (1 - q) * loss_moments(coin, q, gamma, exploration=x, estimator="raw").second).sum() for x in ("joint", "product"))
        assert joint <= K * 3 * e / gamma < product
        if e == 1e-2: assert joint == pytest.approx(4.204, abs=1e-3) and product == pytest.approx(18.4, abs=.05)


@pytest.mark.parametrize("exploration", ["joint", "product"])
@pytest.mark.parametrize("estimator", ["symmetric", "centred", "raw"])
@pytest.mark.parametrize("schedule", ["spb", "ito"])
def test_path_certificate(exploration, estimator, schedule):
    env = PreferenceEnv.alternating([preferences_from_scores([.4, 0, 0, 0]), preferences_from_scores([0, .4, 0, 0])])
    c = follow(env, HybridFTRLBorda(4, exploration=exploration, estimator=estimator, schedule=schedule), 600, seed=3)
    assert (c.left <= c.right + 1e-6).all() and c.rounds == 600
    if exploration == "joint" and schedule == "spb": assert c.largest_step <= 1 + 1e-12 and c.growth <= 1.15
    with pytest.raises(ValueError): follow(env, HybridFTRLBorda(4, regularizer="shannon"), 10)


def test_schedule_by_hand():
    "Two rounds of the default schedule, recomputed from the formulas with scripted uniforms."
    K, c, u = 3, 1 / 8, 1 / 4
    a = HybridFTRLBorda(K)
    beta = max(1, 2 * u * K)
    assert a.beta_ == beta and a.probabilities_ == pytest.approx([1 / 3] * 3) and (a.stability_constant_, a.bias_constant_) == (c, u)
    L, q = np.zeros(K), np.full(K, 1 / 3)
    for uniforms, o in (((.99, .1, .9), 1), ((.99, .5, .2), 0), ((.0, .0, .99), .5), ((.99, .4, .99), 1)):
        b = 1 - q.max()
        gamma = min(.5, math.sqrt(c * K * b / beta) + u * K / beta)
        assert a.exploration_rate_ == pytest.approx(gamma, abs=1e-12) and a.beta_ == pytest.approx(beta, abs=1e-12)
        p = np.full(K, 1 / K) if uniforms[0] < gamma else q
        cdf = np.cumsum(p)
        x, y = (int(np.argmax(cdf > v * cdf[-1])) for v in uniforms[1:])
        assert a.select(uniforms) == (x, y)
        assert a.pair_probabilities_ == pytest.approx((1 - gamma) * np.outer(q, q) + gamma / K**2, abs=1e-12)
        L = L + estimate_losses(x, y, o, (1 - gamma) * q[x] * q[y] + gamma / K**2, K)
        A = hybrid_entropy(q)
        a.update(o)
        beta += (2 * math.sqrt(c * K * b / beta) + u * K / beta) / A
        q = hybrid_ftrl_step(L, beta).q
        assert a.losses_ == pytest.approx(L, abs=1e-12) and a.probabilities_ == pytest.approx(q, abs=1e-10)
    assert a.recommend() == int(L.argmin())


def test_ito_schedule_by_hand():
    K, (c1, c2), u = 3, (.6, .3), 1 / 4
    a = HybridFTRLBorda(K, schedule="ito", seed=0)
    betas, b_sum, weighted, w = [a.beta_], 0, 0, None
    for _ in range(6):
        q = a.probabilities_; b = 1 - q.max(); b_sum += b
        if w is not None: weighted += w * hybrid_entropy(q)
        assert a.exploration_rate_ == pytest.approx(min(.5, c1 / 4 * b / (c1 + b_sum ** (1 / 3)) + u * K / a.beta_))
        w = 4 * (c1 + b_sum ** (1 / 3)) / c1
        want = a.beta_ + c2 * w / math.sqrt(c2 + weighted)
        a.select(); a.update(1)
        assert a.beta_ == pytest.approx(want)
