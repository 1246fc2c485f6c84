"""The planner in the user's units, and its command line."""
import json
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from iclr26.decision_metrics import (Distribution, Interval, OneMaxSearch, SkiRental, linear_weight, optimize, rent_or_buy, smoothed, when_to_checkpoint, when_to_sell, worst_ratio)
from iclr26.decision_metrics.cli import app

ERRORS = [-.62, -.55, -.41, -.38, -.3, -.22, -.2, -.11, -.05, .02, .08, .15, .3, .6, 1.1]


@pytest.mark.parametrize("plan, base, kinds", [
    (rent_or_buy, dict(rent=2.5, price=1200, forecast=700, robustness=4), [dict(low=200, high=1100), dict(errors=ERRORS), dict(law=stats.gamma(4, scale=180)), {}]),
    (when_to_sell, dict(floor=200, ceiling=600, forecast=400), [dict(low=300, high=500), dict(errors=[-.3, -.1, .05, .2]), dict(law=stats.uniform(300, 200)), {}]),
    (when_to_checkpoint, dict(forecast=10), [dict(low=8, high=14), dict(errors=[-.3, -.1, .05, .2]), dict(law=stats.gamma(9, scale=1.2)), {}])])
def test_every_kind_of_knowledge_keeps_the_promise(plan, base, kinds):
    for kind in kinds:
        d = plan(**base, **kind)
        assert worst_ratio(d.problem, d.theta) <= d.robustness * (1 + 1e-9) and d.guarantees["worst ratio, whatever happens"] <= d.robustness * (1 + 1e-9)
        assert d.threshold == pytest.approx(d.theta * d.scale) and f"{d.threshold:.5g}" in d.action and all(np.isfinite(v) for v in d.guarantees.values())
        assert d.measure == ("avg" if "low" in kind else "cvar" if kind else "none") and "follow the forecast" in d.alternatives
        assert all(set(row) == {"threshold", *d.guarantees} for row in d.alternatives.values())


def test_same_answer_as_the_solver_in_other_units():
    d = rent_or_buy(2.5, 1200, 700, low=200, high=1100, robustness=4)
    assert d.theta == optimize(SkiRental(480), 4, Interval(700, 200, 1100), "avg", weight=linear_weight(200, 700, 1100)).theta
    s = when_to_sell(200, 600, 400, law=stats.uniform(300, 200), alpha=.3)
    assert s.threshold == pytest.approx(200 * optimize(OneMaxSearch(3), 1.3 * 3**.5, Distribution(stats.uniform(1.5, 1)), "cvar", alpha=.3).theta, rel=1e-6)
    assert rent_or_buy(25, 12000, 700, low=200, high=1100).theta == pytest.approx(rent_or_buy(2.5, 1200, 700, low=200, high=1100).theta)


def test_the_decision_is_best_by_its_own_measure():
    d = rent_or_buy(2.5, 1200, 450, errors=ERRORS, robustness=4, alpha=.9)
    name = "mean cost of the worst 10 %"
    assert d.guarantees[name] <= min(row[name] for row in d.alternatives.values()) + 1e-9
    assert rent_or_buy(2.5, 1200, 450, errors=ERRORS, robustness=4, alpha=0).threshold > d.threshold          # a braver planner rents on


def test_schedule():
    d = when_to_checkpoint(10, low=8, high=14)
    ends = np.cumsum(d.schedule)
    assert np.isclose(ends, d.theta).any() and ends[-1] > 14 and d.schedule[0] >= 10 / 64
    for t in np.linspace(ends[0], ends[-1], 500):                 # the finite schedule is at least as good as the infinite one
        done = max(v for v, e in zip(d.schedule, ends) if e <= t * (1 + 1e-12))
        assert done >= d.problem.value(d.theta, t) * (1 - 1e-9) and t / done <= 4 * (1 + 1e-9)


def test_smoothed_law():
    law = smoothed([8, 9, 10, 12, 18, 9])
    x = np.linspace(law.support[0], law.support[1], 1000)
    assert np.all(np.diff(law.law.cdf(x)) >= 0) and law.law.cdf(12) == pytest.approx(.75) and law.support == (7.5, 21)
    assert smoothed([1, 5, 5, 1], 1, 5).support == (1, 5)
    with pytest.raises(ValueError, match="^samples = "): smoothed([3, 3])


@pytest.mark.parametrize("bad, name", [(dict(rent=0), "rent"), (dict(price=-1), "price"), (dict(forecast=np.nan), "forecast"), (dict(low=800, high=1000), "low, high"), (dict(low=100), "high"), (dict(high=900), "low"),
                                       (dict(errors=[0, .1], low=1, high=1000), "low, high, errors, law"), (dict(robustness=1.5), "r"), (dict(measure="cvar"), "measure"), (dict(measure="best"), "measure"),
                                       (dict(errors=[0, .1], measure="avg"), "measure"), (dict(alpha=1), "alpha"), (dict(errors=[-1, .1]), "errors"), (dict(errors=[np.nan]), "errors"), (dict(law=stats.norm(700, 100)), "dist")])
def test_bad_input_names_the_argument(bad, name):
    with pytest.raises(ValueError, match=rf"^{name} = "): rent_or_buy(**(dict(rent=2.5, price=1200, forecast=700) | bad))


def test_other_bad_input():
    for bad in (dict(floor=0), dict(ceiling=100), dict(forecast=900), dict(low=100, high=500), dict(robustness=1.2)):
        with pytest.raises(ValueError): when_to_sell(**(dict(floor=200, ceiling=600, forecast=400) | bad))
    with pytest.raises(ValueError, match="^r = 3"): when_to_checkpoint(10, robustness=3)
    with pytest.raises(ValueError, match="^shortest = "): when_to_checkpoint(10, shortest=30)


def test_picture_and_table(tmp_path):
    d = when_to_sell(200, 600, 400, low=300, high=500)
    assert list(d.table().index)[0] == "this decision" and "tolerance rule" in d.table().index
    fig = d.figure()
    assert fig.alt and fig.save(tmp_path / "d.png").stat().st_size > 5000


def test_cli(tmp_path):
    run = CliRunner().invoke(app, ["rent", "--rent", "2.5", "--price", "1200", "--forecast", "700", "--low", "200", "--high", "1100", "--robustness", "4", "--json"])
    got, want = json.loads(run.output), rent_or_buy(2.5, 1200, 700, low=200, high=1100, robustness=4)
    assert run.exit_code == 0 and got["threshold"] == want.threshold and got["guarantees"] == want.guarantees
    (tmp_path / "errors.txt").write_text("\n".join(map(str, ERRORS)))
    run = CliRunner().invoke(app, ["sell", "--floor", "100", "--ceiling", "900", "--forecast", "300", "--errors", str(tmp_path / "errors.txt"), "--picture", str(tmp_path / "p.png")])
    assert run.exit_code == 0 and "Accept the first offer" in run.output and (tmp_path / "p.png").exists()
    run = CliRunner().invoke(app, ["checkpoint", "--forecast", "10", "--low", "8", "--high", "14"])
    assert run.exit_code == 0 and "run lengths" in run.output


@pytest.mark.parametrize("args", [["rent", "--rent", "2.5", "--price", "1200", "--forecast", "700", "--robustness", "1"], ["sell", "--floor", "9", "--ceiling", "3", "--forecast", "5"],
                                  ["checkpoint", "--forecast", "10", "--errors", "missing.txt"]])
def test_cli_bad_input_is_one_line_and_exit_1(args):
    run = subprocess.run([sys.executable, "-m", "iclr26", "decision_metrics", *args], capture_output=True, text=True)
    assert run.returncode == 1 and "Traceback" not in run.stderr and len(run.stderr.strip().splitlines()) == 1 and run.stdout == ""
