"""Finds races in a trace: vector clocks, exact regions, adversarial reuse of freed memory."""
