"""Finished requests teach the quality store, and the next decision uses what it knows."""

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import pytest

from controller.config import RoutingSettings
from controller.domain.batch import Weights
from controller.domain.cluster import ClusterSnapshot
from controller.domain.completion import Completion, FinishReason, Usage
from controller.domain.request import InferenceRequest, Sampling
from controller.domain.request_record import Account, RequestRecord, RequestState
from controller.errors import InvalidRequestError, QueueFullError
from controller.ids import BatchId, ModelName, NodeId, RequestId
from controller.quality.embedding import FloatArray
from controller.quality.files import QualityFilesError, QualityFolder
from controller.quality.learner import Learner
from controller.quality.predictor import Outcome, QualityPredictor, destination_key
from controller.request_manager.decider import Decider
from tests.fakes.waiting import until
from tests.unit.controller.request_manager.test_decider import fleet

pytestmark = pytest.mark.anyio

DIMENSION = 16


class WordEmbedding:
    """Texts that begin with the same word are the same; others are nearly orthogonal."""

    name = model = "words"
    dimension = DIMENSION

    def embed(self, texts: Sequence[str]) -> FloatArray:
        rows = []
        for text in texts:
            seed = int.from_bytes(hashlib.sha256(text.split()[0].encode()).digest()[:4], "big")
            row = np.random.default_rng(seed).normal(size=DIMENSION)
            rows.append(row / np.linalg.norm(row))
        return np.array(rows, dtype=np.float32)


@pytest.fixture
def predictor(tmp_path: Path) -> Iterator[QualityPredictor]:
    made = QualityPredictor(WordEmbedding(), QualityFolder(tmp_path / "quality", DIMENSION))
    yield made
    made.close()


def request(text: str) -> InferenceRequest:
    return InferenceRequest(RequestId("r1"), text)


def record(
    text: str,
    reason: FinishReason = FinishReason.STOP,
    state: RequestState = RequestState.COMPLETED,
) -> RequestRecord:
    made = RequestRecord(request(text), 0.0, 0.0, state)
    made.account = Account(
        request_id=RequestId("r1"),
        batch_id=BatchId("b1"),
        node_id=NodeId("a"),
        model=ModelName("model-a"),
        policy="memetic",
        completion=Completion(reason, Usage(prompt_tokens=5, completion_tokens=7)),
        window_seconds=0.0,
        first_token_seconds=0.0,
        total_seconds=0.0,
        predicted_finish_seconds=0.0,
        measured_finish_seconds=0.0,
        cost_usd=0.0,
        attempts=1,
    )
    return made


FLEET: ClusterSnapshot = fleet("a", "b")


def test_nothing_profiled_predicts_nothing(predictor: QualityPredictor) -> None:
    assert predictor.predict([request("Algebra?")], FLEET.destinations) is None


async def test_next_similar_prompt_goes_where_the_last_was_answered_well(
    predictor: QualityPredictor,
) -> None:
    a, b = (destination_key(f.node_id, f.model) for f in FLEET.destinations)
    models = [f.model for f in FLEET.destinations]
    scores = {("Algebra one", 0): 1.0, ("History one", 0): 0.0,
              ("Algebra one", 1): 0.0, ("History one", 1): 1.0}  # fmt: skip
    predictor.learn(
        [Outcome(text, (a, b)[d], models[d], score, None) for (text, d), score in scores.items()]
    )
    decider = Decider(RoutingSettings(policy="memetic"), predictor)
    await decider.warm_up()  # a cold cache would overrun the budget by far
    decider.choose(None, Weights(1.0, 0.0, 0.0, 0.0), None)
    batch = [
        InferenceRequest(RequestId("r1"), "Algebra two"),
        InferenceRequest(RequestId("r2"), "History two"),
    ]
    _, placements = await decider.decide(batch, FLEET)
    assert [p.chosen.node_id for p in placements if p.chosen] == ["a", "b"]
    assert {p.chosen.quality_source for p in placements if p.chosen} == {"neighbours"}


async def test_predictor_that_fails_leaves_the_batch_to_the_prior(
    predictor: QualityPredictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(predictor, "predict", fail)
    decider = Decider(RoutingSettings(policy="least-loaded"), predictor)
    decision, placements = await decider.decide([request("Algebra?")], FLEET)
    assert placements[0].chosen is not None
    assert decision.fallback_reason == ""


async def test_finished_answer_teaches_its_length(predictor: QualityPredictor) -> None:
    learner = Learner(predictor)
    learner.finished(record("Algebra one"))
    await learner.drain()
    found = predictor.predict([request("Algebra two")], FLEET.destinations[:1])
    assert found is not None
    # The prior of 256, 128 within the limit, counts for one answer.
    assert found.output_tokens[0, 0] == pytest.approx((7.0 + 128.0) / 2.0)
    assert found.median_tokens[0, 0] == 7.0


async def test_answer_that_its_limit_cut_off_would_have_been_longer(
    predictor: QualityPredictor,
) -> None:
    learner = Learner(predictor)
    learner.finished(record("Algebra one", FinishReason.LENGTH))
    await learner.drain()

    def foreseen(limit: int) -> float:
        asked = replace(request("Algebra two"), sampling=Sampling(max_tokens=limit))
        found = predictor.predict([asked], FLEET.destinations[:1])
        assert found is not None
        return float(found.output_tokens[0, 0])

    assert foreseen(7) == pytest.approx(7.0, abs=0.2)
    assert foreseen(200) > 100.0


async def test_answer_that_was_cancelled_teaches_no_length(predictor: QualityPredictor) -> None:
    learner = Learner(predictor)
    learner.finished(record("Algebra one", FinishReason.CANCELLED))
    await learner.drain()
    assert predictor.profiled_prompts == 0


async def test_judged_answer_is_kept_over_a_restart(tmp_path: Path) -> None:
    first = QualityPredictor(WordEmbedding(), QualityFolder(tmp_path / "quality", DIMENSION))
    learner = Learner(first)
    learner.judged(record("Algebra one"), 0.25)
    await learner.drain()
    first.close()
    second = QualityPredictor(WordEmbedding(), QualityFolder(tmp_path / "quality", DIMENSION))
    assert second.profiled_prompts == 1
    second.close()


async def test_length_is_learnt_once_though_a_score_comes_later(
    predictor: QualityPredictor,
) -> None:
    given: list[Outcome] = []
    learner = Learner(predictor)
    predictor.learn = given.extend  # type: ignore[method-assign,assignment]
    learner.finished(record("Algebra one"))
    learner.judged(record("Algebra one"), 0.25)
    await learner.drain()
    assert [(o.score_ratio, o.output_tokens) for o in given] == [(None, 7), (0.25, None)]


@pytest.mark.parametrize("score", [-0.1, 1.1, float("nan")])
def test_score_outside_0_to_1_is_refused(predictor: QualityPredictor, score: float) -> None:
    with pytest.raises(InvalidRequestError, match="0 to 1"):
        Learner(predictor).judged(record("Algebra one"), score)


def test_only_completed_requests_are_judged(predictor: QualityPredictor) -> None:
    with pytest.raises(InvalidRequestError, match="failed"):
        Learner(predictor).judged(record("Algebra one", state=RequestState.FAILED), 1.0)


def test_controller_without_an_embedding_model_says_how_to_get_one() -> None:
    with pytest.raises(InvalidRequestError, match="embedding export"):
        Learner(None).judged(record("Algebra one"), 1.0)


async def test_learning_goes_on_by_itself(predictor: QualityPredictor) -> None:
    learner = Learner(predictor)
    task = asyncio.create_task(learner.run())
    learner.finished(record("Algebra one"))
    with anyio.fail_after(60):
        while predictor.profiled_prompts == 0:
            await asyncio.sleep(0.01)
    task.cancel()


async def test_outcomes_wait_while_the_disk_is_full_and_are_learnt_once_it_is_not(
    predictor: QualityPredictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_full = True
    learn = predictor.learn

    tries = 0

    def learn_if_possible(outcomes: Sequence[Outcome]) -> None:
        nonlocal tries
        tries += 1
        if is_full:
            raise QualityFilesError("No space left on device")
        learn(outcomes)

    monkeypatch.setattr(predictor, "learn", learn_if_possible)
    monkeypatch.setattr("controller.quality.learner._PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("controller.quality.learner._RETRY_SECONDS", 0.01)
    learner = Learner(predictor)
    learner.judged(record("Algebra one"), 1.0)
    learner.finished(record("Geometry one"))
    assert not await learner.drain()
    assert learner.waiting == 2
    task = asyncio.create_task(learner.run())
    await until(lambda: tries > 3)
    assert (learner.waiting, predictor.profiled_prompts) == (2, 0)
    is_full = False
    with anyio.fail_after(60):
        while learner.waiting:
            await asyncio.sleep(0.01)
    assert predictor.profiled_prompts == 2
    task.cancel()


async def test_score_that_finds_no_room_to_wait_is_refused_and_never_lost_unheard(
    predictor: QualityPredictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.quality.learner._MAX_WAITING", 2)
    learner = Learner(predictor)
    for name in ("one", "two", "three"):
        learner.finished(record(f"Algebra{name} 1"))
    with pytest.raises(QueueFullError, match="try again later"):
        learner.judged(record("Algebra one"), 1.0)
    assert (learner.waiting, learner.dropped) == (2, 2)
    assert await learner.drain()
    learner.judged(record("Algebra one"), 1.0)
    assert learner.waiting == 1


async def test_maintenance_at_the_start_is_harmless_in_a_small_store(
    predictor: QualityPredictor,
) -> None:
    predictor.learn([Outcome("Algebra one", "a/m", "m", 1.0, None)])
    predictor.maintain()
    assert predictor.profiled_prompts == 1


async def test_journal_that_has_grown_is_folded_into_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.quality.predictor._COMPACT_AFTER", 3)
    folder = QualityFolder(tmp_path / "quality", DIMENSION)
    predictor = QualityPredictor(WordEmbedding(), folder)
    predictor.learn([Outcome(f"Word{n} one", "a/m", "m", 1.0, None) for n in range(5)])
    assert folder.journal_records == 5
    predictor.maintain()
    assert folder.journal_records == 0
    assert predictor.profiled_prompts == 5
    predictor.close()
