"""Round trips within the stated bound, for every kind of row that could break it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from crosscurrent.kvcache.names import BufferKind
from crosscurrent.kvcache.quantize import (
    Plain,
    Quantizer,
    TorchQuantized,
    empty_packed,
    make_quantizer,
    packed_bytes,
    round_trip,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
QUANTIZED = [BufferKind.QUANTIZED8, BufferKind.QUANTIZED4]

both = pytest.mark.parametrize("kind", QUANTIZED, ids=lambda k: k.value)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def there_and_back(quantizer: Quantizer, x: Tensor) -> Tensor:
    """Through memory that holds garbage, so that every byte has to be written."""
    packed = empty_packed(quantizer, x.shape, x.dtype)
    scratch = quantizer.empty_scratch(x.shape, x.dtype, x.device)
    out = torch.full_like(x, math.nan)
    for part in (*packed, *([] if scratch is None else [scratch])):
        part.fill_(7)
    quantizer.quantize_(x, packed, scratch)
    if scratch is not None:
        scratch.fill_(math.nan)
    quantizer.dequantize_(packed, out, scratch)
    return out


def assert_within_bound(quantizer: Quantizer, x: Tensor) -> Tensor:
    got = there_and_back(quantizer, x)
    assert got.isfinite().all()
    # The difference in halves: that of two large numbers of opposite sign may not be finite.
    error = (got.double() / 2 - x.double() / 2).abs()
    assert (error <= quantizer.error_bound(x) / 2).all()
    return got


@st.composite
def rows(draw: st.DrawFn) -> tuple[tuple[int, ...], int, float, float]:
    """(shape, seed, offset, magnitude): from constant to spread over the whole range."""
    sizes = st.sampled_from([1, 2, 3, 5, 8, 80, 128, 130, 256])
    shape = (*draw(st.lists(st.integers(1, 3), max_size=3)), draw(sizes))
    offset = draw(st.sampled_from([0.0, 1.0, -3e4, 6e4]))
    return shape, draw(st.integers(0, 2**32 - 1)), offset, 10.0 ** draw(st.integers(-9, 4))


@both
@every_dtype
def test_random_rows_are_within_the_stated_bound(kind: BufferKind, dtype: torch.dtype) -> None:
    @settings(deadline=None, max_examples=60)
    @given(row=rows())
    def check(row: tuple[tuple[int, ...], int, float, float]) -> None:
        shape, seed, offset, magnitude = row
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        largest = torch.finfo(dtype).max
        x = (noise * magnitude + offset).clamp(-largest, largest).to(dtype)
        got = assert_within_bound(make_quantizer(kind), x)
        if dtype in (torch.float32, torch.float64):
            # Nothing comes back beyond the largest magnitude, where it might overflow.
            assert (got.abs().amax(-1) <= x.abs().amax(-1)).all()

    check()


@both
@every_dtype
def test_extreme_rows(kind: BufferKind, dtype: torch.dtype) -> None:
    finfo = torch.finfo(dtype)
    x = torch.tensor(
        [
            [finfo.max, -finfo.max, 0.0, 1.0],
            [finfo.max, finfo.max, finfo.max, 0.0],
            [-finfo.max, -finfo.max, -finfo.max, -finfo.max / 2],
            [finfo.tiny, -finfo.tiny, 0.0, finfo.tiny],
            [finfo.smallest_normal, finfo.max, 0.0, 0.0],
            [1.0, 1.0 + finfo.eps, 1.0, 1.0],
        ],
        dtype=torch.float64,
    ).to(dtype)
    assert_within_bound(make_quantizer(kind), x)


@both
@every_dtype
def test_constant_rows_and_zeros_are_exact(kind: BufferKind, dtype: torch.dtype) -> None:
    finfo = torch.finfo(dtype)
    # The least of which that is said: 2^7 / u times the smallest normal number of the arithmetic. All of
    # float16 is above it.
    least = {torch.float16: 1, torch.float64: 2**60}.get(dtype, 2**31)
    small = finfo.tiny * least
    values = [0.0, 1.0, -3.25, 1e4, finfo.max, -finfo.max, small, finfo.eps]
    x = torch.tensor(values, dtype=torch.float64).to(dtype).unsqueeze(-1).repeat(1, 7)
    assert torch.equal(there_and_back(make_quantizer(kind), x), x)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_rows_of_a_few_last_bits_next_to_the_largest_number(
    kind: BufferKind, dtype: torch.dtype, sign: int
) -> None:
    """Where one rounding in the wrong direction would make an infinity."""
    finfo = torch.finfo(dtype)
    for width in range(40):
        x = torch.full((width + 1,), sign * finfo.max, dtype=dtype)
        for i in range(width):
            x[i + 1 :] = torch.nextafter(x[i + 1 :], torch.zeros((), dtype=dtype))
        assert len(set(x.tolist())) == width + 1
        got = assert_within_bound(make_quantizer(kind), x)
        assert (got.abs() <= finfo.max).all()


@both
def test_subnormal_rows_are_within_the_bound(kind: BufferKind) -> None:
    smallest = torch.finfo(torch.float32).smallest_normal
    x = torch.tensor([[1.0, -1.0, 3.0, 0.0], [5.0, 5.0, 5.0, 5.0]]) * smallest / 2**20
    assert (x != 0).any()
    assert_within_bound(make_quantizer(kind), x)


@both
def test_rows_near_the_smallest_normal_number_are_within_the_bound(kind: BufferKind) -> None:
    """Where the scale is the least that there is, half a step can carry a value beyond its row's greatest,
    and there into numbers that are twice as far apart."""
    smallest = torch.finfo(torch.bfloat16).smallest_normal
    values = (torch.arange(-511, 512).double() * smallest / 128).to(torch.bfloat16).unique()
    for greatest in (*values[values > 0][::7].tolist(), 1.7907921750808286e-38):
        rows = torch.stack([values, torch.full_like(values, greatest)], -1)
        assert_within_bound(make_quantizer(kind), rows)


@pytest.mark.parametrize(("kind", "steps"), list(zip(QUANTIZED, [254, 14], strict=True)))
def test_the_bound_is_what_it_should_be(kind: BufferKind, steps: int) -> None:
    """Half a step of the row's range, and next to nothing else; and it is reached."""
    x = torch.linspace(-1, 1, 1000)  # one block: 1000 is no multiple of 128
    quantizer = make_quantizer(kind)
    half_step = 2 / steps / 2
    bound = quantizer.error_bound(x)
    # The arithmetic adds 8 * 2^-24 for values of 1; the smaller scale takes off less than that.
    assert half_step < bound.max() <= half_step + 8 * 2**-24
    worst = (there_and_back(quantizer, x) - x).abs().max().item()
    # 999 intervals over 254 or 14 steps, without a common factor: some value is at every multiple of
    # 1/999 of a step between two codes, so within 1/999 of the middle, which is 0.2 percent of half.
    assert 0.99 * half_step < worst <= bound.max().item()


@both
def test_an_outlier_only_hurts_its_own_block(kind: BufferKind) -> None:
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(0))
    calm = there_and_back(make_quantizer(kind), x)
    x[0, 3] = 1e6
    wild = there_and_back(make_quantizer(kind), x)
    assert torch.equal(calm[0, 128:], wild[0, 128:])
    assert not torch.equal(calm[0, :128], wild[0, :128])


@both
@every_dtype
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_its_row_visibly_and_no_other(
    kind: BufferKind, dtype: torch.dtype, bad: float
) -> None:
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    clean = there_and_back(make_quantizer(kind), x)
    x[1, 4] = bad
    got = there_and_back(make_quantizer(kind), x)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


@both
def test_opposite_infinities_are_nan(kind: BufferKind) -> None:
    x = torch.tensor([math.inf, -math.inf, 0.0])
    assert there_and_back(make_quantizer(kind), x).isnan().all()


def test_default_is_a_copy_that_keeps_everything() -> None:
    x = torch.tensor([1.0, math.nan, math.inf, -0.0])
    got = there_and_back(Plain(), x)
    assert torch.equal(got.nan_to_num(9), x.nan_to_num(9))
    assert torch.equal(Plain().error_bound(x), torch.zeros(4).double())


@pytest.mark.parametrize("kind", list(BufferKind), ids=lambda k: k.value)
def test_columns_and_chunks_give_the_same_bits(kind: BufferKind) -> None:
    """A row is quantized by itself, so a cut along the sequence changes nothing."""
    x = torch.randn(2, 2, 9, 80, generator=torch.Generator().manual_seed(0))
    whole = there_and_back(make_quantizer(kind), x)
    parts = [there_and_back(make_quantizer(kind), part) for part in x.split([4, 1, 4], 2)]
    assert torch.equal(whole, torch.cat(parts, 2))


@both
@pytest.mark.parametrize("size", [1, 5, 80, 128, 256])
def test_a_transposed_source_gives_the_same_bits(kind: BufferKind, size: int) -> None:
    x = torch.randn(2, 3, 4, size, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    assert torch.equal(
        there_and_back(make_quantizer(kind), x), there_and_back(make_quantizer(kind), x.contiguous())
    )


class TestPacking:
    @both
    @pytest.mark.parametrize("size", [1, 5, 128, 256])
    def test_shapes_are_known_beforehand(self, kind: BufferKind, size: int) -> None:
        quantizer = make_quantizer(kind)
        layout = quantizer.packed_shapes((2, 3, size), torch.bfloat16)
        packed = empty_packed(quantizer, (2, 3, size), torch.bfloat16)
        assert tuple((tuple(part.shape), part.dtype) for part in packed) == layout
        total = sum(part.numel() * part.itemsize for part in packed)
        assert packed_bytes(quantizer, (2, 3, size), torch.bfloat16) == total

    @pytest.mark.parametrize(("kind", "bits"), list(zip(QUANTIZED, [8, 4], strict=True)))
    def test_codes_take_their_bits_and_no_more(self, kind: BufferKind, bits: int) -> None:
        codes, ranges = make_quantizer(kind).packed_shapes((10, 128), torch.bfloat16)
        assert math.prod(codes[0]) * codes[1].itemsize * 8 == 10 * 128 * bits
        assert math.prod(ranges[0]) == 10 * 2

    def test_four_bits_put_two_values_in_a_byte(self) -> None:
        quantizer = TorchQuantized(4)
        x = torch.tensor([-7.0, -6.0, 0.0, 5.0, 7.0])
        packed = empty_packed(quantizer, x.shape, x.dtype)
        quantizer.quantize_(x, packed, quantizer.empty_scratch(x.shape, x.dtype, x.device))
        # Codes -7, -6, 0, 5, 7, shifted by 7. Value i has the low bits, value i + 3 the high ones,
        # and the missing sixth counts as 0.
        assert packed[0].flatten().tolist() == [0 + 16 * 12, 1 + 16 * 14, 7 + 16 * 7]

    @both
    def test_scratch_may_be_larger_than_needed(self, kind: BufferKind) -> None:
        quantizer, x = make_quantizer(kind), torch.randn(3, 5)
        packed = empty_packed(quantizer, x.shape, x.dtype)
        scratch = quantizer.empty_scratch((100,), x.dtype, x.device)
        out = torch.empty_like(x)
        quantizer.quantize_(x, packed, scratch)
        quantizer.dequantize_(packed, out, scratch)
        assert torch.equal(out, there_and_back(quantizer, x))

    @both
    def test_missing_or_small_scratch_is_refused(self, kind: BufferKind) -> None:
        quantizer, x = make_quantizer(kind), torch.randn(3, 5)
        packed = empty_packed(quantizer, x.shape, x.dtype)
        for scratch in (None, torch.empty(14), torch.empty(15, dtype=torch.float64)):
            with pytest.raises(ValueError, match=r"scratch of 15 elements of torch\.float32, got"):
                quantizer.quantize_(x, packed, scratch)

    def test_other_widths_are_refused(self) -> None:
        with pytest.raises(ValueError, match="4 or 8 bits, got 3"):
            TorchQuantized(3)


class TestRoundTrip:
    @both
    def test_the_gradient_passes_straight_through(self, kind: BufferKind) -> None:
        x = torch.randn(3, 8, requires_grad=True)
        y = round_trip(make_quantizer(kind), x)
        assert torch.equal(y, there_and_back(make_quantizer(kind), x.detach()))
        grad = torch.randn(3, 8)
        assert torch.equal(torch.autograd.grad(y, x, grad)[0], grad)

    def test_default_does_nothing(self) -> None:
        x = torch.randn(3, 8)
        assert round_trip(make_quantizer(BufferKind.DEFAULT), x) is x

    @both
    @every_dtype
    def test_it_is_stable(self, kind: BufferKind, dtype: torch.dtype) -> None:
        """A second trip stays within one more bound of the first: no drift from the values it gave."""
        x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
        once = round_trip(make_quantizer(kind), x)
        assert_within_bound(make_quantizer(kind), once)
