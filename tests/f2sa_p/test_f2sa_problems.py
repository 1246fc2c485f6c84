"""Exact helpers against closed forms and dense linear algebra."""
import math

import numpy as np
import pytest
import torch

from iclr26.f2sa_p import BilevelProblem, fd_hypergradient, implicit_hypergradient, solve_lower

torch.set_num_threads(1)
f64 = lambda v: torch.tensor(v, dtype=torch.float64)


def scalar(mu=2.0, **kw):
    return BilevelProblem(lambda x, y, _: (y**2 / 2).sum(), lambda x, y, _: (mu / 2 * (y - x) ** 2).sum(), **kw)


def ridge(seed=0, batched=False):
    "g = |A y - b|^2 / 2n + sum exp(x) y^2 / 2, f = |C y - d|^2 / 2m: everything is linear algebra."
    rng = np.random.default_rng(seed)
    A, b, C, d = (torch.from_numpy(rng.standard_normal(s)) for s in ((15, 6), (15,), (9, 6), (9,)))
    low = lambda x, y, _: ((y @ A.T - b) ** 2).sum(-1) / 30 + (x.exp() * y**2).sum(-1) / 2
    up = lambda x, y, _: ((y @ C.T - d) ** 2).sum(-1) / 18
    H = lambda x, nu=0.0: A.T @ A / 15 + torch.diag(x.exp()) + nu * C.T @ C / 9
    y_of = lambda x, nu=0.0: torch.linalg.solve(H(x, nu), A.T @ b / 15 + nu * C.T @ d / 9)
    def hypergradient(x):
        y = y_of(x)
        return -x.exp() * y * torch.linalg.solve(H(x), C.T @ (C @ y - d) / 9)
    return BilevelProblem(up, low, batched=batched), y_of, hypergradient


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("nu", [0.0, .1, -.05])
def test_solve_lower_equals_linear_solve(batched, nu):
    problem, y_of, _ = ridge(batched=batched)
    x = torch.linspace(-1, 1, 6, dtype=torch.float64)
    assert (solve_lower(problem, x, torch.zeros(6, dtype=torch.float64), nu) - y_of(x, nu)).abs().max() < 1e-9


@pytest.mark.parametrize("batched", [False, True])
def test_implicit_hypergradient_equals_closed_form(batched):
    problem, y_of, hypergradient = ridge(1, batched)
    x = torch.linspace(-1, .5, 6, dtype=torch.float64)
    assert (implicit_hypergradient(problem, x, y_of(x)) - hypergradient(x)).norm() < 1e-9


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_zero_dimensional_and_one_element_variables(shape):
    x = torch.full(shape, 1.5, dtype=torch.float64)
    y = solve_lower(scalar(), x, torch.zeros(shape, dtype=torch.float64))
    assert y.shape == shape and torch.allclose(y, x)
    grad = implicit_hypergradient(scalar(), x, y)
    assert grad.shape == shape and torch.allclose(grad, x)


@pytest.mark.parametrize("p", range(1, 9))
def test_difference_equals_the_scalar_closed_form(p):
    mu, x, nu = 2.0, 1.5, .2
    h = lambda nu: mu * x * nu / (mu + nu)
    from iclr26.f2sa_p import fd_coefficients, fd_nodes
    expected = sum(w * h(j * nu) for j, w in fd_coefficients(p).items()) / nu
    exact = lambda x, nu: mu * x / (mu + nu)
    assert abs(fd_hypergradient(scalar(), f64(x), exact, p, nu) - expected) < 1e-13
    assert abs(fd_hypergradient(scalar(), f64(x), {j: exact(f64(x), j * nu) for j in fd_nodes(p)}, p, nu) - expected) < 1e-13


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5])
def test_error_falls_with_the_order(p):
    problem, y_of, hypergradient = ridge(2)
    x = torch.zeros(6, dtype=torch.float64)
    error = lambda nu: (fd_hypergradient(problem, x, y_of, p, nu) - hypergradient(x)).norm().item()
    assert abs(math.log2(error(.05) / error(.025)) - p) < .3


def test_dict_variables_keep_their_structure():
    low = lambda x, y, _: ((y["a"] - x["s"]) ** 2).sum() + ((y["b"] - x["s"].sum()) ** 2).sum() / 2
    up = lambda x, y, _: (y["a"] ** 2).sum() / 2 + y["b"].sum()
    x, y0 = {"s": f64([1., 2.])}, {"a": f64([0., 0.]), "b": f64([[0.]])}
    y = solve_lower(BilevelProblem(up, low), x, y0)
    assert y.keys() == y0.keys() and torch.allclose(y["a"], x["s"]) and torch.allclose(y["b"], f64([[3.]]))
    grad = implicit_hypergradient(BilevelProblem(up, low), x, y)
    assert set(grad) == {"s"} and torch.allclose(grad["s"], f64([2., 3.]))


def test_missing_dependence_is_a_zero_gradient():
    constant = BilevelProblem(lambda x, y, _: torch.tensor(3.0, dtype=torch.float64), lambda x, y, _: (y**2).sum())
    assert implicit_hypergradient(constant, f64([1., 2.]), f64([0.])).tolist() == [0, 0]


def test_inputs_are_not_changed_and_results_are_detached():
    x, y = f64([1.5]).requires_grad_(), f64([0.])
    result = solve_lower(scalar(), x, y)
    assert y.item() == 0 and not result.requires_grad and x.grad is None and not implicit_hypergradient(scalar(), x, result).requires_grad


def test_failures_are_named():
    concave = BilevelProblem(lambda x, y, _: y.sum(), lambda x, y, _: -(y**2).sum())
    with pytest.raises(RuntimeError): solve_lower(concave, f64([1.]), f64([1.]))
    with pytest.raises(RuntimeError, match="convex"): implicit_hypergradient(concave, f64([1.]), f64([1.]))
    with pytest.raises(RuntimeError, match="gradient norm"): solve_lower(ridge()[0], torch.zeros(6, dtype=torch.float64), 100 * torch.ones(6, dtype=torch.float64), maxiter=1, tol=1e-14)
    with pytest.raises(ValueError, match="nu"): fd_hypergradient(scalar(), f64(1.), lambda x, nu: x, 2, 0.0)
    with pytest.raises(ValueError, match="y_nodes"): fd_hypergradient(scalar(), f64(1.), {1: f64(1.)}, 2, .1)
    with pytest.raises(TypeError, match="x"): solve_lower(scalar(), torch.tensor(1), f64(1.))
    with pytest.raises(TypeError, match="dtype"): solve_lower(scalar(), torch.tensor(1.), f64(1.))
    with pytest.raises(ValueError, match="y0.*finite"): solve_lower(scalar(), f64(1.), f64(math.nan))
    for name in ("upper_batches", "lower_batches"):
        with pytest.raises(ValueError, match=name): scalar(**{name: []})
    with pytest.warns(RuntimeWarning, match="residual"): implicit_hypergradient(ridge()[0], torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64), maxiter=1)


@pytest.mark.parametrize("which", ["upper", "lower"])
def test_non_scalar_loss_names_the_function(which):
    good, bad = lambda x, y, _: (y**2).sum(), lambda x, y, _: y**2
    problem = BilevelProblem(*(bad if w == which else good for w in ("upper", "lower")))
    with pytest.raises(ValueError, match=which): implicit_hypergradient(problem, f64([1.]), f64([1., 2.]))
