from pathlib import Path

import pytest
from tokenizers import Tokenizer

from sightline.model.checkpoint import load_model
from sightline.model.data.records import PairRecord
from sightline.model.data.text import read_lines
from sightline.model.data.tokenizer_training import decode_ids, encode_lines
from sightline.model.evaluation.bleu import (
    EvaluationSet,
    evaluate_translation,
    moses_lines,
    read_test_set,
    score,
    translate,
)
from tests.support.reference_decoding import greedy, pytorch_steps


def test_perfect_outputs_score_100_on_both_lines(corpus: Path) -> None:
    test_set = read_test_set(corpus, "test", "en", "de")
    scores = score(test_set.references, test_set, "de")
    assert scores.tokenised_bleu is not None
    for each in (scores.tokenised_bleu, scores.bleu, scores.chrf):
        assert each.value == pytest.approx(100.0)
    assert "tok:none" in scores.tokenised_bleu.signature
    assert "tok:13a" in scores.bleu.signature
    assert "case:mixed" in scores.bleu.signature
    assert "nc:6" in scores.chrf.signature


def test_wrong_case_costs_only_the_cased_line(corpus: Path) -> None:
    test_set = read_test_set(corpus, "test", "en", "de")
    scores = score([line.upper() for line in test_set.references], test_set, "de")
    assert scores.tokenised_bleu is not None
    assert scores.tokenised_bleu.value == pytest.approx(100.0)
    assert scores.bleu.value < 50


def test_a_wrong_word_costs_both_lines(corpus: Path) -> None:
    test_set = read_test_set(corpus, "test", "en", "de")
    scores = score([line.replace("Hund", "Baum") for line in test_set.references], test_set, "de")
    assert scores.tokenised_bleu is not None
    assert scores.tokenised_bleu.value < 90
    assert scores.bleu.value < 90


ZH, JA = "两个女孩在海滩上和一只棕色的小狗玩耍。", "二人の女の子が浜辺で小さな茶色の犬と遊んでいます。"
KO, TH = "두 소녀가 해변에서 작은 개와 놀고 있습니다.", "เด็กผู้หญิงสองคนกำลังเล่นกับสุนัข"


@pytest.mark.parametrize(
    ("language", "reference", "tokenizers"),
    [
        ("zh", ZH, ("zh|",)),
        ("zho_Hans", "使用 Kubernetes 和 PyTorch", ("zh|",)),
        ("", ZH, ("zh|",)),
        ("ja", "東京都庁舎前", ("ja-mecab", "char|")),  # characters without MeCab
        ("", JA, ("ja-mecab", "char|")),
        ("ko-KR", KO, ("ko-mecab", "char|")),
        ("", KO, ("ko-mecab", "char|")),
        ("th", TH, ("char|",)),
        ("", TH, ("char|",)),
        ("lo", "ເດັກຍິງສອງຄົນ", ("char|",)),
        ("km", "ក្មេងស្រីពីរនាក់", ("char|",)),
        ("my", "မိန်းကလေးနှစ်ယောက်", ("char|",)),
        ("de", "Zwei Mädchen spielen am Strand.", ("13a|",)),
        ("", "Two girls write the name 世界 into the sand.", ("13a|",)),
    ],
)
def test_bleu_has_the_tokenizer_of_the_target_language(
    language: str, reference: str, tokenizers: tuple[str, ...]
) -> None:
    bleu = score([reference], EvaluationSet(["x"], [reference], None), language).bleu
    assert bleu.value == pytest.approx(100)
    assert bleu.signature.partition("tok:")[2].startswith(tokenizers)


def test_the_metrics_of_records_have_the_tokenizer_of_the_references(tokenizer: Tokenizer, checkpoint: Path) -> None:
    methods = evaluate_translation(load_model(checkpoint)[0], tokenizer, [PairRecord("A dog.", ZH)]).methods
    assert "bs:1000|" in str(methods["BLEU"].signature) and "tok:zh|" in str(methods["BLEU"].signature)


def test_without_a_tokenised_reference_its_line_is_omitted(corpus: Path) -> None:
    test_set = read_test_set(corpus, "val", "en", "de")
    assert test_set.tokenised_references is None
    assert score(test_set.references, test_set, "de").tokenised_bleu is None


def test_moses_lowercases_normalises_and_escapes() -> None:
    assert moses_lines(["„Ja“, sagt der Mann – z.B. die 2 T-Shirts!"], "de") == [
        "&quot; ja &quot; , sagt der mann - z.b. die 2 t-shirts !"
    ]


def test_a_limit_takes_the_first_pairs(corpus: Path) -> None:
    test_set = read_test_set(corpus, "test", "en", "de", limit=2)
    assert test_set.sources == read_lines(corpus / "test.en")[:2]
    assert len(test_set.references) == len(test_set.tokenised_references or []) == 2


def test_a_tokenised_reference_of_another_length_is_rejected(corpus: Path, tmp_path: Path) -> None:
    for name, lines in {"test.en": 3, "test.de": 3, "test.lc.norm.tok.de": 2}.items():
        (tmp_path / name).write_text("a\n" * lines, encoding="utf-8")
    with pytest.raises(ValueError, match=r"has 2 lines, but test\.de has 3"):
        read_test_set(tmp_path, "test", "en", "de")


def test_translations_with_one_beam_are_the_greedy_ones(tokenizer: Tokenizer, checkpoint: Path) -> None:
    model, _ = load_model(checkpoint)
    sentences = ["A dog sleeps.", "Two men sing."]
    expected = [
        decode_ids(tokenizer, greedy(pytorch_steps(model, ids), 1, 2, model.config.max_positions).ids)
        for ids in encode_lines(tokenizer, sentences)
    ]
    assert translate(model, tokenizer, sentences, num_beams=1, length_penalty=0.0) == expected
