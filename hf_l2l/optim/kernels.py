"""Compiled updates: gradient to master, moments and 16-bit copy in one read and one write of each.

All kernels and what they are made of stand in this file, since numba's cache on disk is renewed when the file of a
kernel changes, and not when another one does. The kind of a tensor is told by the type of an empty array like it, so
that each combination is compiled by itself: float32 as it is; uint16 for bfloat16; int16 for float16; uint8 for the
blocks of 8 bits (see `eight_bits`); None for a tensor that there is not.

`update` works on a table with a row per parameter, of which a thread claims slice after slice, so that it holds no
lock of Python from the first to the last. A slice begins at a multiple of `SPAN` elements of its parameter.

    of each span of 2,048 elements     fp32 moments        bf16, 8 bits
    1  moments to fp32                 in place            to a buffer in the L1 cache
    2  step (Adam, SGD, LAMB)          gradient widened and multiplied by its factor; masters and moments written
    3  moments                                             rounded stochastically, written
    4  16-bit copy of the masters      rounded to nearest even, written

The steps have the order of operations of torch's fused kernels, and so their bits: all but the last
`n % width` elements of a parameter of n are computed by vectors, with other fused multiply-adds than those. numba
widens arithmetic of 32-bit integers to 64 bits, which halves the speed; each operation is therefore wrapped.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic, overload

U, S, F = np.uint32, np.int32, np.float32
"""32 bits without a sign, with a sign, and of a float."""

SPAN = 2048
"""Elements that are computed at once: their moments in fp32 fit the L1 cache."""
BLOCK = 256
"""Elements that share an exponent in 8 bits."""
LANES = 4096
"""Sums of squares that are added element by element, and in their order at the end of a slice."""

_INT16, _INT32, _INT64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_HALF, _FLOAT = ir.HalfType(), ir.FloatType()

_SIGNLESS, _INFINITY, _NAN16 = U(0x7FFFFFFF), U(0x7F800000), np.uint16(0x7FC0)


# ---- intrinsics


@intrinsic
def _bits_of(context, x):
    return types.uint32(types.float32), lambda c, builder, signature, args: builder.bitcast(args[0], _INT32)


@intrinsic
def _float_of(context, x):
    return types.float32(types.uint32), lambda c, builder, signature, args: builder.bitcast(args[0], _FLOAT)


@intrinsic
def _float_of_half(context, x):
    def made(c, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], _HALF), _FLOAT)

    return types.float32(types.int16), made


@intrinsic
def _half_of(context, x):
    def made(c, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], _HALF), _INT16)

    return types.int16(types.float32), made


@intrinsic
def _fma(context, x, y, z):
    """x * y + z, rounded once."""
    signature = types.float32(types.float32, types.float32, types.float32)
    return signature, lambda c, builder, signature, args: builder.fma(*args)


@intrinsic
def _claimed(context, counter):
    """The number (int64) at this address, which is one more from now on for all threads."""

    def made(c, builder, signature, args):
        place = builder.inttoptr(args[0], _INT64.as_pointer())
        return builder.atomic_rmw("add", place, ir.Constant(_INT64, 1), "monotonic")

    return types.int64(types.int64), made


@intrinsic
def _pointer(context, address, like):
    kind = types.CPointer(like.dtype)
    return kind(types.int64, like), lambda c, builder, signature, args: builder.inttoptr(
        args[0], c.get_value_type(kind)
    )


@intrinsic
def _stream(context, target, source):
    """Copy 32 bytes from one address to another one, a multiple of 32, past the caches."""

    def made(c, builder, signature, args):
        kind = ir.VectorType(ir.IntType(8), 32).as_pointer()
        target, source = (builder.inttoptr(address, kind) for address in args)
        loaded = builder.load(source)
        loaded.align = 4
        stored = builder.store(loaded, target)
        stored.align = 32
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_INT32, 1)]))
        return c.get_dummy_value()

    return types.void(types.int64, types.int64), made


# ---- one element


def _widened(x):
    """An element of a tensor, in fp32."""


@overload(_widened, inline="always")
def _widened_of(x):
    if x == types.float32:
        return lambda x: x
    if x == types.uint16:
        return lambda x: _float_of(U(U(x) << U(16)))
    return lambda x: _float_of_half(x)


@njit(inline="always")
def _bf16_of(x):
    """Rounded to nearest even."""
    u = _bits_of(x)
    rounded = U(U(u + U(0x7FFF)) + U(U(u >> U(16)) & U(1)))
    return np.uint16(rounded >> U(16)) if U(u & _SIGNLESS) <= _INFINITY else _NAN16


@njit(error_model="numpy")
def _drawn(table, begin, end, key, second_key):
    """32 random bits for each of the elements from number `begin` on of one parameter in one step, by the two keys of
    both; `rounded_state.random_place` tells how."""
    r = U(U(U(begin) >> U(16)) + key)
    r = U(U(r ^ U(r >> U(16))) * U(0x7FEB352D))
    r = U(U(U(r ^ U(r >> U(15))) ^ second_key) * U(0x846CA68B))
    first = U(U(U(r ^ U(r >> U(16))) + U(begin)) & U(0xFFFF))
    return table[first : first + end - begin]


@njit(inline="always")
def _stochastic_bf16(x, r):
    """One of the two neighbours of x, by 16 random bits: bfloat16 neighbours are 65536 apart in bits of fp32."""
    u = _bits_of(x)
    return np.uint16(U(u + r) >> U(16)) if U(u & _SIGNLESS) <= _INFINITY else _NAN16


# ---- moments in 8 bits


@njit(error_model="numpy")
def _read_signed(codes, base, out):
    for i in range(codes.size):
        code = U(codes[i])
        size = U(code & U(0x7F))
        u = U(U(size + base) << U(20))
        u = u if size != U(0) else U(0)
        out[i] = _float_of(U(u | U(U(code & U(0x80)) << U(24))))


@njit(error_model="numpy")
def _read_unsigned(codes, base, out):
    for i in range(codes.size):
        code = U(codes[i])
        u = U(U(code + base) << U(20))
        out[i] = _float_of(u if code != U(0) else U(0))


@njit(error_model="numpy")
def _largest(x):
    """The bits of the largest absolute value; more than those of infinity for NaN."""
    found = U(0)
    for i in range(x.size):
        found = max(found, U(_bits_of(x[i]) & _SIGNLESS))
    return found


@njit(inline="always")
def _exponent_for(largest, levels):
    """The exponent of the smallest of `levels` powers of two, with room for the largest value to be rounded up."""
    if largest > _INFINITY:
        return S(255)
    return max(S(min(S(U(largest + U(0xFFFFF)) >> U(23)), S(254)) - levels), S(1))


@njit(error_model="numpy")
def _write_signed(x, codes, base, drawn):
    for i in range(x.size):
        r = drawn[i]
        u = _bits_of(x[i])
        size = S(S(U(U(U(u & _SIGNLESS) + U(r & U(0xFFFFF))) >> U(20))) - base)
        size = S(min(max(size, S(0)), S(127)))
        codes[i] = np.uint8(U(U(size) | U(U(u >> U(24)) & U(0x80))))


@njit(error_model="numpy")
def _write_unsigned(x, codes, base, drawn):
    for i in range(x.size):
        r = drawn[i]
        u = U(_bits_of(x[i]) & _SIGNLESS)
        size = S(S(U(U(u + U(r >> U(12))) >> U(20))) - base)
        size = S(min(max(size, S(1)), S(255)))  # what is not 0 stays so
        codes[i] = np.uint8(U(size if u != U(0) else S(0)))


# ---- moments of a block: to fp32, and back


def _opened(moments, exponents, begin, end, room, is_signed):
    """The moments of a block in fp32: where they are, or in `room`."""


@overload(_opened)
def _opened_of(moments, exponents, begin, end, room, is_signed):
    if isinstance(moments, types.NoneType):
        return lambda moments, exponents, begin, end, room, is_signed: None
    if moments.dtype == types.float32:
        return lambda moments, exponents, begin, end, room, is_signed: moments[begin:end]
    if moments.dtype == types.uint8:

        def of_blocks(moments, exponents, begin, end, room, is_signed):
            for start in range(begin, end, BLOCK):
                stop = min(start + BLOCK, end)
                base, out = U(U(exponents[start // BLOCK]) << U(3)), room[start - begin : stop - begin]
                if is_signed:
                    _read_signed(moments[start:stop], base, out)
                else:
                    _read_unsigned(moments[start:stop], base, out)
            return room[: end - begin]

        return of_blocks

    def of_16_bits(moments, exponents, begin, end, room, is_signed):
        short, out = moments[begin:end], room[: end - begin]
        for i in range(short.size):
            out[i] = _widened(short[i])
        return out

    return of_16_bits


def _keep(x, moments, exponents, begin, end, drawn, is_signed):
    """Round the moments of a block, `x`, to where they are kept."""


@overload(_keep)
def _keep_of(x, moments, exponents, begin, end, drawn, is_signed):
    if isinstance(moments, types.NoneType) or moments.dtype == types.float32:
        return lambda x, moments, exponents, begin, end, drawn, is_signed: None
    if moments.dtype == types.uint8:

        def to_blocks(x, moments, exponents, begin, end, drawn, is_signed):
            for start in range(begin, end, BLOCK):
                stop = min(start + BLOCK, end)
                some, codes, bits = x[start - begin : stop - begin], moments[start:stop], drawn[start - begin :]
                largest = _largest(some)
                exponent = _exponent_for(largest, S(15) if is_signed else S(31))
                exponents[start // BLOCK] = np.uint8(exponent)
                if largest > _INFINITY:
                    codes[:] = np.uint8(1)  # read as NaN, all of them
                elif is_signed:
                    _write_signed(some, codes, S(exponent * S(8)), bits)
                else:
                    _write_unsigned(some, codes, S(exponent * S(8)), bits)

        return to_blocks

    def to_16_bits(x, moments, exponents, begin, end, drawn, is_signed):
        short = moments[begin:end]
        for i in range(short.size):
            r = drawn[i]
            short[i] = _stochastic_bf16(x[i], U(r & U(0xFFFF)) if is_signed else U(r >> U(16)))

    return to_16_bits


# ---- steps, on blocks: the last `n % width` elements of a parameter are those from `whole` on


@njit(error_model="numpy")
def _step_adam(p, g, m, v, whole, numbers):
    """Adam (`coupled` is the weight decay that is added to the gradient) and AdamW (`kept` is what decay leaves)."""
    (factor, coupled, kept, weight, beta2, weight2, eps, size, root) = numbers
    for i in range(whole):
        x, grad = p[i], F(_widened(g[i]) * factor)
        grad = _fma(x, coupled, grad) if coupled != F(0) else grad
        first = _fma(weight, F(grad - m[i]), m[i])
        second = _fma(F(weight2 * grad), grad, F(v[i] * beta2))
        p[i] = F(F(x * kept) - F(F(size * first) / F(F(np.sqrt(second) / root) + eps)))
        m[i], v[i] = first, second
    for i in range(whole, p.size):
        x, grad = p[i], F(_widened(g[i]) * factor)
        grad = _fma(x, coupled, grad) if coupled != F(0) else grad
        first = _fma(weight, F(grad - m[i]), m[i])
        second = _fma(v[i], beta2, F(F(weight2 * grad) * grad))
        p[i] = F(F(x * kept) - F(F(size * first) / F(F(np.sqrt(second) / root) + eps)))
        m[i], v[i] = first, second


@njit(error_model="numpy")
def _step_sgd(p, g, whole, numbers):
    """SGD without momentum."""
    factor, decay, minus_lr = numbers[0], numbers[1], numbers[2]
    for i in range(p.size):
        x, grad = p[i], F(_widened(g[i]) * factor)
        grad = _fma(x, decay, grad) if decay != F(0) else grad
        p[i] = _fma(grad, minus_lr, x)


@njit(error_model="numpy")
def _step_momentum(p, g, m, whole, numbers):
    """SGD with momentum; `is_first` takes the gradient for it, and `looks_ahead` is that of Nesterov."""
    (factor, decay, minus_lr, momentum, weight, is_first, looks_ahead, _, _) = numbers
    for i in range(whole):
        x, grad = p[i], F(_widened(g[i]) * factor)
        grad = _fma(x, decay, grad) if decay != F(0) else grad
        new = grad if is_first != F(0) else _fma(grad, weight, F(m[i] * momentum))
        m[i] = new
        p[i] = _fma(_fma(new, momentum, grad) if looks_ahead != F(0) else new, minus_lr, x)
    for i in range(whole, p.size):
        x, grad = p[i], F(_widened(g[i]) * factor)
        grad = _fma(x, decay, grad) if decay != F(0) else grad
        new = grad if is_first != F(0) else _fma(m[i], momentum, F(grad * weight))
        m[i] = new
        p[i] = _fma(_fma(new, momentum, grad) if looks_ahead != F(0) else new, minus_lr, x)


@njit(inline="always")
def _of_lamb(x, grad, m, v, numbers):
    """The moments of LAMB, and what an element is moved by before that is scaled, with the operations of `Lamb`, each
    rounded by itself."""
    (factor, decay, correction, weight, beta2, weight2, eps, _, root) = numbers
    grad = F(grad * factor)
    first = F(m + F(weight * F(grad - m)))
    second = F(F(v * beta2) + F(F(weight2 * grad) * grad))
    direction = F(first / F(F(F(np.sqrt(second) / root) + eps) * correction))
    return first, second, F(direction + F(decay * x)) if decay != F(0) else direction


@njit(error_model="numpy")
def _add_squares(p, g, m, v, numbers, of_weights, of_directions):
    for i in range(p.size):
        _, _, direction = _of_lamb(p[i], _widened(g[i]), m[i], v[i], numbers)
        of_weights[i] += np.float64(p[i]) * np.float64(p[i])
        of_directions[i] += np.float64(direction) * np.float64(direction)


@njit(error_model="numpy")
def _step_lamb(p, g, m, v, numbers):
    size = numbers[7]
    for i in range(p.size):
        first, second, direction = _of_lamb(p[i], _widened(g[i]), m[i], v[i], numbers)
        p[i] = F(p[i] - F(size * direction))
        m[i], v[i] = first, second


def _step(p, g, m, v, whole, numbers, sums, lanes, lane):
    """One step of a block. SGD has no second moments, and maybe no momentum; LAMB has sums."""


@overload(_step)
def _step_of(p, g, m, v, whole, numbers, sums, lanes, lane):
    if isinstance(m, types.NoneType):
        return lambda p, g, m, v, whole, numbers, sums, lanes, lane: _step_sgd(p, g, whole, numbers)
    if isinstance(v, types.NoneType):
        return lambda p, g, m, v, whole, numbers, sums, lanes, lane: _step_momentum(p, g, m, whole, numbers)
    if isinstance(sums, types.NoneType):
        return lambda p, g, m, v, whole, numbers, sums, lanes, lane: _step_adam(p, g, m, v, whole, numbers)
    if sums.ndim == 1:
        return lambda p, g, m, v, whole, numbers, sums, lanes, lane: _step_lamb(p, g, m, v, numbers)
    return lambda p, g, m, v, whole, numbers, sums, lanes, lane: _add_squares(
        p, g, m, v, numbers, lanes[0, lane:], lanes[1, lane:]
    )


def _keep_both(x, y, m, v, e, f, begin, end, key, second_key, table, sums):
    """`_keep` the moments x and y of a block, if this pass changes them: the first one of LAMB does not."""


@overload(_keep_both)
def _keep_both_of(x, y, m, v, e, f, begin, end, key, second_key, table, sums):
    only_sums = not isinstance(sums, types.NoneType) and sums.ndim == 2
    if isinstance(m, types.NoneType) or only_sums or m.dtype == types.float32:
        return lambda x, y, m, v, e, f, begin, end, key, second_key, table, sums: None

    def rounded(x, y, m, v, e, f, begin, end, key, second_key, table, sums):
        some = _drawn(table, begin, end, key, second_key)
        _keep(x, m, e, begin, end, some, True)
        _keep(y, v, f, begin, end, some, False)

    return rounded


def _lanes(sums):
    """Zeros for the sums of a slice, if there are any."""


@overload(_lanes)
def _lanes_of(sums):
    if isinstance(sums, types.NoneType) or sums.ndim == 1:
        return lambda sums: None
    return lambda sums: np.zeros((2, LANES))


def _end_sums(lanes, sums, number):
    """Add up the lanes of a slice."""


@overload(_end_sums)
def _end_sums_of(lanes, sums, number):
    if isinstance(lanes, types.NoneType):
        return lambda lanes, sums, number: None

    def added(lanes, sums, number):
        for kind in range(2):
            total = 0.0
            for lane in range(LANES):
                total += lanes[kind, lane]
            sums[number, kind] = total

    return added


def _copy(p, copy, room):
    """Round masters to their copies in 16 bits, past the caches: nobody reads them soon."""


@overload(_copy)
def _copy_of(p, copy, room):
    if isinstance(copy, types.NoneType):
        return lambda p, copy, room: None
    is_bf16 = copy.dtype == types.uint16

    def rounded(p, copy, room):
        target, source = copy.ctypes.data, room.ctypes.data
        whole = p.size - p.size % 16 if target % 32 == 0 else 0
        for i in range(p.size):
            if is_bf16:
                room[i] = _bf16_of(p[i])
            else:
                room[i] = _half_of(p[i])
        for i in range(0, whole, 16):
            _stream(target + 2 * i, source + 2 * i)
        for i in range(whole, p.size):
            copy[i] = room[i]

    return rounded


def _part(array, begin, end):
    """`array[begin:end]`, or None."""


@overload(_part, inline="always")
def _part_of(array, begin, end):
    if isinstance(array, types.NoneType):
        return lambda array, begin, end: None
    return lambda array, begin, end: array[begin:end]


def _at(address, size, like):
    """The memory at this address as an array of `size` elements like those of `like`, or None."""


@overload(_at, inline="always")
def _at_of(address, size, like):
    if isinstance(like, types.NoneType):
        return lambda address, size, like: None
    return lambda address, size, like: carray(_pointer(address, like), (size,))


def _halves(like):
    """Memory for the copies of a span, if there are copies."""


@overload(_halves)
def _halves_of(like):
    if isinstance(like, types.NoneType):
        return lambda like: None
    return lambda like: np.empty(SPAN, like.dtype)


# ---- kernels


@njit(nogil=True, error_model="numpy", cache=True)
def update(
    counter,
    slices,
    tensors,
    numbers,
    table,
    width,
    master,
    gradient,
    first,
    second,
    first_exponents,
    second_exponents,
    copy,
    sums,
):
    """Update what the slices say that no thread has claimed yet.

    Args:
        counter: int64, one element: the number of the next slice; 0 at first.
        slices: int64, a row per slice: number of a row of the tables below, first element, and last one plus 1.
        tensors: int64, a row per parameter: number of elements; the addresses of master, gradient, moments, exponents
            of both, copy, and number of steps (float32, 0 if none is kept); the number that the last one gets; and the
            two keys of its random bits.
        numbers: float64, a row per parameter: the numbers of the step.
        table: uint32, random bits; None for moments in fp32.
        width: elements of a vector of torch's kernels.
        master, gradient, first, second, first_exponents, second_exponents, copy: empty arrays with the dtypes of these
            tensors, None for those that there are not.
        sums: None, but for LAMB. Its first pass changes nothing: float64, a row per slice, which gets the sums of the
            squares of the weights, and of what they are moved by. Its second one has any with one dimension.
    """
    a, b = np.empty(SPAN, np.float32), np.empty(SPAN, np.float32)
    halves = _halves(copy)
    while True:
        number = _claimed(counter.ctypes.data)
        if number >= slices.shape[0]:
            return
        row = slices[number, 0]
        size, x = tensors[row, 0], numbers[row]
        p, g = _at(tensors[row, 1], size, master), _at(tensors[row, 2], size, gradient)
        m, v = _at(tensors[row, 3], size, first), _at(tensors[row, 4], size, second)
        e, f = _at(tensors[row, 5], size, first_exponents), _at(tensors[row, 6], size, second_exponents)
        c = _at(tensors[row, 7], size, copy)
        if slices[number, 1] == 0 and tensors[row, 8] != 0:
            _at(tensors[row, 8], 1, master)[0] = F(tensors[row, 9])
        key, second_key = U(tensors[row, 10]), U(tensors[row, 11])
        of_step = (F(x[0]), F(x[1]), F(x[2]), F(x[3]), F(x[4]), F(x[5]), F(x[6]), F(x[7]), F(x[8]))
        whole, lanes = size - size % width, _lanes(sums)
        for begin in range(slices[number, 1], slices[number, 2], SPAN):
            end = min(begin + SPAN, slices[number, 2])
            block = p[begin:end]
            opened, other = _opened(m, e, begin, end, a, True), _opened(v, f, begin, end, b, False)
            until = min(end, whole) - begin
            _step(block, _part(g, begin, end), opened, other, until, of_step, sums, lanes, begin % LANES)
            _keep_both(opened, other, m, v, e, f, begin, end, key, second_key, table, sums)
            _copy(block, _part(c, begin, end), halves)
        _end_sums(lanes, sums, number)
