import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sightline.model.architectures.transformer import Transformer
from sightline.model.checkpoint import average, load_metadata, load_model, save_checkpoint, save_tensors
from sightline.model.config import TransformerConfig
from sightline.model.parts import CONFIG, TOKENIZER, WEIGHTS


def test_a_saved_checkpoint_loads_as_the_same_model(
    tmp_path: Path, toy_config: Callable[[int], TransformerConfig], tokenizer_path: Path
) -> None:
    torch.manual_seed(0)
    toy_model = Transformer(toy_config(400)).eval()
    save_checkpoint(tmp_path / "saved", toy_model.config, toy_model.state_dict(), tokenizer_path, {"epoch": 7})
    loaded, tokenizer = load_model(tmp_path / "saved")
    assert loaded.config == toy_model.config
    assert not loaded.training
    args = torch.tensor([[5, 6, 2]]), torch.tensor([3]), torch.tensor([[1, 7]])
    assert torch.equal(loaded(*args), toy_model(*args))
    assert tokenizer.get_vocab_size() == 400
    assert load_metadata(tmp_path / "saved" / WEIGHTS) == {"epoch": 7}
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {CONFIG, WEIGHTS, TOKENIZER}


def test_the_average_is_the_mean_of_each_tensor(tmp_path: Path) -> None:
    rows = [torch.tensor([1.0, 1e8]), torch.tensor([2.0, 1.0]), torch.tensor([6.0, 1.0])]
    paths = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for path, row in zip(paths, rows, strict=True):
        save_tensors(path, {"a": row, "b": row * 2})
    averaged = average(paths)
    expected = torch.stack(rows).double().mean(0).float()
    assert torch.equal(averaged["a"], expected)
    assert torch.equal(averaged["b"], expected * 2)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, TOKENIZER])
def test_a_missing_file_is_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        load_model(checkpoint)


def edit(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content.replace(old, new)


OTHER = "is not a checkpoint of this version of Sightline"
# Changes of files; the exceptions of libraries must not reach the command line as tracebacks.
REJECTED: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "other sizes": (CONFIG, edit(b'"d_ff": 32', b'"d_ff": 64'), OTHER),
    "unknown setting": (CONFIG, edit(b'"d_ff"', b'"d_fff"'), "d_fff"),
    "list": (CONFIG, lambda _: b"[]", rf"{OTHER}: .*config\.json must contain a JSON object"),
    "cut off": (CONFIG, lambda _: b"{", rf"{OTHER}: .*config\.json is not valid JSON"),
    "empty": (CONFIG, lambda _: b"", rf"{OTHER}: .*config\.json is not valid JSON"),
    "pad": (CONFIG, edit(b'pad_id": 0', b'pad_id": 40'), "pad_id is 40 in the configuration, but <pad> has the id 0"),
    "start": (CONFIG, edit(b'bos_id": 1', b'bos_id": 399'), "bos_id is 399 in the configuration, but <s> has the id 1"),
    "vocabulary": (CONFIG, edit(b": 400", b": 399"), "the tokenizer has 400 tokens, but vocab_size is 399"),
    "tokenizer": (TOKENIZER, lambda _: b"not JSON", r"tokenizer\.json is not a tokenizer"),
    "truncated weights": (WEIGHTS, lambda whole: whole[: len(whole) // 2], OTHER),
}


@pytest.mark.parametrize("case", REJECTED)
def test_a_file_that_cannot_be_used_is_rejected(checkpoint: Path, case: str) -> None:
    name, change, message = REJECTED[case]
    (checkpoint / name).write_bytes(change((checkpoint / name).read_bytes()))
    with pytest.raises(ValueError, match=message):
        load_model(checkpoint)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_tensors(path, {"a": torch.ones(2)}, {"epoch": 1})
    with pytest.raises(TypeError):
        save_tensors(path, {"a": torch.zeros(2)}, {"epoch": object()})
    assert load_metadata(path) == {"epoch": 1}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_weights_have_the_permissions_of_the_other_files(
    tmp_path: Path, checkpoint: Path, umask: int, mode: int
) -> None:
    """Files with mode 0600 could not be read by a service of another user."""
    model, _ = load_model(checkpoint)
    before = os.umask(umask)
    try:
        save_checkpoint(tmp_path / "saved", model.config, model.state_dict(), checkpoint / TOKENIZER, {})
    finally:
        os.umask(before)
    for name in (CONFIG, WEIGHTS, TOKENIZER):
        assert stat.S_IMODE((tmp_path / "saved" / name).stat().st_mode) == mode, name


def test_the_error_for_a_run_names_the_checkpoint_inside_it(tmp_path: Path, checkpoint: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "run" / "averaged")
    with pytest.raises(FileNotFoundError, match=r"it has no config\.json; use .*averaged"):
        load_model(tmp_path / "run")


def test_damaged_weights_have_no_average_and_are_named(tmp_path: Path) -> None:
    save_tensors(tmp_path / "1.safetensors", {"a": torch.ones(2)})
    (tmp_path / "2.safetensors").write_bytes((tmp_path / "1.safetensors").read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"2\.safetensors is damaged or truncated: "):
        average(sorted(tmp_path.iterdir()))
