"""Fields, examples and documents of texts that belong together."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from sightline.model.data.corpus import open_corpus
from sightline.model.data.facts import check_corpus
from sightline.model.data.files import CorpusError
from sightline.model.data.formats import Reading, read_records
from sightline.model.data.records import PairRecord
from sightline.model.data.similar_texts import (
    SCORE_UNIT,
    decode_similar,
    documents_of,
    encode_reranking,
    encode_similar,
)
from sightline.model.data.tokenizer_training import train_tokenizer

P = PairRecord


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"anchor": "a", "positive": "b", "negative": "c"}, [P("a", "b", ("c",))]),
        ({"query": "a", "positive": "b", "negative_1": "c", "negative_2": " ", "id": 7}, [P("a", "b", ("c",))]),
        ({"question": "a", "answer": "b"}, [P("a", "b")]),
        ({"query": "a", "document": "b", "label": 1}, [P("a", "b", score=1.0)]),
        ({"query": "a", "passage": "b", "relevance": "true"}, [P("a", "b", score=1.0)]),
        ({"text1": "a", "text2": "b"}, [P("a", "b")]),
        ({"genre": "x", "Sentence1": "a", "Sentence2": "b", "score": "3.8"}, [P("a", "b", score=3.8)]),
        ({"sentence_A": "a", "sentence_B": "b", "relatedness_score": "4,5"}, [P("a", "b", score=4.5)]),
        ({"qid1": "1", "question1": "a", "question2": "b", "is_duplicate": "0"}, [P("a", "b", score=0.0)]),
        ({"premise": "a", "hypothesis": "b"}, [P("a", "b")]),
        ({"query": "a", "pos": ["b", "d"], "neg": ["c", "e"]}, [P("a", "b", ("c", "e")), P("a", "d", ("c", "e"))]),
        ({"source": "a", "target": "b", "question": "?", "score": 2}, [P("a", "b", score=2.0)]),
        ({"query": "a", "positive": "b", "negatives": [], "score": 0.3}, [P("a", "b")]),  # a margin
    ],
)
@pytest.mark.parametrize("task", ["encoder", "reranking"])
def test_fields_that_users_have(fields: dict[str, Any], expected: list[PairRecord], task: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(fields), encoding="utf-8")
    assert [record for _, record in read_records((path,), Reading(task))] == expected


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"query": "a", "text": "b"}], "missing field 'target'; the fields are source and target, such as anchor and"),
        ([{"query": "a", "text": "b"}], "but there are 'query', 'text'; name the right ones with --target FIELD"),
        ([{"anchor": "a", "query": "b", "positive": "c"}], "'anchor' and 'query' may be the source; the fields"),
        ([{"premise": "a", "hypothesis": "b", "label": 2}], "'label' names a relation of premise and hypothesis"),
        ([{"text1": "a", "text2": "b", "label": "good"}], "label must be a number that is larger for texts that fit"),
        ([{"text1": "a", "text2": 5}], "text2 must be a string, got an integer"),
        ([{"query": "a", "positive": "b", "negative": ["c", 1]}], "negative must be a string, got an integer"),
        ([{"text1": "a", "text2": "b", "score": 1}, {"text1": "a", "text2": "b"}], "records differ: "),
        (
            [{"text1": f"{n}", "text2": "b", "score": 1} for n in range(9)],
            "all scores of a.jsonl are 1; add texts with",
        ),
    ],
)
def test_errors_say_what_to_do(lines: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    with pytest.raises(CorpusError) as caught:
        check_corpus(open_corpus(path, Reading("encoder")))
    assert message in str(caught.value)
    assert "a.jsonl" in str(caught.value)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["a b c d e f"], 300)


def test_examples_keep_all_texts_and_the_score(tokenizer: Tokenizer) -> None:
    records = [P("a", "b c"), P("a", "b", ("c", "d e f")), P("a", "b", score=2.0), P("c", "d", score=9.0)]
    ids = {text: tokenizer.encode(text).ids for text in ("a", "b", "c", "d", "b c", "d e f")}
    examples = encode_similar(tokenizer, records, (1.0, 5.0))
    assert examples[0] == (ids["a"], ids["b c"])
    decoded = [decode_similar(example) for example in examples]
    assert decoded[1] == ([ids["a"], ids["b"], ids["c"], ids["d e f"]], None)
    assert decoded[2] == ([ids["a"], ids["b"]], 0.25)
    assert decoded[3] == ([ids["c"], ids["d"]], 1.0)  # beyond the scores of train


def test_documents_of_a_query_are_its_own_and_others_that_are_wrong() -> None:
    records = [P("a", "x"), P("a", "y"), P("b", "z"), P("c", "a"), P("d", "w", ("v", "w")), P("e", "z")]
    assert [documents_of(records, index, 0)[1:] for index in range(4)] == [[]] * 4
    assert documents_of(records, 0, 9)[0] == ("x", 1.0)
    assert {text for text, score in documents_of(records, 0, 9) if score == 0} == {"z", "w"}
    assert documents_of(records, 4, 0) == [("w", 1.0), ("v", 0.0)]
    assert len(documents_of(records, 2, 3)) == 3 and documents_of(records, 2, 3) == documents_of(records, 2, 3)


def test_examples_of_a_reranker_are_pairs_with_scores(tokenizer: Tokenizer) -> None:
    long = "a b c d e f " * 9
    examples = encode_reranking(tokenizer, [P("a", long, ("b",)), P("b", "c")], None, 12)
    assert [score for _, (score,) in examples] == [SCORE_UNIT, 0, SCORE_UNIT, 0]
    assert len(examples[0][0]) == 12 and list(examples[1][0]) == tokenizer.encode("a", "b").ids
    (scored,) = encode_reranking(tokenizer, [P("a", "b", score=3.0)], (0.0, 4.0), 12)
    assert scored == (tokenizer.encode("a", "b").ids, [750_000])


def test_a_query_is_either_in_train_or_in_dev(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"query": f"q{n // 5}", "document": f"d{n}", "label": n % 2} for n in range(200)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    corpus = open_corpus(path, Reading("reranking"))
    queries = [{record.source for record in split if isinstance(record, PairRecord)} for split in corpus.splits]
    assert not queries[0] & queries[1] and len(queries[1]) == 20
