"""What the engine tells whoever counts and measures. Called on the engine's thread: be quick."""

from typing import Protocol

from service.engine.request import Event, Request


class EngineObserver(Protocol):
    def on_encode(self, requests: int, real_tokens: int, padded_tokens: int, seconds: float) -> None:
        """An encoder call ended well."""
        ...

    def on_step(self, rows: int, seconds: float) -> None:
        """A decoder step over `rows` rows ended well; `seconds` is the runner's part of it."""
        ...

    def on_finish(self, request: Request, event: Event) -> None:
        """A request ended with its one final event."""
        ...


class NullObserver:
    """Looks away."""

    def on_encode(self, requests: int, real_tokens: int, padded_tokens: int, seconds: float) -> None: ...

    def on_step(self, rows: int, seconds: float) -> None: ...

    def on_finish(self, request: Request, event: Event) -> None: ...
