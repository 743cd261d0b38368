"""A prompt's profile: structure that is cheap to count, and what its embedding says.

DRLM's query profiler (section III-1). Syntactic complexity there is not defined; here it is a
number in [0, 1) made of three signs that need no parser, see `syntactic_complexity`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

STRUCTURE_NAMES: Final = (
    "prompt_tokens",
    "prompt_words",
    "prompt_sentences",
    "prompt_characters",
    "lexical_diversity_ratio",
    "syntactic_complexity_ratio",
)
"""Columns of `QueryProfile.structure`, in its order."""

CHARACTERS_PER_TOKEN: Final = 4.0

_WORD: Final = re.compile(r"\w+")
_SENTENCE_END: Final = re.compile(r"[.!?]+(?=\s|$)|\n+")
_JOINT: Final = re.compile(
    r"[,;:()\[\]]|\b(?:and|or|but|if|then|because|although|while|when|where|which|that|who|whose|"
    r"whom|since|unless|until|after|before|than|whether|as)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class QueryProfile:
    """What is known of one prompt before it runs.

    Attributes:
        prompt_tokens: by the caller's tokenizer, or estimated as a quarter of the characters or
            the words, whichever is more.
        prompt_words: runs of word characters.
        prompt_sentences: pieces with a word in them, up to a line's end or to ".", "!" or "?"
            before a space, at least 1.
        prompt_characters: length.
        lexical_diversity_ratio: different words, ignoring case, over all words; 0 without words.
        syntactic_complexity_ratio: see `syntactic_complexity`.
        class_probabilities: float64[C], sum 1; None when no classifier has looked at it.
        embedding: float32[384], length 1; None when it was not embedded.
    """

    prompt_tokens: int
    prompt_words: int
    prompt_sentences: int
    prompt_characters: int
    lexical_diversity_ratio: float
    syntactic_complexity_ratio: float
    class_probabilities: FloatArray | None = None
    embedding: NDArray[np.float32] | None = None

    @property
    def structure(self) -> FloatArray:
        """float64[6], as `STRUCTURE_NAMES` names them."""
        return np.array(
            (
                self.prompt_tokens,
                self.prompt_words,
                self.prompt_sentences,
                self.prompt_characters,
                self.lexical_diversity_ratio,
                self.syntactic_complexity_ratio,
            ),
            dtype=np.float64,
        )


def syntactic_complexity(words: int, sentences: int, joints: int, word_characters: int) -> float:
    """How involved the sentences are, 0 to below 1, the mean of three saturating signs.

    Long sentences (words a sentence, half at 20), many clauses (commas, brackets, conjunctions
    and relative pronouns a sentence, half at 3), and long words (characters a word beyond 3,
    half at 3). Each is x / (x + half), so it rises with x and never jumps.
    """
    if words == 0:
        return 0.0
    length = words / max(1, sentences)
    clauses = joints / max(1, sentences)
    letters = max(0.0, word_characters / words - 3.0)
    return (length / (length + 20.0) + clauses / (clauses + 3.0) + letters / (letters + 3.0)) / 3.0


def profile_query(
    text: str,
    *,
    prompt_tokens: int | None = None,
    class_probabilities: FloatArray | None = None,
    embedding: NDArray[np.float32] | None = None,
) -> QueryProfile:
    """Count what a prompt is made of; tens of microseconds for a paragraph.

    Args:
        text: the prompt, without a chat template.
        prompt_tokens: where the caller knows better than the estimate.
        class_probabilities: float64[C], of `QueryClassifier.probabilities`.
        embedding: float32[384], of an `EmbeddingBackend`.
    """
    words = _WORD.findall(text)
    sentences = max(1, sum(_WORD.search(part) is not None for part in _SENTENCE_END.split(text)))
    distinct = len({word.lower() for word in words})
    tokens = prompt_tokens
    if tokens is None:
        tokens = max(len(words), round(len(text) / CHARACTERS_PER_TOKEN), 1)
    return QueryProfile(
        prompt_tokens=tokens,
        prompt_words=len(words),
        prompt_sentences=sentences,
        prompt_characters=len(text),
        lexical_diversity_ratio=distinct / len(words) if words else 0.0,
        syntactic_complexity_ratio=syntactic_complexity(
            len(words), sentences, len(_JOINT.findall(text)), sum(map(len, words))
        ),
        class_probabilities=class_probabilities,
        embedding=embedding,
    )


def structures(queries: Sequence[QueryProfile]) -> FloatArray:
    """float64[Q, 6], the structure of each query."""
    if not queries:
        return np.zeros((0, len(STRUCTURE_NAMES)))
    return np.stack([query.structure for query in queries])


def class_probabilities(queries: Sequence[QueryProfile], n_classes: int) -> FloatArray:
    """float64[Q, C]; a query that was not classified counts as equally likely of every class.

    Raises:
        ValueError: a query was classified into another number of classes.
    """
    found = np.full((len(queries), n_classes), 1.0 / n_classes)
    for row, query in enumerate(queries):
        if query.class_probabilities is not None:
            if query.class_probabilities.shape != (n_classes,):
                raise ValueError(
                    f"a query has {query.class_probabilities.shape[0]} class probabilities, but "
                    f"the predictors were fitted with {n_classes} classes; fit them together"
                )
            found[row] = query.class_probabilities
    return found
