"""Reading of checkpoints. Damaged, foreign and malicious folders are errors that name the cause."""

import json
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.opened_checkpoint import Config, Folder
from tests.support.tensors import tensors_of

TENSORS = {
    "float32": torch.randn(3, 5),
    "bfloat16": torch.randn(7, 2).bfloat16(),
    "float16": torch.randn(4).half(),
    "float64": torch.randn(2, 3, 4).double(),
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 3),
    "position_ids": torch.arange(3),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    save_file(TENSORS, path / "model.safetensors")
    return path


def header_and_data(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def write(path: Path, header: Mapping[str, Any] | bytes, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def check_values(opened: Folder) -> None:
    for name in TENSORS.keys() - {"position_ids"}:
        values = opened.tensors.read(name)
        assert values.dtype == np.float32 and values.shape == opened.tensors.shape(name) == TENSORS[name].shape
        np.testing.assert_array_equal(values, TENSORS[name].float().numpy())


def test_each_floating_type_is_read_as_float32(folder: Path) -> None:
    opened = Folder(folder)
    assert opened.architectures == ("BertModel",) and opened.model_type == "bert" and not opened.is_pickle
    assert opened.tensors.names == TENSORS.keys() and "scalar" in opened.tensors and "no" not in opened.tensors
    check_values(opened)
    assert opened.files.keys() == {"config.json", "model.safetensors"}


def test_shards_are_one_view(folder: Path) -> None:
    names = sorted(TENSORS)
    weight_map = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: TENSORS[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    opened = Folder(folder)
    check_values(opened)
    assert opened.files.keys() == {"config.json", "model.safetensors.index.json", *weight_map.values()}
    shard = folder / "model-00002-of-00002.safetensors"
    save_file({"other": torch.ones(1)}, shard)
    with pytest.raises(ImportFailedError, match=r"model-00002.*do not list the same tensors: .*other"):
        Folder(folder)
    save_file({name: TENSORS[name] for name in names if weight_map[name] == shard.name}, shard)
    shard.rename(folder / "away")
    with pytest.raises(ImportFailedError, match=r"model-00002-of-00002.safetensors is missing, but the index"):
        Folder(folder)


@pytest.mark.parametrize("name", ["../away.safetensors", "/etc/passwd", "..", "", "sub/file", "a\\b", 7])
def test_an_index_names_only_files_of_its_folder(name: Any, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "away.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"scalar": name}}))
    with pytest.raises(ImportFailedError, match=r"index.json names the file .*; weights must be in the same folder"):
        Folder(folder)


def test_a_link_out_of_the_folder_is_followed_only_into_the_cache_of_a_hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = folder.parent / "cache" / "blobs"
    blobs.mkdir(parents=True)
    (folder / "model.safetensors").rename(blobs / "1234")
    (folder / "model.safetensors").symlink_to("../cache/blobs/1234")
    with pytest.raises(ImportFailedError, match="symbolic link to a file outside of the folder; copy the folder"):
        Folder(folder)
    monkeypatch.setenv("HF_HUB_CACHE", str(folder.parent / "cache"))
    opened = Folder(folder)
    check_values(opened)


def test_a_file_that_is_no_regular_file_is_an_error(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(ImportFailedError, match=r"has no config.json|config.json is not a regular file"):
        Folder(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    with pytest.raises(ImportFailedError, match=r"config.json"):
        Folder(folder)


DAMAGED = r"model\.safetensors is truncated or not a valid safetensors file: .*; download it again"


@pytest.mark.parametrize("kept", [0, 5, 8, 100, -1])
def test_truncated_safetensors_are_an_error(kept: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ImportFailedError, match=DAMAGED):
        Folder(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [0, 4]},
        {"data_offsets": [-60, 0]},
        {"data_offsets": [1 << 62, (1 << 62) + 60]},  # after a gap
        {"data_offsets": [0, 60]},  # another tensor is there
        {"data_offsets": "all"},
        {"shape": [3, -5]},
        {"shape": [True, 15]},
        {"shape": [1 << 40, 1 << 40]},
        {"dtype": "F7"},
        {"dtype": ["F32"]},
    ],
)
def test_an_invalid_entry_of_a_header_is_an_error(change: dict[str, Any], folder: Path) -> None:
    path = folder / "model.safetensors"
    header, data = header_and_data(path)
    header["float32"].update(change)
    write(path, header, data)
    with pytest.raises(ImportFailedError, match=DAMAGED):
        Folder(folder)


@pytest.mark.parametrize("header", [b"[]", b"{", b"\xff{}", b'{"a": 1}', b'{"a": {}}', b"[" * 100_000, b"{}"])
def test_an_invalid_header_is_an_error(header: bytes, folder: Path) -> None:
    write(folder / "model.safetensors", header, bytes(4))
    with pytest.raises(ImportFailedError, match=DAMAGED):
        Folder(folder)


def test_a_huge_header_is_an_error_before_it_is_read(folder: Path) -> None:
    with (folder / "model.safetensors").open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)  # a sparse file
    with pytest.raises(ImportFailedError, match="header too large"):
        Folder(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_a_value_that_float32_cannot_hold_is_an_error(value: float, folder: Path) -> None:
    save_file({"weight": torch.tensor([1.0, value], dtype=torch.float64)}, folder / "model.safetensors")
    opened = Folder(folder)
    with pytest.raises(ImportFailedError, match="weight has values that are not finite"):
        opened.tensors.read("weight")


def test_integer_weights_are_an_error(folder: Path) -> None:
    opened = Folder(folder)
    with pytest.raises(ImportFailedError, match="position_ids has the type I64"):
        opened.tensors.read("position_ids")


def test_each_tensor_must_be_read_or_ignored() -> None:
    tensors = tensors_of({name: np.zeros(2, np.float32) for name in "abcdefgh"})
    tensors.read("a")
    tensors.ignore("[b-f]", "absent")
    with pytest.raises(ImportFailedError, match="has 2 tensors that its architecture does not use: g, h;"):
        tensors.check_all_read()
    tensors.ignore("?")
    tensors.check_all_read()
    with pytest.raises(ImportFailedError, match="has no tensor 'x', which its architecture needs"):
        tensors.read("x")


def test_each_key_must_be_read_or_ignored_in_nested_objects_too() -> None:
    config = Config({"a": 1, "b": 2, "c": 3, "rope": {"type": "default", "factor": 2}}, "config.json")
    assert config.integer("a") == 1
    config.ignore("b*")
    rope = config.section("rope")
    assert rope is not None and rope.text("type") == "default"
    with pytest.raises(ImportFailedError, match=r"config.json has 2 keys that are not known.*: c, rope\.factor;"):
        config.check_all_read()
    config.neutral("c", 3)
    with pytest.raises(ImportFailedError, match=r"config.json has 1 keys that are not known.*: rope\.factor;"):
        config.check_all_read()
    assert config.section("rope") is rope and rope.number("factor") == 2.0
    config.check_all_read()
    assert config.section("none") is None


def test_a_key_must_have_its_type() -> None:
    values = {"text": "x", "true": True, "half": 0.5, "null": None, "huge": float("inf"), "list": [1]}
    config = Config(values, "config.json")
    assert (config.text("text"), config.boolean("true"), config.number("half")) == ("x", True, 0.5)
    assert (config.integer("null", 4), config.integer("none", 5), config.boolean("null", False)) == (4, 5, False)
    assert "null" not in config and "text" in config
    for read, key, kind in (
        (config.integer, "true", "an integer"),
        (config.integer, "half", "an integer"),
        (config.integer, "null", "an integer"),
        (config.number, "text", "a finite number"),
        (config.number, "huge", "a finite number"),
        (config.text, "half", "a string"),
        (config.boolean, "half", "true or false"),
        (config.section, "list", "an object"),
    ):
        with pytest.raises(ImportFailedError, match=rf"config.json: {key} must be {kind}, got "):
            read(key)
    with pytest.raises(ImportFailedError, match=r"config.json has no key 'none', which its architecture needs"):
        config.text("none")


def test_a_neutral_key_is_absent_or_has_one_of_its_values() -> None:
    config = Config({"scale": 2.0, "flag": True, "none": None}, "config.json")
    config.neutral("absent", 1)
    config.neutral("scale", 1, 2)
    config.neutral("none", None)
    config.neutral("flag", True)
    with pytest.raises(ImportFailedError, match=r"scale is 2.0, which is not supported; supported: absent or 1"):
        config.neutral("scale", 1)
    with pytest.raises(ImportFailedError, match="flag is true, which is not supported"):
        config.neutral("flag", 1)


@pytest.mark.parametrize(
    "file", ["tf_model.h5", "flax_model.msgpack", "best.ckpt", "weights.pt", "adapter_model.safetensors", "q4.gguf"]
)
def test_weights_in_another_format_are_an_error_that_says_how_to_convert_them(file: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / file)
    with pytest.raises(ImportFailedError, match=rf"model.bin, and {file} is not read; name the file.* or convert it"):
        Folder(folder)


def test_a_folder_must_be_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ImportFailedError, match=r"empty has no config.json; it must be a folder of Hugging Face"):
        Folder(empty)
    for path in (tmp_path / "missing", folder / "config.json"):
        with pytest.raises(ImportFailedError, match=rf"{path} has no config.json"):
            Folder(path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ImportFailedError, match=r"has neither model.safetensors nor pytorch_model.bin, so it has no weights"
    ):
        Folder(folder)
    for text, message in (
        ("{", "is not valid JSON"),
        ("[]", "must be a JSON object"),
        ("[" * 100_000, "is not valid JSON"),
    ):
        (folder / "config.json").write_text(text)
        with pytest.raises(ImportFailedError, match=rf"config.json {message}"):
            Folder(folder)


def test_the_transformer_of_sentence_transformers_may_be_in_a_subfolder(folder: Path) -> None:
    outer = folder.parent / "outer"
    outer.mkdir()
    shutil.move(folder, outer / "0_Transformer")
    (outer / "modules.json").write_text('[{"path": "0_Transformer"}]')
    opened = Folder(outer)
    check_values(opened)
    assert opened.files.keys() == {"modules.json", "0_Transformer/config.json", "0_Transformer/model.safetensors"}
    (outer / "modules.json").write_text('[{"path": "../outer/0_Transformer"}]')
    with pytest.raises(ImportFailedError, match="leaves its folder"):
        Folder(outer)


def test_random_changes_of_a_header_never_read_outside_of_the_file(folder: Path) -> None:
    """Fuzz the header: each change gives a valid file or an `ImportFailedError`."""
    path = folder / "model.safetensors"
    original = path.read_bytes()
    generator = np.random.default_rng(0)
    end = 8 + struct.unpack("<Q", original[:8])[0]
    num_errors = 0
    for _ in range(300):
        changed = bytearray(original)
        for position in generator.integers(0, end, generator.integers(1, 4)):
            changed[position] = generator.integers(0, 256)
        path.write_bytes(changed)
        try:
            opened = Folder(folder)
            for name in opened.tensors.names:
                opened.tensors.read(name)
        except ImportFailedError:
            num_errors += 1
    assert num_errors > 200
