"""The parser that all commands start from."""

from __future__ import annotations

from jsonargparse import ArgumentParser, set_parsing_settings


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
