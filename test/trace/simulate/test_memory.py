"""Memory of simulated devices: what is counted, and when it runs out."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from crosscurrent.trace.records import MemoryKind
from crosscurrent.trace.simulate import Simulation, simulate

pytestmark = pytest.mark.simulation

KIB = 1 << 10


def test_blocks_are_counted_by_storage_in_units_of_512(simulation: Simulation) -> None:
    assert torch.cuda.memory_allocated() == 0
    tensor = torch.zeros(1, device="cuda")
    assert torch.cuda.memory_allocated() == 512
    view = tensor.expand(100)
    assert torch.cuda.memory_allocated() == 512
    other = torch.zeros(129, device="cuda")
    assert torch.cuda.memory_allocated() == 512 + 1024
    del tensor
    assert torch.cuda.memory_allocated() == 512 + 1024
    del view, other
    assert torch.cuda.memory_allocated() == 0
    assert torch.zeros(0, device="cuda").is_cuda
    assert torch.cuda.memory_allocated() == 0


def test_what_autograd_saved_is_alive(simulation: Simulation) -> None:
    leaf = torch.ones(128, device="cuda", requires_grad=True)
    out = (leaf * 2).exp().sum()
    gc.collect()
    # The leaf, exp's saved result, the sum.
    assert torch.cuda.memory_allocated() == 3 * 512
    out.backward()
    del out
    # The leaf and its gradient.
    assert torch.cuda.memory_allocated() == 2 * 512


def test_peaks(simulation: Simulation) -> None:
    keep = torch.zeros(KIB, dtype=torch.uint8, device="cuda")
    torch.zeros(4 * KIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.max_memory_allocated() == 5 * KIB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == KIB
    assert keep.nbytes == KIB


def test_host_and_pinned_memory_do_not_count(simulation: Simulation) -> None:
    kept = [torch.ones(100), torch.ones(100, pin_memory=True), torch.ones(100).pin_memory()]
    assert torch.cuda.memory_allocated() == 0
    assert len(kept) == 3


def test_each_device_has_its_memory(two_devices: Simulation) -> None:
    kept = torch.zeros(1, device="cuda:1")
    assert torch.cuda.memory_allocated(0) == 0
    assert torch.cuda.memory_allocated(1) == torch.cuda.memory_allocated("cuda:1") == 512
    assert torch.accelerator.memory_allocated(kept.device.index) == 512


def test_reserved_memory_is_given_back_on_request(simulation: Simulation) -> None:
    del_me = torch.zeros(5 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() == 6 << 20
    del del_me
    assert torch.cuda.memory_reserved() == 6 << 20
    free, total = torch.cuda.mem_get_info()
    assert total - free == 6 << 20
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    assert torch.cuda.max_memory_reserved() == 6 << 20


def test_capacity_is_a_choice() -> None:
    with simulate(capacity=4 * KIB):
        assert torch.cuda.get_device_properties(0).total_memory == 4 * KIB
        kept = torch.zeros(3 * KIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(
            torch.OutOfMemoryError,
            match=r"Tried to allocate 2.00 KiB. GPU 0 has a total capacity of 4.00 KiB",
        ):
            torch.zeros(2 * KIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() == 3 * KIB
        assert torch.cuda.memory_stats()["num_ooms"] == 1
        del kept
        torch.zeros(4 * KIB, dtype=torch.uint8, device="cuda")
        torch.cuda.set_per_process_memory_fraction(0.5)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(3 * KIB, dtype=torch.uint8, device="cuda")


def test_resizing_a_storage(simulation: Simulation, listener: Any) -> None:
    tensor = torch.zeros(KIB, dtype=torch.uint8, device="cuda")
    tensor.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated() == 0
    assert listener.heard[-1] == ("released", 0)
    tensor.untyped_storage().resize_(2 * KIB)
    assert torch.cuda.memory_allocated() == 2 * KIB
    tensor.resize_(4 * KIB)
    assert torch.cuda.memory_allocated() == 4 * KIB
    assert tensor.is_cuda


def test_swapped_data(simulation: Simulation) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.data = torch.ones(3, device="cuda")
    assert parameter.is_cuda
    host = torch.zeros(3)
    host.set_(parameter.data)
    assert host.is_cuda
    parameter.data = torch.zeros(3)
    assert not parameter.is_cuda


def test_statistics(simulation: Simulation) -> None:
    kept = torch.zeros(1, device="cuda")
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == kept.nbytes + 508
    assert stats["allocation.all.current"] == 1
    assert "Allocated memory" in torch.cuda.memory_summary()
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0


def test_the_environment_tells_kinds_of_memory(two_devices: Simulation) -> None:
    environment = two_devices.environment
    assert environment.classify(torch.ones(2, device="cuda:1")[1:]) == (MemoryKind.DEVICE, 1)
    assert environment.classify(torch.ones(2, pin_memory=True)) == (MemoryKind.PINNED, -1)
    assert environment.classify(torch.ones(2)) is None
    assert environment.classify(torch.eye(2).to_sparse()) is None
    assert environment.current_device() == 0
    assert environment.current_stream(1) == 0
    stream = torch.cuda.Stream(1)
    with torch.cuda.stream(stream):
        assert environment.current_stream(1) == stream.stream_id
        assert environment.current_device() == 1
    assert environment.stream_name(1, 0) != environment.stream_name(1, stream.stream_id)
