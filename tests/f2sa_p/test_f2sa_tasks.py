"""Tasks against formulas written out, sparse against dense, and the data generators."""
import math

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from iclr26.f2sa_p import (F2SAp, digits_with_flipped_labels, digits_with_noise_features, hyper_cleaning, implicit_hypergradient, learn_to_regularize, make_sparse_topics, newsgroups,
                           noisy_logistic, noisy_scalar, solve_lower)

torch.set_num_threads(1)
rng = np.random.default_rng(0)
X, Xv = rng.standard_normal((30, 8)) * (rng.random((30, 8)) < .4), rng.standard_normal((20, 8)) * (rng.random((20, 8)) < .4)
y, yv = rng.integers(0, 3, 30), rng.integers(0, 3, 20)


def cross_entropy(X, y, W):
    Z = X @ W
    return np.log(np.exp(Z).sum(1)) - Z[np.arange(len(y)), y]


@pytest.mark.parametrize("form", [lambda a: a, torch.as_tensor, sp.csr_matrix], ids=["ndarray", "tensor", "csr"])
@pytest.mark.parametrize("batched", [False, True])
def test_losses_equal_their_formulas(form, batched):
    x, W = rng.standard_normal(8), rng.standard_normal((8, 3))
    rows = torch.tensor([3, 3, 17, 0])
    task = learn_to_regularize(form(X), y, form(Xv), yv, num_classes=3, reg_weight=2.5, batched=batched)
    value = lambda which, rows, problem=None, v=x: float((problem or task.problem).loss(which, torch.as_tensor(v), torch.as_tensor(W), rows))
    penalty = 2.5 * .5 * np.mean(np.exp(x)[:, None] * W**2)
    assert math.isclose(value("lower", None), cross_entropy(X, y, W).mean() + penalty)
    assert math.isclose(value("lower", rows), cross_entropy(X[rows], y[rows], W).mean() + penalty)
    assert math.isclose(value("upper", rows), cross_entropy(Xv[rows], yv[rows], W).mean())
    weights = rng.standard_normal(30)
    clean = hyper_cleaning(form(X), y, form(Xv), yv, num_classes=3, l2=.03, batched=batched)
    s = 1 / (1 + np.exp(-weights))
    assert math.isclose(value("lower", None, clean.problem, weights), (s * cross_entropy(X, y, W)).mean() + .03 * (W**2).sum())
    assert math.isclose(value("lower", rows, clean.problem, weights), (s[rows] * cross_entropy(X[rows], y[rows], W)).mean() + .03 * (W**2).sum())
    assert task.x0.shape == (8,) and clean.x0.shape == (30,) and task.y0.shape == clean.y0.shape == (8, 3)
    assert not task.problem.upper_depends_on_x and not clean.problem.upper_depends_on_x


@pytest.mark.parametrize("build", [learn_to_regularize, hyper_cleaning])
def test_sparse_stacked_and_dense_runs_agree(build):
    runs = []
    for form in (lambda a: a, sp.csr_matrix):
        for batched in (False, True):
            task = build(form(X), y, form(Xv), yv, batch_size=6, batched=batched)
            opt = F2SAp(task.problem, task.x0, task.y0, p=3, inner_steps=4, inner_lr=.1, outer_lr=.1)
            opt.run(4); runs.append(opt.x)
    assert all(torch.allclose(runs[0], r, atol=1e-10) for r in runs[1:])


def test_hypergradient_of_a_sparse_task_equals_the_dense_one():
    grads = []
    for form in (lambda a: a, sp.csr_matrix):
        task = learn_to_regularize(form(X), y, form(Xv), yv, reg_weight=5.0)
        W = solve_lower(task.problem, task.x0, task.y0)
        grads.append(implicit_hypergradient(task.problem, task.x0, W))
    assert torch.allclose(*grads, atol=1e-8) and grads[0].norm() > 0


def test_float32_and_class_count():
    task = learn_to_regularize(X, y, Xv, yv, num_classes=7, dtype=torch.float32)
    assert task.y0.shape == (8, 7) and task.y0.dtype == task.x0.dtype == torch.float32
    opt = F2SAp(task.problem, task.x0, task.y0, inner_lr=.1, outer_lr=.1)
    opt.run(3)
    assert opt.x.dtype == torch.float32 and opt.x.abs().max() > 0


@pytest.mark.parametrize("build", [learn_to_regularize, hyper_cleaning])
def test_bad_data_is_named(build):
    bad = X.copy(); bad[3, 3] = np.nan
    second = "y_noisy" if build is hyper_cleaning else "y_train"
    for args, name in (((X, y[:-1], Xv, yv), second), ((X, y, Xv, yv[:-1]), "y_val"), ((bad, y, Xv, yv), "X_train"), ((X, y, sp.csr_matrix(bad[:20]), yv), "X_val"), ((X, y, Xv[:, :5], yv), "X_val"),
                       ((X, y - 1, Xv, yv), second), ((X[:0], y[:0], Xv, yv), "X_train"), ((X, y + .5, Xv, yv), second)):
        with pytest.raises(ValueError, match=name): build(*args)
    with pytest.raises(ValueError, match=r"\[0, 2\)"): build(X, y, Xv, yv, num_classes=2)
    with pytest.raises(ValueError, match="batch_size"): build(X, y, Xv, yv, batch_size=0)
    with pytest.raises(TypeError, match="dtype"): build(X, y, Xv, yv, dtype=torch.int64)


def test_topics():
    X, labels = make_sparse_topics(300, 900, 3, words_per_doc=40, topic_words=20, topic_share=.5, seed=4)
    again, _ = make_sparse_topics(300, 900, 3, words_per_doc=40, topic_words=20, topic_share=.5, seed=4)
    other, _ = make_sparse_topics(300, 900, 3, words_per_doc=40, topic_words=20, topic_share=.5, seed=5)
    assert X.shape == (300, 900) and (X != again).nnz == 0 and (X != other).nnz > 0 and X.has_canonical_format
    assert np.allclose(np.asarray(X.multiply(X).sum(axis=1)).ravel(), 1) and set(np.bincount(labels)) == {100} and X.data.min() > 0
    # the words of a class are nearly absent elsewhere: nearest centroid is right almost always
    centroids = np.stack([np.asarray(X[labels == c].mean(axis=0)).ravel() for c in range(3)])
    assert ((X @ centroids.T).argmax(1) == labels).mean() > .95
    pure, same = make_sparse_topics(60, 200, 3, topic_words=5, topic_share=1.0)
    assert all(len(set(pure[same == c].indices)) <= 5 for c in range(3))
    for kw in (dict(n_docs=0), dict(topic_share=1.5), dict(n_words=50, topic_words=40), dict(zipf=-1)):
        with pytest.raises(ValueError, match=next(iter(kw)) if "n_words" not in kw else "topic_words"): make_sparse_topics(**kw)


def test_data_sets_of_the_reproduction():
    noise, flips = digits_with_noise_features(3), digits_with_flipped_labels(3)
    assert noise.task.x0.shape == (128,) and noise.truth.sum() == 64 and len(noise.y_test) == 897
    assert flips.truth.mean() == .6 and flips.task.x0.shape == (400,)
    assert np.array_equal(digits_with_flipped_labels(3).truth, flips.truth) and not np.array_equal(digits_with_flipped_labels(4).truth, flips.truth)


def test_cleaning_finds_the_wrong_labels():
    from sklearn.metrics import roc_auc_score
    split = digits_with_flipped_labels(7, n_train=150, n_val=150, batched=True)
    opt = F2SAp(split.task.problem, split.task.x0, split.task.y0, inner_lr=1., outer_lr=.5)
    opt.run(60)
    assert roc_auc_score(split.truth, opt.x) > .9


def test_noisy_scalar_reference_values():
    task, y_star, gradient = noisy_scalar(5)
    assert abs(y_star - 0.5709802891662) < 1e-12 and abs(gradient + .3418086781) < 1e-9
    exact = implicit_hypergradient(task.problem, task.x0, torch.full((5,), y_star, dtype=torch.float64))
    assert torch.allclose(exact, torch.full((5,), gradient, dtype=torch.float64), atol=1e-12)


def test_noisy_logistic_noise_has_the_stated_size():
    task = noisy_logistic(0, batched=False)
    x, g = task.x0, torch.Generator().manual_seed(0)
    def grad(which, wrt, batch):
        v = dict(x=task.x0.clone().requires_grad_(), y=torch.ones(20, dtype=torch.float64, requires_grad=True))
        return torch.autograd.grad(task.problem.loss(which, v["x"], v["y"], batch), v[wrt])[0]
    for which, wrt, std in (("lower", "y", .1), ("upper", "y", .1), ("lower", "x", .002)):
        clean = grad(which, wrt, None)
        noise = torch.stack([grad(which, wrt, task.problem.draw(which, g)) - clean for _ in range(200)])
        assert abs(noise.std().item() / std - 1) < .05 and abs(noise.mean().item()) < std / 10


def test_newsgroups_never_downloads(tmp_path):
    with pytest.raises(OSError): newsgroups(str(tmp_path))
