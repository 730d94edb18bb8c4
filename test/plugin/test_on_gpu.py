"""The plugin on a real GPU: real delays, and no simulation."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.gpu


def test_a_stressed_body_is_delayed_and_its_waits_are_its_own(pytester: pytest.Pytester) -> None:
    """A copy that nothing orders after main's work reads too early when main is late."""
    pytester.makepyfile(
        test_it="""
import pytest
import torch
from crosscurrent.trace.simulate import active

@pytest.mark.crosscurrent(stress_seeds=2, host_waits=1)
def test_ordered():
    assert active() is None
    (torch.ones(4, device="cuda") * 2).add_(1)
    torch.cuda.synchronize()

@pytest.mark.crosscurrent(stress_seeds=12)
def test_racy():
    copies = torch.cuda.Stream()
    target = torch.zeros(4, device="cuda")
    result = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    result.add_(1)
    with torch.cuda.stream(copies):
        target.copy_(result)
    torch.cuda.synchronize()
    assert target.tolist() == [1, 1, 1, 1]
"""
    )
    # In a process of its own: CUDA cannot be shared with one that has forked.
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--delay-us", "100000")
    result.assert_outcomes(passed=2, failed=12)
    result.stdout.fnmatch_lines(["E * assert *[[]0*", "*read-after-write on device memory*"])
