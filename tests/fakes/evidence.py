"""What a quality store might know, written by hand."""

import numpy as np

from controller.quality.neighbours import Evidence, Source

NAN = np.nan


def evidence(
    similarity: list[list[float]],
    scores: list[list[list[float]]],
    mean: list[float],
    *,
    own_scores: list[list[list[float]]] | None = None,
    difficulty: list[list[float]] | None = None,
    tokens: list[list[list[float]]] | None = None,
    cut_tokens: list[list[list[float]]] | None = None,
    mean_tokens: list[float] | None = None,
    relative_length: list[list[float]] | None = None,
    mean_source: Source = Source.DESTINATION_MEAN,
) -> Evidence:
    """Evidence of which only what is given is known."""
    values = np.array(scores, dtype=np.float64)
    rated = np.zeros(np.shape(similarity)) if difficulty is None else np.array(difficulty)
    return Evidence(
        similarity=np.array(similarity, dtype=np.float64),
        is_identical=np.zeros(np.shape(similarity), dtype=np.bool_),
        own_scores=values if own_scores is None else np.array(own_scores, dtype=np.float64),
        scores=values,
        difficulty=rated,
        difficulty_count=(~np.isnan(values)).sum(axis=2),
        mean=np.array(mean),
        mean_count=np.full(len(mean), 50),
        mean_source=np.full(len(mean), int(mean_source)),
        tokens=np.full_like(values, NAN) if tokens is None else np.array(tokens),
        cut_tokens=np.full_like(values, NAN) if cut_tokens is None else np.array(cut_tokens),
        relative_length=(
            np.full(np.shape(similarity), NAN)
            if relative_length is None
            else np.array(relative_length)
        ),
        mean_tokens=np.full(len(mean), NAN) if mean_tokens is None else np.array(mean_tokens),
        tokens_count=np.full(len(mean), 50),
        tokens_source=np.full(len(mean), int(Source.DESTINATION_MEAN)),
    )
