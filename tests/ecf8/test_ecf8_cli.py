"""The command line: output, exit codes, and that bad input changes nothing."""
import json, os, re, subprocess, sys

import pytest
import torch
from safetensors.torch import load_file as plain_load, save_file
from typer.testing import CliRunner

from iclr26.ecf8 import cli
from iclr26.ecf8.cli import app
from iclr26.ecf8.container import load_file, read_header
from iclr26.lab.extras import MissingExtra

torch.set_num_threads(1)

def fp8(*shape, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)

def raw(t): return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

@pytest.fixture
def src(tmp_path):
    noise = torch.randint(0, 256, (5000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)).view(torch.float8_e4m3fn)
    save_file({"block.0.weight": fp8(64, 96), "block.1.weight": fp8(80, 80, seed=1), "noise": noise, "norm": torch.ones(4)}, tmp_path / "s.safetensors", metadata={"format": "pt"})
    return tmp_path / "s.safetensors"

def call(*arguments): return CliRunner().invoke(app, [str(a) for a in arguments])

def test_compress_prints_one_line_a_tensor_and_a_total(src, tmp_path):
    r = call("compress", src, tmp_path / "c.safetensors")
    assert r.exit_code == 0, r.output
    lines = {line.split()[0]: line.split() for line in r.stdout.splitlines()}
    name, dtype, shape, entropy, before, after, method = lines["block.0.weight"]
    assert (dtype, shape, before, method) == ("F8_E4M3", "64×96", "8.000", "huffman") and 2 < float(entropy) < 3 and 6 < float(after) < 7.2
    assert lines["noise"][-1] == "raw" and lines["norm"][-4:] == ["–", "32.000", "32.000", "untouched"]
    assert "3 of 4 tensors compressed" in r.stdout and f"{src.stat().st_size:,} ->" in r.stdout

def test_round_trip(src, tmp_path):
    assert call("compress", src, tmp_path / "c.safetensors").exit_code == 0
    r = call("decompress", tmp_path / "c.safetensors", tmp_path / "d.safetensors")
    assert r.exit_code == 0 and "3 of 4 tensors decompressed" in r.stdout
    assert (tmp_path / "d.safetensors").read_bytes() == src.read_bytes()

def test_options(src, tmp_path):
    r = call("compress", src, tmp_path / "c.safetensors", "--include", "block", "--exclude", r"\.1\.", "--min-numel", 10, "--max-len", 8, "--gaps")
    assert r.exit_code == 0 and "1 of 4" in r.stdout
    assert set(read_header(tmp_path / "c.safetensors").packed) == {"block.0.weight"}

def test_inspect(src, tmp_path):
    call("compress", src, tmp_path / "c.safetensors")
    plain, compressed = call("inspect", src), call("inspect", tmp_path / "c.safetensors")
    assert plain.exit_code == compressed.exit_code == 0
    assert re.search(r"block\.0\.weight +F8_E4M3 +64×96 +2\.\d+ +8\.000 +untouched", plain.stdout) and "17,544 FP8 weights at 8.000 bits" in plain.stdout
    assert re.search(r"block\.0\.weight +F8_E4M3 +64×96 +2\.\d+ +6\.\d+ +huffman", compressed.stdout)

def test_nothing_to_do(tmp_path):
    save_file({"x": torch.rand(5)}, tmp_path / "x.safetensors")
    for command in ("compress", "decompress"):
        r = call(command, tmp_path / "x.safetensors", tmp_path / f"{command}.safetensors")
        assert r.exit_code == 0 and "nothing to do" in r.stdout
    assert "no FP8 weights" in call("inspect", tmp_path / "x.safetensors").stdout
    assert "nothing to do" in call("bench", tmp_path / "x.safetensors").stdout

def test_folder(tmp_path):
    (tmp_path / "m").mkdir()
    save_file({"a": fp8(70, 70)}, tmp_path / "m" / "one.safetensors")
    save_file({"b": fp8(70, 70)}, tmp_path / "m" / "two.safetensors")
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    (tmp_path / "m" / "onnx").mkdir()
    r = call("compress", tmp_path / "m", tmp_path / "c")
    assert r.exit_code == 0 and "2 of 2" in r.stdout and "onnx" in r.stderr
    assert "2.safetensors" not in r.stdout and load_file(tmp_path / "c").keys() == {"a", "b"}
    assert call("inspect", tmp_path / "c").stdout.count("huffman") == 2

def test_existing_destination_needs_force(src, tmp_path):
    (tmp_path / "c.safetensors").write_bytes(b"old")
    r = call("compress", src, tmp_path / "c.safetensors")
    assert r.exit_code == 1 and "--force" in r.stderr and (tmp_path / "c.safetensors").read_bytes() == b"old"
    assert call("compress", src, tmp_path / "c.safetensors", "--force").exit_code == 0
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    assert call("compress", tmp_path, tmp_path / "full", "--force").exit_code == 1 and (tmp_path / "full" / "x").exists()

@pytest.mark.parametrize("arguments", [("compress",), ("compress", "s.safetensors"), ("nonsense",), ("compress", "s.safetensors", "c", "--bogus"), ("compress", "s.safetensors", "c", "--max-len", "x"),
                                       ("compress", "s.safetensors", "c", "--max-len", "99"), ("compress", "s.safetensors", "c", "--include", "("), ("compress", "gone", "c"),
                                       ("compress", "s.safetensors", "no/c"), ("compress", "s.safetensors", "s.safetensors", "--force"), ("inspect", "gone"), ("decompress", "bad", "c"),
                                       ("inspect", "bad"), ("bench", "bad"), ("bench", "s.safetensors", "--repeats", "0"), ("inspect", ".")])
def test_bad_input_is_one(src, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad").write_bytes(b"not a safetensors file")
    r = call(*arguments)
    if arguments == ("inspect", "."): assert r.exit_code == 0
    else: assert r.exit_code == 1 and r.stderr and "Traceback" not in r.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad", "s.safetensors"]

def test_errors_are_one_line_that_names_the_culprit(src, tmp_path):
    r = call("compress", tmp_path / "gone.safetensors", tmp_path / "c.safetensors")
    assert r.stderr.count("\n") == 1 and r.stderr.startswith("error: ") and "gone.safetensors" in r.stderr
    assert "include='('" in call("compress", src, tmp_path / "c.safetensors", "--include", "(").stderr

def test_integrity_is_two(src, tmp_path):
    call("compress", src, tmp_path / "c.safetensors")
    data = bytearray((tmp_path / "c.safetensors").read_bytes())
    data[read_header(tmp_path / "c.safetensors").entries["noise"].start + 1000] ^= 1
    (tmp_path / "c.safetensors").write_bytes(data)
    r = call("decompress", tmp_path / "c.safetensors", tmp_path / "d.safetensors")
    assert r.exit_code == 2 and "noise" in r.stderr and not (tmp_path / "d.safetensors").exists()
    assert call("inspect", tmp_path / "c.safetensors").exit_code == 0

def test_help_says_what_the_commands_do():
    text = call("--help").stdout
    for command in ("compress", "decompress", "inspect", "bench"):
        assert command in text and len(call(command, "--help").stdout) > 300

def test_bench_compares_every_codec_at_hand(src, tmp_path):
    call("compress", src, tmp_path / "c.safetensors")
    plain, packed = (call("bench", p, "--repeats", 1) for p in (src, tmp_path / "c.safetensors"))
    assert plain.exit_code == packed.exit_code == 0, plain.output
    rows = {line.split("  ")[0].strip(): line for line in plain.stdout.splitlines()[2:]}
    assert set(rows) == set(cli.codecs()) >= {"ECF8", "memcpy"} and "8.000" in rows["memcpy"]
    assert "17,544 FP8 weights in 3 tensors" in plain.stdout
    assert plain.stdout.splitlines()[2].split()[:3] == packed.stdout.splitlines()[2].split()[:3]    # same bits per weight from a compressed source

def test_bench_without_optional_packages(src, monkeypatch):
    def missing(module, extra): raise MissingExtra(module)
    monkeypatch.setattr(cli, "require", missing)
    r = call("bench", src, "--limit-mb", 1, "--repeats", 1)
    assert r.exit_code == 0 and "zstd" not in r.stdout and "ECF8" in r.stdout and "memcpy" in r.stdout

def test_a_codec_that_lies_is_caught(src, monkeypatch):
    monkeypatch.setattr(cli, "codecs", lambda: {"liar": (len, lambda n: bytes(n), lambda n: 1)})
    r = call("bench", src)
    assert r.exit_code == 1 and "liar" in r.stderr

def test_as_a_program(src, tmp_path):
    code = "import sys; from iclr26.ecf8.cli import app; app(sys.argv[1:])"
    r = subprocess.run([sys.executable, "-c", code, "compress", src, tmp_path / "c.safetensors"], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert r.returncode == 0 and r.stderr == "" and "3 of 4 tensors compressed" in r.stdout
    assert {k: raw(v) for k, v in load_file(tmp_path / "c.safetensors").items()} == {k: raw(v) for k, v in plain_load(src).items()}
