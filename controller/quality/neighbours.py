"""Quality from the profiled prompts nearest to a request.

Two estimates over the same neighbours: `paper_quality` is Eq. (3) of the CEMA paper, and
`shrunk_quality` is ours. Both are functions of an `Evidence`, which the quality store gathers.

Ours splits the outcome of profiled prompt i at destination d into the destination's mean, how hard
the prompt is for everybody, and what is left: q(i, d) = mean_d + b_i + c_id. The difficulty b is
estimated by all destinations together, so that many observations bear on it, and the remainder c is
shrunk hard, because the argmax over noisy remainders is a winner's curse: it would leave the best
model for one that was merely lucky among a few neighbours.
"""

import enum
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

PAPER_NEIGHBOURS: Final = 10
"""K of the paper's form; the paper gives none, this is the project's reading."""

PAPER_THRESHOLD: Final = 0.3
"""Least cosine similarity of a neighbour in the paper's form; the paper gives none either."""


class Source(enum.IntEnum):
    """What an estimate rests on, from the surest to the weakest."""

    NEIGHBOURS = 0
    DESTINATION_MEAN = 1
    MODEL_MEAN = 2
    PRIOR = 3

    @property
    def label(self) -> str:
        """Such as "destination-mean"."""
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True, slots=True)
class NeighbourTarget:
    """A destination whose quality is asked for.

    Attributes:
        destination: the name under which its own outcomes were recorded.
        model: outcomes of this model at other destinations stand in for its own.
        prior_quality_ratio: expected quality of such a model when nothing was profiled.
    """

    destination: str
    model: str
    prior_quality_ratio: float


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """The neighbours of R requests and what is known of them at D targets.

    Unknown outcomes are masked by NaN inside these arrays; no estimate lets one out.

    Attributes:
        similarity: float64[R, K], cosine, falling along K; 0 where there is no neighbour.
        is_identical: bool[R, K]; the neighbour is the request's own prompt, word for word.
        own_scores: float64[R, K, D], 0 to 1; recorded at the target itself.
        scores: float64[R, K, D], 0 to 1; the target's own, else its model's elsewhere.
        difficulty: float64[R, K]; how far a neighbour's scores lie above the means of the
            destinations that answered it, on average over them; 0 where nobody did.
        difficulty_count: int64[R, K]; destinations that answered it.
        mean: float64[D]; of the target, else of its model, else its prior.
        mean_count: int64[D]; scores behind the mean, 0 for a prior.
        mean_source: int64[D]; a `Source`.
        tokens: float64[R, K, D]; answer lengths, the target's own, else its model's elsewhere.
        cut_tokens: float64[R, K, D]; where no whole answer of the target's own is known, how long
            its longest one was when a limit cut it off; NaN otherwise.
        relative_length: float64[R, K]; the neighbour's answer length over the mean length of the
            destination that wrote it, on average over them; NaN where nobody answered.
        mean_tokens: float64[D]; answers that were cut off count as going on. NaN where neither the
            target nor its model ended an answer.
        tokens_count: int64[D]; answers behind it.
        tokens_source: int64[D]; a `Source`.
    """

    similarity: FloatArray
    is_identical: NDArray[np.bool_]
    own_scores: FloatArray
    scores: FloatArray
    difficulty: FloatArray
    difficulty_count: IntArray
    mean: FloatArray
    mean_count: IntArray
    mean_source: IntArray
    tokens: FloatArray
    cut_tokens: FloatArray
    relative_length: FloatArray
    mean_tokens: FloatArray
    tokens_count: IntArray
    tokens_source: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class QualityEstimates:
    """Expected quality of each request at each target.

    Attributes:
        value: float64[R, D], 0 to 1.
        count: int64[R, D]; neighbours behind the value, or scores behind the mean it fell back to.
        source: int64[R, D]; a `Source`.
    """

    value: FloatArray
    count: IntArray
    source: IntArray


@dataclass(frozen=True, slots=True)
class Shrinkage:
    """How far ours trusts neighbours; a neighbour of similarity 1 weighs 1.

    Fitted on 7,500 of the profiled 9,000 prompts of MMLU-Pro with the other 1,500 as judges
    (`docs/quality.md`).

    Attributes:
        neighbours: K.
        bandwidth: a neighbour of similarity s weighs exp((s - 1) / bandwidth).
        identical_weight: what the same prompt weighs, word for word; not fitted, but chosen so that
            its own outcome counts for three quarters.
        difficulty_weight: pseudo-observations that the difficulty of a prompt is the average one.
        remainder_weight: pseudo-observations that a destination does as well on this prompt as
            its mean and the prompt's difficulty say.
        length_bandwidth: for answer lengths, a neighbour weighs exp((s - s_1) / length_bandwidth),
            with s_1 the similarity of the nearest one.
        length_weight: pseudo-observations that an answer is as long as the destination's latest.
        margin: estimates stay this far from 0 and 1, where one surprise costs without bound.
    """

    neighbours: int = 100
    bandwidth: float = 0.15
    identical_weight: float = 10.0
    difficulty_weight: float = 0.1
    remainder_weight: float = 3.0
    length_bandwidth: float = 0.06
    length_weight: float = 1.0
    margin: float = 0.02


def paper_quality(
    evidence: Evidence, neighbours: int = PAPER_NEIGHBOURS, threshold: float = PAPER_THRESHOLD
) -> QualityEstimates:
    """Eq. (3) of the CEMA paper: q(r, d) = sum of s_i * q(p_i, d) / sum of s_i.

    Over the K nearest profiled prompts whose similarity is at least the threshold and whose score
    at d is known; the destination's mean when there are none.

    Args:
        evidence: with at least `neighbours` along K, or as many as the store has.
        neighbours: K.
        threshold: least similarity of a neighbour, above 0.

    Raises:
        ValueError: `neighbours` is below 1 or `threshold` is not above 0.
    """
    if neighbours < 1 or not threshold > 0.0:
        raise ValueError("Eq. (3) needs at least one neighbour and a threshold above 0")
    similarity = evidence.similarity[:, :neighbours]
    scores = evidence.own_scores[:, :neighbours]
    is_used = (similarity >= threshold)[:, :, None] & ~np.isnan(scores)
    weights = np.where(is_used, similarity[:, :, None], 0.0)
    total = weights.sum(axis=1)
    count = is_used.sum(axis=1)
    has_any = count > 0
    weighted = (weights * np.nan_to_num(scores)).sum(axis=1)
    value = np.where(has_any, weighted / np.where(has_any, total, 1.0), evidence.mean)
    return _finish(np.clip(value, 0.0, 1.0), count, has_any, evidence)


def shrunk_quality(
    evidence: Evidence,
    shrinkage: Shrinkage | None = None,
    centre: FloatArray | None = None,
) -> QualityEstimates:
    """Ours: mean + shared difficulty + shrunk remainder, over many neighbours.

    With w_i = exp((s_i - 1) / h) and b_i the difficulty of neighbour i:

    - b(r) = sum of w_i * b_i / (sum of w_i + m_b), over neighbours that anybody answered;
    - c(r, d) = sum of w_i * (q(p_i, d) - mean_d - b_i) / (sum of w_i + m_c), over neighbours whose
      score at d, or at the same model elsewhere, is known;
    - q(r, d) = mean_d + b(r) + c(r, d), kept within the margins.

    An identical prompt weighs `identical_weight`: others only resemble it.

    Args:
        evidence: what the store knows.
        shrinkage: how far neighbours are trusted.
        centre: float64[R, D]; replaces the mean as what is shrunk to, such as a class table's row.
    """
    settings = shrinkage or Shrinkage()
    scores = evidence.scores[:, : settings.neighbours]
    weights = _kernel(evidence, settings)
    difficulty = evidence.difficulty[:, : settings.neighbours]
    is_rated = evidence.difficulty_count[:, : settings.neighbours] > 0
    rated_weights = np.where(is_rated, weights, 0.0)
    shared = (rated_weights * difficulty).sum(axis=1) / (
        rated_weights.sum(axis=1) + settings.difficulty_weight
    )  # [R]
    is_used = ~np.isnan(scores) & (weights > 0.0)[:, :, None]
    used_weights = np.where(is_used, weights[:, :, None], 0.0)
    remainder = np.where(is_used, scores - evidence.mean - difficulty[:, :, None], 0.0)
    total = used_weights.sum(axis=1)
    specific = (used_weights * remainder).sum(axis=1) / (total + settings.remainder_weight)
    base = np.broadcast_to(evidence.mean, specific.shape) if centre is None else centre
    value = np.clip(base + shared[:, None] + specific, settings.margin, 1.0 - settings.margin)
    count = is_used.sum(axis=1)
    # A never-profiled target moves with the difficulty, but its level is still only a prior.
    return _finish(value, count, count > 0, evidence)


def _kernel(evidence: Evidence, settings: Shrinkage) -> FloatArray:
    similarity = evidence.similarity[:, : settings.neighbours]
    is_identical = evidence.is_identical[:, : settings.neighbours]
    weights: FloatArray = np.exp((similarity - 1.0) / settings.bandwidth)
    weights = np.where(is_identical, settings.identical_weight, weights)
    return np.where(similarity > 0.0, weights, 0.0)


def _finish(
    value: FloatArray,
    count: IntArray,
    has_any: NDArray[np.bool_],
    evidence: Evidence,
) -> QualityEstimates:
    count = np.where(has_any, count, evidence.mean_count).astype(np.int64)
    source = np.where(has_any, Source.NEIGHBOURS, evidence.mean_source).astype(np.int64)
    return QualityEstimates(value, count, source)
