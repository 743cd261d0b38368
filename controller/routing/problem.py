"""The dense arrays that one routing decision is made from.

Axes, always in this order: R requests, D destinations, N nodes. The same arrays are the `.npz`
problem file of `docs/problem-format.md`.
"""

import enum
import hashlib
import zipfile
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import Any, BinaryIO, Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]

FORMAT: Final = "pointsman.problem/1"
"""The value of the array `format` in a problem file."""

LARGEST_VALUE: Final = 1e15
"""Greater entries are refused: they are mistakes, and their sums would lose the other terms."""

TERMS: Final = ("quality", "cost", "energy", "time")
"""Names of the four terms, in the order of `weights` and `bounds`."""


class ProblemError(ValueError):
    """The arrays do not describe a routing problem.

    ProblemError
    ├── EmptyBatch          no request
    ├── NoDestination       no destination or no node
    ├── MalformedArray      wrong shape, dtype, or an index that points nowhere
    ├── InvalidValue        NaN, an infinity, a negative time, a quality outside 0..1
    ├── InvalidWeights      negative, or not summing to 1
    ├── MissingMetadata     a policy needs an optional array that the problem lacks
    └── UnreadableProblem   not a problem file, or of a newer format
    """


class EmptyBatch(ProblemError):
    """There is nothing to route."""


class NoDestination(ProblemError):
    """There is nowhere to route to."""


class MalformedArray(ProblemError):
    """An array has the wrong shape or dtype, or an index points nowhere."""


class InvalidValue(ProblemError):
    """An array holds a number that its quantity cannot have."""


class InvalidWeights(ProblemError):
    """The weights are not four shares of 1."""


class MissingMetadata(ProblemError):
    """A policy looks at something that this problem does not say.

    Attributes:
        policy: who looks.
        array: the optional array it needs.
    """

    def __init__(self, policy: str, array: str) -> None:
        self.policy = policy
        self.array = array
        super().__init__(f"policy {policy!r} needs the array {array}, which this problem lacks")


class UnreadableProblem(ProblemError):
    """The file is not a problem file that this version reads."""


class Normalisation(enum.Enum):
    """Where the range of a term comes from; `controller.routing.objective` has the formulas."""

    PAYOFF = "payoff"
    RANDOM = "random"
    MINMAX = "minmax"


def name_key(name: str) -> int:
    """A number below 2**63 that stands for a name in arrays, the same everywhere and always."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def _empty_metadata() -> "ProblemMetadata":
    return ProblemMetadata()


@dataclass(frozen=True, slots=True, eq=False)
class ProblemMetadata:
    """What some policies look at besides the terms; each part is optional.

    A policy that needs an absent part raises `MissingMetadata` and names it.

    Attributes:
        node_is_edge: bool[N]; False is a cloud node. For placement policies.
        model_of: int64[D]; index of the model served there. Equal models share an index.
        slots: int64[D]; sequences decoded at once. For finish-time estimates.
        parameters_billions: float64[D]; size of the model.
        predicted_tokens: float64[R]; predicted length, prompt and answer together.
        class_quality: float64[R, D]; quality of the request's class at the destination, 0 to 1.
        cluster_error: float64[R, D]; error rate of the request's cluster at the destination.
        node_key: int64[N]; `name_key` of each node's id, at least 0; for policies trained on a
            fleet.
        model_key: int64[D]; `name_key` of the model served there, at least 0.
    """

    node_is_edge: BoolArray | None = None
    model_of: IntArray | None = None
    slots: IntArray | None = None
    parameters_billions: FloatArray | None = None
    predicted_tokens: FloatArray | None = None
    class_quality: FloatArray | None = None
    cluster_error: FloatArray | None = None
    node_key: IntArray | None = None
    model_key: IntArray | None = None


_METADATA_AXES: Final = {
    "node_is_edge": ("N",),
    "model_of": ("D",),
    "slots": ("D",),
    "parameters_billions": ("D",),
    "predicted_tokens": ("R",),
    "class_quality": ("R", "D"),
    "cluster_error": ("R", "D"),
    "node_key": ("N",),
    "model_key": ("D",),
}
_METADATA_DTYPES: Final[dict[str, type[np.generic]]] = {
    "node_is_edge": np.bool_,
    "model_of": np.int64,
    "slots": np.int64,
    "node_key": np.int64,
    "model_key": np.int64,
}


@dataclass(frozen=True, slots=True, eq=False)
class RoutingProblem:
    """One decision, complete: a policy asks nobody anything else.

    The constructor checks everything, converts to the dtypes named below and makes the arrays
    read-only, so a policy may index without looking twice and cannot change what others see. It
    copies arrays that somebody could still write to.

    Attributes:
        quality: float64[R, D], 0 to 1; predicted quality.
        cost_usd: float64[R, D]; money.
        energy_joules: float64[R, D]; processing and communication.
        work_seconds: float64[R, D]; executor seconds occupied when the engine is saturated.
        latency_seconds: float64[R, D]; service time alone (tau), without network.
        network_seconds: float64[R, D]; transfer and round trip (nu).
        node_of: int64[D]; node index of each destination. Destinations of a node share its queue.
        backlog_seconds: float64[N]; work ahead of this batch.
        feasible: bool[R, D]; allowed pairs. A row without True is a request that goes nowhere.
        weights: float64[4]; quality, cost, energy, time; at least 0, sum 1.
        normalisation: how bounds are computed when absent.
        bounds: float64[4, 2] or None; lo and hi of the four terms.
        metadata: what some policies look at besides.

    Raises:
        ProblemError: by subclass, what is wrong and where.
    """

    quality: FloatArray
    cost_usd: FloatArray
    energy_joules: FloatArray
    work_seconds: FloatArray
    latency_seconds: FloatArray
    network_seconds: FloatArray
    node_of: IntArray
    backlog_seconds: FloatArray
    feasible: BoolArray
    weights: FloatArray
    normalisation: Normalisation = Normalisation.PAYOFF
    bounds: FloatArray | None = None
    metadata: ProblemMetadata = field(default_factory=_empty_metadata)

    def __post_init__(self) -> None:
        shape = np.shape(self.quality)
        if len(shape) != 2:
            raise MalformedArray(f"quality has shape {shape}; it must be [requests, destinations]")
        if shape[0] == 0:
            raise EmptyBatch("the batch has no request; route at least one")
        nodes = np.shape(self.backlog_seconds)
        if shape[1] == 0 or nodes == (0,):
            raise NoDestination("there is no destination; wait until a node has a model ready")
        sizes = {"R": shape[0], "D": shape[1], "N": nodes[0] if len(nodes) == 1 else -1}
        for name in _PAIR_ARRAYS:
            self._put(name, _checked(name, getattr(self, name), ("R", "D"), sizes))
        self._put(
            "backlog_seconds", _checked("backlog_seconds", self.backlog_seconds, ("N",), sizes)
        )
        self._put(
            "feasible", _checked("feasible", self.feasible, ("R", "D"), sizes, dtype=np.bool_)
        )
        self._put("node_of", _checked("node_of", self.node_of, ("D",), sizes, dtype=np.int64))
        if self.node_of.min() < 0 or self.node_of.max() >= sizes["N"]:
            raise MalformedArray(
                f"node_of names a node outside 0..{sizes['N'] - 1}; "
                "backlog_seconds needs one entry a node"
            )
        if self.quality.max() > 1.0:
            raise InvalidValue(f"quality{_where(self.quality > 1.0)} is above 1")
        self._put("weights", checked_weights(self.weights))
        if not isinstance(self.normalisation, Normalisation):
            raise MalformedArray(
                f"normalisation is {self.normalisation!r}; give a Normalisation member"
            )
        if self.bounds is not None:
            self._put("bounds", _checked_bounds(self.bounds))
        self._put("metadata", _checked_metadata(self.metadata, sizes))

    def _put(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def n_requests(self) -> int:
        """R."""
        return int(self.quality.shape[0])

    @property
    def n_destinations(self) -> int:
        """D."""
        return int(self.quality.shape[1])

    @property
    def n_nodes(self) -> int:
        """N."""
        return int(self.backlog_seconds.shape[0])

    @property
    def routable(self) -> BoolArray:
        """bool[R]; whether a request has any feasible destination."""
        return np.asarray(self.feasible.any(axis=1))


_PAIR_ARRAYS: Final = (
    "quality",
    "cost_usd",
    "energy_joules",
    "work_seconds",
    "latency_seconds",
    "network_seconds",
)


def checked_weights(weights: ArrayLike) -> FloatArray:
    """The four weights as float64[4], read-only.

    Raises:
        InvalidWeights: not four numbers, one is negative or not finite, or the sum is not 1.
    """
    array = np.array(weights, dtype=np.float64)
    if array.shape != (4,):
        raise InvalidWeights(f"weights has shape {array.shape}; give {', '.join(TERMS)}")
    if not np.isfinite(array).all() or (array < 0.0).any():
        raise InvalidWeights(f"weights must be finite and at least 0, not {array.tolist()}")
    if abs(array.sum() - 1.0) > 1e-6:
        raise InvalidWeights(f"weights must sum to 1, not {array.sum():.6g}; divide by the sum")
    return _frozen(array)


def _checked(
    name: str,
    values: ArrayLike,
    axes: tuple[str, ...],
    sizes: dict[str, int],
    dtype: type[np.generic] = np.float64,
) -> NDArray[Any]:
    raw = np.asarray(values)
    expected = tuple(sizes[axis] for axis in axes)
    if raw.shape != expected:
        raise MalformedArray(
            f"{name} has shape {raw.shape}; expected {expected} for [{', '.join(axes)}]"
        )
    if raw.dtype.kind not in {np.bool_: "b", np.int64: "iu"}.get(dtype, "fiu"):
        raise MalformedArray(f"{name} has dtype {raw.dtype}; expected {np.dtype(dtype)}")
    if _is_immutable(raw) and raw.dtype == dtype and raw.flags.c_contiguous:
        array = raw
    else:
        array = np.array(raw, dtype=dtype, order="C")
    # A NaN would be in both, and its comparisons are false.
    is_number = array.dtype.kind != "f" or array.size == 0
    if not (is_number or (array.min() >= 0.0 and array.max() <= LARGEST_VALUE)):
        raise InvalidValue(f"{name}{_what_is_wrong(array)}")
    return _frozen(array)


def _is_immutable(array: NDArray[Any]) -> bool:
    """Whether nobody can write to it, by another view of the same memory either."""
    part: object = array
    while isinstance(part, np.ndarray):
        if part.flags.writeable:
            return False
        part = part.base
    return part is None


def _what_is_wrong(array: FloatArray) -> str:
    """Where an entry is no number that a term can have, and why."""
    if not np.isfinite(array).all():
        return f"{_where(~np.isfinite(array))} is NaN or infinite"
    if (array < 0.0).any():
        return f"{_where(array < 0.0)} is negative"
    return f"{_where(array > LARGEST_VALUE)} is above {LARGEST_VALUE:.0e}"


def _checked_bounds(bounds: ArrayLike) -> FloatArray:
    array = np.array(bounds, dtype=np.float64)
    if array.shape != (4, 2):
        raise MalformedArray(f"bounds has shape {array.shape}; expected (4, 2)")
    if not np.isfinite(array).all():
        raise InvalidValue(f"bounds{_where(~np.isfinite(array))} is NaN or infinite")
    if (array[:, 1] < array[:, 0]).any():
        term = TERMS[int(np.argmax(array[:, 1] < array[:, 0]))]
        raise InvalidValue(f"bounds of {term} have hi below lo")
    return _frozen(array)


def _checked_metadata(metadata: ProblemMetadata, sizes: dict[str, int]) -> ProblemMetadata:
    checked: dict[str, Any] = {}
    for name, axes in _METADATA_AXES.items():
        values = getattr(metadata, name)
        if values is None:
            continue
        dtype = _METADATA_DTYPES.get(name, np.float64)
        checked[name] = _checked(name, values, axes, sizes, dtype=dtype)
        if name == "slots" and checked[name].min() < 1:
            raise InvalidValue(f"slots{_where(checked[name] < 1)} is below 1")
    return ProblemMetadata(**checked)


def _where(mask: BoolArray) -> str:
    first = np.argwhere(mask)[0]
    return "[" + ", ".join(str(int(index)) for index in first) + "]"


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


def save_problem(problem: RoutingProblem, target: "str | PathLike[str] | BinaryIO") -> None:
    """Write a problem file; `target` gets exactly this name, no suffix is added."""
    arrays: dict[str, Any] = {name: getattr(problem, name) for name in _PAIR_ARRAYS}
    arrays["format"] = np.array(FORMAT)
    arrays["node_of"] = problem.node_of
    arrays["backlog_seconds"] = problem.backlog_seconds
    arrays["feasible"] = problem.feasible
    arrays["weights"] = problem.weights
    arrays["normalisation"] = np.array(problem.normalisation.value)
    if problem.bounds is not None:
        arrays["bounds"] = problem.bounds
    for part in fields(ProblemMetadata):
        values = getattr(problem.metadata, part.name)
        if values is not None:
            arrays[part.name] = values
    if isinstance(target, (str, PathLike)):
        with open(target, "wb") as file:
            np.savez_compressed(file, **arrays)
    else:
        np.savez_compressed(target, **arrays)


def load_problem(source: "str | PathLike[str] | BinaryIO") -> RoutingProblem:
    """Read a problem file. Arrays that this version does not know are ignored.

    Raises:
        UnreadableProblem: not an archive of plain arrays, a required array is absent, or the
            format is another one.
        ProblemError: an array is wrong, as the constructor says.
        OSError: the file cannot be opened.
    """
    if isinstance(source, (str, PathLike)):
        with open(source, "rb") as file:  # NumPy would leave a torn archive open
            arrays = _read_arrays(file)
    else:
        arrays = _read_arrays(source)
    form = str(arrays.pop("format", "absent"))
    if form != FORMAT:
        raise UnreadableProblem(f"format is {form}; this version reads {FORMAT}")
    missing = sorted(_REQUIRED_ARRAYS - arrays.keys())
    if missing:
        raise UnreadableProblem(f"the archive lacks {', '.join(missing)}")
    name = str(arrays.pop("normalisation"))
    try:
        normalisation = Normalisation(name)
    except ValueError:
        known = ", ".join(member.value for member in Normalisation)
        raise UnreadableProblem(f"normalisation is {name}; known are {known}") from None
    metadata = ProblemMetadata(
        **{name: arrays.pop(name) for name in _METADATA_AXES if name in arrays}
    )
    return RoutingProblem(**arrays, normalisation=normalisation, metadata=metadata)


def _read_arrays(file: BinaryIO) -> dict[str, NDArray[Any]]:
    try:
        archive = np.load(file, allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        # NumPy's own words advise to allow pickles, which nobody should.
        raise UnreadableProblem("not a NumPy .npz archive, or a torn one") from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise UnreadableProblem("not a NumPy .npz archive but a single array")
    with archive:
        try:
            return {name: archive[name] for name in archive.files if name in _KNOWN_ARRAYS}
        except (ValueError, EOFError, zipfile.BadZipFile) as error:
            raise UnreadableProblem(
                "the archive holds an unreadable array: a torn one, or one of Python objects"
            ) from error


_REQUIRED_ARRAYS: Final = frozenset(
    {*_PAIR_ARRAYS, "node_of", "backlog_seconds", "feasible", "weights", "normalisation"}
)
_KNOWN_ARRAYS: Final = _REQUIRED_ARRAYS | {"format", "bounds", *_METADATA_AXES}
