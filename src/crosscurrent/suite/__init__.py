"""The layered verification of the long-context gradient."""

from crosscurrent.suite.layer import Layer
from crosscurrent.suite.scenario import scenarios

LAYERS: tuple[Layer, ...] = ()

__all__ = ["LAYERS", "Layer", "scenarios"]
