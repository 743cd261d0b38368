"""The names that things go by."""

import uuid
from typing import NewType

NodeId = NewType("NodeId", str)
RequestId = NewType("RequestId", str)
BatchId = NewType("BatchId", str)
ModelName = NewType("ModelName", str)
SessionId = NewType("SessionId", str)


def new_request_id() -> RequestId:
    """An id for a request whose client gave none."""
    return RequestId(f"req-{uuid.uuid4().hex}")
