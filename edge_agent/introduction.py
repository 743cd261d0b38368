"""What this node says of itself to the controller: what it is, its models, and how it is now."""

from dataclasses import dataclass

from edge_agent import __version__
from edge_agent.agent import Agent
from edge_agent.link.convert import attributes_to_proto, health_to_proto, model_to_proto
from pointsman.v1 import fleet_pb2


@dataclass(frozen=True, slots=True)
class NodeIntroduction:
    """A node in the words of the wire; see `link.session.Introduction`.

    Attributes:
        agent: whose node it is.
        instance_id: of this start of the agent.
    """

    agent: Agent
    instance_id: str

    @property
    def node_id(self) -> str:
        """The node's name."""
        return self.agent.settings.node_id

    def attributes(self) -> fleet_pb2.StaticAttributes:
        """What does not change while the agent runs."""
        agent, settings = self.agent, self.agent.settings
        loaded = [model.loaded for model in agent.models.models.values() if model.loaded]
        message = attributes_to_proto(
            agent.host,
            settings.kind,
            __version__,
            loaded[0].engine_version if loaded else "",
            agent.power,
            settings.power.transmit_watts,
            settings.power.receive_watts,
            settings.link,
        )
        if settings.hardware:
            message.hardware = settings.hardware
        return message

    def models(self) -> list[fleet_pb2.ModelState]:
        """Every model as it is now."""
        return [model_to_proto(model) for model in self.agent.models.models.values()]

    def health(self) -> fleet_pb2.HealthSample:
        """One health sample."""
        agent, sampler = self.agent, self.agent.sampler
        return health_to_proto(
            sampler.readings,
            sampler.power(),
            agent.issues(),
            sampler.sensors,
            agent.energy_today.joules,
        )
