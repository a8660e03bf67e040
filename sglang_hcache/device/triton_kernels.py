"""The kernels of ``triton_rows.py``, norm, rotation and scatter in one pass over memory, and of ``triton_layers.py``.

Names in capitals are constants of a compiled kernel. Offsets have 64 bits: pools hold more than 2**31 values.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_NORM, HEAD_NORM, ROW_NORM = 0, 1, 2


@triton.jit
def nearest(x, dtype: tl.constexpr):
    """``x``, float32, rounded to ``dtype``, to nearest and ties to even; still float32.

    By hand for bfloat16: Triton's interpreter, which runs the tests, cuts off instead.
    """
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        cut = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        result = tl.where(x == x, cut, x)
    else:
        result = x.to(dtype).to(tl.float32)
    return result


@triton.jit
def product(x, y, ROUNDS: tl.constexpr, dtype: tl.constexpr):
    """Rounded to ``dtype``, or exact as far as float32 goes."""
    return nearest(x * y, dtype) if ROUNDS else x * y


@triton.jit
def move(source, target, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One row, as it is."""
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        tl.store(target + column, tl.load(source + column, mask=column < WIDTH), mask=column < WIDTH)


@triton.jit
def row_scale(source, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """What a norm over the whole row multiplies with."""
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(source + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, axis=0) / WIDTH + epsilon)


@triton.jit
def normed(x, scale, weights, mask, ROUNDS_FIRST: tl.constexpr, dtype: tl.constexpr):
    """The end of a norm. ``weights``: addresses."""
    weight = tl.load(weights, mask=mask, other=0.0).to(tl.float32)
    return nearest(product(x, scale, ROUNDS_FIRST, dtype) * weight, dtype)


@triton.jit
def finish_heads(
    source, target, weight, scale, epsilon, cosines, sines, first,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, PAIRS_HALVES: tl.constexpr,
    ROUNDS_PRODUCTS: tl.constexpr, NORM: tl.constexpr, ROUNDS_FIRST: tl.constexpr,
    AT_ONCE: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """AT_ONCE heads of a row. A head's values are pairs, which are rotated, and a rest, which is not."""
    dtype: tl.constexpr = target.dtype.element_ty
    HALF: tl.constexpr = ROTARY_DIM // 2
    head = (first + tl.arange(0, AT_ONCE))[:, None]
    pair, rest = tl.arange(0, PAIRS)[None, :], ROTARY_DIM + tl.arange(0, REST)[None, :]
    is_pair, is_rest = (head < HEADS) & (pair < HALF), (head < HEADS) & (rest < HEAD_DIM)
    low = pair if PAIRS_HALVES else 2 * pair
    high = pair + HALF if PAIRS_HALVES else 2 * pair + 1
    at = head * HEAD_DIM
    x = tl.load(source + at + low, mask=is_pair, other=0.0).to(tl.float32)
    y = tl.load(source + at + high, mask=is_pair, other=0.0).to(tl.float32)
    z = tl.load(source + at + rest, mask=is_rest, other=0.0).to(tl.float32)
    if NORM == 1:
        squares = tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1) + tl.sum(z * z, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + epsilon)[:, None]
    if NORM != 0:
        weights = weight + at * (NORM - 1)
        x = normed(x, scale, weights + low, is_pair, ROUNDS_FIRST, dtype)
        y = normed(y, scale, weights + high, is_pair, ROUNDS_FIRST, dtype)
        z = normed(z, scale, weights + rest, is_rest, ROUNDS_FIRST, dtype)
    if ROTARY_DIM > 0:
        turned_low = product(x, cosines, ROUNDS_PRODUCTS, dtype) - product(y, sines, ROUNDS_PRODUCTS, dtype)
        turned_high = product(y, cosines, ROUNDS_PRODUCTS, dtype) + product(x, sines, ROUNDS_PRODUCTS, dtype)
        tl.store(target + at + low, nearest(turned_low, dtype).to(dtype), mask=is_pair)
        tl.store(target + at + high, nearest(turned_high, dtype).to(dtype), mask=is_pair)
    if ROTARY_DIM < HEAD_DIM:
        tl.store(target + at + rest, z.to(dtype), mask=is_rest)


# Slots and positions begin anywhere in a longer row of them: one kernel for all of that, compiled before serving.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def finish_rows(
    key, value, table, positions, slots, weight, key_pool, value_pool,
    key_stride, value_stride, num_positions, epsilon,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, PAIRS_HALVES: tl.constexpr,
    ROUNDS_PRODUCTS: tl.constexpr, NORM: tl.constexpr, ROUNDS_FIRST: tl.constexpr,
    AT_ONCE: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: its program's number is its row. PAIRS, REST and BLOCK are powers of two, and masked.

    A position outside the table makes K not a number, rather than a wrong one.
    """
    WIDTH: tl.constexpr = HEADS * HEAD_DIM
    HALF: tl.constexpr = ROTARY_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    source, target = key + row * key_stride, key_pool + slot * WIDTH
    move(value + row * value_stride, value_pool + slot * WIDTH, WIDTH, BLOCK)
    if NORM == 0 and ROTARY_DIM == 0:
        move(source, target, WIDTH, BLOCK)
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        cosines, sines = tl.zeros((1, PAIRS), tl.float32), tl.zeros((1, PAIRS), tl.float32)
        if ROTARY_DIM > 0:
            position = tl.load(positions + row).to(tl.int64)
            is_known = (pair < HALF) & (position >= 0) & (position < num_positions)
            angles = table + position * ROTARY_DIM
            cosines = tl.load(angles + pair, mask=is_known, other=float("nan")).to(tl.float32)
            sines = tl.load(angles + HALF + pair, mask=is_known, other=float("nan")).to(tl.float32)
        scale = 1.0
        if NORM == 2:
            scale = row_scale(source, epsilon, WIDTH, BLOCK)
        for first in range(0, HEADS, AT_ONCE):
            finish_heads(
                source, target, weight, scale, epsilon, cosines, sines, first,
                HEADS, HEAD_DIM, ROTARY_DIM, PAIRS_HALVES, ROUNDS_PRODUCTS, NORM, ROUNDS_FIRST, AT_ONCE, PAIRS, REST,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["keys", "values", "slots"])
def gather_rows(keys, values, slots, out, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """K and V of one token in one layer, beside each other: the program's numbers are row and layer.

    ``keys`` and ``values``: addresses of each layer's pool, int64, multiples of 16 as all that torch makes.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    key = tl.multiple_of(tl.load(keys + layer).to(tl.pointer_type(dtype)), 16)
    value = tl.multiple_of(tl.load(values + layer).to(tl.pointer_type(dtype)), 16)
    target = out + (layer * num_rows + row) * (2 * WIDTH)
    move(key + slot * WIDTH, target, WIDTH, BLOCK)
    move(value + slot * WIDTH, target + WIDTH, WIDTH, BLOCK)


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["keys", "values", "slots"])
def scatter_rows(rows, keys, values, slots, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """What ``gather_rows`` reads, back to where it was: the layers from ``first`` on, of as many rows as there are
    programs.
    """
    dtype: tl.constexpr = rows.dtype.element_ty
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    key = tl.multiple_of(tl.load(keys + first + layer).to(tl.pointer_type(dtype)), 16)
    value = tl.multiple_of(tl.load(values + first + layer).to(tl.pointer_type(dtype)), 16)
    source = rows + (layer * tl.num_programs(0) + row) * (2 * WIDTH)
    move(source, key + slot * WIDTH, WIDTH, BLOCK)
    move(source + WIDTH, value + slot * WIDTH, WIDTH, BLOCK)
