"""The generated messages: sizes, labels, and parts without common texts."""

from collections import Counter

from sightline.model.data.customer_messages import LABELS, draw_messages

SIZES = {"train": 200, "dev": 40, "test": 40}  # messages of each label


def test_each_label_has_its_messages_and_no_text_is_repeated() -> None:
    parts = draw_messages(1, SIZES)
    assert parts == draw_messages(1, SIZES) != draw_messages(2, SIZES)
    for part, size in SIZES.items():
        assert Counter(label for _, label in parts[part]) == dict.fromkeys(LABELS, size)
    texts = [text for rows in parts.values() for text, _ in rows]
    assert len(set(texts)) == len(texts) and not any("{" in text for text in texts)
