"""A mixed load for locust, with a page of its own: `locust -f loadtest/locustfile.py`, or `--headless`.

Each user sends its next request when the answer to the last one is there. `python -m loadtest` measures finer and costs
less; this is for whoever has locust in use. A refusal (503) counts as a failure.
"""

import random
from pathlib import Path

from locust import FastHttpUser, task

SENTENCES = Path(__file__).parents[1] / "tests" / "data" / "sentences.txt"


class Client(FastHttpUser):
    """Somebody who translates, mostly."""

    host = "http://127.0.0.1:8000"
    sentences = SENTENCES.read_text(encoding="utf-8").splitlines()

    @task(6)
    def translate(self) -> None:
        self.client.post("/v1/generate", json={"inputs": self._sentence()})

    @task(2)
    def translate_streamed(self) -> None:
        body = {"inputs": self._sentence(), "stream": True}
        with self.client.post("/v1/generate", json=body, name="/v1/generate (stream)", catch_response=True) as answer:
            if answer.status_code == 200 and not answer.text.endswith("data: [DONE]\n\n"):
                answer.failure("The stream has no end.")

    @task
    def explain(self) -> None:
        self.client.post("/v1/attention", json={"input": self._sentence(), "reduce": "mean"})

    @task
    def encode(self) -> None:
        self.client.post("/v1/encode", json={"inputs": self._sentence()})

    def _sentence(self) -> str:
        return random.choice(self.sentences)  # noqa: S311 - a load, not a secret
