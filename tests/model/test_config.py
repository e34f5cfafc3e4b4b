import pytest

from model.config import ClassifierConfig, RecurrentConfig, TransformerConfig, with_fields


def test_fields_are_changed_each_by_its_own_type() -> None:
    config = with_fields(RecurrentConfig(300), {"cell": "lstm", "dropout": "0.5", "bidirectional": "false"})
    assert config == RecurrentConfig(300, cell="lstm", dropout=0.5, bidirectional=False)
    linear = TransformerConfig(300, encoder_attention="linformer")
    changes = {"linformer_sharing": "headwise", "linformer_size": "16"}
    assert with_fields(linear, changes) == TransformerConfig(
        300, encoder_attention="linformer", linformer_sharing="headwise", linformer_size=16
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("cells", "lstm", "no field cells to set; it has dropout, max_positions, .*cell, "),
        ("vocab_size", "400", "no field vocab_size"),
        ("cell", "rnn", "cell is rnn, it must be one of gru, lstm"),
        ("bidirectional", "yes", "bidirectional is yes, it must be true or false"),
        ("decoder_size", "many", "decoder_size is many, it must be int"),
        ("decoder_size", "0", "decoder_size is 0, it must be at least 1"),
        ("dropout", "1", "dropout is 1.0, it must lie"),
    ],
)
def test_what_a_field_cannot_be_is_refused(name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_fields(RecurrentConfig(300), {name: text})


def test_labels_are_the_datas_own() -> None:
    with pytest.raises(ValueError, match="no field labels"):
        with_fields(ClassifierConfig(300), {"labels": "a,b"})
