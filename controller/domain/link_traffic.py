"""What one request moves over a node's link, seen from the node, and what that costs.

The node *receives* the prompt and *transmits* the answer; every price, rate and power of a link is
named so, from the agent's settings to the formulas.
"""

from typing import Final

from controller.domain.cluster import TokenPrice
from controller.domain.completion import Usage
from controller.domain.node_report import NodeAttributes
from controller.domain.request import InferenceRequest

REQUEST_OVERHEAD_BYTES: Final = 512.0
"""A request on the wire besides its text: ids, sampling parameters, framing (ours)."""

STREAMED_TOKEN_BYTES: Final = 64.0
"""One streamed token on the wire: its text, its message and the frame's share (ours)."""


def received_bytes(request: InferenceRequest) -> float:
    """Bytes that a node receives with a request; lone surrogates count as their three bytes."""
    return REQUEST_OVERHEAD_BYTES + len(request.text.encode("utf-8", "surrogatepass"))


def answer_usd(
    request: InferenceRequest,
    usage: Usage,
    price: TokenPrice,
    attributes: NodeAttributes,
) -> float:
    """Money for one answer, in US dollars: its tokens, and its bytes on the node's link.

    The bytes are estimated by the sizes that decisions use, so both are on one scale.
    """
    return (
        usage.prompt_tokens * price.prompt_usd_per_token
        + usage.completion_tokens * price.completion_usd_per_token
        + price.request_usd
        + received_bytes(request) * attributes.receive_usd_per_byte
        + STREAMED_TOKEN_BYTES * usage.completion_tokens * attributes.transmit_usd_per_byte
    )
