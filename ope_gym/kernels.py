"""Compiled loops over (behaviours, steps): prefix mixtures, sums of weights, influence values.

Everything here works on logs and on plain arrays that were validated at the edge. The kernels are
compiled by numba on first use and cached on disk; they release the GIL and allocate nothing.

Letters: S steps of n trajectories lie one after the other, trajectory i at offsets[i] up to
offsets[i + 1] - 1; T is the length of the longest; K behaviours k with shares rho_k = n_k / n.
P_k,t is the probability of the actions up to step t under behaviour k, a product of t + 1 numbers
that underflows after some hundred steps, so only logs are ever held. w_i,t is the importance weight
of trajectory i at step t, r_i,t its reward, gamma the discount.
"""

import math
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., object])

# Flags of LLVM's fast arithmetic. All of them at once ("fastmath=True") would assume that there is
# no NaN and no infinity, which the kernels look for, so each is named. "contract" lets a * b + c be
# one instruction with one rounding. "reassoc" lets a sum be added in another order, in four or
# eight partial sums at a time; it is for kernels that add along a trajectory, never for `_exp`,
# where it would simplify (y + _ROUND) - _ROUND to y and so undo the rounding.
_CONTRACT = {"contract"}
_ADD = {"contract", "reassoc"}

_NEGLIGIBLE = -40.0  # log of a probability p below which p / (1 - p) is p in float64

# Constants of `_exp` and `log_sigmoids`.
_BITS_700 = int(np.float64(700.0).view(np.int64))
_LOG2_E = 1.4426950408889634
_LN_2 = 0.6931471805599453
_ROUND = 6755399441055744.0  # 1.5 * 2**52: adding it leaves the nearest integer in the low bits


def _polynomial(series: Iterable[float], low: float, high: float) -> list[float]:
    """Return the 9 coefficients of a Chebyshev interpolant of a power series on [low, high]."""
    chebyshev, power = np.polynomial.chebyshev.Chebyshev, np.polynomial.Polynomial
    interpolant = chebyshev.interpolate(power(list(series)), 8, domain=[low, high])
    return [float(c) for c in interpolant.convert(kind=power).coef]


# exp(r) = 1 + r + r^2 q(r) on [-ln 2 / 2, ln 2 / 2], within 3e-16
_Q0, _Q1, _Q2, _Q3, _Q4, _Q5, _Q6, _Q7, _Q8 = _polynomial(
    (1 / math.factorial(i + 2) for i in range(16)), -_LN_2 / 2, _LN_2 / 2
)
# artanh(s) = s + s^3 a(s^2) for |s| <= 1/3, with a(z) = 1/3 + z/5 + z^2/7 + ..., in the same way
_A0, _A1, _A2, _A3, _A4, _A5, _A6, _A7, _A8 = _polynomial(
    (1 / (2 * i + 3) for i in range(40)), 0.0, 1 / 9
)


def compiled(fastmath: Iterable[str] = (), writes: Iterable[str] | None = None) -> Callable[[F], F]:
    """Compile on first use, keep the machine code on disk, release the GIL.

    numba compiles a function anew for each combination of arrays that may be written to and arrays
    that may not. Given `writes`, the arguments that the function writes to, all other arrays are
    passed as read-only ones: one compilation serves all.
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


# The mixture of prefix products is taken relative to the behaviour b that recorded the trajectory:
#
#     log sum_k rho_k P_k,t - log P_b,t = log sum_k rho_k exp(d_k,t)
#     d_k,t = log P_k,t - log P_b,t = sum_u<=t (log p_k,u - log p_b,u)
#
# The textbook subtracts the largest log P_k,t instead, which needs all K prefixes before the first
# exponential, and after 2,000 steps, when log P is -1,400 or less, every sum has lost three digits.
# The differences stay small wherever they matter. The term of b itself is rho_b, so the sum cannot
# underflow while b is part of the mixture; it overflows if another behaviour is exp(650) times as
# likely as the one that acted. Whoever calls looks at the sums and does such trajectories again.
#
# log_probs is (K, columns) with the steps of a behaviour side by side, so differences and
# exponentials are taken of several steps at a time. The prefix sums cannot be: each needs the one
# before. They are made for two behaviours at once, whose chains of additions the processor
# overlaps, in a tile of (2, 256) numbers that stays in the first-level cache. With four at once the
# constants of `_exp` would no longer fit the registers.


@compiled(_CONTRACT, writes=("own", "out"))
def own_ratios(
    target: Any, log_probs: Any, first: int, ids: Any, offsets: Any, own: Any, out: Any
) -> None:
    """Write log P_e - log P_b(i), the log weights of "basic", of some trajectories in a row.

    Args:
        target: (m,) log-probability of the taken action under the target.
        log_probs: (K, columns) the same under each behaviour.
        first: column of the first step.
        ids: own behaviour of each trajectory.
        offsets: Offsets of the trajectories, from 0 to m.
        own: (m,) written: log-probability of each step under the own behaviour.
        out: (m,) written: log P_e - log P_b(i).
    """
    # differences first: they are taken of several steps at a time. Sums wait for each other, and
    # would keep the next trajectory, of another row, from being read ahead.
    for i in range(offsets.size - 1):
        k = ids[i]
        for j in range(offsets[i], offsets[i + 1]):
            x = log_probs[k, np.uintp(first + j)]  # an unsigned index cannot count from the end
            own[np.uintp(j)] = x
            out[np.uintp(j)] = target[np.uintp(j)] - x
    if ids.size == own.size:  # of one step each
        return
    for i in range(offsets.size - 1):
        total, rest = 0.0, 0.0
        for j in range(offsets[i], offsets[i + 1]):
            x = out[np.uintp(j)]
            rest += _rest(total, x)
            total += x
            out[np.uintp(j)] = total + rest


@compiled(_CONTRACT, writes=("rows", "out"))
def relative_mixture(
    log_probs: Any, first: int, own: Any, starts: Any, rho: Any, limit: float, rows: Any, out: Any
) -> bool:
    """Write sum_k rho_k P_k,t / P_b,t of some steps in a row, in one pass over (K, steps).

    Args:
        log_probs: (K, columns) log-probability of the taken action under each behaviour.
        first: column of the first of the steps.
        own: (m,) log-probability of each step under the own behaviour, finite.
        starts: (m,) whether a trajectory begins at the step; (0,) if one begins at each.
        rho: (K,) share of the trajectories of each behaviour, and a 0.
        limit: largest log-probability allowed.
        rows: (2, tile) scratch.
        out: (m,) written.

    Returns:
        False if an entry is NaN or above the limit.
    """
    last, size, tile, bad = log_probs.shape[0] - 1, own.size, rows.shape[1], first - first
    for j in range(size):
        out[j] = 0.0
    for k in range(0, last + 1, 2):
        k1 = k + 1 if k < last else last  # beyond the last: that one again, with a share of 0
        share_a, share_b, a, b = rho[k], rho[k + 1], 0.0, 0.0
        for left in range(0, size, tile):
            width, column = tile, first + left
            if left + tile > size:
                width = size - left
            for j in range(width):
                m = own[np.uintp(left + j)]
                x, y = log_probs[k, np.uintp(column + j)], log_probs[k1, np.uintp(column + j)]
                bad += not ((x <= limit) & (y <= limit))
                rows[0, j] = x - m
                rows[1, j] = y - m
            if starts.size > 0:
                for j in range(width):
                    if starts[np.uintp(left + j)]:
                        a, b = 0.0, 0.0
                    a += rows[0, j]
                    b += rows[1, j]
                    rows[0, j] = a
                    rows[1, j] = b
            for j in range(width):
                out[np.uintp(left + j)] += share_a * _exp(rows[0, j]) + share_b * _exp(rows[1, j])
    return bad == 0


# The optimal scheme has f(p) = p / (1 - a p) where the fused one has f(p) = p. Split off the fused
# part, p / (1 - a p) = p + a p^2 / (1 - a p), and sum over behaviours:
#
#     sum_k rho_k f(P_k) = mixture + extra,     extra = sum_k rho_k a P_k^2 / (1 - a P_k)
#     log f(P_b) - log sum_k rho_k f(P_k) = log P_b - log(1 - a P_b) - log(mixture + extra)
#
# The mixture is known. A behaviour whose prefix has fallen below exp(-40) adds nothing to extra
# that float64 could hold beside its term in the mixture, and prefixes only fall: a loop ends there,
# mostly after a few steps. Near p = 1, 1 - a p would lose its digits, and
# 1 - a p = (1 - a) - a (p - 1) with p - 1 = expm1(log p) does not. Where a P_k is exactly 1, f is
# infinite: in the limit the behaviours with such a prefix (`certain`) share all the weight.


@compiled(_CONTRACT, writes=("extra", "certain", "prefix"))
def optimal_extra(
    log_probs: Any,
    first: int,
    offsets: Any,
    rho: Any,
    a: Any,
    extra: Any,
    certain: Any,
    prefix: Any,
) -> None:
    """Sum over behaviours what the optimal scheme adds to the mixture, at some steps in a row.

    Args:
        log_probs: (K, columns) log-probability of the taken action under each behaviour.
        first: column of the first of the steps.
        offsets: (m + 1,) of the trajectories, from 0.
        rho: (K,) or more, shares of the behaviours.
        a: (steps,) the reward parameter.
        extra: (steps,) zeros; written: sum_k rho_k a P_k^2 / (1 - a P_k) over those with a P_k < 1.
        certain: (steps,) zeros; written: summed shares of the behaviours with a P_k = 1.
        prefix: (T,) scratch.
    """
    for i in range(offsets.size - 1):
        start, length = offsets[i], offsets[i + 1] - offsets[i]
        for k in range(log_probs.shape[0]):
            share, running, stop = rho[k], 0.0, 0
            for t in range(length):
                j = np.uintp(start + t)
                running += log_probs[k, np.uintp(first + start + t)]
                if running < _NEGLIGIBLE:
                    break
                stop = t + 1
                prefix[t] = running
                if running > -0.1:
                    prefix[t] = -np.inf  # leaves nothing to add below
                    rest = (1.0 - a[j]) - a[j] * math.expm1(running)
                    if rest <= 0.0:
                        certain[j] += share
                    else:
                        extra[j] += share * a[j] * math.exp(2.0 * running) / rest
            for t in range(stop):
                j, p = np.uintp(start + t), _exp(prefix[t])
                extra[j] += share * a[j] * p * p / (1.0 - a[j] * p)


@compiled(writes=("out",))
def cumulate(values: Any, offsets: Any, out: Any) -> None:
    """Write the running sums of values (S,) inside each trajectory; see `prefix_sums`."""
    for i in range(offsets.size - 1):
        running, rest = 0.0, 0.0
        for j in range(offsets[i], offsets[i + 1]):
            rest += _rest(running, values[j])
            running += values[j]
            out[j] = running + rest


def prefix_sums(values: Any, offsets: Any) -> Any:
    """Return the running sums of values (S,) inside each trajectory, with the rounding added back.

    >>> prefix_sums(np.array([1.0, 2.0, 5.0]), np.array([0, 2, 3])).tolist()
    [1.0, 3.0, 5.0]
    """
    out = np.empty(values.size)
    cumulate(values, offsets, out)
    return out


# Sums over all trajectories at each step t, for weights known by their logs:
#
#     W_t = sum_i w_i,t,   sum_i w_i,t^2,   sum_i w_i,t r_i,t
#
# Weights may exceed the largest float or all underflow, so they are summed as exp(log w - M_t), M_t
# the largest log weight at step t (`peaks`): at least one term is 1, and none is larger.
#
# The sums run over all n trajectories, also over those that have ended: an ended episode pays 0 and
# keeps its last weight for ever. (Without them the normalised mean would be one of survivors only.)
# Adding the last weight to every later step would cost n T. Instead each trajectory adds it once,
# to the entry of its length, and running sums of these entries over t follow: n + T. The entries
# have a scale of their own, gone_t, the largest last log weight at length t: M_t itself will not
# do, since it can fall, and a sum that was scaled down to 0 does not come back.


@compiled(writes=("peak", "gone"))
def peaks(log_w: Any, log_cap: float, offsets: Any, peak: Any, gone: Any) -> None:
    """Find the largest log weight of each step, and of the last steps of each length.

    Args:
        log_w: (S,) log weights.
        log_cap: upper bound put on them (inf: none).
        offsets: (n + 1,).
        peak: (T,) -inf; written: the largest at t.
        gone: (T + 1,) -inf; written: the largest last one of the trajectories of t steps.
    """
    for i in range(offsets.size - 1):
        start, length = offsets[i], offsets[i + 1] - offsets[i]
        v = -np.inf
        for t in range(length):
            v = log_w[np.uintp(start + t)] if log_w[np.uintp(start + t)] < log_cap else log_cap
            if v > peak[t]:
                peak[t] = v
        if v > gone[length]:
            gone[length] = v


@compiled(_ADD, writes=("sums", "ended", "psi"))
def column_sums(
    log_w: Any,
    log_cap: float,
    rewards: Any,
    offsets: Any,
    steps: Any,
    gone: Any,
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
        steps: (2, T) M_t and gamma^t exp(M_t).
        gone: (T + 1,) as `peaks` writes it.
        sums: (4, T) zeros; written: sum w, sum w^2, sum w r over the trajectories that have not
            ended, with weights divided by exp(M_t); the last row is scratch.
        ended: (2, T + 1) zeros; written: sum w, sum w^2 of the last weights of the trajectories of
            t steps, divided by exp(gone_t).
        psi: (n,) written: sum_t gamma^t w_t r_t.
    """
    peak, pay, weight = steps[0], steps[1], sums[3]
    for i in range(offsets.size - 1):
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


@compiled(_ADD, writes=("suffix", "out"))
def segment_influence(
    log_w: Any,
    log_cap: float,
    rewards: Any,
    offsets: Any,
    steps: Any,
    ends: Any,
    suffix: Any,
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
        steps: (3, T) gamma^t n / W_t with W_t scaled by exp(-M_t), R_t, and M_t.
        ends: (m,) one past the last step of each stretch, rising; the last is T.
        suffix: (2, T) scratch.
        out: (m, n) written: sum over the stretch of factor_t w_i,t (r_i,t - R_t).
    """
    factor, mean, peak = steps[0], steps[1], steps[2]
    floor, tail = suffix[0], suffix[1]
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


@compiled(writes=("winners", "leads"))
def vote(values: Any, weights: Any, winners: Any, leads: Any) -> None:
    """Find the value of each column that has more than half of its weights; some value if none has.

    The vote of Boyer and Moore: different values cancel each other's weight, and what is left is of
    the majority. What the columns leave can vote in turn.

    Args:
        values: (rows, m).
        weights: (rows, m).
        winners: (m,) zeros; written: the values.
        leads: (m,) zeros; written: their weights that were not cancelled.
    """
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            same = values[i, j] == winners[j]
            left = leads[j] + weights[i, j] if same else leads[j] - weights[i, j]
            winners[j] = values[i, j] if left < 0.0 else winners[j]
            leads[j] = abs(left)


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
