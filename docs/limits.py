"""The limits of the service: the source of the table in `docs/reference/limits.md`."""

from dataclasses import dataclass

from sightline.service.api_errors import ErrorCode, Limit
from sightline.service.http.connections import DESCRIPTOR_RESERVE
from sightline.service.http.guarded_protocol import MAX_HEAD_BYTES, MAX_PIPELINED
from sightline.service.http.http_call import MAX_FORM_FIELDS
from sightline.service.inference.results import MAX_NUMBERS
from sightline.service.settings import TOKENS_PER_SEQUENCE, Settings
from sightline.service.tasks.fill_mask import MAX_MASKS
from sightline.service.tasks.tokens import MAX_IDS, MAX_TEXT_BYTES


@dataclass(frozen=True)
class LimitRow:
    """A limit, and the error beyond it."""

    text: str
    source: str  # name of its setting, or where else it comes from
    code: ErrorCode | None  # None: there is no error, as the text states
    label: Limit | None = None  # in `sightline_limit_reached_total`
    value: str = ""  # for one that is no setting, or follows from it


OF_BODIES = "16 MiB, or one body if that is larger"
OF_TOKENS = f"{TOKENS_PER_SEQUENCE} times the number"
OF_RESPONSES, OF_PREFIXES = "an eighth, from 32 MiB to 1 GiB", "an eighth, at most 1 GiB"
BATCH_TOKENS, LOAD_S = str(Settings().max_batch_tokens), f"{Settings().load_timeout_s:g}"
LIMITS = (
    LimitRow("open connections", "max_connections", "overloaded", "connections"),
    LimitRow(
        "connections of an IPv4 address or IPv6 /64", "max_connections", "overloaded", "connections_per_address", "half"
    ),
    LimitRow("file descriptors", "`ulimit -n`", "overloaded", "descriptors", f"{DESCRIPTOR_RESERVE} in reserve"),
    LimitRow("head of a request; trailers of a body", "fixed", "headers_too_large", value=f"{MAX_HEAD_BYTES} bytes"),
    LimitRow("seconds to send the head of a request", "client_timeout_s", "client_too_slow"),
    LimitRow("body after decompression", "max_body_bytes", "body_too_large"),
    LimitRow("seconds to send the body", "client_timeout_s", "client_too_slow"),
    LimitRow("bodies that are arriving, together", "max_body_bytes", "overloaded", "body_bytes", OF_BODIES),
    LimitRow("fields of a form", "fixed", "invalid_parameter", value=str(MAX_FORM_FIELDS)),
    LimitRow("pipelined requests of a connection, which is then closed", "fixed", None, value=str(MAX_PIPELINED)),
    LimitRow("seconds that an idle connection stays open", "keep_alive_s", None),
    LimitRow("requests a minute of an API key", "`sightline keys add`", "rate_limit_exceeded", value="none"),
    LimitRow("tokens a minute of an API key", "`sightline keys add`", "rate_limit_exceeded", value="none"),
    LimitRow("sequences in progress of an API key", "`sightline keys add`", "rate_limit_exceeded", value="none"),
    LimitRow("inputs of a call", "max_inputs", "invalid_parameter"),
    LimitRow("inputs times `candidate_labels` of a call", "max_inputs", "invalid_parameter"),
    LimitRow("windows that the context of a question is read in", "max_inputs", "invalid_parameter"),
    LimitRow("masks of an input of `/v1/fill-mask`", "fixed", "invalid_parameter", value=str(MAX_MASKS)),
    LimitRow("tokens of an input, and of a target", "manifest of the model", "input_too_long", value="of the model"),
    LimitRow("sequences of a model, waiting or running", "max_waiting_sequences", "overloaded", "waiting_sequences"),
    LimitRow("bodies of a model's calls", "max_body_bytes", "overloaded", "waiting_bytes", OF_BODIES),
    LimitRow("source tokens of a model's calls", "max_waiting_sequences", "overloaded", "waiting_tokens", OF_TOKENS),
    LimitRow("seconds that a call is expected to wait", "queue_timeout_s", "overloaded", "queue_time"),
    LimitRow("seconds that a call is expected to take", "request_timeout_s", "overloaded", "deadline"),
    LimitRow("seconds of a call, or `X-Request-Timeout-Ms`", "request_timeout_s", "deadline_exceeded"),
    LimitRow("responses that clients have not read yet", "memory_bytes", "overloaded", "response_bytes", OF_RESPONSES),
    LimitRow("numbers in the vectors or maps of a response", "fixed", "response_too_large", value=str(MAX_NUMBERS)),
    LimitRow("text of a call that tokenizes", "fixed", "response_too_large", value=f"{MAX_TEXT_BYTES} bytes"),
    LimitRow("ids of a call that detokenizes", "fixed", "response_too_large", value=str(MAX_IDS)),
    LimitRow("seconds without a byte read by the client, whose connection then closes", "client_timeout_s", None),
    LimitRow("sequences that a model decodes at once; others wait", "max_rows", None),
    LimitRow("decoder state of all models, from which their slots follow", "memory_bytes", None, value="half of it"),
    LimitRow("prefix caches of all models; the oldest prefixes leave", "memory_bytes", None, value=OF_PREFIXES),
    LimitRow("tokens of an encoder batch; other sequences wait", "fixed", None, value=BATCH_TOKENS),
    LimitRow("seconds of a stage of the load of a model, which then fails", "fixed", None, value=LOAD_S),
    LimitRow("seconds of a drain", "drain_s", "draining"),
    LimitRow("seconds of running calls after the drain", "shutdown_timeout_s", "draining"),
)
