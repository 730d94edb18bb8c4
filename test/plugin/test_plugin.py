"""The plugin in projects of its own: what it finds, what it says, and what it leaves alone."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
import torch

# In-process runs forget the modules that they import first; PyTorch cannot be imported twice.
import crosscurrent_pytest.body

pytest_plugins = ["pytester"]

assert crosscurrent_pytest.body

PLAIN = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
"""Options of all runs. Hypothesis would be imported, and its asserts rewritten, anew in each run."""

STEPS = """
import pytest
import torch
import crosscurrent as cc

def racy():
    copies = torch.cuda.Stream()
    host = torch.empty(4, pin_memory=True)
    loss = torch.ones(4, device="cuda").square()
    with torch.cuda.stream(copies):
        host.copy_(loss, non_blocking=True)

def ordered():
    copies = torch.cuda.Stream()
    host = torch.empty(4, pin_memory=True)
    loss = torch.ones(4, device="cuda").square()
    copies.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(copies):
        host.copy_(loss, non_blocking=True)
    copies.synchronize()
"""

BOTH_CALLS = [
    "race: float32[[]4[]] may be read before it is written*",
    "* first    pow on cuda:0 default writes float32[[]4[]] at test_it.py:8 (racy)",
    '*> *8 | *loss = torch.ones(4, device="cuda").square()',
    "* second   copy_ on cuda:0 stream * reads float32[[]4[]] at test_it.py:10 (racy)",
    "*> *10 | *host.copy_(loss, non_blocking=True)",
    "* missing *",
    "* fix *",
]


def run(pytester: pytest.Pytester, tests: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(test_it=STEPS + tests)
    return pytester.runpytest_inprocess(*PLAIN, *options)


# -- the fixture -------------------------------------------------------------------------------------------


def test_a_race_in_the_body_fails_the_test_with_both_call_sites(pytester: pytest.Pytester) -> None:
    result = run(pytester, "def test_it(crosscurrent): racy()")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(BOTH_CALLS)
    result.stdout.fnmatch_lines(["FAILED test_it.py::test_it - race: float32*"])
    result.stdout.no_fnmatch_line("*body.py*")  # no traceback through the plugin


def test_an_ordered_body_passes(pytester: pytest.Pytester) -> None:
    run(pytester, "def test_it(crosscurrent): ordered()").assert_outcomes(passed=1)


def test_the_value_of_the_fixture_is_the_watch(pytester: pytest.Pytester) -> None:
    tests = """
def test_it(crosscurrent):
    ordered()
    assert crosscurrent.findings == []
    assert [wait.kind for wait in crosscurrent.host_waits] == ["allocation", "synchronize"]
"""
    run(pytester, tests).assert_outcomes(passed=1)


def test_what_fixtures_do_is_not_watched(pytester: pytest.Pytester) -> None:
    tests = """
@pytest.fixture
def before():
    racy()

def test_it(before, crosscurrent): pass
"""
    run(pytester, tests).assert_outcomes(passed=1)


def test_a_failure_of_the_body_stays_its_own_and_names_the_races_too(pytester: pytest.Pytester) -> None:
    result = run(pytester, "def test_it(crosscurrent):\n    racy()\n    assert 1 + 1 == 3\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E * assert (1 + 1) == 3", "*Captured crosscurrent call*", *BOTH_CALLS])


def test_an_expected_race_can_be_an_expected_failure(pytester: pytest.Pytester) -> None:
    tests = """
@pytest.mark.xfail(raises=cc.RaceError, strict=True)
def test_racy(crosscurrent): racy()

@pytest.mark.xfail(raises=cc.RaceError, strict=True)
def test_ordered(crosscurrent): ordered()
"""
    run(pytester, tests).assert_outcomes(xfailed=1, failed=1)


def test_a_skip_inside_of_the_body_is_a_skip(pytester: pytest.Pytester) -> None:
    run(pytester, "def test_it(crosscurrent): pytest.skip('later')").assert_outcomes(skipped=1)


def test_a_call_that_is_not_understood_is_no_pass(pytester: pytest.Pytester) -> None:
    tests = """
from torch._higher_order_ops.out_dtype import out_dtype

def opaque():
    a = torch.ones(4, 4, device="cuda")
    out_dtype(torch.ops.aten.mm.default, torch.float32, a, a)

def test_it(crosscurrent): opaque()
def test_plain(): opaque()
"""
    result = run(pytester, tests, "--crosscurrent")
    # Where nobody asked for this test in particular, what is not understood is no failure.
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["no verdict: *", "not understood*", "*out_dtype: a higher-order op*"])


# -- simulated CUDA ----------------------------------------------------------------------------------------


@pytest.mark.simulation
def test_cuda_is_there_for_fixtures_and_gone_for_tests_that_are_not_watched(
    pytester: pytest.Pytester,
) -> None:
    tests = """
@pytest.fixture(scope="module")
def weights():
    return torch.ones(4, device="cuda") if torch.cuda.is_available() else torch.ones(4)

def test_first(crosscurrent, weights): assert (weights + 1).is_cuda
def test_second(crosscurrent, weights): assert (weights + torch.ones(4, device="cuda")).is_cuda
def test_plain(): assert not torch.cuda.is_available()
def test_third(crosscurrent): assert torch.cuda.is_available()
"""
    run(pytester, tests).assert_outcomes(passed=4)
    assert not torch.cuda.is_available()


@pytest.mark.simulation
def test_a_run_that_is_cut_short_leaves_no_simulation_behind(pytester: pytest.Pytester) -> None:
    tests = "def test_first(crosscurrent): racy()\ndef test_second(crosscurrent): racy()\n"
    run(pytester, tests, "-x").assert_outcomes(failed=1)
    assert not torch.cuda.is_available()


# -- the marker --------------------------------------------------------------------------------------------


def test_schedules_prove_a_race(pytester: pytest.Pytester) -> None:
    result = run(pytester, "@pytest.mark.crosscurrent(schedules=4)\ndef test_it(): racy()\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([*BOTH_CALLS, "* witness *4 of 4 elements changed*NaN*", "* schedule cc1:*"])


def test_schedules_of_an_ordered_body_agree(pytester: pytest.Pytester) -> None:
    tests = "@pytest.mark.crosscurrent(schedules=4)\ndef test_it(): ordered()\n"
    run(pytester, tests).assert_outcomes(passed=1)


def test_host_waits_are_counted(pytester: pytest.Pytester) -> None:
    tests = """
@pytest.mark.crosscurrent(host_waits=0)
def test_none():
    torch.cuda.synchronize()

@pytest.mark.crosscurrent(host_waits=1)
def test_one():
    torch.cuda.synchronize()

@pytest.mark.crosscurrent(host_waits=0)
def test_query():
    torch.cuda.current_stream().record_event().query()
"""
    result = run(pytester, tests)
    result.assert_outcomes(failed=1, passed=2)
    result.stdout.fnmatch_lines(
        [
            "the host waited once, none is allowed",
            "* synchronize at *.py:* (test_none)",
            "*> * | torch.cuda.synchronize()",
        ]
    )


def test_a_stressed_test_is_one_test_a_seed(pytester: pytest.Pytester) -> None:
    tests = "@pytest.mark.crosscurrent(stress_seeds=2)\ndef test_it(): ordered()\n"
    result = run(pytester, tests, "-v")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*::test_it[[]seed0[]] PASSED*", "*::test_it[[]seed1[]] PASSED*"])
    result = run(pytester, tests, "-v", "--stress-seeds", "4")
    result.assert_outcomes(passed=4)
    result = run(pytester, tests, "-v", "--stress-seed", "17")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*::test_it[[]seed17[]] PASSED*"])


def test_a_stressed_failure_names_the_one_command_that_repeats_it(pytester: pytest.Pytester) -> None:
    tests = "@pytest.mark.crosscurrent(stress_seeds=1)\ndef test_it(): racy()\n"
    result = run(pytester, tests, "--delay-us", "250")
    result.assert_outcomes(failed=1)
    (line,) = [line for line in result.outlines if line.startswith("repeat: ")]
    assert line.endswith("::test_it[seed0]' --stress-seed 0 --delay-us 250")
    node = line.split("'")[1]
    again = pytester.runpytest_inprocess(*PLAIN, node, "--stress-seed", "0", "--delay-us", "250")
    again.assert_outcomes(failed=1)


def test_a_body_that_fails_by_itself_under_stress_can_be_repeated(pytester: pytest.Pytester) -> None:
    tests = "@pytest.mark.crosscurrent(stress_seeds=1)\ndef test_it():\n    assert 1 + 1 == 3\n"
    result = run(pytester, tests)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E * assert (1 + 1) == 3",
            "*Captured crosscurrent call*",
            "repeat: pytest 'test_it.py::test_it[[]seed0[]]' --stress-seed 0 --delay-us 100",
        ]
    )


def test_the_seed_is_a_fixture_too(pytester: pytest.Pytester) -> None:
    tests = "def test_it(stress_seed): assert stress_seed in (0, 1, 2)\n"
    run(pytester, tests).assert_outcomes(passed=3)
    run(pytester, tests, "--stress-seeds", "1").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ("schedule=3", "has no schedule; there are schedules, host_waits, stress_seeds, watch"),
        ("3", "takes keywords only"),
        ("schedules=-1", "schedules must be a number that is not negative, got -1"),
        ("host_waits='0'", "host_waits must be a number"),
        ("watch=1", "watch is True or False"),
    ],
)
def test_bad_markers_are_refused_before_anything_runs(
    arguments: str, advice: str, pytester: pytest.Pytester
) -> None:
    result = run(pytester, f"@pytest.mark.crosscurrent({arguments})\ndef test_it(): pass\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: *::test_it: @pytest.mark.crosscurrent*{advice}*"])


def test_a_unittest_method_cannot_be_stressed(pytester: pytest.Pytester) -> None:
    tests = """
import unittest

class TestIt(unittest.TestCase):
    @pytest.mark.crosscurrent(stress_seeds=2)
    def test_it(self): pass
"""
    result = run(pytester, tests)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*stress_seeds needs a test function*"])


def test_a_unittest_method_is_watched(pytester: pytest.Pytester) -> None:
    tests = """
import unittest

class TestIt(unittest.TestCase):
    def test_racy(self): racy()
    def test_ordered(self): ordered()
"""
    run(pytester, tests, "--crosscurrent").assert_outcomes(failed=1, passed=1)


# -- the options -------------------------------------------------------------------------------------------


def test_the_option_watches_every_test_but_those_that_decline(pytester: pytest.Pytester) -> None:
    tests = """
def test_racy(): racy()
def test_ordered(): ordered()

@pytest.mark.crosscurrent(watch=False)
def test_declines(): assert cc.trace.simulate.active() is None
"""
    result = run(pytester, "import crosscurrent.trace.simulate\n" + tests, "--crosscurrent")
    result.assert_outcomes(failed=1, passed=2)
    result.stdout.fnmatch_lines(["crosscurrent: the body of every test is watched"])


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--stress-seeds", "0"], "at least 1, got '0'"),
        (["--stress-seed", "-1"], "at least 0, got '-1'"),
        (["--delay-us", "never"], "a number above 0, got 'never'"),
        (["--delay-us", "inf"], "a number above 0, got 'inf'"),
    ],
)
def test_bad_options_are_refused(options: list[str], advice: str, pytester: pytest.Pytester) -> None:
    result = run(pytester, "def test_it(): pass\n", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{options[0]}*{advice}*"])


def test_markers_fixtures_and_options_explain_themselves(pytester: pytest.Pytester) -> None:
    markers = pytester.runpytest_inprocess(*PLAIN, "--markers").stdout
    markers.fnmatch_lines(["@pytest.mark.crosscurrent(*): watch the test's body*", "@pytest.mark.stress: *"])
    fixtures = pytester.runpytest_inprocess(*PLAIN, "--fixtures").stdout
    fixtures.fnmatch_lines(["stress_seed *", "    The seed of a stressed test*"])
    fixtures.fnmatch_lines(["crosscurrent *", "    Watch the test's body for races*"])
    text = " ".join(pytester.runpytest_inprocess(*PLAIN, "--help").stdout.str().split())
    assert "--crosscurrent Watch the body of every test" in text
    for option in ("--stress-seeds=N Run", "--stress-seed=S Run", "--delay-us=US The longest delay"):
        assert option in text


# -- xdist, JUnit, and without the plugin ------------------------------------------------------------------


def test_with_xdist_the_report_and_the_junit_xml_carry_the_finding(pytester: pytest.Pytester) -> None:
    tests = "def test_racy(crosscurrent): racy()\ndef test_ordered(crosscurrent): ordered()\n"
    result = run(pytester, tests, "-n", "1", "--junitxml", "junit.xml")
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(BOTH_CALLS)
    cases = {
        case.get("name"): case for case in ElementTree.parse(pytester.path / "junit.xml").iter("testcase")
    }
    (failure,) = cases["test_racy"].iter("failure")
    assert str(failure.get("message")).startswith("race: float32[4] may be read before it is written")
    assert failure.text is not None
    assert "host.copy_(loss, non_blocking=True)" in failure.text
    assert "\x1b" not in failure.text
    (named,) = cases["test_racy"].iter("property")
    assert named.get("name") == "crosscurrent.findings"
    assert str(named.get("value")).startswith("raw-")
    assert list(cases["test_ordered"]) == []


def test_on_a_terminal_with_colors_findings_have_some(pytester: pytest.Pytester) -> None:
    tests = "def test_it(crosscurrent): racy()\n"
    colored = run(pytester, tests, "--color", "yes").stdout.str()
    assert "\x1b[1;31mrace float32[4] may be read before it is written\x1b[0m" in colored
    assert "\x1b[1;31mrace" not in run(pytester, tests, "--color", "no").stdout.str()


def test_nothing_is_imported_until_a_test_asks_for_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(
        """
import sys

def test_before():
    assert "crosscurrent_pytest.plugin" in sys.modules
    loaded = {name.partition(".")[0] for name in sys.modules}
    assert not loaded & {"crosscurrent", "torch", "numpy", "rich"}

def test_watched(crosscurrent):
    assert "torch" in sys.modules
"""
    )
    # Other plugins that are installed may import what they like.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "crosscurrent_pytest.plugin")
    result.assert_outcomes(passed=2)


def test_switched_off_the_fixture_is_unknown_and_other_tests_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_plain(): pass\ndef test_watched(crosscurrent): pass\n")
    result = pytester.runpytest_subprocess(*PLAIN, "-p", "no:crosscurrent")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*fixture 'crosscurrent' not found"])
