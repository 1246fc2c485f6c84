"Losses against explicit targets, finite differences and hand-computed values."
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from iclr26.ugradsl import adaptive_alpha, gls_cross_entropy, gls_targets, mixed_unlearn_loss

torch.set_num_threads(1)


def logits(n, k, seed=0, dtype=torch.float64):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_targets_by_hand():
    t = gls_targets(torch.tensor([1, 0]), 4, -.4, dtype=torch.float64)
    assert torch.allclose(t, torch.tensor([[-.1, 1.3, -.1, -.1], [1.3, -.1, -.1, -.1]], dtype=torch.float64), atol=1e-15)
    assert gls_targets(torch.tensor([0]), 2, 0.).dtype == torch.get_default_dtype()


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 9), st.integers(1, 6), st.floats(-5, 1), st.integers(0, 1000))
def test_equals_explicit_target(k, n, alpha, seed):
    z = logits(n, k, seed) * 4
    y = torch.randint(k, (n,), generator=torch.Generator().manual_seed(seed))
    target = gls_targets(y, k, alpha, dtype=torch.float64)
    assert torch.allclose(target.sum(1), torch.ones(n, dtype=torch.float64), atol=1e-12)
    expected = -(target * z.log_softmax(1)).sum(1)
    assert torch.allclose(gls_cross_entropy(z, y, alpha, reduction="none"), expected, atol=1e-11, rtol=0)
    closed = z.logsumexp(1) - (1 - alpha) * z[torch.arange(n), y] - alpha * z.mean(1)
    assert torch.allclose(expected, closed, atol=1e-10, rtol=0)


def test_negative_alpha_differs_from_torchs_argument():
    z, y = logits(8, 10), torch.arange(8)
    assert torch.allclose(gls_cross_entropy(z, y, 0.), F.cross_entropy(z, y), atol=1e-14)
    assert torch.allclose(gls_cross_entropy(z, y, .3), F.cross_entropy(z, y, label_smoothing=.3), atol=1e-12)
    assert abs(float(gls_cross_entropy(z, y, -.4) - F.cross_entropy(z, y))) > .01


@pytest.mark.parametrize("alpha", [-.4, 0., .2, torch.tensor([-1., 0., -.3, .2, -2.])])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_in_float64(alpha, reduction):
    z = logits(5, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: gls_cross_entropy(z, torch.tensor([0, 1, 2, 3, 0]), alpha, reduction=reduction), z)


def test_hessian_and_function_transforms():
    z, y = logits(3, 4), torch.tensor([0, 3, 1])
    q = z.softmax(1)
    H = torch.func.hessian(lambda z: gls_cross_entropy(z, y, -.7, reduction="sum"))(z)
    for i in range(3): assert torch.allclose(H[i, :, i], torch.diag(q[i]) - torch.outer(q[i], q[i]), atol=1e-12)
    assert torch.allclose(torch.func.grad(lambda z: gls_cross_entropy(z, y, -.7, reduction="sum"))(z), q - gls_targets(y, 4, -.7, dtype=torch.float64), atol=1e-12)
    assert torch.autograd.gradgradcheck(lambda z: gls_cross_entropy(z, y, torch.tensor([-.7, 0., .3])), z.requires_grad_())


def test_mixed_gradients_in_float64():
    y, yf = torch.tensor([0, 1, 2, 3, 0]), torch.tensor([3, 2, 1])
    for floor in ("chance", None):
        zr, zf = logits(5, 4).requires_grad_(), (logits(3, 4, 1) * 2).requires_grad_()
        assert torch.autograd.gradcheck(lambda a, b: mixed_unlearn_loss(a, y, b, yf, floor=floor, p=.6)[0], (zr, zf))


def test_precision_follows_the_logits():
    z, y = logits(4, 6), torch.arange(4)
    exact = gls_cross_entropy(z, y, -.1)
    assert exact.dtype == torch.float64
    a = -.1
    assert abs(float(exact - (z.logsumexp(1) - (1 - a) * z[torch.arange(4), y] - a * z.mean(1)).mean())) < 1e-14
    assert gls_cross_entropy(z.half(), y, -.1).dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("alpha_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (4,)])
def test_half_precision_takes_alpha_tensors(dtype, alpha_dtype, shape):
    z, y = logits(4, 6).to(dtype).requires_grad_(), torch.arange(4)
    alpha = torch.full(shape, -.25, dtype=alpha_dtype)
    loss = gls_cross_entropy(z, y, alpha)
    g, = torch.autograd.grad(loss, z)
    wide = z.detach().double().requires_grad_()
    exact = gls_cross_entropy(wide, y, -.25)
    assert loss.dtype == g.dtype == dtype and float(loss.detach()) == pytest.approx(float(exact.detach()), rel=1e-2)
    assert torch.allclose(g.double(), torch.autograd.grad(exact, wide)[0], atol=4e-3)
    mixed, parts = mixed_unlearn_loss(z, y, z, y, alpha=alpha)
    assert mixed.dtype == dtype and parts["forget"] == pytest.approx(mixed_unlearn_loss(wide, y, wide, y, alpha=-.25)[1]["forget"], rel=2e-2)


def test_mixed_is_the_formula():
    zr, zf, yr, yf = logits(6, 5), logits(4, 5, 1), torch.arange(6) % 5, torch.arange(4)
    for reduction in ("mean", "sum"):
        loss, parts = mixed_unlearn_loss(zr, yr, zf, yf, p=.7, alpha=-.3, floor=None, reduction=reduction)
        retain, forget = F.cross_entropy(zr, yr, reduction=reduction), gls_cross_entropy(zf, yf, -.3, reduction=reduction)
        assert torch.allclose(loss, .7 * retain - .3 * forget, atol=1e-13)
        assert parts == pytest.approx({"retain": float(retain), "forget": float(forget), "active": 1.}, abs=1e-12)


def test_floor_masks_single_samples_and_keeps_the_divisor():
    zf = torch.tensor([[5., 0, 0], [-5., 0, 0]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 0])
    loss, parts = mixed_unlearn_loss(zf.detach(), y, zf, y, p=.5, alpha=-.2)
    alone = gls_cross_entropy(zf[:1], y[:1], -.2) / 2
    assert parts["active"] == .5 and parts["forget"] == pytest.approx(float(alone.detach()), abs=1e-13)
    g, = torch.autograd.grad(loss, zf)
    assert g[0].norm() > .04 and torch.equal(g[1], torch.zeros(3, dtype=torch.float64))


def test_uniform_logits_are_at_chance_and_inactive():
    z = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    loss, parts = mixed_unlearn_loss(torch.zeros(3, 4, dtype=torch.float64), torch.arange(3), z, torch.arange(3), p=.5)
    assert parts["active"] == 0 and parts["forget"] == 0
    assert torch.equal(torch.autograd.grad(loss, z)[0], torch.zeros_like(z))


def test_gradient_limit_at_memorisation():
    z = torch.zeros(1, 10, dtype=torch.float64); z[0, 0] = 40; z.requires_grad_()
    g, = torch.autograd.grad(gls_cross_entropy(z, torch.tensor([0]), -.5), z)
    assert float(g.norm()) == pytest.approx(.474342, abs=1e-6)


@pytest.mark.parametrize("call, word", [
    (lambda z, y: gls_cross_entropy(z, y + 9, -.1), "labels"), (lambda z, y: gls_cross_entropy(z, y - 1, -.1), "labels"),
    (lambda z, y: gls_cross_entropy(z, y, math.nan), "alpha"), (lambda z, y: gls_cross_entropy(z, y, torch.zeros(7)), "alpha"),
    (lambda z, y: gls_cross_entropy(z, y, torch.tensor([0., math.inf, 0.])), "alpha"), (lambda z, y: gls_cross_entropy(z, y, 0., reduction="max"), "reduction"),
    (lambda z, y: gls_targets(y * 0, 1, -.1), "num_classes"), (lambda z, y: gls_targets(y.double(), 3, -.1), "integer"),
    (lambda z, y: mixed_unlearn_loss(z, y, z, y, p=1.1), "p=1.1"), (lambda z, y: mixed_unlearn_loss(z, y, z, y, floor="zero"), "floor"),
    (lambda z, y: mixed_unlearn_loss(z, y, z, y, reduction="none"), "reduction"), (lambda z, y: mixed_unlearn_loss(z, y, z[:, :2], y, ), "same K"),
    (lambda z, y: mixed_unlearn_loss(z, y, z, y[:2]), "rows"),
])
def test_bad_input_is_named(call, word):
    with pytest.raises(ValueError, match=word): call(logits(3, 3), torch.tensor([0, 1, 2]))


def test_positive_alpha_warns():
    z, y = logits(3, 3), torch.arange(3)
    with pytest.warns(UserWarning, match="alpha"): mixed_unlearn_loss(z, y, z, y, alpha=.1)


def test_adaptive_counts_by_brute_force():
    rng = np.random.default_rng(0)
    r, f = rng.normal(size=(17, 5)), rng.normal(size=(6, 5))
    f[2] = 0
    for beta in (.1, .4, .5, .9):
        counts = []
        for v in f:
            cos = [0. if not v.any() else v @ u / np.linalg.norm(u) / np.linalg.norm(v) for u in r]
            counts.append(sum((1 - c) / 2 < beta for c in cos))
        paper = adaptive_alpha(torch.tensor(r), torch.tensor(f), beta, alpha_max=.7)
        assert np.allclose(paper, -.7 * np.array(counts) / 17)
        inverse = adaptive_alpha(torch.tensor(r), torch.tensor(f), beta, mode="inverse", alpha_max=.7)
        assert np.allclose(paper + inverse, -.7) and (paper <= 0).all()


def test_adaptive_has_no_gradient_and_checks():
    x = torch.randn(3, 2, requires_grad=True)
    assert not adaptive_alpha(x, x, .3).requires_grad
    for kw, word in (({"beta": 1.5}, "beta"), ({"beta": .5, "alpha_max": 0}, "alpha_max"), ({"beta": .5, "mode": "x"}, "mode")):
        with pytest.raises(ValueError, match=word): adaptive_alpha(x, x, **kw)
    with pytest.raises(ValueError, match="same d"): adaptive_alpha(x, torch.randn(3, 3), .5)
    with pytest.raises(ValueError, match="empty"): adaptive_alpha(x[:0], x, .5)
