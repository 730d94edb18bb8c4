"""Simulated CUDA: ``torch.cuda`` on a machine that has none."""

from crosscurrent.trace.simulate.environment import Environment
from crosscurrent.trace.simulate.simulation import Simulation, active, simulate

__all__ = ["Environment", "Simulation", "active", "simulate"]
