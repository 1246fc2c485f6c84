"""Damaged, hostile and interrupted files: an error in bounded time, never a wrong tensor, never half a file; and the promise about memory."""
import json, os, signal, struct, subprocess, sys, textwrap

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import save_file

from iclr26.ecf8 import container
from iclr26.ecf8.codec import ECF8FormatError, ECF8IntegrityError
from iclr26.ecf8.container import compress_file, decompress_file, inspect_file, load_file, open_lazy, read_header

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(120)

def fp8(*shape, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)

def raw(t): return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

@pytest.fixture(scope="module")
def small(tmp_path_factory):
    "A compressed file with a coded and a raw blob, and the tensors in it."
    folder = tmp_path_factory.mktemp("small")
    noise = torch.randint(0, 256, (64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)).view(torch.float8_e4m3fn)
    tensors = {"w": fp8(23, 61), "noise": noise}
    save_file(tensors, folder / "s.safetensors", metadata={"format": "pt"})
    report = compress_file(folder / "s.safetensors", folder / "c.safetensors", min_numel=0)
    assert sorted(t.method for t in report.tensors) == ["huffman", "raw"]
    return (folder / "c.safetensors").read_bytes(), tensors

def everything_fails(path, error=ECF8FormatError):
    for read in (load_file, inspect_file, open_lazy, read_header):
        with pytest.raises(error): read(path)
    for convert in (compress_file, decompress_file):
        with pytest.raises(error): convert(path, path.parent / "out.safetensors")
    assert not (path.parent / "out.safetensors").exists() and not list(path.parent.glob(".*"))

def write(path, head, data=b""):
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path

# damage

def test_every_truncation(small, tmp_path):
    data, _ = small
    path = tmp_path / "t.safetensors"
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        with pytest.raises(ECF8FormatError): load_file(path)
    everything_fails(path)

def test_appended_bytes(small, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(small[0] + b"\0")
    everything_fails(tmp_path / "a.safetensors")

def test_single_bit_flips_are_noticed_or_harmless(small, tmp_path):
    """Every byte of the file, a different bit in each: an error, or exactly the right tensors (the flip hit the recorded entropy, or a field that only coded blobs use)."""
    data, tensors = small
    path, noticed = tmp_path / "f.safetensors", 0
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at * 5 % 8)
        path.write_bytes(flipped)
        try: found = load_file(path)
        except ECF8FormatError: noticed += 1
        else: assert found.keys() == tensors.keys() and all(raw(found[k]) == raw(tensors[k]) and found[k].shape == tensors[k].shape for k in tensors)
    assert noticed > 0.9 * len(data)

def test_every_bit_of_a_blob(small, tmp_path):
    """Of the raw blob, which is shortest. Fields that only matter for coded data may change."""
    data, tensors = small
    (tmp_path / "o.safetensors").write_bytes(data)
    entry = read_header(tmp_path / "o.safetensors").entries["noise"]
    for bit in range(8 * entry.start, 8 * entry.stop):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / "b.safetensors").write_bytes(flipped)
        try:
            with open_lazy(tmp_path / "b.safetensors") as f: found = f.get_tensor("noise")
        except ECF8FormatError: continue
        assert bit // 8 - entry.start < 36 and raw(found) == raw(tensors["noise"])

def test_lost_metadata(small, tmp_path):
    """A file whose blobs are not listed is refused, not read as bytes."""
    data, _ = small
    (tmp_path / "l.safetensors").write_bytes(data.replace(b'"ecf8":', b'"ecg8":', 1))
    everything_fails(tmp_path / "l.safetensors")

def test_wrong_content_is_an_integrity_error(small, tmp_path):
    """Well-formed, but not what was compressed: a flipped sign."""
    data, _ = small
    (tmp_path / "o.safetensors").write_bytes(data)
    entry = read_header(tmp_path / "o.safetensors").entries["noise"]
    flipped = bytearray(data)
    flipped[entry.start + 100] ^= 128
    (tmp_path / "i.safetensors").write_bytes(flipped)
    with pytest.raises(ECF8IntegrityError, match="noise"): load_file(tmp_path / "i.safetensors")
    with pytest.raises(ECF8IntegrityError, match="noise"): decompress_file(tmp_path / "i.safetensors", tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()

def test_swapped_blobs(tmp_path):
    """Two tensors of equal size and shape whose blobs changed places cannot be noticed by checksum alone, but blobs of other sizes are."""
    save_file({"a": fp8(64, 64), "b": fp8(80, 80, seed=1)}, tmp_path / "s.safetensors")
    compress_file(tmp_path / "s.safetensors", tmp_path / "c.safetensors", min_numel=0)
    header = read_header(tmp_path / "c.safetensors")
    data = (tmp_path / "c.safetensors").read_bytes()
    text = json.loads(data[8:8 + struct.unpack("<Q", data[:8])[0]])
    text["a"], text["b"] = text["b"], text["a"]
    write(tmp_path / "x.safetensors", text, data[min(e.start for e in header.entries.values()):])
    with pytest.raises(ECF8FormatError): load_file(tmp_path / "x.safetensors")

# hostile headers

T = lambda dtype="U8", shape=(4,), offsets=(0, 4): {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}
PLAIN = {"overlap": ({"a": T(), "b": T(offsets=(2, 6))}, 6), "same bytes": ({"a": T(), "b": T()}, 4), "hole": ({"a": T(), "b": T(offsets=(5, 9))}, 9),
         "trailing": ({"a": T()}, 9), "short": ({"a": T()}, 3), "backwards": ({"a": T(offsets=(4, 0))}, 4), "negative shape": ({"a": T(shape=(-4,))}, 4),
         "negative offset": ({"a": T(offsets=(-4, 0))}, 4), "float shape": ({"a": T(shape=(4.0,))}, 4), "huge shape": ({"a": T(shape=(2**62, 2**62))}, 4),
         "wrapped shape": ({"a": T(shape=(2**32, 2**32, 4))}, 4), "huge offset": ({"a": T(offsets=(0, 2**64))}, 4), "wrong size": ({"a": T(shape=(5,))}, 4),
         "unknown type": ({"a": T("F9")}, 4), "no type": ({"a": {"shape": [4], "data_offsets": [0, 4]}}, 4), "list": ([], 0), "number": (7, 0), "null tensor": ({"a": None}, 0),
         "metadata number": ({"__metadata__": {"a": 1}}, 0), "metadata list": ({"__metadata__": []}, 0), "three offsets": ({"a": T(offsets=(0, 4, 8))}, 4)}

@pytest.mark.parametrize("name", PLAIN)
def test_hostile_headers(tmp_path, name):
    head, size = PLAIN[name]
    everything_fails(write(tmp_path / "h.safetensors", head, bytes(size)))

BYTES = {"empty": b"", "three bytes": b"abc", "length only": struct.pack("<Q", 0), "huge length": struct.pack("<Q", 2**64 - 1) + b"{}", "100 MB claimed": struct.pack("<Q", 100_000_000) + b"{}",
         "not JSON": struct.pack("<Q", 5) + b"hello", "not UTF-8": struct.pack("<Q", 7) + b'{"\xff":1', "deep list": struct.pack("<Q", 200_000) + b"[" * 200_000,
         "deep object": struct.pack("<Q", 500_000) + b'{"a":' * 100_000, "duplicate tensor": None, "duplicate metadata": None}
one = json.dumps(T()).encode()
BYTES["duplicate tensor"] = struct.pack("<Q", 2 * len(one) + 11) + b'{"a":' + one + b',"a":' + one + b"}" + bytes(4)
twice = b'{"__metadata__":{"k":"v","k":"w"},"a":' + one + b"}"
BYTES["duplicate metadata"] = struct.pack("<Q", len(twice)) + twice + bytes(4)

@pytest.mark.parametrize("name", BYTES)
def test_hostile_bytes(tmp_path, name):
    (tmp_path / "h.safetensors").write_bytes(BYTES[name])
    everything_fails(tmp_path / "h.safetensors")

def test_json_bomb_in_the_header(tmp_path):
    everything_fails(write(tmp_path / "h.safetensors", b'{"a":[' + b"[]," * 1_000_000 + b"[]]}"))

def packed(tensors, version=1, **more): return {"__metadata__": {"ecf8": json.dumps({"version": version, "tensors": tensors, **more})}, "a": T()}
INFO = {"dtype": "F8_E4M3", "shape": [4]}
META = {"not JSON": {"__metadata__": {"ecf8": "{"}, "a": T()}, "list": {"__metadata__": {"ecf8": "[]"}, "a": T()}, "deep": {"__metadata__": {"ecf8": "[" * 1500}, "a": T()},
        "bomb": {"__metadata__": {"ecf8": '{"version":1,"tensors":{"a":[' + "[]," * 300_000 + "[]]}}"}, "a": T()}, "version 2": packed({"a": INFO}, 2), "version text": packed({"a": INFO}, "1"),
        "no tensors": {"__metadata__": {"ecf8": '{"version":1}'}, "a": T()}, "tensors list": packed([["a"]]), "missing tensor": packed({"b": INFO}), "info list": packed({"a": []}),
        "other type": packed({"a": INFO | {"dtype": "BF16"}}), "negative shape": packed({"a": INFO | {"shape": [-1, -4]}}), "float shape": packed({"a": INFO | {"shape": [4.0]}}),
        "bool shape": packed({"a": INFO | {"shape": [True]}}), "huge shape": packed({"a": INFO | {"shape": [2**40]}}), "many dimensions": packed({"a": INFO | {"shape": [1] * 100}}),
        "no shape": packed({"a": {"dtype": "F8_E4M3"}}), "entropy text": packed({"a": INFO | {"exponent_entropy": "x"}}), "entropy NaN": packed({"a": INFO | {"exponent_entropy": float("nan")}}),
        "entropy huge": packed({"a": INFO | {"exponent_entropy": 99}}), "duplicate": {"__metadata__": {"ecf8": '{"version":1,"version":1,"tensors":{}}'}, "a": T()},
        "not a vector": packed({"a": INFO}) | {"a": T(shape=(2, 2))}, "not U8": packed({"a": INFO}) | {"a": T("I8")}}

@pytest.mark.parametrize("name", META)
def test_hostile_metadata(tmp_path, name):
    path = write(tmp_path / "m.safetensors", META[name], bytes(4))
    for read in (load_file, inspect_file, open_lazy):
        with pytest.raises(ECF8FormatError): read(path)
    with pytest.raises(ECF8FormatError): decompress_file(path, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()

def test_a_blob_that_is_none(tmp_path):
    path = write(tmp_path / "m.safetensors", packed({"a": INFO}), b"\1\2\3\4")
    for read in (load_file, inspect_file):
        with pytest.raises(ECF8FormatError, match="a"): read(path)
    with pytest.raises(ECF8FormatError): decompress_file(path, tmp_path / "out.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]

def test_shapes_that_no_tensor_has(tmp_path):
    """Valid safetensors, but torch refuses."""
    path = write(tmp_path / "m.safetensors", {"a": T(shape=(2**63, 0), offsets=(0, 0))})
    with pytest.raises(ECF8FormatError, match="shape"): load_file(path)

@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_random_files(tmp_path, data):
    (tmp_path / "r.safetensors").write_bytes(data)
    everything_fails(tmp_path / "r.safetensors")

@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_damage(small, tmp_path, data):
    """Several bytes replaced, pieces cut out or doubled: an error, or the right tensors."""
    original, tensors = small
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        at, n = data.draw(st.integers(0, len(damaged) - 1)), data.draw(st.integers(0, 40))
        damaged[at:at + n] = data.draw(st.one_of(st.binary(max_size=40), st.just(bytes(damaged[at:at + n]) * 2), st.just(bytes(n))))
    (tmp_path / "d.safetensors").write_bytes(damaged)
    try: found = load_file(tmp_path / "d.safetensors")
    except ECF8FormatError: return
    assert all(raw(found[k]) == raw(tensors[k]) for k in tensors if k in found and read_header(tmp_path / "d.safetensors").packed)

# interruption

def run(code, *arguments):
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], stdout=subprocess.PIPE, text=True,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})

def test_killed_while_compressing(tmp_path):
    """SIGKILL in the middle leaves no destination, an unharmed source, and nothing in the way of a second try."""
    tensors = {f"w{i}": fp8(100, 100, seed=i) for i in range(4)}
    save_file(tensors, tmp_path / "s.safetensors")
    before = (tmp_path / "s.safetensors").read_bytes()
    child = run("""
        import sys, time
        from iclr26.ecf8 import container
        encode, seen = container.encode, []
        def slow(*a, **k):
            seen.append(1)
            if len(seen) == 3:
                print("now", flush=True)
                time.sleep(100)
            return encode(*a, **k)
        container.encode = slow
        container.compress_file(sys.argv[1], sys.argv[2])
        """, tmp_path / "s.safetensors", tmp_path / "c.safetensors")
    assert child.stdout.readline() == "now\n"
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    assert not (tmp_path / "c.safetensors").exists() and (tmp_path / "s.safetensors").read_bytes() == before
    compress_file(tmp_path / "s.safetensors", tmp_path / "c.safetensors")
    assert all(raw(t) == raw(tensors[k]) for k, t in load_file(tmp_path / "c.safetensors").items())

@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_errors_at_the_last_moment(tmp_path, monkeypatch, failing, error):
    save_file({"w": fp8(100, 100)}, tmp_path / "s.safetensors")
    (tmp_path / "c.safetensors").write_bytes(b"old")
    def fail(*a): raise error
    monkeypatch.setattr(container.os, failing, fail)
    with pytest.raises(type(error)): compress_file(tmp_path / "s.safetensors", tmp_path / "c.safetensors")
    assert (tmp_path / "c.safetensors").read_bytes() == b"old" and sorted(p.name for p in tmp_path.iterdir()) == ["c.safetensors", "s.safetensors"]

def test_a_wrong_encoder_is_caught_before_the_file_gets_its_name(tmp_path, monkeypatch):
    save_file({"w": fp8(100, 100)}, tmp_path / "s.safetensors")
    encode = container.encode
    def wrong(x, **options):
        t = encode(x, **options)
        t.sign_mantissa[7] ^= 1
        return t
    monkeypatch.setattr(container, "encode", wrong)
    with pytest.raises(ECF8IntegrityError): compress_file(tmp_path / "s.safetensors", tmp_path / "c.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["s.safetensors"]

def test_source_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    save_file({"w": fp8(100, 100), "v": fp8(100, 100)}, tmp_path / "s.safetensors")
    encode = container.encode
    def cut(x, **options):
        os.truncate(tmp_path / "s.safetensors", 5000)
        return encode(x, **options)
    monkeypatch.setattr(container, "encode", cut)
    with pytest.raises(ECF8FormatError, match="changed"): compress_file(tmp_path / "s.safetensors", tmp_path / "c.safetensors")
    assert not (tmp_path / "c.safetensors").exists()

# memory

PEAK = """
    import sys, torch
    from iclr26.ecf8.container import compress_file, decompress_file, inspect_file, open_lazy
    torch.set_num_threads(1)
    folder, small = sys.argv[1], sys.argv[2]
    def work(src, tag):
        compress_file(src, f"{folder}/{tag}.c", gaps=False)
        yield
        decompress_file(f"{folder}/{tag}.c", f"{folder}/{tag}.d")
        yield
        inspect_file(src)
        with open_lazy(f"{folder}/{tag}.c") as f:
            for name in f.keys(): f.get_tensor(name)
        yield
    memory = lambda what: next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(what))
    for _ in work(small, "small"): pass
    open("/proc/self/clear_refs", "w").write("5")    # forget the peak of imports and compilation
    base = memory("VmRSS")
    print([memory("VmHWM") - base for _ in work(f"{folder}/s", "big")])
    """

@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("tensors, side", [(280, 1024), (2, 6000)])
def test_peak_memory(tmp_path, tensors, side):
    """At most three times the largest tensor plus 100 MB, for a file of any size: 290 MB of small tensors, and two of 36 MB."""
    w = fp8(side, side)
    body = raw(w)
    head = {f"w{i}": {"dtype": "F8_E4M3", "shape": [side, side], "data_offsets": [i * len(body), (i + 1) * len(body)]} for i in range(tensors)}
    write(tmp_path / "s", head)
    with open(tmp_path / "s", "ab") as f:
        for _ in range(tensors): f.write(body)
    save_file({"w": fp8(100, 100)}, tmp_path / "small")
    child = run(PEAK, tmp_path, tmp_path / "small")
    out = child.communicate()[0]
    assert child.returncode == 0
    assert max(json.loads(out)) <= 3 * side * side + 100e6, out
    assert (tmp_path / "big.d").stat().st_size == pytest.approx((tmp_path / "s").stat().st_size, rel=1e-4)
    assert (tmp_path / "big.c").stat().st_size < 0.9 * (tmp_path / "s").stat().st_size
