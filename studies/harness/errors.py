"""Describe errors of estimators over runs: mean square, bias, spread, paired comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym.arrays import FloatArray, IntArray
from studies.harness.claims import LIMIT, SAME, TAIL, Evidence
from studies.harness.markdown import amount

RESAMPLES = 4000
LEVELS = (5.0, 50.0, 95.0)


def describe(errors: FloatArray, noise: FloatArray, covered: NDArray[np.bool_]) -> dict[str, Any]:
    """Summarise errors of E estimators in R runs.

    Args:
        errors: (R, E) estimate − true value.
        noise: (R,) variance of the true value where it is simulated; it is subtracted from mean
            squares and variances, since it is no error of an estimator.
        covered: (R, E) whether the interval of the estimate contains the true value.
    """
    runs = len(errors)
    shares = resample(runs)  # (B, R)
    squares = errors**2 - noise[:, None]
    mse = squares.mean(axis=0)
    again = shares @ squares  # (B, E)
    spread = errors.var(axis=0, ddof=1) - noise.mean() if runs > 1 else mse * math.nan
    batches = np.stack([batch.mean(axis=0) for batch in np.split(squares, _cuts(runs))])
    return {
        "mse": mse,
        "mse_error": standard_errors(squares),
        "mse_percentiles": np.percentile(again, LEVELS, axis=0).T,  # (E, 3)
        "rmse": root(mse),
        "rmse_percentiles": root(np.percentile(again, LEVELS, axis=0).T),
        "runs": runs,
        "bias": errors.mean(axis=0),
        "bias_error": standard_errors(errors),
        "deviation": root(spread),
        "median": np.median(np.abs(errors), axis=0),
        "coverage": covered.mean(axis=0),
        "largest_share": largest_share(errors),
        "batch_rmse": root(batches),  # (batches, E)
        "batch_size": len(np.split(squares, _cuts(runs))[0]),
        "pairs": _pairs(errors, squares, again),
    }


def _pairs(errors: FloatArray, squares: FloatArray, again: FloatArray) -> dict[str, FloatArray]:
    """Compare row with column, (E, E) each: differences of MSE, log ratios of RMSE, shares of runs.

    The standard error of a log ratio is from a paired bootstrap: both MSEs are of the same
    resampled runs.
    """
    log = 0.5 * _log(again)
    ratio, mse = log[:, :, None] - log[:, None], squares.mean(axis=0)
    difference = squares[:, :, None] - squares[:, None]
    size = np.abs(errors)
    alone = len(errors) < 2
    return {
        "difference": difference.mean(axis=0),
        "difference_error": standard_errors(difference),
        "log_ratio": 0.5 * (_log(mse)[:, None] - _log(mse)),
        "log_ratio_error": ratio.mean(axis=0) * math.nan if alone else ratio.std(axis=0),
        "larger": (size[:, :, None] > size[:, None]).mean(axis=0),
    }


def standard_errors(values: FloatArray) -> FloatArray:
    """Return standard errors of the means over the first axis; NaN for a single run."""
    if len(values) < 2:
        return np.full(values.shape[1:], math.nan)
    return np.asarray(values.std(axis=0, ddof=1) / math.sqrt(len(values)))


def mean_and_error(values: FloatArray) -> FloatArray:
    """Return means over the first axis and their standard errors, stacked."""
    return np.stack([values.mean(axis=0), standard_errors(values)])


def root(values: FloatArray) -> FloatArray:
    """Return the square root, or NaN below 0, where the noise of the true value hides the error."""
    return np.sqrt(np.where(values >= 0, values, math.nan))


def largest_share(values: FloatArray) -> FloatArray:
    """Return the share of the largest square in the sum of squares over the first axis."""
    squares = values**2
    return np.asarray(squares.max(axis=0) / np.maximum(squares.sum(axis=0), 1e-300))


def tail(share: float) -> str:
    """Return "tail", as a reason to decide nothing, if one run has too large a share of squares."""
    return "tail" if share > TAIL else ""


def unbiased(
    where: str, found: dict[str, Any], names: Sequence[str], shown: Sequence[str], value: float
) -> tuple[Evidence, ...]:
    """Return the evidence that biases are 0, compared with the value that is estimated."""
    rows = []
    for name in shown:
        i = names.index(name)
        share = found["largest_share"][i]
        rows.append(
            Evidence.same(
                f"{where}: {name}",
                found["bias"][i],
                found["bias_error"][i],
                value,
                open=tail(share),
                note=f"the largest run has {share:.0%} of the squares; margin "
                f"{amount(SAME * abs(value))}",
            )
        )
    return tuple(rows)


def larger_rmse(
    where: str, found: dict[str, Any], names: Sequence[str], pairs: Sequence[tuple[str, str]]
) -> tuple[Evidence, ...]:
    """Return the evidence that ln(RMSE(a) / RMSE(b)) > 0 for each pair (a, b).

    Squares of heavy-tailed errors have no useful standard error, hence the logarithm. With a tail
    the standard error of the logarithm is too small as well: then the share of runs in which the
    error of a is the larger one must point the same way, and is the evidence. A tail of a itself
    never speaks against the claim, because it only hides how large the RMSE of a is.
    """
    rows, made = found["pairs"], []
    for a, b in pairs:
        i, j = names.index(a), names.index(b)
        log, share = rows["log_ratio"][i][j], rows["larger"][i][j]
        largest = max(found["largest_share"][i], found["largest_share"][j])
        note = (
            f"RMSE {amount(found['rmse'][i])} and {amount(found['rmse'][j])}; the error of {a} is "
            f"the larger one in {share:.0%} of the runs; the largest run has "
            f"{found['largest_share'][i]:.0%} and {found['largest_share'][j]:.0%} of the squares"
        )
        if tail(largest):
            error = math.sqrt(max(share * (1 - share), 1 / found["runs"]) / found["runs"])
            agree = (share - 0.5) * log > 0 and abs(share - 0.5) > LIMIT * error
            agree = agree and (log > 0 or not tail(found["largest_share"][i]))
            evidence = Evidence(
                f"{where}: {a} > {b}, share of runs − ½",
                share - 0.5,
                error,
                note=note,
                open="" if agree else "tail",
            )
        else:
            error = rows["log_ratio_error"][i][j]
            evidence = Evidence(f"{where}: {a} > {b}", log, error, note=note)
        made.append(evidence)
    return tuple(made)


def larger_mse(
    where: str, found: dict[str, Any], names: Sequence[str], pairs: Sequence[tuple[str, str]]
) -> tuple[Evidence, ...]:
    """Return the evidence that MSE(a) − MSE(b) > 0 for each pair (a, b)."""
    rows, made = found["pairs"], []
    for a, b in pairs:
        i, j = names.index(a), names.index(b)
        made.append(
            Evidence(
                f"{where}: {a} > {b}",
                rows["difference"][i][j],
                rows["difference_error"][i][j],
                note=f"{100 * rows['difference'][i][j] / found['mse'][j]:+.1f} % of MSE({b})",
                open=tail(max(found["largest_share"][i], found["largest_share"][j])),
            )
        )
    return tuple(made)


def resample(runs: int) -> FloatArray:
    """Return the share of each run in each bootstrap resample, (B, R); always the same draws."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(runs, size=(RESAMPLES, runs)) + runs * np.arange(RESAMPLES)[:, None]
    counts = np.bincount(drawn.ravel(), minlength=RESAMPLES * runs)
    return counts.reshape(RESAMPLES, runs) / runs


def _cuts(runs: int) -> IntArray:
    """Return where batches begin: 400 runs each, as in the paper, or eighths below 800 runs."""
    size = 400 if runs >= 800 else max(runs // 8, 1)
    return np.arange(size, runs - size + 1, size)


def _log(values: FloatArray) -> FloatArray:
    """Return the logarithm, or NaN where it is undefined."""
    return np.log(np.where(values > 0, values, math.nan))
