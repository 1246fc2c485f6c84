"""Whatever is wrong with an argument, the error names it, its value and what was expected, before any work."""
import math

import numpy as np
import pytest
import torch

from iclr26.continuum_icl import *
from iclr26.continuum_icl.operators import check_count, check_positive

GRID = Grid((6, 4), (1.0, 2.0))
KERNEL = OperatorKernel(RBFKernel(GRID), ConvolutionOperator.from_stencil(GRID, "gaussian", 0.1))
FIELD = GaussianRandomField(GRID)
F, U = torch.randn(2, 2, 4, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CONTEXT, QUESTION, OUTPUTS = F[:, :3], F[:, 3:], U[:, :3]
TASK = lambda g: poisson_task(FIELD, n=3, generator=g)
LEARNER = lambda: ContinuumTransformer(KERNEL, 2, step=0.1, learnable=True)

COUNTS = {
    "shape": lambda n: Grid((4, n)), "modes": lambda n: SpectralMultiplier(GRID, modes=n), "n_layers": lambda n: ContinuumTransformer(KERNEL, n), "steps": lambda n: closed_form(KERNEL, CONTEXT, OUTPUTS, QUESTION, steps=n, step=.1),
    "steps ": lambda n: operator_gradient_descent(KERNEL, CONTEXT, OUTPUTS, steps=n, step=.1), "steps  ": lambda n: expected_risk(KERNEL, CONTEXT, QUESTION, steps=n, step=.1), "steps   ": lambda n: pretrain(LEARNER(), TASK, steps=n),
    "n": lambda n: FIELD.sample(n), "n ": lambda n: poisson_task(FIELD, n=n), "batch": lambda n: heat_task(FIELD, t=1.0, batch=n), "n_terms": lambda n: random_operator_task(KERNEL, FIELD, n_terms=n),
}
NUMBERS = {
    "sigma": lambda x: RBFKernel(GRID, x), "sigma ": lambda x: ConvolutionOperator.from_stencil(GRID, "gaussian", x), "temperature": lambda x: SoftmaxKernel(GRID, x), "step": lambda x: ContinuumAttention(KERNEL, step=x),
    "step ": lambda x: ContinuumTransformer(KERNEL, 3, step=x), "step  ": lambda x: ContinuumTransformer(KERNEL, 2, step=[0.1, x]), "step   ": lambda x: InContextOperatorRegressor(KERNEL, step=x),
    "step    ": lambda x: closed_form(KERNEL, CONTEXT, OUTPUTS, QUESTION, steps=2, step=x), "lengths": lambda x: Grid((4, 4), (1.0, x)), "alpha": lambda x: GaussianRandomField(GRID, alpha=x), "t": lambda x: heat_task(FIELD, t=x),
    "lr": lambda x: pretrain(LEARNER(), TASK, steps=1, lr=x), "f_norm": lambda x: TASK(None).rescaled(x or -1.0),
}
AMOUNTS = {  # zero is fine
    "ridge": lambda x: blup(KERNEL, CONTEXT, OUTPUTS, QUESTION, ridge=x), "ridge ": lambda x: posterior_variance(KERNEL, CONTEXT, QUESTION, ridge=x), "ridge  ": lambda x: InContextOperatorRegressor(KERNEL, ridge=x),
    "rcond": lambda x: blup(KERNEL, CONTEXT, OUTPUTS, QUESTION, rcond=x), "noise": lambda x: log_marginal_likelihood(KERNEL, CONTEXT, OUTPUTS, noise=x), "weight_decay": lambda x: pretrain(LEARNER(), TASK, steps=1, weight_decay=x),
}

@pytest.mark.parametrize("name", COUNTS)
def test_counts(name):
    for bad in (-1, 1.5, math.nan, -math.inf, True, "3", "a", [2]):
        with pytest.raises((ValueError, TypeError), match=f"^{name.strip()}=.*expected an integer"): COUNTS[name](bad)
    for good in (2, 2.0, np.int64(2), torch.tensor(2)): COUNTS[name](good)

@pytest.mark.parametrize("name", [*NUMBERS, *AMOUNTS])
def test_numbers(name):
    make = {**NUMBERS, **AMOUNTS}[name]
    for bad in (-1.0, math.nan, math.inf, "a", [1.0, 2.0]):
        with pytest.raises((ValueError, TypeError), match=f"^{name.strip()}(=| has )"): make(bad)
    make(0.1), make(np.float64(0.1))
    if name in AMOUNTS: make(0.0)
    else:
        with pytest.raises(ValueError, match=f"^{name.strip()}="): make(0.0)

@pytest.mark.parametrize("make", [lambda g: SpectralMultiplier(g), lambda g: IdentityOperator(g), lambda g: ConvolutionOperator.from_stencil(g, "gaussian", 1.0), lambda g: ConvolutionOperator.from_symbol(g, lambda k: k[..., 0]),
                                  lambda g: ConvolutionOperator.from_array(g, torch.ones(4), (0,)), lambda g: LinearKernel(g), lambda g: RBFKernel(g), lambda g: GaussianRandomField(g)])
def test_grids_are_grids(make):
    for bad in ((4, 4), 4, None):
        with pytest.raises(TypeError, match="^grid=.*expected a Grid"): make(bad)

@pytest.mark.parametrize("make", [lambda k: ContinuumAttention(k), lambda k: ContinuumTransformer(k, 2), lambda k: InContextOperatorRegressor(k), lambda k: blup(k, CONTEXT, OUTPUTS, QUESTION),
                                  lambda k: closed_form(k, CONTEXT, OUTPUTS, QUESTION, steps=2, step=.1), lambda k: operator_gradient_descent(k, CONTEXT, OUTPUTS, steps=1, step=.1), lambda k: objective(k, CONTEXT, OUTPUTS, OUTPUTS),
                                  lambda k: nearest_context(k, CONTEXT, OUTPUTS, QUESTION), lambda k: posterior_variance(k, CONTEXT, QUESTION), lambda k: log_marginal_likelihood(k, CONTEXT, OUTPUTS), lambda k: sample_kappa_gaussian(k, CONTEXT),
                                  lambda k: random_operator_task(k, FIELD)])
def test_kernels_are_operator_kernels(make):
    for bad in (RBFKernel(GRID), None):
        with pytest.raises(TypeError, match="^kernel=.*expected an OperatorKernel"): make(bad)

@pytest.mark.parametrize("make", [lambda f: poisson_task(f), lambda f: heat_task(f, t=1.0), lambda f: advection_task(f, shift=(0.1, 0.1)), lambda f: random_operator_task(KERNEL, f)])
def test_fields_are_random_fields(make):
    with pytest.raises(TypeError, match="^field=.*expected a GaussianRandomField"): make(GRID)

@pytest.mark.parametrize("error, match, call", [
    (ValueError, "^shape=", lambda: Grid(())), (TypeError, "^shape=", lambda: Grid("ab")), (TypeError, "^shape=", lambda: Grid(None)), (TypeError, "^lengths=", lambda: Grid((4,), "a")), (ValueError, "^lengths=", lambda: Grid((4, 4), 1.0)),
    (TypeError, "^dtype=", lambda: SpectralMultiplier(GRID, dtype=torch.int64)), (ValueError, "^step='fast'", lambda: InContextOperatorRegressor(KERNEL, step="fast")), (ValueError, "^step='fast'", lambda: ContinuumTransformer(KERNEL, 2, step="fast")),
    (ValueError, "^offset=", lambda: FIELD.covariance(0)), (ValueError, "^offset=", lambda: FIELD.covariance((0.5, 0))), (ValueError, "^shift=", lambda: advection_task(FIELD, shift=0.1)), (ValueError, "^shift=", lambda: advection_task(FIELD, shift=(0.1,))),
    (TypeError, "^sampler returned a tuple", lambda: pretrain(LEARNER(), lambda g: (F, U), steps=1)), (TypeError, "^a is a ndarray", lambda: hs_cosine(np.ones(3), np.ones(3))),
    (ValueError, "^f has shape .*at least one field", lambda: ContinuumTransformer(KERNEL, 2)(F[:0], OUTPUTS[:0])), (ValueError, "^f_test has shape .*at least one field", lambda: blup(KERNEL, CONTEXT, OUTPUTS, QUESTION[:, :0])),
])
def test_messages(error, match, call):
    with pytest.raises(error, match=match): call()

def test_numpy_shapes_make_the_same_grid(): assert Grid(np.array([6, 4]), np.array([1.0, 2.0])) == GRID == Grid(torch.Size([6, 4]), [1, 2]) and Grid(5) == Grid((5,))
def test_checks_return_the_value(): assert check_count("n", np.int64(3)) == 3 and type(check_count("n", 3.0)) is int and check_positive("x", 0, zero=True) == 0
