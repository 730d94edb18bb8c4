"""Tensors on simulated devices: where they are, how they move, what may not be mixed."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytestmark = [pytest.mark.simulation, pytest.mark.usefixtures("two_devices")]


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.empty(3, device=device),
        lambda device: torch.zeros(3, device=device),
        lambda device: torch.arange(3, device=device),
        lambda device: torch.randn(3, device=device),
        lambda device: torch.randperm(3, device=device),
        lambda device: torch.tensor([1.0, 2.0], device=device),
        lambda device: torch.as_tensor(np.ones(3), device=device),
        lambda device: torch.asarray([1, 2], device=device),
        lambda device: torch.zeros_like(torch.ones(3), device=device),
        lambda device: torch.ones(3).new_zeros(3, device=device),
        lambda device: torch.ones(3).new_tensor([1.0], device=device),
        lambda device: torch.ones(3).to(device),
        lambda device: torch.ones(3).to(device, torch.float64, non_blocking=True),
        lambda device: torch.ones(3).to(device=device, dtype=torch.int32),
        lambda device: torch.ones(3).to(torch.ones(1, dtype=torch.float64, device=device)),
        lambda device: torch.ones(3).type_as(torch.ones(1, device=device)),
        lambda device: torch.from_numpy(np.ones(3)).to(device),
        lambda device: torch.full((3,), 1.0, device=device)[1:].view(2, 1),
        lambda device: torch.nn.Linear(2, 2, device=device).weight,
        lambda device: functional.one_hot(torch.tensor([0, 2], device=device)),
        lambda device: torch.ones(3, device=device) * torch.tensor(2.0),
        lambda device: torch.ones(3, device=device)[torch.tensor([0, 1])],
        lambda device: torch.hann_window(4, device=device),
        lambda device: torch.cat([torch.ones(3, device=device), torch.ones(1, device=device)]),
        lambda device: torch.stack(torch.ones(4, device=device).split(2)),
        lambda device: torch.ones(4, device=device).topk(2).indices,
        lambda device: torch.func.vmap(lambda x: x * 2)(torch.ones(4, device=device)),
        lambda device: torch.func.grad(lambda x: (x * x).sum())(torch.ones(4, device=device)),
    ],
)
@pytest.mark.parametrize("device", ["cuda", "cuda:1", 1, torch.device("cuda", 0)])
def test_made_on_a_device(make: object, device: object) -> None:
    tensor: Tensor = make(device)  # type: ignore[operator]
    index = {"cuda": 0, "cuda:1": 1, 1: 1, torch.device("cuda", 0): 0}[device]  # type: ignore[index]
    assert tensor.device == torch.device("cuda", index)
    assert tensor.is_cuda
    assert not tensor.is_cpu
    assert tensor.get_device() == index
    assert f"device='cuda:{index}'" in repr(tensor)
    assert tensor.type().startswith("torch.cuda.")
    assert tensor.untyped_storage().device == tensor.device


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3),
        lambda: torch.ones(3, device="cuda").cpu(),
        lambda: torch.ones(3, device="cuda").to("cpu"),
        lambda: torch.zeros_like(torch.ones(3, device="cuda"), device="cpu"),
        lambda: torch.ones(3, device="cuda").new_zeros(3, device="cpu"),
        lambda: torch.as_tensor(torch.ones(3, device="cuda"), device="cpu"),
        lambda: torch.tensor([1.0]),
        lambda: torch.tensor(torch.ones(3, device="cuda").tolist()),
        lambda: torch.ones(3, pin_memory=True) + 1,
        lambda: torch.ones(3, pin_memory=True).clone(),
    ],
)
def test_made_on_the_host(make: object) -> None:
    tensor: Tensor = make()  # type: ignore[operator]
    assert tensor.device == torch.device("cpu")
    assert tensor.is_cpu
    assert not tensor.is_cuda
    assert not tensor.is_pinned()
    assert tensor.get_device() == -1


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3, pin_memory=True),
        lambda: torch.ones(3).pin_memory(),
        lambda: torch.ones(3).pin_memory()[1:],
        lambda: torch.tensor([1.0], pin_memory=True),
        lambda: torch.empty_like(torch.ones(3), pin_memory=True),
        lambda: torch.ones(3, device="cuda").to("cpu", non_blocking=True),
    ],
)
def test_pinned(make: object) -> None:
    tensor: Tensor = make()  # type: ignore[operator]
    assert tensor.is_pinned()
    assert tensor.device.type == "cpu"
    assert tensor.pin_memory() is tensor


def test_pinning_keeps_the_strides() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    assert tensor.pin_memory().stride() == tensor.stride()
    assert torch.equal(tensor.pin_memory(), tensor)


def test_device_memory_cannot_be_pinned() -> None:
    with pytest.raises(RuntimeError, match=r"cannot pin 'torch.cuda.FloatTensor'"):
        torch.ones(3, device="cuda").pin_memory()
    with pytest.raises(RuntimeError, match="pinned"):
        torch.ones(3, device="cuda", pin_memory=True)


def test_to_the_same_place_is_the_same_tensor() -> None:
    tensor = torch.ones(3, device="cuda")
    assert tensor.cuda() is tensor
    assert tensor.to("cuda:0") is tensor
    assert tensor.to(torch.float32) is tensor
    assert tensor.to("cuda:0", copy=True) is not tensor
    assert tensor.to(torch.float64).is_cuda
    with torch.cuda.device(1):
        assert tensor.to("cuda").device.index == 1


@pytest.mark.parametrize(
    "mix",
    [
        lambda: torch.ones(3, device="cuda") + torch.ones(3),
        lambda: torch.ones(3) + torch.ones(3, device="cuda"),
        lambda: torch.ones(2, 2, device="cuda") @ torch.ones(2, 2),
        lambda: torch.cat([torch.ones(3, device="cuda"), torch.ones(3)]),
        lambda: torch.ones(3, device="cuda").add_(torch.ones(3)),
        lambda: torch.ones(()).add_(torch.ones((), device="cuda")),
        lambda: torch.ones(3) * torch.tensor(2.0, device="cuda"),
        lambda: torch.nn.functional.linear(torch.ones(2, 2, device="cuda"), torch.ones(2, 2)),
        lambda: torch.add(torch.ones(3, device="cuda"), 1.0, out=torch.ones(3)),
        lambda: torch.where(torch.ones(3, dtype=torch.bool), torch.ones(3, device="cuda"), 0.0),
    ],
)
def test_mixing_device_and_host_raises(mix: object) -> None:
    expected = (
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    )
    with pytest.raises(RuntimeError, match=expected):
        mix()  # type: ignore[operator]


def test_mixing_devices_raises() -> None:
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cuda:1!"):
        torch.ones(3, device="cuda:0") + torch.ones(3, device="cuda:1")


def test_what_may_be_mixed() -> None:
    tensor = torch.zeros(4, device="cuda")
    scalar = torch.tensor(2.0)
    assert (tensor + scalar).is_cuda
    assert (scalar - tensor).is_cuda
    tensor[torch.tensor([1, 2])] = 5.0
    tensor[0] = scalar
    tensor[3:].copy_(torch.ones(1))
    assert tensor.tolist() == [2.0, 5.0, 5.0, 1.0]
    assert torch.where(tensor > 1, tensor, torch.tensor(0.0)).tolist() == [2.0, 5.0, 5.0, 0.0]


def test_a_host_tensor_cannot_be_indexed_by_the_device() -> None:
    with pytest.raises(RuntimeError, match="indices should be either on cpu or on the same device"):
        torch.ones(3)[torch.tensor([0], device="cuda")]


def test_no_such_device() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(3, device="cuda:2")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(3).cuda(2)


def test_numpy_is_for_the_host() -> None:
    tensor = torch.ones(3, device="cuda:1")
    message = r"can't convert cuda:1 device type tensor to numpy. Use Tensor.cpu\(\) to copy"
    with pytest.raises(TypeError, match=message):
        tensor.numpy()
    with pytest.raises(TypeError, match=message):
        np.asarray(tensor)
    assert tensor.cpu().numpy().sum() == 3
    assert tensor.numpy(force=True).sum() == 3
    with pytest.raises(NotImplementedError, match="__dlpack__"):
        torch.utils.dlpack.from_dlpack(tensor)


def test_values_come_to_the_host() -> None:
    tensor = torch.arange(3.0, device="cuda")
    assert tensor.sum().item() == 3.0
    assert float(tensor[2]) == 2.0
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    assert tensor.nonzero().device == tensor.device
    assert tensor[tensor > 0].device == tensor.device


def test_gradients_travel_back() -> None:
    leaf = torch.ones(3, requires_grad=True)
    (leaf.cuda().to("cuda:1", torch.float64) * 2).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.device.type == "cpu"
    assert leaf.grad.dtype == torch.float32
    assert leaf.grad.tolist() == [2.0, 2.0, 2.0]


def test_gradients_travel_back_through_copy() -> None:
    leaf = torch.ones(3, requires_grad=True)
    target = torch.zeros(3, device="cuda")
    target.copy_(leaf)
    (target * 3).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.device.type == "cpu"
    assert leaf.grad.tolist() == [3.0, 3.0, 3.0]


def test_second_derivatives_travel_too() -> None:
    leaf = torch.full((1,), 2.0, requires_grad=True)
    (grad,) = torch.autograd.grad((leaf.cuda() ** 3).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), leaf)
    assert second.device.type == "cpu"
    assert second.item() == 12.0


def test_default_devices() -> None:
    with torch.device("cuda:1"):
        assert torch.ones(2).device.index == 1
        assert torch.tensor([1.0]).device.index == 1
        assert torch.nn.Linear(2, 2).weight.device.index == 1
        assert torch.ones(2, device="cpu").device.type == "cpu"
    torch.set_default_device("cuda")
    try:
        assert torch.ones(2).device == torch.device("cuda", 0)
        assert torch.get_default_device() == torch.device("cuda", 0)
    finally:
        torch.set_default_device(None)
    assert torch.ones(2).device.type == "cpu"


def test_save_and_load() -> None:
    file = io.BytesIO()
    torch.save({"a": torch.arange(3, device="cuda:1"), "b": torch.ones(2)}, file)
    for location, expected in (
        (None, "cuda:1"),
        ("cpu", "cpu"),
        ("cuda:0", "cuda:0"),
        (torch.device("cuda", 0), "cuda:0"),
    ):
        file.seek(0)
        loaded = torch.load(file, map_location=location)
        assert str(loaded["a"].device) == expected
        assert loaded["a"].tolist() == [0, 1, 2]
    file.seek(0)
    assert torch.load(file)["b"].device.type == "cpu"


def test_deep_copies_stay_on_their_device() -> None:
    module = torch.nn.Linear(2, 2).cuda(1)
    clone = copy.deepcopy(module)
    assert clone.weight.device.index == 1
    assert torch.equal(clone.weight, module.weight)
    assert clone.weight.data_ptr() != module.weight.data_ptr()


def test_storages() -> None:
    storage = torch.arange(4, dtype=torch.uint8, device="cuda").untyped_storage()
    assert storage.is_cuda
    assert storage.device == torch.device("cuda", 0)
    assert storage.tolist() == [0, 1, 2, 3]
    assert storage[2] == 2
    assert storage.cpu().device.type == "cpu"
    assert storage.cuda(1).device.index == 1
    assert storage.clone().device == storage.device
    assert storage.cpu().pin_memory().is_pinned()
    storage.copy_(torch.zeros(4, dtype=torch.uint8).untyped_storage())
    assert storage.tolist() == [0, 0, 0, 0]


def test_legacy_types() -> None:
    tensor = torch.cuda.FloatTensor(2, 3)
    assert tensor.shape == (2, 3)
    assert tensor.is_cuda
    assert isinstance(tensor, torch.cuda.FloatTensor)
    assert not isinstance(tensor.cpu(), torch.cuda.FloatTensor)
    assert torch.ones(2).type("torch.cuda.DoubleTensor").dtype == torch.float64
    assert torch.ones(2).type("torch.cuda.DoubleTensor").is_cuda


def test_sparse_device_tensors_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="dense strided"):
        torch.eye(3, device="cuda").to_sparse()
    with pytest.raises(NotImplementedError, match="sparse_coo_tensor"):
        torch.sparse_coo_tensor([[0], [0]], [1.0], device="cuda")
    assert torch.eye(3).to_sparse().is_sparse
    assert torch.sparse_coo_tensor([[0], [0]], [1.0], check_invariants=True).is_sparse


def test_what_the_host_would_do_by_itself_is_refused_as_on_a_gpu() -> None:
    tensor = torch.ones(3, device="cuda")
    for call in (lambda: tensor.apply_(lambda x: x), lambda: tensor.map_(tensor, lambda x, y: x)):
        with pytest.raises(TypeError, match="only implemented on CPU tensors"):
            call()
    assert torch.ones(2).apply_(lambda x: x + 1).tolist() == [2.0, 2.0]
    with pytest.raises(NotImplementedError, match="to_dlpack"):
        torch.utils.dlpack.to_dlpack(tensor)


def test_tensors_made_from_tensors() -> None:
    device = [torch.tensor(float(i), dtype=torch.float64, device="cuda") for i in range(2)]
    assert torch.tensor(device).dtype == torch.float64
    assert torch.tensor(device).device.type == "cpu"
    assert torch.tensor([device, device], device="cuda:1").tolist() == [[0.0, 1.0], [0.0, 1.0]]
    copied = torch.tensor(torch.ones(2, device="cuda:1"))
    assert copied.device.index == 1
    source = torch.ones(2, device="cuda")
    assert torch.as_tensor(source) is source
    assert torch.as_tensor(source, dtype=torch.float64).is_cuda
    assert torch.asarray(source, copy=True) is not source


def test_pickled_tensors_stay_on_their_device() -> None:
    tensor = torch.arange(3, device="cuda:1")
    clone = pickle.loads(pickle.dumps(tensor))
    assert clone.device.index == 1
    assert clone.tolist() == [0, 1, 2]
