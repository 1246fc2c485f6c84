"""The continuum transformer against dense gradient descent, its own single layers, and the rules of its interface."""
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from iclr26.continuum_icl.operators import KERNELS, ConvolutionOperator, Grid, IdentityOperator, LinearKernel, OperatorKernel, RBFKernel, SoftmaxKernel, SpectralMultiplier
from iclr26.continuum_icl.transformer import ContinuumAttention, ContinuumTransformer

torch.set_num_threads(1)
LINE = Grid((32,))

def normal(*shape, seed=0, dtype=torch.float64): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
def smooth(grid, spread=0.01): return ConvolutionOperator.from_symbol(grid, lambda k: torch.exp(-spread * k.square().sum(-1)))
def prompt(grid, B=2, n=6, seed=0, dtype=torch.float64): return normal(B, n + 1, *grid.shape, seed=seed, dtype=dtype), normal(B, n, *grid.shape, seed=seed + 1, dtype=dtype)

def dense_descent(kernel, f, u, steps, step):
    "Residuals and predictions of gradient descent in real space, one prompt, with K_y as a matrix and no Fourier transform in the loop."
    N = kernel.grid.size
    Ky = kernel.ky(torch.eye(N, dtype=f.dtype).view(N, *kernel.grid.shape)).flatten(1).T
    gram = kernel.kx(f[:-1], f).to(f.dtype)
    u, alpha, out = u.flatten(1), torch.zeros_like(u.flatten(1)), []
    for _ in range(steps + 1):
        O_f = torch.stack([sum(gram[i, j] * (Ky @ alpha[i]) for i in range(len(u))) for j in range(len(f))])
        out.append(torch.cat([u - O_f[:-1], -O_f[-1:]]))
        alpha = alpha + step * (u - O_f[:-1])
    return torch.stack(out).unflatten(-1, kernel.grid.shape)

@pytest.mark.parametrize("name", ["linear", "rbf", "laplacian"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_theorem_every_layer_is_a_gradient_step(name, dtype, tolerance):
    kernel = OperatorKernel(KERNELS[name](LINE), smooth(LINE))
    f, u = prompt(LINE, B=1, dtype=dtype)
    step = float(kernel.max_stable_step(f[:, :-1]).min()) / 3
    tokens = ContinuumTransformer(kernel, 50, step=step).forward_tokens(f, u)
    assert tokens.dtype == dtype
    assert (tokens[:, 0] - dense_descent(kernel, f[0], u[0], 50, step)).abs().max() < tolerance

@given(st.sampled_from([name for name in KERNELS if name != "softmax"]), st.sampled_from([(5,), (8,), (4, 3), (3, 6)]), st.integers(1, 5), st.integers(1, 3), st.floats(0.05, 1.9), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_theorem_on_random_prompts(name, shape, n, B, share, seed):
    grid = Grid(shape)
    kernel = OperatorKernel(KERNELS[name](grid), smooth(grid))
    f, u = prompt(grid, B, n, seed)
    step = float(kernel.max_stable_step(f[:, :-1]).min()) / 2 * share
    tokens = ContinuumTransformer(kernel, 6, step=step).forward_tokens(f, u)
    assert tokens.shape == (7, B, n + 1, *shape)
    for b in range(B): assert torch.allclose(tokens[:, b], dense_descent(kernel, f[b], u[b], 6, step), atol=1e-10)

def test_three_outputs_agree_and_sign_is_positive():
    kernel = OperatorKernel(RBFKernel(LINE), smooth(LINE))
    f, u = prompt(LINE)
    model = ContinuumTransformer(kernel, 12)
    prediction, layers = model(f, u, return_layers=True)
    tokens = model.forward_tokens(f, u)
    assert prediction.shape == (2, 32) and layers.shape == (13, 2, 32)
    assert torch.equal(prediction, model(f, u)) and torch.equal(prediction, layers[-1]) and torch.allclose(layers, -tokens[:, :, -1], atol=1e-15)
    assert layers[0].abs().max() == 0 and torch.allclose(tokens[0, :, :-1], u, atol=1e-14)
    same = torch.cat([f[:, :-1], f[:, :1]], 1)                                # asking for a solved example gives its output
    low = smooth(LINE, 0.05)(u)
    deep = ContinuumTransformer(OperatorKernel(RBFKernel(LINE), smooth(LINE, 0.001)), 3000)(same, low)
    assert LINE.norm(deep - low[:, 0]).max() < 0.05 * LINE.norm(low[:, 0]).min()

@given(st.integers(0, 500), st.permutations(range(5)))
@settings(max_examples=20, deadline=None)
def test_context_is_a_set_and_output_is_linear_in_u(seed, order):
    kernel = OperatorKernel(RBFKernel(LINE), smooth(LINE))
    f, u = prompt(LINE, 2, 5, seed)
    model = ContinuumTransformer(kernel, 10)
    shuffled = model(torch.cat([f[:, list(order)], f[:, -1:]], 1), u[:, list(order)])
    assert torch.allclose(shuffled, model(f, u), atol=1e-12)
    assert torch.allclose(model(f, 2 * u - u.flip(1)), 2 * model(f, u) - model(f, u.flip(1)), atol=1e-11)

@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("kx", [RBFKernel, SoftmaxKernel])
@pytest.mark.parametrize("shape", [(7,), (4, 6)])
def test_stack_is_its_single_layers(tie, kx, shape):
    grid = Grid(shape)
    kernel = OperatorKernel(kx(grid), smooth(grid))
    f, u = prompt(grid, 2, 3)
    model = ContinuumTransformer(kernel, 4, step=[.1, .2, .3, .4], learnable=True, tie=tie, init="random", modes=2, generator=torch.Generator().manual_seed(1))
    tokens, y = model.forward_tokens(f, u), torch.cat([u, torch.zeros_like(u[:, :1])], 1)
    for l in range(4):
        y = ContinuumAttention(kernel, w_q=model.w_q[l], w_k=model.w_k[l], step=model.steps[l].item())(f, y)
        assert torch.allclose(tokens[l + 1], y, atol=1e-13)

def test_attention_by_hand():
    kernel = OperatorKernel(LinearKernel(LINE), smooth(LINE))
    x, y = normal(2, 4, 32), normal(2, 4, 32, seed=1)
    w_q, w_k = (SpectralMultiplier(LINE, init="random", generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    out = ContinuumAttention(kernel, w_q=w_q, w_k=w_k, step=0.3)(x, y)
    for b in range(2):
        for q in range(4):
            expected = y[b, q] - 0.3 * sum(LINE.inner(w_k(x[b, t]), w_q(x[b, q])) * kernel.ky(y[b, t]) for t in range(3))
            assert torch.allclose(out[b, q], expected, atol=1e-13)
    changed = y.clone(); changed[:, -1] += 5                                  # the question is never a key
    assert torch.allclose(ContinuumAttention(kernel)(x, changed)[:, :-1], ContinuumAttention(kernel)(x, y)[:, :-1])

def test_auto_step_is_95_percent_of_each_bound():
    kernel = OperatorKernel(RBFKernel(LINE, 2.0), smooth(LINE))
    f, u = prompt(LINE, 3)
    f[1] *= 5
    limit = kernel.max_stable_step(f[:, :-1])
    auto = ContinuumTransformer(kernel, 9)
    assert auto.steps is None and limit.std() > 0.1
    for b in range(3): assert torch.allclose(auto(f, u)[b], ContinuumTransformer(kernel, 9, step=0.95 * limit[b].item())(f[b:b + 1], u[b:b + 1])[0], atol=1e-12)
    assert ContinuumTransformer(OperatorKernel(LinearKernel(LINE), smooth(LINE)), 3)(torch.zeros_like(f), u).abs().max() == 0

def test_unstable_step_is_refused_with_the_limit():
    kernel = OperatorKernel(RBFKernel(LINE), smooth(LINE))
    f, u = prompt(LINE, 3)
    limit = kernel.max_stable_step(f[:, :-1]).min().item()
    with pytest.raises(ValueError, match=f"step=.*less than {limit:.5g}"): ContinuumTransformer(kernel, 2, step=limit * 1.0001)(f, u)
    with pytest.raises(ValueError, match="layer 1"): ContinuumTransformer(kernel, 2, step=[limit / 2, limit * 2])(f, u)
    stable = ContinuumTransformer(kernel, 400, step=limit * 0.999).forward_tokens(f, u)
    assert (LINE.norm(stable[-1]) < LINE.norm(stable[0]).max() * 10).all()
    unstable = ContinuumTransformer(kernel, 400, step=limit * 1.1, allow_unstable=True).forward_tokens(f, u)
    assert LINE.norm(unstable[-1]).max() > 1e6
    ContinuumTransformer(kernel, 2, step=limit * 2, learnable=True)(f, u)     # trained steps are not checked

class Counted:
    "A kernel that counts its calls and knows nothing else."
    def __init__(self, kernel): self.kernel, self.grid, self.is_psd, self.calls = kernel, kernel.grid, kernel.is_psd, 0
    def __call__(self, a, b): self.calls += 1; return self.kernel(a, b)

@pytest.mark.parametrize("options", [{}, {"step": 0.01}, {"step": 0.01, "learnable": True}, {"w_q": SpectralMultiplier(LINE, trainable=False), "w_k": SpectralMultiplier(LINE, trainable=False)}])
def test_similarities_are_computed_once(options):
    calls = []
    for depth in (2, 40):
        counted = Counted(RBFKernel(LINE))
        ContinuumTransformer(OperatorKernel(counted, smooth(LINE)), depth, **options)(*prompt(LINE))
        calls.append(counted.calls)
    assert calls[0] == calls[1] > 0

def test_resolution_invariance():
    "T7: band-limited prompts on 32 and 128 points, same answer at the shared points."
    coefficients, outputs = normal(2, 5, 11), normal(2, 4, 11, seed=1)
    for name, kx in KERNELS.items():
        answers = []
        for n in (32, 128):
            grid = Grid((n,))
            x = grid.points()[:, 0] * 2 * math.pi
            basis = torch.stack([torch.ones_like(x)] + [wave(k * x) for k in range(1, 6) for wave in (torch.cos, torch.sin)])
            scale = {"gradient_rbf": 50.0, "rbf": 3.0, "laplacian": 3.0, "energy": 10.0}
            kernel = OperatorKernel(kx(grid, *([scale[name]] if name in scale else [])), ConvolutionOperator.from_symbol(grid, lambda k: torch.exp(-1e-3 * k[..., 0] ** 2)))
            answers.append(ContinuumTransformer(kernel, 30)(coefficients @ basis, outputs @ basis)[:, :: n // 32])
        assert torch.allclose(*answers, atol=1e-12), name
        assert answers[0].abs().max() > 0.1

def test_complex_symbol_runs_as_written():
    grid = Grid((6, 5))
    ky = ConvolutionOperator.from_array(grid, normal(6, 5).abs() / 30, (2, 2), allow_indefinite=True)
    assert ky.symbol().is_complex()
    kernel = OperatorKernel(RBFKernel(grid), ky)
    f, u = prompt(grid, 2, 3)
    for train in (False, True):
        tokens, y = ContinuumTransformer(kernel, 3, step=0.2).forward_tokens(f, u.clone().requires_grad_(train)), torch.cat([u, torch.zeros_like(u[:, :1])], 1)
        for l in range(3): y = ContinuumAttention(kernel, step=0.2)(f, y)
        assert torch.allclose(tokens[-1], y, atol=1e-13)

def test_large_batches_equal_single_prompts_and_inputs_stay():
    grid = Grid((48, 40))
    kernel = OperatorKernel(RBFKernel(grid), smooth(grid, 1e-4))
    f, u = prompt(grid, 7, 12)
    before = f.clone(), u.clone()
    model = ContinuumTransformer(kernel, 5)
    together, layers = model(f, u, return_layers=True)
    assert torch.equal(f, before[0]) and torch.equal(u, before[1])
    for b in range(7):
        alone = model(f[b:b + 1], u[b:b + 1], return_layers=True)
        assert torch.allclose(together[b], alone[0][0], atol=1e-13) and torch.allclose(layers[:, b], alone[1][:, 0], atol=1e-13)

@pytest.mark.parametrize("kx", ["linear", "laplacian", "gradient_rbf"])
def test_gradients_of_a_weightless_model(kx):
    grid = Grid((4, 3))
    kernel = OperatorKernel(KERNELS[kx](grid, *([20.0] if kx == "gradient_rbf" else [])), smooth(grid))
    f, u = prompt(grid, 2, 2)
    for step in ("auto", 0.05):
        model = ContinuumTransformer(kernel, 3, step=step)
        assert torch.autograd.gradcheck(lambda f, u: model(f, u), (f.clone().requires_grad_(), u.clone().requires_grad_()))

@pytest.mark.parametrize("tie", [True, False])
def test_gradients_of_a_learnable_model(tie):
    grid = Grid((5,))
    model = ContinuumTransformer(OperatorKernel(RBFKernel(grid), smooth(grid)), 2, step=0.3, learnable=True, tie=tie, init="random", generator=torch.Generator().manual_seed(0))
    f, u = prompt(grid, 2, 3)
    names, values = zip(*model.named_parameters())
    run = lambda *values: torch.func.functional_call(model, dict(zip(names, values)), (f, u))
    assert torch.autograd.gradcheck(run, tuple(v.detach().clone().requires_grad_() for v in values))
    with torch.no_grad(): inference = model(f, u)
    assert torch.allclose(model(f, u), inference, atol=1e-14)                 # in-place and tracked paths agree

def test_parameters():
    kernel = OperatorKernel(RBFKernel(LINE), smooth(LINE))
    assert not list(ContinuumTransformer(kernel, 3).parameters())
    tied, untied = (ContinuumTransformer(kernel, 3, step=0.1, learnable=True, tie=t, init="random", modes=4, generator=torch.Generator().manual_seed(0)) for t in (True, False))
    assert len(list(tied.parameters())) == 3 and len(list(untied.parameters())) == 7
    assert tied.w_q[0] is tied.w_q[2] and tied.w_q[0] is not tied.w_k[0] and untied.w_q[0] is not untied.w_q[1]
    assert len(tied.w_q) == len(untied.w_k) == 3 and tied.steps.tolist() == [.1] * 3 and tied.steps.requires_grad
    assert not torch.equal(untied.w_q[0].symbol(), untied.w_q[1].symbol())
    again = ContinuumTransformer(kernel, 3, step=0.1, learnable=True, tie=False, modes=4)
    again.load_state_dict(untied.state_dict())
    assert torch.equal(again(*prompt(LINE)), untied(*prompt(LINE)))
    for steps in (torch.tensor([.1, .2]), np.array([.1, .2]), (.1, .2)): assert ContinuumTransformer(kernel, 2, step=steps).steps.tolist() == pytest.approx([.1, .2])

def test_own_maps():
    kernel = OperatorKernel(RBFKernel(LINE), smooth(LINE))
    class Flip(torch.nn.Module):
        def forward(self, x): return x.flip(-1)
    f, u = prompt(LINE)
    flip = Flip()
    both = ContinuumTransformer(kernel, 3, w_q=flip, w_k=flip)
    assert torch.allclose(both(f, u), ContinuumTransformer(kernel, 3)(f, u), atol=1e-13)   # distances do not see a common flip
    only = ContinuumTransformer(kernel, 3, w_q=[flip, IdentityOperator(LINE), flip], step=0.1)
    assert not torch.allclose(only(f, u), ContinuumTransformer(kernel, 3, step=0.1)(f, u))
    mixed = ContinuumTransformer(kernel, 2, step=0.1, learnable=True, w_q=flip)
    assert isinstance(mixed.w_k[0], SpectralMultiplier) and mixed.w_q[1] is flip
    with pytest.raises(ValueError, match="x has shape"): ContinuumTransformer(kernel, 1, w_k=SpectralMultiplier(Grid((16,))))(f, u)
    with pytest.raises(ValueError, match="w_k returns"): ContinuumTransformer(kernel, 1, w_k=torch.nn.Flatten())(f, u)

def test_diverged_weights_show_in_the_output():
    model = ContinuumTransformer(OperatorKernel(RBFKernel(LINE), smooth(LINE)), 2, step=0.1, learnable=True)
    with torch.no_grad(): model.w_q[0].parts.fill_(math.nan)
    assert torch.isnan(model(*prompt(LINE))).all()

def test_no_layers():
    model = ContinuumTransformer(OperatorKernel(RBFKernel(LINE), smooth(LINE)), 0, step=0.1)
    f, u = prompt(LINE)
    assert model(f, u).abs().max() == 0 and model.forward_tokens(f, u).shape == (1, 2, 7, 32) and len(model.w_q) == 0

@pytest.mark.parametrize("arguments", [{"n_layers": -1}, {"n_layers": 1.5}, {"step": 0.0}, {"step": -1.0}, {"step": math.nan}, {"step": "fast"}, {"step": [0.1]}, {"step": [0.1, -0.1]},
                                       {"learnable": True}, {"modes": 3}, {"init": "random"}, {"w_q": [IdentityOperator(LINE)]}])
def test_bad_models(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments)) if "learnable" not in arguments else "step"):
        ContinuumTransformer(**{"kernel": OperatorKernel(RBFKernel(LINE), smooth(LINE)), "n_layers": 2, **arguments})

@pytest.mark.parametrize("error, f, u, match", [
    (ValueError, normal(2, 4, 31), normal(2, 3, 32), "f has shape"), (ValueError, normal(2, 4, 32), normal(2, 4, 32), "u has shape"), (ValueError, normal(2, 4, 32), normal(1, 3, 32), "u has shape"),
    (ValueError, normal(4, 32), normal(3, 32), "2 axes"), (ValueError, normal(2, 1, 32), normal(2, 0, 32), "at least one context"), (ValueError, normal(2, 4, 32) / 0, normal(2, 3, 32), "f holds"),
    (ValueError, normal(2, 4, 32), normal(2, 3, 32) * math.nan, "u holds"), (TypeError, normal(2, 4, 32) + 0j, normal(2, 3, 32), "f has dtype"), (TypeError, normal(2, 4, 32), normal(2, 3, 32).long(), "u has dtype"),
    (TypeError, normal(2, 4, 32), normal(2, 3, 32).float(), "u is torch.float32"),
])
def test_bad_prompts(error, f, u, match):
    kernel = OperatorKernel(RBFKernel(LINE), smooth(LINE))
    with pytest.raises(error, match=match): ContinuumTransformer(kernel, 2)(f, u)
    if "u has shape" not in match:
        with pytest.raises(error): ContinuumAttention(kernel)(f, torch.cat([u, u[:, :1]], 1) if u.ndim == 3 and u.shape[1] else u)

def test_bad_attention():
    with pytest.raises(ValueError, match="step"): ContinuumAttention(OperatorKernel(RBFKernel(LINE), smooth(LINE)), step=0.0)
    with pytest.raises(TypeError, match="w_q"): ContinuumTransformer(OperatorKernel(RBFKernel(LINE), smooth(LINE)), 1, w_q=[abs])
