"""Number codecs: printed scale tables, rounding ties, every code, and rows that round-trip."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cedar.formats import codec
from cedar.formats.rows import RowFormat, RowKind
from cedar.kernels.operators import Operators

E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def scale_of(kind: str, amax: float) -> float:
    """Scale of a group whose largest magnitude is `amax`."""
    group = torch.zeros(32)
    group[7] = -amax
    if kind == "main":
        return float(codec.e4m3_decode(codec.quantise_main(group).scales)[0])
    quantise = codec.quantise_act if kind == "act" else codec.quantise_index
    return float(codec.e8m0_decode(quantise(group).scales)[0])


# Appendix A.3 of the architecture's specification, and one step around each power of two.
SCALES = [
    ("act", 0.0, -22), ("act", 1e-4, -22), ("act", 447.0, 0), ("act", 448.0, 0), ("act", 449.0, 1),
    ("act", 1.0, -8), ("act", 3.5, -7), ("act", 7.0, -6), ("act", 0.5, -9),
    ("index", 6.0, 0), ("index", 6.0001, 1), ("index", 3.0, -1), ("index", 1.0, -2),
    ("index", 0.75, -3), ("index", 0.0, -126),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "amax", "exponent"), SCALES)
def test_printed_power_of_two_scales(kind: str, amax: float, exponent: int) -> None:
    assert scale_of(kind, amax) == 2.0**exponent


@pytest.mark.parametrize("k", range(-20, 20))
def test_scales_are_exact_at_every_power_of_two(k: int) -> None:
    """The largest value that fits gets the smaller scale, the next float the larger one."""
    for kind, limit in (("act", 448.0), ("index", 6.0)):
        if kind == "act" and limit * 2.0**k < 1e-4:
            continue
        top = torch.tensor(limit * 2.0**k)
        assert scale_of(kind, float(top)) == 2.0**k
        above = torch.nextafter(top, torch.tensor(torch.inf))
        # One step of a 24-bit number may vanish in the product with 1/limit; two steps do not.
        above = torch.nextafter(above, torch.tensor(torch.inf))
        assert scale_of(kind, float(above)) == 2.0 ** (k + 1)


def test_main_scales_round_to_nearest_and_saturate() -> None:
    assert scale_of("main", 0.0) == 2.0**-9
    assert scale_of("main", 6.0) == 1.0
    assert scale_of("main", 6.0 * 448) == 448.0
    assert scale_of("main", 1e6) == 448.0
    # 1.0625 lies between 1 and 1.125: to nearest even, so down; rounding up would give 1.125.
    assert scale_of("main", 6 * 1.0625) == 1.0
    assert scale_of("main", 6 * 1.07) == 1.125
    assert codec.quantise_main(torch.zeros(16)).codes.eq(0).all()


def test_values_above_a_scale_that_rounded_down_are_clamped() -> None:
    group = torch.zeros(16)
    group[0] = 6 * 1.0625
    assert codec.dequantise_main(codec.quantise_main(group))[0] == 6.0


def test_e2m1_codes_mean_the_sixteen_values() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    expected = torch.tensor([*E2M1, *(-v for v in E2M1)])
    values = codec.e2m1_decode(codes)
    assert torch.equal(values, expected)
    assert torch.equal(torch.signbit(values), codes >= 8)
    assert torch.equal(codec.e2m1_encode(values), codes)


def test_e2m1_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    expected = torch.tensor([0.0, 1, 1, 2, 2, 4, 4])
    assert torch.equal(codec.e2m1_decode(codec.e2m1_encode(ties)), expected)
    assert torch.equal(codec.e2m1_decode(codec.e2m1_encode(-ties)), -expected)
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    above = codec.e2m1_decode(codec.e2m1_encode(torch.nextafter(ties, up)))
    below = codec.e2m1_decode(codec.e2m1_encode(torch.nextafter(ties, down)))
    grid = torch.tensor(E2M1)
    assert torch.equal(below, grid[:7].float())
    assert torch.equal(above, grid[1:].float())


def test_e2m1_saturates_and_keeps_the_sign_of_zero() -> None:
    codes = codec.e2m1_encode(torch.tensor([7.0, 1e30, -torch.inf, -0.0, -0.1, 0.0]))
    assert codes.tolist() == [7, 7, 15, 8, 8, 0]


def test_e4m3_saturates_at_448_and_rounds_ties_to_even() -> None:
    x = torch.tensor([448.0, 449.0, 1e9, -500.0, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10])
    values = codec.e4m3_decode(codec.e4m3_encode(x))
    assert values.tolist() == [448, 448, 448, -448, 16, 20, 0, 2.0**-8]


def test_every_e8m0_byte_is_a_power_of_two() -> None:
    values = codec.e8m0_decode(torch.arange(256, dtype=torch.uint8))
    for byte in range(255):
        assert Fraction(float(values[byte])) == Fraction(2) ** (byte - 127)
    assert torch.isnan(values[255])


def exact_pairs(scales: Tensor, scale_value: list[Fraction]) -> list[tuple[int, int]]:
    """(code, scale byte) pairs whose decoded product is not the exact fraction."""
    codes = torch.arange(16, dtype=torch.uint8)
    wrong = []
    products = codec.e2m1_decode(codes).unsqueeze(1) * scales
    for code in range(16):
        for byte, factor in enumerate(scale_value):
            value = float(products[code, byte])
            exact = Fraction(E2M1[code & 7]) * factor * (-1 if code & 8 else 1)
            if value != value or value in (float("inf"), float("-inf")) or Fraction(value) != exact:
                wrong.append((code, byte))
    return wrong


def test_every_fp4_code_times_every_legal_scale_byte_is_exact_but_for_overflow() -> None:
    """16 codes x 255 power-of-two scales against fractions: only products beyond float32 differ."""
    values = codec.e8m0_decode(torch.arange(255, dtype=torch.uint8))
    wrong = exact_pairs(values, [Fraction(2) ** (byte - 127) for byte in range(255)])
    overflow = [
        (code, byte) for code in range(16) for byte in range(255)
        if Fraction(E2M1[code & 7]) * Fraction(2) ** (byte - 127) >= 2**128
    ]  # fmt: skip
    assert wrong == overflow
    assert overflow
    assert {byte for _, byte in overflow} == {253, 254}


def test_every_fp4_code_times_every_e4m3_scale_is_exact_in_bfloat16() -> None:
    scales = codec.e4m3_decode(torch.arange(127, dtype=torch.uint8))
    assert exact_pairs(scales, [Fraction(float(s)) for s in scales]) == []
    products = codec.e2m1_decode(torch.arange(16, dtype=torch.uint8)).unsqueeze(1) * scales
    assert torch.equal(products, products.to(torch.bfloat16).float())


def test_the_even_element_is_in_the_low_nibble() -> None:
    packed = codec.pack_nibbles(torch.tensor([1, 2, 3, 4], dtype=torch.uint8))
    assert packed.tolist() == [0x21, 0x43]
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(codec.pack_nibbles(codec.unpack_nibbles(every)), every)


def test_fp8_weights_have_one_scale_per_32_by_32_tile() -> None:
    """Scales differ by tile; 128 x 128 blocks or a transposed grid would give other values."""
    codes = codec.e4m3_encode(torch.ones(64, 96))
    scale = torch.tensor([[127, 128, 129], [120, 121, 122]], dtype=torch.uint8)
    values = codec.decode_fp8_weight(codes, scale)
    for row in range(2):
        for column in range(3):
            tile = values[32 * row : 32 * row + 32, 32 * column : 32 * column + 32]
            assert (tile == 2.0 ** (int(scale[row, column]) - 127)).all()


def test_fp8_weights_of_odd_size_use_the_last_tile_partly() -> None:
    codes = codec.e4m3_encode(torch.ones(33, 40))
    scale = torch.tensor([[127, 128], [129, 130]], dtype=torch.uint8)
    values = codec.decode_fp8_weight(codes, scale)
    assert values[31, 31] == 1
    assert values[31, 39] == 2
    assert values[32, 0] == 4
    assert values[32, 39] == 8


def test_fp4_weights_have_one_scale_per_row_and_32_columns() -> None:
    packed = torch.full((2, 32), 0x52, dtype=torch.uint8)  # codes 2, 5: values 1 and 3
    scale = torch.tensor([[127, 128], [126, 129]], dtype=torch.uint8)
    values = codec.decode_fp4_weight(packed, scale)
    assert values[0, :4].tolist() == [1, 3, 1, 3]
    assert values[0, 32:34].tolist() == [2, 6]
    assert values[1, :2].tolist() == [0.5, 1.5]
    assert values[1, 32:34].tolist() == [4, 12]


@pytest.mark.parametrize("shape", [(32, 32), (40, 33), (1, 96)])
def test_encoded_fp8_weights_decode_close_to_what_they_were(shape: tuple[int, int]) -> None:
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    quantised = codec.encode_fp8_weight(weight)
    decoded = codec.decode_fp8_weight(quantised.codes, quantised.scales)
    assert (decoded - weight).abs().max() <= weight.abs().max() / 16


numbers = st.floats(-3e4, 3e4, width=32)
KINDS: tuple[RowKind, ...] = ("main", "index", "window")


@given(st.lists(numbers, min_size=32, max_size=32), st.sampled_from(KINDS), st.integers(-60, 12))
def test_stored_rows_hold_exactly_the_fake_quantised_values(
    values: list[float], kind: RowKind, shift: int
) -> None:
    """unpack(pack(x)) is what the reference keeps in bfloat16, bit for bit, at any magnitude."""
    fmt = RowFormat(kind, 32)
    x = (torch.tensor(values) * 2.0**shift).to(torch.bfloat16)
    stored = codec.encode_rows(x, fmt)
    assert stored.dtype == torch.uint8
    assert stored.shape == (fmt.row_bytes,)
    restored = codec.decode_rows(stored, fmt)
    fake = codec.fake_quantise(x, kind)
    assert torch.equal(restored.to(torch.bfloat16).view(torch.int16), fake.view(torch.int16))
    # Exact in bfloat16, and a second trip changes nothing the reader sees.
    assert torch.equal(restored, fake.float())
    assert torch.equal(codec.decode_rows(codec.encode_rows(fake, fmt), fmt), restored)


@given(st.lists(numbers, min_size=64, max_size=64), st.sampled_from(KINDS))
def test_groups_are_quantised_on_their_own(values: list[float], kind: RowKind) -> None:
    x = torch.tensor(values)
    whole = codec.decode_rows(codec.encode_rows(x, RowFormat(kind, 64)), RowFormat(kind, 64))
    fmt = RowFormat(kind, 32)
    halves = [codec.decode_rows(codec.encode_rows(half, fmt), fmt) for half in x.split(32)]
    assert torch.equal(whole, torch.cat(halves))


@given(st.lists(numbers, min_size=32, max_size=32), st.sampled_from(KINDS))
def test_quantisation_error_is_at_most_half_a_step(values: list[float], kind: RowKind) -> None:
    """A score over stored keys is within the quantisation step of the score over the keys
    themselves (regression class: gibberish with a quantised key cache)."""
    x = torch.tensor(values).clamp(-2000, 2000)  # inside the range of every format
    fmt = RowFormat(kind, 32)
    error = (codec.decode_rows(codec.encode_rows(x, fmt), fmt) - x).abs()
    # Relative to the group's largest value: FP4 steps are a quarter of a binade and more, and a
    # power-of-two scale may be almost twice too wide; FP8 steps are 1/16.
    share = {"main": 0.18, "index": 0.34, "window": 0.04}[kind]
    assert (error <= share * x.abs().max() + 2.0**-10).all()


@pytest.mark.parametrize("kind", KINDS)
def test_backends_store_and_load_the_same_bytes(ops: Operators, kind: RowKind) -> None:
    """Random rows at many magnitudes through every backend."""
    fmt = RowFormat(kind, 64)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(97, 64, generator=generator) * torch.logspace(-8, 4, 97).unsqueeze(1)
    for rows in (x, x.to(torch.bfloat16)):
        packed = ops.pack_rows(rows, fmt)
        assert torch.equal(packed, codec.encode_rows(rows, fmt))
        pool = torch.zeros(200, fmt.row_bytes, dtype=torch.uint8)
        where = torch.randperm(200, generator=generator)[:97]
        ops.store_rows(rows, pool, where, fmt)
        assert torch.equal(pool[where], packed)
        assert torch.equal(ops.load_rows(pool, where, fmt), codec.decode_rows(packed, fmt))
