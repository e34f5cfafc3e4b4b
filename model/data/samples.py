"""Sample data for each task, in samples.zip. They were made by rules, and nothing is taken from
third-party texts.

- translation: English sentences about trips and their German translations, in which verbs,
  articles and adjectives agree. Sentences of test combine adjectives and places that never occur
  together in train and dev.
- classification: messages to a shop with five labels. They mention other topics in passing, have
  typing errors, and some could have two labels, so that no classifier is always right. Every fourth
  sentence that decides a label is only in dev and test.
- language-model: dialogues of small talk. The last messages of test are never last in train.
- encoder: the English sentences of the translations, each with one that has synonyms for some of
  its words. reranking has a negative, too.
- tagging: sentences with names of persons, places and organisations. Those of test have names that
  train and dev do not have.
"""

from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile

from sightline.base.errors import UsageError
from sightline.model.data.records import TaskName

EXAMPLES: Mapping[TaskName, int] = {
    "translation": 5_000,
    "classification": 1_000,
    "language-model": 4_000,
    "encoder": 1_000,
    "reranking": 500,
    "tagging": 1_000,
}
MIN_EXAMPLES = 10
HELD_OUT_SHARE, MIN_HELD_OUT = 0.2, 20  # of the number of examples in train; records of dev and of test


def write_sample(task: TaskName, folder: Path, num_examples: int | None = None) -> dict[str, int]:
    """Write the records of a task to a folder as `train.jsonl`, `dev.jsonl` and `test.jsonl`, and
    return their numbers. Raises `UsageError` if the folder has files, or there are fewer examples.
    """
    number = EXAMPLES[task] if num_examples is None else num_examples
    if not MIN_EXAMPLES <= number <= EXAMPLES[task]:
        raise UsageError(
            f"the number of examples for {task} must be between {MIN_EXAMPLES} and {EXAMPLES[task]:,}, got {number}"
        )
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} has files, which could be yours; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    written = dict[str, int]()
    with ZipFile(Path(__file__).with_suffix(".zip")) as samples:
        for name in ("train", "dev", "test"):
            limit = number if name == "train" else max(round(HELD_OUT_SHARE * number), MIN_HELD_OUT)
            lines = samples.read(f"{task}/{name}.jsonl").splitlines(keepends=True)[:limit]
            (folder / f"{name}.jsonl").write_bytes(b"".join(lines))
            written[name] = len(lines)
    return written
