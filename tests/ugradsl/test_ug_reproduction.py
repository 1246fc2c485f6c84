"""What the reproduction notebook defines for itself: equal grids, the reader and network for CIFAR."""
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

torch.set_num_threads(1)
NOTEBOOK = Path(__file__).parents[2] / "nbs/ugradsl/reproduction.ipynb"


@pytest.fixture(scope="module")
def defined():
    "Definitions of the notebook: imports, tasks, methods and grids, CIFAR; none of its experiments."
    cells = ["".join(c["source"]) for c in json.loads(NOTEBOOK.read_text(encoding="utf8"))["cells"] if c["cell_type"] == "code"]
    def cell(word): return next(c for c in cells if word in c)
    names = dict(grid_points=6, train_epochs=1, cifar_epochs=1, cifar_width=4, wide=True, TUNING=99)
    for word, end in (("import functools", "\x00"), ("class Task", "D = digits()"), ("def grid(", "for name in names: print"), ("class Augment", "if cifar:")): exec(cell(word).split(end)[0], names)
    return names


@pytest.mark.parametrize("points", [2, 4, 6])
def test_every_method_is_tuned_on_as_many_points(defined, points):
    grids = {name: defined["grid"](name, points) for name in defined["BASE"]}
    assert {math.prod(map(len, g.values())) for g in grids.values()} == {points}
    assert grids["GA"] == grids["UGradSL"] and grids["SalUn"]["lr"] == grids["UGradSL+"]["lr"]
    for name, g in grids.items(): defined["BASE"][name](**{k: v[0] for k, v in g.items()})


def test_choices_at_the_end_of_a_range_are_shown(defined, capsys):
    defined["show_ends"](random={"settings": {"FT": {"lr": .01}, "GA": {"lr": .02}, "SalUn": {"lr": .02, "keep": .5}}})
    assert capsys.readouterr().out == "random: at an end of the range: FT lr=0.01\n"


def test_augmentation_crops_and_flips_in_training_only(defined):
    torch.manual_seed(0)
    x, layer = torch.rand(30, 3, 32, 32), defined["Augment"](torch.full((3, 1, 1), .5), torch.full((3, 1, 1), 2.))
    assert torch.equal(layer.eval()(x), (x - .5) / 2)
    padded, out, seen = F.pad(x, (4, 4, 4, 4)), layer.train()(x), set()
    for i in range(30):
        found = [(a, b, flip) for a in range(9) for b in range(9) for flip in (False, True)
                 if torch.equal(((padded[i, :, a:a + 32, b:b + 32].flip(2) if flip else padded[i, :, a:a + 32, b:b + 32]) - .5) / 2, out[i])]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) > 20 and {flip for *_, flip in seen} == {True, False}


def test_resnet18_is_the_one_for_small_images(defined):
    net = defined["resnet18"](10, torch.nn.Identity(), 64)
    assert sum(p.numel() for p in net.parameters()) == 11_173_962 and net[:-3](torch.zeros(1, 3, 32, 32)).shape == (1, 512, 4, 4)


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_is_read_from_its_binary_version(defined, tmp_path, classes):
    rng = np.random.default_rng(0)
    def write(name, n):
        x, y = rng.integers(256, size=(n, 3072)), np.arange(n) % classes
        np.concatenate([*([y[:, None]] if classes == 10 else [y[:, None] // 5, y[:, None]]), x], 1).astype(np.uint8).tofile(tmp_path / name)
        return torch.tensor(x).reshape(n, 3, 32, 32) / 255, torch.tensor(y)
    parts = [write(f"data_batch_{i}.bin", 20) for i in range(1, 6)] + [write("test_batch.bin", 30)] if classes == 10 else [write("train.bin", 100), write("test.bin", 30)]
    task = defined["Cifar"](tmp_path)
    assert torch.allclose(task.X, torch.cat([x for x, _ in parts]).float()) and torch.equal(task.y, torch.cat([y for _, y in parts]))
    train, test, order = task.split(3)
    assert len(train) == 90 == len(set(order)) and max(order) < 100 and torch.equal(test.tensors[1], parts[-1][1])
    retain, forget, unseen, model, card = task.problem("class", 0)
    assert (train.tensors[0].shape[1:] == (3, 32, 32)) and model(train[:2][0]).shape == (2, classes) and 0 <= card.ra <= 100
    assert {int(y) for _, y in forget} == {3} and 3 not in unseen.tensors[1]
