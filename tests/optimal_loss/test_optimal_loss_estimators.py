"""Estimators against brute force and quadrature; invariances; weights, labels; faults before work; determinism; memory."""
import math
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.datasets import load_digits

from iclr26.optimal_loss import atoms_optimal_loss, gaussian_optimal_loss, optimal_loss, posterior, subset_estimates, uniform_optimal_loss
from iclr26.optimal_loss.estimators import draw_sources

F64 = torch.float64
G = lambda seed=0: torch.Generator().manual_seed(seed)
randn = lambda *shape, seed=0, dtype=F64: torch.randn(*shape, generator=G(seed), dtype=dtype)
DIGITS = torch.from_numpy(load_digits().data).float() / 8 - 1
SUBSET = ("snis", "dol", "cdol", "knn")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


# One batch -----------------------------------------------------------------------------------------------------------------

def brute(sources, noise, subset, sigma, C, self_index, log_weights):
    "The definition, in float64, without any trick: kernels of equation (11)."
    out = []
    for m, (x, e) in enumerate(zip(sources, noise)):
        xm = x + sigma * e
        rows, logs = [], []
        if C < math.inf: rows.append(x); logs.append(-(xm - x).square().sum() / (2 * sigma ** 2) - math.log(C))
        for l, y in enumerate(subset):
            if self_index is not None and self_index[m] == l: continue
            rows.append(y); logs.append(-(xm - y).square().sum() / (2 * sigma ** 2) + (0 if log_weights is None else log_weights[l]))
        p, y = torch.softmax(torch.stack(logs), 0), torch.stack(rows)
        xhat = p @ y
        out.append((xhat, xhat.square().sum(), p @ (y - xhat).square().sum(1), .5 * p @ (y - x).square().sum(1), (xhat - x).square().sum()))
    return [torch.stack(v) for v in zip(*out)]


@pytest.mark.parametrize("C", [1., 7.5, .5, math.inf])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_subset_estimates_match_the_definition(C, weighted, own):
    subset, sources, noise = randn(14, 3), randn(6, 3, seed=1), randn(6, 3, seed=2)
    index = torch.tensor([3, -1, 0, 13, 5, -1]) if own else None
    if own: sources = torch.where(index[:, None] >= 0, subset[index], sources)
    logw = randn(14, seed=3) if weighted else None
    levels = [.05, .4, 1., 3., 40.]
    got = subset_estimates(sources, noise, subset, levels, C=C, self_index=index, log_weights=logw)
    for k, s in enumerate(levels):
        for a, b in zip([v[k] for v in got], brute(sources, noise, subset, s, C, index, logw)): assert torch.allclose(a, b, atol=1e-9), s
    assert torch.allclose(got.pair, (got.condvar + got.mse) / 2, atol=1e-9) and (got.condvar >= 0).all()


def test_limits_of_C_and_empty_subset():
    sub, x, e = randn(30, 4), randn(5, 4, seed=1), randn(5, 4, seed=2)
    a, b = subset_estimates(x, e, sub, [1., 3.], C=1e14), subset_estimates(x, e, sub, [1., 3.], C=math.inf)
    assert all(torch.allclose(u, v, atol=1e-9) for u, v in zip(a, b))
    lone = subset_estimates(x, e, sub[:0], [1.], C=3.)
    assert torch.equal(lone.xhat[0], x) and (lone.mse == 0).all() and (lone.condvar == 0).all()


def test_far_and_near_candidates():
    "Huge logits that need the running maximum, candidates that underflow, and duplicates of the source."
    x, e = torch.zeros(1, 2, dtype=F64), torch.tensor([[-30., 0.]], dtype=F64)
    sub = torch.tensor([[-29., 0.], [5e3, 0.], [0., 0.]], dtype=F64)
    for C in (1., math.inf):
        got = subset_estimates(x, e, sub, [1e-3, 1., 100.], C=C)
        for k, s in enumerate((1e-3, 1., 100.)):
            for a, b in zip([v[k] for v in got], brute(x, e, sub, s, C, None, None)): assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
    single = subset_estimates(x.float(), e.float(), sub.float(), [1e-3, 1., 100.])
    assert all(torch.isfinite(v).all() for v in single)


@pytest.mark.parametrize("change", [dict(C=0.), dict(C=-1.), dict(C=math.nan), dict(noise=torch.zeros(2, 4)), dict(subset=torch.zeros(3, 4)), dict(self_index=torch.tensor([0])), dict(self_index=torch.tensor([0, 3])),
                                    dict(log_weights=torch.zeros(2)), dict(sigmas=[]), dict(sigmas=[1., 1.]), dict(sigmas=[0., 1.]), dict(sigmas=[2., 1.]), dict(sigmas=[math.nan]), dict(sigmas=[[1.]]),
                                    dict(subset=torch.zeros(0, 3), C=math.inf), dict(subset=torch.zeros(1, 3), C=math.inf, self_index=torch.tensor([-1, 0])), dict(C=math.inf, log_weights=torch.full((3,), -math.inf))])
def test_subset_estimates_refuses(change):
    args = dict(sources=torch.zeros(2, 3), noise=torch.zeros(2, 3), subset=torch.zeros(3, 3), sigmas=[1.]) | change
    with pytest.raises(ValueError): subset_estimates(args.pop("sources"), args.pop("noise"), args.pop("subset"), args.pop("sigmas"), **args)


def test_float32_keeps_the_digits_of_small_losses():
    eps = randn(300, 64)
    a, b = (subset_estimates(DIGITS[:300].to(t), eps.to(t), DIGITS.to(t), torch.logspace(-.9, 1, 12), self_index=torch.arange(300)) for t in (torch.float32, F64))
    for form in ("condvar", "pair"):
        u, v = getattr(a, form).mean(1).double(), getattr(b, form).mean(1)
        seen = v > 1e-12 * 18.77
        assert seen.sum() > 8 and ((u / v - 1).abs()[seen] < 1e-4).all()


# The curve against truth -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("points, probs", [([-1., 1.], None), ([-1., 0., 1.], None), ([0., 1., 4.], [.5, .4, .1])])
@pytest.mark.parametrize("form", ["condvar", "pair", "mse", "a_minus_b"])
def test_full_against_quadrature(points, probs, form):
    levels = [.6, 1., 2.5]
    c = optimal_loss(torch.tensor(points, dtype=F64)[:, None], levels, n_noise=8000, form=form, weights=probs, generator=G(3))
    for v, e, s in zip(c.value, c.stderr, levels): assert abs(v - atoms_optimal_loss(points, probs, s)) < 3.5 * e
    assert c.method == "full" and math.isclose(c.tr_cov, np.cov(points, aweights=probs, bias=True) if probs else np.var(points), rel_tol=1e-9)


def test_two_quadratures():
    assert abs(atoms_optimal_loss([-1, 1]) - .44959951) < 1e-7 and abs(uniform_optimal_loss(.1) - .00909680) < 1e-7
    fine = np.linspace(-1, 1, 4001)
    assert abs(atoms_optimal_loss(fine, sigma=.3, nodes=3001) - uniform_optimal_loss(.3)) < 2e-4
    assert abs(uniform_optimal_loss(50.) - 1 / 3) < 1e-3 and abs(atoms_optimal_loss([0, 3], [.9, .1], 1e3) - .09 * 9) < 1e-5


def test_gaussian_population_at_large_sigma():
    x = randn(4000, 3) * torch.tensor([2., 1., .5], dtype=F64)
    lam = torch.linalg.eigvalsh(torch.cov(x.T))
    c = optimal_loss(x, [1., 3.], dtype=F64, n_noise=4000)
    assert ((c.value / gaussian_optimal_loss(lam, c.sigma) - 1).abs() < .03).all()


def test_information_is_log_n_and_ignores_duplicates():
    x = DIGITS[:100]
    a, b = (optimal_loss(v, torch.logspace(-1.2, 2, 60), n_noise=4000, form="condvar") for v in (x, x.repeat(3, 1)))
    assert abs(a.information() / math.log(100) - 1) < .015 and abs(b.information() / math.log(100) - 1) < .015
    assert (a.n_distinct, b.n_distinct, b.n) == (100, 100, 300) and math.isclose(a.tr_cov, b.tr_cov, rel_tol=1e-6)


def test_exact_invariances_with_common_noise():
    x, levels = randn(60, 3), torch.tensor([.3, 1., 4.], dtype=F64)
    base = optimal_loss(x, levels, dtype=F64)
    assert torch.allclose(optimal_loss(7 * x, 7 * levels, dtype=F64).value, 49 * base.value, rtol=1e-10)
    assert torch.allclose(optimal_loss(x + 100, levels, dtype=F64).value, base.value, rtol=1e-8)
    far = optimal_loss(x, [1e5], dtype=F64, n_noise=600)
    assert math.isclose(float(far.value), base.tr_cov, rel_tol=1e-3) and math.isclose(base.tr_cov, float(x.var(0, unbiased=False).sum()), rel_tol=1e-12)
    assert math.isclose(base.A, float(x.square().sum(1).mean()), rel_tol=1e-12)


def test_weights_are_repeated_rows():
    x, w = randn(12, 2), [1., 2, 3, 1, 1, 2, 1, 1, 4, 1, 1, 0]
    repeated = x.repeat_interleave(torch.tensor([int(v) for v in w]), 0)
    a, b = optimal_loss(x, [.4, 1., 3.], weights=w, n_noise=6000, generator=G(1)), optimal_loss(repeated, [.4, 1., 3.], n_noise=6000, generator=G(2))
    assert ((a.value - b.value).abs() < 3.5 * (a.stderr ** 2 + b.stderr ** 2).sqrt()).all()
    assert math.isclose(a.tr_cov, b.tr_cov, rel_tol=1e-9) and math.isclose(a.A, b.A, rel_tol=1e-9)


def test_labels_average_class_curves():
    x, labels = randn(90, 2) + torch.tensor([[0., 0.], [5., 0.], [0., 9.]], dtype=F64).repeat(30, 1), torch.arange(90) % 3
    c = optimal_loss(x, [.5, 1., 1e4], labels=labels, n_noise=3000)
    parts = [optimal_loss(x[labels == k], [.5, 1., 1e4], n_noise=3000, generator=G(k)) for k in range(3)]
    want = sum(p.value for p in parts) / 3
    assert ((c.value - want).abs() < 4 * (c.stderr ** 2 + sum(p.stderr ** 2 for p in parts) / 9).sqrt() + 1e-3).all()
    assert math.isclose(c.tr_cov, sum(p.tr_cov for p in parts) / 3, rel_tol=1e-9) and math.isclose(c.A, float(x.square().sum(1).mean()), rel_tol=1e-9)
    lonely = optimal_loss(x, [1.], labels=torch.tensor([7] + [0] * 89), n_noise=2000)
    rest = optimal_loss(x[1:], [1.], n_noise=2000)
    assert abs(lonely.value - rest.value * 89 / 90) < 4 * (lonely.stderr + rest.stderr)


def test_one_point_a_class_has_nothing_to_lose():
    c = optimal_loss(randn(5, 2), [.1, 1.], labels=[0, 1, 2, 3, 4])
    assert (c.value == 0).all() and c.tr_cov == 0 and c(.5) == 0


# Subset methods ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("method", SUBSET)
def test_whole_set_as_subset_is_the_full_estimator(method):
    x = randn(40, 3)
    more = dict(C=1.0) if method == "cdol" else dict(neighbors=7) if method == "knn" else {}
    full = optimal_loss(x, [.2, .7, 2.], form="a_minus_b", dtype=F64, generator=G(4))
    part = optimal_loss(x, [.2, .7, 2.], method=method, form="cross" if method == "knn" else "a_minus_b", subset=40, dtype=F64, generator=G(4), **more)
    assert torch.allclose(full.value, part.value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("weights", [False, True])
def test_knn_weights_agree_with_full_too(weights):
    x = randn(30, 2)
    w = torch.rand(30, generator=G(1)) if weights else None
    for M in (30, 64):
        a = optimal_loss(x, [.3, 1.], method="knn", subset=30, neighbors=5, form="mse", weights=w, n_noise=M, dtype=F64)
        b = optimal_loss(x, [.3, 1.], form="mse", weights=w, n_noise=M, dtype=F64)
        assert torch.allclose(a.value, b.value, rtol=1e-9)


def test_ordering_of_subset_errors_on_digits():
    "DOL far too low, SNIS far too high, cDOL between, k-NN within a tenth (section 2.4)."
    levels = [.5, .7]
    truth = optimal_loss(DIGITS, levels, n_repeats=3).value
    error = {m: optimal_loss(DIGITS, levels, method=m, subset=180, n_noise=2048).value / truth - 1 for m in SUBSET}
    assert (error["dol"] < -.5).all() and (error["snis"] > .2).all() and (error["dol"] < error["cdol"]).all() and (error["cdol"] < error["snis"]).all() and (error["knn"].abs() < .1).all()


def test_snis_reports_a_bracket():
    c = optimal_loss(DIGITS[:300], [1., 3.], method="snis", subset=100, n_noise=400)
    assert torch.equal(c.lo, c.value) and (c.hi > c.lo).all() and c.form == "a_minus_b" and c.meta["C"] is None
    d = optimal_loss(DIGITS[:300], [1., 3.], method="cdol", subset=100, n_noise=400)
    assert torch.allclose(d.lo, d.value - 1.96 * d.stderr) and d.meta["C"] == 12.0 and (d.stderr > 0).all()


def test_standard_errors_are_honest():
    "Spread of independent estimates against the reported error: within a factor of two."
    for method, more in (("full", {}), ("cdol", dict(subset=60)), ("knn", dict(subset=60, neighbors=10))):
        runs = [optimal_loss(DIGITS[:300], [.8], method=method, n_noise=160, generator=G(s), **more) for s in range(24)]
        spread, reported = torch.stack([r.value for r in runs]).std(), torch.stack([r.stderr for r in runs]).mean()
        assert .5 < float(spread / reported) < 2, method


# Promises ----------------------------------------------------------------------------------------------------------------------

def test_deterministic_and_without_side_effects():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    a, b = optimal_loss(DIGITS[:200], [.5, 2.], method="cdol"), optimal_loss(DIGITS[:200], [.5, 2.], method="cdol")
    assert torch.equal(a.value, b.value) and torch.equal(a.stderr, b.stderr) and torch.equal(before, torch.get_rng_state())
    assert not torch.equal(a.value, optimal_loss(DIGITS[:200], [.5, 2.], method="cdol", generator=G(1)).value)


@pytest.mark.parametrize("batch", [1, 7, 64, 10_000])
def test_batch_size_changes_nothing_but_rounding(batch):
    a, b = optimal_loss(DIGITS[:150], [.5, 2.], dtype=F64), optimal_loss(DIGITS[:150], [.5, 2.], dtype=F64, batch=batch)
    assert torch.allclose(a.value, b.value, rtol=1e-10)
    assert torch.allclose(a.value, optimal_loss(DIGITS[:150], [.5, 2.], dtype=F64, max_bytes=400_000).value, rtol=1e-10)


def test_shapes_and_kinds_of_data():
    a = optimal_loss(DIGITS[:50], [1.])
    for data in (DIGITS[:50].view(50, 1, 8, 8), DIGITS[:50].numpy(), DIGITS[:50].double(), np.asfortranarray(DIGITS[:50].numpy())):
        assert torch.allclose(optimal_loss(data, np.array([1.])).value, a.value, rtol=1e-5)
    frozen = DIGITS[:50].numpy().copy(); frozen.flags.writeable = False
    assert torch.allclose(optimal_loss(frozen, [1.]).value, a.value) and a.value.dtype == F64 and a.dim == 64


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 130), st.integers(0, 5))
def test_stratified_draws(n, m, seed):
    count = torch.bincount(draw_sources(n, m, G(seed)), minlength=n)
    assert count.sum() == m and count.max() - count.min() <= 1 and count.min() == m // n


@pytest.mark.parametrize("kwargs, error", [
    (dict(data=torch.zeros(5, 2, dtype=torch.int32)), TypeError), (dict(data=np.zeros((5, 2), np.uint8)), TypeError), (dict(data=torch.zeros(1, 2)), ValueError), (dict(data=torch.zeros(5, 0)), ValueError),
    (dict(data=torch.tensor([[0.], [math.inf]])), ValueError), (dict(data=iter([torch.zeros(3, 2)])), TypeError), (dict(data=3), TypeError), (dict(sigmas=[]), ValueError), (dict(sigmas=[1., .5]), ValueError),
    (dict(sigmas=[-1.]), ValueError), (dict(method="exact"), ValueError), (dict(form="best"), ValueError), (dict(form="cross"), ValueError), (dict(method="cdol", C=0.), ValueError),
    (dict(method="cdol", C=math.nan), ValueError), (dict(method="dol", C=2.), ValueError), (dict(method="dol", subset=1), ValueError), (dict(method="dol", subset=6), ValueError),
    (dict(method="knn", subset=4, neighbors=3), ValueError), (dict(method="knn", subset=4, neighbors=-1), ValueError), (dict(n_noise=0), ValueError), (dict(n_repeats=0), ValueError),
    (dict(weights=[1., 1.]), ValueError), (dict(weights=[0.] * 5), ValueError), (dict(weights=[-1., 1, 1, 1, 1]), ValueError), (dict(labels=[0, 1]), ValueError), (dict(labels=[.5] * 5), ValueError),
    (dict(max_bytes=100), ValueError), (dict(dtype=torch.float16), ValueError), (dict(batch=0), ValueError)])
def test_optimal_loss_refuses(kwargs, error):
    args = dict(data=torch.arange(10.).view(5, 2), sigmas=[1.]) | kwargs
    with pytest.raises(error): optimal_loss(args.pop("data"), args.pop("sigmas"), **args)


def test_too_little_memory_says_how_much():
    with pytest.raises(ValueError, match=r"at least (\d+)") as caught: optimal_loss(DIGITS, torch.logspace(-1, 1, 16), max_bytes=5000)
    need = int(str(caught.value).split("at least ")[1].split()[0])
    assert torch.isfinite(optimal_loss(DIGITS[:40], torch.logspace(-1, 1, 16), max_bytes=need).value).all()


def test_working_memory_is_bounded():
    "30 000 points of 784 coordinates: the process stays below data + max_bytes + what torch itself takes."
    code = """
        import resource, torch
        torch.set_num_threads(1)
        from iclr26.optimal_loss import optimal_loss
        optimal_loss(torch.randn(64, 784), [1.], n_noise=8)
        x = torch.randn(30_000, 784)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        optimal_loss(x, [1., 5., 20.], n_noise=64, max_bytes=2 ** 26, method="full")
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert float(out.stdout) < 64 * 1.25
