"""Ledger: schema, pooling, views, damaged files."""
import copy
import json

import pytest

from iclr26.lab import ledger as L
from iclr26.lab.claims import INCONCLUSIVE, REFUTED, SUPPORTED, Claim, at_least, at_most, holds, student, unanimous
from iclr26.lab.runs import Recorder, read_metrics


@pytest.fixture
def metrics(tmp_path):
    claims = [Claim("A", "a < b & c", "1 | 2", "t", {"x": at_least(1), "ok": holds()}, seeds=2), Claim("B", "b", "", "never run", {"y": at_least(0)}),
              Claim("C", "c", "", "t", {"z": at_least(0)}, expect=SUPPORTED)]
    found = []
    for seed in (1, 0):
        rec = Recorder("demo", claims, seed=seed, out=tmp_path / str(seed))
        rec.measure("A", x=[2.0 + seed, 3.0], ok=True)
        rec.measure("C", z=float("nan"))
        rec.explain("A", "because")
        rec.not_tested("B", "no GPU here")
        rec.note("table", {"v": [1, float("inf")]})
        found.append(read_metrics(rec.out))
    return found


def test_pooling_and_verdicts(metrics):
    ledger = L.validate(L.from_metrics(metrics))
    a, b, c = ledger["claims"]
    assert ledger["seeds"] == [0, 1] and sorted(a["measures"][0]["values"]) == [2, 3, 3, 3] and a["verdict"] == SUPPORTED and a["reason"] == "because"
    assert b["verdict"] == "not tested" and b["reason"] == "no GPU here" and c["verdict"] == REFUTED and c["measures"][0]["values"] == [None, None]
    assert [s["id"] for s in L.surprises(ledger)] == ["C"] and L.counts(ledger)["supported"] == 1
    assert ledger["command"] == "iclr26 reproduce demo --profile smoke --seeds 0,1" and L.from_metrics(metrics[:1])["command"].endswith("--seeds 1,") and ledger["notes"]["table"]["v"] == [1, None]
    json.dumps(ledger, allow_nan=False)


def test_views_escape_and_say_the_word(metrics):
    table = L.VerdictTable(L.from_metrics(metrics))
    page, readme, terminal = table._repr_html_(), table._repr_markdown_(), repr(table)
    assert "a &lt; b &amp; c" in page and 'verdict-refuted">refuted' in page and "because" in page and 'verdict-not-tested' in page
    assert "1 \\| 2" in readme and all("refuted" in view for view in (readme, terminal))


def test_write_read_and_damage(metrics, tmp_path):
    ledger = L.from_metrics(metrics)
    path = L.write_ledger(ledger, tmp_path / "demo.json")
    assert L.read_ledger("demo", tmp_path) == ledger and L.read_ledger("other", tmp_path) is None
    assert "No full run of other" in repr(L.verdict_table("other", tmp_path))
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match="demo.json: not JSON"): L.read_ledger("demo", tmp_path)
    for break_it in (lambda d: d["claims"][0].update(verdict="true"), lambda d: d.pop("environment"), lambda d: d["claims"][0]["measures"][0].update(extra=1)):
        bad = copy.deepcopy(ledger)
        break_it(bad)
        with pytest.raises(ValueError, match="demo.json"): L.write_ledger(bad, tmp_path / "demo.json")
    assert "not JSON" in str(pytest.raises(ValueError, L.read_ledger, "demo", tmp_path).value)  # a refused ledger changed nothing


def test_runs_of_different_claims_do_not_mix(metrics):
    other = copy.deepcopy(metrics[0])
    other["claims"].pop("C")
    with pytest.raises(ValueError, match="different claims"): L.from_metrics([metrics[0], other])
    with pytest.raises(ValueError, match="at least one"): L.from_metrics([])


def test_committed_ledgers_satisfy_the_schema_and_belong_to_papers(root):
    from iclr26.lab.papers import list_papers
    names = {p.name for p in list_papers()}
    for path in (root / "data" / "results").glob("*.json"):
        ledger = L.read_ledger(path.stem)
        assert path.stem in names and ledger["profile"] == "full" and ledger["paper"] == path.stem
    assert names, "the library has papers"


@pytest.mark.parametrize("values, verdict", [([.9, .95], SUPPORTED), ([1.1, 1.2], REFUTED), ([.9, 1.1], INCONCLUSIVE)])
def test_a_unanimous_criterion_survives_the_way_to_the_ledger(tmp_path, values, verdict):
    claim = Claim("D1", "s", "", "t", {"ratio": unanimous(at_most(.98), at_least(1.02))}, seeds=2)
    rec = Recorder("demo", [claim], out=tmp_path)
    rec.measure("D1", ratio=values)
    rec.finish()
    assert L.from_metrics([read_metrics(tmp_path)])["claims"][0]["verdict"] == verdict


def test_a_t_interval_survives_the_way_to_the_ledger(tmp_path):
    values = [-1.504, 0.334, -1.086, -1.253, -0.752]
    rec = Recorder("demo", [Claim("D1", "s", "", "t", {"gain": student(at_least(0)), "plain": at_least(0)}, seeds=5)], out=tmp_path)
    rec.measure("D1", gain=values, plain=values)
    rec.finish()
    gain, plain = L.from_metrics([read_metrics(tmp_path)])["claims"][0]["measures"]
    assert (gain["verdict"], plain["verdict"]) == (INCONCLUSIVE, REFUTED) and gain["criterion"] == "≥ 0 (t interval)"
    assert gain["interval"] == pytest.approx([-1.743, 0.0384], abs=1e-3) and plain["interval"][1] < 0
