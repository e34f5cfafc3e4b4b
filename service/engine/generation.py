"""What the engine keeps of one request: from its submission, and while it runs in a row."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.bundle import Manifest
from service.engine.attention import MapRecorder
from service.engine.request import Event, FinishReason, Generated, GenerateRequest, Request, Timings, Token
from service.engine.sampling import TokenPicker, make_picker, step_outputs

Sink = Callable[[Event], Any]


@dataclass(eq=False)
class Handle:
    """One submitted request, and where it stands. Times are seconds on the engine's clock."""

    id: int
    request: Request
    sink: Sink
    submitted: float
    encode_started: float = 0.0
    encode_ended: float = 0.0
    has_ended: bool = False

    def timings(self, now: float) -> Timings:
        """Of a request that ends now with a result."""
        return Timings(
            queue=1000 * (self.encode_started - self.submitted),
            encode=1000 * (self.encode_ended - self.encode_started),
            decode=1000 * (now - self.encode_ended),
        )


@dataclass(eq=False)
class Generation:
    """One running row: the tokens so far and how the next are picked."""

    handle: Handle
    request: GenerateRequest
    max_new_tokens: int
    end_id: int
    picker: TokenPicker | None
    maps: MapRecorder
    outputs: frozenset[str]  # which of the step's outputs it needs
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def take(self, token_id: int, logprob: float) -> FinishReason | None:
        """Take the next token; the reason to end where it is the last."""
        self.ids.append(token_id)
        self.logprobs.append(logprob)
        if self.request.forced_target is not None:
            return "forced" if len(self.ids) == len(self.request.forced_target) else None
        if token_id == self.end_id:
            return "eos"
        if self.request.stop is not None and self.request.stop.update(token_id):
            return "stop"
        return "length" if len(self.ids) == self.max_new_tokens else None

    @property
    def last_token(self) -> Token:
        return Token(self.ids[-1], self.logprobs[-1])

    def result(self, reason: FinishReason, now: float) -> Generated:
        return Generated(
            tokens=tuple(map(Token, self.ids, self.logprobs)),
            finish_reason=reason,
            timings=self.handle.timings(now),
            attention=self.maps.result(),
        )


def start_generation(
    handle: Handle, request: GenerateRequest, manifest: Manifest, encoder_map: NDArray[np.float32] | None
) -> Generation:
    """The beginning of a generation; `encoder_map` is (L, H, S, S) where the request wants it."""
    picker = make_picker(request, manifest.tokens.end_id)
    maps = MapRecorder(manifest, request.attention, len(request.source_ids), encoder_map)
    return Generation(
        handle=handle,
        request=request,
        max_new_tokens=min(request.parameters.max_new_tokens, manifest.limits.max_target_tokens),
        end_id=manifest.tokens.end_id,
        picker=picker,
        maps=maps,
        outputs=step_outputs(picker) | maps.outputs,
    )
