import contextlib
import gzip
import random
from pathlib import Path

import numpy as np
import pytest

from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.firefox import marian_binary
from sightline.export.sources.firefox.marian_binary import (
    CONFIG,
    FLOAT32,
    INT8,
    INTGEMM8,
    MarianModel,
    parse_flat_yaml,
    read_marian,
)
from tests.export.firefox.models import OPTIONS, random_tensors, write_entries, write_marian

TENSORS = random_tensors()
MATRICES = [name for name, values in TENSORS.items() if min(values.shape) > 1]
YAML = (CONFIG, INT8, (10, 1), b"type: test")


def test_tensors_in_float32_are_read_exactly() -> None:
    model = MarianModel(write_marian(TENSORS), "model.bin")
    assert tuple(model.entries) == tuple(TENSORS)
    for name, values in TENSORS.items():
        assert model.entries[name].shape == values.shape
        np.testing.assert_array_equal(model.read(name), values, strict=True)


def test_quantised_matrices_have_inputs_as_rows_and_differ_by_half_a_step() -> None:
    """A multiplier of 127 / max |w| rounds each value by at most max |w| / 254."""
    model = MarianModel(write_marian(TENSORS, quantized=MATRICES), "model.bin")
    assert tuple(model.entries) == tuple(TENSORS)
    for name, values in TENSORS.items():
        read = model.read(name)
        limit = np.abs(values).max() / 254 * (1 + 4 * np.finfo(np.float32).eps) if name in MATRICES else 0
        assert np.abs(read - values).max() <= limit
        assert (read.shape, read.dtype, read.flags.c_contiguous) == (values.shape, np.dtype(np.float32), True)


@pytest.mark.parametrize("suffix", ["bin", "bin.gz"])
def test_files_are_read_packed_or_not(tmp_path: Path, suffix: str) -> None:
    data = write_marian(TENSORS)
    path = tmp_path / f"model.{suffix}"
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    model = read_marian(path)
    np.testing.assert_array_equal(model.read("Wemb"), TENSORS["Wemb"])
    assert model.config["enc-depth"] == 2


def test_a_tensor_is_a_copy_that_outlives_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(write_marian(TENSORS))
    model = read_marian(tmp_path / "model.bin")
    values = model.read("Wemb")
    np.testing.assert_array_equal(values, TENSORS["Wemb"])


def test_the_configuration() -> None:
    config = MarianModel(write_marian(TENSORS), "model.bin").config
    assert config["dim-vocabs"] == [17, 17]
    assert config["input-types"] == []
    assert config["tied-embeddings-all"] is True
    assert config["transformer-preprocess"] == ""
    assert config["version"] == OPTIONS["version"]


@pytest.mark.parametrize("quantized", [[], MATRICES], ids=["float32", "int8"])
def test_each_truncation_is_an_error(quantized: list[str]) -> None:
    data = write_marian(TENSORS, quantized=quantized)
    draw = random.Random(1)
    for size in [*range(0, 2000, 41), *(draw.randrange(len(data)) for _ in range(100)), len(data) - 1]:
        with pytest.raises(ImportFailedError, match=r"^model\.bin is not a Marian model that can be imported: "):
            MarianModel(data[:size], "model.bin")


def test_damaged_bytes_cause_no_other_error() -> None:
    data = write_marian(TENSORS, quantized=MATRICES)
    draw = random.Random(2)
    for _ in range(1500):
        damaged = bytearray(data)
        for _ in range(2):
            damaged[draw.randrange(4000)] = draw.randrange(256)
        with contextlib.suppress(ImportFailedError):
            model = MarianModel(bytes(damaged), "model.bin")
            for name in model.entries:
                model.read(name)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            write_entries([YAML], version=2),
            "its version must be 1, got 2, so it is probably not a .bin file of Marian; down",
        ),
        (write_entries([]), f"it has no configuration '{CONFIG}'"),
        (write_entries([YAML, YAML]), "a tensor occurs twice"),
        (
            write_entries([YAML, ("W", 0x402, (2, 2), bytes(8))]),
            "the tensor 'W' has the type 0x402 and 2 axes; supported",
        ),
        (write_entries([YAML, ("W", INTGEMM8, (4,), bytes(8))]), "the tensor 'W' has the type 0x4101 and 1 axes"),
        (write_entries([YAML, ("a_Wt", INTGEMM8, (2, 2), bytes(8))]), "the tensor 'a_Wt' has the type 0x4101"),
        (write_entries([YAML, ("W", FLOAT32, (2, 2), bytes(15))]), "the tensor 'W' has 15 bytes, its shape needs 16"),
        (write_entries([YAML, ("W", INTGEMM8, (2, 2), bytes(7))]), "the tensor 'W' has 7 bytes, its shape needs 8"),
        (write_entries([YAML, ("W", FLOAT32, (-2, 2), b"")]), "the shape of the tensor 'W' must be positive"),
        (write_entries([YAML, ("W", FLOAT32, (1,) * 9, bytes(4))]), "a tensor must have at most 8 axes, got 9"),
        (write_entries([(CONFIG, INT8, (4,), b"a: [")]), "cannot be read: while parsing a flow node"),
        (write_entries([(CONFIG, INT8, (1,), b"\xff")]), "cannot be read: 'utf-8' codec"),
    ],
)
def test_files_that_cannot_be_imported(data: bytes, message: str) -> None:
    with pytest.raises(ImportFailedError, match=message.replace("[", r"\[")):
        MarianModel(data, "model.bin")


@pytest.mark.parametrize("multiplier", [0.0, -1.0, float("nan"), float("inf")])
def test_a_multiplier_must_be_positive(multiplier: float) -> None:
    data = bytes(4) + np.float32(multiplier).tobytes()
    model = MarianModel(write_entries([YAML, ("W", INTGEMM8, (2, 2), data)]), "model.bin")
    with pytest.raises(ImportFailedError, match="the multiplier of the tensor 'W' must be positive, got"):
        model.read("W")


def test_values_must_be_finite() -> None:
    data = np.array([np.nan], np.float32).tobytes()
    model = MarianModel(write_entries([YAML, ("b", FLOAT32, (1,), data)]), "model.bin")
    with pytest.raises(ImportFailedError, match="the tensor 'b' has values that are not finite"):
        model.read("b")


def test_files_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.bin").write_bytes(b"")
    with pytest.raises(ImportFailedError, match=r"empty\.bin is not a Marian model .*: it is truncated"):
        read_marian(tmp_path / "empty.bin")
    packed = gzip.compress(write_marian(TENSORS))
    for name, content in (
        ("cut.bin.gz", packed[:-9]),
        ("other.bin.gz", b"a"),
        ("damaged.bin.gz", packed[:50] + b"xxxx"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ImportFailedError, match=f"{name} is not a complete gzip file: .*; download it again"):
            read_marian(tmp_path / name)
    monkeypatch.setattr(marian_binary, "MAX_UNPACKED_BYTES", 1000)
    (tmp_path / "large.bin.gz").write_bytes(gzip.compress(bytes(1001)))
    with pytest.raises(ImportFailedError, match=r"large\.bin\.gz must have at most 1000 bytes when it is unpacked"):
        read_marian(tmp_path / "large.bin.gz")


def test_yaml() -> None:
    text = "# comment\na: 1\nb: -1.5e-3\nc: true\nd: \"\"\ne: 'x: y'\nf:\n  - 1\n  - b\n\ng: []\n"
    expected = {"a": 1, "b": -0.0015, "c": True, "d": "", "e": "x: y", "f": [1, "b"], "g": []}
    assert parse_flat_yaml(text) == expected


@pytest.mark.parametrize(
    "text", ["- a", "a: 1\n- b", "a:\n  b: 1", "a", "a: [[1]]", "a: {b: 1}", "a: &b [*b]", "a: !!set {}"]
)
def test_yaml_that_is_not_flat(text: str) -> None:
    with pytest.raises(ImportFailedError, match=r"its configuration .* cannot be read: "):
        MarianModel(write_entries([(CONFIG, INT8, (len(text),), text.encode())]), "model.bin")
