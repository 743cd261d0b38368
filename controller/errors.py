"""What can go wrong in the controller, and what clients see of it.

RouterError
├── InvalidRequestError          a field of the request is wrong
│   └── ContextExceededError     the prompt fits no model's context
├── UnknownModelError            no node serves this model
├── UnknownPolicyError           no policy has this name
├── UnknownNodeError             no node has this name
├── UnknownRequestError          no record of this request
├── DuplicateRequestError        a request with this id is being answered
├── NodeBusyError                the node is still connected
├── QueueFullError               too many requests wait
├── NoDestinationError           no node can take the request now
├── ConstraintsError             nodes exist, but the request's own limits refuse each
├── NodeLostError                the node went away while it streamed
├── OrderTimeoutError            a node did not carry out an order in time
├── TooManyOrdersError           too many orders to nodes are running
├── GenerationFailedError        the node's engine failed
├── RequestTimeoutError          a deadline passed
├── SlowReaderError              the client reads more slowly than the model writes
└── ShuttingDownError            the controller is stopping
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from grpc import StatusCode


class RouterError(Exception):
    """A failure that a client is told about; its text is the sentence the client reads."""


class InvalidRequestError(RouterError):
    """A field of the request is wrong."""


class ContextExceededError(InvalidRequestError):
    """The prompt and its answer fit no model's context."""


class UnknownModelError(RouterError):
    """No node serves this model."""


class UnknownPolicyError(RouterError):
    """No policy has this name."""


class UnknownNodeError(RouterError):
    """No node has this name."""


class UnknownRequestError(RouterError):
    """There is no record of this request."""


class DuplicateRequestError(RouterError):
    """A request with this id is being answered."""


class NodeBusyError(RouterError):
    """The node is still connected."""


class QueueFullError(RouterError):
    """Too many requests wait."""


class NoDestinationError(RouterError):
    """No node can take the request now."""


class ConstraintsError(RouterError):
    """The request's own limits refuse every destination."""


class NodeLostError(RouterError):
    """The node went away after it had begun to stream."""


class OrderTimeoutError(RouterError):
    """A node did not take up an order, or did not end it in time."""


class TooManyOrdersError(RouterError):
    """Too many orders to nodes are running."""


class GenerationFailedError(RouterError):
    """The node's engine failed."""


class RequestTimeoutError(RouterError):
    """A deadline passed."""


class SlowReaderError(RouterError):
    """The client reads more slowly than the model writes."""


class ShuttingDownError(RouterError):
    """The controller is stopping."""


@dataclass(frozen=True, slots=True)
class PublicError:
    """How one kind of error leaves the controller: gRPC status, HTTP status and OpenAI code."""

    grpc_status: StatusCode
    http_status: int
    code: str


PUBLIC_ERRORS: Final[Mapping[type[RouterError], PublicError]] = {
    InvalidRequestError: PublicError(StatusCode.INVALID_ARGUMENT, 400, "invalid_request"),
    ContextExceededError: PublicError(StatusCode.INVALID_ARGUMENT, 400, "context_length_exceeded"),
    UnknownModelError: PublicError(StatusCode.NOT_FOUND, 404, "model_not_found"),
    UnknownPolicyError: PublicError(StatusCode.INVALID_ARGUMENT, 400, "unknown_policy"),
    UnknownNodeError: PublicError(StatusCode.NOT_FOUND, 404, "node_not_found"),
    UnknownRequestError: PublicError(StatusCode.NOT_FOUND, 404, "request_not_found"),
    DuplicateRequestError: PublicError(StatusCode.ALREADY_EXISTS, 409, "request_exists"),
    NodeBusyError: PublicError(StatusCode.FAILED_PRECONDITION, 409, "node_connected"),
    QueueFullError: PublicError(StatusCode.RESOURCE_EXHAUSTED, 429, "queue_full"),
    NoDestinationError: PublicError(StatusCode.UNAVAILABLE, 503, "no_destination"),
    ConstraintsError: PublicError(StatusCode.FAILED_PRECONDITION, 422, "constraints_not_met"),
    NodeLostError: PublicError(StatusCode.UNAVAILABLE, 502, "node_lost"),
    OrderTimeoutError: PublicError(StatusCode.DEADLINE_EXCEEDED, 504, "order_timeout"),
    TooManyOrdersError: PublicError(StatusCode.RESOURCE_EXHAUSTED, 429, "too_many_orders"),
    GenerationFailedError: PublicError(StatusCode.UNAVAILABLE, 502, "generation_failed"),
    RequestTimeoutError: PublicError(StatusCode.DEADLINE_EXCEEDED, 504, "timeout"),
    SlowReaderError: PublicError(StatusCode.RESOURCE_EXHAUSTED, 429, "slow_reader"),
    ShuttingDownError: PublicError(StatusCode.UNAVAILABLE, 503, "shutting_down"),
}


def public_error(error: RouterError) -> PublicError:
    """How `error` is shown to clients; a kind that is not listed is shown as its parent is."""
    kind = next(kind for kind in type(error).__mro__ if kind in PUBLIC_ERRORS)
    return PUBLIC_ERRORS[kind]
