"""Takes outcomes of a table into a controller's quality store while it is not running."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from controller.config import QualitySettings
from controller.lab.offline.outcome_tables import TableOutcome
from controller.quality.embedding import EmbeddingUnavailableError
from controller.quality.files import QualityFilesError
from controller.quality.predictor import Outcome, destination_key, open_quality_predictor

IMPORTED_NODE: Final = "imported"
"""Stands for the node of outcomes that no node of the fleet had."""

_PROMPTS_AT_ONCE: Final = 32


class ImportFailedError(Exception):
    """The store cannot take outcomes; the text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What was taken in.

    Attributes:
        outcomes: scores of a prompt and a model.
        prompts: different ones.
        models: different ones.
        stored_prompts: that the store knows now.
    """

    outcomes: int
    prompts: int
    models: int
    stored_prompts: int


def import_outcomes(
    outcomes: Sequence[TableOutcome],
    renames: Mapping[str, str],
    data_dir: Path,
    embedding_dir: Path | None,
    say: Callable[[str], None],
) -> ImportReport:
    """Embed the prompts and keep every outcome, on disk when this returns.

    Args:
        outcomes: of a table; the same ones taken in twice count twice.
        renames: name in the table -> name in the catalogue; others keep theirs.
        data_dir: of the controller.
        embedding_dir: None takes the cache folder.
        say: is told how it goes.

    Raises:
        ImportFailedError: there is nothing to take in, no embedding model, or the store is damaged,
            in use or cannot be written.
    """
    if not outcomes:
        raise ImportFailedError("no outcomes are left to take in")
    by_prompt: dict[str, list[TableOutcome]] = defaultdict(list)
    for outcome in outcomes:
        by_prompt[outcome.prompt].append(outcome)
    prompts = list(by_prompt)
    settings = QualitySettings(embedding_dir=str(embedding_dir) if embedding_dir else "")
    try:
        predictor = open_quality_predictor(settings, data_dir)
        try:
            for start in range(0, len(prompts), _PROMPTS_AT_ONCE):
                group = prompts[start : start + _PROMPTS_AT_ONCE]
                predictor.learn(
                    [_outcome(found, renames) for prompt in group for found in by_prompt[prompt]]
                )
                if start % (64 * _PROMPTS_AT_ONCE) == 0:
                    say(f"{start + len(group)} of {len(prompts)} prompts")
            predictor.maintain()
            stored = predictor.profiled_prompts
        finally:
            predictor.close()
    except EmbeddingUnavailableError as error:
        raise ImportFailedError(
            f"there is no embedding model ({error}); make one with `edge-controller embedding "
            "export`"
        ) from error
    except QualityFilesError as error:
        raise ImportFailedError(str(error)) from error
    models = {renames.get(outcome.model, outcome.model) for outcome in outcomes}
    return ImportReport(len(outcomes), len(prompts), len(models), stored)


def _outcome(found: TableOutcome, renames: Mapping[str, str]) -> Outcome:
    model = renames.get(found.model, found.model)
    return Outcome(
        found.prompt,
        destination_key(IMPORTED_NODE, model),
        model,
        found.score_ratio,
        found.output_tokens,
    )
