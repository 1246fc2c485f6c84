"""Grids and operators of the continuum transformer against brute-force sums and dense matrices."""
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from iclr26.continuum_icl.operators import STENCILS, ConvolutionOperator, Grid, IdentityOperator, SpectralMultiplier, check_fields

torch.set_num_threads(1)
SHAPES = [(5,), (6,), (4, 3), (3, 4), (4, 6)]
grids = st.builds(lambda shape, scale: Grid(shape, [scale * (i + 1) for i in range(len(shape))]), st.sampled_from(SHAPES), st.sampled_from([1.0, 0.3, 2 * math.pi]))

def normal(*shape, seed=0, dtype=torch.float64): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)

def dense(operator):
    "Matrix of a linear operator on the flattened fields, column by column."
    n = operator.grid.size
    with torch.no_grad(): return operator(torch.eye(n, dtype=torch.float64).view(n, *operator.grid.shape)).flatten(1).T

def dft(grid):
    "F[k, x] = exp(-i k.x), from the definitions of wave numbers and points."
    phase = grid.wavenumbers().flatten(0, -2) @ grid.points().flatten(0, -2).T
    return torch.exp(-1j * phase)

def test_geometry():
    grid = Grid((4, 5), (2.0, 10.0))
    assert (grid.ndim, grid.size, grid.spacing, grid.cell_volume) == (2, 20, (0.5, 2.0), 1.0)
    assert grid.points()[3, 2].tolist() == [1.5, 4.0] and grid.points(torch.float32).dtype == torch.float32
    cycles = grid.wavenumbers() / (2 * math.pi)
    assert torch.allclose(cycles[:, 0, 0], torch.tensor([0, .5, -1, -.5]).double()) and torch.allclose(cycles[0, :, 1], torch.tensor([0, .1, .2, -.2, -.1]).double())
    assert Grid([7]).lengths == (1.0,) and Grid((4, 5), (2, 10)) == grid and hash(Grid((4, 5), (2, 10))) == hash(grid)
    with pytest.raises(AttributeError): grid.shape = (3,)

@pytest.mark.parametrize("shape, lengths", [((0,), None), ((), None), ((3, -1), None), ((2.5,), None), ((4,), (0.0,)), ((4,), (-1.0,)), ((4,), (math.nan,)), ((4,), (math.inf,)), ((4, 4), (1.0,))])
def test_bad_grids(shape, lengths):
    with pytest.raises(ValueError, match="shape=|lengths="): Grid(shape, lengths)

@given(st.integers(0, 4), st.integers(0, 4), st.sampled_from([9, 10, 33]), st.floats(0.1, 5))
@settings(max_examples=30, deadline=None)
def test_quadrature_of_waves_is_exact(j, k, n, length):
    grid = Grid((n,), (length,))
    x = grid.points()[:, 0] * 2 * math.pi / length
    exact = length * (1 if j == k == 0 else 0.5 if j == k else 0)
    assert math.isclose(grid.inner(torch.cos(j * x), torch.cos(k * x)).item(), exact, abs_tol=1e-12)
    assert math.isclose(grid.norm(torch.cos(k * x)).item() ** 2, length * (1 if k == 0 else 0.5), rel_tol=1e-12)

def test_inner_broadcasts_and_checks():
    grid = Grid((3, 4))
    assert grid.inner(normal(5, 1, 3, 4), normal(2, 3, 4)).shape == (5, 2)
    with pytest.raises(ValueError, match="g has shape"): grid.inner(normal(3, 4), normal(4, 3))

@pytest.mark.parametrize("shape", SHAPES)
def test_multiplier_is_its_fourier_definition(shape):
    grid = Grid(shape, [1.0 + i for i in range(len(shape))])
    operator = SpectralMultiplier(grid, init="random", generator=torch.Generator().manual_seed(3))
    F, R = dft(grid), operator.symbol().detach().flatten()
    matrix = F.conj().T @ torch.diag(R) @ F / grid.size
    assert matrix.imag.abs().max() < 1e-13
    assert torch.allclose(matrix.real, dense(operator), atol=1e-13)

@given(grids, st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_symbol_is_hermitian_part(grid, seed):
    init = torch.complex(normal(*grid.shape, seed=seed), normal(*grid.shape, seed=seed + 1))
    symbol = SpectralMultiplier(grid, init=init).symbol().detach()
    for index in torch.cartesian_prod(*[torch.arange(n) for n in grid.shape]).view(-1, grid.ndim).tolist():
        mirror = tuple(-i % n for i, n in zip(index, grid.shape))
        assert torch.isclose(symbol[tuple(index)], (init[tuple(index)] + init[mirror].conj()) / 2, atol=1e-15)

def test_modes_cut_by_integer_wave_number():
    grid = Grid((6, 5), (2.0, 7.0))
    symbol = SpectralMultiplier(grid, modes=1).symbol().detach().real
    kept = torch.zeros(6, 5)
    kept[[0, 1, 5]] = torch.tensor([1., 1, 0, 0, 1])
    assert torch.equal(symbol, kept.double())
    assert SpectralMultiplier(grid, modes=0)(normal(6, 5)).std() < 1e-15

def test_multiplier_keeps_dtype_and_seeds():
    grid = Grid((8,))
    first, again, other = (SpectralMultiplier(grid, init="random", generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(first.symbol(), again.symbol()) and not torch.equal(first.symbol(), other.symbol())
    assert first(normal(2, 8, dtype=torch.float32)).dtype == torch.float32
    assert torch.allclose(SpectralMultiplier(grid)(normal(8)), normal(8), atol=1e-15)
    assert [p.requires_grad for p in SpectralMultiplier(grid, trainable=False).parameters()] == [False] and len(list(first.parameters())) == 1
    clone = SpectralMultiplier(grid); clone.load_state_dict(first.state_dict())
    assert torch.equal(clone.symbol(), first.symbol())

@pytest.mark.parametrize("shape", [(6,), (4, 3)])
def test_multiplier_gradients(shape):
    grid = Grid(shape)
    operator = SpectralMultiplier(grid, init="random", modes=1, generator=torch.Generator().manual_seed(0))
    run = lambda parts, x: torch.func.functional_call(operator, {"parts": parts}, (x,))
    assert torch.autograd.gradcheck(run, (operator.parts.detach().clone().requires_grad_(), normal(2, *shape).requires_grad_()))

@pytest.mark.parametrize("make", [lambda g: SpectralMultiplier(g, modes=-1), lambda g: SpectralMultiplier(g, modes=1.5), lambda g: SpectralMultiplier(g, init="zeros"),
                                  lambda g: SpectralMultiplier(g, init=torch.ones(3)), lambda g: SpectralMultiplier(g, init=torch.full((8,), math.nan))])
def test_bad_multipliers(make):
    with pytest.raises(ValueError, match="modes|init"): make(Grid((8,)))

def test_check_fields():
    grid = Grid((4,))
    huge = torch.full((4,), 3e38)      # finite, although the sum is not
    assert check_fields("f", huge, grid) is huge
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="f holds 1 values that are NaN or infinite"): check_fields("f", torch.tensor([0, 0, value, 1]), grid)
    with pytest.raises(ValueError, match="holds 2"): check_fields("f", torch.tensor([math.inf, -math.inf, 0, 0]), grid)
    for bad in (torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.complex64), torch.zeros(4, dtype=torch.float16), [0.0] * 4):
        with pytest.raises(TypeError, match="^f "): check_fields("f", bad, grid)
    with pytest.raises(ValueError, match="expected 2 axes"): check_fields("f", torch.zeros(3, 4), grid, lead=2)

@pytest.mark.parametrize("shape, origin", [((5,), (0,)), ((6,), (2,)), ((4, 3), (1, 2)), ((3, 6), (2, 5))])
def test_from_array_is_the_sum(shape, origin):
    grid = Grid(shape)
    weights = normal(*shape, seed=1)
    operator = ConvolutionOperator.from_array(grid, weights, origin, allow_indefinite=True)
    u = normal(*shape, seed=2)
    indices = torch.cartesian_prod(*[torch.arange(n) for n in shape]).view(-1, len(shape)).tolist()
    expected = torch.zeros(shape, dtype=torch.float64)
    for y in indices:
        for z in indices:
            at = tuple((o + b) % n for o, b, n in zip(origin, z, shape))
            expected[tuple(y)] += weights[at] * u[tuple((a - b) % n for a, b, n in zip(y, z, shape))]
    assert torch.allclose(operator(u), expected, atol=1e-13)
    assert operator.symbol().is_complex()
    assert math.isclose(operator.trace(), grid.size * weights[origin].item(), rel_tol=1e-12)
    assert math.isclose(operator.trace(), dense(operator).trace().item(), rel_tol=1e-12)

@pytest.mark.parametrize("name", STENCILS)
def test_stencils_by_definition(name):
    grid, s = Grid((6, 5), (3.0, 2.0)), 0.4
    formula = {"gaussian": lambda r: math.exp(-r * r / (2 * s * s)), "laplace": lambda r: math.exp(-r / (2 * s * s)), "exponential": lambda r: math.exp(-r / s),
               "cauchy": lambda r: 1 / (1 + r * r / s / s), "mexican_hat": lambda r: (1 - r * r / s / s) * math.exp(-r * r / (2 * s * s))}[name]
    operator = ConvolutionOperator.from_stencil(grid, name, s, allow_indefinite=True)
    around = lambda i, n, h: min(i, n - i) * h
    weights = torch.tensor([[formula(math.hypot(around(i, 6, .5), around(j, 5, .4))) for j in range(5)] for i in range(6)], dtype=torch.float64)
    total = 1 if name == "mexican_hat" else weights.sum()
    pulse = torch.zeros(6, 5, dtype=torch.float64); pulse[2, 3] = 1
    assert torch.allclose(operator(pulse), (weights / total).roll((2, 3), (0, 1)), atol=1e-14)
    assert not operator.symbol().is_complex()
    if name != "mexican_hat": assert math.isclose(operator.symbol()[0, 0].item(), 1.0, rel_tol=1e-12)

@given(grids, st.integers(0, 100))
@settings(max_examples=25, deadline=None)
def test_accepted_operators_are_self_adjoint_and_positive(grid, seed):
    operator = ConvolutionOperator.from_symbol(grid, lambda k: 1 / (1 + k.square().sum(-1)))
    u, v = normal(2, *grid.shape, seed=seed)
    assert torch.allclose(grid.inner(operator(u), v), grid.inner(u, operator(v)), atol=1e-12)
    assert grid.inner(operator(u), u) > 0
    assert math.isclose(operator.trace(), operator.symbol().sum().item())

def test_half_pixel_stencil_is_refused_with_its_extremes():
    "An even-sized Gaussian centred between pixels: complex symbol, negative on 930 modes."
    grid, i = Grid((64, 64), (64.0, 64.0)), torch.arange(64, dtype=torch.float64) - 31.5
    weights = torch.exp(-(i[:, None] ** 2 + i**2) / 2)
    weights /= weights.sum()
    with pytest.raises(ValueError, match=r"max \|Im\| = 0\.396.*min Re = -0\.\d+.*allow_indefinite=True"): ConvolutionOperator.from_array(grid, weights, (32, 32))
    symbol = ConvolutionOperator.from_array(grid, weights, (32, 32), allow_indefinite=True).symbol()
    assert symbol.is_complex() and int((symbol.real < -1e-12).sum()) == 930
    centred = ConvolutionOperator.from_stencil(grid, "gaussian", 1.0).symbol()
    assert not centred.is_complex() and centred.min() > 0

def test_symbols_must_map_real_to_real():
    grid = Grid((8,))
    with pytest.raises(ValueError, match="conj"): ConvolutionOperator.from_symbol(grid, lambda k: 2 + torch.sin(k[..., 0] / 8), allow_indefinite=True)
    shift = ConvolutionOperator.from_symbol(grid, lambda k: torch.exp(-1j * k[..., 0] / 8), allow_indefinite=True)
    assert torch.allclose(shift(normal(8)), normal(8).roll(1), atol=1e-14)
    anisotropic = ConvolutionOperator.from_symbol(Grid((4, 4)), lambda k: torch.exp(-(k[..., 0] + k[..., 1]) ** 2 / 100))   # no sign at the Nyquist planes
    assert torch.allclose(dense(anisotropic), dense(anisotropic).T, atol=1e-14)

@pytest.mark.parametrize("error, make", [
    (ValueError, lambda g: ConvolutionOperator.from_symbol(g, torch.ones(3))),
    (ValueError, lambda g: ConvolutionOperator.from_symbol(g, torch.full((8,), math.inf))),
    (ValueError, lambda g: ConvolutionOperator.from_symbol(g, -torch.ones(8))),
    (TypeError, lambda g: ConvolutionOperator.from_symbol(g, [1.0] * 8)),
    (ValueError, lambda g: ConvolutionOperator.from_stencil(g, "box", 1.0)),
    (ValueError, lambda g: ConvolutionOperator.from_stencil(g, "gaussian", 0.0)),
    (ValueError, lambda g: ConvolutionOperator.from_stencil(g, "gaussian", 0.5)),            # not faded at the end of the box
    (ValueError, lambda g: ConvolutionOperator.from_array(g, torch.ones(7), (0,))),
    (ValueError, lambda g: ConvolutionOperator.from_array(g, torch.ones(8), (0, 0))),
    (ValueError, lambda g: ConvolutionOperator.from_array(g, torch.full((8,), math.nan), (0,))),
    (TypeError, lambda g: ConvolutionOperator.from_array(g, torch.ones(8) + 0j, (0,))),
])
def test_bad_operators(error, make):
    with pytest.raises(error): make(Grid((8,)))

def test_identity_and_dtypes():
    grid = Grid((4, 4))
    identity, smooth = IdentityOperator(grid), ConvolutionOperator.from_symbol(grid, torch.full((4, 4), 0.5))
    u = normal(2, 3, 4, 4, dtype=torch.float32)
    assert torch.equal(identity(u), u) and identity.trace() == 16 and torch.equal(identity.symbol(), torch.ones(4, 4).double())
    assert smooth(u).dtype == torch.float32 and torch.allclose(smooth(u), u / 2, atol=1e-6) and smooth.trace() == 8
    with pytest.raises(ValueError, match="u has shape"): smooth(normal(4, 3))
    with pytest.raises(ValueError, match="NaN"): identity(torch.full((4, 4), math.nan))
