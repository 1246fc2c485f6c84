"""Whole files: round trips against the safetensors library, choices, folders, arguments."""
import json, os, struct, subprocess, sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file as plain_load, save_file

from iclr26.ecf8.codec import ECF8FormatError, ECF8Tensor, decode, exponent_entropy
from iclr26.ecf8.container import (Report, TensorReport, compress_file, decompress_file, header_bytes, inspect_file, load_compressed, load_file, open_lazy,
                                   read_header)

torch.set_num_threads(1)

def fp8(*shape, seed=0, std=60.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std).clamp(-448, 448).to(torch.float8_e4m3fn)

def raw(t): return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, name
        assert raw(a[name]) == raw(b[name]), name
    return True

@pytest.fixture
def tensors():
    every_byte = torch.arange(256, dtype=torch.uint8).repeat(20).view(torch.float8_e4m3fn)
    return {"a.weight": fp8(96, 128), "b.weight": fp8(5001, seed=1, std=0.02), "all_bytes": every_byte, "constant": torch.zeros(4099, dtype=torch.uint8).view(torch.float8_e4m3fn),
            "random": torch.randint(0, 256, (5000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)).view(torch.float8_e4m3fn),
            "tiny": fp8(3, 3), "scale": torch.rand(7), "norm": torch.ones(5, dtype=torch.bfloat16), "ids": torch.arange(9), "mask": torch.tensor([True, False, True]),
            "e5m2": torch.ones(5000).to(torch.float8_e5m2), "empty": torch.zeros(0, 4), "empty8": fp8(0, 3), "scalar": torch.tensor(3.0)}

@pytest.fixture
def source(tmp_path, tensors):
    save_file(tensors, tmp_path / "src.safetensors", metadata={"format": "pt", "naïve \"key\"": "välue\n☃", "zzz": "{}"})
    return tmp_path / "src.safetensors"

def test_round_trip_is_byte_identical(source, tmp_path, tensors):
    report = compress_file(source, tmp_path / "c.safetensors")
    assert isinstance(report, Report) and report.bytes_in == source.stat().st_size and report.bytes_out == (tmp_path / "c.safetensors").stat().st_size < report.bytes_in
    back = decompress_file(tmp_path / "c.safetensors", tmp_path / "d.safetensors")
    assert (tmp_path / "d.safetensors").read_bytes() == source.read_bytes()
    assert back.converted == report.converted == 5
    assert same(plain_load(tmp_path / "d.safetensors"), tensors)

def test_compressed_file_is_a_valid_safetensors_file(source, tmp_path, tensors):
    compress_file(source, tmp_path / "c.safetensors")
    stored = plain_load(tmp_path / "c.safetensors")
    assert stored.keys() == tensors.keys()
    with safe_open(str(tmp_path / "c.safetensors"), "pt") as f: metadata = f.metadata()
    ecf8 = json.loads(metadata.pop("ecf8"))
    assert metadata == {"format": "pt", "naïve \"key\"": "välue\n☃", "zzz": "{}"}
    assert ecf8["version"] == 1 and set(ecf8["tensors"]) == {"a.weight", "b.weight", "all_bytes", "constant", "random"}
    for name, t in stored.items():
        if name not in ecf8["tensors"]:
            assert raw(t) == raw(tensors[name]) and t.dtype == tensors[name].dtype
            continue
        assert t.dtype == torch.uint8 and t.ndim == 1
        assert ecf8["tensors"][name]["dtype"] == "F8_E4M3" and ecf8["tensors"][name]["shape"] == list(tensors[name].shape)
        assert raw(decode(ECF8Tensor.from_bytes(t.numpy().tobytes(), tensors[name].shape))) == raw(tensors[name])

def test_wide_types_stay_aligned(tmp_path):
    """Also when the source is not ordered by width."""
    w, f = fp8(4097), torch.rand(3)
    body = raw(w) + raw(f)
    head = {"w": {"dtype": "F8_E4M3", "shape": [4097], "data_offsets": [0, 4097]}, "f": {"dtype": "F32", "shape": [3], "data_offsets": [4097, 4109]}}
    text = json.dumps(head).encode()
    (tmp_path / "s.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    compress_file(tmp_path / "s.safetensors", tmp_path / "c.safetensors")
    assert read_header(tmp_path / "c.safetensors").entries["f"].start % 8 == 0
    assert same(load_file(tmp_path / "c.safetensors"), {"f": f, "w": w})
    decompress_file(tmp_path / "c.safetensors", tmp_path / "d.safetensors")
    assert same(plain_load(tmp_path / "d.safetensors"), {"f": f, "w": w})

def test_load_file_and_lazy_agree_with_safetensors(source, tmp_path, tensors):
    compress_file(source, tmp_path / "c.safetensors")
    for path in (source, tmp_path / "c.safetensors"):
        assert same(load_file(path), tensors)
        with open_lazy(path) as f:
            assert set(f.keys()) == set(tensors)
            assert same({name: f.get_tensor(name) for name in tensors}, tensors)
            with pytest.raises(KeyError): f.get_tensor("nope")
    assert f.metadata()["format"] == "pt"

def test_load_compressed(source, tmp_path, tensors):
    compress_file(source, tmp_path / "c.safetensors")
    blobs = load_compressed(tmp_path / "c.safetensors")
    assert set(blobs) == {"a.weight", "b.weight", "all_bytes", "constant", "random"}
    assert blobs["random"].raw and not blobs["a.weight"].raw and blobs["a.weight"].shape == (96, 128)
    assert load_compressed(source) == {}

def test_rare_types(tmp_path):
    t = {"c": torch.zeros(3, dtype=torch.complex64), "u": torch.tensor([1, 2, 65535], dtype=torch.uint16), "e8": torch.ones(4).to(torch.float8_e8m0fnu)}
    save_file(t, tmp_path / "r.safetensors")
    assert same(load_file(tmp_path / "r.safetensors"), t)

def test_reports(source, tmp_path, tensors):
    report = compress_file(source, tmp_path / "c.safetensors")
    by_name = {t.name: t for t in report.tensors}
    assert by_name.keys() == tensors.keys()
    assert by_name["random"].method == "raw" and by_name["a.weight"].method == "huffman" and {by_name[n].method for n in ("tiny", "e5m2", "scale", "empty8")} == {"untouched"}
    a = by_name["a.weight"]
    assert isinstance(a, TensorReport) and a.shape == (96, 128) and a.dtype == "F8_E4M3"
    assert a.exponent_entropy == pytest.approx(exponent_entropy(tensors["a.weight"]), abs=1e-6)
    assert a.bits_per_weight == pytest.approx(load_compressed(tmp_path / "c.safetensors")["a.weight"].bits_per_weight)
    assert by_name["scale"].bits_per_weight == 32 and by_name["scale"].exponent_entropy is None
    assert by_name["tiny"].exponent_entropy == pytest.approx(exponent_entropy(tensors["tiny"]))

def test_inspect_plain_and_compressed(source, tmp_path, tensors):
    report = compress_file(source, tmp_path / "c.safetensors")
    compressed = {t.name: t for t in inspect_file(tmp_path / "c.safetensors")}
    assert compressed == {t.name: t for t in report.tensors}
    plain = {t.name: t for t in inspect_file(source)}
    assert {t.method for t in plain.values()} == {"untouched"} and plain["a.weight"].bits_per_weight == 8
    assert plain["b.weight"].exponent_entropy == pytest.approx(exponent_entropy(tensors["b.weight"]))

def test_inspect_does_not_decode(source, tmp_path):
    """Zeroing the coded data goes unnoticed by inspection, and only by it."""
    compress_file(source, tmp_path / "c.safetensors")
    data = bytearray((tmp_path / "c.safetensors").read_bytes())
    entry = read_header(tmp_path / "c.safetensors").entries["a.weight"]
    data[entry.start + 200:entry.stop] = bytes(entry.nbytes - 200)
    (tmp_path / "z.safetensors").write_bytes(data)
    assert inspect_file(tmp_path / "z.safetensors") == inspect_file(tmp_path / "c.safetensors")
    with pytest.raises(ECF8FormatError, match="a.weight"): load_file(tmp_path / "z.safetensors")

@pytest.mark.parametrize("options, expected", [
    (dict(include="weight"), {"a.weight", "b.weight"}), (dict(exclude="weight|random"), {"all_bytes", "constant"}), (dict(include="^a", exclude="bytes"), {"a.weight"}),
    (dict(min_numel=0), {"a.weight", "b.weight", "all_bytes", "constant", "random", "tiny"}), (dict(min_numel=6000), {"a.weight"}), (dict(include="^$"), set())])
def test_choices(source, tmp_path, tensors, options, expected):
    report = compress_file(source, tmp_path / "c.safetensors", **options)
    assert {t.name for t in report.tensors if t.method != "untouched"} == expected and report.converted == len(expected)
    assert same(load_file(tmp_path / "c.safetensors"), tensors)

def test_gaps_and_max_len_reach_the_codec(source, tmp_path, tensors):
    compress_file(source, tmp_path / "g.safetensors", gaps=True, max_len=6)
    blobs = load_compressed(tmp_path / "g.safetensors")
    assert blobs["a.weight"].gaps is not None and blobs["a.weight"].lengths.max() <= 6
    compress_file(source, tmp_path / "n.safetensors")
    assert load_compressed(tmp_path / "n.safetensors")["a.weight"].gaps is None
    assert same(load_file(tmp_path / "g.safetensors"), tensors)

def test_without_fp8_the_result_is_a_copy(tmp_path):
    save_file({"x": torch.rand(100, 100)}, tmp_path / "s.safetensors")
    report = compress_file(tmp_path / "s.safetensors", tmp_path / "c.safetensors")
    assert report.converted == 0 and report.saving == 0 and (tmp_path / "c.safetensors").read_bytes() == (tmp_path / "s.safetensors").read_bytes()
    assert decompress_file(tmp_path / "s.safetensors", tmp_path / "d.safetensors").converted == 0
    assert (tmp_path / "d.safetensors").read_bytes() == (tmp_path / "s.safetensors").read_bytes()

def test_empty_file_and_no_metadata(tmp_path):
    save_file({}, tmp_path / "e.safetensors")
    assert compress_file(tmp_path / "e.safetensors", tmp_path / "c.safetensors").tensors == [] and load_file(tmp_path / "c.safetensors") == {}
    save_file({"w": fp8(5000)}, tmp_path / "n.safetensors")
    compress_file(tmp_path / "n.safetensors", tmp_path / "nc.safetensors")
    decompress_file(tmp_path / "nc.safetensors", tmp_path / "nd.safetensors")
    assert (tmp_path / "nd.safetensors").read_bytes() == (tmp_path / "n.safetensors").read_bytes()

def test_compressing_twice_is_refused(source, tmp_path):
    compress_file(source, tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match="src=.*already"): compress_file(tmp_path / "c.safetensors", tmp_path / "cc.safetensors")
    assert not (tmp_path / "cc.safetensors").exists()

names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=12).filter(lambda s: s != "__metadata__")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(names, st.tuples(st.integers(0, 300), st.sampled_from(["fp8", "u8", "f32", "bf16"])), max_size=8),
       st.dictionaries(names.filter(lambda s: s != "ecf8"), st.text(st.characters(codec="utf-8"), max_size=20), min_size=1, max_size=4), st.integers(0, 200))
def test_round_trip_of_any_file(tmp_path, sizes, metadata, min_numel):
    make = {"fp8": lambda n: fp8(n, seed=n), "u8": lambda n: torch.arange(n).to(torch.uint8), "f32": torch.rand, "bf16": lambda n: torch.rand(n).bfloat16()}
    tensors = {name: make[kind](n) for name, (n, kind) in sizes.items()}
    src, c, d = (tmp_path / f"{x}.safetensors" for x in "scd")
    save_file(tensors, src, metadata=metadata)
    compress_file(src, c, min_numel=min_numel)
    assert same(load_file(c), tensors)
    decompress_file(c, d)
    assert d.read_bytes() == src.read_bytes()

def test_header_bytes():
    exact = header_bytes([("a", "F32", (2,), 8)], None)
    assert len(exact) % 8 == 0 and struct.unpack("<Q", exact[:8])[0] == len(exact) - 8
    padded = header_bytes([("a", "F32", (2,), 8)], None, 200)
    assert len(padded) == 200 and json.loads(padded[8:]) == json.loads(exact[8:])
    with pytest.raises(ValueError, match="room=16"): header_bytes([("a", "F32", (2,), 8)], None, 16)

# folders

@pytest.fixture
def folder(tmp_path):
    f = tmp_path / "model"
    f.mkdir()
    one, two = {"a": fp8(80, 80), "s": torch.rand(3)}, {"b": fp8(90, 90, seed=3)}
    save_file(one, f / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    save_file(two, f / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": {"a": "model-00001-of-00002.safetensors", "s": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (f / "model.safetensors.index.json").write_text(json.dumps(index, indent=3))
    (f / "config.json").write_text("{}")
    (f / "sub").mkdir()
    return f

def test_folder_round_trip(folder, tmp_path):
    report = compress_file(folder, tmp_path / "small")
    assert report.converted == 2 and len(report.tensors) == 3 and report.skipped == ["sub"] and 0 < report.saving < 1
    assert sorted(p.name for p in (tmp_path / "small").iterdir()) == sorted(p.name for p in folder.iterdir() if p.name != "sub")
    for name in ("model.safetensors.index.json", "config.json"): assert (tmp_path / "small" / name).read_bytes() == (folder / name).read_bytes()
    assert same(load_file(tmp_path / "small"), load_file(folder)) and set(load_compressed(tmp_path / "small")) == {"a", "b"}
    assert len(inspect_file(tmp_path / "small")) == 3
    decompress_file(tmp_path / "small", tmp_path / "back")
    for p in folder.glob("*.safetensors"): assert (tmp_path / "back" / p.name).read_bytes() == p.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "model", "small"]

def test_folder_of_symbolic_links(folder, tmp_path):
    """As in the cache of model hubs."""
    (tmp_path / "links").mkdir()
    for p in folder.glob("*.*"): (tmp_path / "links" / p.name).symlink_to(p)
    compress_file(tmp_path / "links", tmp_path / "small")
    assert not any(p.is_symlink() for p in (tmp_path / "small").iterdir()) and same(load_file(tmp_path / "small"), load_file(folder))

@pytest.mark.parametrize("target, error", [("../outside.safetensors", ECF8FormatError), (7, ECF8FormatError), ("gone.safetensors", FileNotFoundError),
                                           ("model-00002-of-00002.safetensors", ECF8FormatError)])
def test_bad_index(folder, tmp_path, target, error):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["a"] = target
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(error): compress_file(folder, tmp_path / "small")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]

@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": 3}', "[" * 100_000, '{"weight_map": {' + '"x": "y",' * 300_000, "\xff"])
def test_garbled_index(folder, tmp_path, text):
    (folder / "model.safetensors.index.json").write_text(text, "latin-1")
    with pytest.raises(ECF8FormatError): compress_file(folder, tmp_path / "small")

def test_broken_shard_leaves_no_folder(folder, tmp_path):
    compress_file(folder, tmp_path / "small")
    shard = tmp_path / "small" / "model-00002-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-100] ^= 4
    shard.write_bytes(data)
    with pytest.raises(ECF8FormatError, match="00002"): decompress_file(tmp_path / "small", tmp_path / "back")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "small"]

def test_folder_arguments(folder, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    with pytest.raises(FileExistsError): compress_file(folder, tmp_path / "full")
    with pytest.raises(ValueError, match="inside src"): compress_file(folder, folder / "out")
    with pytest.raises(ValueError, match="same"): compress_file(folder, folder)
    (tmp_path / "hollow").mkdir()
    with pytest.raises(FileNotFoundError, match="no safetensors"): compress_file(tmp_path / "hollow", tmp_path / "out")
    compress_file(folder, tmp_path / "hollow")
    assert (tmp_path / "hollow" / "config.json").exists() and (tmp_path / "full" / "precious").read_text() == "x"

# arguments

@pytest.mark.parametrize("options, name", [(dict(include="("), "include"), (dict(exclude="[a"), "exclude"), (dict(min_numel=-1), "min_numel"), (dict(min_numel=1.5), "min_numel"),
                                           (dict(max_len=17), "max_len"), (dict(max_len=0), "max_len"), (dict(max_len=True), "max_len")])
def test_bad_arguments_are_named(source, tmp_path, options, name):
    with pytest.raises(ValueError, match=name): compress_file(source, tmp_path / "c.safetensors", **options)
    assert not (tmp_path / "c.safetensors").exists()

def test_include_must_be_a_string(source, tmp_path):
    with pytest.raises(TypeError, match="include"): compress_file(source, tmp_path / "c.safetensors", include=["a"])

@pytest.mark.parametrize("convert", [compress_file, decompress_file])
def test_source_is_never_overwritten(source, tmp_path, convert):
    before = source.read_bytes()
    (tmp_path / "sym.safetensors").symlink_to(source)
    os.link(source, tmp_path / "hard.safetensors")
    for dst in (source, tmp_path / "sym.safetensors", tmp_path / "hard.safetensors", tmp_path / "." / "src.safetensors"):
        with pytest.raises(ValueError, match="dst"): convert(source, dst)
        with pytest.raises(ValueError, match="dst"): convert(dst, source)
    assert source.read_bytes() == before

@pytest.mark.parametrize("convert", [compress_file, decompress_file])
def test_missing_and_strange_paths(source, tmp_path, convert):
    with pytest.raises(FileNotFoundError, match="src"): convert(tmp_path / "gone.safetensors", tmp_path / "c.safetensors")
    with pytest.raises(FileNotFoundError, match="dst"): convert(source, tmp_path / "no" / "c.safetensors")
    with pytest.raises(ValueError, match="dst"): convert(source, tmp_path)
    with pytest.raises(ValueError, match="regular"): convert("/dev/zero", tmp_path / "c.safetensors")
    for read in (load_file, open_lazy, inspect_file):
        with pytest.raises(FileNotFoundError): read(tmp_path / "gone.safetensors")

def test_existing_destination_is_replaced_and_keeps_nothing(source, tmp_path, tensors):
    (tmp_path / "c.safetensors").write_bytes(b"old")
    source.chmod(0o640)
    compress_file(source, tmp_path / "c.safetensors")
    assert same(load_file(tmp_path / "c.safetensors"), tensors) and (tmp_path / "c.safetensors").stat().st_mode & 0o777 == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.safetensors", "src.safetensors"]

def test_failure_keeps_the_old_destination(source, tmp_path):
    compress_file(source, tmp_path / "c.safetensors")
    data = bytearray((tmp_path / "c.safetensors").read_bytes())
    data[read_header(tmp_path / "c.safetensors").entries["random"].stop - 100] ^= 1
    (tmp_path / "c.safetensors").write_bytes(data)
    (tmp_path / "d.safetensors").write_bytes(b"old")
    with pytest.raises(ECF8FormatError, match="random"): decompress_file(tmp_path / "c.safetensors", tmp_path / "d.safetensors")
    assert (tmp_path / "d.safetensors").read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.safetensors", "d.safetensors", "src.safetensors"]

def test_progress_goes_to_the_error_stream(source, tmp_path, capsys):
    compress_file(source, tmp_path / "c.safetensors", progress=True)
    assert capsys.readouterr().out == "" and (tmp_path / "c.safetensors").exists()
