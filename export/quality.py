"""BLEU of bundles in ONNX Runtime on parallel text: what a bundle that is meant to differ is judged by."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tqdm import tqdm

from export.sessions import Sessions, onnx_steps
from export.verify import VerificationError
from model.data.tokenizer import decode_ids, encode_lines
from model.decoding.reference import beam
from model.evaluation.bleu import MAX_NEW_TOKENS, EvaluationSet, Score, score
from service.bundle import Bleu, Manifest, Quality

NUM_BEAMS = (1, 5)  # greedy, and what papers report
MAX_LOSS = 0.3  # BLEU; two training runs differ by as much
MIN_PAIRS = 1000  # of fewer, chance alone moves the difference of two BLEUs by more than `MAX_LOSS` too often


@dataclass(frozen=True)
class ParallelText:
    """Sentences with translations, and where they are from."""

    split: str
    target: str  # the translations' language, two letters
    pairs: EvaluationSet


def compare(float32: Sessions, quantized: Sessions, tokenizer: Tokenizer, text: ParallelText) -> Quality:
    """BLEU of both with each of `NUM_BEAMS`.

    Raises:
        ValueError: a sentence is too long for the model.
    """
    sources = encode_sources(float32.manifest, tokenizer, text.pairs.sources)
    bleu, signature = [], ""
    for num_beams in NUM_BEAMS:
        before, after = (
            _bleu(_translate(sessions, tokenizer, sources, num_beams), text) for sessions in (float32, quantized)
        )
        bleu.append(Bleu(num_beams=num_beams, float32=before.value, quantized=after.value))
        signature = after.signature
    return Quality(split=text.split, sentences=len(sources), signature=signature, bleu=tuple(bleu))


def refuse_loss(quality: Quality) -> None:
    """Raises VerificationError where a BLEU lies more than `MAX_LOSS` below that of float32."""
    for bleu in quality.bleu:
        if bleu.float32 - bleu.quantized > MAX_LOSS:
            raise VerificationError(
                f"with num_beams {bleu.num_beams}, BLEU falls from {bleu.float32:.2f} to {bleu.quantized:.2f}: "
                f"{MAX_LOSS} are allowed; try smaller blocks or more bits"
            )


def encode_sources(manifest: Manifest, tokenizer: Tokenizer, sentences: Sequence[str]) -> list[list[int]]:
    """Ids, as the model reads them. Raises ValueError where a sentence is too long for the model."""
    limit = manifest.limits.max_source_tokens
    sources = encode_lines(tokenizer, sentences)
    for number, source in enumerate(sources, start=1):
        if len(source) > limit:
            raise ValueError(f"sentence {number} has {len(source)} tokens, the model reads {limit}")
    return sources


def _translate(sessions: Sessions, tokenizer: Tokenizer, sources: Sequence[Sequence[int]], num_beams: int) -> list[str]:
    manifest, outputs = sessions.manifest, []
    for source in tqdm(sources, desc=f"{manifest.dtype}, num_beams {num_beams}", unit="sentence", leave=False):
        steps, max_new_tokens = onnx_steps(sessions, source), min(MAX_NEW_TOKENS, manifest.room(len(source)))
        (best,) = beam(steps, manifest.beginning(source)[-1], manifest.tokens.end_id, max_new_tokens, num_beams)
        outputs.append(decode_ids(tokenizer, best.ids))
    return outputs


def _bleu(outputs: Sequence[str], text: ParallelText) -> Score:
    """Cased, sacreBLEU's own tokenisation."""
    cased = EvaluationSet(text.pairs.sources, text.pairs.references, tokenised_references=None)
    return score(outputs, cased, text.target).bleu
