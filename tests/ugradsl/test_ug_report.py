"Report card against brute force and closed forms."
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from iclr26.ugradsl import FineTune, GradientAscent, UnlearnReport, compare, evaluate, mia_attacks, mia_auc, mia_efficacy, parameter_change, split_forget, tune

torch.set_num_threads(1)
values = st.lists(st.integers(0, 6).map(float), min_size=1, max_size=20)


class Echo(nn.Module):
    "Logits are the inputs."
    def __init__(self): super().__init__(); self.w = nn.Parameter(torch.ones(())); self.drop = nn.Dropout(.9)
    def forward(self, x): return self.drop(x * self.w)


def echo_data(y, predicted, k=4):
    x = torch.zeros(len(y), k); x[torch.arange(len(y)), torch.tensor(predicted)] = 3.
    return TensorDataset(x, torch.tensor(y))


@settings(max_examples=60, deadline=None)
@given(values, values)
def test_auc_by_brute_force(f, t):
    assert mia_auc(f, t) == pytest.approx(np.mean([[(a < b) + .5 * (a == b) for b in t] for a in f]))


def test_mia_separates():
    assert mia_efficacy(np.full(50, .95), np.full(50, .05), np.full(10, .06)) == 100
    assert mia_efficacy(np.full(50, .95), np.full(30, .05), np.full(10, .94)) == 0


def test_mia_is_balanced_seeded_and_free_of_order():
    rng = np.random.default_rng(0)
    members = np.sort(np.r_[rng.uniform(0, .3, 300), rng.uniform(.7, 1, 300)])
    others, forget = rng.uniform(.2, .6, 60), rng.uniform(.6, 1, 40)
    a = mia_efficacy(members, others, forget, seed=3)
    assert a == mia_efficacy(members, others, forget, seed=3) and a < 30  # the first 60 members alone all lie below .3
    for bad in (([], others, forget), (members, [], forget), (members, others, []), ([math.nan], others, forget)):
        with pytest.raises(ValueError, match="expected"): mia_efficacy(*bad)


def test_mia_uses_svc_with_the_stated_settings():
    from sklearn.svm import SVC
    rng = np.random.default_rng(1)
    m, o, f = rng.beta(5, 1, 40), rng.beta(2, 1, 40), rng.random(30)
    clf = SVC(C=3, gamma="auto", kernel="rbf").fit(np.r_[m, o][:, None], np.r_[np.ones(40), np.zeros(40)])
    assert mia_efficacy(m, o, f) == pytest.approx(100 * np.mean(clf.predict(f[:, None]) == 0))


def test_evaluate_by_hand():
    model = Echo().train()
    retain, forget, test = echo_data([0, 1, 2, 3], [0, 1, 2, 0]), echo_data([0] * 5, [0, 1, 0, 2, 3]), echo_data([0, 0], [0, 0])
    r = evaluate(model, retain, forget, test, rte_s=1.5)
    assert (r.ua, r.ra, r.ta, r.rte_s) == (pytest.approx(60), 75, 100, 1.5) and model.training and model.drop.training
    assert r == evaluate(model, retain, forget, test, rte_s=1.5, batch_size=2)
    assert 0 <= r.mia_auc <= 1 and r.mia_auc == pytest.approx((2 * .5) / 5)  # two right (equal loss), three wrong (higher)
    for name in ("retain", "forget", "test"):
        with pytest.raises(ValueError, match=name): evaluate(model, **{**dict(retain=retain, forget=forget, test=test), name: TensorDataset(torch.zeros(0, 4), torch.zeros(0).long())})


def test_modified_entropy_is_per_row():
    from iclr26.ugradsl.report import _attack_features
    z, y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.tensor([0, 1, 2, 3, 1, 1])
    q = z.softmax(1).numpy()
    expected = [-(1 - q[i, k]) * math.log(q[i, k]) - sum(q[i, j] * math.log(1 - q[i, j]) for j in range(4) if j != k) for i, k in enumerate(y.tolist())]
    f = _attack_features(z, y)
    assert np.allclose(f["modified entropy"], expected) and np.allclose(f["entropy"], -(q * np.log(q)).sum(1)) and np.allclose(f["confidence"], q[range(6), y])


def test_attacks_agree_with_the_card():
    model = Echo().eval()
    sets = [echo_data([0, 1, 2, 3], [0, 1, 2, 0]), echo_data([0, 0, 1], [0, 1, 1]), echo_data([2, 2, 1], [2, 2, 0])]
    a, r = mia_attacks(model, *sets), evaluate(model, *sets)
    assert a["confidence"] == r.mia and a["loss AUC"] == r.mia_auc and set(a) == {"correctness", "confidence", "entropy", "modified entropy", "loss AUC"}


def test_gap_and_compare():
    a, b = UnlearnReport(10, 20, 90, 80, .5, 1.), UnlearnReport(14, 18, 100, 80, .4)
    assert a.gap(b) == b.gap(a) == 4 and a.gap(a) == 0
    table = compare({"retrain": a, "x": b})
    assert list(table.columns) == ["UA", "MIA", "RA", "TA", "AUC", "Gap", "RTE"] and table.loc["retrain", "Gap"] == 0 and table.loc["x", "Gap"] == 4 and math.isnan(table.loc["x", "RTE"])
    with pytest.raises(ValueError, match="x"): compare({"x": b})


def test_parameter_change():
    a, b = nn.Linear(2, 1), nn.Linear(2, 1)
    with torch.no_grad():
        for m, v in ((a, [3., 0.]), (b, [3., 4.])): m.weight.copy_(torch.tensor([v])); m.bias.fill_(4.)
    assert parameter_change(a, b) == pytest.approx(4 / 5) and parameter_change(a, a) == 0
    with pytest.raises(ValueError, match="different"): parameter_change(a, nn.Linear(3, 1))


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 60), st.integers(0, 99), st.sampled_from([.1, .5, 1, 2]))
def test_split_is_a_partition(n, seed, size):
    y = np.arange(n) % 3
    if isinstance(size, float) and round(size * n) == 0: return
    f, r = split_forget(y, "random", size=size, seed=seed)
    assert len(f) == (round(size * n) if isinstance(size, float) else size) and f.dtype == torch.int64
    assert sorted(torch.cat([f, r]).tolist()) == list(range(n)) and f.tolist() == sorted(f.tolist()) and r.tolist() == sorted(r.tolist())
    assert torch.equal(f, split_forget(y, "random", size=size, seed=seed)[0])


def test_split_class_group_and_faults():
    f, r = split_forget([0, 1, 2, 0], "class", classes=[0, 2])
    assert f.tolist() == [0, 2, 3] and r.tolist() == [1]
    f, _ = split_forget([0, 1, 2, 0], "group", groups=[5, 5, 6, 6], group=6)
    assert f.tolist() == [2, 3]
    for kw in (dict(kind="class"), dict(kind="class", classes=[9]), dict(kind="class", classes=[0, 1, 2]), dict(kind="group"), dict(kind="group", groups=[1], group=1), dict(kind="group", groups=[1] * 4, group=1),
               dict(kind="random", size=0), dict(kind="random", size=4), dict(kind="random", size=1.), dict(kind="random", size=.01), dict(kind="odd")):
        with pytest.raises(ValueError): split_forget([0, 1, 2, 0], **kw)


@pytest.mark.parametrize("kw, word", [(dict(kind="class", classes=[0, 9, 7]), "no label 9, 7.*0, 1, 2"), (dict(kind="class", classes=["0"]), "no label 0"), (dict(kind="group", groups=[5, 5, 6, 6], group=7), "group=7.*5, 6")])
def test_split_names_what_does_not_fit(kw, word):
    with pytest.raises(ValueError, match=word): split_forget([0, 1, 2, 0], **kw)


def test_report_and_tuning_take_loaders():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=g); y = (x[:, 0] > 0).long()
    parts = [TensorDataset(x[i:j], y[i:j]) for i, j in ((0, 30), (30, 45), (45, 60))]
    flip = lambda items: (torch.stack([-a for a, _ in items]), torch.stack([b for _, b in items]))
    loaders = [DataLoader(p, 7, shuffle=True) for p in parts]
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    card = evaluate(model, *parts)
    assert evaluate(model, *loaders) == card and mia_attacks(model, *loaders) == mia_attacks(model, *parts)
    flipped = [TensorDataset(-x[i:j], y[i:j]) for i, j in ((0, 30), (30, 45), (45, 60))]
    assert evaluate(model, *[DataLoader(p, 7, collate_fn=flip) for p in flipped]) == card                 # a loader's own collating is used
    a, b = (tune(FineTune(epochs=2, batch_size=10), {"lr": [.1, .01]}, model, *sets, reference=card) for sets in (parts, loaders))
    assert a[0] == b[0] and a[1].gap.tolist() == b[1].gap.tolist()
    class Endless(IterableDataset):
        def __iter__(self): return iter([])
    class Never(FineTune):
        def unlearn(self, *args, **kw): raise AssertionError("work before the check")
    for call in (lambda bad: evaluate(model, *parts[:2], bad), lambda bad: mia_attacks(model, *parts[:2], bad), lambda bad: tune(Never(), {"lr": [.1]}, model, *parts[:2], bad, reference=card)):
        with pytest.raises(TypeError, match="test is"): call(DataLoader(Endless(), 2))
    with pytest.raises(ValueError, match="test set is empty"): evaluate(model, *parts[:2], DataLoader(TensorDataset(x[:0], y[:0]), 2))


def test_report_tells_bad_inputs_from_a_destroyed_model():
    data = echo_data([0, 1, 2, 3], [0, 1, 2, 3])
    bad = TensorDataset(torch.full((4, 4), math.nan), data.tensors[1])
    with pytest.raises(ValueError, match="inputs hold NaN"): evaluate(Echo(), data, data, bad)
    broken = Echo(); torch.nn.init.constant_(broken.w, math.nan)
    with pytest.raises(ValueError, match="model is destroyed"): evaluate(broken, data, data, data)


def test_tune_ranks_by_gap_and_survives_divergence():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=g); y = (x[:, 0] > 0).long()
    parts = [TensorDataset(x[i:j], y[i:j]) for i, j in ((0, 30), (30, 45), (45, 60))]
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    before = model.weight.clone()
    reference = evaluate(FineTune(epochs=5, lr=.1, batch_size=10).unlearn(model, parts[0], None).model, *parts)
    method = GradientAscent(epochs=100, batch_size=5, momentum=.99)
    best, table = tune(method, {"lr": [1e30, .01, .001], "weight_decay": [0., .1]}, model, *parts, reference=reference)
    assert list(table.columns) == ["lr", "weight_decay", "gap", "rte_s"] and len(table) == 6 and table.gap.is_monotonic_increasing
    assert best == {"lr": table.lr[0], "weight_decay": table.weight_decay[0]} and math.isinf(table.gap.iloc[-1])
    assert method.lr == .01 and method.momentum == .99 and torch.equal(model.weight, before)
    with pytest.raises(ValueError, match="nothing"): tune(method, {"nothing": [1]}, model, *parts, reference=reference)
    with pytest.raises(ValueError, match="grid"): tune(method, {}, model, *parts, reference=reference)


def test_public_names():
    import iclr26.ugradsl as u
    contract = """gls_targets gls_cross_entropy mixed_unlearn_loss adaptive_alpha UnlearnResult UnlearningDivergedError Unlearner FineTune GradientAscent UGradSL UGradSLPlus RandomLabel L1Sparse SalUn
    InfluenceUnlearn BoundaryShrink BoundaryExpand Retrain UnlearnReport evaluate mia_efficacy mia_auc compare parameter_change split_forget tune label_ldp_epsilon alpha_bounds Theorem2 theorem2
    InfluenceTerms softmax_influence unlearn""".split()
    assert all(hasattr(u, name) and name in u.__all__ for name in contract)


def test_arguments_of_other_kinds_are_not_looked_at():
    y, groups = [0, 1, 2, 0], [5, 5, 6, 6]
    for kind, forget in (("class", [0, 3]), ("group", [0, 1])):
        assert split_forget(y, kind, classes=[0], groups=groups, group=5)[0].tolist() == forget
