"""Translation models of Firefox: folders with a Marian model, vocabularies and a shortlist."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from export.errors import ImportFailedError

MODEL = re.compile(r"model\.([a-z]+)\.intgemm(8|\.alphas)\.bin(\.gz)?")


@dataclass(frozen=True)
class FirefoxFiles:
    """Files of a model; each may end in `.gz`."""

    languages: str  # source and target without a separator, such as "ende"
    model: Path
    source_vocabulary: Path
    target_vocabulary: Path  # the same file if both languages share a vocabulary
    shortlist: Path | None

    @property
    def all(self) -> tuple[Path, ...]:
        """Files that an import reads."""
        return self.model, *dict.fromkeys((self.source_vocabulary, self.target_vocabulary))

    @property
    def source_and_target(self) -> tuple[str, str] | None:
        """Codes of the languages, or None if it is not clear where the first one ends."""
        middle = len(self.languages) // 2
        if len(self.languages) not in (4, 6):
            return None
        return self.languages[:middle], self.languages[middle:]


def is_firefox_folder(folder: Path) -> bool:
    """Return True if a file has the name of a Firefox model."""
    return any(MODEL.fullmatch(path.name) for path in folder.iterdir())


def find_firefox_files(folder: Path) -> FirefoxFiles:
    """Find the files of a model by the names under which Mozilla publishes them.

    A file is preferred to the same file with `.gz`, and `.alphas.bin` to `.intgemm8.bin`.

    Raises:
        ImportFailedError: a file is missing, or there are models of several language pairs.
    """
    matches = [match for path in sorted(folder.iterdir()) if (match := MODEL.fullmatch(path.name))]
    pairs = sorted({match[1] for match in matches})
    if len(pairs) != 1:
        found = f"models of {len(pairs)} language pairs: {', '.join(pairs)}" if pairs else "none"
        raise ImportFailedError(
            f"{folder} must have one model.XXYY.intgemm.alphas.bin or .intgemm8.bin, it has {found}"
        )
    pair = pairs[0]
    model = _first(folder, [f"model.{pair}.intgemm.alphas.bin", f"model.{pair}.intgemm8.bin"])
    shared = _first(folder, [f"vocab.{pair}.spm"])
    source = shared or _first(folder, [f"srcvocab.{pair}.spm"])
    target = shared or _first(folder, [f"trgvocab.{pair}.spm"])
    assert model is not None
    if source is None or target is None:
        raise ImportFailedError(
            f"{folder} has no vocab.{pair}.spm, and not both srcvocab.{pair}.spm and trgvocab.{pair}.spm; download "
            "them to the folder"
        )
    return FirefoxFiles(pair, model, source, target, _first(folder, [f"lex.50.50.{pair}.s2t.bin"]))


def _first(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the first of some files that exists, with or without `.gz`."""
    paths = [folder / f"{name}{suffix}" for name in names for suffix in ("", ".gz")]
    return next((path for path in paths if path.is_file()), None)
