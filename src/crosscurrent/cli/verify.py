"""``crosscurrent verify``: the layers of the suite over the gradient."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace
from rich.markup import escape
from rich.table import Table

from crosscurrent.cli.arguments import command_of, command_parser
from crosscurrent.cli.console import progress, say, show_table
from crosscurrent.cli.exits import ExitCode, WrongUseError
from crosscurrent.cli.files import result_files, write_json
from crosscurrent.cli.verify_report import as_report
from crosscurrent.cores import num_cores

if TYPE_CHECKING:
    from crosscurrent.suite.layer import Layer
    from crosscurrent.suite.scenario import Scenario
    from crosscurrent.suite.verification import Cuda, Result

JSON_FORMAT = "crosscurrent verify"
JSON_VERSION = 1

QUICK = frozenset({"contracts", "exactness", "parity", "races"})
"""Layers that take less time than it takes to start processes."""


def parser() -> ArgumentParser:
    """The options of the command."""
    options = command_parser(
        "verify",
        "Prove the long-context gradient: its contracts, that it is exact, that moving checkpoints "
        "asynchronously changes no bit, that nothing races or makes the host wait, that other schedules give "
        "the same bits, and that mutants and the races of the past are noticed. Without a GPU, CUDA is "
        "simulated; two cores then take about two minutes. Exit code: 0 only when all held, 1 when something "
        "failed, 2 for wrong use, 3 when nothing failed but something could not be run.",
        "crosscurrent verify --json verify.json",
    )
    options.add_argument(
        "--all", action="store_true", help="All cache policies and quantizers, and CUDA graphs."
    )
    options.add_argument(
        "--layers", nargs="+", metavar="NAME", default=[], help="Only these layers. All, if not given."
    )
    options.add_argument(
        "--no_simulate", "--no-simulate", action="store_true", help="Run nothing on simulated CUDA."
    )
    options.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="Processes that work at once. Default: one for each core where CUDA is simulated; one on a GPU, "
        "where each takes device memory of its own.",
    )
    options.add_argument("--json", metavar="FILE", help="Write the results there as JSON.")
    options.add_argument("--html", metavar="FILE", help="Write the results there as one page.")
    options.add_argument(
        "--perfetto",
        metavar="FILE",
        help="Write the trace that the layer races judged there, for ui.perfetto.dev.",
    )
    return options


def run(arguments: Namespace) -> int:
    """Ask every layer of every scenario, and show what they said."""
    import torch

    from crosscurrent.suite import LAYERS, scenarios, verification
    from crosscurrent.suite.layer import Verdict
    from crosscurrent.suite.scenario import WITH_GRAPHS

    by_name = {layer.name: layer for layer in LAYERS}
    if unknown := [name for name in arguments.layers if name not in by_name]:
        raise WrongUseError(f"there is no layer {unknown[0]!r}; the layers are {', '.join(by_name)}")
    layers = [layer for layer in LAYERS if not arguments.layers or layer.name in arguments.layers]
    chosen = (*scenarios(everything=True), *WITH_GRAPHS) if arguments.all else scenarios()
    if arguments.perfetto is not None and "races" not in {layer.name for layer in layers}:
        raise WrongUseError("--perfetto writes the trace of the layer races; add it to --layers")
    if arguments.workers is not None and arguments.workers < 1:
        raise WrongUseError(f"--workers must be at least 1, got {arguments.workers}")
    report, page, trace = result_files(arguments.json, arguments.html, arguments.perfetto)
    cuda = verification.Cuda.available(may_simulate=not arguments.no_simulate)
    num_questions = len(verification.questions(layers, chosen))

    torch.set_num_threads(1)  # the models are small: more threads would only wait for each other
    results: list[Result] = []
    interrupted = False
    try:
        # What came before an interrupt stays in the list.
        results.extend(_told(_run(layers, chosen, cuda, arguments.workers), num_questions))
    except KeyboardInterrupt:
        interrupted = True
    order = [layer.name for layer in layers]
    results.sort(key=lambda each: (order.index(each.layer), chosen.index(each.scenario)))
    if interrupted:
        _show(results, cuda, complete=False)
        left = num_questions - len(results)
        sys.stderr.write(f"interrupted; {left} of {num_questions} questions were not answered\n")
        return ExitCode.INTERRUPTED
    verdict = verification.overall(results)
    if report is not None:
        write_json(report, _as_json(results, cuda, verdict.value))
    if page is not None or trace is not None:
        from crosscurrent.report import html, perfetto

        document = as_report(results, cuda, verdict, command_of(parser(), arguments))
        if page is not None:
            html.write(document, page)
        if trace is not None and document.records:
            perfetto.write(document, trace)
        elif trace is not None:
            sys.stderr.write(
                f"there was no trace to write to {arguments.perfetto}: the layer races was not run\n"
            )
    _show(results, cuda)
    return {
        Verdict.HELD: ExitCode.GOOD,
        Verdict.FAILED: ExitCode.BAD,
        Verdict.NOT_RUN: ExitCode.NO_VERDICT,
    }[verdict]


def _run(
    layers: Sequence[Layer], chosen: Sequence[Scenario], cuda: Cuda, workers: int | None
) -> Iterator[Result]:
    """One after the other, or by several processes where that pays."""
    from crosscurrent.suite import verification

    if workers is None:
        quick = all(layer.name in QUICK for layer in layers)
        workers = 1 if quick or cuda is not verification.Cuda.SIMULATED else num_cores()
    workers = min(workers, len(verification.questions(layers, chosen)))
    if workers == 1:
        return verification.run(layers, chosen, cuda)
    return verification.run_spread(layers, chosen, cuda, workers=workers)


def _told(results: Iterator[Result], total: int) -> Iterator[Result]:
    """Show each result as it comes: by a bar, or by one plain line where there is no terminal for it."""
    with progress() as bar:
        task = bar.begin("verify", total=total)
        for number, result in enumerate(results, start=1):
            what = f"{result.layer}: {result.scenario.name}"
            bar.update(task, advance=1, description=what)
            if bar.disable:
                said = f"{result.outcome.verdict.value} ({result.seconds:.1f} s)"
                sys.stderr.write(f"[{number}/{total}] {what}: {said}\n")
                sys.stderr.flush()
            yield result


def _show(results: list[Result], cuda: Cuda, *, complete: bool = True) -> None:
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
            escape(result.outcome.detail),
        )
    show_table(table)
    _show_mutants(results)
    for layer in LAYERS:
        verdicts = [result.outcome.verdict for result in results if result.layer == layer.name]
        if complete and verdicts and all(verdict is Verdict.HELD for verdict in verdicts):
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
        show_table(mutations_table(merged(scores)))


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
                "graphs": result.scenario.graphs,
                "verdict": result.outcome.verdict.value,
                "detail": result.outcome.detail,
                "evidence": None if result.outcome.evidence is None else result.outcome.evidence.as_json(),
                "seconds": round(result.seconds, 3),
            }
            for result in results
        ],
    }
