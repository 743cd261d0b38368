from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from controller.quality.index_build import StoreBounds
from controller.quality.neighbours import NeighbourTarget, Source, paper_quality, shrunk_quality
from controller.quality.store import (
    QualityRecord,
    QualityStore,
    prompt_digest,
)
from controller.quality.store_contents import InvalidRecordError

DIMENSION = 8


def vector(seed: int) -> NDArray[np.float32]:
    values = np.random.default_rng(seed).standard_normal(DIMENSION)
    return (values / np.linalg.norm(values)).astype(np.float32)


def record(
    prompt: int,
    destination: str = "pi/small",
    model: str = "small",
    score: float | None = 1.0,
    output_tokens: int | None = None,
) -> QualityRecord:
    return QualityRecord(
        prompt_digest(f"prompt {prompt}"), vector(prompt), destination, model, score, output_tokens
    )


def test_a_scored_prompt_is_its_own_nearest() -> None:
    store = QualityStore(DIMENSION)
    store.add([record(p, score=float(p == 3)) for p in range(20)])
    similarity, rows = store.nearest(vector(3)[None], 5)
    assert rows[0, 0] == 3
    assert similarity[0, 0] == pytest.approx(1.0, abs=1e-3)
    found = paper_quality(
        store.evidence(vector(3)[None], [NeighbourTarget("pi/small", "small", 0.5)], 1),
        neighbours=1,
    )
    assert found.value[0, 0] == 1.0


def test_scores_of_one_prompt_at_one_destination_are_averaged() -> None:
    store = QualityStore(DIMENSION)
    store.add([record(1, score=1.0), record(1, score=0.0), record(1, score=0.5)])
    assert len(store) == 1
    (column,) = store.columns()
    assert column.mean_quality_ratio == pytest.approx(0.5)
    assert column.scored_prompts == 1


def test_a_completion_without_a_score_teaches_its_length_only() -> None:
    store = QualityStore(DIMENSION)
    store.add([record(1, score=None, output_tokens=40), record(2, score=None, output_tokens=60)])
    (column,) = store.columns()
    assert column.mean_quality_ratio is None
    assert column.mean_output_tokens == pytest.approx(50.0)
    found = shrunk_quality(
        store.evidence(vector(1)[None], [NeighbourTarget("pi/small", "small", 0.4)], 5)
    )
    assert found.value[0, 0] == pytest.approx(0.4)
    assert found.source[0, 0] == Source.PRIOR


def test_an_answer_that_was_cut_bounds_its_length_until_a_whole_one_comes() -> None:
    store = QualityStore(DIMENSION)
    target = [NeighbourTarget("pi/small", "small", 0.5)]
    cut = [
        replace(record(1, score=None, output_tokens=tokens), was_cut=True) for tokens in (64, 32)
    ]
    store.add(cut)
    for known in (store, QualityStore.from_contents(store.contents())):
        found = known.evidence(vector(1)[None], target, 1)
        assert found.cut_tokens.ravel().tolist() == [64.0]
        assert np.isnan(found.tokens).all()
        assert np.isnan(found.mean_tokens).all()
        assert known.columns()[0].mean_output_tokens is None
    store.add([record(1, score=None, output_tokens=80), cut[0]])
    found = store.evidence(vector(1)[None], target, 1)
    assert found.tokens.ravel().tolist() == [80.0]
    assert found.mean_tokens.tolist() == [80.0]
    assert np.isnan(found.cut_tokens).all()


def test_a_destination_whose_limits_cut_most_answers_writes_long_ones() -> None:
    store = QualityStore(DIMENSION)
    lengths = [record(p, score=None, output_tokens=96) for p in range(9)]
    store.add([replace(one, was_cut=True) for one in lengths])
    store.add([record(9, score=None, output_tokens=4)])
    for known in (store, QualityStore.from_contents(store.contents())):
        found = known.evidence(vector(1)[None], [NeighbourTarget("pi/small", "small", 0.5)], 3)
        # 9 * 96 + 4 tokens were seen, and one answer ended.
        assert found.mean_tokens.tolist() == [868.0]
        assert known.columns()[0].mean_output_tokens == 4.0
    store.add([record(0, score=None, output_tokens=120)])
    found = store.evidence(vector(1)[None], [NeighbourTarget("pi/small", "small", 0.5)], 3)
    assert found.mean_tokens.tolist() == [(8 * 96 + 120 + 4) / 2]


def test_fall_backs_go_from_destination_to_model_to_prior() -> None:
    store = QualityStore(DIMENSION)
    store.add([record(p, score=0.25) for p in range(4)])
    store.add([record(p, "cloud/large", "large", 0.75) for p in range(2)])
    evidence = store.evidence(
        vector(99)[None],
        [
            NeighbourTarget("pi/small", "small", 0.9),
            NeighbourTarget("nano/small", "small", 0.9),
            NeighbourTarget("nano/other", "other", 0.9),
        ],
        3,
    )
    assert evidence.mean == pytest.approx([0.25, 0.25, 0.9])
    assert evidence.mean_count.tolist() == [4, 4, 0]
    assert evidence.mean_source.tolist() == [
        Source.DESTINATION_MEAN,
        Source.MODEL_MEAN,
        Source.PRIOR,
    ]
    assert np.isnan(evidence.own_scores[:, :, 1]).all()
    assert (evidence.scores[:, :, 1] == evidence.scores[:, :, 0]).all()


def test_a_hard_prompt_is_hard_for_a_destination_that_never_saw_it() -> None:
    store = QualityStore(DIMENSION)
    for destination in ("a/m", "b/m2", "c/m3"):
        store.add([record(p, destination, destination[2:], float(p != 0)) for p in range(10)])
    store.add([record(p, "d/m4", "m4", 1.0) for p in range(5, 10)])
    hard, easy = (
        shrunk_quality(
            store.evidence(vector(p)[None], [NeighbourTarget("d/m4", "m4", 0.5)], 10)
        ).value[0, 0]
        for p in (0, 1)
    )
    assert hard < easy
    seen = store.evidence(vector(0)[None], [NeighbourTarget("d/m4", "m4", 0.5)], 1)
    # Three destinations of mean 0.9 failed it: (3 * -0.9) / (3 + 1), as docs/quality.md has it.
    assert seen.difficulty[0, 0] == pytest.approx(-2.7 / 4)
    assert seen.difficulty_count[0, 0] == 3


def test_an_empty_store_knows_only_priors() -> None:
    store = QualityStore(DIMENSION)
    evidence = store.evidence(vector(1)[None], [NeighbourTarget("pi/small", "small", 0.4)], 10)
    for found in (paper_quality(evidence), shrunk_quality(evidence)):
        assert found.value.tolist() == [[0.4]]
        assert found.source.tolist() == [[Source.PRIOR]]
        assert found.count.tolist() == [[0]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"score": 1.5}, "between 0 and 1"),
        ({"score": float("nan")}, "between 0 and 1"),
        ({"score": None}, "a score, output tokens"),
        ({"output_tokens": -1}, "output tokens"),
        ({"embedding": np.ones(DIMENSION, dtype=np.float32)}, "normalise"),
        ({"embedding": np.full(DIMENSION, np.nan, dtype=np.float32)}, "normalise"),
        ({"embedding": np.ones(3, dtype=np.float32)}, "shape"),
        ({"prompt_digest": b"short"}, "16 bytes"),
        ({"destination": ""}, "names its destination"),
        ({"model": "other"}, "was profiled with model"),
    ],
)
def test_a_bad_record_is_refused_and_nothing_of_its_batch_kept(
    change: dict[str, object], says: str
) -> None:
    store = QualityStore(DIMENSION)
    store.add([record(1)])
    with pytest.raises(InvalidRecordError, match=says):
        store.add([record(2), replace(record(3), **change)])  # type: ignore[arg-type]
    assert len(store) == 1


def test_one_batch_cannot_give_a_destination_two_models() -> None:
    store = QualityStore(DIMENSION)
    with pytest.raises(InvalidRecordError, match="two models"):
        store.add([record(1), record(2, model="other")])
    assert len(store) == 0


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 30),
            st.integers(0, 12),
            st.one_of(st.none(), st.floats(0.0, 1.0)),
            st.integers(0, 500),
        ),
        max_size=60,
    )
)
def test_contents_and_back_are_the_same_store(
    events: list[tuple[int, int, float | None, int]],
) -> None:
    store = QualityStore(DIMENSION)
    by_pair: dict[tuple[int, int], list[float]] = {}
    for prompt, destination, score, tokens in events:
        store.add([record(prompt, f"d{destination}/m", f"m{destination % 3}", score, tokens)])
        if score is not None:
            by_pair.setdefault((prompt, destination), []).append(score)
    assert store.indexed_prompts == len(store)
    for column in store.columns():
        means = [
            np.mean(scores)
            for (_, destination), scores in by_pair.items()
            if f"d{destination}/m" == column.destination
        ]
        if means:
            assert column.mean_quality_ratio == pytest.approx(np.mean(means), abs=1e-5)
        assert column.scored_prompts == len(means)
    if len(store) == 0:
        return
    again = QualityStore.from_contents(store.contents())
    assert [c.destination for c in again.columns()] == [c.destination for c in store.columns()]
    target = [NeighbourTarget("d1/m", "m1", 0.5), NeighbourTarget("d20/m", "m0", 0.5)]
    ours, theirs = (s.evidence(vector(7)[None], target, 5) for s in (store, again))
    assert np.allclose(ours.scores, theirs.scores, equal_nan=True)
    assert np.allclose(ours.mean, theirs.mean, atol=1e-6)


@pytest.mark.parametrize(
    ("field", "change", "says"),
    [
        ("scores", lambda a: a[:, :0], "scores has shape"),
        ("scores", lambda a: a + 5.0, "between 0 and 1"),
        ("embeddings", lambda a: a[:-1], "embeddings of shape"),
        ("embeddings", lambda a: a * 2.0, "length 1"),
        ("digests", lambda a: np.zeros_like(a), "occurs twice"),
        ("score_counts", lambda a: a * 0, "counts differ"),
        ("models", lambda a: (), "lack their models"),
    ],
)
def test_contents_that_do_not_fit_together_are_refused(field, change, says) -> None:  # type: ignore[no-untyped-def]
    store = QualityStore(DIMENSION)
    store.add([record(p) for p in range(3)])
    contents = store.contents()
    with pytest.raises(InvalidRecordError, match=says):
        QualityStore.from_contents(replace(contents, **{field: change(getattr(contents, field))}))


def test_many_prompts_get_an_approximate_index_and_go_on_growing() -> None:
    store = QualityStore(DIMENSION, flat_up_to=100)
    store.add([record(p) for p in range(100)])
    assert store.index_build() is None
    store.add([record(p) for p in range(100, 140)])
    build = store.index_build()
    assert build is not None
    with pytest.raises(ValueError, match="run"):
        store.adopt(build)
    build.run()
    store.add([record(140)])  # while it was being built
    store.adopt(build)
    assert store.indexed_prompts == len(store) == 141
    assert store.recall_at_10 is not None
    assert store.recall_at_10 >= 0.95
    assert store.nearest(vector(140)[None], 1)[1][0, 0] == 140
    assert store.index_build() is None
    store.add([record(p) for p in range(141, 290)])
    assert store.index_build() is not None
    again = QualityStore.from_contents(store.contents(), flat_up_to=100)
    assert again.recall_at_10 is None  # exact at once, and the fast index when it is ready
    assert again.index_build() is not None


def test_the_same_prompt_prevails_over_those_that_resemble_it() -> None:
    store = QualityStore(DIMENSION)
    store.add([record(p, score=0.0) for p in range(30)])
    store.add([record(30, score=1.0)])
    target = [NeighbourTarget("pi/small", "small", 0.5)]
    known = store.evidence(vector(4)[None], target, 10, [prompt_digest("prompt 30")])
    assert known.is_identical.tolist() == [[True] + [False] * 9]
    assert known.similarity[0, 0] == 1.0
    assert known.own_scores[0, :, 0].tolist() == [1.0] + [0.0] * 9
    assert (np.diff(known.similarity[0]) <= 1e-3).all()
    new = store.evidence(vector(4)[None], target, 10, [prompt_digest("prompt 31")])
    assert not new.is_identical.any()
    assert shrunk_quality(known).value[0, 0] > 0.6 > 0.3 > shrunk_quality(new).value[0, 0]


# -- what is dropped -------------------------------------------------------------------------------


def filled_at_times(count: int, flat_up_to: int = 10_000) -> QualityStore:
    """Prompt p was scored at d/m at time p, and by its number."""
    store = QualityStore(DIMENSION, flat_up_to=flat_up_to)
    for p in range(count):
        store.add([record(p, score=p / count, output_tokens=p)], float(p))
    return store


@pytest.mark.parametrize("flat_up_to", [10_000, 50])
def test_beyond_the_bound_the_prompts_silent_longest_go(flat_up_to: int) -> None:
    store = filled_at_times(200, flat_up_to)
    store.add([record(3, score=0.5)], 1000.0)  # an old prompt that was asked again
    build = store.index_build(bounds=StoreBounds(max_prompts=100))
    assert build is not None
    assert build.dropped_prompts == 110
    build.run()
    store.adopt(build)
    assert len(store) == store.indexed_prompts == 90
    assert (store.recall_at_10 is None) == (flat_up_to > 100)
    target = [NeighbourTarget(record(0).destination, record(0).model, 0.5)]
    for p, is_kept in ((3, True), (110, False), (111, True), (199, True)):
        evidence = store.evidence(vector(p)[None], target, 1, [record(p).prompt_digest])
        assert bool(evidence.is_identical[0, 0]) == is_kept
        assert evidence.similarity[0, 0] == pytest.approx(1.0, abs=0.01) or not is_kept
        if is_kept and p != 3:
            assert evidence.own_scores[0, 0, 0] == pytest.approx(p / 200, abs=1e-6)
            assert evidence.tokens[0, 0, 0] == p
    kept = [*range(111, 200)]
    (column,) = store.columns()
    assert column.scored_prompts == 90
    assert column.mean_output_tokens == pytest.approx((sum(kept) + 3) / 90)
    assert store.index_build(bounds=StoreBounds(max_prompts=100)) is None


def test_what_came_or_was_heard_of_while_others_were_dropped_stays() -> None:
    store = filled_at_times(20)
    build = store.index_build(bounds=StoreBounds(max_prompts=100, oldest_time=10.0))
    assert build is not None
    build.run()
    store.add([record(2), record(20)], 50.0)  # 2 was to go, 20 is new
    store.adopt(build)
    assert len(store) == store.indexed_prompts == 12
    similarity, _ = store.nearest(np.stack([vector(p) for p in (2, 15, 20)]), 1)
    assert np.allclose(similarity, 1.0, atol=0.01)
    assert store.nearest(vector(5)[None], 1)[0][0, 0] < 0.99
    with pytest.raises(ValueError, match="dropped since"):
        store.adopt(build)


def test_without_bounds_or_below_them_nothing_goes() -> None:
    store = filled_at_times(20)
    assert store.index_build() is None
    assert store.index_build(bounds=StoreBounds(max_prompts=20, oldest_time=0.0)) is None


def test_prompts_whose_time_is_unknown_never_age() -> None:
    store = QualityStore(DIMENSION)
    store.add([record(1)])
    store.add([record(2)], 5.0)
    build = store.index_build(bounds=StoreBounds(max_prompts=10, oldest_time=1e12))
    assert build is not None
    assert build.rows.tolist() == [0]
