"""RouterService and AdminService over gRPC: convert, call the service, convert back.

Errors pass through: `grpc_errors` gives each its status.
"""

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
from typing_extensions import assert_never

from controller.api.convert import (
    ACCOUNT,
    CALIBRATING,
    DECISION,
    MANAGE_MODEL,
    PLACEMENT,
    ROUTED,
    SERVED_MODEL,
    TEXT,
    WEIGHTS,
    explanation_to_proto,
    node_to_proto,
    request_from_proto,
    weights_from_proto,
)
from controller.api.service import RouterService
from controller.config import BatchingSettings
from controller.domain.request_record import Account
from controller.ids import ModelName, NodeId, RequestId
from controller.request_manager.manager import InferEvent
from controller.request_manager.stream import RoutedTo, Text
from pointsman.convert import ORDER_UPDATE
from pointsman.v1 import admin_pb2, admin_pb2_grpc, router_pb2, router_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """What clients ask."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    async def Route(  # noqa: N802
        self, request: router_pb2.RouteRequest, context: Context
    ) -> router_pb2.RouteResponse:
        """Decide for a batch and send nothing."""
        decision, placements = await self._service.route(
            [request_from_proto(message) for message in request.requests],
            request.policy or None,
            weights_from_proto(request.weights) if request.HasField("weights") else None,
        )
        return router_pb2.RouteResponse(
            decision=DECISION.write(decision),
            placements=map(PLACEMENT.write, placements),
        )

    async def Infer(  # noqa: N802
        self, request: router_pb2.InferRequest, context: Context
    ) -> AsyncIterator[router_pb2.InferResponse]:
        """Answer one request; the client's going away cancels this handler, and so the request."""
        inference = request_from_proto(request.request)
        with self._service.admitted(inference) as events:
            yield router_pb2.InferResponse(
                admitted=router_pb2.Admitted(request_id=inference.request_id)
            )
            async for event in events:
                yield _event_to_proto(event)

    async def Explain(  # noqa: N802
        self, request: router_pb2.ExplainRequest, context: Context
    ) -> router_pb2.ExplainResponse:
        """Say why a request went where it went."""
        return explanation_to_proto(await self._service.explain(RequestId(request.request_id)))

    async def Feedback(  # noqa: N802
        self, request: router_pb2.FeedbackRequest, context: Context
    ) -> router_pb2.FeedbackResponse:
        """Learn how good an answer was."""
        await self._service.feedback(RequestId(request.request_id), request.score_ratio)
        return router_pb2.FeedbackResponse()

    async def ListModels(  # noqa: N802
        self, request: router_pb2.ListModelsRequest, context: Context
    ) -> router_pb2.ListModelsResponse:
        """List the models that the fleet can answer with."""
        return router_pb2.ListModelsResponse(models=map(SERVED_MODEL.write, self._service.models()))


def _event_to_proto(event: InferEvent) -> router_pb2.InferResponse:
    match event:
        case RoutedTo():
            return router_pb2.InferResponse(routed=ROUTED.write(event))
        case Text():
            return router_pb2.InferResponse(text=TEXT.write(event))
        case Account():
            return router_pb2.InferResponse(account=ACCOUNT.write(event))
        case _:
            assert_never(event)


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """What operators ask."""

    def __init__(self, service: RouterService, batching: BatchingSettings) -> None:
        self._service = service
        self._batching = batching

    async def ListNodes(  # noqa: N802
        self, request: admin_pb2.ListNodesRequest, context: Context
    ) -> admin_pb2.ListNodesResponse:
        """List every known node."""
        now = time.monotonic()
        return admin_pb2.ListNodesResponse(
            nodes=[node_to_proto(record, now) for record in self._service.nodes()],
            issues=self._service.issues(),
        )

    async def DrainNode(  # noqa: N802
        self, request: admin_pb2.DrainNodeRequest, context: Context
    ) -> admin_pb2.DrainNodeResponse:
        """Drain a node or lift it."""
        record = self._service.drain(NodeId(request.node_id), request.is_draining)
        return admin_pb2.DrainNodeResponse(node=node_to_proto(record, time.monotonic()))

    async def ForgetNode(  # noqa: N802
        self, request: admin_pb2.ForgetNodeRequest, context: Context
    ) -> admin_pb2.ForgetNodeResponse:
        """Drop an offline node."""
        self._service.forget(NodeId(request.node_id))
        return admin_pb2.ForgetNodeResponse()

    async def GetPolicy(  # noqa: N802
        self, request: admin_pb2.GetPolicyRequest, context: Context
    ) -> admin_pb2.GetPolicyResponse:
        """Tell the policy in force."""
        choice = self._service.policy
        return admin_pb2.GetPolicyResponse(
            policy=choice.policy,
            weights=WEIGHTS.write(choice.weights),
            normalisation=choice.normalisation,
            is_configured=self._service.is_policy_configured,
            available_policies=self._service.available_policies,
            window_seconds=self._batching.window_seconds,
            max_batch_requests=self._batching.max_requests,
            fallbacks=[
                admin_pb2.PolicyFallbacks(policy=policy, cause=cause.value, requests=count)
                for (policy, cause), count in self._service.policy_fallbacks.items()
            ],
        )

    async def SetPolicy(  # noqa: N802
        self, request: admin_pb2.SetPolicyRequest, context: Context
    ) -> admin_pb2.SetPolicyResponse:
        """Change the policy from the next window on."""
        choice = self._service.set_policy(
            request.policy or None,
            weights_from_proto(request.weights) if request.HasField("weights") else None,
            request.normalisation or None,
        )
        return admin_pb2.SetPolicyResponse(
            policy=choice.policy,
            weights=WEIGHTS.write(choice.weights),
            normalisation=choice.normalisation,
        )

    async def ManageModel(  # noqa: N802
        self, request: admin_pb2.ManageModelRequest, context: Context
    ) -> AsyncIterator[admin_pb2.ManageModelResponse]:
        """Load, unload, pin or unpin a model on a node."""
        order = MANAGE_MODEL.read(request)
        updates = self._service.manage_model(NodeId(request.node_id), order)
        async with aclosing(updates):
            async for update in updates:
                yield admin_pb2.ManageModelResponse(update=ORDER_UPDATE.write(update))

    async def Calibrate(  # noqa: N802
        self, request: admin_pb2.CalibrateRequest, context: Context
    ) -> AsyncIterator[admin_pb2.CalibrateResponse]:
        """Have nodes measure their speed again."""
        events = self._service.calibrate(
            NodeId(request.node_id) if request.node_id else None,
            ModelName(request.model) if request.model else None,
        )
        async with aclosing(events):
            async for event in events:
                yield CALIBRATING.write(event)

    async def ListAccounts(  # noqa: N802
        self, request: admin_pb2.ListAccountsRequest, context: Context
    ) -> AsyncIterator[admin_pb2.ListAccountsResponse]:
        """Tell the latest answered requests, one a message."""
        for account in await self._service.accounts(request.limit or None):
            yield admin_pb2.ListAccountsResponse(account=ACCOUNT.write(account))
