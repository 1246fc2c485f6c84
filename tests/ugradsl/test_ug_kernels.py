"""The compiled loops of the smoothed loss against the formula in float64, at all widths, with extremes and faults."""
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from iclr26.ugradsl import gls_cross_entropy, gls_targets
from iclr26.ugradsl.losses import smoothed_gradient, smoothed_rows, suits

torch.set_num_threads(1)


def exact(z, y, alpha, g):
    z = z.double().requires_grad_()
    rows = -(gls_targets(y, z.shape[1], alpha, dtype=torch.float64) * z.log_softmax(1)).sum(1)
    return rows.detach(), torch.autograd.grad(rows, z, g.double())[0]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.sampled_from([2, 3, 10, 63, 64, 65, 127, 128, 129, 1000]), st.floats(-3, 1), st.integers(0, 99), st.sampled_from([.1, 1., 20.]))
def test_rows_and_gradient(n, k, alpha, seed, scale):
    rng = torch.Generator().manual_seed(seed)
    z, y, g = torch.randn(n, k, generator=rng) * scale, torch.randint(k, (n,), generator=rng), torch.randn(n, generator=rng)
    rows, grad = exact(z, y, alpha, g)
    found = smoothed_rows(z, y, alpha)
    assert torch.allclose(found[0].double(), rows, rtol=2e-6, atol=2e-6 * scale * (1 + abs(alpha)))
    assert torch.allclose(found[3].double(), z.double().softmax(1)[torch.arange(n), y], rtol=2e-5, atol=1e-30)
    assert torch.allclose(smoothed_gradient(z, y, alpha, found, g).double(), grad, atol=2e-6)


def test_one_alpha_a_row_and_the_public_loss():
    z, y, alpha = torch.randn(6, 70), torch.arange(6), torch.linspace(-2, .5, 6)
    a, b = z.clone().requires_grad_(), z.double().requires_grad_()
    assert suits(a, y) and not suits(b, y)
    losses = [gls_cross_entropy(v, y, alpha.to(v.dtype)) for v in (a, b)]
    assert float(losses[0].detach()) == pytest.approx(float(losses[1].detach()), rel=1e-5)
    assert torch.allclose(torch.autograd.grad(losses[0], a)[0].double(), torch.autograd.grad(losses[1], b)[0], atol=1e-7)


def test_a_common_offset_changes_nothing():
    z, y = torch.randint(-8, 8, (5, 50)).float(), torch.arange(5)
    assert torch.allclose(smoothed_rows(z + 4096, y, -.3)[0], smoothed_rows(z, y, -.3)[0], rtol=1e-6)


def test_extremes():
    y = torch.tensor([0, 0, 0])
    z = torch.tensor([[0., -math.inf, -200.], [0., math.nan, 1.], [3e38, -3e38, 0.]])
    found = smoothed_rows(z, y, 0.)
    assert found[0, 0] == 0 and found[0, 1].isnan() and found[0, 2] == 0
    grad = smoothed_gradient(z, y, 0., found, torch.ones(3))
    assert grad[0].tolist() == [0, 0, 0] and grad[1].isnan().any() and grad[2].tolist() == [0, 0, 0]


def test_uniform_logits_give_exactly_one_over_k():
    for k in (2, 3, 7, 10, 100, 1000): assert smoothed_rows(torch.full((1, k), .3), torch.zeros(1, dtype=torch.long), -.2)[3].item() == np.float32(1) / np.float32(k)


def test_second_derivatives_take_the_plain_operations():
    z, y = torch.randn(4, 9), torch.arange(4)
    found = []
    for v in (z.clone().requires_grad_(), z.double().requires_grad_()):
        g, = torch.autograd.grad(gls_cross_entropy(v, y, -.3), v, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), v)[0].double())
    assert torch.allclose(*found, atol=1e-7)


@pytest.mark.parametrize("label", [-100, -1, 5, 2**40])
def test_labels_out_of_range_are_refused_before_they_are_used(label):
    y = torch.tensor([0, label])
    with pytest.raises(IndexError, match="label"): smoothed_rows(torch.zeros(2, 5), y, -.1)
    with pytest.raises(ValueError, match="labels"): gls_cross_entropy(torch.zeros(2, 5), y, -.1)


def test_nothing_of_the_size_of_the_logits_is_kept_but_the_logits():
    z, y, kept = torch.randn(32, 400, requires_grad=True), torch.arange(32), {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}) or t, lambda t: t): gls_cross_entropy(z, y, -.2)
    assert sum(kept.values()) <= 1.1 * z.untyped_storage().nbytes()
