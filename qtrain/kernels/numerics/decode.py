"""8-bit codes to bf16, exactly, four at a time.

The GPU's own conversions are slow: an SM of a Hopper does 16 a clock, and they go by way of fp16. But a float of 8 bits
becomes one of bf16 by a shift: sign, exponent and mantissa lie as in bf16, except for the bias of the exponent, which a
product with a power of two corrects, of subnormal numbers too. An integer becomes the lowest byte of the fp32 number
2^23 + 128 + x. Codes come in words of four, so that no byte is unpacked by itself.
"""

from qtrain.kernels.compiler import tl, triton

_FROM_FLOAT = """{{ .reg .b32 lo, hi, s, t;
    prmt.b32 lo, $2, 0, 0x1404; prmt.b32 hi, $2, 0, 0x3424;
    and.b32 s, lo, 0x80008000; shr.b32 lo, lo, {shift}; lop3.b32 lo, lo, {mask}, s, 0xEA;
    and.b32 t, hi, 0x80008000; shr.b32 hi, hi, {shift}; lop3.b32 hi, hi, {mask}, t, 0xEA;
    mov.b32 s, {power}; mov.b32 t, 0x80008000;
    fma.rn.bf16x2 $0, lo, s, t; fma.rn.bf16x2 $1, hi, s, t; }}"""
"""A code in the upper byte of each half; exponent and mantissa moved down beside the sign; times a power of two."""
# Four bits of exponent and a bias of 7: 2^120 is 2^(127 - 7). Five bits and a bias of 15: 2^112.
FROM_E4M3 = tl.constexpr(_FROM_FLOAT.format(shift=4, mask="0x07F007F0", power="0x7B807B80"))
FROM_E5M2 = tl.constexpr(_FROM_FLOAT.format(shift=3, mask="0x0FE00FE0", power="0x77807780"))


@triton.jit
def decode_bf16(words, CODE: tl.constexpr):
    """int32 words of four codes [R, W] -> their values in bf16 [R, 4 * W]; NaN and Inf are no codes. Without PTX, as in
    the interpreter, in fp32."""
    R: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    if CODE.ptx:
        pairs = tl.reshape(tl.join(*_decode_words(words, CODE)), (R, 2 * W))  # each two bf16
        first, second = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True), (pairs >> 16).to(tl.int16)
        return tl.reshape(tl.join(first, second.to(tl.bfloat16, bitcast=True)), (R, 4 * W))
    else:
        halves = tl.reshape(tl.join(words, words >> 16), (R, 2 * W))
        codes = tl.reshape(tl.join(halves, halves >> 8), (R, 4 * W)).to(tl.int8)
        if CODE.fmt.name == "e4m3":
            codes = codes.to(tl.float8e4nv, bitcast=True)
        elif CODE.fmt.name == "e5m2":
            codes = codes.to(tl.float8e5, bitcast=True)
        return codes.to(tl.float32)


@triton.jit
def _decode_words(words, CODE: tl.constexpr):
    """Words of four codes -> words of two bf16: of the first two codes, and of the others."""
    if CODE.fmt.name == "int8":
        return tl.inline_asm_elementwise(
            """{ .reg .b32 u, b0, b1, b2, b3; .reg .f32 f0, f1, f2, f3;
                 xor.b32 u, $2, 0x80808080;
                 prmt.b32 b0, u, 0x4B000000, 0x7650; prmt.b32 b1, u, 0x4B000000, 0x7651;
                 prmt.b32 b2, u, 0x4B000000, 0x7652; prmt.b32 b3, u, 0x4B000000, 0x7653;
                 mov.b32 f0, b0; mov.b32 f1, b1; mov.b32 f2, b2; mov.b32 f3, b3;
                 sub.f32 f0, f0, 0f4B000080; sub.f32 f1, f1, 0f4B000080;
                 sub.f32 f2, f2, 0f4B000080; sub.f32 f3, f3, 0f4B000080;
                 cvt.rn.bf16x2.f32 $0, f1, f0; cvt.rn.bf16x2.f32 $1, f3, f2; }""",
            "=r,=r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        tl.static_assert(CODE.fmt.name == "e4m3" or CODE.fmt.name == "e5m2")
        FROM_FLOAT: tl.constexpr = FROM_E4M3 if CODE.fmt.name == "e4m3" else FROM_E5M2
        return tl.inline_asm_elementwise(
            FROM_FLOAT, "=r,=r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
