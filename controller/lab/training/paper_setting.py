"""DRLM's setting made from public data: 1258 queries, 23 configurations, 5 device classes.

The paper's 223,835 measurements are not public. What is real here: the query sets; which models of
Table I run on which devices; the devices' speeds, fitted on published measurements; outcomes of
Llama 3.1 8B and Gemma 2 2B on GSM8K and of Mistral 7B on GSM8K and MMLU's test part; how hard a
question of these is for other models; and how long answers to GSM8K are. All else is synthetic and
named in `SYNTHETIC`.
"""

import csv
import gzip
import json
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from controller.domain.hardware import DeviceClass, ModelConfiguration
from controller.lab.simulator.cluster import EFFECTIVE_BITS, ClusterDescription
from controller.lab.simulator.scenario_file import read_scenario
from controller.lab.training.measurement_table import TrainingTable
from controller.predictors.features import profile_query
from controller.predictors.reading_writing import Placement

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

CLASSES: Final = ("biology", "commonsense", "geography", "history", "mathematics", "truthfulness")

SUBJECTS: Final = {
    "college_biology": "biology",
    "high_school_geography": "geography",
    "high_school_world_history": "history",
}
"""Of MMLU, all three splits: 165, 225 and 268 questions."""

SAMPLED: Final = 200
"""Questions of GSM8K, CommonsenseQA and TruthfulQA each."""

SYNTHETIC: Final = (
    "right and wrong answers where no published outcome of the model was at hand: a one-parameter "
    "item response model whose ability is set so that each class's mean is `ANCHORS`",
    "difficulty of CommonsenseQA's, TruthfulQA's and MMLU's val and dev questions",
    "the loss of quality by quantisation, `QUANTISATION_LOGITS`",
    "answer lengths but GSM8K's, and each model's talkativeness",
    "the speed of reading prompts on most devices, `PREFILL_RATIOS` times that of writing",
    "lognormal noise of times, sigma `TIME_SIGMA`",
)

ANCHORS: Final[Mapping[str, tuple[float, ...]]] = {
    # Mean accuracy by class, in the order of CLASSES. Ours: rounded to what is usually reported of
    # these models, so that they stand on the scale of the published outcomes used beside them.
    # That is higher than the paper's own figures, whose best mean is 0.54 to 0.56 (Fig. 7b).
    "gpt-oss-20b": (0.90, 0.82, 0.88, 0.86, 0.93, 0.55),
    "gemma3-12b": (0.83, 0.79, 0.83, 0.82, 0.92, 0.55),
    "llama3.1-8b": (0.76, 0.76, 0.77, 0.76, 0.84, 0.52),
    "mistral-7b": (0.66, 0.68, 0.70, 0.64, 0.40, 0.52),
    "llama3.2-3b": (0.65, 0.68, 0.66, 0.65, 0.75, 0.46),
    "gemma2-2b": (0.63, 0.69, 0.63, 0.61, 0.61, 0.48),
    "qwen3-1.7b": (0.65, 0.68, 0.62, 0.60, 0.73, 0.47),
    "qwen3-0.6b": (0.46, 0.52, 0.45, 0.43, 0.56, 0.46),
    "gemma3-1b": (0.42, 0.48, 0.42, 0.41, 0.58, 0.38),
    "llama3.2-1b": (0.47, 0.52, 0.46, 0.46, 0.42, 0.38),
    "tinyllama-1.1b": (0.26, 0.28, 0.26, 0.26, 0.03, 0.30),
    "gemma3-0.27b": (0.26, 0.28, 0.26, 0.26, 0.06, 0.35),
}

QUANTISATION_LOGITS: Final = {2: -0.9, 3: -0.35, 4: -0.12, 8: 0.0, 16: 0.0}

PUBLISHED: Final[Mapping[str, Mapping[str, str]]] = {
    # scale -> column of the joined tables. Mistral's is the base model; a share above one half
    # counts as right.
    "gsm8k": {
        "llama3.1-8b": "zeroeval:Meta-Llama-3.1-8B-Instruct",
        "gemma2-2b": "zeroeval:gemma-2-2b-it",
        "mistral-7b": "routerdc:mistralai/Mistral-7B-v0.1",
    },
    "mmlu": {"mistral-7b": "routerdc:mistralai/Mistral-7B-v0.1"},
}

PREFILL_RATIOS: Final = {"RP": 1.5, "NJN": 20.0, "JON": 20.0, "JOA": 20.0, "VM": 4.0}
"""Reading over writing speed. Measured: RP by the Compute Module 4, NJN by Gemma 3 1B. JON and JOA
are taken from NJN, VM from the Pi 5's CPU rows."""

_MEAN_TOKENS: Final = (60.0, 45.0, 55.0, 70.0, 210.0, 65.0)
_TALKATIVE: Final = {"gpt-oss": 2.0, "qwen3": 2.5, "tinyllama": 1.2, "mistral": 0.9}
_LENGTH_SIGMA: Final = 0.35
TIME_SIGMA: Final = 0.2
_DIFFICULTY_SIGMA: Final = 1.4
_OVERHEAD_SECONDS: Final = 0.1
_CHARACTERS_PER_TOKEN: Final = 4.0


class PaperDataError(Exception):
    """The public data are not there or not as expected; the text names the file."""


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """Writing speed of one device class: seconds a token = bytes / bandwidth + overhead.

    Attributes:
        bandwidth: bytes of weights read in a second, effective.
        overhead_seconds: of a token, whatever the model.
        rows: published measurements it was fitted on.
        median_error_ratio: of those rows, median |predicted / measured - 1|.
    """

    bandwidth: float
    overhead_seconds: float
    rows: int
    median_error_ratio: float

    def decode_seconds(self, weight_bytes: float) -> float:
        """Seconds that one token takes."""
        return weight_bytes / self.bandwidth + self.overhead_seconds


@dataclass(frozen=True, slots=True)
class PaperSetting:
    """The queries, and what would be measured of them everywhere.

    Attributes:
        table: all measurements, for `fit`.
        models: the 23 configurations.
        devices: the 5 classes.
        placements: the 85 pairs of Table I.
        seconds: float64[Q, 85], inference time with its noise: what was "measured".
        true_seconds: float64[Q, 85], without the noise.
        first_token_seconds: float64[Q, 85], the part of `true_seconds` until the first token.
        correct: bool[Q, 23].
        is_real: bool[Q, 23], whether `correct` is a published outcome.
        completion_tokens: float64[Q, 23].
        speeds: by device kind.
        sources: files that were read.
    """

    table: TrainingTable
    models: tuple[ModelConfiguration, ...]
    devices: tuple[DeviceClass, ...]
    placements: tuple[Placement, ...]
    seconds: FloatArray
    true_seconds: FloatArray
    first_token_seconds: FloatArray
    correct: BoolArray
    is_real: BoolArray
    completion_tokens: FloatArray
    speeds: Mapping[str, DeviceSpeed]
    sources: tuple[Path, ...]


@cache
def paper_cluster() -> ClusterDescription:
    """DRLM's cluster, whose scenario file has Table I: 23 configurations, 85 pairs with classes."""
    return read_scenario("drlm")


def table_one() -> tuple[tuple[ModelConfiguration, ...], tuple[Placement, ...]]:
    """The 23 configurations and the 85 pairs with device classes that Table I states."""
    cluster = paper_cluster()
    models = cluster.configurations
    pairs = zip(*cluster.pairs, strict=True)
    return models, tuple((models[model], cluster.devices[device]) for model, device in pairs)


@dataclass(frozen=True, slots=True)
class _Query:
    """A question, its class, and its row in a table of published outcomes if it has one."""

    text: str
    label: str
    source: str
    row: tuple[str, str] | None


def paper_setting_from(folder: Path, *, seed: int = 0) -> PaperSetting:
    """The whole setting; the same folder and seed make the same.

    Args:
        folder: with gsm8k, mmlu, commonsenseqa, truthfulqa, joined-outcomes, zeroeval-outcomes and
            device-benchmarks, as docs/predictors.md names them.
        seed: of the sampled questions and of all synthetic parts.

    Raises:
        PaperDataError: a file is missing or has other columns.
    """
    rng = np.random.default_rng(seed)
    sources: list[Path] = []
    try:
        queries = _queries(folder, seed, sources)
        outcomes = {
            "gsm8k": _outcomes(folder / "joined-outcomes" / "gsm8k_test_outcomes.csv.gz", sources),
            "mmlu": _outcomes(folder / "joined-outcomes" / "mmlu_test_outcomes.csv.gz", sources),
        }
        lengths = _gsm8k_lengths(folder / "zeroeval-outcomes" / "gsm8k_output_chars.csv", sources)
        speeds = fit_speeds(folder / "device-benchmarks" / "device_llm_throughput.csv", sources)
    except OSError as error:
        raise PaperDataError(f"{error.filename}: {error.strerror}") from error
    except (KeyError, ValueError) as error:
        raise PaperDataError(f"the data in {folder} are not as expected: {error}") from error
    models, placements = table_one()
    labels = np.array([CLASSES.index(query.label) for query in queries])
    correct, is_real = _answers(queries, labels, models, outcomes, rng)
    tokens = _tokens(queries, labels, models, lengths, rng)
    asked = np.array([profile_query(query.text).prompt_tokens for query in queries], dtype=float)
    first = np.empty((len(queries), len(placements)))
    true = np.empty_like(first)
    cluster = paper_cluster()
    for column, (model, device) in enumerate(zip(*cluster.pairs, strict=True)):
        kind = cluster.devices[device].kind
        one = speeds[kind].decode_seconds(cluster.models[model].read_bytes)
        first[:, column] = _OVERHEAD_SECONDS + asked * one / PREFILL_RATIOS[kind]
        true[:, column] = first[:, column] + tokens[:, model] * one
    seconds = true * np.exp(rng.normal(0.0, TIME_SIGMA, true.shape))
    return PaperSetting(
        table=_table(queries, labels, models, placements, seconds, correct, tokens),
        models=models,
        devices=cluster.devices,
        placements=placements,
        seconds=seconds,
        true_seconds=true,
        first_token_seconds=first,
        correct=correct,
        is_real=is_real,
        completion_tokens=tokens,
        speeds=speeds,
        sources=tuple(sources),
    )


# -- queries --------------------------------------------------------------------------------------


def _open(path: Path, sources: list[Path]) -> IO[str]:
    file: IO[str] = (
        gzip.open(path, "rt", encoding="utf-8", newline="")  # noqa: SIM115 - the caller closes it
        if path.suffix == ".gz"
        else path.open(encoding="utf-8", newline="")
    )
    sources.append(path)
    return file


def _queries(folder: Path, seed: int, sources: list[Path]) -> list[_Query]:
    found: list[_Query] = []
    for split in ("test", "val", "dev"):
        with _open(folder / "mmlu" / f"mmlu_{split}.csv.gz", sources) as file:
            for row in csv.DictReader(file):
                label = SUBJECTS.get(row["subject"])
                if label is None:
                    continue
                choices = "\n".join(f"{letter}. {row[letter]}" for letter in "ABCD")
                key = (row["subject"], row["index"]) if split == "test" else None
                found.append(_Query(f"{row['question']}\n{choices}", label, "mmlu", key))
    with _open(folder / "gsm8k" / "test.jsonl", sources) as file:
        numbered = [(str(at), json.loads(line)["question"]) for at, line in enumerate(file)]
    for at, question in _sample(numbered, seed):
        found.append(_Query(question, "mathematics", "gsm8k", ("", at)))
    with _open(folder / "commonsenseqa" / "dev_rand_split.jsonl", sources) as file:
        asked = [json.loads(line)["question"] for line in file]
    for item in _sample(asked, seed):
        choices = "\n".join(f"{choice['label']}. {choice['text']}" for choice in item["choices"])
        found.append(_Query(f"{item['stem']}\n{choices}", "commonsense", "commonsenseqa", None))
    with _open(folder / "truthfulqa" / "TruthfulQA.csv", sources) as file:
        questions = [row["Question"] for row in csv.DictReader(file)]
    found.extend(
        _Query(question, "truthfulness", "truthfulqa", None)
        for question in _sample(questions, seed)
    )
    return found


def _sample(items: list[Any], seed: int) -> list[Any]:
    chosen = random.Random(seed).sample(range(len(items)), min(SAMPLED, len(items)))
    return [items[at] for at in sorted(chosen)]


# -- outcomes and lengths -------------------------------------------------------------------------


def _outcomes(path: Path, sources: list[Path]) -> dict[tuple[str, str], dict[str, float]]:
    """Score by column name, for each (subject, index)."""
    with _open(path, sources) as file:
        return {
            (row.get("subject", ""), row["index"]): {
                name: float(value)
                for name, value in row.items()
                # llm_03 of psnirt must be left out on MMLU, its source says.
                if ":" in name and value and not name.endswith("llm_03")
            }
            for row in csv.DictReader(file)
        }


def _answers(
    queries: list[_Query],
    labels: NDArray[np.int64],
    models: tuple[ModelConfiguration, ...],
    outcomes: Mapping[str, Mapping[tuple[str, str], Mapping[str, float]]],
    rng: np.random.Generator,
) -> tuple[BoolArray, BoolArray]:
    difficulty = rng.normal(0.0, _DIFFICULTY_SIGMA, len(queries))
    published: list[Mapping[str, float]] = []
    for at, query in enumerate(queries):
        known = outcomes.get(query.source, {}).get(query.row, {}) if query.row else {}
        published.append(known)
        if known:
            right = sum(score >= 0.5 for score in known.values())
            difficulty[at] = -_logit((right + 0.5) / (len(known) + 1.0))
    for label in range(len(CLASSES)):  # each class has difficulties of mean 0 and one spread
        members = labels == label
        if members.any():
            spread = max(float(difficulty[members].std()), 1e-9)
            difficulty[members] -= difficulty[members].mean()
            difficulty[members] *= _DIFFICULTY_SIGMA / spread
    luck = rng.random((len(queries), len({model.scale_name for model in models})))
    scales = list(dict.fromkeys(model.scale_name for model in models))
    correct = np.zeros((len(queries), len(models)), dtype=np.bool_)
    is_real = np.zeros_like(correct)
    for column, model in enumerate(models):
        # One draw a scale: quantising a model changes few of its answers.
        drawn = luck[:, scales.index(model.scale_name)]
        for label in range(len(CLASSES)):
            members = np.flatnonzero(labels == label)
            if members.size == 0:
                continue
            ability = _ability(ANCHORS[model.scale_name][label], difficulty[members])
            ability += QUANTISATION_LOGITS[model.quantisation_bits]
            chance = 1.0 / (1.0 + np.exp(-(ability - difficulty[members])))
            correct[members, column] = drawn[members] < chance
        for at, query in enumerate(queries):
            name = PUBLISHED.get(query.source, {}).get(model.scale_name)
            # Published runs were not quantised, or lightly.
            if name is not None and name in published[at] and model.quantisation_bits >= 4:
                correct[at, column] = published[at][name] >= 0.5
                is_real[at, column] = True
    return correct, is_real


def _logit(share: float) -> float:
    return math.log(share / (1.0 - share))


def _ability(share: float, difficulty: FloatArray) -> float:
    """The ability at which the mean chance over these questions is `share`; by bisection."""
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2.0
        if float(np.mean(1.0 / (1.0 + np.exp(difficulty - middle)))) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0


def _gsm8k_lengths(path: Path, sources: list[Path]) -> dict[str, float]:
    """Median over models of the tokens written, by row of GSM8K's test file."""
    found: dict[str, float] = {}
    with _open(path, sources) as file:
        for row in csv.DictReader(file):
            index = re.search(r"(\d+)$", row["id"])
            counts = [float(value) for name, value in row.items() if name != "id" and value]
            if index is not None and counts:
                found[str(int(index.group(1)))] = float(np.median(counts)) / _CHARACTERS_PER_TOKEN
    return found


def _tokens(
    queries: list[_Query],
    labels: NDArray[np.int64],
    models: tuple[ModelConfiguration, ...],
    lengths: Mapping[str, float],
    rng: np.random.Generator,
) -> FloatArray:
    base = np.array(_MEAN_TOKENS)[labels] * np.exp(rng.normal(0.0, _LENGTH_SIGMA, len(queries)))
    for at, query in enumerate(queries):
        if query.source == "gsm8k" and query.row and query.row[1] in lengths:
            base[at] = lengths[query.row[1]]
    talkative = np.array([_TALKATIVE.get(model.family, 1.0) for model in models])
    noise = np.exp(rng.normal(0.0, _LENGTH_SIGMA / 2.0, (len(queries), len(models))))
    found: FloatArray = np.maximum(1.0, np.round(base[:, None] * talkative[None, :] * noise))
    return found


# -- speeds ---------------------------------------------------------------------------------------


def _device_of(row: Mapping[str, str]) -> str | None:
    """Which of the paper's classes a published row measures; None for what it has not."""
    device, runtime = row["device"], row["runtime"].lower()
    # Vendors' runtimes are up to twice as fast as the llama.cpp that the paper's cluster runs.
    if not ("llama.cpp" in runtime or "ollama" in runtime) or "not llama.cpp" in runtime:
        return None
    if device.startswith(("Raspberry Pi 4", "Raspberry Pi Compute Module 4")):
        return "RP"
    if device.startswith("Jetson Nano") and row["backend"] == "cuda":
        return "NJN"
    if device.startswith("Jetson Orin Nano"):
        return "JON"
    # The rows of "AGX Orin 64GB" are of an unstated, low power mode: a third of the others' speed.
    if device.startswith("Jetson AGX Orin") and "64GB" not in device:
        return "JOA"
    return "VM" if row["class"] == "vm" else None


def _published_bits(quantisation: str) -> float:
    found = re.search(r"(?:Q|INT)(\d+)|(\d+)-bit", quantisation)
    bits = int(found.group(1) or found.group(2)) if found else 4  # Ollama's default is Q4_K_M
    return EFFECTIVE_BITS.get(bits, float(bits))


def fit_speeds(path: Path, sources: list[Path] | None = None) -> dict[str, DeviceSpeed]:
    """Speeds of the five classes, each fitted on its published rows.

    Least squares of the relative error of seconds a token over (bandwidth, overhead), both at
    least 0: bytes are what decoding is bound by, and the overhead bends it for small models.

    Raises:
        ValueError: a class has no rows.
        OSError: the file cannot be read.
    """
    seen: dict[str, list[tuple[float, float]]] = {}
    with _open(path, [] if sources is None else sources) as file:
        for row in csv.DictReader(file):
            kind = _device_of(row)
            if kind is None or not row["decode_tps"] or not row["params_b"]:
                continue
            weight = float(row["params_b"]) * 1e9 * _published_bits(row["quant"]) / 8.0
            seen.setdefault(kind, []).append((weight, 1.0 / float(row["decode_tps"])))
    devices = paper_cluster().devices
    missing = [device.kind for device in devices if device.kind not in seen]
    if missing:
        raise ValueError(f"{path.name} has no rows of {', '.join(missing)}")
    return {device.kind: _fit_speed(np.array(seen[device.kind])) for device in devices}


def _fit_speed(rows: FloatArray) -> DeviceSpeed:
    weight, seconds = rows[:, 0], rows[:, 1]
    design = np.stack([weight, np.ones_like(weight)], axis=1) / seconds[:, None]
    slope, overhead = np.linalg.lstsq(design, np.ones(len(rows)), rcond=None)[0]
    if overhead < 0 or slope <= 0 or np.unique(weight).shape[0] < 2:
        ratio = weight / seconds
        slope, overhead = float(ratio.sum() / (ratio**2).sum()), 0.0
    error = np.abs((weight * slope + overhead) / seconds - 1.0)
    return DeviceSpeed(1.0 / float(slope), float(overhead), len(rows), float(np.median(error)))


# -- the table ------------------------------------------------------------------------------------


def _table(
    queries: list[_Query],
    labels: NDArray[np.int64],
    models: tuple[ModelConfiguration, ...],
    placements: tuple[Placement, ...],
    seconds: FloatArray,
    correct: BoolArray,
    tokens: FloatArray,
) -> TrainingTable:
    model = np.array([models.index(placed) for placed, _ in placements])
    devices = paper_cluster().devices
    device = np.array([devices.index(where) for _, where in placements])
    count, pairs = seconds.shape
    query = np.repeat(np.arange(count), pairs)
    every_model = np.tile(model, count)
    return TrainingTable(
        prompts=tuple(item.text for item in queries),
        classes=CLASSES,
        class_index=labels.astype(np.int64),
        model_names=tuple(item.name for item in models),
        models=models,
        devices=devices,
        query=query,
        model=every_model,
        device=np.tile(device, count),
        seconds=seconds.reshape(-1),
        completion_tokens=tokens[query, every_model],
        score_ratio=correct[query, every_model].astype(np.float64),
    )
