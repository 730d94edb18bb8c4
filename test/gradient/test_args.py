"""The flags of the gradient refuse what cannot work, by their names on the command line."""

from __future__ import annotations

import pytest

from crosscurrent.gradient.args import GradientArgs


def test_the_defaults_are_synchronous_and_exact() -> None:
    args = GradientArgs()
    assert not args.async_cpu_transfer
    assert args.layercp_qname == args.cachecp_qname == "default"


@pytest.mark.parametrize(
    ("layercp", "cachecp", "named"),
    [
        (False, True, ["grad.layercp_pin_memory"]),
        (True, False, ["grad.cachecp_pin_memory"]),
        (False, False, ["grad.layercp_pin_memory", "grad.cachecp_pin_memory"]),
    ],
)
def test_async_transfer_without_pinned_memory_is_refused(
    layercp: bool, cachecp: bool, named: list[str]
) -> None:
    with pytest.raises(ValueError, match=r"grad\.async_cpu_transfer needs pinned") as caught:
        GradientArgs(async_cpu_transfer=True, layercp_pin_memory=layercp, cachecp_pin_memory=cachecp)
    assert all(name in str(caught.value) for name in named)


@pytest.mark.no_gpu
def test_async_transfer_without_a_cuda_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"grad\.async_cpu_transfer needs a CUDA device"):
        GradientArgs(async_cpu_transfer=True, layercp_pin_memory=True, cachecp_pin_memory=True)


def test_pinned_memory_alone_needs_no_cuda_device() -> None:
    GradientArgs(layercp_pin_memory=True, cachecp_pin_memory=True)


@pytest.mark.parametrize("name", ["layers_per_cell", "chunk_size"])
def test_counts_start_at_one(name: str) -> None:
    with pytest.raises(ValueError, match=rf"grad\.{name} must be at least 1, got 0"):
        GradientArgs(**{name: 0})
    with pytest.raises(TypeError, match=rf"grad\.{name} must be a whole number of at least 1, got 2\.5"):
        GradientArgs(**{name: 2.5})
    assert getattr(GradientArgs(**{name: 1}), name) == 1


@pytest.mark.parametrize("multiplier", [0.0, -1.0, float("nan"), float("inf")])
def test_the_multiplier_is_above_zero(multiplier: float) -> None:
    with pytest.raises(ValueError, match=r"grad\.chunks_per_cell_multiplier must be a finite number above 0"):
        GradientArgs(chunks_per_cell_multiplier=multiplier)


@pytest.mark.parametrize("multiplier", ["2", True, None])
def test_the_multiplier_is_a_number(multiplier: object) -> None:
    with pytest.raises(TypeError, match="multiplier must be a finite number above 0, got"):
        GradientArgs(chunks_per_cell_multiplier=multiplier)


@pytest.mark.parametrize("name", ["layercp_pin_memory", "cachecp_pin_memory", "cuda_graphs", "nan_guard"])
def test_flags_are_true_or_false(name: str) -> None:
    with pytest.raises(TypeError, match=f"grad.{name} must be True or False, got 'false'"):
        GradientArgs(**{name: "false"})


@pytest.mark.parametrize("name", ["layercp_qname", "cachecp_qname"])
def test_unknown_quantizers_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=rf"grad\.{name} is 'int3'; choose one of default"):
        GradientArgs(**{name: "int3"})
    assert getattr(GradientArgs(**{name: "torch-quantized4"}), name) == "torch-quantized4"
