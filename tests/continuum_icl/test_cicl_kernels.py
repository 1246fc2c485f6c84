"""Kernels between functions against double loops, and the properties that the theory needs."""
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from iclr26.continuum_icl.operators import ConvolutionOperator, Grid, IdentityOperator
from iclr26.continuum_icl.operators import (KERNELS, EnergyKernel, GradientRBFKernel, LaplacianKernel, LinearKernel, OperatorKernel, RBFKernel, SoftmaxKernel,
                                          squared_distances)

torch.set_num_threads(1)
GRID = Grid((6, 5), (2.0, 3.0))
PSD = [name for name in KERNELS if name != "softmax"]

def normal(*shape, seed=0, dtype=torch.float64): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)

def slope_norm2(f):
    "||grad f||^2 by differentiating along each axis; Nyquist modes have no derivative."
    total = 0
    for axis, (n, length) in enumerate(zip(GRID.shape, GRID.lengths)):
        k = torch.fft.fftfreq(n, 1 / n, dtype=torch.float64) * 2 * math.pi / length
        if n % 2 == 0: k[n // 2] = 0
        shape = [1, 1]; shape[axis] = n
        derivative = torch.fft.ifft(1j * k.view(shape) * torch.fft.fft(f, dim=axis), dim=axis).real
        total += (derivative**2).sum().item() * 0.2
    return total

def by_hand(name, a, b, sigma):
    inner = lambda f, g: (f * g).sum().item() * (2.0 / 6) * (3.0 / 5)
    d2 = inner(a - b, a - b)
    return {"linear": lambda: inner(a, b), "rbf": lambda: math.exp(-d2 / (2 * sigma**2)), "laplacian": lambda: math.exp(-math.sqrt(d2) / sigma),
            "gradient_rbf": lambda: math.exp(-slope_norm2(a - b) / (2 * sigma**2)),
            "energy": lambda: math.exp(-(inner(a, a) - inner(b, b)) ** 2 / (2 * sigma**2)), "softmax": lambda: math.exp(inner(a, b) / sigma)}[name]()

def build(name, sigma): return LinearKernel(GRID) if name == "linear" else KERNELS[name](GRID, sigma)

@pytest.mark.parametrize("name", KERNELS)
def test_values_by_definition(name):
    a, b = normal(2, 3, 6, 5), normal(2, 4, 6, 5, seed=1)
    values = build(name, 1.7)(a, b)
    expected = torch.tensor([[[by_hand(name, f, g, 1.7) for g in b[i]] for f in a[i]] for i in range(2)], dtype=torch.float64)
    if name == "softmax": expected /= expected.sum(1, keepdim=True)
    assert values.shape == (2, 3, 4) and torch.allclose(values, expected, rtol=1e-12, atol=1e-15)

@given(st.sampled_from(PSD), st.integers(0, 1000), st.floats(0.3, 5), st.integers(2, 8))
@settings(max_examples=40, deadline=None)
def test_psd_kernels_are_psd(name, seed, sigma, n):
    f = normal(n, 6, 5, seed=seed)
    gram = build(name, sigma)(f, f)
    assert torch.allclose(gram, gram.T, atol=1e-14)
    assert torch.linalg.eigvalsh(gram)[0] > -1e-12 * gram.diagonal().sum()
    if name != "linear": assert torch.equal(gram.diagonal(), torch.ones(n).double()) and gram.max() <= 1 + 1e-15

@pytest.mark.parametrize("name", KERNELS)
def test_flags_and_shapes(name):
    kernel = KERNELS[name](GRID)
    assert kernel.grid == GRID and kernel.is_psd == (name != "softmax")
    assert kernel.sigma == (None if name in ("linear", "softmax") else 1.0)
    assert kernel(normal(3, 6, 5), normal(2, 4, 6, 5)).shape == (2, 3, 4)              # leading axes broadcast
    assert kernel(normal(2, 1, 1, 6, 5), normal(3, 4, 6, 5)).shape == (2, 3, 1, 4)
    single = kernel(normal(3, 6, 5, dtype=torch.float32), normal(2, 6, 5, dtype=torch.float32, seed=1))
    assert single.dtype == torch.float32 and torch.allclose(single.double(), kernel(normal(3, 6, 5, dtype=torch.float32).double(), normal(2, 6, 5, dtype=torch.float32, seed=1).double()), atol=1e-5)

def test_softmax_normalises_over_keys():
    kernel = SoftmaxKernel(GRID, temperature=0.5)
    weights = kernel(normal(3, 6, 5), normal(4, 6, 5, seed=1))
    assert torch.allclose(weights.sum(0), torch.ones(4).double()) and not torch.allclose(weights[:, :3], weights[:, :3].T)

@pytest.mark.parametrize("name", KERNELS)
def test_gradcheck(name):
    assert torch.autograd.gradcheck(build(name, 1.3), (normal(2, 6, 5).requires_grad_(), normal(3, 6, 5, seed=1).requires_grad_()))

@pytest.mark.parametrize("name", PSD)
def test_gradients_at_equal_fields_are_finite(name):
    f = normal(3, 6, 5).requires_grad_()
    build(name, 1.0)(f, f).sum().backward()
    assert torch.isfinite(f.grad).all()
    g = normal(1, 6, 5).requires_grad_()
    KERNELS["laplacian"](GRID)(g, g.detach()).sum().backward()
    assert torch.equal(g.grad, torch.zeros_like(g))

def test_sigma_can_be_learnt():
    f, sigma = normal(4, 6, 5), torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: RBFKernel(GRID, s)(f, f), (sigma,))

@pytest.mark.parametrize("name", KERNELS)
def test_resolution_invariance(name):
    values = []
    for n in (16, 64):
        x = Grid((n,)).points()[:, 0] * 2 * math.pi
        f = torch.stack([torch.sin(x), torch.cos(2 * x) + 0.3 * torch.sin(5 * x), 1 + torch.cos(7 * x)])
        values.append(KERNELS[name](Grid((n,)))(f[:2], f))
    assert torch.allclose(*values, rtol=1e-12, atol=1e-14)

def test_gradient_kernel_of_a_sine():
    x = GRID.points()
    f = torch.stack([torch.sin(2 * math.pi * x[..., 0] / 2) * torch.cos(2 * math.pi * 2 * x[..., 1] / 3), torch.zeros(6, 5).double()])
    slope2 = (math.pi**2 + (4 * math.pi / 3) ** 2) * 6 / 4              # (k1^2 + k2^2) ||f||^2, the box has area 6
    assert math.isclose(-math.log(GradientRBFKernel(GRID, 10.0)(f[:1], f[1:]).item()), slope2 / 200, rel_tol=1e-12)
    nyquist = (-1.0) ** torch.arange(6, dtype=torch.float64)[:, None].expand(6, 5)
    assert math.isclose(GradientRBFKernel(GRID)(nyquist[None], 3 * nyquist[None]).item(), 1.0)

@given(st.integers(0, 100), st.floats(-12, 2), st.floats(0, 6))
@settings(max_examples=40, deadline=None)
def test_distances_keep_relative_precision(seed, closeness, offset):
    "Also for nearly equal fields with a large common part, where the Gram identity alone has no digit left."
    base = normal(3, 40, seed=seed) + 10**offset
    other = torch.cat([base[:2] + 10**closeness * normal(2, 40, seed=seed + 1), normal(1, 40, seed=seed + 2)])
    exact = (base[:, None] - other).square().sum(-1)
    assert torch.allclose(squared_distances(base, other), exact, rtol=1e-11, atol=0)
    assert torch.equal(squared_distances(base, base).diagonal(), torch.zeros(3).double())

def test_distances_when_all_pairs_are_close():
    a = torch.ones(3, 20, 5).double() + 1e-9 * normal(3, 20, 5)
    b = torch.cat([a[:, :1] + 1, a[:, 1:].roll(1, 1)], 1)
    assert torch.allclose(squared_distances(a, b), (a[:, :, None] - b[:, None]).square().sum(-1), rtol=1e-9, atol=1e-30)

@pytest.mark.parametrize("make", [RBFKernel, LaplacianKernel, GradientRBFKernel, EnergyKernel, SoftmaxKernel])
def test_bad_scales(make):
    for value in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="sigma|temperature"): make(GRID, value)
    with pytest.raises(TypeError): make(GRID, "wide")

def test_bad_fields():
    kernel, f = RBFKernel(GRID), normal(3, 6, 5)
    with pytest.raises(ValueError, match="a has shape"): kernel(normal(3, 5, 6), f)
    with pytest.raises(ValueError, match="token axis"): kernel(f, normal(6, 5))
    with pytest.raises(ValueError, match="b holds"): kernel(f, torch.full((2, 6, 5), math.nan).double())
    with pytest.raises(TypeError, match="b has dtype"): kernel(f, f.float())
    for bad in (torch.complex(f, f), f.long()):
        with pytest.raises(TypeError, match="a has dtype"): kernel(bad, f)

def test_operator_kernel():
    ky = ConvolutionOperator.from_symbol(GRID, lambda k: 3 / (1 + k.square().sum(-1)))
    kernel, f = OperatorKernel(RBFKernel(GRID), ky), normal(2, 4, 6, 5)
    assert torch.equal(kernel.gram(f), kernel.kx(f, f)) and kernel.gram(f, normal(2, 3, 6, 5)).shape == (2, 4, 3) and kernel.grid == GRID
    limits = [2 / (torch.linalg.eigvalsh(kernel.gram(f)[i])[-1].item() * 3) for i in range(2)]
    assert torch.allclose(kernel.max_stable_step(f), torch.tensor(limits).double())
    assert OperatorKernel(LinearKernel(GRID), ky).max_stable_step(torch.zeros(1, 2, 6, 5))[0] == math.inf
    zero = OperatorKernel(RBFKernel(GRID), ConvolutionOperator.from_symbol(GRID, torch.zeros(6, 5)))
    assert zero.max_stable_step(f).tolist() == [math.inf, math.inf]
    softmax = OperatorKernel(SoftmaxKernel(GRID), IdentityOperator(GRID))
    assert torch.allclose(softmax.max_stable_step(f), torch.tensor([2.0, 2.0]).double())            # columns sum to 1: spectral radius 1

def test_operator_kernel_accepts_callables_and_refuses_mismatches():
    class Scaled:
        grid, is_psd = GRID, True
        def __call__(self, a, b): return 2 * LinearKernel(GRID)(a, b)
    f = normal(1, 3, 6, 5)
    assert torch.equal(OperatorKernel(Scaled(), IdentityOperator(GRID)).gram(f), 2 * LinearKernel(GRID)(f, f))
    with pytest.raises(ValueError, match="ky lives on"): OperatorKernel(LinearKernel(GRID), IdentityOperator(Grid((6, 5))))
    with pytest.raises(TypeError, match="kx="): OperatorKernel(lambda a, b: a, IdentityOperator(GRID))
    with pytest.raises(TypeError, match="ky="): OperatorKernel(LinearKernel(GRID), None)
    kernel = OperatorKernel(LinearKernel(GRID), IdentityOperator(GRID))
    with pytest.raises(ValueError, match="batch"): kernel.gram(f, normal(2, 3, 6, 5))
    with pytest.raises(ValueError, match="2 axes"): kernel.gram(normal(3, 6, 5))
    with pytest.raises(ValueError, match="at least one"): kernel.max_stable_step(normal(1, 0, 6, 5))
