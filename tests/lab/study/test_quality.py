from pathlib import Path

from lab.study.quality import _bleu
from lab.study.served import serve
from sightline.model.checkpoint import load_model
from sightline.model.evaluation.bleu import moses_lines, read_test_set, score, translate

SPLIT = "test_2016_flickr"


def test_a_served_bundle_scores_the_same_as_pytorch(
    tmp_path: Path, bundle: Path, checkpoint: Path, toy_sentences: list[str]
) -> None:
    """The references, except for one, are the toy model's own translations."""
    outputs = translate(*load_model(checkpoint), toy_sentences, 5, 1.0)
    references = [*outputs[1:], "Zwei Kinder am Strand."]
    sides = {"en": [*toy_sentences[1:], toy_sentences[0]], "de": references}
    for ending, lines in {**sides, "lc.norm.tok.de": moses_lines(references, "de")}.items():
        (tmp_path / f"{SPLIT}.{ending}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    expected = score([*outputs[1:], outputs[0]], read_test_set(tmp_path, SPLIT, "en", "de"), "de")
    with serve(bundle.parent) as served:
        found = _bleu(served, "toy", tmp_path, 5)
    assert expected.tokenised_bleu is not None and 50 < expected.tokenised_bleu.value < 100
    values = (expected.tokenised_bleu.value, expected.bleu.value, expected.chrf.value)
    assert (found["tok_lc"], found["bleu"], found["chrf"]) == tuple(round(value, 2) for value in values)
