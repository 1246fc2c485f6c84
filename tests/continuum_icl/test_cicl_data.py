"""Random fields against their exact covariance, samplers against theirs, equations against finite differences, and faults."""
import dataclasses
import math

import pytest
import torch

from iclr26.continuum_icl import (ConvolutionOperator, GaussianRandomField, Grid, ICLTask, LinearKernel, OperatorKernel, RBFKernel, SoftmaxKernel, advection_task, heat_task, poisson_task,
                                  random_operator_task, sample_kappa_gaussian)

torch.set_num_threads(1)
seeded = lambda s: torch.Generator().manual_seed(s)
double = torch.float64


def make_kernel(grid, kx=RBFKernel):
    return OperatorKernel(kx(grid), ConvolutionOperator.from_symbol(grid, lambda k: torch.exp(-k.square().sum(-1) * 1e-3)))


# ---- Gaussian random fields

@pytest.mark.parametrize("shape, lengths, zero_mean", [((16,), (1.0,), True), ((9,), (2.5,), False), ((8, 6), (1.0, 3.0), True), ((5, 4), (2.0, 0.7), False)])
def test_covariance_is_the_fourier_sum(shape, lengths, zero_mean):
    grid = Grid(shape, lengths)
    field = GaussianRandomField(grid, alpha=3.0, beta=2.0, gamma=1.5, zero_mean=zero_mean)
    for offset in [(0,) * grid.ndim, (1,) * grid.ndim, tuple(range(grid.ndim))]:
        total = 0.0
        for index in torch.cartesian_prod(*[torch.arange(n) for n in shape]).reshape(-1, grid.ndim).tolist():
            signed = [i - n if 2 * i >= n else i for i, n in zip(index, shape)]
            k = [2 * math.pi * s / l for s, l in zip(signed, lengths)]
            if zero_mean and not any(signed): continue
            total += 3.0 * (sum(x * x for x in k) + 2.0) ** -1.5 * math.cos(sum(a * o * l / n for a, o, l, n in zip(k, offset, lengths, shape)))
        assert math.isclose(field.covariance(offset), total / math.prod(lengths), rel_tol=1e-10, abs_tol=1e-14)


def test_samples_have_that_covariance_at_every_offset():
    grid = Grid((6, 5), (1.0, 2.0))
    field = GaussianRandomField(grid, alpha=50.0, gamma=1.2, zero_mean=False)
    x = field.sample(20000, generator=seeded(0)).flatten(1)
    exact = torch.tensor([[field.covariance(((i // 5 - j // 5), (i % 5 - j % 5))) for j in range(30)] for i in range(30)])
    error = (exact.square() + field.covariance((0, 0)) ** 2).sqrt() / 20000**.5
    assert (((x.T @ x) / 20000 - exact).abs() < 5 * error).all()


def test_zero_mean_and_mean_square_norm():
    grid = Grid((12, 12), (2.0, 1.0))
    field = GaussianRandomField(grid, alpha=10.0, gamma=1.5)
    x = field.sample(4000, generator=seeded(1))
    assert x.mean((1, 2)).abs().max() < 1e-12
    assert math.isclose(float((grid.norm(x) ** 2).mean()), float(field.spectrum().sum()), rel_tol=.05)   # E||f||^2 is the trace


def test_fields_are_not_even_and_use_all_directions():
    x = GaussianRandomField(Grid((16, 16)), gamma=1.0).sample(200, generator=seeded(2))
    mirrored = x.flip(-1, -2).roll((1, 1), (-1, -2))
    odd_share = (x - mirrored).square().sum((1, 2)) / (4 * x.square().sum((1, 2)))
    assert abs(float(odd_share.mean()) - .5) < .05        # the published generator gives 0
    power = torch.fft.fft2(x).abs().square().mean(0)
    assert .7 < float(power[1:8, 1:8].sum() / power[9:, 1:8].sum()) < 1.4   # k and its mirror image in one axis


def test_same_generator_same_field_and_dtype():
    field = GaussianRandomField(Grid((8, 8)))
    a, b = field.sample(3, generator=seeded(5)), field.sample(3, generator=seeded(5), dtype=torch.float32)
    assert torch.equal(a, field.sample(3, generator=seeded(5))) and b.dtype == torch.float32 and torch.equal(a.float(), b)
    assert not torch.equal(a, field.sample(3, generator=seeded(6)))


@pytest.mark.parametrize("name", ["alpha", "beta", "gamma"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_field_parameters_are_checked(name, value):
    with pytest.raises(ValueError, match=name): GaussianRandomField(Grid((8,)), **{name: value})


def test_field_arguments_are_checked():
    field = GaussianRandomField(Grid((8, 8)))
    with pytest.raises(ValueError, match="n="): field.sample(0)
    with pytest.raises(ValueError, match="offset"): field.covariance((1,))
    with pytest.raises(ValueError, match="offset"): field.covariance((.5, 1))


# ---- exact sampler

def test_kappa_gaussian_covariance_between_tokens_and_points():
    grid = Grid((5,), (2.0,))
    kernel = OperatorKernel(RBFKernel(grid, .8), ConvolutionOperator.from_symbol(grid, lambda k: 1 / (1 + k[..., 0] ** 2)))
    f = GaussianRandomField(grid, alpha=1.0, gamma=1.0).sample(3, generator=seeded(0))
    u = sample_kappa_gaussian(kernel, f.expand(40000, 3, 5), generator=seeded(1)).flatten(1)
    impulses = torch.eye(5, dtype=double) / grid.cell_volume                      # <u, impulse> is the value at a point
    space = kernel.ky(impulses)
    exact = torch.kron(kernel.gram(f[None])[0], space)
    scale = (exact.diagonal()[:, None] * exact.diagonal()[None] + exact**2).sqrt() / 40000**.5
    assert (((u.T @ u) / 40000 - exact).abs() < 5 * scale).all()


def test_repeated_inputs_get_equal_outputs():
    grid = Grid((8,))
    f = GaussianRandomField(grid, alpha=100.0).sample(2, generator=seeded(0))[None, [0, 1, 0]]
    u = sample_kappa_gaussian(make_kernel(grid), f, generator=seeded(1))
    assert torch.allclose(u[:, 0], u[:, 2], atol=1e-6) and not torch.allclose(u[:, 0], u[:, 1], atol=1e-3)
    assert u.shape == f.shape and torch.equal(u, sample_kappa_gaussian(make_kernel(grid), f, generator=seeded(1)))
    single = sample_kappa_gaussian(make_kernel(grid), f.float(), generator=seeded(1))
    assert single.dtype == torch.float32 and torch.allclose(single.double(), u, atol=1e-2)


def test_sampler_refuses_what_has_no_gaussian():
    grid = Grid((8,))
    f = GaussianRandomField(grid).sample(3, generator=seeded(0))[None]
    ky = ConvolutionOperator.from_symbol(grid, torch.ones(8, dtype=double))
    negative = ConvolutionOperator.from_symbol(grid, -torch.ones(8, dtype=double), allow_indefinite=True)
    shifted = ConvolutionOperator.from_array(grid, torch.eye(8, dtype=double)[1], (0,), allow_indefinite=True)
    class Wrong:
        "Says that it is positive, and is not."
        def __init__(self): self.grid, self.is_psd = grid, True
        def __call__(self, a, b): return -(a @ b.mT) - 1
    for kernel, text in ((OperatorKernel(SoftmaxKernel(grid), ky), "positive semi-definite"), (OperatorKernel(RBFKernel(grid), negative), "ky"), (OperatorKernel(RBFKernel(grid), shifted), "ky"),
                         (OperatorKernel(Wrong(), ky), "eigenvalue")):
        with pytest.raises(ValueError, match=text): sample_kappa_gaussian(kernel, f)
    with pytest.raises(ValueError): sample_kappa_gaussian(make_kernel(grid), f[0])
    with pytest.raises(TypeError): sample_kappa_gaussian(make_kernel(grid), f.to(torch.complex128))


# ---- tasks

def test_random_operator_is_the_sum_of_its_terms():
    grid = Grid((6, 4))
    kernel, field = make_kernel(grid, lambda g: RBFKernel(g, .01)), GaussianRandomField(grid)
    task = random_operator_task(kernel, field, n=3, batch=2, n_terms=4, generator=seeded(3))
    g = seeded(3)
    f = field.sample(8, generator=g).reshape(2, 4, 6, 4)
    phi, psi = (field.sample(8, generator=g).reshape(2, 4, 6, 4) for _ in range(2))
    lam = torch.randn(2, 4, generator=g, dtype=double)
    assert torch.equal(task.f, f)
    for b in range(2):
        for t in range(4):
            u = sum(lam[b, p] * torch.exp(-grid.norm(f[b, t] - phi[b, p]) ** 2 / (2 * .01**2)) * kernel.ky(psi[b, p]) for p in range(4))
            assert torch.allclose(u, task.target[b] if t == 3 else task.u[b, t], atol=1e-12)


def test_linear_random_operators_are_linear():
    grid = Grid((8, 8))
    kernel = make_kernel(grid, LinearKernel)
    task = random_operator_task(kernel, GaussianRandomField(grid), n=40, n_terms=5, generator=seeded(0))
    weights = torch.linalg.lstsq(task.f[0, :-1].flatten(1).T, task.f[0, -1].flatten()[:, None]).solution[:, 0]
    fitted = (weights[:, None, None] * task.f[0, :-1]).sum(0)
    predicted = (weights[:, None, None] * task.u[0]).sum(0)
    assert grid.norm(fitted - task.f[0, -1]) < .3 * grid.norm(task.f[0, -1])
    assert grid.norm(predicted - task.target[0]) < .3 * grid.norm(task.target[0])


def five_point(u, grid):
    out = 0
    for axis, h in zip((-2, -1), grid.spacing): out = out + (u.roll(1, axis) + u.roll(-1, axis) - 2 * u) / h**2
    return out


def test_poisson_solves_the_discrete_equation_to_second_order():
    grid = Grid((64, 96), (1.0, 1.5))
    task = poisson_task(GaussianRandomField(grid), n=2, generator=seeded(0))
    f, u = task.f[0, -1], task.target[0]
    assert u.mean().abs() < 1e-12 * u.abs().max()
    errors = [float((five_point(u[::s, ::s], Grid((64 // s, 96 // s), (1.0, 1.5))) - f[::s, ::s]).norm() / f[::s, ::s].norm()) for s in (2, 1)]
    assert errors[1] < 5e-3 and 3.7 < errors[0] / errors[1] < 4.3


def test_equations_against_a_single_wave():
    grid = Grid((12, 10), (1.0, 2.0))
    field = GaussianRandomField(grid, gamma=1.0)
    x, y = grid.points().unbind(-1)
    k = (2 * math.pi * 2, 2 * math.pi * 1 / 2)
    wave = lambda dx=0, dy=0: torch.cos(k[0] * (x - dx) + k[1] * (y - dy) + .3)
    class One(GaussianRandomField):
        def sample(self, n, **_): return wave().expand(n, 12, 10)
    one, k2 = One(grid, gamma=1.0), k[0] ** 2 + k[1] ** 2
    assert torch.allclose(poisson_task(one, n=1).target[0], -wave() / k2, atol=1e-12)
    assert torch.allclose(heat_task(one, t=.004, n=1).target[0], math.exp(-.004 * k2) * wave(), atol=1e-12)
    assert torch.allclose(advection_task(one, shift=(.123, -.456), n=1).target[0], wave(.123, -.456), atol=1e-12)
    assert field.sample(1, generator=seeded(0)).shape == (1, 12, 10)


def test_heat_against_small_explicit_steps_and_as_a_semigroup():
    grid = Grid((32, 32))
    field = GaussianRandomField(grid)
    task = heat_task(field, t=1e-3, n=1, generator=seeded(0))
    state = task.f[0, -1]
    for _ in range(100): state = state + 1e-5 * five_point(state, grid)
    assert (state - task.target[0]).norm() < 5e-3 * task.target[0].norm()
    longer = heat_task(field, t=2e-3, n=1, generator=seeded(0))
    half = torch.fft.ifft2(torch.fft.fft2(task.target) * torch.exp(-1e-3 * grid.wavenumbers().square().sum(-1))).real
    assert torch.allclose(longer.target, half, atol=1e-14)


@pytest.mark.parametrize("shape, steps", [((8, 6), (3, -2)), ((9, 5), (-4, 1)), ((10,), (7,))])
def test_advection_by_whole_cells_is_a_roll_even_for_rough_fields(shape, steps):
    grid = Grid(shape, tuple(1.0 + i for i in range(len(shape))))
    task = advection_task(GaussianRandomField(grid, gamma=.2), shift=[s * h for s, h in zip(steps, grid.spacing)], n=2, generator=seeded(0))
    assert torch.allclose(task.target[0], task.f[0, -1].roll(steps, tuple(range(len(shape)))), atol=1e-12)
    assert torch.allclose(task.u[0, 1], task.f[0, 1].roll(steps, tuple(range(len(shape)))), atol=1e-12)


def test_rescaling():
    grid = Grid((8, 8), (2.0, 2.0))
    task = poisson_task(GaussianRandomField(grid), n=5, batch=3, generator=seeded(0))
    new = task.rescaled(2.0, 3.0)
    assert torch.allclose(grid.norm(new.f[:, :-1]).mean(1), torch.full((3,), 2.0, dtype=double)) and torch.allclose(grid.norm(new.u).mean(1), torch.full((3,), 3.0, dtype=double))
    ratio = new.u[:, 0] / task.u[:, 0]
    assert torch.allclose(new.target, ratio.mean((1, 2), keepdim=True) * task.target)
    kept = task.rescaled(None, 1.0)
    assert torch.equal(kept.f, task.f)
    with pytest.raises(ValueError, match="grid"): ICLTask(task.f, task.u, task.target).rescaled()
    with pytest.raises(ValueError, match="u_norm"): task.rescaled(1.0, 0.0)
    with pytest.raises(ValueError, match="norm > 0"): ICLTask(task.f, 0 * task.u, task.target, grid).rescaled()


def test_tasks_are_reproducible_and_frozen():
    field = GaussianRandomField(Grid((8, 8)))
    a, b = (heat_task(field, t=.01, n=3, batch=2, generator=seeded(9)) for _ in range(2))
    assert torch.equal(a.f, b.f) and torch.equal(a.target, b.target) and a.f.shape == (2, 4, 8, 8) and a.grid == field.grid
    with pytest.raises(dataclasses.FrozenInstanceError): a.f = b.f


def test_task_faults():
    grid = Grid((8, 8))
    field = GaussianRandomField(grid)
    f = field.sample(4, generator=seeded(0))[None]
    with pytest.raises(ValueError, match="u:"): ICLTask(f, f, f[:, 0])
    with pytest.raises(ValueError, match="target"): ICLTask(f, f[:, :3], f)
    with pytest.raises(ValueError, match="f:"): ICLTask(f[:, :1], f[:, :0], f[:, 0])
    with pytest.raises(ValueError, match="f:"): ICLTask(f, f[:, :3], f[:, 0], Grid((4, 4)))
    with pytest.raises(ValueError, match="zero_mean"): poisson_task(GaussianRandomField(grid, zero_mean=False))
    for t in (0.0, -1.0, math.nan): pytest.raises(ValueError, heat_task, field, t=t)
    for shift in ((.1,), (.1, math.inf)): pytest.raises(ValueError, advection_task, field, shift=shift)
    for wrong in (dict(n=0), dict(batch=0), dict(n=2.5), dict(n=True)): pytest.raises(ValueError, poisson_task, field, **wrong)
    with pytest.raises(ValueError, match="kernel.grid"): random_operator_task(make_kernel(Grid((4, 4))), field)
    with pytest.raises(ValueError, match="n_terms"): random_operator_task(make_kernel(grid), field, n_terms=0)
