"""Encode and decode between tensors and packed bytes: slow, obvious, exact. Plain torch.

The reference operators, the checkpoint reader and the tests use it; native kernels must give the
same bits. Three schemes, all part of the model's semantics (specification section 5):

    act     E4M3 values, one power-of-two (E8M0) scale per 32: window rows and projection inputs
    index   E2M1 values, one power-of-two (E8M0) scale per 32: index keys and index queries
    main    E2M1 values, one E4M3 scale per 16: compressed rows

Every function accepts bfloat16 or float32 and computes in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cedar.formats.rows import RowFormat, RowKind

E4M3_MAX = 448.0
E2M1_MAX = 6.0
#: Smallest amax that enters a scale: specification 5.2, 5.4, 5.5.
ACT_AMAX_FLOOR = 1e-4
INDEX_AMAX_FLOOR = 6 * 2.0**-126
MAIN_AMAX_FLOOR = 6 * 2.0**-9

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Midpoints between neighbouring E2M1 magnitudes; an exact tie goes to the even code.
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_TIE_ROUNDS_UP = (False, True, False, True, False, True, False)


class Quantised(NamedTuple):
    """Codes and scales of one quantised tensor.

    Attributes:
        codes: uint8; E4M3 bytes `[..., D]`, or packed E2M1 pairs `[..., D/2]`.
        scales: uint8; E8M0 or E4M3 bytes `[..., D/group]`.
    """

    codes: Tensor
    scales: Tensor


def e4m3_encode(x: Tensor) -> Tensor:
    """Round float32 to E4M3 (fn) bytes: nearest, ties to even, saturating at +-448."""
    clamped = x.float().clamp(-E4M3_MAX, E4M3_MAX)
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8)


def e4m3_decode(codes: Tensor) -> Tensor:
    """E4M3 bytes to float32, exact."""
    return codes.view(torch.float8_e4m3fn).float()


def e8m0_decode(codes: Tensor) -> Tensor:
    """E8M0 bytes to float32: byte b means 2^(b - 127), 255 is NaN; exact, subnormal 2^-127 included."""
    bits = codes.to(torch.int32) << 23
    value = torch.where(codes == 0, torch.full_like(bits, 1 << 22), bits).view(torch.float32)
    return torch.where(codes == 255, torch.full_like(value, float("nan")), value)


def e2m1_encode(x: Tensor) -> Tensor:
    """Round float32 to 4-bit E2M1 codes (uint8 0..15): ties to the even code, saturating at +-6.

    The sign bit (8) is kept for zero and for values that round to zero.
    """
    magnitude = x.abs()
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for midpoint, tie_up in zip(_E2M1_MIDPOINTS, _TIE_ROUNDS_UP, strict=True):
        above = magnitude >= midpoint if tie_up else magnitude > midpoint
        code += above.to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_decode(codes: Tensor) -> Tensor:
    """4-bit E2M1 codes to float32, exact; the sign of zero is kept."""
    table = torch.tensor(_E2M1_VALUES + tuple(-v for v in _E2M1_VALUES), dtype=torch.float32)
    return table.to(codes.device)[codes.long()]


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack `[..., D]` 4-bit codes to `[..., D/2]` bytes, even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of `pack_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pow2_ceil_exponent(x: Tensor) -> Tensor:
    """Exponent e of the smallest 2^e >= x, for float32 x > 0, decided on the bits."""
    bits = x.float().view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    return exponent - 127 + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def _groups(x: Tensor, size: int) -> Tensor:
    return x.float().unflatten(-1, (-1, size))


def _pow2_scale(amax: Tensor, reciprocal: float) -> Tensor:
    """E8M0 byte of pow2ceil(fp32(amax * fp32(1/limit))); never below 2^-126."""
    ratio = amax * torch.tensor(reciprocal, dtype=torch.float32)
    return (pow2_ceil_exponent(ratio) + 127).clamp(min=1).to(torch.uint8)


def quantise_act(x: Tensor) -> Quantised:
    """E4M3 with one power-of-two scale per 32 values (specification 5.2).

    Args:
        x: `[..., D]`, D a multiple of 32.
    """
    groups = _groups(x, 32)
    amax = groups.abs().amax(-1).clamp(min=ACT_AMAX_FLOOR)
    scales = _pow2_scale(amax, 1 / E4M3_MAX)
    codes = e4m3_encode(groups / e8m0_decode(scales).unsqueeze(-1))
    return Quantised(codes.flatten(-2), scales)


def dequantise_act(q: Quantised) -> Tensor:
    """Inverse of `quantise_act`, float32."""
    values = _groups(e4m3_decode(q.codes), 32) * e8m0_decode(q.scales).unsqueeze(-1)
    return values.flatten(-2)


def quantise_index(x: Tensor) -> Quantised:
    """E2M1 with one power-of-two scale per 32 values (specification 5.4)."""
    groups = _groups(x, 32)
    amax = groups.abs().amax(-1).clamp(min=INDEX_AMAX_FLOOR)
    scales = _pow2_scale(amax, 1 / E2M1_MAX)
    scaled = groups / e8m0_decode(scales).unsqueeze(-1)
    return Quantised(
        pack_nibbles(e2m1_encode(scaled.clamp(-E2M1_MAX, E2M1_MAX)).flatten(-2)), scales
    )


def quantise_main(x: Tensor) -> Quantised:
    """E2M1 with one E4M3 scale per 16 values (specification 5.5), the scale rounded to nearest."""
    groups = _groups(x, 16)
    amax = groups.abs().amax(-1).clamp(min=MAIN_AMAX_FLOOR)
    scales = e4m3_encode(amax / E2M1_MAX)
    scaled = groups / e4m3_decode(scales).unsqueeze(-1)
    return Quantised(
        pack_nibbles(e2m1_encode(scaled.clamp(-E2M1_MAX, E2M1_MAX)).flatten(-2)), scales
    )


def dequantise_index(q: Quantised) -> Tensor:
    """Inverse of `quantise_index`, float32."""
    values = _groups(e2m1_decode(unpack_nibbles(q.codes)), 32)
    return (values * e8m0_decode(q.scales).unsqueeze(-1)).flatten(-2)


def dequantise_main(q: Quantised) -> Tensor:
    """Inverse of `quantise_main`, float32."""
    values = _groups(e2m1_decode(unpack_nibbles(q.codes)), 16)
    return (values * e4m3_decode(q.scales).unsqueeze(-1)).flatten(-2)


_QUANTISE = {"window": quantise_act, "index": quantise_index, "main": quantise_main}
_DEQUANTISE = {"window": dequantise_act, "index": dequantise_index, "main": dequantise_main}


def encode_rows(x: Tensor, fmt: RowFormat) -> Tensor:
    """Quantise rows and lay them out as stored.

    Args:
        x: `[..., fmt.width]`, bfloat16 or float32.
    Returns: uint8 `[..., fmt.row_bytes]`, values then scales.
    """
    quantised = _QUANTISE[fmt.kind](x)
    return torch.cat((quantised.codes, quantised.scales), dim=-1)


def decode_rows(rows: Tensor, fmt: RowFormat) -> Tensor:
    """Stored rows to float32 values `[..., fmt.width]`; exact, also representable in bfloat16."""
    codes, scales = rows.split((fmt.value_bytes, fmt.scale_bytes), dim=-1)
    return _DEQUANTISE[fmt.kind](Quantised(codes.contiguous(), scales.contiguous()))


def fake_quantise(x: Tensor, kind: RowKind) -> Tensor:
    """Quantise and dequantise, back in x's dtype: what a reader of the stored row will see."""
    return _DEQUANTISE[kind](_QUANTISE[kind](x)).to(x.dtype)


def decode_fp8_weight(codes: Tensor, scale: Tensor) -> Tensor:
    """FP8 weight `[out, in]` with one E8M0 scale per 32x32 tile to float32 (specification 3.3)."""
    out, inp = codes.shape
    tiles = e8m0_decode(scale).repeat_interleave(32, 0)[:out].repeat_interleave(32, 1)[:, :inp]
    return e4m3_decode(codes) * tiles


def decode_fp4_weight(packed: Tensor, scale: Tensor) -> Tensor:
    """FP4 weight, packed `[out, in/2]` with one E8M0 scale per row and 32 columns, to float32."""
    values = _groups(e2m1_decode(unpack_nibbles(packed)), 32)
    return (values * e8m0_decode(scale).unsqueeze(-1)).flatten(-2)


def encode_fp8_weight(weight: Tensor) -> Quantised:
    """Quantise `[out, in]` to E4M3 with one power-of-two scale per 32x32 tile; pads odd edges."""
    out, inp = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -inp % 32, 0, -out % 32))
    tiles = padded.unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
    amax = tiles.abs().amax(dim=(1, 3)).clamp(min=ACT_AMAX_FLOOR)
    scales = _pow2_scale(amax, 1 / E4M3_MAX)
    codes = e4m3_encode(tiles / e8m0_decode(scales)[:, None, :, None])
    flat = codes.flatten(2, 3).flatten(0, 1)[:out, :inp].contiguous()
    return Quantised(flat, scales)


def encode_fp4_weight(weight: Tensor) -> Quantised:
    """Quantise `[out, in]` to packed E2M1 with one power-of-two scale per row and 32 columns."""
    return quantise_index(weight)
