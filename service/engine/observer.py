"""Interface for measurements of the engine."""

from sightline.service.engine.request import Event, Request


class EngineObserver:
    """Receives measurements on the engine's thread; by default, it does nothing with them.

    Its methods must return quickly.
    """

    def on_encode(self, requests: int, real_tokens: int, padded_tokens: int, seconds: float) -> None:
        """Record a successful encoder call; `seconds` is the time in the runner."""

    def on_step(self, rows: int, seconds: float) -> None:
        """Record a successful decoder step; `seconds` is the time in the runner."""

    def on_prefix_query(self, tokens: int, cached_tokens: int) -> None:
        """Record a prompt that was computed with the prefix cache."""

    def on_finish(self, request: Request, event: Event) -> None:
        """Record the final event of a request."""
