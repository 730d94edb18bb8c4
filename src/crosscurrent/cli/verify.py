"""``crosscurrent verify``: the layers of the suite over the gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace
from rich.table import Table

from crosscurrent.cli.arguments import command_parser
from crosscurrent.cli.console import output, progress, say
from crosscurrent.cli.exits import ExitCode, WrongUseError
from crosscurrent.cli.files import result_file, write_json

if TYPE_CHECKING:
    from crosscurrent.suite.verification import Cuda, Result

JSON_FORMAT = "crosscurrent verify"
JSON_VERSION = 1


def parser() -> ArgumentParser:
    """The options of the command."""
    options = command_parser(
        "verify",
        "Prove the long-context gradient: its contracts, that it is exact, that moving checkpoints "
        "asynchronously changes no bit, and that nothing races or makes the host wait. Without a GPU, CUDA "
        "is simulated. Exit code: 0 only when all held, 1 when something failed, 2 for wrong use, 3 when "
        "nothing failed but something could not be run.",
        "crosscurrent verify --json verify.json",
    )
    options.add_argument("--all", action="store_true", help="All cache policies and quantizers.")
    options.add_argument(
        "--layers", nargs="+", metavar="NAME", default=[], help="Only these layers. All, if not given."
    )
    options.add_argument(
        "--no_simulate", "--no-simulate", action="store_true", help="Run nothing on simulated CUDA."
    )
    options.add_argument("--json", metavar="FILE", help="Write the results there as JSON.")
    return options


def run(arguments: Namespace) -> int:
    """Ask every layer of every scenario, and show what they said."""
    import torch

    from crosscurrent.suite import LAYERS, scenarios, verification
    from crosscurrent.suite.layer import Verdict

    by_name = {layer.name: layer for layer in LAYERS}
    if unknown := [name for name in arguments.layers if name not in by_name]:
        raise WrongUseError(f"there is no layer {unknown[0]!r}; the layers are {', '.join(by_name)}")
    layers = [layer for layer in LAYERS if not arguments.layers or layer.name in arguments.layers]
    chosen = scenarios(everything=arguments.all)
    report = result_file(arguments.json)
    cuda = verification.Cuda.available(may_simulate=not arguments.no_simulate)

    torch.set_num_threads(1)  # the models are small: more threads would only wait for each other
    results: list[Result] = []
    with progress() as bar:
        task = bar.add_task("verify", total=len(layers) * len(chosen))
        for result in verification.run(layers, chosen, cuda):
            results.append(result)
            bar.update(task, advance=1, description=f"{result.layer}: {result.scenario.name}")
    verdict = verification.overall(results)
    _show(results, cuda)
    if report is not None:
        write_json(report, _as_json(results, cuda, verdict.value))
    return {
        Verdict.HELD: ExitCode.GOOD,
        Verdict.FAILED: ExitCode.BAD,
        Verdict.NOT_RUN: ExitCode.NO_VERDICT,
    }[verdict]


def _show(results: list[Result], cuda: Cuda) -> None:
    from crosscurrent.suite import LAYERS
    from crosscurrent.suite.layer import Verdict

    styles = {Verdict.HELD: "green", Verdict.FAILED: "bold red", Verdict.NOT_RUN: "yellow"}
    table = Table(show_edge=False, pad_edge=False)
    for column in ("layer", "scenario", "verdict"):
        table.add_column(column, no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("what was seen", overflow="fold")
    for result in results:
        verdict = result.outcome.verdict
        table.add_row(
            result.layer,
            result.scenario.name,
            f"[{styles[verdict]}]{verdict.value}[/]",
            f"{result.seconds:.1f} s",
            _plain(result.outcome.detail),
        )
    console = output()
    console.print(table)
    console.print()
    _show_mutants(results)
    for layer in LAYERS:
        verdicts = [result.outcome.verdict for result in results if result.layer == layer.name]
        if verdicts and all(verdict is Verdict.HELD for verdict in verdicts):
            say(f"{layer.name}: {layer.claim}")
        elif verdicts:
            counts = {verdict: verdicts.count(verdict) for verdict in Verdict}
            said = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items() if count)
            say(f"{layer.name}: {said}")
    say(f"CUDA: {cuda.value}")


def _show_mutants(results: list[Result]) -> None:
    from crosscurrent.stress.mutations import Score, merged, mutations_table

    scores = [result.outcome.evidence for result in results if isinstance(result.outcome.evidence, Score)]
    if scores:
        console = output()
        console.print(mutations_table(merged(scores)))
        console.print()


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def _as_json(results: list[Result], cuda: Cuda, verdict: str) -> dict[str, object]:
    import torch

    from crosscurrent import __version__

    return {
        "format": JSON_FORMAT,
        "version": JSON_VERSION,
        "crosscurrent": __version__,
        "torch": torch.__version__,
        "cuda": cuda.name.lower(),
        "verdict": verdict,
        "results": [
            {
                "layer": result.layer,
                "policy": result.scenario.policy,
                "quantizer": result.scenario.quantizer,
                "verdict": result.outcome.verdict.value,
                "detail": result.outcome.detail,
                "evidence": None if result.outcome.evidence is None else result.outcome.evidence.as_json(),
                "seconds": round(result.seconds, 3),
            }
            for result in results
        ],
    }
