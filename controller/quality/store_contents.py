"""Everything in a quality store as arrays, and whether they can be what a store has held."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

UNIT_LENGTH_WITHIN: Final = 1e-2
"""How far the length of an embedding may lie from 1."""


class InvalidRecordError(ValueError):
    """A record cannot be stored; its text says which field is wrong."""


@dataclass(frozen=True, slots=True, eq=False)
class StoreContents:
    """Everything in a store, as arrays: P prompts in order of arrival, C destinations.

    Attributes:
        digests: uint8[P, 16].
        embeddings: float16[P, dimension]; half the memory, and no order of neighbours that matters
            hangs on the rest.
        destinations: names of the columns.
        models: of each column.
        scores: float32[P, C], NaN where not scored.
        score_counts: uint16[P, C]; observations behind each.
        tokens: float32[P, C], NaN where not known.
        token_counts: uint16[P, C]; 0 beside a number means that only answers that were cut off are
            known, the longest of which had so many tokens.
        seen_times: float64[P]; seconds since 1970 of the last outcome, infinite where it never
            ages. None: nothing ages.
    """

    digests: NDArray[np.uint8]
    embeddings: NDArray[np.float16]
    destinations: tuple[str, ...]
    models: tuple[str, ...]
    scores: NDArray[np.float32]
    score_counts: NDArray[np.uint16]
    tokens: NDArray[np.float32]
    token_counts: NDArray[np.uint16]
    seen_times: NDArray[np.float64] | None = None


def check_contents(contents: StoreContents) -> None:
    """Nothing when the arrays fit together and hold what records can.

    Raises:
        InvalidRecordError: they do not.
    """
    prompts, columns = len(contents.digests), len(contents.destinations)
    wanted: list[tuple[str, NDArray[Any], tuple[int, ...]]] = [
        ("digests", contents.digests, (prompts, 16)),
        ("scores", contents.scores, (prompts, columns)),
        ("score_counts", contents.score_counts, (prompts, columns)),
        ("tokens", contents.tokens, (prompts, columns)),
        ("token_counts", contents.token_counts, (prompts, columns)),
    ]
    if contents.seen_times is not None:
        wanted.append(("seen_times", contents.seen_times, (prompts,)))
    for name, array, shape in wanted:
        if array.shape != shape:
            raise InvalidRecordError(f"{name} has shape {array.shape}; expected {shape}")
    if contents.embeddings.ndim != 2 or len(contents.embeddings) != prompts:
        raise InvalidRecordError(
            f"there are {prompts} prompts and embeddings of shape {contents.embeddings.shape}"
        )
    if len(contents.models) != columns or len(set(contents.destinations)) != columns:
        raise InvalidRecordError("destinations are named twice or lack their models")
    if len({bytes(digest) for digest in contents.digests}) != prompts:
        raise InvalidRecordError("a prompt occurs twice")
    known_scores = contents.scores[~np.isnan(contents.scores)]
    faults: list[tuple[str, Callable[[], bool]]] = [
        ("an embedding is not of length 1", lambda: not _are_unit(contents.embeddings)),
        (
            "a score is not between 0 and 1",
            lambda: bool(((known_scores < 0) | (known_scores > 1)).any()),
        ),
        (
            "scores and their counts differ",
            lambda: _disagree(contents.scores, contents.score_counts),
        ),
        (
            "tokens and their counts differ",
            lambda: bool((np.isnan(contents.tokens) & (contents.token_counts > 0)).any()),
        ),
    ]
    for text, is_at_fault in faults:
        if is_at_fault():
            raise InvalidRecordError(text)


def _are_unit(embeddings: NDArray[Any]) -> bool:
    for start in range(0, len(embeddings), 8_192):  # bounds the copies
        part = embeddings[start : start + 8_192].astype(np.float32)
        lengths = np.sqrt(np.einsum("pd,pd->p", part, part))
        if not (np.abs(lengths - 1.0) <= UNIT_LENGTH_WITHIN).all():
            return False
    return True


def _disagree(means: NDArray[np.float32], counts: NDArray[np.uint16]) -> bool:
    return bool((np.isnan(means) != (counts == 0)).any())
