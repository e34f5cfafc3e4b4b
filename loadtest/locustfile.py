"""Mixed load for Locust: `locust -f loadtest/locustfile.py`, with a web page or with `--headless`.

Each user sends its next request after the response to the last one. Use it if you already work with
Locust; `sightline load` measures more precisely and uses less processor time. A rejection
(429 or 503) counts as a failure.
"""

import random
from pathlib import Path

from locust import FastHttpUser, task

SENTENCES = Path(__file__).with_name("sentences.txt")


class TranslationUser(FastHttpUser):
    """User who mostly translates."""

    host = "http://127.0.0.1:8000"
    sentences = tuple(filter(str.strip, SENTENCES.read_text(encoding="utf-8").split("\n")))

    @task(6)
    def translate(self) -> None:
        self.client.post("/v1/generate", json={"inputs": self._sentence()})

    @task(2)
    def translate_streamed(self) -> None:
        body = {"inputs": self._sentence(), "stream": True}
        with self.client.post("/v1/generate", json=body, name="/v1/generate (stream)", catch_response=True) as response:
            if response.status_code == 200 and not response.text.endswith("data: [DONE]\n\n"):
                response.failure("Stream ended without data: [DONE].")

    @task
    def explain(self) -> None:
        self.client.post("/v1/attention", json={"inputs": self._sentence(), "reduce": "mean"})

    @task
    def encode(self) -> None:
        self.client.post("/v1/encode", json={"inputs": self._sentence()})

    def _sentence(self) -> str:
        return random.choice(self.sentences)  # noqa: S311 - a load, not a secret
