"""Lexical shortlists of Firefox's translation models: `lex.50.50.ende.s2t.bin`.

A shortlist restricts the target vocabulary of a sentence to frequent tokens and to likely
translations of its source tokens. Marian uses it to make the projection to the vocabulary cheaper.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sightline.export.import_errors import ImportFailedError

MAGIC = 0xF11A48D5013417F5
HEADER_WORDS = 6
MAX_BEST = 1000  # largest accepted number of translations of a token; Mozilla's files have 50


@dataclass(frozen=True, eq=False)
class Shortlist:
    """Candidate target tokens of each source token."""

    num_frequent: int  # the first ids of the vocabulary, which are always candidates
    num_best: int  # largest number of translations of a source token, as the file states
    offsets: NDArray[np.int64]  # (V + 1,), range in `targets` of each source token
    targets: NDArray[np.int64]  # target ids, those of one source token after another
    target_size: int  # size of the target vocabulary
    # True if source and target have one vocabulary. The source tokens are candidates then, for
    # names and numbers.
    is_shared: bool

    def translations(self, source_id: int) -> NDArray[np.int64]:
        """Return the translations of one source token."""
        return self.targets[self.offsets[source_id] : self.offsets[source_id + 1]]

    def candidates(self, source_ids: Iterable[int]) -> NDArray[np.int64]:
        """Return the candidates of a sentence, which has an end token, in ascending order.

        Marian takes the candidates of all sentences of a batch, and adds up to seven more tokens so
        that their number is a multiple of eight. The start token of the decoder, which the file
        does not contain, adds no candidates.
        """
        is_candidate = np.zeros(self.target_size, bool)
        is_candidate[: self.num_frequent] = True
        for id_ in set(source_ids):
            if id_ < len(self.offsets) - 1:
                if self.is_shared:
                    is_candidate[id_] = True
                is_candidate[self.translations(id_)] = True
        return np.flatnonzero(is_candidate)

    def table(self) -> NDArray[np.int32]:
        """Return the candidates that each source token adds as a matrix (V + 1, K).

        The last row is that of the start token. Unused columns contain 0, the id of the end token,
        which is always a candidate.
        """
        counts = np.diff(self.offsets)
        longest = int(counts.max(initial=0))
        table = np.zeros((len(counts) + 1, longest + 1), np.int32)
        rows = np.repeat(np.arange(len(counts)), counts)
        table[rows, np.arange(len(self.targets)) - self.offsets[rows]] = self.targets
        if self.is_shared:
            table[:-1, longest] = np.arange(len(counts))
        return table


def parse_shortlist(data: bytes, file: str, *, source_size: int, target_size: int, is_shared: bool) -> Shortlist:
    """Parse a binary shortlist; `file` is its name in errors.

    The file has six uint64 (a constant, a checksum, the numbers of frequent and of best tokens, the
    lengths of the two arrays), the offsets as uint64 and the target ids as uint32.
    """

    def error(reason: str) -> ImportFailedError:
        return ImportFailedError(
            f"{file} is not a shortlist of this model: {reason}; download it again, or import without --shortlist"
        )

    if len(data) < 8 * HEADER_WORDS:
        raise error(f"it must have at least {8 * HEADER_WORDS} bytes, got {len(data)}")
    header = [int(value) for value in np.frombuffer(data, "<u8", HEADER_WORDS)]
    magic, checksum, num_frequent, num_best, num_offsets, num_targets = header
    if magic != MAGIC:
        raise error(f"its first 8 bytes must be {MAGIC:#x}, got {magic:#x}")
    needed = 8 * HEADER_WORDS + 8 * num_offsets + 4 * num_targets
    if len(data) != needed:
        raise error(f"it must have {needed} bytes for {num_offsets} offsets and {num_targets} ids, got {len(data)}")
    if num_offsets != source_size + 1:
        raise error(f"it must have {source_size + 1} offsets for the source vocabulary, got {num_offsets}")
    if _checksum(data[16:]) != checksum:
        raise error("its checksum does not match")
    if num_frequent < 1:  # otherwise a translation could not end
        raise error("it must have at least 1 frequent token, the end token, got 0")
    offsets = np.frombuffer(data, "<u8", num_offsets, 8 * HEADER_WORDS)
    targets = np.frombuffer(data, "<u4", num_targets, 8 * (HEADER_WORDS + num_offsets)).astype(np.int64)
    if offsets[0] != 0 or offsets[-1] != num_targets or (offsets[1:] < offsets[:-1]).any():
        raise error(f"its offsets must ascend from 0 to {num_targets}")
    most, limit = int(np.diff(offsets).max(initial=0)), min(num_best, MAX_BEST)
    if most > limit:
        raise error(f"a source token must have at most {limit} translations, got {most}")
    if num_targets and targets.max() >= target_size:
        raise error(f"its ids must be less than the {target_size} of the target vocabulary, got {targets.max()}")
    return Shortlist(num_frequent, num_best, offsets.astype(np.int64), targets, target_size, is_shared)


def _checksum(data: bytes) -> int:
    """Return the hash of `hashMem` in Marian over 64-bit words; an incomplete word is ignored."""
    seed = 0
    for word in np.frombuffer(data, "<u8", len(data) // 8).tolist():
        seed ^= (word + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & 0xFFFFFFFFFFFFFFFF
    return seed
