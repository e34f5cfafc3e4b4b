from pathlib import Path

import pytest
import torch

from model.checkpoint import (
    CONFIG,
    TOKENIZER,
    WEIGHTS,
    average,
    load_checkpoint,
    load_facts,
    save_checkpoint,
    save_tensors,
)
from model.transformer import Transformer


def test_a_saved_checkpoint_loads_as_the_same_model(
    tmp_path: Path, toy_model: Transformer, tokenizer_path: Path
) -> None:
    save_checkpoint(tmp_path / "saved", toy_model.config, toy_model.state_dict(), tokenizer_path, {"epoch": 7})
    loaded, tokenizer = load_checkpoint(tmp_path / "saved")
    assert loaded.config == toy_model.config
    assert not loaded.training
    args = torch.tensor([[5, 6, 2]]), torch.tensor([3]), torch.tensor([[1, 7]])
    assert torch.equal(loaded(*args), toy_model(*args))
    assert tokenizer.get_vocab_size() == 400
    assert load_facts(tmp_path / "saved" / WEIGHTS) == {"epoch": 7}
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


def test_no_checkpoints_have_no_average() -> None:
    with pytest.raises(ValueError, match="no checkpoints"):
        average([])


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, TOKENIZER])
def test_a_missing_file_is_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        load_checkpoint(checkpoint)


def test_weights_of_other_sizes_are_refused(checkpoint: Path) -> None:
    config = (checkpoint / CONFIG).read_text(encoding="utf-8")
    (checkpoint / CONFIG).write_text(config.replace('"d_ff": 32', '"d_ff": 64'), encoding="utf-8")
    with pytest.raises(ValueError, match="is not a checkpoint that fits"):
        load_checkpoint(checkpoint)


def test_an_unknown_setting_is_refused(checkpoint: Path) -> None:
    config = (checkpoint / CONFIG).read_text(encoding="utf-8")
    (checkpoint / CONFIG).write_text(config.replace('"d_ff"', '"d_fff"'), encoding="utf-8")
    with pytest.raises(ValueError, match="d_fff"):
        load_checkpoint(checkpoint)


def test_a_tokenizer_that_is_none_is_refused(checkpoint: Path) -> None:
    """The library's bare exception went through to the command line as a traceback."""
    (checkpoint / TOKENIZER).write_text("not JSON", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        load_checkpoint(checkpoint)


def test_cut_off_weights_are_refused(checkpoint: Path) -> None:
    whole = (checkpoint / WEIGHTS).read_bytes()
    (checkpoint / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="is not a checkpoint that fits"):
        load_checkpoint(checkpoint)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_tensors(path, {"a": torch.ones(2)}, {"epoch": 1})
    with pytest.raises(TypeError):
        save_tensors(path, {"a": torch.zeros(2)}, {"epoch": object()})
    assert load_facts(path) == {"epoch": 1}
