"""The parser that all commands start from, and the way back: from what was parsed to a command."""

from __future__ import annotations

import shlex

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

_NOT_REPEATED = frozenset({"json", "html", "perfetto", "save", "state", "resume", "verbose", "traceback"})
"""Options that say what is written, and where, not what comes out."""


def command_parser(name: str, description: str, example: str, *, usage: str = "[OPTIONS]") -> ArgumentParser:
    """A parser for ``crosscurrent NAME``, with the options that every command has."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog=f"crosscurrent {name}",
        usage=f"crosscurrent {name} {usage}",
        description=description,
        epilog=f"Example: {example}",
        exit_on_error=False,
        allow_abbrev=False,  # an option may be one of the checked program's own
    )
    parser.add_argument("--verbose", action="store_true", help="Log what happens to the error output.")
    parser.add_argument("--traceback", action="store_true", help="Show the traceback of an error.")
    return parser


def command_of(parser: ArgumentParser, arguments: Namespace, **other: object) -> str:
    """The command that comes to the same again; it writes no files. ``other`` are values to take in place
    of those of the arguments, None to leave an option out."""
    words = parser.prog.split()
    values = vars(arguments) | other
    for action in parser._actions:  # argparse has no public name for them
        value = values.get(action.dest)
        if action.dest in _NOT_REPEATED or value is None or value == action.default:
            continue
        words += action.option_strings[:1]
        if value is not True:
            words += map(str, value) if isinstance(value, list) else [str(value)]
    return shlex.join(words)
