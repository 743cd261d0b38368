"""A batch and a snapshot in, placements out: the shell around the pure routing core.

The policy thinks in a thread of its own, is timed, and when it fails or overruns its budget by far
the batch goes to the least loaded nodes instead, and the decision says so.
"""

import asyncio
import contextlib
import difflib
import math
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar, cast

import numpy as np
import structlog

from controller.config import RoutingSettings
from controller.domain.batch import BatchDecision, Candidate, Placement, Weights
from controller.domain.cluster import ClusterSnapshot
from controller.domain.policy_choice import KeptChoice, PolicyChoice
from controller.domain.refusal import Refusal, RefusalReason
from controller.domain.request import InferenceRequest
from controller.errors import InvalidRequestError, NoDestinationError, UnknownPolicyError
from controller.ids import BatchId, NodeId
from controller.predictors.fitted_serving import FittedPredictor
from controller.quality.predictor import QualityPredictor
from controller.request_manager.compilation import compile_once
from controller.request_manager.estimates import Estimates, estimate
from controller.routing.decision_memory import DecisionMemory
from controller.routing.engine_simulation import predicted_finish_seconds
from controller.routing.evaluator import Terms, evaluate
from controller.routing.formulation import FormulatedBatch
from controller.routing.objective import bounds_of, objectives
from controller.routing.policies import (
    BrokenPolicy,
    UnknownPolicy,
    policy_named,
    policy_names,
    warm_up,
)
from controller.routing.policy import UNASSIGNED, Budget, FallbackCause, RoutingPolicy
from controller.routing.ppo.artifact import FindArtifact, no_artifact
from controller.routing.problem import Normalisation, RoutingProblem
from controller.telemetry.metrics import Metrics

log = structlog.get_logger()

T = TypeVar("T")

FALLBACK_POLICY: Final = "least-loaded"

OFFLINE_POLICY: Final = "exact"

GIL_SWITCH_SECONDS: Final = 0.0005
"""The interpreter's switch interval while serving: with its default of 5 ms a policy whose search
has ended waits for the event loop for half of a usual budget."""

MAX_OTHERS: Final = 64
"""Destinations that an explanation names beside the chosen one."""

_OVERRUN_SECONDS: Final = 2.0
"""How far a policy may overrun before nobody waits for it any more."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    assignment: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    lower_bound: float | None
    policy: str
    fallback_reason: str
    fallbacks: Mapping[FallbackCause, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Formulated:
    """A problem, and the estimates that it was made from."""

    batch: FormulatedBatch
    estimates: Estimates


class Decider:
    """Decides batches with the policy in force.

    Args:
        predictor: estimates quality and answer length from similar prompts; None leaves it to the
            destinations' means.
        fitted: estimates quality, length and seconds by class; goes before the other where it knows
            model and hardware.
        find: gives the artifacts of learned policies; asked whenever one is chosen.
        kept: what an operator chose before the last restart; it holds unless the settings' policy,
            weights or normalisation have changed since.
        keep: keeps what an operator chooses; None when the settings' own choice is in force.

    Attributes:
        fallbacks: requests of live batches that another policy decided than the one in force, by
            the latter's name and the cause.

    Raises:
        UnknownPolicyError: the settings name no policy.
    """

    def __init__(
        self,
        settings: RoutingSettings,
        predictor: QualityPredictor | None = None,
        fitted: FittedPredictor | None = None,
        find: FindArtifact = no_artifact,
        kept: KeptChoice | None = None,
        keep: Callable[[KeptChoice | None], None] = lambda kept: None,
    ) -> None:
        self._settings = settings
        self._predictor = predictor
        self._fitted = fitted
        self._rng = np.random.default_rng(settings.seed)
        self._find = find
        self._memory = DecisionMemory()
        self.fallbacks: Counter[tuple[str, FallbackCause]] = Counter()
        self._policy = self._policy_named(settings.policy)
        self._configured = self._choice = PolicyChoice(
            self._policy.name, Weights.scaled(*settings.weights), settings.normalisation
        )
        self._keep = keep
        if kept is not None:
            self._take_up(kept)

    def _take_up(self, kept: KeptChoice) -> None:
        """Let an earlier choice hold on; what the settings say now wins if they have changed."""
        if kept.configured != self._configured:
            log.warning(
                "policy.choice_dropped",
                reason="the settings have changed since",
                chosen=kept.choice.policy,
                policy=self._configured.policy,
            )
            self._keep(None)
            return
        try:
            self._policy = self._policy_named(kept.choice.policy)
        except UnknownPolicyError as error:
            log.warning(
                "policy.choice_dropped",
                reason=str(error),
                chosen=kept.choice.policy,
                policy=self._configured.policy,
            )
            self._keep(None)
            return
        self._choice = kept.choice
        log.info("policy.choice_restored", policy=self._choice.policy)

    def register_metrics(self, metrics: Metrics) -> None:
        """Register the count of fallbacks."""
        metrics.counter(
            "policy_fallback_requests",
            "Requests that the chosen policy (`policy`) could not decide and a fallback "
            "decided, by `cause`.",
            lambda: {
                (policy, cause.value): count for (policy, cause), count in self.fallbacks.items()
            },
            ("policy", "cause"),
        )

    @property
    def choice(self) -> PolicyChoice:
        """The policy in force."""
        return self._choice

    @property
    def is_configured(self) -> bool:
        """Whether the settings' own choice is in force, rather than an operator's."""
        return self._choice == self._configured

    @property
    def available_policies(self) -> tuple[str, ...]:
        """Names that `choose` takes: all but the offline reference, which may take a minute."""
        return tuple(name for name in policy_names() if name != OFFLINE_POLICY)

    def choose(
        self, policy: str | None, weights: Weights | None, normalisation: str | None
    ) -> PolicyChoice:
        """Change what is given, from the next batch on; all or nothing.

        Raises:
            UnknownPolicyError: no policy has this name.
            InvalidRequestError: no normalisation has this name.
        """
        normalisation = normalisation or self._choice.normalisation
        known = [form.value for form in Normalisation]
        if normalisation not in known:
            near = difflib.get_close_matches(normalisation, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}."
            raise InvalidRequestError(f"No normalisation is called {normalisation!r}; {hint}")
        if policy is not None:
            self._policy = self._policy_named(policy)
        self._choice = PolicyChoice(
            self._policy.name, weights or self._choice.weights, normalisation
        )
        self._keep(None if self.is_configured else KeptChoice(self._choice, self._configured))
        return self._choice

    async def decide(
        self,
        requests: Sequence[InferenceRequest],
        snapshot: ClusterSnapshot,
        excluded_nodes: Sequence[Collection[NodeId]] = (),
    ) -> tuple[BatchDecision, list[Placement]]:
        """Decide a batch with the policy in force.

        Args:
            excluded_nodes: for each request, nodes that failed it; used again only when nothing
                else is left.

        Raises:
            NoDestinationError: nobody is there.
        """
        rng = np.random.default_rng(self._rng.integers(2**63))
        policy = self._policy
        decision, placements, chosen = await self._decide(
            requests, snapshot, excluded_nodes, policy, self._choice, rng
        )
        for cause, count in chosen.fallbacks.items():
            self.fallbacks[policy.name, cause] += count
        return decision, placements

    async def dry_run(
        self,
        requests: Sequence[InferenceRequest],
        snapshot: ClusterSnapshot,
        policy: str | None,
        weights: Weights | None,
    ) -> tuple[BatchDecision, list[Placement]]:
        """Decide a batch and change nothing: what is decided later does not depend on it.

        Raises:
            UnknownPolicyError: no policy has this name.
            NoDestinationError: nobody is there.
        """
        fresh = self._policy_named(policy or self._choice.policy)
        choice = replace(self._choice, policy=fresh.name, weights=weights or self._choice.weights)
        rng = np.random.default_rng(self._settings.seed)
        decision, placements, _ = await self._decide(requests, snapshot, (), fresh, choice, rng)
        return decision, placements

    async def _decide(
        self,
        requests: Sequence[InferenceRequest],
        snapshot: ClusterSnapshot,
        excluded_nodes: Sequence[Collection[NodeId]],
        policy: RoutingPolicy,
        choice: PolicyChoice,
        rng: np.random.Generator,
    ) -> tuple[BatchDecision, list[Placement], _Chosen]:
        started = time.perf_counter()
        if not snapshot.destinations:
            raise NoDestinationError("No node with a loaded model is connected; start an agent.")
        formulated = await _in_thread(
            partial(
                _formulate,
                requests,
                snapshot,
                choice,
                excluded_nodes,
                self._predictor,
                self._fitted,
                self._memory,
                self._settings.marginal_energy,
            )
        )
        chosen = await self._ask(policy, formulated.batch.problem, rng)
        decision, placements = await _in_thread(
            partial(_describe, formulated, requests, choice, chosen, started)
        )
        return decision, placements, chosen

    async def _ask(
        self, policy: RoutingPolicy, problem: RoutingProblem, rng: np.random.Generator
    ) -> _Chosen:
        budget = Budget(self._settings.budget_seconds, pause_seconds=self._memory.pause_seconds)
        call = _in_thread(partial(policy.decide, problem, rng, budget))
        limit = self._settings.budget_seconds + _OVERRUN_SECONDS
        cause = FallbackCause.FAILED
        try:
            decision = await asyncio.wait_for(call, limit)
            self._memory.paused(decision.pause_seconds)
            reason = _what_is_wrong(problem, decision.assignment)
        except asyncio.TimeoutError:
            cause = FallbackCause.TOO_LATE
            reason = f"{policy.name} did not answer within {limit:g} s"
        except Exception as error:
            log.exception("policy.failed", policy=policy.name)
            reason = f"{policy.name} failed: {type(error).__name__}"
        else:
            if reason is None:
                if decision.fallback_reason:
                    log.warning(
                        "policy.fell_back", policy=policy.name, reason=decision.fallback_reason
                    )
                return _Chosen(
                    decision.assignment,
                    decision.lower_bound,
                    policy.name,
                    decision.fallback_reason,
                    decision.fallbacks,
                )
        log.warning("policy.fell_back", policy=policy.name, reason=reason)
        fallback = policy_named(FALLBACK_POLICY).decide(problem, rng, budget)
        return _Chosen(
            fallback.assignment,
            None,
            FALLBACK_POLICY,
            reason,
            {cause: int(problem.routable.sum())},
        )

    def _policy_named(self, name: str) -> RoutingPolicy:
        return serving_policy(name, self._find)

    async def warm_up(self) -> None:
        """Compile what is compiled at first use, so that the first live batch is not slow."""
        await compile_once()
        await _in_thread(warm_up)


def serving_policy(name: str, find: FindArtifact) -> RoutingPolicy:
    """The policy of this name, when it may serve.

    Raises:
        UnknownPolicyError: no policy has this name, it does not load, or it does not serve.
    """
    if name == OFFLINE_POLICY:
        raise UnknownPolicyError(
            f"{name!r} is the offline reference and does not serve; use it with "
            "`edge-controller lab solve`."
        )
    try:
        return policy_named(name, find)
    except (UnknownPolicy, BrokenPolicy) as error:
        raise UnknownPolicyError(str(error)) from error


async def _in_thread(call: Callable[[], T]) -> T:
    """Run a call in a thread of its own.

    Not in an executor: the interpreter waits for an executor's threads when it exits, and a policy
    that never returns would keep a stopped controller alive. Nobody waits for a daemon thread.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return  # given up on
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))

    def work() -> None:
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:  # it belongs to whoever waits
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is gone, and so is whoever waited
            loop.call_soon_threadsafe(tell, result, failure)

    threading.Thread(target=work, name="policy", daemon=True).start()
    return await future


def _formulate(
    requests: Sequence[InferenceRequest],
    snapshot: ClusterSnapshot,
    choice: PolicyChoice,
    excluded_nodes: Sequence[Collection[NodeId]],
    predictor: QualityPredictor | None,
    fitted: FittedPredictor | None,
    memory: DecisionMemory,
    marginal_energy: bool,
) -> _Formulated:
    estimates = estimate(requests, snapshot, predictor, fitted, memory)
    batch = estimates.formulated(
        requests,
        snapshot,
        choice.weights.as_tuple(),
        Normalisation(choice.normalisation),
        memory,
        marginal_energy_only=marginal_energy,
    )
    feasible = batch.problem.feasible.copy()
    for r, excluded in enumerate(excluded_nodes):
        allowed = [destination.node_id not in excluded for destination in snapshot.destinations]
        if (feasible[r] & allowed).any():
            feasible[r] &= allowed
    return _Formulated(
        replace(batch, problem=replace(batch.problem, feasible=feasible)),
        estimates,
    )


def _what_is_wrong(
    problem: RoutingProblem, assignment: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
) -> str | None:
    """Why an assignment cannot be used; None when it can."""
    if assignment.shape != (problem.n_requests,):
        return f"an assignment of shape {assignment.shape}"
    if (assignment >= problem.n_destinations).any() or (assignment < UNASSIGNED).any():
        return "an assignment outside the destinations"
    sent = assignment != UNASSIGNED
    if (sent != problem.routable).any():
        return "a request that could go somewhere was sent nowhere"
    rows = np.flatnonzero(sent)
    if not problem.feasible[rows, assignment[rows]].all():
        return "an infeasible assignment"
    return None


def _describe(
    formulated: _Formulated,
    requests: Sequence[InferenceRequest],
    choice: PolicyChoice,
    chosen: _Chosen,
    started: float,
) -> tuple[BatchDecision, list[Placement]]:
    problem = formulated.batch.problem
    scored = evaluate(problem, chosen.assignment[None, :])
    terms = Terms(*(float(term) for term in scored[0]))
    objective = objectives(problem, scored, bounds_of(problem))
    # The window closed when the decision began, so what it took is part of every finish.
    finish = predicted_finish_seconds(formulated.batch, chosen.assignment)
    finish += time.perf_counter() - started
    decision = BatchDecision(
        batch_id=BatchId(f"batch-{uuid.uuid4().hex[:12]}"),
        policy=chosen.policy,
        weights=choice.weights,
        normalisation=choice.normalisation,
        quality_loss=terms.quality_loss,
        cost_usd=terms.cost_usd,
        energy_joules=terms.energy_joules,
        completion_seconds=terms.completion_seconds,
        objective=float(objective[0]),
        lower_bound=chosen.lower_bound,
        decision_seconds=time.perf_counter() - started,
        batch_size=len(requests),
        fallback_reason=chosen.fallback_reason,
        predictors=formulated.estimates.predictors,
    )
    placements = []
    for r, request in enumerate(requests):
        destination = int(chosen.assignment[r])
        # The first that an explanation needs, without making the thousands that nobody will read.
        order = (
            formulated.batch.refusals.nearest_first(r)
            if destination == UNASSIGNED
            else np.lexsort((-problem.quality[r], ~problem.feasible[r]))
        )
        others = [
            _candidate(formulated, r, int(d)) for d in order[: MAX_OTHERS + 1] if d != destination
        ][:MAX_OTHERS]
        placements.append(
            Placement(
                request.request_id,
                None
                if destination == UNASSIGNED
                else replace(
                    _candidate(formulated, r, destination),
                    finish_seconds=float(finish[r]) if math.isfinite(finish[r]) else None,
                ),
                tuple(others),
                formulated.estimates.query_class(r),
            )
        )
    return decision, placements


def _candidate(formulated: _Formulated, r: int, d: int) -> Candidate:
    batch, estimates = formulated.batch, formulated.estimates
    problem, destination = batch.problem, batch.snapshot.destinations[d]
    refusals = batch.refusals.refusals_of(r, d)
    if not refusals and not problem.feasible[r, d]:
        refusals = (Refusal(RefusalReason.FAILED_BEFORE),)
    return Candidate(
        node_id=destination.node_id,
        model=destination.model,
        quality_ratio=float(problem.quality[r, d]),
        quality_source=estimates.quality_source(r, d, destination.quality_source),
        cost_usd=float(problem.cost_usd[r, d]),
        energy_joules=float(problem.energy_joules[r, d]),
        work_seconds=float(problem.work_seconds[r, d]),
        latency_seconds=float(problem.latency_seconds[r, d]),
        network_seconds=float(problem.network_seconds[r, d]),
        predicted_output_tokens=float(batch.output_tokens[r, d]),
        predicted_prompt_tokens=float(batch.read_tokens[r, d]),
        prefill_seconds=float(
            batch.read_tokens[r, d] / destination.calibration.prefill_tokens_per_second
        ),
        refusals=refusals,
        latency_source=estimates.latency_source(r, d),
        quality_count=estimates.quality_count(r, d, destination.quality_count),
    )
