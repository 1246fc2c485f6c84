"""Verdict rules against hand-made cases and properties."""
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from iclr26.lab.claims import (INCONCLUSIVE, NOT_TESTED, REFUTED, SUPPORTED, VERDICTS, Claim, Criterion, as_values, at_least, at_most, between, combine,
                               equals, holds, interval, judge, student, unanimous)

numbers = st.floats(-1e6, 1e6)
GAIN = unanimous(at_most(.98), at_least(1.02))


@pytest.mark.parametrize("criterion, values, seeds, verdict", [
    (at_least(1), [1.0], 1, SUPPORTED), (at_least(1), [0.999], 1, REFUTED), (at_most(1), [1.0], 1, SUPPORTED), (at_most(1), [1.1], 1, REFUTED),
    (equals(2, 0.5), [2.5], 1, SUPPORTED), (equals(2), [2.0000001], 1, REFUTED), (between(0, 1), [0, 1, 0.5], 3, SUPPORTED),
    (at_least(1), [0.5, 1.6, 1.1], 3, INCONCLUSIVE), (at_least(1), [2, 2], 3, INCONCLUSIVE), (at_least(1), [], 1, NOT_TESTED),
    (at_least(1), [math.nan, 2], 1, REFUTED), (at_least(1), [math.inf], 1, REFUTED), (at_least(1, each=True), [5, 5, 0.9], 3, REFUTED),
    (at_least(1, each=True), [5, 5], 3, INCONCLUSIVE), (holds(), [1, 1], 2, SUPPORTED), (holds(), [1, 0], 2, REFUTED), (at_least(1), [3, 3, 3], 3, SUPPORTED),
    (GAIN, [.9, .98, .5], 3, SUPPORTED), (GAIN, [1.02, 1.3, 2], 3, REFUTED), (GAIN, [.9, .9, .99], 3, INCONCLUSIVE), (GAIN, [.9, 1.1, 1.2], 3, INCONCLUSIVE),
    (GAIN, [1.1, 1.1], 3, INCONCLUSIVE), (GAIN, [.9, .9], 3, INCONCLUSIVE), (GAIN, [1.0, 1.0, 1.0], 3, INCONCLUSIVE), (GAIN, [.9, math.nan, .9], 3, REFUTED),
])
def test_judge_by_hand(criterion, values, seeds, verdict):
    assert judge(criterion, values, seeds) == verdict


def test_interval_is_scipys_bootstrap_and_covers():
    rng, hits = np.random.default_rng(1), 0
    for _ in range(100):
        low, high = interval(list(rng.normal(size=20)))
        hits += low <= 0 <= high
    assert 85 <= hits <= 99  # 95 % nominal, bootstrap with 20 values is a little short
    assert interval([4.0]) is None and interval([4.0, 4.0]) == (4.0, 4.0) and interval([1.0, 3.0])[0] >= 1


@given(st.lists(numbers, min_size=2, max_size=6))
def test_interval_lies_within_the_values_and_is_deterministic(values):
    low, high = interval(values)
    assert min(values) - 1e-6 <= low <= high <= max(values) + 1e-6 and interval(values) == (low, high)


@given(st.lists(numbers, min_size=1, max_size=5), numbers)
def test_a_value_is_never_both_supported_below_and_above(values, limit):
    below, above = judge(at_most(limit), values), judge(at_least(limit), values)
    assert not (below == above == REFUTED)
    if below == REFUTED: assert above == SUPPORTED


@given(st.permutations(VERDICTS), st.integers(1, 4))
def test_combine_is_the_worst_and_ignores_order(order, n):
    rank = [REFUTED, NOT_TESTED, INCONCLUSIVE, SUPPORTED]
    assert combine(order[:n]) == combine(order[:n][::-1]) == min(order[:n], key=rank.index)


def test_bad_declarations_are_named():
    for bad in (lambda: between(2, 1), lambda: at_least(math.nan), lambda: Claim("", "s", "", "t"), lambda: Claim("a", "s", "", "t", seeds=0),
                lambda: Claim("a", "s", "", "t", expect="maybe")):
        with pytest.raises(ValueError): bad()
    with pytest.raises(TypeError, match="criteria"): Claim("a", "s", "", "t", {"x": 3})
    assert combine([]) == NOT_TESTED and Claim("a", "s", "", "t").judge({}) == NOT_TESTED


def test_values_from_numpy_and_torch():
    torch = pytest.importorskip("torch")
    assert as_values("x", torch.tensor([1.0, 2.0])) == [1.0, 2.0] and as_values("x", [np.bool_(True), torch.tensor(3)]) == [1.0, 3.0]
    with pytest.raises(TypeError, match="x="): as_values("x", 1j)
    with pytest.raises(TypeError, match="x="): as_values("x", [[1.0]])


def test_criteria_print_like_a_formula():
    texts = map(str, (at_least(0.9), at_most(2, unit="MB"), between(1, 2, each=True), equals(3), holds(), GAIN))
    assert list(texts) == ["≥ 0.9", "≤ 2 MB", "in [1, 2] for each seed", "= 3", "holds", "≤ 0.98 for each seed (refuted if ≥ 1.02 for each seed)"]
    assert isinstance(at_least(1), Criterion)


def test_a_unanimous_criterion_names_overlapping_ranges():
    with pytest.raises(ValueError, match="against"): unanimous(at_most(1), at_least(0.9))
    with pytest.raises(ValueError, match="against"): Criterion(0, 1, against=(2, 3))


def test_student_intervals():
    stats = pytest.importorskip("scipy.stats")
    values = [-1.504, 0.334, -1.086, -1.253, -0.752]
    low, high = stats.ttest_1samp(values, 0).confidence_interval(.95)
    assert interval(values, student=True) == pytest.approx((low, high)) and interval([2., 2.], student=True) == (2., 2.) and interval([3.], student=True) is None
    rng = np.random.default_rng(0)
    hits = sum(low <= 0 <= high for low, high in (interval(list(v), student=True) for v in rng.normal(size=(1000, 3))))
    assert 930 <= hits <= 970
    assert judge(student(at_least(0)), values, 5) == INCONCLUSIVE and judge(at_least(0), values, 5) == REFUTED              # the bootstrap of five is too narrow
    for criterion, shift, verdict in ((at_least(0), 9, SUPPORTED), (at_least(0), -9, REFUTED), (at_most(0), 9, REFUTED), (between(8, 9), 9, INCONCLUSIVE)):
        assert judge(student(criterion), [v + shift for v in values], 5) == verdict
    assert str(student(at_least(1, unit="points"))) == "≥ 1 points (t interval)" and Criterion(**{k: getattr(student(at_least(1)), k) for k in Criterion.__dataclass_fields__}) == student(at_least(1))
    for bad in (holds(), at_least(1, each=True), GAIN):
        with pytest.raises(ValueError, match="student"): student(bad)
