"""The command line. Each command is a module of its own, imported only when it is asked for."""

from crosscurrent.cli.app import main

__all__ = ["main"]
