"""The names that things go by."""

from typing import NewType

NodeId = NewType("NodeId", str)
RequestId = NewType("RequestId", str)
BatchId = NewType("BatchId", str)
ModelName = NewType("ModelName", str)
SessionId = NewType("SessionId", str)
