import pytest
from tokenizers import Tokenizer

from sightline.base.bundle import Bleu, Quality
from sightline.export.check.sessions import Sessions, onnx_steps
from sightline.export.convert.quality import NUM_BEAMS, ParallelText, check_loss, compare
from sightline.export.import_errors import VerificationError
from sightline.model.data.tokenizer_training import decode_ids
from sightline.model.evaluation.bleu import EvaluationSet
from tests.support.reference_decoding import greedy
from tests.support.tables import read_table


@pytest.fixture
def own_text(sessions: Sessions, tokenizer: Tokenizer, toy_sentences: list[str]) -> ParallelText:
    """Parallel text with the greedy outputs of the toy model as references."""
    tokens, references = sessions.manifest.tokens, []
    for encoding in tokenizer.encode_batch(toy_sentences):
        output = greedy(onnx_steps(sessions, encoding.ids), tokens.start_ids[0], tokens.end_id, max_new_tokens=128)
        references.append(decode_ids(tokenizer, output.ids))
    return ParallelText("val", "de", EvaluationSet(toy_sentences, references, tokenised_references=None))


def test_bleu_is_measured_with_greedy_and_beam_search(
    sessions: Sessions, tokenizer: Tokenizer, own_text: ParallelText
) -> None:
    quality = compare(sessions, sessions, tokenizer, own_text)
    assert (quality.split, quality.sentences) == ("val", 6)
    assert "case:mixed" in quality.signature and "tok:13a" in quality.signature
    assert tuple(bleu.num_beams for bleu in quality.bleu) == NUM_BEAMS
    greedily, by_beams = quality.bleu
    assert greedily.float32 == greedily.quantized == pytest.approx(100)
    assert by_beams.float32 == by_beams.quantized < 90


def quality(*bleu: tuple[float, float]) -> Quality:
    pairs = zip(NUM_BEAMS, bleu, strict=True)
    compared = tuple(Bleu(num_beams=beams, float32=before, quantized=after) for beams, (before, after) in pairs)
    return Quality(split="val", sentences=6, signature="", bleu=compared)


def test_a_small_loss_is_accepted() -> None:
    check_loss(quality((38.0, 37.71), (40.0, 41.0)))


@pytest.mark.parametrize(
    ("bleu", "message"),
    read_table(__file__),
)
def test_a_loss_that_is_large_or_unknown_is_rejected(bleu: tuple[tuple[float, float], ...], message: str) -> None:
    with pytest.raises(VerificationError, match=message):
        check_loss(quality(*bleu))
