"""Entering and leaving: what is replaced comes back, and wrong use says so."""

from __future__ import annotations

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from crosscurrent.trace.simulate import Simulation, active, simulate

pytestmark = pytest.mark.simulation

OWNERS: list[Any] = [
    torch,
    torch.cuda,
    torch.cuda.graphs,
    torch.cuda.graph,
    torch.cuda.memory,
    torch.cuda.nvtx,
    torch.cuda.tunable,
    torch.accelerator,
    torch._C,
    torch._C._nn,
    torch._C._CudaStreamBase,
    torch._C._CudaEventBase,
    torch._C._CUDAGraph,
    torch.Tensor,
    torch.UntypedStorage,
    torch.nn.functional,
    torch.cuda.Stream,
    torch.autograd.variable.Variable,
    threading.Thread,
]


def _attributes() -> dict[tuple[int, str], object]:
    return {(i, name): value for i, owner in enumerate(OWNERS) for name, value in list(vars(owner).items())}


class _Passing(TorchDispatchMode):
    """Does nothing of its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _use() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        leaf = torch.ones(3, device="cuda", requires_grad=True)
        (leaf * 2).sum().backward()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.ones(3, device="cuda")


def test_everything_comes_back() -> None:
    with simulate():
        _use()  # what PyTorch imports or caches at first use is no business of this test
    before = _attributes()
    with simulate(devices=2):
        _use()
        assert _attributes() != before
    after = _attributes()
    assert after.keys() == before.keys()
    assert [name for name in before if before[name] is not after[name]] == []
    assert not torch.cuda.is_available()
    assert not torch.cuda.is_initialized()
    assert active() is None


def test_a_body_that_raises_restores() -> None:
    before = _attributes()
    with pytest.raises(ZeroDivisionError), simulate():
        int(torch.ones(3, device="cuda").sum()) // 0
    after = _attributes()
    assert [name for name in before if before[name] is not after.get(name)] == []
    assert active() is None


def test_tensors_outlive_their_simulation_as_plain_memory() -> None:
    with simulate():
        tensor = torch.ones(3, device="cuda")
    assert tensor.device.type == "cpu"
    assert tensor.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(Exception, match=r"CUDA|cuda|NVIDIA driver"):
        torch.ones(3, device="cuda")


def test_only_one_at_a_time() -> None:
    with simulate() as simulation:
        assert active() is simulation
        with pytest.raises(RuntimeError, match="active already"), simulate():
            pass
        assert active() is simulation
        assert torch.ones(1, device="cuda").is_cuda
    with pytest.raises(RuntimeError, match="make a new one"):
        simulation.__enter__()


def test_leaving_twice() -> None:
    simulation = simulate()
    with pytest.raises(RuntimeError, match="never entered"):
        simulation.__exit__(None, None, None)
    with simulation:
        pass
    with pytest.raises(RuntimeError, match="left before"):
        simulation.__exit__(None, None, None)


def test_leaving_in_the_wrong_order() -> None:
    simulation, inner = simulate(), _Passing()
    simulation.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="reverse order"):
        simulation.__exit__(None, None, None)
    assert torch.ones(1, device="cuda").is_cuda
    inner.__exit__(None, None, None)
    simulation.__exit__(None, None, None)
    assert active() is None


def test_leaving_while_something_watches(listen: Any) -> None:
    simulation = simulate()
    simulation.__enter__()
    listener = listen(simulation)
    with pytest.raises(RuntimeError, match=r"leave watch\(\) before simulate\(\)"):
        simulation.__exit__(None, None, None)
    simulation.detach(listener)
    simulation.__exit__(None, None, None)


def test_leaving_from_another_thread(simulation: Simulation) -> None:
    errors: list[str] = []

    def leave() -> None:
        try:
            simulation.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert errors == ["a simulation has to be left by the thread that entered it"]
    assert active() is simulation


@pytest.mark.parametrize(("options", "message"), [({"devices": 0}, "devices"), ({"capacity": 0}, "capacity")])
def test_bad_options(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"{message} must be at least 1"):
        simulate(**options)


def test_real_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a GPU, of which only these two answers matter here."""
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 2, raising=False)
    with pytest.raises(RuntimeError, match=r"2 real CUDA device.*with CUDA_VISIBLE_DEVICES= "), simulate():
        pass
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA is in use in this process"), simulate():
        pass
    assert active() is None


def test_other_modes_around_and_inside() -> None:
    with _Passing(), simulate(), _Passing():
        tensor = torch.ones(3, device="cuda") * 2
        assert tensor.is_cuda
        assert tensor.tolist() == [2.0, 2.0, 2.0]


def test_threads_of_a_pool(simulation: Simulation) -> None:
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda i: (torch.ones(2, device="cuda") * i).cpu().tolist(), range(4)))
    assert results == [[float(i)] * 2 for i in range(4)]


def test_threads_outlive_a_simulation_as_plain_threads() -> None:
    go_on, results = threading.Event(), []

    def work() -> None:
        results.append(torch.ones(2, device="cuda").is_cuda)
        go_on.wait()
        results.append((torch.ones(2) * 2).tolist())

    with simulate():
        thread = threading.Thread(target=work)
        thread.start()
        while not results:
            thread.join(0.001)
    go_on.set()
    thread.join()
    assert results == [True, [2.0, 2.0]]


def _in_child(queue: Any) -> None:
    try:
        torch.ones(1, device="cuda")
    except RuntimeError as error:
        queue.put(str(error))
    else:
        queue.put("no error")


def test_forked_processes_have_no_cuda(simulation: Simulation) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=_in_child, args=(queue,))
    process.start()
    message = queue.get()
    process.join()
    assert "Cannot re-initialize CUDA in forked subprocess" in message
    assert torch.ones(1, device="cuda").is_cuda


def test_threads_older_than_the_simulation_are_told() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: None).result()
        with simulate():
            tensor = torch.ones(2, device="cuda")
            for use in (
                torch.cuda.Stream,
                lambda: torch.ones(2).cuda(),
                lambda: tensor.to("cpu", torch.float64),
            ):
                with pytest.raises(RuntimeError, match="this thread began before simulate"):
                    pool.submit(use).result()


def test_threads_of_an_earlier_simulation_are_told() -> None:
    with ThreadPoolExecutor(1) as pool:
        with simulate():
            assert pool.submit(lambda: torch.ones(2, device="cuda").is_cuda).result()
        with simulate(), pytest.raises(RuntimeError, match="this thread began before simulate"):
            pool.submit(lambda: torch.ones(2).cuda()).result()
