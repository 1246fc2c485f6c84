"""Training: determinism, faults that change nothing, optimum of a problem with a closed form; measures against hand computation."""
import math

import numpy as np
import pytest
import torch

from iclr26.continuum_icl import (ContinuumTransformer, ConvolutionOperator, GaussianRandomField, Grid, ICLTask, IdentityOperator, LinearKernel, OperatorKernel, RBFKernel, SpectralMultiplier,
                                  hs_cosine, multiplier_product, pairwise_hs_cosine, pretrain, sample_kappa_gaussian)
from iclr26.continuum_icl.theory import half_pixel_stencil

torch.set_num_threads(1)
seeded = lambda s: torch.Generator().manual_seed(s)
double = torch.float64
grid = Grid((8,))
kernel = OperatorKernel(LinearKernel(grid), IdentityOperator(grid))
field = GaussianRandomField(grid, alpha=60.0, gamma=1.0)


def sampler(g, n=6, batch=8):
    f = field.sample(batch * (n + 1), generator=g).reshape(batch, n + 1, 8)
    u = sample_kappa_gaussian(kernel, f, generator=g)
    return ICLTask(f, u[:, :-1], u[:, -1], grid)


def build(layers=2, s=0, **kw): return ContinuumTransformer(kernel, layers, step=.05, learnable=True, tie=False, **{"init": "random", "modes": 3, **kw}, generator=seeded(s))


def snapshot(model): return [p.detach().clone() for p in model.parameters()]


def test_same_seed_same_history_other_seed_other():
    models = build(), build(), build()
    a, b, c = (pretrain(m, sampler, steps=12, seed=s) for m, s in zip(models, (4, 4, 5)))
    assert a == b and a != c and len(a) == 12 and all(math.isfinite(x) for x in a)
    assert all(torch.equal(x, y) for x, y in zip(models[0].parameters(), models[1].parameters()))


def test_history_is_the_loss_before_the_update():
    model = build()
    task = sampler(seeded(4))
    expected = float((grid.norm(model(task.f, task.u) - task.target).detach() ** 2).mean())
    assert math.isclose(pretrain(model, sampler, steps=1, seed=4)[0], expected, rel_tol=1e-12)


def test_a_single_step_size_is_trained_to_its_optimum():
    "One layer with identity multipliers: the loss is quadratic in the step, so its minimiser is known."
    fixed = [sampler(seeded(100 + i), batch=64) for i in range(1)][0]
    model = ContinuumTransformer(kernel, 1, step=.01, learnable=True)
    for w in (*model.w_q, *model.w_k): w.requires_grad_(False)
    base = torch.einsum("bsq,bsx->bqx", kernel.gram(fixed.f[:, :-1], fixed.f), fixed.u)[:, -1]       # prediction of a unit step
    best = float((base * fixed.target).sum() / base.square().sum())
    pretrain(model, lambda g: fixed, steps=400, lr=5e-3)
    assert math.isclose(model.steps[0].item(), best, rel_tol=1e-3)


def test_cosine_schedule_and_constant_differ_and_last_cosine_step_is_small():
    moves = {}
    for schedule in ("cosine", "constant"):
        model, states = build(), []
        pretrain(model, sampler, steps=20, schedule=schedule, callback=lambda *a: states.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()])))
        moves[schedule] = float((states[-1] - states[-2]).norm())
    assert moves["cosine"] < .1 * moves["constant"]


def test_weight_decay_pulls_unused_weights_down_and_clipping_is_scale_free():
    norm = lambda m: sum(float(p.detach().square().sum()) for p in m.parameters())
    a, b = build(), build()
    pretrain(a, sampler, steps=30); pretrain(b, sampler, steps=30, weight_decay=1.0)
    assert norm(b) < norm(a)
    c, d = build(), build()
    assert pretrain(c, sampler, steps=3, grad_clip=None)[0] == pretrain(d, sampler, steps=3, grad_clip=1e-6)[0]


def test_training_improves_on_tasks_never_seen():
    model, fresh = build(), sampler(seeded(999), batch=512)
    loss = lambda: float((grid.norm(model(fresh.f, fresh.u) - fresh.target).detach() ** 2).mean())
    before = loss()
    pretrain(model, sampler, steps=150, seed=1)
    assert loss() < .7 * before and loss() < .5 * float((grid.norm(fresh.target) ** 2).mean())


def test_callback_stops_only_on_true():
    seen = []
    history = pretrain(build(), sampler, steps=10, callback=lambda step, model, loss: seen.append((step, loss)) or step == 3)
    assert len(history) == 4 and [s for s, _ in seen] == [0, 1, 2, 3] and [l for _, l in seen] == history
    assert len(pretrain(build(), sampler, steps=3, callback=lambda *a: "go on")) == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_loss_leaves_the_parameters_of_the_step_before(bad):
    def poisoned(g, count=[0]):
        task, count[0] = sampler(g), count[0] + 1
        return task if count[0] % 3 else ICLTask(task.f, task.u, task.target * bad, grid)
    model, twin = build(), build()
    with pytest.raises(FloatingPointError, match="step 2"): pretrain(model, poisoned, steps=5, schedule="constant", seed=7)
    pretrain(twin, sampler, steps=2, schedule="constant", seed=7)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))


def test_diverging_step_is_a_floating_point_error_not_nan_weights():
    model = ContinuumTransformer(kernel, 30, step=1e12, learnable=True)
    before = snapshot(model)
    with pytest.raises(FloatingPointError): pretrain(model, sampler, steps=2)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_faults_before_any_work():
    def never(g): raise AssertionError("the sampler was called")
    with pytest.raises(ValueError, match="trainable"): pretrain(ContinuumTransformer(kernel, 2, step=.1), never, steps=1)
    for wrong in (dict(steps=-1), dict(steps=1.5), dict(lr=0.0), dict(lr=math.nan), dict(weight_decay=-1.0), dict(grad_clip=0.0), dict(schedule="linear")):
        with pytest.raises(ValueError, match=next(iter(wrong))): pretrain(build(), never, **{"steps": 1, **wrong})
    assert pretrain(build(), never, steps=0) == []


def test_progress_bar_changes_nothing():
    assert pretrain(build(), sampler, steps=3, progress=True) == pretrain(build(), sampler, steps=3)


# ---- measures

def test_hs_cosine_by_hand():
    a, b = torch.tensor([1.0, 1j]), torch.tensor([1.0, 1.0])
    assert math.isclose(hs_cosine(a, b), abs(1 - 1j) / 2, rel_tol=1e-6)
    assert hs_cosine(a, (2 - 3j) * a) == pytest.approx(1) and hs_cosine(torch.eye(2), torch.tensor([[0.0, 1], [1, 0]])) == 0
    for wrong in (torch.zeros(2), torch.tensor([math.nan, 1.0])):
        with pytest.raises(ValueError): hs_cosine(wrong, b)
        with pytest.raises(ValueError): hs_cosine(b, wrong)
    with pytest.raises(ValueError, match="shape"): hs_cosine(torch.ones(2), torch.ones(3))


def test_tiny_and_huge_operators_are_compared_by_direction():
    x, y = torch.randn(5, generator=seeded(0), dtype=double), torch.randn(5, generator=seeded(1), dtype=double)
    assert hs_cosine(1e-200 * x, 1e150 * y) == pytest.approx(hs_cosine(x, y))


def test_products_and_pairwise_cosines():
    hermitian = lambda s: torch.fft.fft(torch.randn(8, generator=seeded(s), dtype=double))
    q, k = [hermitian(s) for s in (0, 1)], [hermitian(s) for s in (2, 3)]
    model = ContinuumTransformer(kernel, 2, step=.01, w_q=[SpectralMultiplier(grid, init=x) for x in q], w_k=[SpectralMultiplier(grid, init=x) for x in k])
    products = multiplier_product(model)
    assert products.shape == (2, 8) and products.is_complex() and not products.requires_grad
    assert torch.allclose(products, torch.stack([a.conj() * b for a, b in zip(q, k)]))
    c = pairwise_hs_cosine(model)
    assert torch.allclose(c, c.T) and torch.allclose(c.diagonal(), torch.ones(2, dtype=double)) and math.isclose(float(c[0, 1]), hs_cosine(*products))


def test_measures_refuse_other_operators_and_zero_ones():
    with pytest.raises(ValueError, match="SpectralMultiplier"): multiplier_product(ContinuumTransformer(kernel, 1, step=.01))
    zero = SpectralMultiplier(grid, init=torch.zeros(8, dtype=double))
    with pytest.raises(ValueError): pairwise_hs_cosine(ContinuumTransformer(kernel, 1, step=.01, w_q=zero, w_k=SpectralMultiplier(grid)))


def test_only_the_product_is_identified():
    D = torch.fft.fft(torch.randn(8, generator=seeded(5), dtype=double))
    task = sampler(seeded(0))
    make = lambda q, k: ContinuumTransformer(kernel, 3, step=1e-3, w_q=SpectralMultiplier(grid, init=q), w_k=SpectralMultiplier(grid, init=k))
    ones = torch.ones(8, dtype=double)
    assert torch.allclose(make(ones, ones)(task.f, task.u), make(D, 1 / D.conj())(task.f, task.u), atol=1e-10)


def test_training_finds_the_inverse_covariance():
    "Theorem 3.6 in small: data kernel <f, Gamma^-1 f'>, from random multipliers."
    wave = torch.fft.fftfreq(8, 1 / 8, dtype=double).abs()
    band = (wave <= 3).double()
    white_kernel = OperatorKernel(LinearKernel(grid), ConvolutionOperator.from_symbol(grid, (wave <= 1).double()))
    colour = ConvolutionOperator.from_symbol(grid, band / (1 + wave).sqrt())
    def whitened(g):
        white = ConvolutionOperator.from_symbol(grid, band)(torch.randn(64, 20, 8, generator=g, dtype=double))
        u = sample_kappa_gaussian(white_kernel, white, generator=g)
        return ICLTask(colour(white), u[:, :-1], u[:, -1], grid)
    model = ContinuumTransformer(white_kernel, 1, step=.5, learnable=True, tie=False, modes=3, init="random", generator=seeded(1))
    target = band * (1 + wave)
    before = hs_cosine(multiplier_product(model)[0], target)
    pretrain(model, whitened, steps=300, seed=2)
    assert before < .9 and hs_cosine(multiplier_product(model)[0], target) > .995


# ---- the published stencil (theory, T8)

def test_half_pixel_stencil_is_the_padded_convolution_of_the_published_code():
    size = 8
    g2 = Grid((size, size))
    w = half_pixel_stencil(size)
    op = ConvolutionOperator.from_array(g2, w, (size // 2 - 1,) * 2, allow_indefinite=True)
    u = torch.randn(3, size, size, generator=seeded(0), dtype=double)
    padded = torch.nn.functional.pad(u[:, None], (size // 2, size // 2 - 1, size // 2, size // 2 - 1), mode="circular")
    assert torch.allclose(op(u), torch.nn.functional.conv2d(padded, w[None, None])[:, 0], atol=1e-12)
    assert math.isclose(float(w.sum()), 1.0) and op.symbol().is_complex()
    with pytest.raises(ValueError, match="self-adjoint"): ConvolutionOperator.from_array(g2, w, (size // 2 - 1,) * 2)
    for wrong in (7, 0): pytest.raises(ValueError, half_pixel_stencil, wrong)
