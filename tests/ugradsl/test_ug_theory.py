"Theory against autograd, refits and minimisation."
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_iris

from iclr26.ugradsl import alpha_bounds, gls_cross_entropy, label_ldp_epsilon, softmax_influence, theorem2

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def iris():
    X, y = load_iris(return_X_y=True)
    X = torch.tensor(np.c_[(X - X.mean(0)) / X.std(0), np.ones(150)])
    y = torch.tensor(y)
    forget = torch.randperm(150, generator=torch.Generator().manual_seed(3))[:15]
    return X, y, forget, softmax_influence(X, y, forget, ridge=1.5, num_classes=3)


def objective(X, y, ridge=1.5): return lambda t: F.cross_entropy(X @ t, y, reduction="sum") + ridge / 2 * t.square().sum()


def solve(H, g): return torch.linalg.solve(H.reshape(15, 15), g.reshape(-1)).reshape(5, 3)


def test_theta_is_the_minimiser(iris):
    X, y, _, t = iris
    assert torch.func.grad(objective(X, y))(t.theta).norm() < 1e-9
    assert t.theta.dtype == torch.float64 and t.theta.shape == (5, 3)


def test_deltas_by_autograd(iris):
    X, y, forget, t = iris
    keep = torch.ones(150, dtype=torch.bool); keep[forget] = False
    H_tr, H_r = torch.func.hessian(objective(X, y))(t.theta), torch.func.hessian(objective(X[keep], y[keep]))(t.theta)
    g_f = torch.func.grad(lambda w: F.cross_entropy(X[forget] @ w, y[forget], reduction="sum"))(t.theta)
    others = lambda w: sum(F.cross_entropy(X[forget] @ w, (y[forget] + k) % 3, reduction="sum") for k in (1, 2)) / 2
    assert torch.allclose(t.delta_f, solve(H_tr, g_f), atol=1e-11) and torch.allclose(t.delta_r, solve(H_r, g_f), atol=1e-11)
    assert torch.allclose(t.delta_n, solve(H_tr, torch.func.grad(others)(t.theta)), atol=1e-11)
    assert torch.equal(t.v, t.delta_r - t.delta_f) and torch.equal(t.u, t.delta_n - t.delta_f)
    assert torch.func.grad(objective(X[keep], y[keep]))(t.theta).add(g_f).norm() < 1e-9  # grad R_r = -g_f


def test_smoothed_step_identity(iris):
    X, y, forget, t = iris
    H = torch.func.hessian(objective(X, y))(t.theta)
    for a in (-1., -.1, 0.):
        g = torch.func.grad(lambda w: gls_cross_entropy(X[forget] @ w, y[forget], a, reduction="sum"))(t.theta) if a == 0 else None
        w = t.theta.clone().requires_grad_()
        g, = torch.autograd.grad(gls_cross_entropy(X[forget] @ w, y[forget], a, reduction="sum"), w)
        assert torch.allclose(t.delta_r - solve(H, g), t.v - 2 / 3 * a * t.u, atol=1e-12, rtol=0)


def test_mask_and_indices_agree(iris):
    X, y, forget, t = iris
    mask = torch.zeros(150, dtype=torch.bool); mask[forget] = True
    assert torch.equal(softmax_influence(X, y, mask, ridge=1.5, num_classes=3).v, t.v)


def test_theorem2_minimum(iris):
    t = iris[3]
    best = theorem2(t.v, t.u, 3)
    f = lambda a: float((t.v - 2 / 3 * a * t.u).norm())
    assert best.inner < 0 and best.norm_v == pytest.approx(f(0)) and best.norm_star == pytest.approx(f(best.alpha_star), rel=1e-12)
    assert all(f(best.alpha_star + d) > best.norm_star for d in (-1e-3, 1e-3))
    assert f(1.99 * best.alpha_star) < best.norm_v < f(2.01 * best.alpha_star)


def test_theorem2_by_hand():
    r = theorem2(torch.tensor([2., 0.]), torch.tensor([-1., 1.]), 2)
    assert r.inner == -2 and r.alpha_star == pytest.approx(-2.) and r.norm_star == pytest.approx(math.sqrt(2))
    for v in ([0., 1.], [1., 1.]):  # zero and positive inner product
        r = theorem2(torch.tensor([1., 0.]), torch.tensor(v), 2)
        assert r.alpha_star is None and r.norm_star == r.norm_v == 1


def test_ldp_values():
    assert label_ldp_epsilon(10, 1, .5, -.5) == pytest.approx(math.log(11), abs=1e-12)
    assert label_ldp_epsilon(10, 1, .5, -1.) == pytest.approx(0, abs=1e-12)
    assert alpha_bounds(10, 1, .5) == pytest.approx((-10 / 9, 0))


@pytest.mark.parametrize("K, g1, g2, a", [(10, 1, .5, -.5), (3, 2., .7, -.9), (5, 1., .9, -.1), (2, 4., 1., -5.)])
def test_ldp_by_weights(K, g1, g2, a):
    weights = torch.full((K,), -g2 * a / K, dtype=torch.float64); weights[0] = g1 - g2 * (1 + (1 - K) / K * a)
    q = weights / weights.sum()  # claimed minimiser
    loss = lambda z: -(weights * z.log_softmax(0)).sum()
    assert (weights > 0).all() and torch.func.grad(loss)(q.log()).norm() < 1e-12
    assert label_ldp_epsilon(K, g1, g2, a) == pytest.approx(abs(math.log(q[0] / q[1])), abs=1e-12)


@pytest.mark.parametrize("args", [(10, .5, .5, -.1), (10, .4, .5, -.1), (10, 1, 0, -.1), (1, 1, .5, -.1), (10, 1, .5, 0.), (10, 1, .5, -1.2), (10, 1, .5, math.nan)])
def test_ldp_bad_input(args):
    with pytest.raises(ValueError, match="expected"): label_ldp_epsilon(*args)


def test_ldp_error_prints_the_interval():
    with pytest.raises(ValueError, match=r"\(-1\.11111, 0\)"): label_ldp_epsilon(10, 1, .5, -3.)


def test_influence_bad_input():
    X, y = torch.randn(6, 2), torch.arange(6) % 2
    for kw, word in ((dict(forget=torch.arange(6)), "forget"), (dict(ridge=0.), "ridge"), (dict(num_classes=1), "num_classes"), (dict(y=y + 1), "labels"), (dict(X=X * math.nan), "NaN"), (dict(X=X[:4]), "expected")):
        a = {**dict(X=X, y=y, forget=torch.tensor([0]), ridge=1., num_classes=2), **kw}
        with pytest.raises(ValueError, match=word): softmax_influence(a["X"], a["y"], a["forget"], ridge=a["ridge"], num_classes=a["num_classes"])
