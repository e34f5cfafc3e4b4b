"""Classifiers of BART, whose decoder reads the text too, compute what Transformers computes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose
from numpy.typing import NDArray
from transformers import BartConfig, BartForSequenceClassification

from sightline.export.check.reference import log_softmax
from sightline.export.errors import ImportFailedError
from tests.export.encoder_models import UNIT_ROUNDOFF_RATIO, check_rows, import_folder, random_rows

LONGEST = 23
END = 102  # SEP of `random_rows`: in the middle and at the end of a pair
SMALL: dict[str, Any] = {
    "vocab_size": 211, "d_model": 30, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 3,
    "decoder_attention_heads": 5, "encoder_ffn_dim": 37, "decoder_ffn_dim": 29, "max_position_embeddings": LONGEST,
    "pad_token_id": 1, "bos_token_id": 101, "eos_token_id": END, "decoder_start_token_id": END,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "nli": {"id2label": {0: "contradiction", 1: "neutral", 2: "entailment"}},
    "scaled": {"scale_embedding": True, "activation_function": "relu", "encoder_layers": 1, "num_labels": 4},
    "score": {"num_labels": 1, "decoder_start_token_id": 7, "decoder_attention_heads": 2, "decoder_layers": 1},
}


@torch.no_grad()
def make_model(name: str) -> Any:
    torch.manual_seed(0)
    config = BartConfig(**SMALL | SHAPES[name], architectures=["BartForSequenceClassification"])
    model = BartForSequenceClassification._from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@torch.no_grad()
def compute(model: Any, ids: list[int]) -> dict[str, NDArray[Any]]:
    """Return the scores, and the hidden states and maps of the encoder."""
    output = model(input_ids=torch.tensor([ids]), output_attentions=True)
    logits = output.logits[0].numpy()
    return {
        "hidden": output.encoder_last_hidden_state[0].numpy(),
        "maps": torch.stack(output.encoder_attentions)[:, 0].numpy(),
        "labels": logits if len(logits) == 1 else log_softmax(logits),
    }


@pytest.mark.parametrize("name", SHAPES)
def test_graph_and_numpy_equal_transformers(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path)
    imported = import_folder(tmp_path, tmp_path)
    assert imported.model.labels == tuple(model.config.id2label.values())
    rows = random_rows(211, [12, LONGEST, 4, 7])
    check_rows(imported, model, rows, compute, UNIT_ROUNDOFF_RATIO)
    if name == "nli":
        (logits,) = imported.run(rows)["label_logits"][:1]
        with torch.no_grad():
            assert_allclose(logits, model(torch.tensor([rows[0]])).logits[0], rtol=0, atol=1e-4)


def test_an_end_token_beyond_the_vocabulary_is_rejected(tmp_path: Path) -> None:
    make_model("nli").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": 211}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ImportFailedError, match="eos_token_id must be from 0 to 210, got 211"):
        import_folder(tmp_path, tmp_path)
