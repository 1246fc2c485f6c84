"""The second-order baselines against closed forms and against their defining recursions."""
import math

import pytest
import torch

from iclr26.f2sa_p import AIDCG, ITD, MRBO, VRBO, BilevelProblem, StocBiO, implicit_hypergradient

torch.set_num_threads(1)
f64 = lambda v: torch.tensor(v, dtype=torch.float64)
A = torch.tensor([[2., .3, 0.], [.3, 1., .2], [0., .2, 1.5]], dtype=torch.float64)
quadratic = BilevelProblem(lambda x, y, _: (y**2).sum() / 2 + y @ x, lambda x, y, _: y @ A @ y / 2 - y @ x.sin())
x0, y0 = f64([.3, -.5, 1.]), torch.zeros(3, dtype=torch.float64)


def estimate(cls, **kw):
    opt = cls(quadratic, x0, y0, inner_steps=400, inner_lr=.2, outer_lr=1e-12, **kw)
    opt.step()
    return opt


def test_stocbio_is_the_truncated_neumann_series():
    y, eta, Q = torch.linalg.solve(A, x0.sin()), .25, 7
    fy = y + x0
    v = sum(torch.linalg.matrix_power(torch.eye(3, dtype=torch.float64) - eta * A, q) @ fy for q in range(Q + 1)) * eta
    opt = estimate(StocBiO, neumann_terms=Q, neumann_lr=eta)
    assert torch.allclose(opt.phi, y + x0.cos() * v, atol=1e-10)


def test_stocbio_zero_terms_and_many_terms():
    exact = implicit_hypergradient(quadratic, x0, torch.linalg.solve(A, x0.sin()))
    assert torch.allclose(estimate(StocBiO, neumann_terms=300).phi, exact, atol=1e-8)
    y = torch.linalg.solve(A, x0.sin())
    assert torch.allclose(estimate(StocBiO, neumann_terms=0, neumann_lr=.1).phi, y + x0.cos() * .1 * (y + x0), atol=1e-10)


@pytest.mark.parametrize("cls,kw", [(AIDCG, dict(cg_steps=3)), (AIDCG, dict(cg_steps=25)), (ITD, {})])
def test_exact_methods_reach_the_implicit_hypergradient(cls, kw):
    exact = implicit_hypergradient(quadratic, x0, torch.linalg.solve(A, x0.sin()))
    assert torch.allclose(estimate(cls, **kw).phi, exact, atol=1e-9)


def test_itd_differentiates_through_exactly_k_steps():
    K, eta = 4, .1
    def unrolled(x):
        y = y0
        for _ in range(K): y = y - eta * (A @ y - x.sin())
        return (y**2).sum() / 2 + y @ x
    opt = ITD(quadratic, x0, y0, inner_steps=K, inner_lr=eta, outer_lr=.1)
    opt.step()
    assert torch.allclose(opt.phi, torch.func.grad(unrolled)(x0), atol=1e-13) and torch.allclose(opt.x, x0 - .1 * opt.phi)


def noisy():
    draw = lambda g: .3 * torch.randn(3, generator=g, dtype=torch.float64)
    return BilevelProblem(lambda x, y, n: quadratic.upper(x, y, None) + n @ y, lambda x, y, n: quadratic.lower(x, y, None) + n @ y + n @ (y * x), upper_batches=draw, lower_batches=draw)


def series(opt, x, y, batches):
    "stocBiO's estimate written with dense matrices."
    up, hs, cross = batches
    H = lambda n: A
    fx, fy, eta = y, y + x + up, .2
    v = total = fy
    for n in hs:
        v = v - eta * H(n) @ v
        total = total + v
    return fx - (-x.cos() + cross) * (eta * total)


def test_mrbo_recursion_on_noise():
    problem, a, b, g = noisy(), .6, .7, torch.Generator().manual_seed(9)
    opt = MRBO(problem, x0, y0, inner_lr=.2, outer_lr=.1, upper_momentum=a, lower_momentum=b, neumann_terms=3, generator=torch.Generator().manual_seed(9))
    draw = lambda: .3 * torch.randn(3, generator=g, dtype=torch.float64)
    x, y, memory = x0, y0, None
    for _ in range(5):
        low, batches = draw(), (draw(), [draw() for _ in range(3)], draw())
        u = lambda x, y: series(opt, x, y, batches)
        w = lambda x, y: A @ y - x.sin() + low + low * x
        d, e = u(x, y), w(x, y)
        if memory: d, e = d + (1 - a) * (memory[2] - u(*memory[:2])), e + (1 - b) * (memory[3] - w(*memory[:2]))
        memory = (x, y, d, e)
        x, y = x - .1 * d, y - .2 * e
        opt.step()
        assert torch.allclose(opt.phi, d, atol=1e-12) and torch.allclose(opt.x, x, atol=1e-12) and torch.allclose(opt.y(), y, atol=1e-12)


def test_vrbo_recursion_on_noise():
    problem, K, g = noisy(), 2, torch.Generator().manual_seed(4)
    opt = VRBO(problem, x0, y0, inner_steps=K, inner_lr=.2, outer_lr=.1, neumann_terms=2, restart_every=3, restart_batches=2, generator=torch.Generator().manual_seed(4))
    draw = lambda: .3 * torch.randn(3, generator=g, dtype=torch.float64)
    def sample():
        low, batches = draw(), (draw(), [draw() for _ in range(2)], draw())
        return (lambda x, y: series(opt, x, y, batches)), (lambda x, y: A @ y - x.sin() + low + low * x)
    x, y = x0, y0
    for t in range(7):
        if t % 3 == 0:
            rows = [tuple(fn(x, y) for fn in sample()) for _ in range(2)]
            v, w = (sum(r[i] for r in rows) / 2 for i in (0, 1))
            old = x, y
        x = x - .1 * v
        first = v
        for _ in range(K):
            u, low = sample()
            v, w = v + u(x, y) - u(*old), w + low(x, y) - low(*old)
            old, y = (x, y), y - .2 * w
        assert opt.step_cost == (2 * K + (2 if t % 3 == 0 else 0)) * (1 + 1 + 2 * 3)
        opt.step()
        assert torch.allclose(opt.phi, first, atol=1e-12) and torch.allclose(opt.x, x, atol=1e-12) and torch.allclose(opt.y(), y, atol=1e-12)


def test_momentum_must_be_a_fraction():
    for kw in (dict(upper_momentum=0.0), dict(lower_momentum=1.5)):
        with pytest.raises(ValueError, match="momentum"): MRBO(quadratic, x0, y0, inner_lr=.1, outer_lr=.1, **kw)
    with pytest.raises(ValueError, match="cg_steps"): AIDCG(quadratic, x0, y0, inner_lr=.1, outer_lr=.1, cg_steps=0)
    with pytest.raises(ValueError, match="restart_batches"): VRBO(quadratic, x0, y0, inner_lr=.1, outer_lr=.1, restart_batches=0)


def test_outer_batches_average_estimates():
    problem = noisy()
    single = StocBiO(problem, x0, y0, inner_steps=1, inner_lr=.2, outer_lr=.1, outer_batches=50)
    info = single.step()
    assert (info.sfo_upper, info.sfo_lower, info.hvp) == (50, 1, 550) and math.isfinite(info.phi_norm)
