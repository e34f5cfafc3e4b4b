"""Weights that PyTorch saved are read as PyTorch reads them, and hostile files are refused."""

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from sightline.export.import_errors import ImportFailedError
from sightline.export.options import BundleMetadata
from sightline.export.pipeline import Export, export_checkpoint
from sightline.export.sources.opened_checkpoint import Folder
from sightline.export.sources.pickle_file import PickleFile
from tests.export.hostile import write_checkpoint

METADATA = BundleMetadata("imported", "a test", "MIT")
FORMS = pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
REFUSED = r"weights\.bin: the pickle has more than tensors or is damaged, so it is not read \(.*{}.*\); convert it"


def random_weights(seed: int) -> dict[str, Any]:
    """Return tensors of all types and kinds of views, some of which share a storage."""
    torch.manual_seed(seed)
    weights: dict[str, Any] = OrderedDict()
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        sizes = [int(size) for size in torch.randint(1, 7, (int(torch.randint(0, 5, ())),))]
        name, whole = str(dtype), torch.randn(sizes).to(dtype)
        weights |= {
            name: whole,
            f"{name}.tied": whole,
            f"{name}.turned": whole.permute(tuple(reversed(range(whole.dim())))),
        }
        flat = torch.randn(40).to(dtype)
        weights |= {f"{name}.part": flat[3:19].view(4, 4)[:, 1:3], f"{name}.steps": flat[5::7], f"{name}.end": flat[39]}
        weights |= {f"{name}.expanded": flat[:3].expand(2, 3), f"{name}.empty": flat[:0].view(0, 5)}
    weights["parameter"] = nn.Parameter(torch.randn(2, 3))
    return weights


def save(path: Path, weights: Any, is_zip: bool = True, protocol: int = 2) -> Path:
    torch.save(weights, path, _use_new_zipfile_serialization=is_zip, pickle_protocol=protocol)
    return path


@FORMS
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_tensors_are_those_of_pytorch(tmp_path: Path, is_zip: bool, protocol: int) -> None:
    for seed in range(5):
        path = save(tmp_path / f"{seed}.bin", random_weights(seed), is_zip, protocol)
        expected = torch.load(path, weights_only=False)
        opened = PickleFile(path, path.name)
        assert list(opened.entries) == list(expected)
        for name, tensor in expected.items():
            read = opened.read(name)
            assert opened.entries[name].shape == tuple(tensor.shape) and read.dtype == np.float32
            np.testing.assert_array_equal(read, tensor.detach().float().numpy(), err_msg=name)


@FORMS
def test_a_module_and_a_training_state_are_read(tmp_path: Path, is_zip: bool) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))  # a state with `_metadata` and an integer
    state = {"epoch": 3, "lr": 0.1, "done": False, "state_dict": module.state_dict()}
    for weights in (module.state_dict(), state):
        opened = PickleFile(save(tmp_path / "weights.bin", weights, is_zip), "weights.bin")
        assert opened.entries.keys() == module.state_dict().keys()
        np.testing.assert_array_equal(opened.read("0.weight"), module.state_dict()["0.weight"].numpy())
    with pytest.raises(ImportFailedError, match=r"tensor 1\.num_batches_tracked has the type I64, but weights must be"):
        opened.read("1.num_batches_tracked")


def test_values_that_float32_does_not_have_are_an_error(tmp_path: Path) -> None:
    weights = {"nan": torch.tensor([1, torch.nan]), "large": torch.tensor(1e300, dtype=torch.float64)}
    opened = PickleFile(save(tmp_path / "weights.bin", weights), "weights.bin")
    for name in weights:
        with pytest.raises(ImportFailedError, match=rf"tensor {name} has values that are not finite float32 numbers"):
            opened.read(name)


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("kind", ["zip", "legacy", "plain"])
def test_code_in_a_pickle_does_not_run(kind: str, tmp_path: Path) -> None:
    path, created = tmp_path / "weights.bin", tmp_path / "created"
    weights = {"weight": torch.ones(2), "other": Malicious(created)}
    if kind == "plain":
        path.write_bytes(pickle.dumps(weights))
    else:
        save(path, weights, kind == "zip")
    with pytest.raises(ImportFailedError, match=r"the pickle has more than tensors or is damaged, .*; convert it"):
        PickleFile(path, path.name)
    assert not created.exists()
    torch.load(path, weights_only=False) if kind != "plain" else pickle.loads(path.read_bytes())
    assert created.exists()  # the pickle is malicious indeed


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"step": 3}, "the entry 'step', which is not a tensor"),
        ({3: torch.ones(1)}, "the entry 3, which is not a tensor"),
        ({"nested": {"weight": torch.ones(1)}}, "the entry 'nested', which is not a tensor"),
        ([torch.ones(1)], "no dictionary of tensors"),
        (torch.ones(1), "no dictionary of tensors"),
        ({}, "no dictionary of tensors"),
        ({"state_dict": {}}, "no dictionary of tensors"),
        ({(1, 2): torch.ones(1)}, "a key of a dictionary is not a text"),
        ({"sparse": torch.ones(2).to_sparse()}, "names 'torch._utils _rebuild_sparse_tensor'"),
        ({"complex": torch.ones(2, dtype=torch.complex64)}, "names 'torch ComplexFloatStorage'"),
        ({"module": nn.Linear(1, 1)}, "names 'torch.nn.modules.linear Linear'"),
        ({"type": torch.float32}, "names 'torch float32'"),
        ({"array": np.ones(2)}, "names 'numpy"),
        ({"negative": -1 << 80, "bytes": b"text"}, "names '_codecs encode'"),
    ],
)
def test_other_objects_are_an_error_that_names_them(weights: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ImportFailedError, match=message):
        PickleFile(save(tmp_path / "weights.bin", weights), "weights.bin")


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def storage(kind: str = "torch FloatStorage", key: str = "0", count: int = 4, rest: bytes = b"") -> bytes:
    words = f"c{kind.replace(' ', chr(10))}\n".encode()
    return b"(" + text("storage") + words + text(key) + text("cpu") + number(count) + rest + b"tQ"


def numbers(*values: int) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(
    start: int = 0,
    shape: bytes = numbers(2, 2),
    strides: bytes = numbers(2, 1),
    of: bytes = storage(),
    call: bytes = b"ctorch._utils\n_rebuild_tensor_v2\n",
    end: bytes = b"R",
) -> bytes:
    return call + b"(" + of + number(start) + shape + strides + b"\x89ccollections\nOrderedDict\n)Rt" + end


def of_weights(value: bytes) -> bytes:
    return b"\x80\x02}" + text("weight") + value + b"s."


def archive(
    path: Path, pickled: bytes, members: dict[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED
) -> Path:
    with zipfile.ZipFile(path, "w", compression) as opened:
        for name, data in {"a/data.pkl": pickled, **({"a/data/0": bytes(16)} if members is None else members)}.items():
            opened.writestr(name, data)
    return path


def test_the_archives_of_these_tests_can_be_read(tmp_path: Path) -> None:
    opened = PickleFile(archive(tmp_path / "weights.bin", of_weights(tensor())), "weights.bin")
    np.testing.assert_array_equal(opened.read("weight"), np.zeros((2, 2)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (tensor(1), "'weight' reaches beyond its storage"),
        (tensor(strides=numbers(3, 1)), "'weight' reaches beyond its storage"),
        (tensor(1 << 62), "'weight' reaches beyond its storage"),
        (tensor(-1), "negative or invalid size"),
        (tensor(strides=numbers(-2, 1)), "negative or invalid size"),
        (tensor(shape=numbers(-2, -2)), "negative or invalid size"),
        (tensor(shape=numbers(2)), "negative or invalid size"),
        (tensor(shape=b"(\x88\x88t"), "negative or invalid size"),
        (tensor(shape=b"(" + text("2") + text("2") + b"t"), "negative or invalid size"),
        (tensor(shape=numbers(1 << 40), strides=numbers(0)), "more elements than the file has bytes"),
        (tensor(shape=numbers(1 << 40, 0), strides=numbers(0, 0)), None),  # nothing is stored or read
        (tensor(shape=numbers(*[1] * 40), strides=numbers(*[1] * 40)), "more than 32 dimensions"),
        (tensor(of=storage(count=5)), "has another size than the pickle states"),
        (tensor(of=storage(count=1 << 62)), "has another size than the pickle states"),
        (tensor(of=storage(count=-4)), "a storage has an invalid description"),
        (tensor(of=storage(key="1")), "is missing, or has another size"),
        (tensor(of=storage(key="../data.pkl")), "is missing, or has another size"),
        (tensor(of=storage("torch DoubleStorage")), "has another size than the pickle states"),
        (tensor(of=storage("torch QInt8Storage")), "names 'torch QInt8Storage'"),
        (tensor(of=storage("collections OrderedDict")), "a storage has an invalid description"),
        (tensor(of=storage(rest=numbers(1, 2, 3))), "a storage is a view of another one"),
        (tensor(of=number(4)), "a int is in the place of a _Storage"),
        (tensor(call=b"cos\nsystem\n"), "names 'os system'"),
        (tensor(call=b"cbuiltins\neval\n"), "names 'builtins eval'"),
        (tensor(call=b"ctorch\nFloatStorage\n"), "calls torch FloatStorage"),
        (tensor(call=text("os") + text("system") + b"\x93"), "names 'os system'"),
        (tensor(call=text("name")), "a str is in the place of a _Global"),
        (tensor(end=b"\x81"), "the operation NEWOBJ has no use"),
        (tensor() + b"}b", "a PickledTensor is in the place of a dict"),
        (b"(icollections\nOrderedDict\n", "the operation INST has no use"),
        (b"\x82\x01", "the operation EXT1 has no use"),
        (b"\x96" + b"\xff" * 8, "damaged"),  # bytes of a size that no file has
        (b"\x8d" + struct.pack("<Q", 1 << 50), "damaged"),
        (tensor() + b"r" + struct.pack("<I", 1 << 31), None),  # allocates nothing
        (b"h\x07", "damaged"),
        (b"0" * 9, "the operation POP has no use"),
        (b"t", "damaged"),
        (b"}" + number(1) + b"R", "a int is in the place of a tuple"),
        (b"(" * 1000 + b"t" * 1000, "which is not a tensor"),
    ],
)
def test_a_hostile_pickle_is_refused(value: bytes, message: str | None, tmp_path: Path) -> None:
    path = archive(tmp_path / "weights.bin", of_weights(value))
    if message is None:
        assert not PickleFile(path, path.name).read("weight").any()
        return
    with pytest.raises(ImportFailedError, match=message):
        PickleFile(path, path.name)


def compressed(path: Path) -> None:
    archive(path, of_weights(tensor()), compression=zipfile.ZIP_DEFLATED)


def cut_off(path: Path) -> None:
    archive(path, of_weights(tensor()))
    path.write_bytes(path.read_bytes()[:-30])


def with_two_pickles(path: Path) -> None:
    archive(path, of_weights(tensor()), {"b/data.pkl": b"", "a/data/0": bytes(16)})


def without_a_pickle(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr("word/document.xml", "<w/>")


def of_another_order(path: Path) -> None:
    archive(path, of_weights(tensor()), {"a/byteorder": b"big", "a/data/0": bytes(16)})


def overlapping(path: Path) -> None:
    """Write an archive whose directory places two storages at the same bytes."""
    archive(path, of_weights(tensor()), {"a/data/0": bytes(16), "a/data/1": bytes(16)})
    data = bytearray(path.read_bytes())
    first, second = (data.rindex(name) - 46 for name in (b"a/data/0", b"a/data/1"))
    data[second + 42 : second + 46] = data[first + 42 : first + 46]
    path.write_bytes(data)


def larger_than_the_file(path: Path) -> None:
    """Write an archive whose directory states a huge size of a storage."""
    archive(path, of_weights(tensor(of=storage(count=1 << 28))))
    data = bytearray(path.read_bytes())
    at = data.rindex(b"a/data/0") - 46
    data[at + 20 : at + 28] = struct.pack("<II", 1 << 30, 1 << 30)
    path.write_bytes(data)


def with_a_large_pickle(path: Path) -> None:
    archive(path, of_weights(tensor()) + bytes(1 << 20))


def pointer(path: Path) -> None:
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (compressed, "a member is compressed or encrypted"),
        (cut_off, "File is not a zip file"),
        (with_two_pickles, "damaged"),
        (without_a_pickle, "not one that PyTorch wrote"),
        (of_another_order, "big-endian"),
        (overlapping, "members overlap"),
        (larger_than_the_file, "a member is cut off"),
        (with_a_large_pickle, "its pickle has more than 1,000,000 bytes"),
        (pointer, "pointer of Git LFS"),
        (lambda path: path.write_bytes(b""), "cannot mmap an empty file"),
        (lambda path: path.write_bytes(b"\x80"), "damaged"),
        (lambda path: path.write_bytes(bytes(600)), "does not begin as a file of PyTorch"),
    ],
)
def test_a_hostile_file_is_refused(
    write: Callable[[Path], None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sightline.export.sources.pickle_file.MAX_PICKLE_BYTES", 1_000_000)
    write(tmp_path / "weights.bin")
    with pytest.raises(ImportFailedError, match=message):
        PickleFile(tmp_path / "weights.bin", "weights.bin")


@FORMS
def test_every_damaged_byte_is_an_error_or_another_tensor(is_zip: bool, tmp_path: Path) -> None:
    """No other exception leaves the reader, wherever a file is cut or changed."""
    path = save(tmp_path / "weights.bin", {"weight": torch.ones(3), "part": torch.arange(6.0)[1::2]}, is_zip)
    whole = path.read_bytes()
    generator = np.random.default_rng(0)
    variants = [whole[:length] for length in range(0, len(whole), 7)]
    variants += [whole[:at] + bytes([generator.integers(256)]) + whole[at + 1 :] for at in range(len(whole))]
    refused = 0
    for variant in variants:
        path.write_bytes(variant)
        try:
            opened = PickleFile(path, path.name)
            for name in opened.entries:
                opened.read(name)
        except ImportFailedError:
            refused += 1
    assert refused > len(variants) // 4


def test_a_legacy_file_is_bounded_by_its_sizes(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"weight": torch.ones(4)}, buffer, _use_new_zipfile_serialization=False)
    whole = buffer.getvalue()
    path = tmp_path / "weights.bin"
    for data, message in (
        (whole[:-1], "the file is truncated: it has"),
        (whole[:-24] + struct.pack("<q", 1 << 60) + whole[-16:], "another size than the pickle states"),
        (whole[:-24] + struct.pack("<q", -1) + whole[-16:], "another size than the pickle states"),
    ):
        path.write_bytes(data)
        with pytest.raises(ImportFailedError, match=message):
            PickleFile(path, path.name)


def test_weights_are_mapped_and_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "weights.bin", {"weight": torch.ones(1 << 20), "small": torch.ones(2)})
    read: list[int] = []
    original = io.BufferedReader.read
    opened = PickleFile(path, path.name)

    class Counted(io.BufferedReader):
        def read(self, size: int | None = -1) -> bytes:
            data = original(self, size)
            read.append(len(data))
            return data

    monkeypatch.setattr(Path, "open", lambda self, mode: Counted(io.FileIO(str(self))))
    PickleFile(path, path.name)
    np.testing.assert_array_equal(opened.read("small"), np.ones(2))
    assert 0 < sum(read) < 100_000


def test_a_folder_reads_pickles_without_pytorch_and_records_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save(tmp_path / "pytorch_model.bin", {"weight": torch.ones(2, 2).T})
    opened = Folder(tmp_path)
    assert opened.is_pickle and opened.files.keys() == {"config.json", "pytorch_model.bin"}
    np.testing.assert_array_equal(opened.tensors.read("weight"), np.ones((2, 2)))
    save(tmp_path / "pytorch_model.bin", {"weight": nn.Linear(1, 1)})
    with pytest.raises(ImportFailedError, match=r"pytorch_model\.bin: the pickle has more than tensors"):
        Folder(tmp_path)


@pytest.mark.usefixtures("unverified")
@FORMS
def test_a_translation_model_has_the_same_weights_as_from_safetensors(is_zip: bool, tmp_path: Path) -> None:
    folder = write_checkpoint("marian", tmp_path / "marian")
    weights = load_file(folder / "model.safetensors")
    expected = export_checkpoint(Export(folder, tmp_path / "expected", METADATA)).manifest
    (folder / "model.safetensors").unlink()
    save(folder / "pytorch_model.bin", OrderedDict(weights), is_zip)
    manifest = export_checkpoint(Export(folder, tmp_path / "bundle", METADATA)).manifest
    assert manifest.files == expected.files and manifest.origin is not None and manifest.origin.pickle
