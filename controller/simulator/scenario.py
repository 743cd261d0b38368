"""A fleet as the simulator needs it: what stands where, how fast it is, and what it is asked.

Axes: Q queries, M models, N nodes, K kinds of nodes, D destinations, which are (node, model) pairs.
"""

from dataclasses import dataclass

from controller.routing.problem import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
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

    Raises:
        ValueError: there is no destination, a node without a slot, or a destination without a
            finite predicted time.
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

    def __post_init__(self) -> None:
        if self.node_of.size == 0:
            raise ValueError("the scenario has no destination; place a model on a node")
        if (self.slots < 1).any():
            raise ValueError("a node of the scenario has no slot; give each at least 1")
        times = self.seconds[:, self.model_of, self.kind_of_node[self.node_of]]
        if not ((times > 0.0) & (times < float("inf"))).all():
            raise ValueError("a placed model has no predicted time; give finite positive seconds")

    @property
    def queries(self) -> int:
        """Q."""
        return int(self.quality.shape[0])

    @property
    def nodes(self) -> int:
        """N."""
        return int(self.kind_of_node.size)
