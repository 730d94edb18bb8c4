"""The command that a page says repeats it."""

from __future__ import annotations

import shlex

import pytest
from jsonargparse import ArgumentParser

from crosscurrent.cli import check, overlap, stress, verify
from crosscurrent.cli.arguments import command_of

FILES = "--json a.json --html a.html"


@pytest.mark.parametrize(
    ("parser", "files", "words"),
    [
        (
            check.parser(),
            f"{FILES} --save a.ccp --perfetto a.trace",
            "--simulate --advice --full_stack race.py",
        ),
        (check.parser(), FILES, "--devices 2 --prove -m package.module --json 'of the program'"),
        (overlap.parser(), FILES, "--simulate race.py --steps 3"),
        (verify.parser(), FILES, "--all --layers races parity --workers 2"),
        (stress.parser(), f"{FILES} --save here", "--policies h2o --quantizers torch-quantized8 --seeds 1"),
        (stress.parser(), "--state there --continue", "--cuda_graphs --no_simulate --lanes main --how pct"),
    ],
)
def test_a_command_is_said_again_but_for_the_files_that_it_writes(
    parser: ArgumentParser, files: str, words: str
) -> None:
    said = shlex.split(command_of(parser, parser.parse_args(shlex.split(f"{files} {words}"))))
    assert said[:2] == parser.prog.split()
    assert parser.parse_args(said[2:]) == parser.parse_args(shlex.split(words))


def test_values_take_the_place_of_those_that_were_given() -> None:
    arguments = stress.parser().parse_args(["--all", "--seeds", "100", "--delay_us", "50"])
    said = command_of(stress.parser(), arguments, all=None, seeds=None, seed=3, policies="h2o")
    assert said == "crosscurrent stress --seed 3 --policies h2o --delay_us 50.0"
