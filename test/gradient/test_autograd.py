"""loss.backward() behaves as anywhere in PyTorch: scaling, accumulation, hooks, optimizers, frozen parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from crosscurrent.gradient import CheckpointsGoneError, LongContextGradientModel
from crosscurrent.model.config import LoRAConfig

Build = Callable[..., LongContextGradientModel]
Batch = Callable[..., tuple[Tensor, Tensor]]
Grads = Callable[[torch.nn.Module], dict[str, Tensor]]


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def one_step(
    model: LongContextGradientModel, ids: Tensor, targets: Tensor, grads: Grads
) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids, targets).backward()
    return grads(model)


def test_the_loss_is_an_ordinary_scalar(build: Build, batch: Batch) -> None:
    loss = build()(*batch(30))
    assert loss.shape == ()
    assert loss.dtype == torch.float64
    assert loss.grad_fn is not None


def test_a_power_of_two_scales_every_gradient_exactly(build: Build, batch: Batch, grads: Grads) -> None:
    """Scaling by a power of two commutes with every rounding, so that the bits must agree."""
    model = build()
    plain = one_step(model, *batch(30), grads)
    model.zero_grad()
    (model(*batch(30)) * 1024).backward()
    assert_equal(grads(model), {name: gradient * 1024 for name, gradient in plain.items()})


def test_gradients_accumulate_over_batches_of_different_lengths(
    build: Build, batch: Batch, grads: Grads
) -> None:
    model = build()
    lengths = (30, 5, 61, 8, 9)
    singles = [one_step(model, *batch(length), grads) for length in lengths]
    model.zero_grad()
    for length in lengths:
        model(*batch(length)).backward()
    expected = singles[0]
    for single in singles[1:]:
        expected = {name: expected[name] + gradient for name, gradient in single.items()}
    assert_equal(grads(model), expected)


def test_autograd_grad_gives_the_same_and_touches_nothing(build: Build, batch: Batch, grads: Grads) -> None:
    model = build()
    expected = one_step(model, *batch(30), grads)
    model.zero_grad()
    names = list(expected)
    found = torch.autograd.grad(model(*batch(30)), [model.get_parameter(name) for name in names])
    assert_equal(dict(zip(names, found, strict=True)), expected)
    assert not grads(model)


def test_a_hook_sees_the_whole_gradient_once(build: Build, batch: Batch, grads: Grads) -> None:
    model = build()
    expected = one_step(model, *batch(60), grads)
    model.zero_grad()
    seen: list[Tensor] = []
    parameter = model.gpt_model.layers[1].attention.q.weight
    parameter.register_hook(lambda gradient: seen.append(gradient.clone()))
    model(*batch(60)).backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], expected["gpt_model.layers.1.attention.q.weight"])


def test_several_optimizer_steps_lower_the_loss(build: Build, batch: Batch) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = model(*batch(40))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert sorted(losses, reverse=True) == losses


def test_evaluation_in_between_changes_nothing(build: Build, batch: Batch, grads: Grads) -> None:
    model = build(cache="h2o")
    expected = one_step(model, *batch(30), grads)
    model.zero_grad()
    loss = model(*batch(30))
    with torch.no_grad():
        other = model(*batch(70, seed=5))
        again = model(*batch(30))
    assert not other.requires_grad
    assert torch.equal(again, loss)
    loss.backward()
    assert_equal(grads(model), expected)


def test_inference_mode_gives_the_same_loss_and_spoils_nothing(
    build: Build, batch: Batch, grads: Grads
) -> None:
    model = build()
    with torch.inference_mode():
        inferred = model(*batch(30))
    loss = model(*batch(30))
    loss.backward()
    assert inferred.item() == loss.item()


def test_pinned_memory_means_nothing_for_a_model_in_cpu_memory(
    build: Build, batch: Batch, grads: Grads
) -> None:
    expected = one_step(build(), *batch(30), grads)
    model = build(grad={"layercp_pin_memory": True, "cachecp_pin_memory": True})
    assert_equal(one_step(model, *batch(30), grads), expected)


def test_an_overwritten_checkpoint_is_an_error_and_no_gradient(
    build: Build, batch: Batch, grads: Grads
) -> None:
    model = build()
    first, second = model(*batch(30)), model(*batch(30, seed=1))
    with pytest.raises(CheckpointsGoneError, match="call backward"):
        first.backward()
    assert not grads(model)
    second.backward()
    assert grads(model)


def test_a_step_between_the_passes_is_refused_by_autograd(build: Build, batch: Batch) -> None:
    model = build()
    loss = model(*batch(30))
    with torch.no_grad():
        model.head_model.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_backward_twice_works_with_a_retained_graph_and_fails_without(
    build: Build, batch: Batch, grads: Grads
) -> None:
    model = build()
    once = one_step(model, *batch(30), grads)
    model.zero_grad()
    loss = model(*batch(30))
    loss.backward(retain_graph=True)
    loss.backward()
    assert_equal(grads(model), {name: gradient * 2 for name, gradient in once.items()})
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_copies_are_independent(build: Build, batch: Batch, grads: Grads) -> None:
    model = build(cache="h2o")
    loss = model(*batch(30))
    twin = copy.deepcopy(model)
    twin(*batch(50, seed=3)).backward()
    loss.backward()
    assert_equal(grads(model), one_step(build(cache="h2o"), *batch(30), grads))


class _Products(TorchDispatchMode):
    """Collects the shapes that matrix products return."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.addmm,
            torch.ops.aten.embedding_dense_backward,
        ):
            self.shapes.append(tuple(result.shape))
        return result


@contextmanager
def matrix_products() -> Iterator[list[tuple[int, ...]]]:
    with _Products() as mode:
        yield mode.shapes


def is_weight_gradient(model: LongContextGradientModel, shape: tuple[int, ...]) -> bool:
    weights = {tuple(p.shape) for p in model.parameters() if p.dim() == 2}
    return shape in weights or shape[::-1] in weights


@pytest.mark.parametrize("cache", ["lastrec", "h2o"])
@pytest.mark.parametrize("num_frozen", [2, 3])
def test_evictions_of_layers_that_nothing_is_computed_for_are_logged_as_well(
    build: Build, batch: Batch, cache: str, num_frozen: int
) -> None:
    model = build(cache=cache)
    model(*batch(40))
    expected = model.replay_log()
    model.gpt_model.embedding.requires_grad_(False)
    for layer in model.gpt_model.layers[:num_frozen]:
        layer.requires_grad_(False)
    model(*batch(40)).backward()
    assert min(len(expected[layer]) for layer in range(3)) > 1
    assert model.replay_log().same_as(expected)


@pytest.mark.parametrize(
    "sizes", [{}, {"embed_size": 16}, {"num_groups": 4}, {"num_layers": 2}, {"num_layers": 5}]
)
def test_modules_put_in_the_place_of_others_are_the_model(
    build: Build, batch: Batch, grads: Grads, sizes: dict[str, int]
) -> None:
    model, other = build(), build(seed=1, **sizes)
    expected = one_step(other, *batch(30), grads)
    one_step(model, *batch(30), grads)
    model.gpt_model, model.head_model = other.gpt_model, other.head_model
    assert_equal(one_step(model, *batch(30), grads), expected)
    shape = {"batch_size": 2, "sequence_length": 30}
    assert model.pinned_budget(**shape) == other.pinned_budget(**shape)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_of_the_gradient_is_refused(build: Build, batch: Batch, grads: Grads) -> None:
    model = build()
    loss = model(*batch(30))
    with pytest.raises(RuntimeError, match="got one with create_graph=True"):
        torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    with pytest.raises(RuntimeError, match="got one with create_graph=True"):
        model(*batch(30)).backward(create_graph=True)
    assert not grads(model)


def test_nothing_is_computed_for_frozen_parameters(build: Build, batch: Batch, grads: Grads) -> None:
    """Sizes are primes of their own, so that the shape of a product says what it is."""
    sizes = {"embed_size": 22, "num_heads": 2, "num_groups": 1, "head_size": 34, "mlp_size": 46}
    model = build(lora=LoRAConfig(rank=3), **sizes)
    loss = model(*batch(30))
    with matrix_products() as shapes:
        loss.backward()
    assert set(grads(model)) == {name for name, _ in model.named_parameters() if "lora_" in name}
    frozen = {tuple(p.shape) for p in model.parameters() if p.dim() == 2 and not p.requires_grad}
    assert not [shape for shape in shapes if shape in frozen or shape[::-1] in frozen]


def test_the_count_of_weight_gradients_can_fail(build: Build, batch: Batch) -> None:
    """The bad twin: without LoRA there are weight gradients, and the same test sees them."""
    sizes = {"embed_size": 22, "num_heads": 2, "num_groups": 1, "head_size": 34, "mlp_size": 46}
    model = build(**sizes)
    loss = model(*batch(30))
    with matrix_products() as shapes:
        loss.backward()
    weights = {tuple(p.shape) for p in model.parameters() if p.dim() == 2}
    assert [shape for shape in shapes if shape in weights or shape[::-1] in weights]


def train_only(model: LongContextGradientModel, part: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part in name)


@pytest.mark.parametrize(
    "part",
    [
        "head_model",
        "embedding",
        "layers.2.",
        "layers.1.mlp.down",
        "layers.0.attention.k",
        "layers.0.attention.o",
        "layers.1.attention.v",
    ],
)
@pytest.mark.parametrize("length", [6, 30])
def test_any_part_may_train_alone(build: Build, batch: Batch, grads: Grads, part: str, length: int) -> None:
    model = build(grad={"layers_per_cell": 2})
    every = one_step(model, *batch(length), grads)
    train_only(model, part)
    found = one_step(model, *batch(length), grads)
    assert_equal(found, {name: gradient for name, gradient in every.items() if part in name})


def test_a_tied_matrix_that_is_frozen_gets_no_gradient(build: Build, batch: Batch, grads: Grads) -> None:
    model = build(tie_embeddings=True)
    model.gpt_model.embedding.weight.requires_grad_(False)
    assert not any("embedding" in name for name in one_step(model, *batch(30), grads))


def test_with_nothing_that_trains_the_loss_has_no_graph(build: Build, batch: Batch) -> None:
    model = build().requires_grad_(False)
    assert not model(*batch(30)).requires_grad


def test_dropout_is_refused_while_it_trains(build: Build, batch: Batch) -> None:
    model = build(lora=LoRAConfig(rank=2, dropout=0.1))
    with pytest.raises(ValueError, match=r"lora\.dropout is 0\.1"):
        model(*batch(30))
    model.eval()
    model(*batch(30)).backward()


@pytest.mark.parametrize("cache", ["lastrec-torch-quantized8", "h2o-torch-quantized4"])
@pytest.mark.parametrize("name", ["torch-quantized8", "torch-quantized4"])
def test_quantized_checkpoints_give_close_gradients(
    build: Build, batch: Batch, grads: Grads, cache: str, name: str
) -> None:
    """Not exact, by construction: 8 bits keep two digits of each input, 4 bits one; here the whole gradient
    must point where the exact one points, with a cosine that allows for twice that error."""
    exact = one_step(build(cache=cache), *batch(40), grads)
    model = build(cache=cache, grad={"layercp_qname": name, "cachecp_qname": name})
    rough = one_step(model, *batch(40), grads)
    a, b = (torch.cat([gradient.flatten() for gradient in g.values()]) for g in (exact, rough))
    cosine = torch.dot(a, b) / (a.norm() * b.norm())
    assert cosine > (0.999 if name.endswith("8") else 0.9)
    assert not torch.equal(a, b)
