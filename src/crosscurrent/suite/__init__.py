"""The layered verification of the long-context gradient."""

from crosscurrent.suite.contracts import Contracts
from crosscurrent.suite.exactness import Exactness
from crosscurrent.suite.history import History
from crosscurrent.suite.layer import Layer
from crosscurrent.suite.mutations import Mutations
from crosscurrent.suite.parity import Parity
from crosscurrent.suite.race_freedom import RaceFreedom
from crosscurrent.suite.scenario import scenarios
from crosscurrent.suite.schedules import Schedules

LAYERS: tuple[Layer, ...] = (
    Contracts(),
    Exactness(),
    Parity(),
    RaceFreedom(),
    Schedules(),
    Mutations(),
    History(),
)

__all__ = ["LAYERS", "Layer", "scenarios"]
