"""Simulated CUDA: ``torch.cuda`` on a machine that has none."""

from crosscurrent.trace.simulate.simulation import Environment, Simulation, active, simulate

__all__ = ["Environment", "Simulation", "active", "simulate"]
