import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sightline.model.architectures.classifier import Classifier
from sightline.model.architectures.encoder import mean_pool
from sightline.model.config import ClassifierConfig, model_config_to_json, read_model_config

CONFIG = ClassifierConfig(
    40, d_model=16, num_heads=2, d_ff=32, encoder_layers=2, max_positions=32, labels=("bad", "fair", "good")
)
SOURCE = torch.tensor([[5, 6, 7, 8, 2], [9, 10, 2, 0, 0]])
LENGTHS = torch.tensor([5, 3])


def classifier(**changes: Any) -> Classifier:
    torch.manual_seed(0)
    return Classifier(dataclasses.replace(CONFIG, **changes))


def test_the_pooled_vector_is_the_mean_of_the_unmasked_tokens() -> None:
    hidden = torch.tensor([[[1.0, 2.0], [3.0, 6.0], [float("nan"), 9.0]]])
    assert mean_pool(hidden, torch.tensor([[True, True, False]])).tolist() == [[2.0, 4.0]]
    assert mean_pool(hidden, torch.tensor([[False, True, False]])).tolist() == [[3.0, 6.0]]


def test_the_probabilities_are_a_softmax_over_the_mean_of_the_encoders_last_layer() -> None:
    model = classifier().eval()
    hidden, _ = model.encode(SOURCE, LENGTHS)
    expected = [
        model.output(row[:length].mean(dim=0)).softmax(dim=0) for row, length in zip(hidden, LENGTHS, strict=True)
    ]
    torch.testing.assert_close(model(SOURCE, LENGTHS).exp(), torch.stack(expected))


def test_the_content_of_padding_changes_nothing() -> None:
    model = classifier().eval()
    other = SOURCE.masked_fill(SOURCE == 0, 33)
    torch.testing.assert_close(model(other, LENGTHS), model(SOURCE, LENGTHS))
    torch.testing.assert_close(model(SOURCE[1:, :3], LENGTHS[1:]), model(SOURCE, LENGTHS)[1:])


def test_maps_sum_to_one_over_a_sources_own_tokens() -> None:
    _, maps = classifier().eval().encode(SOURCE, LENGTHS, need_weights=True)
    assert maps is not None and maps.shape == (2, 2, 2, 5, 5)
    torch.testing.assert_close(maps.sum(dim=-1), torch.ones(2, 2, 2, 5))
    assert (maps[:, 1, :, :, 3:] == 0).all()


def test_a_dropped_word_is_neither_attended_to_nor_part_of_the_mean() -> None:
    model = classifier(dropout=0.0, word_dropout=0.9).train()
    torch.manual_seed(3)  # of the first source only its last token is kept, whatever the seed
    given = model(SOURCE, LENGTHS)
    torch.manual_seed(3)
    is_kept = torch.rand(SOURCE.shape) >= 0.9
    is_kept[0, 4] = is_kept[1, 2] = True
    is_kept[1, 3:] = False
    assert not is_kept[0, :4].all()
    hidden, _ = model._encode(SOURCE, is_kept)
    torch.testing.assert_close(given, model.classify(hidden, is_kept))
    changed = SOURCE.masked_fill(~is_kept, 30)
    torch.manual_seed(3)
    torch.testing.assert_close(model(changed, LENGTHS), given)


def test_no_word_is_dropped_after_training() -> None:
    dropped, whole = classifier(word_dropout=0.9).eval(), classifier().eval()
    assert torch.equal(dropped(SOURCE, LENGTHS), whole(SOURCE, LENGTHS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"word_dropout": 1.0}, "word_dropout must be less than or equal to 0.9, got 1.0"),
        ({"labels": ("one",)}, "labels must be two or more different strings, got"),
        ({"labels": ("one", "one")}, "labels must be two or more different strings, got"),
        ({"num_heads": 3}, r"d_model must be a multiple of num_heads \(3\), got 16"),
    ],
)
def test_impossible_sizes_are_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_with_several_labels_the_scores_are_logits() -> None:
    model = classifier(multi_label=True).eval()
    hidden, _ = model.encode(SOURCE, LENGTHS)
    expected = [model.output(row[:length].mean(dim=0)) for row, length in zip(hidden, LENGTHS, strict=True)]
    torch.testing.assert_close(model(SOURCE, LENGTHS), torch.stack(expected))
    torch.testing.assert_close(model(SOURCE, LENGTHS).log_softmax(dim=-1), classifier().eval()(SOURCE, LENGTHS))


def test_an_older_configuration_has_one_label_for_a_text(tmp_path: Path) -> None:
    fields = json.loads(model_config_to_json(CONFIG))
    assert fields.pop("multi_label") is False
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    assert read_model_config(tmp_path / "config.json") == CONFIG
