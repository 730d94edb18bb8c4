"""``crosscurrent stress``: the gradient under delays, or under other schedules where there is no GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from crosscurrent.cli.arguments import command_of, command_parser
from crosscurrent.cli.console import progress, say, say_above, show_table
from crosscurrent.cli.exits import ExitCode, WrongUseError, as_wrong_use
from crosscurrent.cli.files import result_files, write_json
from crosscurrent.cli.interrupt import StopRequests
from crosscurrent.cli.stress_results import Estimate, Results, failure_lines, head

if TYPE_CHECKING:
    from rich.progress import TaskID

    from crosscurrent.cli.console import Bar
    from crosscurrent.stress.campaign import Account, Failure, Result
    from crosscurrent.suite.scenario import Scenario
    from crosscurrent.suite.stressed import GradientCase, StressOptions
    from crosscurrent.suite.verification import Cuda

STATE_FILE = ".crosscurrent-stress.json"


def parser() -> ArgumentParser:
    """The options of the command."""
    options = command_parser(
        "stress",
        "Run this before you merge a change to stream code. The long-context gradient, two batches, over "
        "cache policies and quantizers, must come out with asynchronous transfers as without, bit for bit, "
        "however the lanes are delayed. Without a GPU the recorded trace is run in other schedules. The "
        "default takes a minute or two; --seeds scales it; it says how long as soon as it knows. Ctrl-C "
        "stops it, --continue goes on. Exit code: 0 nothing differed, 1 something did, 2 wrong use, "
        "3 no CUDA, 130 interrupted.",
        "crosscurrent stress --seeds 100 --lanes device_to_host,main",
    )
    options.add_argument("--seeds", type=int, default=20, metavar="N", help="Seeds for each case.")
    options.add_argument("--seed", type=int, metavar="S", help="Only this seed, to repeat a failure.")
    options.add_argument("--policies", metavar="NAME,...", help="Cache policies. Default: lastrec,h2o.")
    options.add_argument(
        "--quantizers", metavar="NAME,...", help="Quantizers. Default: default,torch-quantized8."
    )
    options.add_argument("--all", action="store_true", help="All cache policies and quantizers.")
    options.add_argument(
        "--cuda_graphs",
        "--cuda-graphs",
        action="store_true",
        help="Transfers beside CUDA graphs. Only what is issued outside of graphs is delayed on a GPU.",
    )
    options.add_argument(
        "--checkpoints", metavar="NAME,...", help="What is quantized. Default: kv_checkpoints,layer_inputs."
    )
    options.add_argument(
        "--lanes",
        metavar="NAME,...",
        help="The lanes that may be late. Default: device_to_host,host_to_device,main.",
    )
    options.add_argument(
        "--delay_us", "--delay-us", type=float, default=100.0, metavar="US", help="The longest delay."
    )
    options.add_argument(
        "--how",
        choices=["everywhere", "random", "pct"],
        help="Which ops are delayed. If not given, seeds take turns.",
    )
    options.add_argument(
        "--history",
        action="store_true",
        help="Instead, bring the races of the past back, one by one, and show that each is found three ways.",
    )
    options.add_argument(
        "--continue", dest="resume", action="store_true", help="Go on with a run that was stopped."
    )
    options.add_argument(
        "--state", metavar="FILE", default=STATE_FILE, help="Where a run remembers what it has done."
    )
    options.add_argument(
        "--save", metavar="FOLDER", help="Save programs that failed there, for `crosscurrent replay`."
    )
    options.add_argument(
        "--no_simulate", "--no-simulate", action="store_true", help="Run nothing on simulated CUDA."
    )
    options.add_argument("--json", metavar="FILE", help="Write the results there as JSON.")
    options.add_argument("--html", metavar="FILE", help="Write the results there as one page.")
    return options


def run(arguments: Namespace) -> int:
    """Stress the gradient, and give the exit code."""
    import torch

    from crosscurrent.suite.verification import Cuda

    seeds = _seeds(arguments)
    cuda = Cuda.available(may_simulate=not arguments.no_simulate)
    torch.set_num_threads(1)  # the models are small: more threads would only wait for each other
    with as_wrong_use():
        options = _options(arguments)
        scenarios = _scenarios(arguments)
        chosen = _cases(arguments, scenarios, options, cuda)
    by_name = {case.name: case for case in chosen}
    names, repeat = tuple(by_name), partial(_repeat, arguments, by_name)
    if arguments.history and arguments.cuda_graphs:
        raise WrongUseError("--history is about transfers and what is beside graphs; leave out --cuda_graphs")
    if arguments.history and arguments.html is not None:
        raise WrongUseError("--history writes no page; leave out --html")
    account = None if arguments.history else _account(arguments, names, options, cuda)
    report, page = result_files(arguments.json, arguments.html)
    if cuda is Cuda.NONE:
        say(f"nothing was run: the gradient's lanes need CUDA, and there is {cuda.value}")
        return ExitCode.NO_VERDICT
    if account is None:
        return _history(scenarios[0], cuda, report)
    if not arguments.resume:
        account.close()  # what an earlier run left there
    stopped = _run(chosen, seeds, account, cuda, repeat)
    results = Results(
        cases=names,
        seeds=tuple(seeds),
        failures=account.failures,
        num_done=account.num_done(names, seeds),
        cuda=cuda,
        delay_us=arguments.delay_us,
        command=command_of(parser(), arguments),
        repeat=repeat,
    )
    results.conclude()
    if report is not None:
        write_json(report, results.as_json())
    if page is not None:
        from crosscurrent.report import html

        html.write(results.as_report(), page)
    if results.complete:
        account.close()
        return ExitCode.BAD if results.failures else ExitCode.GOOD
    return stopped or ExitCode.BAD  # nobody stopped it: a seed raised an error


def _run(
    cases: Sequence[GradientCase],
    seeds: Sequence[int],
    account: Account,
    cuda: Cuda,
    repeat: Callable[[Failure], str],
) -> int:
    """Try everything that is left; gives the exit code of whoever stopped it, or 0."""
    from crosscurrent.stress import campaign

    # A preparation takes as long as some seeds.
    total = len(cases) * (len(seeds) + 1)
    names = [case.name for case in cases]
    completed = account.num_done(names, seeds) + sum(
        all(account.has(name, seed) for seed in seeds) for name in names
    )
    say(f"{len(cases)} case(s) x {len(seeds)} seed(s) on {cuda.value}" + (", going on" if completed else ""))
    for failure in account.failures:
        _tell_failure(failure, repeat, say)
    estimate = Estimate(len(seeds), total - completed)
    with StopRequests() as stop, progress() as bar:
        task = bar.begin("stress", total=total, completed=completed)
        for result in campaign.run(cases, seeds, account):
            _tell(bar, task, result, repeat)
            if (sentence := estimate.after(result)) is not None:
                say_above(bar, sentence)
            if stop.received is not None:
                break
    return stop.exit_code


def _tell(bar: Bar, task: TaskID, result: Result, repeat: Callable[[Failure], str]) -> None:
    seed = "as it is" if result.seed is None else f"seed {result.seed}"
    bar.update(task, advance=1, description=f"{result.case}: {seed}")
    for failure in result.failures:
        _tell_failure(failure, repeat, partial(say_above, bar))


def _tell_failure(failure: Failure, repeat: Callable[[Failure], str], tell: Callable[[str], None]) -> None:
    for line in failure_lines(failure, repeat(failure)):
        tell(line)


def _repeat(arguments: Namespace, cases: Mapping[str, GradientCase], failure: Failure) -> str:
    """The one command that shows a failure again."""
    case = cases[failure.case]
    return command_of(
        parser(),
        arguments,
        seed=failure.seed or 0,
        seeds=None,
        all=None,
        policies=case.scenario.policy,
        quantizers=case.scenario.quantizer,
        checkpoints=case.checkpoints,
    )


def _seeds(arguments: Namespace) -> list[int]:
    if arguments.seed is not None:
        if arguments.seed < 0:
            raise WrongUseError(f"--seed must not be negative, got {arguments.seed}")
        return [arguments.seed]
    if arguments.seeds < 1:
        raise WrongUseError(f"--seeds must be at least 1, got {arguments.seeds}")
    return list(range(arguments.seeds))


def _options(arguments: Namespace) -> StressOptions:
    from crosscurrent.stress import How
    from crosscurrent.suite.stressed import StressOptions

    folder = Path(arguments.save) if arguments.save is not None else None
    if folder is not None and not folder.is_dir():
        raise WrongUseError(f"there is no folder {folder}; make it first")
    options = StressOptions(
        lanes=_names(arguments.lanes, StressOptions().lanes),
        delay_us=arguments.delay_us,
        how=None if arguments.how is None else How(arguments.how),
        save_to=folder,
    )
    options.plan(0)  # refuses what cannot be before anything runs
    return options


def _history(scenario: Scenario, cuda: Cuda, report: Path | None) -> int:
    """The races of the past, in a table."""
    from crosscurrent.stress.history import PAST_RACES, Shown, history_table
    from crosscurrent.suite.history import history, judge
    from crosscurrent.suite.layer import Verdict

    shown: list[Shown] = []
    with cuda.context(), progress() as bar:
        task = bar.begin("history", total=len(PAST_RACES) + 1)
        for each in history(scenario):
            shown.append(each)
            bar.update(task, advance=1, description="unchanged" if each.race is None else each.race.name)
    outcome = judge(shown)
    show_table(history_table(shown))
    say(f"{outcome.verdict.value}: {outcome.detail} ({scenario.name}, on {cuda.value})")
    if report is not None:
        write_json(report, head(cuda, outcome.verdict.value) | {"history": [s.as_json() for s in shown]})
    return ExitCode.GOOD if outcome.verdict is Verdict.HELD else ExitCode.BAD


def _scenarios(arguments: Namespace) -> list[Scenario]:
    from crosscurrent.suite.scenario import ALL_POLICIES, ALL_QUANTIZERS, POLICIES, QUANTIZERS, Scenario

    default = (ALL_POLICIES, ALL_QUANTIZERS) if arguments.all else (POLICIES, QUANTIZERS)
    policies = _known("policy", _names(arguments.policies, default[0]), ALL_POLICIES)
    quantizers = _known("quantizer", _names(arguments.quantizers, default[1]), ALL_QUANTIZERS)
    graphs = arguments.cuda_graphs
    return [
        Scenario(policy=policy, quantizer=name, graphs=graphs) for policy in policies for name in quantizers
    ]


def _cases(
    arguments: Namespace, scenarios: Sequence[Scenario], options: StressOptions, cuda: Cuda
) -> list[GradientCase]:
    from crosscurrent.suite.scenario import CHECKPOINTS
    from crosscurrent.suite.stressed import cases

    checkpoints = _known("kind of checkpoint", _names(arguments.checkpoints, CHECKPOINTS), CHECKPOINTS)
    return cases(scenarios, options, cuda, checkpoints)


def _names(text: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    if text is None:
        return default
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _known(what: str, names: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in known:
            raise WrongUseError(f"there is no {what} {name!r}; there are {', '.join(known)}")
    if not names:
        raise WrongUseError(f"name at least one {what} of {', '.join(known)}")
    return names


def _account(arguments: Namespace, names: Sequence[str], options: StressOptions, cuda: Cuda) -> Account:
    import torch

    from crosscurrent.stress.campaign import Account, code_fingerprint

    identity = {
        "code": code_fingerprint(),
        "torch": torch.__version__,
        "CUDA": torch.cuda.get_device_name() if cuda is cuda.REAL else cuda.value,
        "cases": "; ".join(names),
        "lanes": ",".join(options.lanes),
        "delay_us": f"{options.delay_us:g}",
        "how": "in turn" if options.how is None else options.how.value,
    }
    path = Path(arguments.state)
    if not path.parent.is_dir() or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise WrongUseError(f"a run cannot remember anything in {path}; name another file with --state")
    if arguments.resume:
        return Account.resume(path, identity)
    return Account(path, identity)
