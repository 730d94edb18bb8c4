"""Simulated CUDA: ``torch.cuda`` on a machine that has none.

Tensors stay ordinary CPU tensors. What makes them "device" or "pinned" is a tag on their storage
(``memory``). Four things work together:

- ``dispatch`` is the one dispatch mode. It runs each aten op on the CPU, checks that its tensors are on
  one device, tags what is new, and tells the tracers. ``plans`` and ``transfers`` know the ops that need
  more: copies, factories, random numbers, ops that the host waits for.
- ``bindings``, ``streams``, ``events``, ``graphs`` stand for the C++ half of ``torch.cuda``. PyTorch's
  own Python half stays as it is, so code that was imported before the simulation works too.
- ``tensors``, ``tensor_makers``, ``storages``, ``factories`` replace what never reaches the dispatcher in a
  useful form, on the classes themselves, so that every thread sees it.
- ``engine`` puts backward passes on their streams.

``install`` puts all this in place. ``refusals`` makes what is left raise ``NotImplementedError``.

Known limits: a backward pass looks up streams by sequence numbers of the thread it runs in, so a graph
that was made in another thread gets that thread's current streams. Memory that a graph captures stays
allocated until the graph is gone. ``torch.device(0)``, which is C++ code, raises PyTorch's own error.
"""

from crosscurrent.trace.simulate.current import active
from crosscurrent.trace.simulate.environment import Environment
from crosscurrent.trace.simulate.simulation import Simulation, simulate

__all__ = ["Environment", "Simulation", "active", "simulate"]
