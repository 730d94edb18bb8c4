"""Plans of delays, carried out on (simulated) CUDA and turned into schedules of a trace."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import crosscurrent
from crosscurrent.errors import WrongUseError
from crosscurrent.schedules import Program, Replayer, Schedule, keep_values
from crosscurrent.stress import DelayConfig, Delayed, Delays, How, SeededReplays, Target, delays
from crosscurrent.stress.lanes import DEVICE_TO_HOST, HOST_TO_DEVICE, MAIN, OTHER, roles_in
from crosscurrent.stress.plans import Step, draw, plan_of

LANES = (DEVICE_TO_HOST, HOST_TO_DEVICE, MAIN)


def decisions(config: DelayConfig, count: int, lanes: tuple[str, ...] = LANES) -> list[float]:
    """The delays of ``count`` steps that go round the lanes."""
    decide = config.start(count)
    return [decide(Step(lanes[number % len(lanes)], number)) for number in range(count)]


# -- plans: names and numbers ------------------------------------------------------------------------------


def test_numbers_are_drawn_alike_everywhere() -> None:
    # Written down once: another machine or version of Python that draws others repeats no failure.
    assert [draw(17, number) for number in range(3)] == [
        0.1550264578814452,
        0.45020811828554375,
        0.8679230363977022,
    ]


def test_everywhere_delays_every_op_of_the_lane_whose_turn_it_is() -> None:
    for seed in range(6):
        found = decisions(DelayConfig(how=How.EVERYWHERE, seed=seed, delay_us=7), 30)
        assert [lane for lane, delay in zip(LANES, found[:3], strict=True) if delay] == [LANES[seed % 3]]
        assert sorted(set(found)) == [0, 7]
        assert found == found[:3] * 10


def test_random_delays_a_quarter_of_the_ops_by_up_to_the_longest_delay() -> None:
    found = decisions(DelayConfig(how=How.RANDOM, seed=3, delay_us=50), 4000)
    hit = [delay for delay in found if delay]
    # Binomial with n = 4000 and p = 1/4: the standard deviation is 27.4; five of them are 137.
    assert abs(len(hit) - 1000) < 137
    assert 49 < max(hit) < 50
    assert 0 < min(hit) < 1


@pytest.mark.parametrize("how", [How.RANDOM, How.PCT])
def test_a_seed_is_a_plan(how: How) -> None:
    one, same, other = (decisions(DelayConfig(how=how, seed=seed), 60) for seed in (5, 5, 6))
    assert one == same
    assert one != other


@pytest.mark.parametrize("how", [How.EVERYWHERE, How.RANDOM, How.PCT])
def test_lanes_that_are_not_named_are_never_late(how: How) -> None:
    for seed in range(8):
        found = decisions(DelayConfig(how=how, seed=seed, lanes=(MAIN,)), 60)
        assert not any(delay for number, delay in enumerate(found) if LANES[number % 3] != MAIN)
        assert any(found)


def test_pct_ranks_the_lanes_and_lets_the_one_at_work_fall() -> None:
    fallen = 0
    for seed in range(40):
        config = DelayConfig(how=How.PCT, seed=seed, delay_us=10, depth=2)
        found = decisions(config, 300)
        assert sorted(found[:3]) == [0, 5, 10] or found[0] == 10  # by rank, unless the first one fell
        changes = [n for n in range(3, 300) if found[n] != found[n - 3]]
        if changes:
            fallen += 1
            # One lane falls to the lowest rank; those that were below it rise by one.
            assert found[changes[0]] == 10
            assert sorted(found[-3:]) == [0, 5, 10]
    assert fallen > 15  # of 40; the moment is uniform, and the lowest lane cannot fall (a third of the time)


def test_pct_of_depth_one_never_changes() -> None:
    found = decisions(DelayConfig(how=How.PCT, seed=1, depth=1), 90)
    assert found == found[:3] * 30


def test_seeds_of_a_campaign_take_turns_at_all_ways_and_lanes() -> None:
    plans = [plan_of(seed, lanes=LANES, delay_us=1) for seed in range(9)]
    assert [plan.how for plan in plans] == [How.EVERYWHERE, How.RANDOM, How.PCT] * 3
    late = [LANES[plan.seed % 3] for plan in plans if plan.how is How.EVERYWHERE]
    assert late == list(LANES)
    assert plan_of(7, lanes=LANES, delay_us=1, how=How.PCT) == DelayConfig(how=How.PCT, seed=7, delay_us=1)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"lanes": ("mian",)}, "there is no lane 'mian'; the lanes are device_to_host"),
        ({"lanes": ()}, "at least one of"),
        ({"delay_us": 0}, "above 0, got 0"),
        ({"delay_us": float("nan")}, "above 0, got nan"),
        ({"seed": -1}, "seed must not be negative"),
        ({"depth": 0}, "depth must be at least 1"),
        ({"how": How.DIRECTED}, "a target exactly when it is directed"),
        ({"target": Target("op", "file.py", 1)}, "a target exactly when it is directed"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(arguments: dict[str, object], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        DelayConfig(**arguments)  # type: ignore[arg-type]


# -- on CUDA -----------------------------------------------------------------------------------------------


def round_trip() -> Tensor:
    """Six ops that launch something: two on main, two on each transfer stream; and some that do not."""
    main = torch.cuda.current_stream()
    incoming, outgoing = torch.cuda.Stream(), torch.cuda.Stream()
    source, target = torch.arange(4.0).pin_memory(), torch.empty(4, pin_memory=True)
    with torch.cuda.stream(incoming):
        fetched = torch.empty(4, device="cuda")
        fetched.copy_(source, non_blocking=True)
        fetched.copy_(source, non_blocking=True)
    main.wait_stream(incoming)
    result = fetched.view(2, 2).mul(2).add(1)
    outgoing.wait_stream(main)
    with torch.cuda.stream(outgoing):
        target.copy_(result.view(4), non_blocking=True)
        target.copy_(result.view(4), non_blocking=True)
    outgoing.synchronize()
    return target.clone()


@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize("lane", LANES)
def test_the_ops_of_a_lane_are_delayed_and_no_others(lane: str) -> None:
    with delays(DelayConfig(how=How.EVERYWHERE, lanes=(lane,))) as seen:
        values = round_trip()
    assert (seen.num_ops, seen.num_delayed) == (6, 2)
    assert values.tolist() == [1, 3, 5, 7]


@pytest.mark.simulation
@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize("late", [MAIN, OTHER])
def test_a_delayed_lane_is_late_by_the_delay_and_the_others_are_not(late: str) -> None:
    """The model clock is exact to a nanosecond, and 1,500 cycles of it are a microsecond."""

    def elapsed() -> tuple[float, float]:
        side, start = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        tensor, other = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
        torch.cuda.synchronize()
        start.record()
        tensor.add_(1)
        ends[0].record()
        with torch.cuda.stream(side):
            other.mul_(2)
            ends[1].record()
        torch.cuda.synchronize()
        return start.elapsed_time(ends[0]), start.elapsed_time(ends[1])

    plain = elapsed()
    with delays(DelayConfig(how=How.EVERYWHERE, lanes=(late,), delay_us=2000)):
        main, other = elapsed()
    assert main - plain[0] == pytest.approx(2 if late == MAIN else 0, abs=0.01)
    assert other - plain[1] == pytest.approx(2 if late == OTHER else 0, abs=0.01)


@pytest.mark.usefixtures("_cuda")
def test_the_backward_pass_is_delayed_too() -> None:
    weight = torch.ones(4, device="cuda", requires_grad=True)
    with delays(DelayConfig(how=How.EVERYWHERE, lanes=(MAIN,))) as seen:
        loss = (weight * 3).sum()
        forward = seen.num_delayed
        loss.backward()
    assert forward == 2
    assert seen.num_delayed > forward
    assert weight.grad is not None
    assert weight.grad.tolist() == [3, 3, 3, 3]


@pytest.mark.usefixtures("_cuda")
def test_a_directed_delay_hits_one_call_site() -> None:
    frame = inspect.currentframe()
    assert frame is not None
    tensor = torch.zeros(4, device="cuda")
    line = frame.f_lineno + 2
    with delays(DelayConfig(how=How.DIRECTED, target=Target("aten.add_.Tensor", __file__, line))) as seen:
        tensor.add_(1)
        tensor.add_(1)
        tensor.mul_(2)
    assert (seen.num_ops, seen.num_delayed) == (3, 1)


@pytest.mark.usefixtures("_cuda")
def test_work_of_the_host_is_not_delayed() -> None:
    with delays(DelayConfig(how=How.EVERYWHERE, lanes=(MAIN,))) as seen:
        torch.ones(4).add_(1)
        torch.ones(4, pin_memory=True).add_(1)
    assert (seen.num_ops, seen.num_delayed) == (0, 0)


@pytest.mark.no_gpu
def test_without_cuda_it_says_what_to_do() -> None:
    with pytest.raises(WrongUseError, match=r"enter crosscurrent\.simulate\(\) first"), delays(DelayConfig()):
        pass


@pytest.mark.usefixtures("_cuda")
def test_delays_are_used_once() -> None:
    used: Delays = delays(DelayConfig())
    with used:
        pass
    with pytest.raises(WrongUseError, match="entered before"), used:
        pass


# -- on a trace --------------------------------------------------------------------------------------------


def early_read() -> Tensor:
    """Copies a result to the host before it is there."""
    outgoing = torch.cuda.Stream()
    target = torch.empty(4, pin_memory=True)
    result = torch.ones(4, device="cuda").mul_(3)
    with torch.cuda.stream(outgoing):
        target.copy_(result, non_blocking=True)
    torch.cuda.synchronize()
    return target


def recorded(step: Callable[[], Tensor]) -> tuple[Program, list[crosscurrent.Finding]]:
    with crosscurrent.watch(trace=True) as seen, keep_values(seen) as keeper:
        keeper.name({"result": step()})
    return keeper.program(), seen.findings


@pytest.mark.usefixtures("_cuda")
def test_lanes_have_the_roles_of_their_first_ops() -> None:
    program, _ = recorded(round_trip)
    roles = roles_in(program.records, program.info.lanes)
    assert sorted(roles.values()) == sorted(LANES)
    names = {roles[lane.index]: lane for lane in program.info.lanes if lane.index in roles}
    assert names[MAIN].stream == 0


@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize("how", [How.EVERYWHERE, How.RANDOM, How.PCT])
def test_every_plan_leads_to_a_schedule(how: How) -> None:
    for step in (round_trip, early_read):
        program, _ = recorded(step)
        replayer = Replayer(program)
        strategy = Delayed.of(program, DelayConfig(how=how), count=20)
        proposed = [proposal.linear for proposal in strategy.proposals(replayer.space)]
        assert len(proposed) == 20
        assert all(replayer.order.allows(linear) for linear in proposed)


@pytest.mark.usefixtures("_cuda")
def test_a_late_lane_shows_the_race_and_a_late_reader_does_not() -> None:
    program, (finding,) = recorded(early_read)
    replayer = Replayer(program)

    def same(config: DelayConfig) -> bool:
        (proposal,) = Delayed.of(program, config).proposals(replayer.space)
        return replayer.run(proposal.linear).same

    assert not same(DelayConfig(how=How.EVERYWHERE, lanes=(MAIN,)))
    assert not same(DelayConfig(how=How.DIRECTED, target=Target.of(finding)))
    assert same(DelayConfig(how=How.EVERYWHERE, lanes=(DEVICE_TO_HOST,)))


@pytest.mark.usefixtures("_cuda")
def test_seeds_find_the_race_and_its_schedule_can_be_pasted_back() -> None:
    program, _ = recorded(early_read)
    replays = SeededReplays(program, lambda seed: plan_of(seed, lanes=LANES, delay_us=100))
    assert replays.unfaithful == ()
    found = [replays.run(seed) for seed in range(9)]
    again = [replays.run(seed) for seed in range(9)]
    assert found == again
    first = next(difference for difference in found if difference is not None)
    schedule = Schedule.parse(first.schedule, program)
    outcome = Replayer(program, schedule.reuse).run(schedule.linear)
    assert outcome.changes == first.changes
    assert "result" in first.what


@pytest.mark.usefixtures("_cuda")
def test_no_seed_changes_an_ordered_program() -> None:
    program, findings = recorded(round_trip)
    assert findings == []
    replays = SeededReplays(program, lambda seed: plan_of(seed, lanes=LANES, delay_us=100))
    assert [replays.run(seed) for seed in range(30)] == [None] * 30


# -- on a real GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_real_delay_makes_a_real_race_show() -> None:
    """What main writes is read before it is there, when the write is a second late, and not else."""

    def step() -> list[float]:
        outgoing = torch.cuda.Stream()
        result = torch.zeros(4, device="cuda")
        target = torch.empty(4, pin_memory=True)
        torch.cuda.synchronize()
        result.add_(1)
        with torch.cuda.stream(outgoing):
            target.copy_(result, non_blocking=True)
        torch.cuda.synchronize()
        return target.tolist()

    with delays(DelayConfig(how=How.EVERYWHERE, lanes=(DEVICE_TO_HOST,), delay_us=1e5)):
        assert step() == [1, 1, 1, 1]
    with delays(DelayConfig(how=How.EVERYWHERE, lanes=(MAIN,), delay_us=1e6)):
        assert step() == [0, 0, 0, 0]


@pytest.mark.usefixtures("_cuda")
def test_what_is_captured_is_not_delayed() -> None:
    """A delay would stay in the graph, for launches long after."""
    x, graph, side = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with delays(DelayConfig(how=How.EVERYWHERE, delay_us=1.0, lanes=(MAIN, OTHER))) as delayed:
        with torch.cuda.stream(side):
            graph.capture_begin()  # on a device it fills the generator's state first
            before = delayed.num_ops, delayed.num_delayed
            x.add_(1)
            graph.capture_end()
        assert (delayed.num_ops, delayed.num_delayed) == before
        graph.replay()
        x.add_(1)
    assert delayed.num_delayed == before[1] + 1
    assert x.tolist() == [3.0] * 4
