"""Gradient descent, closed form, kriging and likelihood against dense linear algebra, Monte Carlo and scikit-learn."""
import math
import pickle
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.stats import multivariate_normal
from sklearn.base import clone, is_regressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF
from sklearn.kernel_ridge import KernelRidge
from sklearn.metrics import r2_score
from sklearn.model_selection import GridSearchCV, cross_val_score

from iclr26.continuum_icl.operators import KERNELS, ConvolutionOperator, Grid, IdentityOperator, LinearKernel, OperatorKernel, RBFKernel, SoftmaxKernel
from iclr26.continuum_icl.references import (InContextOperatorRegressor, apply_operator, blup, closed_form, depth_filter, expected_risk, log_marginal_likelihood, nearest_context,
                                             objective, operator_gradient_descent, posterior_variance, select_sigma)
from iclr26.continuum_icl.transformer import ContinuumTransformer

torch.set_num_threads(1)
GRID = Grid((4, 3), (2.0, 1.0))
PSD = [name for name in KERNELS if name != "softmax"]

def normal(*shape, seed=0, dtype=torch.float64): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
def smooth(grid, spread=0.01): return ConvolutionOperator.from_symbol(grid, lambda k: torch.exp(-spread * k.square().sum(-1)))
def make(name="rbf", grid=GRID): return OperatorKernel(KERNELS[name](grid, *([10.0] if name == "gradient_rbf" else [])), smooth(grid))
def problem(grid=GRID, B=2, n=5, m=3, seed=0): return normal(B, n, *grid.shape, seed=seed), normal(B, n, *grid.shape, seed=seed + 1), normal(B, m, *grid.shape, seed=seed + 2)
def matrix(op): return op(torch.eye(op.grid.size, dtype=torch.float64).view(-1, *op.grid.shape)).flatten(1).T.contiguous()

def dense(kernel, f, u, f_test, steps, step):
    "K_* K^-1 (I - (I - rK)^m) U with Kronecker matrices, one prompt; as a sum of powers, so that K may be singular."
    Ky = matrix(kernel.ky)
    K, K_star = torch.kron(kernel.kx(f, f), Ky), torch.kron(kernel.kx(f_test, f), Ky)
    e, alpha = u.flatten().clone(), torch.zeros(u.numel()).double()
    for _ in range(steps): alpha, e = alpha + step * e, e - step * (K @ e)
    return (K_star @ alpha).view(len(f_test), *kernel.grid.shape)

@pytest.mark.parametrize("name", PSD)
def test_three_routes_to_one_prediction(name):
    kernel, (f, u, f_test) = make(name), problem()
    step = kernel.max_stable_step(f).min().item() / 3
    for steps in (0, 1, 2, 7, 60):
        alpha = operator_gradient_descent(kernel, f, u, steps=steps, step=step)
        loop, closed = apply_operator(kernel, f, alpha, f_test), closed_form(kernel, f, u, f_test, steps=steps, step=step)
        for b in range(2): assert torch.allclose(closed[b], dense(kernel, f[b], u[b], f_test[b], steps, step), atol=1e-12)
        assert torch.allclose(loop, closed, atol=1e-12)

def test_closed_form_equals_250_layers():
    "T3."
    grid = Grid((32, 32))
    kernel = OperatorKernel(RBFKernel(grid), ConvolutionOperator.from_stencil(grid, "gaussian", 1 / 32))
    f, u, f_test = problem(grid, 2, 8, 1)
    step = kernel.max_stable_step(f).min().item() * 0.9
    layered = ContinuumTransformer(kernel, 250, step=step)(torch.cat([f, f_test], 1), u)
    assert torch.allclose(closed_form(kernel, f, u, f_test, steps=250, step=step)[:, 0], layered, atol=1e-11)

@given(st.sampled_from([0.0, 1e-300, 1e-17, -1e-17, 1e-9, 0.3, 0.899, 0.9, 1 - 2**-40, 1.0, 1 + 2**-40, 1.5, 1.9999, 2.5]), st.integers(0, 60))
@settings(max_examples=100, deadline=None)
def test_depth_filter_to_full_relative_precision(x, steps):
    assert math.isclose(depth_filter(torch.tensor([x, 1.2], dtype=torch.float64), steps)[0].item(), float(1 - (1 - Fraction(x)) ** steps), rel_tol=1e-12)

@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-11), (torch.float32, 2e-4)])
@pytest.mark.parametrize("name", PSD)
def test_degenerate_contexts_at_any_depth(name, dtype, tolerance):
    "Repeated, vanishing and opposite fields: eigenvalues that are zero, exactly or up to rounding."
    kernel, (f, u, f_test) = make(name), problem(B=1)
    f = torch.cat([f, f[:, :2], torch.zeros_like(f[:, :1]), -f[:, :1]], 1)
    u = torch.cat([u, normal(1, 4, 4, 3, seed=9)], 1)
    step = kernel.max_stable_step(f).item() / 2
    for m in (1, 3):
        for steps in (0, 1, 2, 51, 10**4):
            closed = closed_form(kernel, f.to(dtype), u.to(dtype), f_test[:, :m].to(dtype), steps=steps, step=step)
            exact = apply_operator(kernel, f, operator_gradient_descent(kernel, f, u, steps=steps, step=step), f_test[:, :m])
            if dtype == torch.float64 or steps <= 51: assert (closed - exact).abs().max() <= tolerance * max(1, exact.abs().max())
            assert torch.isfinite(closed).all() and torch.isfinite(expected_risk(kernel, f.to(dtype), f_test[:, :m].to(dtype), steps=steps, step=step)).all()

@pytest.mark.parametrize("name", PSD)
def test_one_question_or_many(name):
    kernel, (f, u, f_test) = make(name), problem()
    f_test[:, 1] = f[:, 2]                                                          # a question among the examples
    step = kernel.max_stable_step(f).min().item() / 2
    for call in (lambda t, m: closed_form(kernel, f, u, t, steps=m, step=step), lambda t, m: expected_risk(kernel, f, t, steps=m, step=step)):
        for m in (1, 40, 41): assert torch.allclose(call(f_test, m), torch.cat([call(f_test[:, j:j + 1], m) for j in range(3)], 1), rtol=1e-11, atol=1e-12)

def test_risk_is_the_quadratic_form_at_every_depth():
    kernel, (f, _, f_test) = make(), problem(B=1)
    K, g, S = kernel.kx(f, f)[0], kernel.kx(f, f_test)[0], kernel.ky.symbol().flatten()
    for m in (0, 1, 2, 15):
        expected = torch.zeros(3, dtype=torch.float64)
        for s in S:
            W = sum((0.1 * s * torch.linalg.matrix_power(torch.eye(5, dtype=torch.float64) - 0.1 * s * K, j) for j in range(m)), torch.zeros(5, 5, dtype=torch.float64))
            expected += s * (1 - 2 * (g * (W @ g)).sum(0) + (g * (W @ K @ W @ g)).sum(0))
        assert torch.allclose(expected_risk(kernel, f, f_test, steps=m, step=0.1)[0], expected, rtol=1e-12)

def test_singular_gram_is_no_special_case():
    kernel, (f, u, f_test) = make(), problem()
    f[:, 3] = f[:, 1]
    step = kernel.max_stable_step(f).min().item() / 2
    for steps in (5, 300): assert torch.allclose(closed_form(kernel, f, u, f_test, steps=steps, step=step)[0], dense(kernel, f[0], u[0], f_test[0], steps, step), atol=1e-11)
    zero = torch.zeros_like(f)
    assert closed_form(make("linear"), zero, u, f_test, steps=10**6, step=1.0).abs().max() == 0
    for call in (lambda: blup(kernel, f, u, f_test), lambda: closed_form(kernel, f, u, f_test, steps=math.inf), lambda: posterior_variance(kernel, f, f_test),
                 lambda: expected_risk(kernel, f, f_test, steps=math.inf), lambda: blup(make("linear"), zero, u, f_test)):
        with pytest.raises(torch.linalg.LinAlgError, match="ridge.*rcond"): call()

def test_limit_of_depth_is_kriging():
    kernel, (f, u, f_test) = make(), problem()
    step = kernel.max_stable_step(f).min().item() / 2
    limit, weights = blup(kernel, f, u, f_test)
    assert torch.equal(closed_form(kernel, f, u, f_test, steps=math.inf), limit)
    errors = [(closed_form(kernel, f, u, f_test, steps=10**p, step=step) - limit).abs().max().item() for p in range(1, 7)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-9
    gram, cross = kernel.kx(f, f), kernel.kx(f, f_test)
    assert torch.allclose(weights, torch.linalg.solve(gram, cross).mT, atol=1e-10)
    assert torch.allclose(limit[1, 2], torch.einsum("i,ixy->xy", weights[1, 2], u[1]))
    assert torch.allclose(blup(kernel, f, u, f[:, :2])[0], u[:, :2], atol=1e-10)      # interpolation

def test_modes_outside_k_y_are_predicted_zero():
    line = Grid((8,))
    symbol = torch.tensor([1, .5, 0, 0, 0, 0, 0, .5]).double()
    kernel = OperatorKernel(RBFKernel(line), ConvolutionOperator.from_symbol(line, symbol))
    f, u, f_test = problem(line)
    limit = torch.fft.fft(closed_form(kernel, f, u, f_test, steps=math.inf))
    expected = torch.fft.fft(blup(kernel, f, u, f_test)[0])
    assert torch.allclose(limit[..., [0, 1, 7]], expected[..., [0, 1, 7]], atol=1e-12) and limit[..., 2:7].abs().max() < 1e-12
    assert torch.allclose(torch.fft.ifft(limit).real, closed_form(kernel, f, u, f_test, steps=10**7, step=0.3), atol=1e-8)

@pytest.mark.parametrize("name", ["linear", "rbf", "laplacian"])
def test_gradient_of_the_objective(name):
    "T1: along sum kappa(., f_i) b_i the derivative of J is -residuals^T (K_x (x) K_y) b."
    kernel, (f, u, _) = make(name), problem()
    alpha, b, h = normal(*u.shape, seed=8), normal(*u.shape, seed=9), 1e-4
    residual = u - apply_operator(kernel, f, alpha, f)
    expected = -GRID.inner(residual, apply_operator(kernel, f, b, f)).sum(-1)
    numeric = (objective(kernel, f, u, alpha + h * b) - objective(kernel, f, u, alpha - h * b)) / (2 * h)
    assert torch.allclose(numeric, expected, rtol=1e-7, atol=1e-7)
    assert torch.allclose(objective(kernel, f, u, torch.zeros_like(u)), 0.5 * GRID.norm(u).square().sum(-1))

@given(st.sampled_from(PSD), st.integers(0, 1000), st.floats(0.01, 0.99))
@settings(max_examples=25, deadline=None)
def test_stable_steps_never_increase_the_objective(name, seed, share):
    kernel, (f, u, _) = make(name), problem(seed=seed)
    step = kernel.max_stable_step(f).min().item() * share
    values = [objective(kernel, f, u, operator_gradient_descent(kernel, f, u, steps=m, step=step)) for m in range(5)]
    for before, after in zip(values, values[1:]): assert (after <= before * (1 + 1e-12)).all()

@pytest.mark.parametrize("ridge", [1e-8, 0.1, 3.0])
@pytest.mark.parametrize("name", ["linear", "laplacian", "energy"])
def test_blup_is_kernel_ridge_regression(ridge, name):
    kernel, (f, u, f_test) = make(name), problem()
    mean, _ = blup(kernel, f, u, f_test, ridge=ridge)
    for b in range(2):
        peer = KernelRidge(alpha=ridge, kernel="precomputed").fit(kernel.kx(f[b], f[b]).numpy(), u[b].flatten(1).numpy())
        assert np.allclose(mean[b].flatten(1), peer.predict(kernel.kx(f_test[b], f[b]).numpy()), atol=1e-7 if ridge < 1e-3 else 1e-11)

def test_gaussian_process_posterior():
    "scikit-learn's GP on flattened fields: the L2 norm is the Euclidean one times sqrt(cell volume)."
    kernel, (f, u, f_test) = OperatorKernel(RBFKernel(GRID, 1.5), smooth(GRID)), problem(n=8)
    peer = GaussianProcessRegressor(RBF(1.5 / math.sqrt(GRID.cell_volume), "fixed"), alpha=0.05, optimizer=None).fit(f[0].flatten(1).numpy(), u[0].flatten(1).numpy())
    mean, std = peer.predict(f_test[0].flatten(1).numpy(), return_std=True)
    assert np.allclose(blup(kernel, f, u, f_test, ridge=0.05)[0][0].flatten(1), mean, atol=1e-10)
    assert np.allclose(posterior_variance(kernel, f, f_test, ridge=0.05)[0], std[:, 0] ** 2 * kernel.ky.trace(), atol=1e-10)

def test_likelihood_of_one_output_is_scikit_learns():
    point = Grid((1,))
    kernel = OperatorKernel(RBFKernel(point, 0.8), IdentityOperator(point))
    f, u = 3 * normal(1, 7, 1), normal(1, 7, 1, seed=1)
    peer = GaussianProcessRegressor(RBF(0.8, "fixed"), alpha=0.1, optimizer=None).fit(f[0].numpy(), u[0, :, 0].numpy())
    assert math.isclose(log_marginal_likelihood(kernel, f, u, noise=0.1).item(), peer.log_marginal_likelihood_value_, rel_tol=1e-10)

@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("shape", [(5,), (4, 3), (3, 4)])
def test_likelihood_is_the_dense_density(noise, shape):
    grid = Grid(shape, [1.0 + i for i in range(len(shape))])
    kernel, (f, u, _) = OperatorKernel(RBFKernel(grid), smooth(grid, 0.002)), problem(grid, n=3)
    Ky = matrix(kernel.ky)
    for b in range(2):
        covariance = torch.kron(kernel.kx(f[b], f[b]), ((Ky + Ky.T) / 2).contiguous()) + noise * torch.eye(3 * grid.size)
        exact = multivariate_normal(cov=covariance.numpy()).logpdf((u[b].flatten() * math.sqrt(grid.cell_volume)).numpy())
        assert math.isclose(log_marginal_likelihood(kernel, f, u, noise=noise)[b].item(), exact, rel_tol=1e-9)

def test_likelihood_needs_positive_variances():
    kernel, (f, u, _) = make(), problem()
    f[:, 3] = f[:, 1]
    with pytest.raises(ValueError, match="noise > 0"): log_marginal_likelihood(kernel, f, u)
    assert torch.isfinite(log_marginal_likelihood(kernel, f, u, noise=1e-3)).all()
    blind = OperatorKernel(RBFKernel(GRID), ConvolutionOperator.from_symbol(GRID, lambda k: (k.square().sum(-1) > 0).double()))
    with pytest.raises(ValueError, match="noise > 0"): log_marginal_likelihood(blind, *problem()[:2])
    with pytest.raises(ValueError, match="noise="): log_marginal_likelihood(make(), *problem()[:2], noise=-1.0)

def sample(kernel, f, draws, seed):
    "Outputs with covariance K_x (x) K_y, [draws, T, *grid], from dense Cholesky factors."
    Ky = matrix(kernel.ky) / kernel.grid.cell_volume
    roots = torch.linalg.cholesky(kernel.kx(f, f) + 1e-12 * torch.eye(len(f))), torch.linalg.cholesky((Ky + Ky.T) / 2)
    return torch.einsum("ij,xy,djy->dix", *roots, normal(draws, len(f), kernel.grid.size, seed=seed)).unflatten(-1, kernel.grid.shape)

def test_select_sigma_finds_the_scale_of_the_data():
    line = Grid((24,))
    make_kernel = lambda sigma: OperatorKernel(RBFKernel(line, sigma), smooth(line, 1e-4))
    f = normal(1, 30, 24)
    u = sample(make_kernel(1.5), f[0], 1, 3)
    assert select_sigma(make_kernel, [0.2, 0.6, 1.5, 4.0, 10.0], f, u, noise=1e-8) == 1.5
    with pytest.raises(ValueError, match="sigmas"): select_sigma(make_kernel, [], f, u)

def test_risk_of_the_hand_example():
    "T4: constants 0 and 1, question one half, S = (1, 1/2), r = 1/2; g is an eigenvector to 1 + exp(-1/2)."
    tiny = Grid((2,))
    kernel = OperatorKernel(RBFKernel(tiny), ConvolutionOperator.from_symbol(tiny, torch.tensor([1.0, 0.5])))
    f, f_test = (torch.tensor(s, dtype=torch.float64).view(1, -1, 1).expand(-1, -1, 2) for s in ([0, 1], [.5]))
    top = 1 + math.exp(-.5)
    assert math.isclose(top, 1.606531, abs_tol=1e-6) and math.isclose(2 - top, 0.393469, abs_tol=1e-6)
    g2 = 2 * math.exp(-.25)
    for m in (0, 1, 2, 5, 20):
        expected = sum(S * (1 - 2 * w * g2 + w * w * top * g2) for S in (1, .5) for w in [(1 - (1 - .5 * S * top) ** m) / top])
        assert math.isclose(expected_risk(kernel, f, f_test, steps=m, step=.5).item(), expected, rel_tol=1e-12)
    assert math.isclose(expected_risk(kernel, f, f_test, steps=0, step=.5).item(), 1.5)
    assert math.isclose(expected_risk(kernel, f, f_test, steps=math.inf).item(), 0.0456846, abs_tol=1e-7)

@pytest.mark.parametrize("name", ["linear", "rbf"])
def test_risk_against_monte_carlo(name):
    line = Grid((6,))
    kernel = OperatorKernel(KERNELS[name](line), smooth(line, 0.002))
    f = normal(6, 6, seed=4)
    u = sample(kernel, f, 4000, 5)
    context, question = f[:5].expand(4000, -1, -1), f[5:].expand(4000, -1, -1)
    step = kernel.max_stable_step(f[None, :5]).item() / 2
    for steps in (0, 1, 5, 30, math.inf):
        errors = line.norm(closed_form(kernel, context, u[:, :5], question, steps=steps, step=step) - u[:, 5:]).square()[:, 0]
        risk = expected_risk(kernel, f[None, :5], f[None, 5:], steps=steps, step=step).item()
        assert abs(errors.mean().item() - risk) < 3 * errors.std().item() / math.sqrt(4000)

@given(st.sampled_from(["rbf", "laplacian", "energy"]), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_expected_risk_falls_with_depth(name, seed):
    "T5: guaranteed for the matched kernel when r lambda S <= 1."
    kernel, (f, _, f_test) = make(name), problem(seed=seed)
    step = kernel.max_stable_step(f).min().item() / 2
    risks = torch.stack([expected_risk(kernel, f, f_test, steps=m, step=step) for m in (0, 1, 3, 10, 100, 10**4)])
    assert (risks.diff(dim=0) <= 1e-10).all() and (risks[-1] >= posterior_variance(kernel, f, f_test, ridge=1e-12) - 1e-6).all()

def test_posterior_variance_is_zero_at_the_examples():
    kernel, (f, _, f_test) = make(), problem()
    assert posterior_variance(kernel, f, f[:, :2]).abs().max() < 1e-10 and (posterior_variance(kernel, f, f[:, :2]) >= 0).all()
    assert (posterior_variance(kernel, f, f_test) < posterior_variance(kernel, f, f_test, ridge=1.0)).all()
    assert torch.allclose(posterior_variance(kernel, f, f_test), expected_risk(kernel, f, f_test, steps=10**8, step=0.1), rtol=1e-6)

def test_rcond_drops_small_eigenvalues():
    kernel, (f, u, f_test) = make(), problem()
    f[:, 3] = f[:, 1]
    weights = blup(kernel, f, u, f_test, rcond=1e-10)[1]
    assert torch.allclose(weights, (torch.linalg.pinv(kernel.kx(f, f), rtol=1e-10, hermitian=True) @ kernel.kx(f, f_test)).mT, atol=1e-8)
    good = problem()
    assert torch.allclose(blup(kernel, *good, rcond=0.0)[0], blup(kernel, *good)[0], atol=1e-9)
    assert blup(make("linear"), torch.zeros_like(f), u, f_test, rcond=0.1)[0].abs().max() == 0

def test_gradients_flow_also_through_repeated_eigenvalues():
    line = Grid((4,))
    kernel = OperatorKernel(LinearKernel(line), smooth(line))
    f = torch.eye(4).double()[:3].unsqueeze(0)                                      # K_x is a multiple of the identity
    u, f_test = normal(1, 3, 4), normal(1, 2, 4, seed=1)
    leaf = lambda x: x.clone().requires_grad_()
    for steps in (0, 1, 6):
        assert torch.autograd.gradcheck(lambda f, u, t: closed_form(kernel, f, u, t, steps=steps, step=0.5), (leaf(f), leaf(u), leaf(f_test)))
        assert torch.autograd.gradcheck(lambda f, t: expected_risk(kernel, f, t, steps=steps, step=0.5), (leaf(f), leaf(f_test)))
    for t in (f_test, f_test[:, :1]):                                               # of the outputs, of the question alone
        assert torch.autograd.gradcheck(lambda u: closed_form(kernel, f, u, t, steps=6, step=0.5), (leaf(u),))
        assert torch.autograd.gradcheck(lambda t: closed_form(kernel, f, u, t, steps=6, step=0.5), (leaf(t),))
        assert torch.autograd.gradcheck(lambda t: expected_risk(kernel, f, t, steps=6, step=0.5), (leaf(t),))
    assert torch.autograd.gradcheck(lambda f, u, t: blup(kernel, f, u, t, ridge=0.1)[0], (leaf(f), leaf(u), leaf(f_test)))
    assert torch.autograd.gradcheck(lambda f, t: posterior_variance(kernel, f, t, ridge=0.1), (leaf(f), leaf(f_test)))
    assert torch.autograd.gradcheck(lambda f, u: log_marginal_likelihood(kernel, f, u, noise=0.1), (leaf(f), leaf(u)))
    assert torch.autograd.gradcheck(lambda f, u, t: apply_operator(kernel, f, operator_gradient_descent(kernel, f, u, steps=3, step=.5), t), (leaf(f), leaf(u), leaf(f_test)))

def test_tracked_and_untracked_paths_agree():
    kernel, (f, u, f_test) = make(), problem()
    tracked = f.clone().requires_grad_()
    for steps in (0, 1, 13, 250):
        assert torch.allclose(closed_form(kernel, tracked, u, f_test, steps=steps, step=.3), closed_form(kernel, f, u, f_test, steps=steps, step=.3), atol=1e-12)
        assert torch.allclose(expected_risk(kernel, tracked, f_test, steps=steps, step=.3), expected_risk(kernel, f, f_test, steps=steps, step=.3), atol=1e-11)
    assert torch.allclose(log_marginal_likelihood(kernel, tracked, u, noise=.01), log_marginal_likelihood(kernel, f, u, noise=.01))

def test_single_precision():
    kernel, (f, u, f_test) = make(), problem()
    for call in (lambda f, u, t: closed_form(kernel, f, u, t, steps=50, step=.2), lambda f, u, t: blup(kernel, f, u, t, ridge=.1)[0], lambda f, u, t: posterior_variance(kernel, f, t, ridge=.1),
                 lambda f, u, t: expected_risk(kernel, f, t, steps=50, step=.2), lambda f, u, t: nearest_context(kernel, f, u, t), lambda f, u, t: log_marginal_likelihood(kernel, f, u, noise=.1),
                 lambda f, u, t: operator_gradient_descent(kernel, f, u, steps=9, step=.2), lambda f, u, t: apply_operator(kernel, f, u, t)):
        single = call(f.float(), u.float(), f_test.float())
        assert single.dtype == torch.float32 and torch.allclose(single.double(), call(f, u, f_test), rtol=1e-4, atol=1e-4)

def test_nearest_context():
    kernel, (f, u, f_test) = make(), problem()
    for b in range(2):
        for j in range(3): assert torch.equal(nearest_context(kernel, f, u, f_test)[b, j], u[b, min(range(5), key=lambda i: (f[b, i] - f_test[b, j]).square().sum().item())])

def test_regressor():
    kernel, (f, u, f_test) = make(), problem(B=1)
    F, U, T = f[0].numpy(), u[0].numpy(), f_test[0].numpy()
    deep = InContextOperatorRegressor(kernel, ridge=0.1)
    assert deep.fit(F, U) is deep
    assert np.allclose(deep.predict(T), blup(kernel, f, u, f_test, ridge=0.1)[0][0], atol=1e-12)
    assert np.allclose(deep.predict_std(T), posterior_variance(kernel, f, f_test, ridge=0.1)[0].sqrt(), atol=1e-12) and deep.predict(T).dtype == np.float64
    layered = InContextOperatorRegressor(kernel, n_layers=17).fit(F, U).predict(T)
    for j in range(3): assert np.allclose(layered[j], ContinuumTransformer(kernel, 17)(torch.cat([f, f_test[:, j:j + 1]], 1), u)[0], atol=1e-12)
    fixed = InContextOperatorRegressor(kernel, n_layers=4, step=0.2).fit(F, U).predict(T)
    assert np.allclose(fixed, closed_form(kernel, f, u, f_test, steps=4, step=0.2)[0], atol=1e-12)
    whole = InContextOperatorRegressor(kernel, ridge=.1).fit(np.arange(60).reshape(5, 4, 3), U)
    assert whole.predict(np.ones((2, 4, 3), int)).shape == (2, 4, 3)

def test_regressor_refuses():
    kernel, (f, u, f_test) = make(), problem(B=1)
    F, U, T = f[0].numpy(), u[0].numpy(), f_test[0].numpy()
    for ask in ("predict", "predict_std"):
        with pytest.raises(ValueError, match="before fit"): getattr(InContextOperatorRegressor(kernel), ask)(T)
    for arguments in ({"n_layers": -1}, {"n_layers": 1.5}, {"step": 0.0}, {"ridge": -1.0}, {"ridge": math.nan}):
        with pytest.raises(ValueError, match=f"^{next(iter(arguments))}="): InContextOperatorRegressor(kernel, **arguments)
    fitted = InContextOperatorRegressor(kernel).fit(F, U)
    before = fitted.predict(T)
    with pytest.raises(TypeError, match="F has dtype"): fitted.fit(F + 0j, U)
    with pytest.raises(ValueError, match="u has shape"): fitted.fit(F, U[:3])
    with pytest.raises(ValueError, match="F holds"): fitted.fit(F * math.nan, U)
    with pytest.raises(torch.linalg.LinAlgError): fitted.fit(F[[0, 0, 1]], U[:3])
    with pytest.raises(ValueError, match="less than"): InContextOperatorRegressor(kernel, n_layers=3, step=50.0).fit(F, U)
    assert np.array_equal(fitted.predict(T), before)                                # a failed fit changes nothing

def test_regressor_is_a_scikit_learn_estimator():
    line = Grid((12,), (12.0,))
    kernels = [OperatorKernel(LinearKernel(line), smooth(line)), OperatorKernel(RBFKernel(line, 0.5), smooth(line))]
    F = normal(24, 12).numpy()
    U = F @ normal(12, 12, seed=1).numpy()                                          # a linear operator
    model = InContextOperatorRegressor(kernels[1], n_layers=7, step=0.1, ridge=0.2)
    assert model.get_params() == {"kernel": kernels[1], "n_layers": 7, "step": 0.1, "ridge": 0.2} and "n_layers=7" in repr(model)
    twin = clone(model.fit(F, U))
    assert twin.get_params()["n_layers"] == 7 and not hasattr(twin, "f_") and is_regressor(twin)
    assert np.array_equal(twin.fit(F, U).predict(F), model.predict(F)) and np.array_equal(pickle.loads(pickle.dumps(model)).predict(F), model.predict(F))
    search = GridSearchCV(model.set_params(step="auto"), {"kernel": kernels, "n_layers": [None, 2], "ridge": [1e-8, 0.5]}, cv=3).fit(F, U)
    assert isinstance(search.best_params_["kernel"].kx, LinearKernel) and search.best_params_["n_layers"] is None and search.best_params_["ridge"] == 1e-8
    assert cross_val_score(search.best_estimator_, F, U, cv=3).min() > 0.99

def test_score_is_scikit_learns_r2():
    kernel, (f, u, f_test) = make(), problem(B=1)
    model, truth = InContextOperatorRegressor(kernel).fit(f[0].numpy(), u[0].numpy()), normal(3, 4, 3, seed=7).numpy()
    assert math.isclose(model.score(f_test[0].numpy(), truth), r2_score(truth.reshape(3, -1), model.predict(f_test[0].numpy()).reshape(3, -1), multioutput="variance_weighted"), rel_tol=1e-12)
    for bad, match in ((truth[:2], "U has 2 fields: expected 3"), (np.ones((3, 4, 3)), "differ"), (truth * math.nan, "U holds")):
        with pytest.raises(ValueError, match=match): model.score(f_test[0].numpy(), bad)
    with pytest.raises(ValueError, match="before fit"): InContextOperatorRegressor(kernel).score(f_test[0].numpy(), truth)

@pytest.mark.parametrize("before, after", [({"n_layers": None}, {"n_layers": 3}), ({"n_layers": 3}, {"n_layers": None}), ({"n_layers": 3}, {"n_layers": 30, "step": 0.1}), ({"ridge": 0.5}, {"ridge": 0.0})])
def test_parameters_count_from_the_next_fit(before, after):
    kernel, (f, u, f_test) = make(), problem(B=1)
    F, U, T = f[0].numpy(), u[0].numpy(), f_test[0].numpy()
    model = InContextOperatorRegressor(kernel, **before).fit(F, U)
    answer = model.predict(T)
    assert model.set_params(**after) is model and np.array_equal(model.predict(T), answer)
    assert np.array_equal(model.fit(F, U).predict(T), InContextOperatorRegressor(kernel, **{**before, **after}).fit(F, U).predict(T))

@pytest.mark.parametrize("bad", [{"depth": 3}, {"n_layers": -1}, {"step": 0.0}, {"ridge": -1.0}, {"ridge": 0.1, "n_layers": 2.5}])
def test_bad_parameters_change_nothing(bad):
    model = InContextOperatorRegressor(make(), ridge=0.5)
    before = model.get_params()
    with pytest.raises(ValueError): model.set_params(**bad)
    with pytest.raises(TypeError, match="kernel=3"): model.set_params(kernel=3)
    assert model.get_params() == before

def test_error_bars_describe_the_limit_whatever_the_depth():
    kernel, (f, u, f_test) = make(), problem(B=1)
    shallow, deep = (InContextOperatorRegressor(kernel, n_layers=n).fit(f[0].numpy(), u[0].numpy()) for n in (4, None))
    assert np.array_equal(shallow.predict_std(f_test[0].numpy()), deep.predict_std(f_test[0].numpy()))
    assert (shallow.predict_std(f_test[0].numpy()) ** 2 <= expected_risk(kernel, f, f_test, steps=4, step=float(0.95 * kernel.max_stable_step(f)))[0].numpy()).all()
    twice = f[0, [0, 0, 1]].numpy(), u[0, :3].numpy()
    with pytest.raises(torch.linalg.LinAlgError, match="ridge"): InContextOperatorRegressor(kernel, n_layers=4).fit(*twice).predict_std(f_test[0].numpy())
    assert np.isfinite(InContextOperatorRegressor(kernel, n_layers=4, ridge=1e-6).fit(*twice).predict_std(f_test[0].numpy())).all()

CALLS = {
    "operator_gradient_descent": lambda k, f, u, t, **o: operator_gradient_descent(k, f, u, **{"steps": 3, "step": .1, **o}),
    "closed_form": lambda k, f, u, t, **o: closed_form(k, f, u, t, **{"steps": 3, "step": .1, **o}),
    "expected_risk": lambda k, f, u, t, **o: expected_risk(k, f, t, **{"steps": 3, "step": .1, **o}),
    "blup": lambda k, f, u, t, **o: blup(k, f, u, t, **o),
    "posterior_variance": lambda k, f, u, t, **o: posterior_variance(k, f, t, **o),
    "log_marginal_likelihood": lambda k, f, u, t, **o: log_marginal_likelihood(k, f, u, **o),
    "apply_operator": lambda k, f, u, t, **o: apply_operator(k, f, u, t, **o),
    "objective": lambda k, f, u, t, **o: objective(k, f, u, u, **o),
    "nearest_context": lambda k, f, u, t, **o: nearest_context(k, f, u, t, **o),
}

@pytest.mark.parametrize("name", CALLS)
def test_bad_fields(name):
    kernel, (f, u, t), call = make(), problem(), CALLS[name]
    call(kernel, f, u, t)
    for error, bad in [(ValueError, (f[..., :2], u, t)), (ValueError, (f[0], u[0], t[0])), (ValueError, (f * math.inf, u, t)), (ValueError, (f[:, :0], u[:, :0], t)), (TypeError, (f.long(), u, t)), (TypeError, (f + 0j, u, t))]:
        with pytest.raises(error, match="^f "): call(kernel, *bad)
    if name not in ("expected_risk", "posterior_variance"):
        for error, bad in [(ValueError, u[:, :3]), (ValueError, u[:1]), (ValueError, u * math.nan), (TypeError, u.float())]:
            with pytest.raises(error, match="^(u|alpha) "): call(kernel, f, bad, t)
    if name not in ("operator_gradient_descent", "log_marginal_likelihood", "objective"):
        for error, bad in [(ValueError, t[:1]), (ValueError, t[..., :1]), (ValueError, t * math.nan), (TypeError, t.float())]:
            with pytest.raises(error, match="^f_test "): call(kernel, f, u, bad)

@pytest.mark.parametrize("name", ["operator_gradient_descent", "closed_form", "expected_risk"])
def test_bad_steps(name):
    kernel, (f, u, t) = make(), problem()
    for bad in (-1, 1.5, math.nan):
        with pytest.raises(ValueError, match="steps="): CALLS[name](kernel, f, u, t, steps=bad)
    for bad in (0.0, -0.1, math.nan, math.inf, None):
        with pytest.raises(ValueError, match="step="): CALLS[name](kernel, f, u, t, step=bad)
    with pytest.raises(FloatingPointError, match="max_stable_step"): CALLS[name](kernel, f, u, t, steps=2000, step=100.0)

def test_bad_step_of_descent_at_infinity():
    with pytest.raises(ValueError, match="steps=inf"): operator_gradient_descent(make(), *problem()[:2], steps=math.inf, step=.1)

@pytest.mark.parametrize("name", ["closed_form", "expected_risk", "blup", "posterior_variance", "log_marginal_likelihood"])
def test_kernels_without_theory_are_refused(name):
    softmax = OperatorKernel(SoftmaxKernel(GRID), smooth(GRID))
    with pytest.raises(ValueError, match="positive semi-definite"): CALLS[name](softmax, *problem())
    shifted = OperatorKernel(RBFKernel(GRID), ConvolutionOperator.from_array(GRID, normal(4, 3), (0, 0), allow_indefinite=True))
    with pytest.raises(ValueError, match="self-adjoint"): CALLS[name](shifted, *problem())

def test_indefinite_output_operator():
    kernel = OperatorKernel(RBFKernel(GRID), ConvolutionOperator.from_symbol(GRID, lambda k: torch.cos(k.square().sum(-1)), allow_indefinite=True))
    f, u, t = problem()
    assert torch.allclose(closed_form(kernel, f, u, t, steps=9, step=.1)[0], dense(kernel, f[0], u[0], t[0], 9, .1), atol=1e-11)
    for call in (lambda: closed_form(kernel, f, u, t, steps=math.inf), lambda: expected_risk(kernel, f, t, steps=3, step=.1)):
        with pytest.raises(ValueError, match="non-negative"): call()

@pytest.mark.parametrize("option", [{"ridge": -1.0}, {"ridge": math.nan}, {"rcond": -1.0}])
def test_bad_regularisation(option):
    with pytest.raises(ValueError, match=next(iter(option))): blup(make(), *problem(), **option)


def test_a_ridge_beyond_the_fields_warns_and_a_kernel_is_needed():
    grid = Grid((16,))
    kernel = OperatorKernel(LinearKernel(grid), IdentityOperator(grid))
    F = np.random.default_rng(0).normal(size=(6, 16))
    with pytest.warns(UserWarning, match="ridge=1e-06 exceeds"): InContextOperatorRegressor(kernel, ridge=1e-6).fit(F * 1e-5, F)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        InContextOperatorRegressor(kernel, ridge=1e-6).fit(F, F)
    with pytest.raises(TypeError, match="kernel=None"): InContextOperatorRegressor(None)
