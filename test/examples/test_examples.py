"""Every example is right, gives the right numbers, and its racy twin is explained: kind and both call sites.

They run as they are, on a GPU where there is one, else on simulated CUDA.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import crosscurrent
from crosscurrent.report.missing import num_missing

FOLDER = Path(__file__).parents[2] / "examples"


class Race(NamedTuple):
    """What a finding must say: its kind, the memory, and the two lines (beginnings of) that race."""

    kind: str
    memory: str
    first: str
    second: str


RACES = {
    "prefetch": [
        Race("write-after-read", "device", "total += batch.square()", "self._slots[slot].copy_("),
    ],
    "activation_offload": [
        Race("reuse", "device", "self._host.copy_(tensor,", "loss = network("),
    ],
    "optimizer_offload": [
        Race(
            "write-after-read", "device", "self._moments[index].copy_(", "self._moments_in_slot(index).copy_("
        ),
        Race("write-after-read", "device", "self._moments[index].copy_(", "first.lerp_("),
    ],
    "staging_ring": [
        Race("write-after-read", "pinned", "on_device.copy_(staged,", "staged.copy_(source)"),
    ],
    "bucket_all_reduce": [
        Race("read-after-write", "device", "network(inputs)", "bucket.div_("),
        Race("read-after-write", "device", "bucket.zero_()", "bucket.div_("),
    ],
}
"""The races of each racy twin, in order."""


def _machine() -> AbstractContextManager[Any]:
    return nullcontext() if torch.cuda.is_available() else crosscurrent.simulate()


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _line(site: Any) -> str:
    """The source line of a call site, and proof that it is in an example."""
    path = Path(site.file)
    assert path.resolve().parent == FOLDER.resolve()
    return path.read_text(encoding="utf-8").splitlines()[site.line - 1].strip()


def test_every_example_has_a_twin_and_is_tested() -> None:
    names = {path.stem for path in FOLDER.glob("*.py")}
    assert names == {*RACES, *(f"{name}_racy" for name in RACES)}


@pytest.mark.parametrize("name", RACES)
def test_the_right_one_is_silent(name: str) -> None:
    with _machine(), crosscurrent.watch() as watch:
        _load(name).main()
    assert watch.findings == []
    assert watch.unknown == []


@pytest.mark.parametrize("name", RACES)
def test_the_racy_twin_is_explained(name: str) -> None:
    with _machine(), crosscurrent.watch() as watch:
        _load(f"{name}_racy").main()
    assert watch.unknown == []
    found = [
        (each.kind.value, each.memory.value, each.first.site, each.second.site) for each in watch.findings
    ]
    assert len(found) == len(RACES[name]), "\n".join(map(str, watch.findings))
    for (kind, memory, first, second), race in zip(found, RACES[name], strict=True):
        assert (kind, memory) == (race.kind, race.memory)
        assert _line(first).startswith(race.first)
        assert _line(second).startswith(race.second)
    # One line is missing. The second race of `optimizer_offload` is mended because its stream waits for that
    # of the first.
    assert num_missing(watch.findings) == 1


@pytest.mark.parametrize("name", RACES)
def test_the_races_of_the_twin_change_numbers(name: str) -> None:
    with _machine(), crosscurrent.proving() as proof:
        _load(f"{name}_racy").main()
    assert [finding.witness for finding in proof.findings if finding.schedule is None] == []


@pytest.mark.parametrize("name", RACES)
def test_the_twin_lacks_one_line_and_its_comment(name: str) -> None:
    right, racy = (_load(each).__file__ for each in (name, f"{name}_racy"))
    assert right is not None
    assert racy is not None
    sources = [
        Path(path).read_text(encoding="utf-8").split('"""\n', 1)[1].splitlines() for path in (right, racy)
    ]
    changed = [line for line in difflib.ndiff(*sources) if line[0] in "+-"]
    removed = [line[2:].strip() for line in changed if line.startswith("- ")]
    assert len(removed) == len(changed), "nothing is added"
    assert len([line for line in removed if not line.startswith("#")]) == 1


def _run(name: str, use: Callable[[ModuleType], Any]) -> Any:
    with _machine():
        return use(_load(name))


def test_prefetching_hands_out_every_batch() -> None:
    # 256 elements of 0, 1, ..., 5, squared; all sums are integers below 2**24, which float32 adds exactly.
    assert _run("prefetch", lambda module: module.main()).item() == 256 * 55


@pytest.mark.parametrize("num_batches", [1, 2, 5])
def test_prefetching_less_than_the_slots_and_leaving_early(num_batches: int) -> None:
    with _machine(), crosscurrent.watch() as watch:
        batches = [torch.full((8,), float(number)).pin_memory() for number in range(num_batches)]
        prefetcher = _load("prefetch").Prefetcher(batches)
        seen = [batch.clone() for batch in prefetcher]
        for _ in prefetcher:
            break
        again = [batch.clone() for batch in prefetcher]
        del prefetcher
        sums = [batch.sum().item() for batch in (*seen, *again)]
    assert sums == [8.0 * number for number in range(num_batches)] * 2
    assert watch.findings == []


def test_offloaded_activations_give_the_gradients_of_plain_autograd() -> None:
    def plain(module: ModuleType) -> list[Tensor]:
        class Nothing(nullcontext[None]):
            def __init__(self, *, min_bytes: int) -> None:
                super().__init__()

        module.OffloadedActivations = Nothing  # type: ignore[attr-defined]
        return module.main()  # type: ignore[no-any-return]

    offloaded, reference = (
        _run("activation_offload", lambda module: module.main()),
        _run("activation_offload", plain),
    )
    # The same kernels on the same bytes: copies change nothing.
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(offloaded, reference, strict=True))


def test_activations_come_back_for_a_second_backward_pass_and_are_then_let_go() -> None:
    with _machine(), crosscurrent.watch() as watch:
        context = _load("activation_offload").OffloadedActivations(min_bytes=0)
        weight = torch.ones(4, device="cuda", requires_grad=True)
        with context:
            loss = (weight * torch.arange(4.0, device="cuda")).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        gradient = weight.grad.cpu()  # type: ignore[union-attr]
        del loss
        kept = context._last and context._last()
    assert gradient.tolist() == [0.0, 4.0, 16.0, 36.0]  # twice 2 x^2: small integers are exact
    assert watch.findings == []
    assert kept is None


def test_offloaded_adam_is_adam() -> None:
    def plain(module: ModuleType) -> list[Tensor]:
        module.OffloadedAdam = torch.optim.Adam  # type: ignore[attr-defined]
        return module.main()  # type: ignore[no-any-return]

    offloaded, reference = (
        _run("optimizer_offload", lambda module: module.main()),
        _run("optimizer_offload", plain),
    )
    for ours, theirs in zip(offloaded, reference, strict=True):
        # Some ten float32 roundings a step on updates of 0.01, three steps: 3 * 10 * 0.01 * 2**-24 and the
        # rounding of the parameters themselves, which are below 1, 3 * 2**-24. Twice that.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2 * 3.3 * 2.0**-24)


@pytest.mark.parametrize("num_parameters", [1, 2, 3])
def test_offloaded_adam_with_few_parameters_has_no_race(num_parameters: int) -> None:
    with _machine(), crosscurrent.watch() as watch:
        parameters = [nn.Parameter(torch.ones(3, device="cuda")) for _ in range(num_parameters)]
        optimizer = _load("optimizer_offload").OffloadedAdam(parameters)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        del optimizer
        torch.zeros(64, device="cuda")
    assert watch.findings == []


def test_the_ring_uploads_every_tensor() -> None:
    # 1024 elements of 0, ..., 7, squared; integers below 2**24.
    assert _run("staging_ring", lambda module: module.main()).item() == 1024 * 140


def test_averaging_sums_over_one_rank_gives_the_mean() -> None:
    def plain(module: ModuleType) -> list[Tensor]:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to("cuda")
        inputs = torch.randn(64, 16, device="cuda")
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            network(inputs).square().mean().backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in network.parameters()]

    averaged, reference = (
        _run("bucket_all_reduce", lambda module: module.main()),
        _run("bucket_all_reduce", plain),
    )
    # 64 samples: dividing by a power of two is exact, and commutes with all roundings of the backward pass.
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(averaged, reference, strict=True))
