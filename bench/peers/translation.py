"""Translation of texts as both peers do it: Sightline's tokenizer, then CTranslate2, then
detokenization.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ctranslate2

from model.data.tokenizer import decode_ids, read_tokenizer

MAX_NEW_TOKENS = 128
PATH = "/v1/generate"


class Translation:
    """A loaded model. `translate` is thread-safe."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._tokenizer = read_tokenizer(arguments.tokenizer)
        self._num_beams: int = arguments.num_beams
        self._translator = ctranslate2.Translator(
            str(arguments.model),
            device="cpu",
            compute_type=arguments.compute_type,
            inter_threads=arguments.workers,
            intra_threads=arguments.threads // arguments.workers,
        )

    def tokenize(self, text: str) -> list[str]:
        tokens: list[str] = self._tokenizer.encode(text).tokens
        return tokens

    def translate(self, sources: Sequence[list[str]]) -> list[dict[str, Any]]:
        """Decode tokenized texts as one batch and return their responses."""
        results = self._translator.translate_batch(
            list(sources),
            beam_size=self._num_beams,
            max_decoding_length=MAX_NEW_TOKENS,
            return_end_token=True,
            return_scores=True,
        )
        return [self._response(len(source), result) for source, result in zip(sources, results, strict=True)]

    def _response(self, input_tokens: int, result: Any) -> dict[str, Any]:
        names = result.hypotheses[0]
        ids: list[int] = [self._tokenizer.token_to_id(name) for name in names]  # type: ignore[misc]
        output = {
            "text": decode_ids(self._tokenizer, ids),
            "tokens": [{"id": id_, "text": name} for id_, name in zip(ids, names, strict=True)],
            "score": result.scores[0],
        }
        return {"outputs": [output], "usage": {"input_tokens": input_tokens, "output_tokens": len(ids)}}


def peer_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="folder of a CTranslate2 model")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--num-beams", type=int, required=True)
    parser.add_argument("--compute-type", required=True)
    parser.add_argument("--threads", type=int, required=True, help="in all")
    parser.add_argument("--workers", type=int, default=1, help="number of CTranslate2 workers, which share the threads")
    parser.add_argument("--port", type=int, required=True)
    return parser
