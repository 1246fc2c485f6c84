"""The exact posterior: brute force, closed forms, stability, the EDM calling form, attention, the CUDA kernel's text."""
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from iclr26.blocks.flow import EmpiricalDenoiser
from iclr26.lab.kernels import compile_check, compilers, cuda_available
from iclr26.optimal_loss import OptimalDenoiser, gaussian_optimal_loss, heun_sampler, posterior, posterior_attention, posterior_kernel, rank_gap
from iclr26.optimal_loss.posterior import kernel_fits, kernel_shared

F64 = torch.float64
G = lambda seed=0: torch.Generator().manual_seed(seed)
randn = lambda *shape, seed=0, dtype=F64: torch.randn(*shape, generator=G(seed), dtype=dtype)


def brute(xt, data, alpha, sigma, weights=None):
    w = torch.ones(len(data), dtype=F64) if weights is None else torch.as_tensor(weights, dtype=F64)
    logits = torch.stack([w.log() - (x - alpha * data).flatten(1).square().sum(1) / (2 * s ** 2) for x, s in zip(xt, torch.as_tensor(sigma, dtype=F64).expand(len(xt)))])
    p, flat = torch.softmax(logits, 1), data.flatten(1)
    mean = p @ flat
    return mean.view(xt.shape), torch.stack([(q * (flat - m).square().sum(1)).sum() for q, m in zip(p, mean)])


@pytest.mark.parametrize("alpha", [1.0, .6, 0.0])
@pytest.mark.parametrize("weights", [None, [0., 1, 2, 3, 0, 5, 1, 1, 1]])
def test_posterior_matches_brute_force(alpha, weights):
    data, xt, sigma = randn(9, 2, 3), randn(6, 2, 3, seed=1), torch.tensor([.1, .3, 1., 2., 5., 50.], dtype=F64)
    got, want = posterior(xt, data, alpha, sigma, weights), brute(xt, data, alpha, sigma, weights)
    assert got[0].shape == xt.shape and torch.allclose(got[0], want[0], atol=1e-10) and torch.allclose(got[1], want[1], atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-150, 1e150), st.integers(0, 100))
def test_posterior_is_finite_for_any_sigma(sigma, seed):
    mean, trace = posterior(randn(3, 4, seed=seed), randn(7, 4, seed=seed + 1), 1., sigma)
    assert torch.isfinite(mean).all() and torch.isfinite(trace).all() and (trace >= 0).all()
    assert mean.abs().max() <= randn(7, 4, seed=seed + 1).abs().max() + 1e-9


def test_posterior_agrees_with_the_flow_block():
    data, x = randn(40, 5, dtype=torch.float32), randn(8, 5, seed=3, dtype=torch.float32)
    for t in (1e-3, .05, .5, .99, 1.): assert (EmpiricalDenoiser(data).x0(x, t) - posterior(x, data, 1 - t, t)[0]).abs().max() < 1e-5


@pytest.mark.parametrize("call", [lambda d: posterior(torch.zeros(2, 3), d, 1., 1.), lambda d: posterior(torch.zeros(2, 2), d, 1., 0.), lambda d: posterior(torch.zeros(2, 2), d, 1., torch.ones(3)),
                                  lambda d: posterior(torch.zeros(2, 2), d, 1., 1., [1.]), lambda d: posterior(torch.zeros(2, 2), d, 1., 1., [0.] * 4), lambda d: posterior(torch.zeros(2, 2), d, 1., 1., [1, 1, 1, -1.]),
                                  lambda d: posterior(torch.full((2, 2), math.nan), d, 1., 1.), lambda d: posterior(torch.zeros(2, 2), d.masked_fill(d == d.max(), math.inf), 1., 1.),
                                  lambda d: posterior(torch.zeros(2, 2), d[:1], 1., 1.)])
def test_posterior_refuses(call):
    with pytest.raises(ValueError): call(randn(4, 2, dtype=torch.float32))


def test_whole_numbers_are_refused_with_advice():
    for data in (torch.zeros(3, 2, dtype=torch.uint8), np.zeros((3, 2), np.int64), torch.zeros(3, 2, dtype=torch.bool)):
        with pytest.raises(TypeError, match="scale to float"): OptimalDenoiser(data)


def test_denoiser_forms_of_sigma_and_classes():
    data, labels = randn(30, 2, 2), torch.arange(30) % 3
    net = OptimalDenoiser(data, labels=labels)
    x = randn(4, 2, 2, seed=5)
    want = posterior(x, data, 1., .7)[0]
    for sigma in (.7, torch.tensor(.7, dtype=F64), torch.full((4,), .7, dtype=F64), torch.full((4, 1, 1), .7, dtype=F64)): assert torch.allclose(net(x, sigma), want)
    assert torch.equal(net(x, 0.), x) and (net.trcov(x, 0.) == 0).all()
    mixed = net(x, torch.tensor([0., .7, 0., .7]))
    assert torch.equal(mixed[::2], x[::2]) and torch.allclose(mixed[1::2], want[1::2], atol=1e-6)
    classes = torch.tensor([2, 0, 1, 2])
    by_class = torch.cat([posterior(x[b:b + 1], data[labels == c], 1., .7)[0] for b, c in enumerate(classes)])
    one_hot = torch.nn.functional.one_hot(classes, 3).float()
    assert torch.allclose(net(x, .7, classes), by_class) and torch.allclose(net(x, .7, one_hot), by_class)
    assert torch.allclose(net.trcov(x, .7), posterior(x, data, 1., .7)[1])
    assert net.sigma_min == 0 and net.sigma_max == math.inf and net.round_sigma(.3) == .3 and len(list(net.buffers())) >= 2
    with pytest.raises(ValueError, match="label"): net(x, .7, torch.tensor([3, 0, 0, 0]))
    with pytest.raises(ValueError, match="without labels"): OptimalDenoiser(data)(x, .7, classes)
    with pytest.raises(ValueError, match="sigma"): net(x, -1.)


def test_heun_sampler_counts_calls_and_lands_on_data():
    data, calls = randn(12, 3, dtype=torch.float32), []
    net = OptimalDenoiser(data, labels=torch.arange(12) % 2)
    def counted(*args):
        calls.append(len(args))
        return net(*args)
    out = heun_sampler(counted, torch.randn(5, 3, generator=G(1)), num_steps=15)
    assert len(calls) == 29 and set(calls) == {2} and torch.cdist(out, data).amin(1).max() < 1e-2 and out.dtype == torch.float32
    calls.clear()
    out = heun_sampler(counted, torch.randn(4, 3, generator=G(1)), num_steps=1, class_labels=torch.tensor([0, 1, 0, 1]))
    assert calls == [3] and torch.isfinite(out).all()
    with pytest.raises(ValueError): heun_sampler(net, torch.zeros(1, 3), num_steps=0)
    with pytest.raises(ValueError): heun_sampler(net, torch.zeros(1, 3), sigma_min=2., sigma_max=1.)


def test_heun_is_exact_for_one_gaussian_direction():
    "dx/dsigma = (x - D)/sigma with D = x v/(v + s^2) has the solution x proportional to sqrt(v + s^2)."
    out = heun_sampler(lambda x, s: x * 4 / (4 + s ** 2), torch.ones(1, 1, dtype=F64), num_steps=400)
    assert math.isclose(float(out), 80 * 2 / math.sqrt(4 + 80 ** 2), rel_tol=2e-4)


def test_gaussian_formulas():
    assert math.isclose(gaussian_optimal_loss([4, 1, .25], .5), .56029412, abs_tol=1e-8)
    assert torch.allclose(gaussian_optimal_loss(np.array([4., 1., .25]), torch.tensor([.5, 1.])), torch.tensor([.56029412, 1.5], dtype=F64), atol=1e-8)
    gap = rank_gap([1., 4., .25], 1., [0, 1, 2, 3])
    assert torch.allclose(gap, torch.tensor([16 / 5 + .5 + .05, .5 + .05, .05, 0.], dtype=F64)) and gap.dtype == F64
    for bad in ((-1., 1.), ([1.], 0.)):
        with pytest.raises(ValueError): gaussian_optimal_loss(*bad)
    with pytest.raises(ValueError): rank_gap([1.], 1., [2])


@pytest.mark.parametrize("weighted", [False, True])
def test_attention(weighted):
    rows, x, s = randn(50, 6) + 3, randn(9, 6, seed=1) + 3, torch.logspace(-1, 1.5, 9, dtype=F64)
    w = torch.rand(50, generator=G(4), dtype=F64) if weighted else None
    assert torch.allclose(posterior_attention(x, rows, s, None if w is None else w.log()), posterior(x, rows, 1., s, w)[0], atol=1e-8)


# The kernel's own text, on fibers ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("B, N, d", [(1, 2, 1), (8, 32, 32), (9, 33, 31), (3, 100, 65), (17, 257, 40), (2, 31, 300)])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("seed", [None, 3])
def test_kernel_matches_reference(B, N, d, splits, seed):
    x, rows, s = randn(B, d, dtype=torch.float32), randn(N, d, seed=1, dtype=torch.float32), torch.logspace(-.5, 1, B) if B > 1 else torch.tensor([.8])
    w = torch.rand(N, generator=G(2)).masked_fill(torch.arange(N) % 5 == 4, 0.)
    mean, trace, lse = posterior_kernel(x, rows, s, w.log(), host=True, splits=splits, seed=seed)
    want_mean, want_trace = posterior(x.double(), rows.double(), 1., s.double(), w.double())
    want_lse = torch.logsumexp(w.double().log() - torch.cdist(x.double(), rows.double()) ** 2 / (2 * s.double()[:, None] ** 2), 1)
    assert (mean - want_mean).abs().max() < 2e-5 and torch.allclose(trace.double(), want_trace, atol=2e-4 * d ** .5) and torch.allclose(lse.double(), want_lse, rtol=2e-5, atol=1e-4)


def test_kernel_extremes():
    rows = randn(70, 16, dtype=torch.float32)
    x = rows[[3, 40]] + 1e-4
    mean, trace, _ = posterior_kernel(x, rows, torch.tensor([1e-4, 1e6]), host=True)
    assert torch.allclose(mean[0], rows[3], atol=1e-6) and torch.allclose(mean[1], rows.mean(0), atol=1e-5) and trace[0] < 1e-6
    none = posterior_kernel(x, rows, torch.tensor([1., 1.]), torch.full((70,), -math.inf), host=True)
    assert (none[0] == 0).all() and (none[2] == -math.inf).all()


def test_kernel_refuses():
    x, rows, s = torch.zeros(2, 3), torch.zeros(4, 3), torch.ones(2)
    for args in ((x, rows[:, :2], s), (x.double(), rows, s), (x, rows, s[:1]), (x, rows, s * 0), (x, rows, s, torch.zeros(3))):
        with pytest.raises(ValueError): posterior_kernel(*args, host=True)
    with pytest.raises(ValueError, match="shared memory"): posterior_kernel(torch.zeros(1, 4000), torch.zeros(2, 4000), torch.ones(1), host=True)
    assert kernel_fits(3072) and not kernel_fits(4000) and kernel_shared(3072) < 227 << 10
    if not cuda_available():
        with pytest.raises(RuntimeError, match="GPU"): posterior_kernel(x, rows, s)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernel_compiles_without_spills(arch):
    if not compilers(): pytest.skip("no CUDA compiler")
    report = compile_check("optimal_loss.cu", arch)
    assert {use.name for use in report.kernels} == {"posterior_partial", "posterior_merge"} and all(use.spill_bytes == 0 for use in report.kernels) and not report.warnings


@pytest.mark.skipif(not cuda_available(), reason="needs a GPU")
def test_kernel_on_a_gpu():
    rows, x, s = randn(5000, 784, dtype=torch.float32), randn(64, 784, seed=1, dtype=torch.float32), torch.logspace(0, 1.5, 64)
    got = posterior_kernel(x.cuda(), rows.cuda(), s.cuda())
    want = posterior(x.double(), rows.double(), 1., s.double())
    assert (got[0].cpu() - want[0]).abs().max() < 1e-4 and torch.allclose(got[1].cpu().double(), want[1], rtol=1e-3, atol=1e-2)
