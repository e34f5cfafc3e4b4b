"""Lexical shortlists of Firefox's translation models: `lex.50.50.ende.s2t.bin`."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sightline.base.bundle import TOP_TOKENS
from sightline.export.import_errors import ImportFailedError

MAGIC = 0xF11A48D5013417F5
HEADER_WORDS = 6
MAX_BEST = 1000  # largest accepted number of translations of a token; Mozilla's files have 50


@dataclass(frozen=True, eq=False)
class Candidates:
    """Target tokens that are likely in all translations, and those that each source token adds."""

    frequent: NDArray[np.int64]  # (F,), at least `TOP_TOKENS`, with the end token
    by_source: NDArray[np.int64]  # (source vocabulary, K); a token can occur more than once


def parse_shortlist(data: bytes, file: str, source_size: int, target_size: int, is_shared: bool) -> Candidates:
    """Parse a binary shortlist; `file` is its name in errors.

    With a vocabulary that source and target share (`is_shared`), source tokens are candidates too,
    for names and numbers. Marian takes the candidates of all sentences of a batch together. The
    last source token is the start token, which has no translations in the file.

    The file has six uint64 (a constant, a checksum, the numbers of frequent and of best tokens, the
    lengths of the two arrays), the offsets as uint64 and the target ids as uint32.
    """

    def error(reason: str) -> ImportFailedError:
        return ImportFailedError(
            f"{file} is not a shortlist of this model: {reason}; download it again, or import with --no-shortlist"
        )

    if len(data) < 8 * HEADER_WORDS:
        raise error(f"it must have at least {8 * HEADER_WORDS} bytes, got {len(data)}")
    header = [int(value) for value in np.frombuffer(data, "<u8", HEADER_WORDS)]
    magic, checksum, num_frequent, _, num_offsets, num_targets = header
    if magic != MAGIC:
        raise error(f"its first 8 bytes must be {MAGIC:#x}, got {magic:#x}")
    needed = 8 * HEADER_WORDS + 8 * num_offsets + 4 * num_targets
    if len(data) != needed:
        raise error(f"it must have {needed} bytes for {num_offsets} offsets and {num_targets} ids, got {len(data)}")
    if num_offsets != source_size + 1:
        raise error(f"it must have {source_size + 1} offsets for the source vocabulary, got {num_offsets}")
    if _checksum(data[16:]) != checksum:
        raise error("its checksum does not match")
    if num_frequent < min(TOP_TOKENS, target_size):
        raise error(f"it must have at least {TOP_TOKENS} frequent tokens, got {num_frequent}")
    offsets = np.frombuffer(data, "<u8", num_offsets, 8 * HEADER_WORDS).astype(np.int64)
    targets = np.frombuffer(data, "<u4", num_targets, 8 * (HEADER_WORDS + num_offsets)).astype(np.int64)
    if offsets[0] != 0 or offsets[-1] != num_targets or (offsets[1:] < offsets[:-1]).any():
        raise error(f"its offsets must ascend from 0 to {num_targets}")
    most = int(np.diff(offsets).max(initial=0))
    if most > MAX_BEST:
        raise error(f"a source token must have at most {MAX_BEST} translations, got {most}")
    if num_targets and targets.max() >= target_size:
        raise error(f"its ids must be less than the {target_size} of the target vocabulary, got {targets.max()}")
    by_source = np.zeros((source_size + 1, most + is_shared), np.int64)  # 0 is the end token
    rows = np.repeat(np.arange(source_size), np.diff(offsets))
    by_source[rows, np.arange(num_targets) - offsets[rows]] = targets
    if is_shared:
        by_source[:source_size, most] = np.arange(source_size)
    return Candidates(np.arange(min(num_frequent, target_size)), by_source)


def _checksum(data: bytes) -> int:
    """Return the hash of `hashMem` in Marian over 64-bit words; an incomplete word is ignored."""
    seed = 0
    for word in np.frombuffer(data, "<u8", len(data) // 8).tolist():
        seed ^= (word + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & 0xFFFFFFFFFFFFFFFF
    return seed
