"""A fleet as the simulator needs it: what stands where, how fast it is, and what it is asked.

Axes: Q queries, M models, N nodes, K kinds of nodes, D destinations, which are (node, model) pairs.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from controller.routing.problem import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Scenario:
    """A fleet, the models on it, and the queries that may arrive.

    Attributes:
        node_of, model_of: int64[D]; each destination's node and model.
        kind_of_node: int64[N].
        node_keys: int64[N]; `name_key` of each node's name.
        model_keys: int64[M].
        parameters_billions: float64[M].
        slots: int64[N]; requests a node serves at once.
        watts: float64[N]; for each request it serves.
        usd_per_second: float64[N]; for each request it serves.
        quality: float64[Q, M]; predicted, 0 to 1.
        correct: float64[Q, M]; what the answer scores really.
        seconds: float64[Q, M, K]; predicted inference time.
        noise: deviation of log(real / predicted time).
        true_seconds: float64[Q, M, K]; what inference takes really, but for noise; None: `seconds`.
        first_token_ratio: float64[M, K]; share of a request's time that has passed when its first
            token is streamed; None: nothing is streamed before the end.
        idle_watts: float64[N]; of each node with no slot busy; None: not counted.
        is_edge: bool[N]; False is a cloud node; None: nobody says.
        prompt_tokens, answer_tokens: float64[Q]; lengths of each query and of a typical model's
            answer; None: nobody says.

    Raises:
        ValueError: there is no destination, a node without a slot, or a destination without a
            finite predicted or true time.
    """

    node_of: IntArray
    model_of: IntArray
    kind_of_node: IntArray
    node_keys: IntArray
    model_keys: IntArray
    parameters_billions: FloatArray
    slots: IntArray
    watts: FloatArray
    usd_per_second: FloatArray
    quality: FloatArray
    correct: FloatArray
    seconds: FloatArray
    noise: float
    true_seconds: FloatArray | None = None
    first_token_ratio: FloatArray | None = None
    idle_watts: FloatArray | None = None
    is_edge: BoolArray | None = None
    prompt_tokens: FloatArray | None = None
    answer_tokens: FloatArray | None = None

    def __post_init__(self) -> None:
        if self.node_of.size == 0:
            raise ValueError("the scenario has no destination; place a model on a node")
        if (self.slots < 1).any():
            raise ValueError("a node of the scenario has no slot; give each at least 1")
        for times in (self.pair_seconds, self.pair_true_seconds):
            if not ((times > 0.0) & (times < float("inf"))).all():
                raise ValueError(
                    "a placed model has no predicted time; give finite positive seconds"
                )

    @property
    def queries(self) -> int:
        """Q."""
        return int(self.quality.shape[0])

    @property
    def nodes(self) -> int:
        """N."""
        return int(self.kind_of_node.size)

    @cached_property
    def pair_quality(self) -> FloatArray:
        """float64[Q, D], read-only, as the other tables by destination."""
        return _kept(self.quality[:, self.model_of])

    @cached_property
    def pair_seconds(self) -> FloatArray:
        """float64[Q, D]; predicted."""
        return _kept(self.seconds[:, self.model_of, self.kind_of_node[self.node_of]])

    @cached_property
    def pair_true_seconds(self) -> FloatArray:
        """float64[Q, D]; real but for noise."""
        if self.true_seconds is None:
            return self.pair_seconds
        return _kept(self.true_seconds[:, self.model_of, self.kind_of_node[self.node_of]])

    @cached_property
    def pair_work(self) -> FloatArray:
        """float64[Q, D]; a node with all slots busy finishes `slots` requests in one's time."""
        return _kept(self.pair_seconds / self.slots[self.node_of])

    @cached_property
    def pair_energy(self) -> FloatArray:
        """float64[Q, D]; joules."""
        return _kept(self.pair_seconds * self.watts[self.node_of])

    @cached_property
    def pair_cost(self) -> FloatArray:
        """float64[Q, D]; USD."""
        return _kept(self.pair_seconds * self.usd_per_second[self.node_of])

    @cached_property
    def has_models(self) -> BoolArray:
        """bool[N]; nodes with a destination."""
        found = np.zeros(self.nodes, dtype=np.bool_)
        found[self.node_of] = True
        return found

    @cached_property
    def node_quality_range(self) -> tuple[FloatArray, FloatArray]:
        """The least and the greatest predicted quality at each node; both float64[Q, N]."""
        return self._range_by_node(self.pair_quality)

    @cached_property
    def node_seconds_range(self) -> tuple[FloatArray, FloatArray]:
        """The least and the greatest predicted time at each node; both float64[Q, N]."""
        return self._range_by_node(self.pair_seconds)

    def _range_by_node(self, values: FloatArray) -> tuple[FloatArray, FloatArray]:
        low = np.full((self.nodes, self.queries), np.inf)
        high = np.full((self.nodes, self.queries), -np.inf)
        np.minimum.at(low, self.node_of, values.T)
        np.maximum.at(high, self.node_of, values.T)
        return _kept(low.T), _kept(high.T)


def _kept(values: FloatArray) -> FloatArray:
    found = np.ascontiguousarray(values, dtype=np.float64)
    found.flags.writeable = False
    return found
