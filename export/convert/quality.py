"""Comparison of a converted bundle with its float32 bundle by BLEU on parallel text.

PyTorch and sacreBLEU are imported when BLEU is computed. All other conversions need neither.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from sightline.base.bundle import Bleu, Quality
from sightline.export.check.sessions import Sessions, onnx_steps
from sightline.export.import_errors import VerificationError
from sightline.export.options import MAX_LOSS
from sightline.model.data.tokenizer_training import decode_ids, encode_lines

if TYPE_CHECKING:
    from sightline.model.evaluation.bleu import EvaluationSet, Score

NUM_BEAMS = (1, 5)  # greedy decoding, and the usual number in papers


@dataclass(frozen=True)
class ParallelText:
    """Sentences with reference translations, and the name of their split."""

    split: str
    target: str  # code of the target language
    pairs: "EvaluationSet"


def compare(float32: Sessions, quantized: Sessions, tokenizer: Tokenizer, text: ParallelText) -> Quality:
    """Compute the BLEU of both bundles with each of `NUM_BEAMS`."""
    sources = encode_lines(tokenizer, text.pairs.sources)
    bleu, signature = [], ""
    for num_beams in NUM_BEAMS:
        before, after = (
            _bleu(_translate(sessions, tokenizer, sources, num_beams), text) for sessions in (float32, quantized)
        )
        bleu.append(Bleu(num_beams=num_beams, float32=before.value, quantized=after.value))
        signature = after.signature
    return Quality(split=text.split, sentences=len(sources), signature=signature, bleu=tuple(bleu))


def check_loss(quality: Quality) -> None:
    """Check that no BLEU is more than `MAX_LOSS` lower than that of the float32 bundle.

    A BLEU of float32 that is so low that no loss would be too large is an error, too.
    """
    for bleu in quality.bleu:
        if bleu.float32 <= MAX_LOSS:
            raise VerificationError(
                f"with num_beams {bleu.num_beams}, BLEU of the float32 bundle is {bleu.float32:.2f} "
                f"({quality.signature}), which is too low to measure a loss; check that the texts of --source and "
                "--target belong together and are in the languages of the model, or use --texts instead of --data"
            )
        if bleu.float32 - bleu.quantized > MAX_LOSS:
            raise VerificationError(
                f"with num_beams {bleu.num_beams}, BLEU falls from {bleu.float32:.2f} to {bleu.quantized:.2f}, but the "
                f"largest accepted loss is {MAX_LOSS}; try a smaller --block-size or more --bits, or use --force"
            )


def _translate(sessions: Sessions, tokenizer: Tokenizer, sources: Sequence[Sequence[int]], num_beams: int) -> list[str]:
    from tqdm import tqdm

    from sightline.model.decoding import search
    from sightline.model.evaluation.bleu import MAX_NEW_TOKENS

    manifest, outputs = sessions.manifest, []
    for source in tqdm(
        sources, desc=f"{manifest.dtype}, num_beams {num_beams}", unit="sentence", leave=False, disable=None
    ):
        steps, first_id = onnx_steps(sessions, source), manifest.decoder_prompt_ids(source)[-1]
        max_new_tokens = min(MAX_NEW_TOKENS, manifest.max_new_tokens_for(len(source)))
        (best,) = search(steps, 1, first_id, manifest.tokens.end_ids, max_new_tokens, num_beams)
        outputs.append(decode_ids(tokenizer, best))
    return outputs


def _bleu(outputs: Sequence[str], text: ParallelText) -> "Score":
    """Compute cased BLEU with sacreBLEU's tokenization for the target language."""
    from sightline.model.evaluation.bleu import EvaluationSet, score

    cased = EvaluationSet(text.pairs.sources, text.pairs.references, tokenised_references=None)
    return score(outputs, cased, text.target).bleu
