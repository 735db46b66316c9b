"""Compiled single passes over (behaviours, steps): prefix mixtures, column sums, influence values.

Everything here works on logs and on plain arrays that were validated at the edge. The kernels are
compiled by numba on first use and cached on disk; they release the GIL, allocate only tiles, and
give the same bits however the trajectories are cut into calls.

Letters: S steps of n trajectories lie one after the other, trajectory i at offsets[i] up to
offsets[i + 1] - 1; T is the length of the longest; K behaviours k with shares rho_k = n_k / n.
P_k,t is the probability of the actions up to step t under behaviour k, a product of t + 1 numbers
that underflows after some hundred steps, so only log P_k,t is ever held. w_i,t is the importance
weight of trajectory i at step t, r_i,t its reward, gamma the discount.
"""

import math
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ope_gym import compiling

compiling.watch()
F = TypeVar("F", bound=Callable[..., object])

# Flags of LLVM's fast arithmetic. All of them at once ("fastmath=True") would assume that there is
# no NaN and no infinity, which the kernels look for, so each is named. "contract" lets a * b + c be
# one instruction with one rounding. "reassoc" lets a sum be added in another order, in four or
# eight partial sums at a time; it is for kernels that add along a trajectory, never for `_exp`,
# where it would simplify (y + _ROUND) - _ROUND to y and so undo the rounding.
_CONTRACT = {"contract"}
_ADD = {"contract", "reassoc"}

_TILE = 256  # steps of a row handled at once: a tile of four rows stays in the first-level cache
_OVERFLOW = 1e280  # below exp(700), where `_exp` stops: no term of a smaller sum was cut
_UNDERFLOW = 1e-280  # above exp(-708), where `_exp` stops: a larger sum has lost nothing
NEVER = -1e300  # stands for the log of a probability of 0 where -inf times 0 would be NaN
REFUSED, DISTANT = 1, 2  # what `prefixes` returns where it could not do its work
_FEW = 512  # trajectories whose statistics plain Python sums in a millisecond
_NEGLIGIBLE = -40.0  # log of a probability p below which p / (1 - p) is p in float64

# Constants of `_exp`, `_log` and `log_sigmoids`.
_SQRT_2 = 1.4142135623730951
_MANTISSA = (1 << 52) - 1  # bits of a float below its exponent
_ONE = 1023 << 52  # bits of 1.0
_WHOLE = 1075 << 52  # bits of 2**52: a whole number below goes into the lowest bits
_BITS_700 = int(np.float64(700.0).view(np.int64))
_LOG2_E = 1.4426950408889634
_LN_2 = 0.6931471805599453
_ROUND = 6755399441055744.0  # 1.5 * 2**52: adding it leaves the nearest integer in the low bits
# exp(r) = 1 + r + r^2 q(r) on [-ln 2 / 2, ln 2 / 2]; q is a Chebyshev interpolant, within 3e-16
_Q = (
    np.polynomial.chebyshev.Chebyshev.interpolate(
        np.polynomial.Polynomial([1 / math.factorial(i + 2) for i in range(16)]),
        8,
        domain=[-_LN_2 / 2, _LN_2 / 2],
    )
    .convert(kind=np.polynomial.Polynomial)
    .coef
)
_Q0, _Q1, _Q2, _Q3, _Q4, _Q5, _Q6, _Q7, _Q8 = (float(q) for q in _Q)
# artanh(s) = s + s^3 a(s^2) for |s| <= 1/3, with a(z) = 1/3 + z/5 + z^2/7 + ..., in the same way
_A = (
    np.polynomial.chebyshev.Chebyshev.interpolate(
        np.polynomial.Polynomial([1 / (2 * i + 3) for i in range(40)]), 8, domain=[0.0, 1 / 9]
    )
    .convert(kind=np.polynomial.Polynomial)
    .coef
)
_A0, _A1, _A2, _A3, _A4, _A5, _A6, _A7, _A8 = (float(a) for a in _A)


def compiled(
    fastmath: Iterable[str] = (), writes: Iterable[str] | None = None, few: int = 0
) -> Callable[[F], F]:
    """Compile on first use, keep the machine code on disk, release the GIL.

    numba compiles a function anew for each combination of arrays that may be written to and arrays
    that may not. Given `writes`, the arguments that the function writes to, all other arrays are
    passed as read-only ones: one compilation serves all.

    Calls whose first array has fewer than `few` elements run as plain Python on lists: that takes
    less than loading the machine code, let alone making it. Such functions take arrays alone.
    """

    def decorate(function: F) -> F:
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": set(fastmath)}
        options["no_cfunc_wrapper"] = True  # C code does not call it
        try:
            machine = njit(cache=True, **options)(function)
        except RuntimeError:  # there is no folder to keep it in
            machine = njit(**options)(function)
        if writes is None:
            return cast(F, machine)
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        written = [name in set(writes) for name in names]

        @wraps(function)
        def call(*arguments: Any) -> Any:
            if few and arguments[0].size < few:
                return function(
                    *[x if out else x.tolist() for x, out in zip(arguments, written, strict=True)]
                )
            pairs = zip(arguments, written, strict=True)
            return machine(*[x if out else _read_only(x) for x, out in pairs])

        return cast(F, call)

    return decorate


def _read_only(value: Any) -> Any:
    """Return an array as one that cannot be written to, and anything else as it is."""
    if not isinstance(value, np.ndarray) or not value.flags.writeable:
        return value
    view = value.view()
    view.flags.writeable = False
    return view


# Compilation takes seconds where it happens for the first time, and most of them go into what looks
# like little: arrays made inside a kernel, arithmetic on whole arrays or slices, `min` and `max`,
# even of two numbers. So kernels are loops over numbers, and their scratch arrays are arguments. A
# counter in nested loops begins with `begin - begin`, not with 0: numba takes that for a constant,
# and then infers all types again for each loop in which it turns out to be none.


@intrinsic
def _bits(context: Any, x: Any) -> Any:
    """Return the 64 bits of a float as an integer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.int64(types.float64), generate


@intrinsic
def _float(context: Any, x: Any) -> Any:
    """Return the float with these 64 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


@intrinsic
def _wide(context: Any) -> Any:
    """Let vectors have 512 bits in the calling function, where the processor has such.

    LLVM prefers 256, because the first processors with wide vectors lowered their clock for them.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), generate


# The exponential takes most of the time here, and a call of the C library keeps a loop from being
# vectorised. So it is written out:
#
#     exp(x) = 2^k exp(r),   k = the integer nearest to x / ln 2,   r = x - k ln 2, |r| <= ln 2 / 2
#
# - k without a conversion: a float of size 1.5 * 2^52 has no bits left for fractions, so adding
#   that number rounds x / ln 2 to an integer, which then stands in the lowest bits of the sum.
#   Subtracting the number again gives k as a float.
# - exp(r) is a polynomial of degree 10, one multiplication and addition (fused) a coefficient.
# - 2^k: bits 52 and up of a float hold its exponent, so shifting k there and adding it to the bits
#   of exp(r) multiplies by 2^k.
#
# The last step needs an exponent that exists. The smallest float of full precision is 2^-1022 =
# exp(-708.4), the largest exp(709.8): x is held within [-708, 700], which leaves room above for
# sums of ten thousand terms. The upper bound compares bits, whose order as whole numbers is that of
# the floats above 0: two comparisons of floats would be merged into four instructions. Where 3e-308
# is not as good as 0, because it multiplies something or is counted, callers write
# `_exp(v) if v > -708.0 else 0.0`; that also turns NaN into 0.
#
# k ln 2 is rounded, so the relative error grows like 2e-17 |x|. All sums here are scaled so that
# their largest term has x near 0, and a term at x counts exp(x) of that: the error stays below one
# unit in the last place of the sum.
@njit(forceinline=True, fastmath=_CONTRACT)  # inlined with these flags, not the caller's
def _exp(x: float) -> float:
    """Return exp(x) by plain arithmetic that vectorises; x is held within [-708, 700]."""
    y = x if x > -708.0 else -708.0
    bits: Any = _bits(y)  # type: ignore[call-arg]
    y = _float(bits if bits < _BITS_700 else _BITS_700)
    shifted = y * _LOG2_E + _ROUND
    r = y - (shifted - _ROUND) * _LN_2
    high = _Q4 + r * (_Q5 + r * (_Q6 + r * (_Q7 + r * _Q8)))
    p = 1.0 + (r + r * r * (_Q0 + r * (_Q1 + r * (_Q2 + r * (_Q3 + r * high)))))
    return _float(_bits(p) + (_bits(shifted) << 52))


# The logarithm in the same way: x = 2^e m with m within [sqrt(1/2), sqrt(2)], and from
# artanh(s) = log((1 + s) / (1 - s)) / 2 with s = (m - 1) / (m + 1), |s| <= .172,
#
#     log x = e ln 2 + log m = e ln 2 + 2 artanh(s)
#
# The bits of x give e + 1023 and m within [1, 2); half of that where it is above sqrt(2).
@njit(forceinline=True, fastmath=_CONTRACT)
def _log(x: float) -> float:
    """Return log(x) by plain arithmetic that vectorises, for x > 0 of full precision."""
    bits: Any = _bits(x)  # type: ignore[call-arg]
    m = _float((bits & _MANTISSA) | _ONE)
    e = _float((bits >> 52) | _WHOLE) - (4503599627370496.0 + 1023.0)
    large = m > _SQRT_2
    m = 0.5 * m if large else m
    e = e + 1.0 if large else e
    s = (m - 1.0) / (m + 1.0)
    return e * _LN_2 + 2.0 * _artanh(s)


@njit(forceinline=True, fastmath=_CONTRACT)
def _artanh(s: float) -> float:
    """Return artanh(s) for |s| <= 1/3."""
    z = s * s
    high = _A4 + z * (_A5 + z * (_A6 + z * (_A7 + z * _A8)))
    return s + s * z * (_A0 + z * (_A1 + z * (_A2 + z * (_A3 + z * high))))


@njit(forceinline=True)  # without flags: simplified, it would be 0
def _rest(total: float, x: float) -> float:
    """Return what rounding takes from total + x, exactly (Knuth); 0 beside -inf."""
    new = total + x
    part = new - total
    return (total - (new - part)) + (x - part) if new > -np.inf else 0.0


# The mixture of prefix products, for every step t of every trajectory:
#
#     log mixture_t = log sum_k rho_k P_k,t
#                   = M_t + log sum_k rho_k exp(log P_k,t - M_t)     for any M_t
#
# The textbook takes the largest log P_k,t as M_t, which needs all K prefixes before the first
# exponential, and after 2,000 steps, when log P is -1,400 or less, every sum has lost three digits.
# We take M_t = sum_u<=t m_u, m_u the largest log-probability of step u under the behaviour b that
# recorded the trajectory and three others, and sum for each behaviour the differences
# log p_k,u - m_u, which stay small where they matter. Only M_t and log P_b,t are large sums, and
# the rounding errors of these two are carried along (`_rest`). Every 1,024 steps of a trajectory,
# M_t moves to the likeliest behaviour if that is exp(300) away. If another behaviour gets exp(645)
# times as likely as those four in between, or each step has another one that finds it likely, the
# sum of the exponentials overflows or underflows: trajectories in which that happens are left to
# `distant_prefixes`.
#
# Layout: log_probs is (K, columns) with the steps of a behaviour side by side, so differences and
# exponentials are taken of several steps at a time. The prefix sums cannot be: each needs the one
# before. They are made for four behaviours at once, whose four chains of additions the processor
# overlaps, in a tile of (4, 256) that stays in the cache; two steps of a behaviour in a row,
# because the processor writes two numbers at a time if they are neighbours. Four tiles of a
# behaviour follow each other, so that memory is read in long stretches. A NaN stays in its prefix
# sum, so looking at the last one finds it.


@compiled(
    _CONTRACT,
    writes=("own", "mixture", "rows", "total", "most", "high", "carry"),
)
def prefixes(
    log_probs: Any,
    shift: int,
    begin: int,
    end: int,
    ids: Any,
    offsets: Any,
    rho: Any,
    limit: float,
    own: Any,
    mixture: Any,
    rows: Any,
    total: Any,
    most: Any,
    high: Any,
    carry: Any,
) -> int:
    """Compute prefix log-probabilities of trajectories begin..end-1, in one pass over (K, steps).

    Args:
        log_probs: (K, columns) log-probability of the taken action under each behaviour.
        shift: the step that column 0 holds.
        begin: first trajectory.
        end: one past the last trajectory.
        ids: (n,) own behaviour of each trajectory.
        offsets: (n + 1,) steps of each trajectory.
        rho: (padded,) share of the trajectories of each behaviour, 0 beyond the last.
        limit: largest log-probability allowed.
        own: written: log P_b(i),t, from the first step of `begin` on; (0,) if it is not wanted.
        mixture: written: log sum_k rho_k P_k,t, from the first step of `begin` on.
        rows: (4, tile) scratch; see `prefix_scratch`.
        total: (tiles,) scratch.
        most: (tiles,) scratch.
        high: (tiles,) scratch.
        carry: (padded,) scratch.

    Returns:
        REFUSED if an entry is NaN or above the limit, or -inf under the own behaviour; DISTANT if
        sums got too large or too small, so that `mixture` has NaN for `distant_prefixes`; else 0.
    """
    _wide()  # type: ignore[call-arg]
    last, wide, tile = log_probs.shape[0] - 1, total.size, rows.shape[1]
    bad, lost = begin - begin, begin - begin
    base, stop, wanted = offsets[begin], offsets[end], own.size > 0
    acted, acted_rest, top, top_rest = 0.0, 0.0, 0.0, 0.0
    first = begin  # the trajectory that the first step of a stretch is of
    row = base
    while row < stop:
        # up to the next multiple of `wide` of the trajectory: results do not depend on its place
        width, column, at = wide - (row - offsets[first]) % wide, row - shift, row - base
        if row + width > offsets[first + 1]:
            width = wide
        if row + width > stop:
            width = stop - row
        i, j = first, 0
        while j < width:
            size = offsets[i + 1] - row if offsets[i + 1] - row < width else width
            for u in range(j, size):
                # an unsigned index cannot count from the end, which saves a comparison
                x = log_probs[ids[i], np.uintp(column + u)]
                most[np.uintp(u)] = x
                bad += not x > -np.inf  # also for NaN
            j = size
            i += offsets[i + 1] == row + j
        for third in range(3):
            k = third * last // 2
            for j in range(width):
                x = log_probs[k, np.uintp(column + j)]
                most[j] = x if x > most[j] else most[j]
        for j in range(width):
            total[j] = 0.0
            high[j] = -np.inf
        then, i, j = i, first, 0
        while j < width:
            size = offsets[i + 1] - row if offsets[i + 1] - row < width else width
            if offsets[i] == row + j:
                acted, acted_rest, top, top_rest = 0.0, 0.0, 0.0, 0.0
            for u in range(j, size):
                x = most[np.uintp(u)]
                top_rest += _rest(top, x)
                top += x
                mixture[np.uintp(at + u)] = top + top_rest
            if wanted:
                for u in range(j, size):
                    x = log_probs[ids[i], np.uintp(column + u)]
                    acted_rest += _rest(acted, x)
                    acted += x
                    own[np.uintp(at + u)] = acted + acted_rest
            j = size
            i += offsets[i + 1] == row + j
        for k in range(0, last + 1, 4):
            # beyond the last behaviour: that one again, with a share of zero
            k1 = k + 1 if k + 1 < last else last
            k2 = k + 2 if k + 2 < last else last
            k3 = k + 3 if k + 3 < last else last
            a, b, c, d = carry[k], carry[k + 1], carry[k + 2], carry[k + 3]
            share_a, share_b, share_c, share_d = rho[k], rho[k + 1], rho[k + 2], rho[k + 3]
            i = first
            for left in range(0, width, tile):
                size, here = tile, column + left
                if left + tile > width:
                    size = width - left
                for j in range(size):
                    x, y = log_probs[k, np.uintp(here + j)], log_probs[k1, np.uintp(here + j)]
                    z, v = log_probs[k2, np.uintp(here + j)], log_probs[k3, np.uintp(here + j)]
                    m, h = most[np.uintp(left + j)], high[np.uintp(left + j)]
                    rows[0, j] = x - m
                    rows[1, j] = y - m
                    rows[2, j] = z - m
                    rows[3, j] = v - m
                    x = x if x > y else y
                    z = z if z > v else v
                    x = x if x > z else z
                    high[np.uintp(left + j)] = x if x > h else h
                j = 0
                while j < size:
                    n = offsets[i + 1] - row - left
                    n = n if n < size else size
                    if offsets[i] == row + left + j:
                        a, b, c, d = 0.0, 0.0, 0.0, 0.0
                    if (n - j) % 2 == 1:
                        u = np.uintp(j)
                        a += rows[0, u]
                        b += rows[1, u]
                        c += rows[2, u]
                        d += rows[3, u]
                        rows[0, u] = a
                        rows[1, u] = b
                        rows[2, u] = c
                        rows[3, u] = d
                        j += 1
                    for even in range(j, n, 2):
                        u, v = np.uintp(even), np.uintp(even + 1)
                        x = a + rows[0, u]
                        a = x + rows[0, v]
                        rows[0, u] = x
                        rows[0, v] = a
                        x = b + rows[1, u]
                        b = x + rows[1, v]
                        rows[1, u] = x
                        rows[1, v] = b
                        x = c + rows[2, u]
                        c = x + rows[2, v]
                        rows[2, u] = x
                        rows[2, v] = c
                        x = d + rows[3, u]
                        d = x + rows[3, v]
                        rows[3, u] = x
                        rows[3, v] = d
                    j = n
                    bad += not ((a == a) & (b == b) & (c == c) & (d == d))
                    i += offsets[i + 1] == row + left + j
                for j in range(size):
                    total[np.uintp(left + j)] += (
                        share_a * _exp(rows[0, j]) + share_b * _exp(rows[1, j])
                    ) + (share_c * _exp(rows[2, j]) + share_d * _exp(rows[3, j]))
            carry[k] = a
            carry[k + 1] = b
            carry[k + 2] = c
            carry[k + 3] = d
        for j in range(width):
            bad += not high[j] <= limit
            known = (total[j] > _UNDERFLOW) & (total[j] < _OVERFLOW)
            lost += not known
            mixture[np.uintp(at + j)] += _log(total[j]) if known else np.nan
        first, row, x = then, row + width, NEVER
        for k in range(last + 1):
            x = carry[k] if carry[k] > x and rho[k] > 0.0 else x
        # NEVER if all behaviours that count are impossible
        if abs(x) > 300.0 and x > NEVER and (row - offsets[first]) % wide == 0:
            top_rest += _rest(top, x)
            top += x
            for k in range(rho.size):
                carry[k] -= x
    return REFUSED if bad > 0 else DISTANT if lost > 0 else 0


@compiled(_CONTRACT, writes=("own", "mixture", "total"))
def single_steps(
    log_probs: Any,
    shift: int,
    begin: int,
    end: int,
    ids: Any,
    rho: Any,
    limit: float,
    own: Any,
    mixture: Any,
    total: Any,
) -> int:
    """Do the work of `prefixes` on trajectories of one step each, which need no prefix sums.

    Args and return value as there, but for `total`: scratch of a few thousand steps, because rows
    are read faster in long stretches. One kernel for both would take longer to compile.
    """
    _wide()  # type: ignore[call-arg]
    last, tile, bad, gone, lost = log_probs.shape[0] - 1, total.size, 0, 0, 0
    for row in range(begin, end, tile):
        width, column, at = tile, row - shift, row - begin
        if row + tile > end:
            width = end - row
        for j in range(width):
            total[j] = 0.0
        for k in range(0, last + 1, 2):  # of four at a time the registers overflow
            k1 = k + 1 if k + 1 < last else last
            share_a, share_b = rho[k], rho[k + 1]
            for j in range(width):
                x, y = log_probs[k, np.uintp(column + j)], log_probs[k1, np.uintp(column + j)]
                bad += not ((x <= limit) & (y <= limit))
                gone += not ((x > -np.inf) & (y > -np.inf))
                total[j] += share_a * _exp(x) + share_b * _exp(y)
        for j in range(width):
            known = (total[j] > _UNDERFLOW) & (total[j] < _OVERFLOW)
            lost += not known
            mixture[np.uintp(at + j)] = _log(total[j]) if known else np.nan
    # each step from a row of its own is slow to read: only if it is wanted, or may be -inf
    if gone > 0 or own.size > 0:
        for row in range(begin, end):
            x = log_probs[np.uintp(ids[np.uintp(row)]), np.uintp(row - shift)]
            bad += not x > -np.inf
            if own.size > 0:
                own[np.uintp(row - begin)] = x
    return REFUSED if bad > 0 else DISTANT if lost > 0 else 0


@compiled(writes=("mixture", "running"))
def distant_prefixes(
    log_probs: Any,
    shift: int,
    begin: int,
    end: int,
    offsets: Any,
    rho: Any,
    mixture: Any,
    running: Any,
) -> None:
    """Compute log sum_k rho_k P_k,t of the trajectories in which `prefixes` has left NaN.

    The largest prefix of each step is its pivot, so behaviours may be however far apart.

    Args:
        log_probs: (K, columns), and the next four, as for `prefixes`.
        shift: the step that column 0 holds.
        begin: first trajectory.
        end: one past the last trajectory.
        offsets: (n + 1,).
        rho: (K,) or more.
        mixture: written where there is NaN, from the first step of `begin` on.
        running: (K,) or more, scratch.
    """
    base, behaviours = offsets[begin], log_probs.shape[0]
    for i in range(begin, end):
        top, rest, left = 0.0, 0.0, 0
        for j in range(offsets[i] - base, offsets[i + 1] - base):
            left += mixture[j] != mixture[j]
        if left == 0:
            continue
        for k in range(behaviours):
            running[k] = 0.0
        for j in range(offsets[i], offsets[i + 1]):
            most, pivot, total = -np.inf, -np.inf, 0.0
            for k in range(behaviours):
                most = max(most, log_probs[k, j - shift])
            rest += _rest(top, most)
            top += most
            for k in range(behaviours):
                running[k] += log_probs[k, j - shift] - most
                if rho[k] > 0.0:
                    pivot = max(pivot, running[k])
            for k in range(behaviours):
                if rho[k] > 0.0 and pivot > -np.inf:
                    total += rho[k] * math.exp(running[k] - pivot)
            mixture[j - base] = top + rest + (pivot + math.log(total))


def prefix_scratch(rho: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the shares of K behaviours padded to a multiple of four, and scratch of `prefixes`."""
    padded = np.zeros(-(-rho.size // 4) * 4)
    padded[: rho.size] = rho
    vectors = np.empty((3, 4 * _TILE))
    return padded, (np.empty((4, _TILE)), *vectors, np.zeros(padded.size))


# The optimal scheme has f(p) = p / (1 - a p) where the fused one has f(p) = p. Split off the fused
# part, p / (1 - a p) = p + a p^2 / (1 - a p), and sum over behaviours:
#
#     sum_k rho_k f(P_k) = mixture + extra,     extra = sum_k rho_k a P_k^2 / (1 - a P_k)
#     log f(P_b) / P_b - log sum_k rho_k f(P_k) = -log(1 - a P_b) - log(mixture + extra)
#
# The mixture is known. A behaviour whose prefix has fallen below exp(-40) adds nothing to extra
# that float64 could hold beside its term in the mixture, and prefixes only fall: a loop ends there,
# mostly after a few steps. Near p = 1, 1 - a p would lose its digits, and
# 1 - a p = (1 - a) - a (p - 1) with p - 1 = expm1(log p) does not. Where a P_k is exactly 1, f is
# infinite: in the limit the behaviours with such a prefix (`certain`) share all the weight.


@compiled(_CONTRACT, writes=("extra", "certain", "prefix", "out"))
def optimal_mixture(
    log_probs: Any,
    shift: int,
    begin: int,
    end: int,
    offsets: Any,
    rho: Any,
    a: Any,
    own: Any,
    mixture: Any,
    extra: Any,
    certain: Any,
    prefix: Any,
    out: Any,
) -> None:
    """Write log f(P_b)/P_b - log sum_k rho_k f(P_k), f(p) = p / (1 - a p).

    Args:
        log_probs: (K, columns), and the next four, as for `prefixes`.
        shift: the step that column 0 holds.
        begin: first trajectory.
        end: one past the last trajectory.
        offsets: (n + 1,).
        rho: (K,) or more.
        a: (S,) the reward parameter.
        own: log P_b(i),t; this, the next and `out` from the first step of `begin` on.
        mixture: log sum_k rho_k P_k,t.
        extra: (longest,) scratch.
        certain: (longest,) scratch.
        prefix: (longest,) scratch.
        out: written.
    """
    base = offsets[begin]
    for i in range(begin, end):
        start, length = offsets[i], offsets[i + 1] - offsets[i]
        at, column = start - base, start - shift
        for j in range(length):
            extra[j] = 0.0
            certain[j] = 0.0
        for k in range(log_probs.shape[0]):
            share, running, stop = rho[k], 0.0, 0
            for j in range(length):
                running += log_probs[k, column + j]
                if running < _NEGLIGIBLE:
                    break
                stop = j + 1
                prefix[j] = running
                if running > -0.1:  # 1 - a p would cancel: take expm1, and leave nothing to do
                    prefix[j] = -np.inf
                    rest = (1.0 - a[start + j]) - a[start + j] * math.expm1(running)
                    if rest <= 0.0:
                        certain[j] += share
                    else:
                        extra[j] += share * a[start + j] * math.exp(2.0 * running) / rest
            for j in range(stop):
                p = _exp(prefix[j])
                extra[j] += share * a[start + j] * p * p / (1.0 - a[start + j] * p)
        for j in range(length):
            rest = (1.0 - a[start + j]) - a[start + j] * math.expm1(own[at + j])
            if certain[j] > 0.0:
                out[at + j] = -math.log(certain[j]) if rest <= 0.0 else -np.inf
            elif extra[j] > 0.0:
                out[at + j] = -math.log(rest) - math.log(math.exp(mixture[at + j]) + extra[j])
            else:
                out[at + j] = -mixture[at + j]


@compiled(writes=("out",))
def cumulate(log_probs: Any, begin: int, end: int, offsets: Any, out: Any) -> None:
    """Write the running sum of log_probs (S,) inside each of the trajectories begin..end-1."""
    base = offsets[begin]
    for i in range(begin, end):
        running, rest = 0.0, 0.0
        for j in range(offsets[i], offsets[i + 1]):
            rest += _rest(running, log_probs[j])
            running += log_probs[j]
            out[j - base] = running + rest


@compiled(writes=("out",))
def cumulate_ratios(
    target: Any,
    log_probs: Any,
    shift: int,
    begin: int,
    end: int,
    ids: Any,
    offsets: Any,
    limit: float,
    out: Any,
) -> bool:
    """Write log P_e - log P_b(i) of trajectories begin..end-1, the log weights of "basic".

    Args:
        target: (S,) log-probability of the taken action under the target.
        log_probs: (K, columns) the same under each behaviour.
        shift: the step that column 0 holds.
        begin: first trajectory.
        end: one past the last trajectory.
        ids: (n,) own behaviour of each trajectory.
        offsets: (n + 1,).
        limit: largest log-probability allowed.
        out: (S,) written at the steps of these trajectories.

    Returns:
        False if an entry of an own behaviour is NaN, -inf or above the limit.
    """
    _wide()  # type: ignore[call-arg]
    bad = begin - begin
    # differences first: they are small, so that little is rounded, and taken of several steps at a
    # time. Sums wait for each other, and would keep the next trajectory, of another row, from being
    # read ahead.
    for i in range(begin, end):
        k = ids[i]
        for j in range(offsets[i], offsets[i + 1]):
            x = log_probs[k, np.uintp(j - shift)]
            bad += not ((x <= limit) & (x > -np.inf))
            out[np.uintp(j)] = target[np.uintp(j)] - x
    for i in range(begin, end):
        total, rest = 0.0, 0.0
        for j in range(offsets[i], offsets[i + 1]):
            x = out[np.uintp(j)]
            rest += _rest(total, x)
            total += x
            out[np.uintp(j)] = total + rest
    return bad == 0


# Sums over all trajectories at each step t, for weights known by their logs:
#
#     W_t = sum_i w_i,t,   sum_i w_i,t^2,   sum_i w_i,t r_i,t
#
# Weights may exceed the largest float or all underflow, so they are summed as exp(log w - M_t), M_t
# the largest log weight at step t: at least one term is 1, and none is larger. `column_sums` first
# finds the M_t, then adds up.
#
# The sums run over all n trajectories, also over those that have ended: an ended episode pays 0 and
# keeps its last weight for ever. (Without them the normalised mean would be one of survivors only.)
# Adding the last weight to every later step would cost n T. Instead each trajectory adds it once,
# to the entry of its length, and running sums of these entries over t follow at the end: n + T.
# These are scaled by gone_t, the largest last log weight of the trajectories that ended by t, which
# only rises; where it does, the sum so far is rescaled:
#
#     sum_t = sum_t-1 exp(gone_t-1 - gone_t) + entries at t
#
# M_t itself will not do: it can fall, and a sum that was scaled down to 0 does not come back.


@compiled(_ADD, writes=("peak", "gone", "pay", "weight", "sums", "ended", "psi"))
def column_sums(
    log_w: Any,
    log_cap: float,
    rewards: Any,
    offsets: Any,
    peak: Any,
    gone: Any,
    pay: Any,
    weight: Any,
    sums: Any,
    ended: Any,
    psi: Any,
) -> None:
    """Sum over trajectories at each step, and compute the plain influence values.

    Args:
        log_w: (S,) log weights.
        log_cap: upper bound put on them (inf: none).
        rewards: (S,).
        offsets: (n + 1,).
        peak: (T,) -inf; written: M_t.
        gone: (T + 1,) -inf; written: the largest last log weight of trajectories that ended by t.
        pay: (T,) gamma^t; written: gamma^t exp(M_t).
        weight: (T,) scratch.
        sums: (3, T) zeros; written: sum w, sum w^2, sum w r, with weights divided by exp(M_t).
        ended: (2, T + 1) zeros, scratch: sum w, sum w^2 of the last weights, by length.
        psi: (n,) written: sum_t gamma^t w_t r_t.
    """
    _wide()  # type: ignore[call-arg]
    n, horizon = offsets.size - 1, peak.size
    for i in range(n):
        start, length = offsets[i], offsets[i + 1] - offsets[i]
        v = -np.inf
        for t in range(length):
            v = log_w[np.uintp(start + t)] if log_w[np.uintp(start + t)] < log_cap else log_cap
            if v > peak[t]:
                peak[t] = v
        if v > gone[length]:
            gone[length] = v
    for t in range(horizon):
        if gone[t] > gone[t + 1]:
            gone[t + 1] = gone[t]
        if gone[t] > peak[t]:
            peak[t] = gone[t]
        v = peak[t] if peak[t] > -np.inf else 0.0
        pay[t] *= math.exp(v if v < 700.0 else 700.0)
    for i in range(n):
        start, length = offsets[i], offsets[i + 1] - offsets[i]
        v = -np.inf
        for t in range(length):  # three loops, since each vectorises by itself
            v = log_w[np.uintp(start + t)] if log_w[np.uintp(start + t)] < log_cap else log_cap
            v -= peak[t]  # NaN if all are -inf, and then 0
            weight[t] = _exp(v) if v > -708.0 else 0.0
        for t in range(length):
            w = weight[t]
            sums[0, t] += w
            sums[1, t] += w * w
            sums[2, t] += w * rewards[np.uintp(start + t)]
        total = 0.0
        # a loop that writes too would add up in an order that depends on where the arrays lie
        for t in range(length):
            total += pay[t] * (weight[t] * rewards[np.uintp(start + t)])
        psi[i] = total
        v = log_w[start + length - 1] if log_w[start + length - 1] < log_cap else log_cap
        v -= gone[length]
        w = _exp(v) if v > -708.0 else 0.0
        ended[0, length] += w
        ended[1, length] += w * w
    once, twice = 0.0, 0.0
    for t in range(1, horizon):  # add the last weights of the trajectories that ended before t
        if gone[t] > -np.inf:
            shrink = math.exp(gone[t - 1] - gone[t])
            once = once * shrink + ended[0, t]
            twice = twice * shrink * shrink + ended[1, t]
            shrink = math.exp(gone[t] - peak[t])
            sums[0, t] += once * shrink
            sums[1, t] += twice * shrink * shrink


# The influence of a trajectory on the normalised estimate J = sum_t gamma^t R_t, R_t = sum_i w r /
# W_t, is n times the derivative of J by the share of the trajectory:
#
#     psi_i = sum_t gamma^t (n / W_t) w_i,t (r_i,t - R_t),   t = 0 .. T - 1
#
# From its end, at t = L_i, its reward is 0 and its weight stays w_i,last, so the rest of the sum is
#
#     -w_i,last tail(L_i),   tail(l) = sum_{t >= l} gamma^t (n / W_t) R_t
#
# with suffix sums that all trajectories share: n + T operations in place of n T. W_t is stored
# divided by exp(M_t), and the M_t of different steps can lie hundreds apart; tail(l) is therefore
# held times exp(floor_l), floor_l the smallest M_t with t >= l. Then every term exp(floor - M_t) is
# at most 1; and so is exp(log w_last - floor_L), because M_t is the largest log weight at t, with
# those of ended trajectories among them.


@compiled(writes=("out",))
def dense_columns(
    log_w: Any, log_cap: float, rewards: Any, offsets: Any, peak: Any, t0: int, out: Any
) -> None:
    """Write out[0] = w / exp(M_t) and out[1] = out[0] r at steps t0, t0 + 1, ..., (2, n, width).

    A rectangle for matrix products: an ended trajectory keeps its last weight and pays 0.
    """
    for i in range(offsets.size - 1):
        start, length = offsets[i], offsets[i + 1] - offsets[i]
        last = min(log_w[start + length - 1], log_cap)
        for j in range(out.shape[2]):
            t = t0 + j
            if t < length:
                out[0, i, j] = math.exp(min(log_w[np.uintp(start + t)], log_cap) - peak[t])
                out[1, i, j] = out[0, i, j] * rewards[np.uintp(start + t)]
            else:
                out[0, i, j] = math.exp(last - peak[t])
                out[1, i, j] = 0.0


@compiled(_ADD, writes=("floor", "tail", "out"))
def segment_influence(
    log_w: Any,
    log_cap: float,
    rewards: Any,
    offsets: Any,
    factor: Any,
    mean: Any,
    peak: Any,
    ends: Any,
    floor: Any,
    tail: Any,
    out: Any,
) -> None:
    """Compute the normalised influence of each stretch of steps, cut at some steps.

    One stretch of all steps gives the influence on the whole estimate; with several, the suffix
    sums begin anew in each. A trajectory that has ended takes part in every later stretch with its
    last weight.

    Args:
        log_w: (S,) log weights.
        log_cap: upper bound put on them.
        rewards: (S,).
        offsets: (n + 1,).
        factor: (T,) gamma^t n / W_t, W_t scaled by exp(-M_t).
        mean: (T,) R_t.
        peak: (T,) M_t.
        ends: (m,) one past the last step of each stretch, rising; the last is T.
        floor: (T,) scratch.
        tail: (T,) scratch.
        out: (m, n) written: sum over the stretch of factor_t w_i,t (r_i,t - R_t).
    """
    _wide()  # type: ignore[call-arg]
    stretches, begin = ends.size, ends.size - ends.size
    for j in range(stretches):
        low, total = np.inf, 0.0
        for t in range(ends[j] - 1, begin - 1, -1):
            new = low if low < peak[t] else peak[t]
            total = total * math.exp(new - low) + factor[t] * mean[t] * math.exp(new - peak[t])
            low = new
            floor[t] = low
            tail[t] = total
        begin = ends[j]
    for i in range(offsets.size - 1):
        start, length = offsets[i], offsets[i + 1] - offsets[i]
        last = log_w[start + length - 1] if log_w[start + length - 1] < log_cap else log_cap
        t = start - start
        for j in range(stretches):
            total, stop = 0.0, ends[j] if ends[j] < length else length
            for u in range(t, stop):
                v = log_w[np.uintp(start + u)] if log_w[np.uintp(start + u)] < log_cap else log_cap
                v -= peak[np.uintp(u)]
                w = _exp(v) if v > -708.0 else 0.0
                w *= rewards[np.uintp(start + u)] - mean[np.uintp(u)]
                total += factor[np.uintp(u)] * w
            t = stop if stop > t else t
            if t < ends[j]:
                total -= math.exp(last - floor[t]) * tail[t]
                t = ends[j]
            out[j, i] = total


# Trajectories of one step have one sum and no ends: a loop that vectorises, not n loops of a step.


@compiled(_ADD, writes=("sums", "psi", "weights"))
def single_sums(
    log_w: Any, log_cap: float, rewards: Any, top: float, sums: Any, psi: Any, weights: Any
) -> None:
    """Do what `column_sums` does for trajectories of one step; top is M_0, sums is (3,).

    The weights (n,) over exp(top) are written, too, for error and diagnostics.

    The compiled loop adds in another order where two of its arrays begin within 256 bytes of each
    other, because it does not vectorise there. So that a result never depends on where arrays
    happen to lie, all of them have at least 64 numbers.
    """
    _wide()  # type: ignore[call-arg]
    paid = math.exp(top if top < 700.0 else 700.0)
    once, twice, earned = 0.0, 0.0, 0.0
    for i in range(log_w.size):
        v = (log_w[i] if log_w[i] < log_cap else log_cap) - top  # NaN if all are -inf, and then 0
        w = _exp(v) if v > -708.0 else 0.0
        once += w
        twice += w * w
        earned += w * rewards[i]
        psi[i] = paid * (w * rewards[i])
        weights[i] = w
    sums[0], sums[1], sums[2] = once, twice, earned


@compiled(_ADD, writes=("out",))
def single_influence(
    log_w: Any, log_cap: float, rewards: Any, factor: float, mean: float, peak: float, out: Any
) -> None:
    """Do what `segment_influence` does for trajectories of one step; out is (n,)."""
    _wide()  # type: ignore[call-arg]
    for i in range(log_w.size):
        v = (log_w[i] if log_w[i] < log_cap else log_cap) - peak
        w = _exp(v) if v > -708.0 else 0.0
        out[i] = factor * w * (rewards[i] - mean)


@compiled(writes=("terms", "last"))
def rival_terms(
    log_probs: Any,
    shift: int,
    begin: int,
    end: int,
    offsets: Any,
    log_target: Any,
    rewards: Any,
    discount: Any,
    terms: Any,
    last: Any,
) -> None:
    """Compute the terms of trajectories begin..end-1 as if each behaviour k had drawn them.

    Args:
        log_probs: (K, columns) log-probability of the taken action under each behaviour.
        shift: the step that column 0 holds.
        begin: first trajectory.
        end: one past the last trajectory.
        offsets: (n + 1,).
        log_target: (S,) log P_e of each prefix.
        rewards: (S,).
        discount: (T,) gamma^t.
        terms: (K, n) written: sum_t gamma^t P_e,t / P_k,t r_t, each ratio at most exp(700).
        last: (K, n) written: log P_k of the whole trajectory.
    """
    for i in range(begin, end):
        start, stop = offsets[i], offsets[i + 1]
        for k in range(log_probs.shape[0]):
            running, total = 0.0, 0.0
            for j in range(start, stop):
                running += log_probs[k, j - shift]
                if rewards[j] != 0.0 and log_target[j] > -np.inf:
                    ratio = math.exp(min(log_target[j] - running, 700.0))
                    total += discount[j - start] * ratio * rewards[j]
            terms[k, i] = total
            last[k, i] = running


# Statistics of trajectories, each in as few passes as it takes; numpy would make a dozen.


@compiled(_ADD, writes=("out",))
def ratio_sums(log_w: Any, offsets: Any, out: Any) -> None:
    """Sum R - 1 over all steps, R = w_t / w_{t-1} and w_{-1} = 1, where w_{t-1} > 0.

    Args:
        log_w: (S,) log weights.
        offsets: (n + 1,).
        out: (4,) written: number of such steps, largest R, sum of R - 1 and of its square.
    """
    _wide()  # type: ignore[call-arg]
    # the bits of floats above 0, as whole numbers, have their order, and loops that look for the
    # largest whole number vectorise
    steps, top, total, square = 0, 0, 0.0, 0.0
    if offsets.size - 1 == log_w.size:  # trajectories of one step
        steps = log_w.size
        for i in range(steps):
            ratio = _exp(log_w[i])
            bits: Any = _bits(ratio)
            top = bits if bits > top else top
            total += ratio - 1.0
            square += (ratio - 1.0) * (ratio - 1.0)
    else:
        for i in range(offsets.size - 1):
            start, stop = offsets[i], offsets[i + 1]
            ratio = _exp(log_w[start])
            bits = _bits(ratio)
            top = bits if bits > top else top
            steps += 1
            total += ratio - 1.0
            square += (ratio - 1.0) * (ratio - 1.0)
            for j in range(start + 1, stop):
                known = log_w[np.uintp(j - 1)] > -np.inf
                # a ratio of 1 adds nothing
                ratio = _exp(log_w[np.uintp(j)] - log_w[np.uintp(j - 1)] if known else 0.0)
                bits = _bits(ratio)
                top = bits if bits > top else top
                steps += known
                total += ratio - 1.0
                square += (ratio - 1.0) * (ratio - 1.0)
    out[0], out[1], out[2], out[3] = steps, _float(top), total, square


@compiled(_ADD, writes=("out",))
def spread_sums(psi: Any, strata: Any, means: Any, factors: Any, out: Any) -> None:
    """Sum powers of u_i = factor_k (psi_i - mean_k), k the stratum of i.

    Args:
        psi: (n,) influence values, finite.
        strata: (n,).
        means: by stratum.
        factors: by stratum, such that |u| is about 1 at most.
        out: (5,) written: the smallest u (at most 0), the largest (at least 0), and the sums of
            u^2, u^3 and u^4.
    """
    _wide()  # type: ignore[call-arg]
    # bits as in `ratio_sums`; those of a float below 0 are a whole number below 0
    low, high, square, cube, fourth = 0, 0, 0.0, 0.0, 0.0
    for i in range(psi.size):
        k = np.uintp(strata[i])
        u = (psi[i] - means[k]) * factors[k]
        below: Any = _bits(-u)
        above: Any = _bits(u)
        low = below if below > low else low
        high = above if above > high else high
        square += u * u
        cube += u * u * u
        fourth += (u * u) * (u * u)
    out[0], out[1], out[2], out[3], out[4] = 0.0 - _float(low), _float(high), square, cube, fourth


@compiled(_ADD, writes=("out",), few=_FEW)
def return_moments(returns: Any, weights: Any, strata: Any, means: Any, out: Any) -> None:
    """Sum what the variance of a return follows from, weighted and inside strata.

    Args:
        returns: (n,).
        weights: (n,).
        strata: (n,).
        means: of the returns, by stratum.
        out: (5,) written: sum w, sum w^2, r_w = sum w r / sum w, sum w (r - r_w)^2, and
            sum (r - mean)^2 with the mean of the stratum.
    """
    total, square, paid, apart, inside = 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(len(returns)):
        total += weights[i]
        square += weights[i] * weights[i]
        paid += weights[i] * returns[i]
    mean = paid / total if total > 0.0 else 0.0
    for i in range(len(returns)):
        apart += weights[i] * ((returns[i] - mean) * (returns[i] - mean))
        d = returns[i] - means[strata[i]]
        inside += d * d
    out[0], out[1], out[2], out[3], out[4] = total, square, mean, apart, inside


# The vote of Boyer and Moore: weights of different values cancel each other, and what is left is of
# the value with a majority, if there is one. Candidate and lead of several parts are votes in turn,
# so a tile of places votes, each for itself (which vectorises), and then the winners of the places.
# Without "reassoc", which would undo the rounding by _ROUND.


@compiled(writes=("candidates", "leads", "out"))
def vote(values: Any, weights: Any, unit: float, candidates: Any, leads: Any, out: Any) -> None:
    """Find the value (n,) that has more than half of the weights (n,), if there is one.

    Args:
        values: (n,); they are equal if they are so many units after rounding.
        weights: (n,).
        unit: of the values.
        candidates: (tile,) zeros, scratch.
        leads: (tile,) zeros, scratch.
        out: (2,) written: the value in units, and by how much weight it leads.
    """
    _wide()  # type: ignore[call-arg]
    tile, winner, lead = candidates.size, 0.0, 0.0
    for begin in range(0, values.size, tile):
        width = tile if begin + tile <= values.size else values.size - begin
        for j in range(width):
            value = (values[np.uintp(begin + j)] / unit + _ROUND) - _ROUND  # a whole number
            weight = weights[np.uintp(begin + j)]
            left = leads[j] + weight if value == candidates[j] else leads[j] - weight
            candidates[j] = value if left < 0.0 else candidates[j]
            leads[j] = abs(left)
    for j in range(tile):
        left = lead + leads[j] if candidates[j] == winner else lead - leads[j]
        winner = candidates[j] if left < 0.0 else winner
        lead = abs(left)
    out[0], out[1] = winner, lead


@compiled(writes=("sums", "out"))
def weight_of(values: Any, weights: Any, unit: float, winner: float, sums: Any, out: Any) -> None:
    """Sum all weights (n,) and those of one value, in units; see `vote`.

    Args:
        values: (n,).
        weights: (n,).
        unit: of the values.
        winner: the value.
        sums: (2, tile) zeros, scratch.
        out: (2,) written: the sum of all weights, and of those of the value.
    """
    _wide()  # type: ignore[call-arg]
    tile, total, own = sums.shape[1], 0.0, 0.0
    for begin in range(0, values.size, tile):
        width = tile if begin + tile <= values.size else values.size - begin
        for j in range(width):
            value = (values[np.uintp(begin + j)] / unit + _ROUND) - _ROUND
            weight = weights[np.uintp(begin + j)]
            sums[0, j] += weight
            sums[1, j] += weight if value == winner else 0.0
    for j in range(tile):
        total += sums[0, j]
        own += sums[1, j]
    out[0], out[1] = total, own


@compiled(_CONTRACT, writes=("out",))
def group_sums(groups: Any, values: Any, out: Any) -> None:
    """Add 1, x and x^2 of each value x to the sums of its group.

    Args:
        groups: (n,) numbers from 0.
        values: (n,).
        out: (copies, groups, 3) added to, copies a power of two; with one column, x alone. A sum
            that has just been written takes a while to be read again: values of one group in a row
            go to copies in turn.
    """
    last = out.shape[0] - 1
    if out.shape[2] == 1:
        for i in range(values.size):
            out[np.uintp(i & last), np.uintp(groups[i]), 0] += values[i]
        return
    for i in range(values.size):
        x, copy, k = values[i], np.uintp(i & last), np.uintp(groups[i])
        out[copy, k, 0] += 1.0
        out[copy, k, 1] += x
        out[copy, k, 2] += x * x


# ln σ(x) = -log(1 + exp(-x)) = min(x, 0) - log1p(u) with u = exp(-|x|) <= 1: written with |x|, the
# exponential cannot overflow. From artanh(s) = log((1 + s) / (1 - s)) / 2 with s = u / (2 + u),
# (1 + s) / (1 - s) = 1 + u, so log1p(u) = 2 artanh(s) where s is at most 1/3: a quotient and a
# polynomial in s^2, which vectorise, in place of library calls, which on most machines do not.


@compiled(_CONTRACT, writes=("columns", "total", "out"))
def log_sigmoids(theta: Any, x: Any, chosen: Any, columns: Any, total: Any, out: Any) -> None:
    """Write ln σ(±θ_k·(x, 1)) of K policies and n steps, plus for action 1, within 1e-15.

    Args:
        theta: (K, d + 1).
        x: (n, d).
        chosen: (n,) actions 0 or 1.
        columns: (d + 1, tile) scratch.
        total: (tile,) scratch.
        out: (K, n) written.
    """
    _wide()  # type: ignore[call-arg]
    n, d, tile = x.shape[0], x.shape[1], total.size
    for begin in range(0, n, tile):
        width = tile if begin + tile <= n else n - begin
        for j in range(width):
            sign = 1.0 if chosen[begin + j] == 1 else -1.0
            for i in range(d):
                columns[i, j] = sign * x[begin + j, i]
            columns[d, j] = sign
        for k in range(theta.shape[0]):
            factor = theta[k, d]
            for j in range(width):
                total[j] = factor * columns[d, j]
            for i in range(d):
                factor = theta[k, i]
                for j in range(width):
                    total[j] += factor * columns[i, j]
            for j in range(width):
                value = total[j]
                u = _exp(-abs(value))
                low = 0.0 if value >= 0.0 else value  # NaN stays NaN
                out[k, begin + j] = low - 2.0 * _artanh(u / (2.0 + u))
