"""``crosscurrent stress``: the gradient under delays, or under other schedules where there is no GPU."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace
from rich.text import Text

from crosscurrent.cli.arguments import command_parser
from crosscurrent.cli.console import output, progress, say, say_above
from crosscurrent.cli.exits import ExitCode, WrongUseError, as_wrong_use
from crosscurrent.cli.files import result_file, write_json
from crosscurrent.cli.interrupt import StopRequests

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from crosscurrent.stress.campaign import Account, Case, Failure, Result
    from crosscurrent.suite.scenario import Scenario
    from crosscurrent.suite.stressed import StressOptions
    from crosscurrent.suite.verification import Cuda

JSON_FORMAT = "crosscurrent stress"
JSON_VERSION = 1
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
        "--state", metavar="FILE", default=STATE_FILE, help=f"Where a run remembers. Default: {STATE_FILE}."
    )
    options.add_argument(
        "--save", metavar="FOLDER", help="Save programs that failed there, for `crosscurrent replay`."
    )
    options.add_argument(
        "--no_simulate", "--no-simulate", action="store_true", help="Run nothing on simulated CUDA."
    )
    options.add_argument("--json", metavar="FILE", help="Write the results there as JSON.")
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
    report = result_file(arguments.json)
    if cuda is Cuda.NONE:
        say(f"nothing was run: the gradient's lanes need CUDA, and there is {cuda.value}")
        return ExitCode.NO_VERDICT
    if arguments.history:
        return _history(scenarios[0], cuda, report)
    account = _account(arguments, [case.name for case in chosen], options, cuda)
    stopped = _run(chosen, seeds, account, cuda, arguments)
    failures, num_done = account.failures, account.num_done([case.name for case in chosen], seeds)
    _conclude(failures, num_done, len(chosen) * len(seeds), cuda)
    if report is not None:
        write_json(report, _as_json(failures, num_done, chosen, seeds, cuda, arguments, complete=not stopped))
    if stopped:
        return stopped
    account.close()
    return ExitCode.BAD if failures else ExitCode.GOOD


def _run(
    cases: Sequence[Case], seeds: Sequence[int], account: Account, cuda: Cuda, arguments: Namespace
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
    estimate = _Estimate(len(seeds), total - completed)
    with StopRequests() as stop, progress() as bar:
        task = bar.add_task("stress", total=total, completed=completed)
        for result in campaign.run(cases, seeds, account):
            _tell(bar, task, result, arguments)
            if (sentence := estimate.after(result)) is not None:
                say_above(bar, sentence)
            if stop.received is not None:
                break
    return stop.exit_code


def _tell(bar: Progress, task: TaskID, result: Result, arguments: Namespace) -> None:
    seed = "as it is" if result.seed is None else f"seed {result.seed}"
    bar.update(task, advance=1, description=f"{result.case}: {seed}")
    for failure in result.failures:
        for line in _failure_lines(failure, arguments):
            say_above(bar, line)


class _Estimate:
    """Says once how long all of it will take: after the first case was prepared, and two seeds were tried."""

    def __init__(self, seeds: int, left: int) -> None:
        self._seeds = seeds
        self._left = left
        self._preparation = 0.0
        self._tried: list[float] = []
        self._said = False

    def after(self, result: Result) -> str | None:
        """The sentence, when it is time for it."""
        self._left -= 1
        if result.seed is None:
            self._preparation = result.seconds
        else:
            self._tried.append(result.seconds)
        if self._said or len(self._tried) < min(2, self._seeds):
            return None
        self._said = True
        cases = self._left / (self._seeds + 1)
        seconds = cases * self._preparation + (self._left - cases) * sum(self._tried) / len(self._tried)
        return f"this will take about {_duration(seconds)} more"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


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


def _scenarios(arguments: Namespace) -> list[Scenario]:
    from crosscurrent.suite.scenario import ALL_POLICIES, ALL_QUANTIZERS, POLICIES, QUANTIZERS, Scenario

    default = (ALL_POLICIES, ALL_QUANTIZERS) if arguments.all else (POLICIES, QUANTIZERS)
    policies = _known("policy", _names(arguments.policies, default[0]), ALL_POLICIES)
    quantizers = _known("quantizer", _names(arguments.quantizers, default[1]), ALL_QUANTIZERS)
    return [Scenario(policy=policy, quantizer=name) for policy in policies for name in quantizers]


def _cases(
    arguments: Namespace, scenarios: Sequence[Scenario], options: StressOptions, cuda: Cuda
) -> list[Case]:
    from crosscurrent.suite.stressed import CHECKPOINTS, cases

    checkpoints = _known("kind of checkpoint", _names(arguments.checkpoints, CHECKPOINTS), CHECKPOINTS)
    return cases(scenarios, options, cuda, checkpoints)


def _history(scenario: Scenario, cuda: Cuda, report: Path | None) -> int:
    """The races of the past, in a table."""
    from crosscurrent.stress.history import PAST_RACES, Shown, history_table
    from crosscurrent.suite.history import history, judge
    from crosscurrent.suite.layer import Verdict

    shown: list[Shown] = []
    with cuda.context(), progress() as bar:
        task = bar.add_task("history", total=len(PAST_RACES) + 1)
        for each in history(scenario):
            shown.append(each)
            bar.update(task, advance=1, description="unchanged" if each.race is None else each.race.name)
    outcome = judge(shown)
    output().print(history_table(shown))
    say(f"{outcome.verdict.value}: {outcome.detail} ({scenario.name}, on {cuda.value})")
    if report is not None:
        write_json(report, _head(cuda, outcome.verdict.value) | {"history": [s.as_json() for s in shown]})
    return ExitCode.GOOD if outcome.verdict is Verdict.HELD else ExitCode.BAD


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
    path.unlink(missing_ok=True)
    return Account(path, identity)


def _failure_lines(failure: Failure, arguments: Namespace) -> list[str]:
    when = "with nothing delayed" if failure.seed is None else f"with seed {failure.seed}"
    lines = [f"FAILED {failure.case}, {when}", *(f"  {line}" for line in failure.what.splitlines())]
    if failure.schedule is not None and failure.trace is not None:
        replay = ["crosscurrent", "replay", failure.trace, failure.schedule]
        lines.append(f"  replay:  {shlex.join(replay)}")
    elif failure.schedule is not None:
        lines.append(f"  schedule: {failure.schedule}")
    return [*lines, f"  repeat:  {shlex.join(_repeat(failure, arguments))}"]


def _repeat(failure: Failure, arguments: Namespace) -> list[str]:
    """The one command that shows a failure again."""
    policy, _, stored = failure.case.partition(", ")
    quantizer, _, checkpoints = stored.partition(" ")
    command = ["crosscurrent", "stress", "--policies", policy, "--quantizers", quantizer]
    if checkpoints:
        command += ["--checkpoints", checkpoints]
    command += ["--seed", str(failure.seed or 0), "--delay_us", f"{arguments.delay_us:g}"]
    if arguments.lanes is not None:
        command += ["--lanes", arguments.lanes]
    if arguments.how is not None:
        command += ["--how", arguments.how]
    return command


def _conclude(failures: Sequence[Failure], num_done: int, total: int, cuda: Cuda) -> None:
    failed = len({(failure.case, failure.seed) for failure in failures})
    if num_done < total:
        say(f"stopped after {num_done} of {total}; the same command with --continue goes on")
    if failures:
        output().print(Text(f"{failed} failed, listed above, in {num_done} run(s)", "bold red"))
        return
    where = "delays on this GPU" if cuda is cuda.REAL else "schedules of the recorded traces"
    good = Text(f"nothing differed in {num_done} run(s)", "bold green" if num_done == total else "bold")
    output().print(good, soft_wrap=True)
    if num_done == total:
        say(f"on and off are the same bits under all {where} that were tried; it proves nothing of others")


def _as_json(
    failures: Sequence[Failure],
    num_done: int,
    cases: Sequence[Case],
    seeds: Sequence[int],
    cuda: Cuda,
    arguments: Namespace,
    *,
    complete: bool,
) -> dict[str, object]:
    verdict = "failed" if failures else "held" if complete else "no verdict"
    return _head(cuda, verdict) | {
        "complete": complete,
        "cases": [case.name for case in cases],
        "seeds": list(seeds),
        "runs": num_done,
        "delay_us": arguments.delay_us,
        "failures": [
            asdict(failure) | {"repeat": shlex.join(_repeat(failure, arguments))} for failure in failures
        ],
    }


def _head(cuda: Cuda, verdict: str) -> dict[str, object]:
    import torch

    from crosscurrent import __version__

    return {
        "format": JSON_FORMAT,
        "version": JSON_VERSION,
        "crosscurrent": __version__,
        "torch": torch.__version__,
        "cuda": cuda.name.lower(),
        "verdict": verdict,
    }
