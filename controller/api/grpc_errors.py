"""What goes wrong in a call leaves the server as a status: one interceptor for every service."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final

import grpc
import structlog
from google.protobuf.message import DecodeError

from controller.errors import RouterError, public_error

log = structlog.get_logger()

ERROR_CODE_KEY: Final = "pointsman-error-code"
"""Trailing metadata that names a RouterError's kind, as `errors.PUBLIC_ERRORS` has it."""

_KINDS: Final[dict[tuple[bool, bool], tuple[str, Any]]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}
"""By (takes a stream, answers with a stream): a handler's attribute, and what makes a handler."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what handlers raise into statuses, of unary and streaming calls alike.

    - A RouterError has its status in `errors.PUBLIC_ERRORS`, and its text is the details.
    - A message that is no valid protobuf (such as text that is not UTF-8) is INVALID_ARGUMENT. Left
      alone, the Python server ends such a call as INTERNAL, and clients repeat what can never work.
    - Anything else is a fault of ours: the log gets the cause, the client a bland INTERNAL.

    A cancelled call stays cancelled, and a client that leaves closes the handler's iterator.
    """

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Wrap the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        name, make_handler = _KINDS[handler.request_streaming, handler.response_streaming]
        call = getattr(handler, name)
        method = handler_call_details.method

        async def answer_once(request: Any, context: Any) -> Any:
            async with _statuses(context, method):
                if isinstance(request, DecodeError):
                    raise request
                return await call(request, context)

        async def answer_stream(request: Any, context: Any) -> AsyncIterator[Any]:
            async with _statuses(context, method):
                if isinstance(request, DecodeError):
                    raise request
                answering = call(request, context)
                if not inspect.isasyncgen(answering):  # it writes to the context, as Watch does
                    await answering
                    return
                # Closed with this generator, so that a client's leaving reaches the request.
                async with aclosing(answering):
                    async for response in answering:
                        yield response

        deserialise = handler.request_deserializer
        if deserialise is not None and not handler.request_streaming:
            deserialise = _tolerant(deserialise)  # of a stream, the handler meets the error
        made: grpc.RpcMethodHandler[Any, Any] = make_handler(
            answer_stream if handler.response_streaming else answer_once,
            deserialise,
            handler.response_serializer,
        )
        return made


def _tolerant(decode: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """The same, but for the error, which is the result: here it could have no status of ours."""

    def deserialise(data: bytes) -> object:
        try:
            return decode(data)
        except DecodeError as error:
            return error

    return deserialise


@asynccontextmanager
async def _statuses(context: Any, method: object) -> AsyncIterator[None]:
    try:
        yield
    except grpc.aio.AbortError:  # the handler has chosen its own status
        raise
    except RouterError as error:
        public = public_error(error)
        await context.abort(public.grpc_status, str(error), ((ERROR_CODE_KEY, public.code),))
    except DecodeError as error:
        why = str(error) or "it is not valid protobuf"
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"The message cannot be read ({why}); text must be valid UTF-8.",
        )
    except Exception:
        log.exception("rpc.failed", method=method)
        await context.abort(
            grpc.StatusCode.INTERNAL, "The controller failed at this request; its log says why."
        )
