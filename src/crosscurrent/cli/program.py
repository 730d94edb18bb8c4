"""What the commands that run somebody's program have in common, beside running it (see ``script``)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from crosscurrent.cli.at_exit import flush_output
from crosscurrent.cli.console import error_output
from crosscurrent.cli.exits import WrongUseError
from crosscurrent.cli.script import Ending

if TYPE_CHECKING:
    from crosscurrent.report.document import Report


def enter_cuda(contexts: ExitStack, arguments: Namespace, *, otherwise: str) -> None:
    """Simulate CUDA if that was asked for.

    Raises ``WrongUseError`` if it cannot be simulated, or, with what to do ``otherwise``, if there is none.
    """
    import torch

    import crosscurrent

    if arguments.simulate:
        try:
            contexts.enter_context(crosscurrent.simulate(devices=arguments.devices))
        except (ValueError, RuntimeError) as error:
            raise WrongUseError(f"{error}") from error
    elif not torch.cuda.is_available():
        raise WrongUseError(f"this machine has no CUDA device {otherwise}")


def show(report: Report, ending: Ending, remarks: Sequence[str], *, seen: str) -> None:
    """Show the report in the terminal, with ``seen`` for what it covers if the program failed."""
    from crosscurrent.report import text

    flush_output()
    text.show(report, error_output())
    for remark in remarks:
        sys.stderr.write(f"\n{remark}\n")
    if ending.failed:
        sys.stderr.write(f"\nthe program itself failed ({ending.why}): {seen}\n")
    sys.stderr.flush()


def program_as_json(arguments: Namespace, ending: Ending) -> dict[str, object]:
    """What was run, where, and how it ended."""
    import torch

    from crosscurrent import __version__

    return {
        "crosscurrent": __version__,
        "torch": torch.__version__,
        "simulated": arguments.simulate,
        "program": {
            "name": arguments.program,
            "module": arguments.module,
            "arguments": list(arguments.arguments),
            "exit_status": ending.status,
            "error": ending.error,
        },
    }
