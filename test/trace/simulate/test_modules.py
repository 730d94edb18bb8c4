"""Whole models on a simulated device: the same numbers as on the CPU, on the right device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

pytestmark = [pytest.mark.simulation, pytest.mark.usefixtures("two_devices")]


def _state(module: nn.Module) -> list[Tensor]:
    return [tensor.detach().cpu() for tensor in module.state_dict().values()]


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (
        nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)),
        torch.randn(3, 4),
    ),
    "convolution": lambda: (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.MaxPool2d(2)),
        torch.randn(2, 1, 6, 6),
    ),
    "attention": lambda: (
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        torch.randn(2, 3, 8),
    ),
    "embedding": lambda: (
        nn.Sequential(nn.Embedding(5, 4), nn.Flatten(1), nn.Linear(12, 1)),
        torch.tensor([[0, 1, 2], [3, 4, 0]]),
    ),
    "recurrent": lambda: (_First(nn.GRU(4, 4)), torch.randn(2, 3, 4)),
}


class _First(nn.Module):
    """The first result of a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
def test_training_gives_the_numbers_of_the_cpu(name: str) -> None:
    results = []
    for device in ("cpu", "cuda:1"):
        torch.manual_seed(0)
        module, batch = MODELS[name]()
        module.to(device)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, foreach=False)
        for _ in range(2):
            optimizer.zero_grad()
            module(batch.to(device)).square().mean().backward()
            optimizer.step()
        assert {str(p.device) for p in module.parameters()} == {device}
        assert {str(p.grad.device) for p in module.parameters() if p.grad is not None} == {device}
        results.append(_state(module))
    # The same kernels run in the same order: equal to the last bit.
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"capturable": True}])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_optimizers(optimizer: Any, options: dict[str, Any]) -> None:
    parameters = [nn.Parameter(torch.ones(3, device=f"cuda:{i % 2}")) for i in range(4)]
    steps = optimizer(parameters, lr=0.1, **options)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.5)
        steps.step()
    assert all(parameter.device.index == i % 2 for i, parameter in enumerate(parameters))
    assert all(torch.equal(parameter.cpu(), parameters[0].cpu()) for parameter in parameters)
    assert parameters[0][0].item() < 1.0
    assert all(state["exp_avg"].is_cuda for state in steps.state.values())


def test_foreach_is_the_default_on_a_device() -> None:
    from torch.optim.optimizer import _default_to_fused_or_foreach

    device = [nn.Parameter(torch.ones(3, device="cuda"))]
    host = [nn.Parameter(torch.ones(3))]
    assert _default_to_fused_or_foreach(device, False, False) == (False, True)
    assert _default_to_fused_or_foreach(host, False, False) == (False, False)


def test_norms_are_clipped_per_device() -> None:
    parameters = [nn.Parameter(torch.ones(4, device=f"cuda:{i}")) for i in range(2)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 3.0)
    norm = nn.utils.clip_grad_norm_(parameters, 1.0)
    # sqrt(8 * 9)
    assert norm.item() == pytest.approx(72**0.5)
    assert all(parameter.grad is not None and parameter.grad.is_cuda for parameter in parameters)


def test_modules_move() -> None:
    module = nn.Linear(2, 2)
    for move, expected in (
        (lambda: module.cuda(), "cuda:0"),
        (lambda: module.cuda(1), "cuda:1"),
        (lambda: module.to(0), "cuda:0"),
        (lambda: module.to("cpu"), "cpu"),
        (lambda: module.to("cuda:1", torch.float64), "cuda:1"),
        (lambda: module.to(torch.ones(1)), "cpu"),
        (lambda: module.to_empty(device="cuda"), "cuda:0"),
        (lambda: module.cpu(), "cpu"),
    ):
        move()  # type: ignore[no-untyped-call]
        assert str(module.weight.device) == expected
        assert module.weight.is_leaf


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_module_moves_to_where_nothing_is_stored(device: str) -> None:
    module = nn.Linear(2, 2, device=device).to("meta", torch.float64)
    assert (str(module.weight.device), module.weight.dtype) == ("meta", torch.float64)


@pytest.mark.parametrize("mask", [None, "causal", "explicit"])
def test_fused_attention(mask: str | None) -> None:
    query, key, value = (torch.randn(1, 2, 5, 4, device="cuda", requires_grad=True) for _ in range(3))
    explicit = torch.ones(5, 5, dtype=torch.bool, device="cuda").tril() if mask == "explicit" else None
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=explicit, is_causal=mask == "causal"
    )
    weights = query @ key.transpose(-1, -2) / 2
    if mask:
        weights = weights.masked_fill(
            ~torch.ones(5, 5, dtype=torch.bool, device="cuda").tril(), float("-inf")
        )
    # Rounding of sums of 5 terms of order 1 in float32, with a margin of 10.
    assert torch.allclose(out, weights.softmax(-1) @ value, atol=10 * 5 * 2**-23)
    out.sum().backward()
    assert query.grad is not None
    assert query.grad.is_cuda


def test_autocast_casts_on_the_device() -> None:
    module, batch = nn.Linear(2, 2).cuda(), torch.ones(1, 2, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert module(batch).dtype == torch.bfloat16
        with torch.autocast("cuda", enabled=False):
            assert module(batch).dtype == torch.float32
        assert module(batch).dtype == torch.bfloat16
    assert module(batch).dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cuda"):
        assert module(batch).dtype == torch.float16
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16


def test_scaled_gradients() -> None:
    module = nn.Linear(2, 1).cuda()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    before = module.weight.detach().clone()
    scaler.scale(module(torch.ones(1, 2, device="cuda")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    # The scale is a power of two: it goes in and comes out exactly.
    assert torch.equal(before - module.weight.detach(), before - (before - 0.1))


def test_data_loader_pins() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(4.0))
    batches = [batch for (batch,) in torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True)]
    assert [batch.tolist() for batch in batches] == [[0.0, 1.0], [2.0, 3.0]]
    assert all(batch.is_pinned() for batch in batches)


def test_one_hot_does_not_make_the_host_wait() -> None:
    index = torch.tensor([[0, 2]], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    encoded = functional.one_hot(index, 3)
    torch.cuda.set_sync_debug_mode("default")
    assert encoded.tolist() == [[[1, 0, 0], [0, 0, 1]]]
    assert encoded.is_cuda


@pytest.mark.parametrize("causal", [True, False])
def test_flash_attention_by_its_own_name(causal: bool) -> None:
    """The last 3 of 5 tokens, 4 heads in 2 groups, against softmax written out."""
    query, grad = (torch.randn(2, 3, 4, 8, device="cuda") for _ in range(2))
    key, value = (torch.randn(2, 5, 2, 8, device="cuda") for _ in range(2))
    out, lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, None, None, 3, 5, 0.0, causal, False
    )
    leaves = [t.detach().requires_grad_() for t in (query, key, value)]
    q, k, v = (t.transpose(1, 2) for t in leaves)
    scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    if causal:
        seen = torch.ones(3, 5, dtype=torch.bool, device="cuda").tril(2)
        scores = scores.masked_fill(~seen, float("-inf"))
    expected = (scores.softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2)
    # Sums of at most 8 terms of order 1, in float32; 16 roundings in a row at most.
    tolerance = {"atol": 16 * 8 * 2**-24, "rtol": 0.0}
    assert torch.allclose(out, expected, **tolerance)
    assert torch.allclose(lse, scores.logsumexp(-1), **tolerance)
    grads = torch.ops.aten._flash_attention_backward(
        grad, query, key, value, out, lse, None, None, 3, 5, 0.0, causal, rng, unused
    )
    expected.backward(grad)
    for got, leaf in zip(grads, leaves, strict=True):
        assert got.is_cuda
        assert leaf.grad is not None
        # Products of such sums: values of order 10.
        assert torch.allclose(got, leaf.grad, atol=10 * tolerance["atol"], rtol=0.0)


def test_flash_attention_says_what_it_lacks() -> None:
    tensor = torch.randn(1, 2, 1, 8, device="cuda")
    with pytest.raises(NotImplementedError, match="without dropout"):
        torch.ops.aten._flash_attention_forward(tensor, tensor, tensor, None, None, 2, 2, 0.5, True, False)


def test_packed_sequences() -> None:
    batch = torch.randn(2, 3, 4, device="cuda")
    packed = nn.utils.rnn.pack_padded_sequence(batch, torch.tensor([3, 1]), batch_first=True)
    assert packed.data.is_cuda
    assert not packed.batch_sizes.is_cuda
    padded, lengths = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
    assert padded.is_cuda
    assert lengths.tolist() == [3, 1]
    assert torch.equal(padded[0], batch[0])


def test_workers_of_a_data_loader() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(4.0))
    loader = torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True, num_workers=1)
    batches = [batch for (batch,) in loader]
    assert all(batch.is_pinned() for batch in batches)
    assert [batch.cuda().tolist() for batch in batches] == [[0.0, 1.0], [2.0, 3.0]]


def test_compiled_functions_run_as_they_are() -> None:
    doubled = torch.compile(lambda x: x * 2, fullgraph=True)

    @torch.compile
    def tripled(x: Tensor) -> Tensor:
        return x * 3

    tensor = torch.ones(2, device="cuda")
    assert doubled(tensor).tolist() == [2.0, 2.0]
    assert tripled(tensor).is_cuda


def _scripted(x: Tensor) -> Tensor:
    return torch.zeros(2) + torch.nn.functional.one_hot(torch.tensor([1]), 2) + x


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_scripts_know_the_replaced_functions() -> None:
    script = torch.jit.script(_scripted)
    assert script(torch.ones(2)).tolist() == [[1.0, 2.0]]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_mode_derivatives() -> None:
    point = torch.full((2,), 3.0, device="cuda")
    hessian = torch.func.hessian(lambda x: (x**3).sum())(point)
    assert hessian.is_cuda
    assert hessian.tolist() == [[18.0, 0.0], [0.0, 18.0]]


def test_attention_by_kernels_that_only_gpus_have() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query = torch.randn(1, 2, 5, 8, device="cuda")
    outs = []
    for backend in (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            outs.append(functional.scaled_dot_product_attention(query, query, query))
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    query = torch.randn(1, 1, 16, 16, device="cuda", requires_grad=True)
    out = flex_attention(query, query, query)
    assert out.is_cuda
    out.sum().backward()
    assert query.grad is not None
    assert query.grad.is_cuda
    plain = functional.scaled_dot_product_attention(query, query, query)
    # Sums of 16 terms of order 1, in float32, in another order.
    assert torch.allclose(out, plain, atol=16 * 16 * 2**-24)


def test_an_op_with_a_kernel_of_its_own_is_not_taken_apart() -> None:
    """`silu_backward` is also written in terms of others, which round differently."""
    grad, x = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    expected = torch.ops.aten.silu_backward(grad, x)
    assert torch.equal(torch.ops.aten.silu_backward(grad.cuda(), x.cuda()).cpu(), expected)
