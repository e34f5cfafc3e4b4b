from dataclasses import replace
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, models

from sightline.base.errors import UsageError
from sightline.model.data import tokenizer_training
from sightline.model.data.chat_template import CHAT_TOKENS, IM_START, dialogue_encoder
from sightline.model.data.encoding import encode
from sightline.model.data.examples import MemoryExamples
from sightline.model.data.records import DialogueMessage, DialogueRecord, LabelledRecord, PairRecord, Record, TextRecord
from sightline.model.data.tokenizer_training import (
    adapt_tokenizer,
    decode_ids,
    encode_lines,
    special_id,
    token_fields,
    train_tokenizer,
)


@pytest.fixture(scope="module")
def chat_tokenizer(sentences: list[str]) -> Tokenizer:
    return train_tokenizer(sentences[:100], 500, CHAT_TOKENS)


def dialogue(num_exchanges: int, system: str | None = None) -> DialogueRecord:
    messages = [] if system is None else [DialogueMessage("system", system)]
    for number in range(num_exchanges):
        messages += [DialogueMessage("user", f"Question {number}?"), DialogueMessage("assistant", f"Answer {number}.")]
    return DialogueRecord(tuple(messages))


def test_pairs_have_the_ids_of_both_sides_with_the_end_token(tokenizer: Tokenizer) -> None:
    records = [PairRecord("A dog.", "Ein Hund."), PairRecord("A cat sleeps.", "Eine Katze schläft.")]
    expected = [(encode_lines(tokenizer, [one.source])[0], encode_lines(tokenizer, [one.target])[0]) for one in records]
    assert encode(tokenizer, records) == expected
    assert all(ids[-1] == 2 for example in expected for ids in example)


def test_labelled_texts_have_the_indices_of_their_labels_in_order(tokenizer: Tokenizer) -> None:
    records = [LabelledRecord("A dog.", ("b",)), LabelledRecord("A cat.", ("c", "a")), LabelledRecord("Rain.", ())]
    examples = encode(tokenizer, records, labels=("a", "b", "c"))
    assert [labels for _, labels in examples] == [[1], [0, 2], []]
    assert [ids for ids, _ in examples] == encode_lines(tokenizer, [record.text for record in records])


def test_few_characters_are_encoded_at_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoding takes much more memory than its ids."""
    batches = list[list[str]]()

    class Recorded:
        def encode_batch_fast(self, lines: list[str]) -> Any:
            batches.append(lines)
            return tokenizer.encode_batch(lines)

    lines = ["A dog.", "", "Two cats sleep in the sun.", "Rain.", "A", "Snow."]
    monkeypatch.setattr(tokenizer_training, "BATCH_CHARACTERS", 10)
    given = encode_lines(cast(Tokenizer, Recorded()), lines)
    assert given == [encoding.ids for encoding in tokenizer.encode_batch(lines)]
    assert batches == [["A dog.", ""], ["Two cats sleep in the sun.", "Rain.", "A"], ["Snow."]]


def test_no_records_give_no_examples(tokenizer: Tokenizer) -> None:
    assert encode(tokenizer, []) == []


def test_a_text_has_a_start_and_an_end_token_and_loss_on_all_tokens_but_the_first(tokenizer: Tokenizer) -> None:
    ((ids, is_counted),) = encode(tokenizer, [TextRecord("A dog sleeps.")])
    assert ids == [1, *encode_lines(tokenizer, ["A dog sleeps."])[0]]
    assert is_counted == [0] + [1] * (len(ids) - 1)


@pytest.mark.parametrize("limit", [2, 3, 7, 30])
def test_windows_of_a_text_predict_each_token_once(tokenizer: Tokenizer, limit: int) -> None:
    text = "Two girls are playing with a dog on the beach."
    ids = [1, *encode_lines(tokenizer, [text])[0]]
    predicted = list[int]()
    windows = encode(tokenizer, [TextRecord(text)], max_length_tokens=limit)
    for index, (window, is_counted) in enumerate(windows):
        assert len(window) == len(is_counted) <= limit
        assert index == len(windows) - 1 or len(window) == limit
        assert window[0] == (predicted[-1] if predicted else 1)
        predicted += [id_ for id_, counted in zip(window, is_counted, strict=True) if counted]
    assert predicted == ids[1:]


def test_a_text_that_fits_exactly_is_one_window(tokenizer: Tokenizer) -> None:
    length = len(encode(tokenizer, [TextRecord("A dog sleeps.")])[0][0])
    assert len(encode(tokenizer, [TextRecord("A dog sleeps.")], max_length_tokens=length)) == 1
    assert len(encode(tokenizer, [TextRecord("A dog sleeps.")], max_length_tokens=length - 1)) == 2


def test_texts_and_dialogues_keep_their_order(chat_tokenizer: Tokenizer) -> None:
    records: list[Record] = [dialogue(1), TextRecord("A dog."), TextRecord("A cat."), dialogue(2)]
    alone = [encode(chat_tokenizer, [record])[0] for record in records]
    assert encode(chat_tokenizer, records) == alone


def test_only_replies_and_their_end_have_loss(chat_tokenizer: Tokenizer) -> None:
    ((ids, is_counted),) = encode(chat_tokenizer, [dialogue(2, "Be  brief.")])
    counted = [id_ for id_, counted in zip(ids, is_counted, strict=True) if counted]
    decoded = chat_tokenizer.decode(counted, skip_special_tokens=False)
    assert decoded == "Answer 0.<|im_end|>Answer 1.<|im_end|>"
    assert ids[-1] == chat_tokenizer.token_to_id("<|im_end|>")


def test_a_long_dialogue_is_split_between_exchanges(chat_tokenizer: Tokenizer) -> None:
    record = dialogue(5, "Be brief.")
    ((ids, _),) = encode(chat_tokenizer, [record])
    length = len(encode(chat_tokenizer, [dialogue(2, "Be brief.")])[0][0])
    windows = encode(chat_tokenizer, [record], max_length_tokens=length)
    system, *messages = record.messages
    expected = [DialogueRecord((system, *messages[start : start + 4])) for start in (0, 4, 8)]
    assert windows == encode(chat_tokenizer, expected)
    assert encode(chat_tokenizer, [record], max_length_tokens=len(ids)) == encode(chat_tokenizer, [record])
    assert max(MemoryExamples(windows).lengths.flatten()) == length


def test_an_exchange_that_is_too_long_stays_whole(chat_tokenizer: Tokenizer) -> None:
    windows = encode(chat_tokenizer, [dialogue(2)], max_length_tokens=5)
    assert len(windows) == 2 and all(len(ids) > 5 for ids, _ in windows)


def test_messages_after_the_last_reply_are_left_out(chat_tokenizer: Tokenizer) -> None:
    record = dialogue(1)
    longer = DialogueRecord((*record.messages, DialogueMessage("user", "And?")))
    assert encode(chat_tokenizer, [longer]) == encode(chat_tokenizer, [record])
    assert encode(chat_tokenizer, [DialogueRecord((DialogueMessage("user", "And?"),))]) == []


def test_only_replies_with_loss_are_counted_and_windows_without_any_are_left_out(chat_tokenizer: Tokenizer) -> None:
    (question, answer, *rest), systems = dialogue(2).messages, dialogue(1, "Be brief.").messages[:1] * 2
    record = DialogueRecord((*systems, question, replace(answer, has_loss=False), *rest))
    ((ids, is_counted),) = encode(chat_tokenizer, [record])
    counted = [id_ for id_, is_marked in zip(ids, is_counted, strict=True) if is_marked]
    assert decode_ids(chat_tokenizer, counted) == "Answer 1."
    last = encode(chat_tokenizer, [DialogueRecord((*systems, *rest))])
    assert encode(chat_tokenizer, [record], max_length_tokens=len(ids) - 1) == last


def test_tools_need_the_template_of_a_checkpoint(chat_tokenizer: Tokenizer) -> None:
    tools = DialogueRecord(dialogue(1).messages, ({"type": "function", "function": {"name": "f"}},))
    function = {"id": "call00000", "type": "function", "function": {"name": "find", "arguments": {}}}
    calls = DialogueRecord((DialogueMessage("user", "x"), DialogueMessage("assistant", "", tool_calls=(function,))))
    for record in (tools, calls):
        with pytest.raises(UsageError, match="--from"):
            encode(chat_tokenizer, [record])


def test_a_prompt_ends_with_the_start_of_a_reply(chat_tokenizer: Tokenizer) -> None:
    ids = dialogue_encoder(None, chat_tokenizer).prompt(DialogueRecord((DialogueMessage("user", "And?"),)))
    start = len(ids) - ids[::-1].index(special_id(chat_tokenizer, IM_START))
    assert decode_ids(chat_tokenizer, ids[start:]) == "assistant\n"


def word_level(names: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({name: id_ for id_, name in enumerate([*names, "a", "b"])}, "[UNK]"))
    tokenizer.add_special_tokens(names)
    tokenizer.enable_padding()
    tokenizer.enable_truncation(2)
    return tokenizer


def test_a_tokenizer_of_others_keeps_its_ids() -> None:
    given = word_level(["[UNK]", "[CLS]", "[SEP]", "[PAD]"])
    tokenizer = adapt_tokenizer(given, "translation")
    assert token_fields(tokenizer) == {"vocab_size": 6, "pad_id": 3, "bos_id": 1, "eos_id": 2}
    assert [tokenizer.id_to_token(id_) for id_ in range(6)] == ["[UNK]", "<s>", "</s>", "<pad>", "a", "b"]
    assert encode_lines(tokenizer, ["a", "b"]) == [[4, 2], [5, 2]]
    assert given.id_to_token(1) == "[CLS]"


def test_missing_special_tokens_are_named() -> None:
    message = (
        r"cannot be used for the task language-model: it lacks the special tokens </s> or \[SEP\] or .*; <\|im_end\|>; "
        "add them to it as special tokens, or omit --tokenizer"
    )
    with pytest.raises(UsageError, match=message):
        adapt_tokenizer(word_level(["[UNK]", "<pad>", "<s>", "<|im_start|>"]), "language-model", CHAT_TOKENS)


def test_a_name_that_is_not_a_special_token_does_not_count() -> None:
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "[UNK]": 3}, "[UNK]"))
    with pytest.raises(UsageError, match="lacks the special tokens <pad> or"):
        adapt_tokenizer(tokenizer, "classification")


def test_ids_with_gaps_are_rejected() -> None:
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "[UNK]": 7}, "[UNK]"))
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    with pytest.raises(UsageError, match="it has 4 tokens, but ids up to 7; number them from 0 on"):
        adapt_tokenizer(tokenizer, "classification")


def test_a_unigram_tokenizer_keeps_its_ids() -> None:
    pieces = [("<unk>", 0.0), ("<bos>", 0.0), ("<eos>", 0.0), ("[PAD]", 0.0), ("a", -1.0), ("b", -2.0)]
    given = Tokenizer(models.Unigram(pieces, 0))
    given.add_special_tokens(["<unk>", "<bos>", "<eos>", "[PAD]"])
    tokenizer = adapt_tokenizer(given, "encoder")
    assert token_fields(tokenizer) == {"vocab_size": 6, "pad_id": 3, "bos_id": 1, "eos_id": 2}
    assert encode_lines(tokenizer, ["ab"]) == [[4, 5, 2]]


def test_a_tokenizer_without_a_chat_format_encodes_no_dialogue(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"the tokenizer lacks the special token <\|im_start\|>"):
        encode(tokenizer, [dialogue(1)])
