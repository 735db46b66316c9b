"""Scores of the recorded policies: what chance made of their actions, as control variates.

Importance weights against behaviour probabilities that are *estimated* from the recorded actions
are less noisy than against the known ones: some actions were taken more often than their
probability says, and such weights take the surplus out. Estimate, for instance, by

    mu_eta(a|s) = mu(a|s) exp(eta_a . x(s)) / sum_b mu(b|s) exp(eta_b . x(s))

with one Newton step from eta = 0, the known policy mu, on the likelihood of its actions,

    eta_k = M_k S_k,   M_k = (F_k + I / A)^-1,   S_k = sum of the scores (1[a] - mu) x of policy k,

F_k = sum of (diag(mu) - mu mu') x x'. The ridge I / A is worth one more visit with the known
probabilities (a visit of a uniform policy adds that much to F). To first order, weights against
mu_eta change an estimate with influence values psi into the mean of psi_i - h_i,

    h_i = n g_k . M_k s_i,   g_k = sum_j,t pay_j,t rho_k P_k,t / mixture_t S_k,t(j),

s_i the score of episode i of policy k, S_k,t(j) the score of policy k over the first steps of
episode j up to t, pay_j,t what step t adds to the estimate beyond its mean: psi less its regression
on scores, whose mean is 0, with slopes from all episodes through their shares in the mixture. This
module computes h_i, and leaves what episode i itself adds out of g_k: then h_i has the mean 0 but
for what the episodes share through weights and M_k. Weights against mu_eta itself were tried; where
actions are rare and visits few they are far from linear, and biased.

x(s) are features of the state: one for each state where observations are whole numbers, else 1 and
the standardised numbers z with tanh z; all times gamma^t, since late steps matter as little to the
slopes as to the return. They need not be those of the policy, which is asked for `probs` alone.
Policies without it, and actions that are not numbered, have no score: h_i is 0.

References: Rosenbaum (1987), Model-based direct adjustment; Hanna, Niekum & Stone (2019),
Importance sampling policy evaluation with an estimated behavior policy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arrays import FloatArray, IntArray, episode_ids
from ope_gym.batches import Tree
from ope_gym.data.trajectories import Trajectories
from ope_gym.policies import FinitePolicy
from ope_gym.weights.behaviours import Behaviours, gather_plans
from ope_gym.weights.formula import chunks_of

_FAR = 10.0  # standard deviations at which a standardised number is clipped
_WIDEST = 64  # numbers of an observation; of larger ones, such as images, only 1 is a feature
_GATHERED = 1 << 12  # inverses copied at once


class Scores:
    """The scores of the recorded policies: S steps, n trajectories, A actions, d features.

    A block is a policy and a cell of states (a single cell, unless each state is a feature), with
    an M of its own.

    Args:
        data: the trajectories.
        behaviours: theirs.
        discount: (S,) gamma^t, which the features are multiplied by; steps at 0 do not count.
    """

    def __init__(
        self,
        data: Trajectories,
        behaviours: Behaviours,
        discount: FloatArray,
    ) -> None:
        self._data, self._behaviours = data, behaviours
        self._kept = discount > 0
        self._policies, self._n_actions = _scored(data, behaviours.policies)
        self._cells, features = state_features(data.observations)
        self._x = np.ascontiguousarray(features.T * discount)
        self._stride = int(self._cells.max()) + 1
        acted = data.policy_ids.astype(np.int64)
        self._keys, self._block = np.unique(acted * self._stride + self._cells, return_inverse=True)
        self._own, self._surplus = np.zeros((2, self._n_actions, data.n_steps))
        for p in self._policies:
            mine = np.flatnonzero(acted == p)
            self._own[:, mine], self._surplus[:, mine] = self._ask(p, mine)
        self._inverse = self._inverses()

    def predicted(self, pay: FloatArray) -> FloatArray:
        """Return h (n,), what the scores predict of each trajectory's influence value.

        Args:
            pay: what each kept step adds to the estimate beyond its mean; their sum over a
                trajectory is its influence value over n.
        """
        weight, slopes = self._slopes(pay)
        trajectories, everywhere = len(self._data), slice(None)
        key = episode_ids(self._data.offsets) * self._keys.size + self._block
        segments, segment = np.unique(key, return_inverse=True)
        score = self._sums(segment, self._surplus, everywhere, segments.size)
        block = segments % self._keys.size
        own = self._sums(segment, self._surplus * weight, everywhere, segments.size)
        found = np.empty(segments.size)
        for first in range(0, segments.size, _GATHERED):
            some = slice(first, first + _GATHERED)
            solved = np.einsum("qij,qj->qi", self._inverse[block[some]], score[some])
            found[some] = np.sum((slopes[block[some]] - own[some]) * solved, axis=1)
        return np.asarray(
            trajectories * np.bincount(segments // self._keys.size, found, trajectories)
        )

    def _inverses(self) -> FloatArray:
        """Return M (B, A d, A d), the inverses of F + I / A."""
        size, blocks = self._n_actions * len(self._x), self._keys.size
        information = np.zeros((blocks, self._n_actions, len(self._x), size))
        for a, probs in enumerate(self._own):
            spread = -probs * self._own
            spread[a] += probs
            for i, x in enumerate(self._x):
                information[:, a, i] = self._sums(self._block, spread * x, slice(None), blocks)
        information = information.reshape(blocks, size, size)
        return np.asarray(np.linalg.inv(information + np.eye(size) / self._n_actions), np.float64)

    def _slopes(self, pay: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the part of g (S,) that each step's own score is given, and g (B, A d)."""
        data, offsets = self._data, self._data.offsets.astype(np.int64, copy=False)
        full = np.zeros(data.n_steps)
        full[self._kept] = pay
        log_rho = np.log(np.maximum(self._behaviours.counts, 1e-300) / len(data))
        used, rows = self._behaviours.policies, self._behaviours.rows(data)
        own, slopes = np.zeros(data.n_steps), np.zeros(self._inverse.shape[:2])
        for begin, end in chunks_of(offsets, rows.shape[0]):
            here = slice(int(offsets[begin]), int(offsets[end]))
            inside = offsets[begin : end + 1] - here.start
            shares = _shares(_running(rows.block(here.start, here.stop), inside), log_rho)
            ahead = _running((shares * full[here])[:, ::-1], inside[-1] - inside[::-1])[:, ::-1]
            table = gather_plans(ahead, self._behaviours, data.steps[here])
            for p in self._policies:
                weight = table[int(np.searchsorted(used, p))]
                block, known = self._blocks(p, here)
                _, surplus = self._ask(p, here)
                slopes += self._sums(block, surplus * weight * known, here, self._keys.size)
                mine = data.policy_ids[here] == p
                own[here][mine] = weight[mine]
        return own, slopes

    def _sums(self, index: IntArray, values: FloatArray, rows: slice, size: int) -> FloatArray:
        """Return (size, A d) sums of values (A, m) times features, over the rows of each index."""
        columns = [np.bincount(index, v * x, size) for v in values for x in self._x[:, rows]]
        return np.stack(columns, axis=1)

    def _blocks(self, policy: int, rows: slice) -> tuple[IntArray, NDArray[np.bool_]]:
        """Return the block of each step for a policy, and whether it ever acted there."""
        wanted = policy * self._stride + self._cells[rows]
        block = np.minimum(np.searchsorted(self._keys, wanted), self._keys.size - 1)
        return block, self._keys[block] == wanted

    def _ask(self, policy: int, rows: slice | IntArray) -> tuple[FloatArray, FloatArray]:
        """Return mu and 1[a] - mu, each (A, m), of a policy at some steps."""
        probs = np.asarray(
            self._policies[policy].probs(batches.take(self._data.observations, rows)),
            dtype=np.float64,
        ).T
        chosen = np.asarray(self._data.actions)[rows].astype(np.int64)
        surplus = -probs
        surplus[chosen, np.arange(chosen.size)] += 1.0
        return probs, surplus


def state_features(observations: Tree) -> tuple[IntArray, FloatArray]:
    """Return the cell (n,) of each state, and features (n, d) that are fitted in every cell."""
    n = batches.length(observations)
    seen = [np.asarray(leaf).reshape(n, -1) for leaf in batches.leaves(observations)]
    cell, one = np.zeros(n, dtype=np.int64), np.ones((n, 1))
    kinds = {leaf.dtype.kind for leaf in seen}
    if not kinds <= set("iubf") or sum(leaf.shape[1] for leaf in seen) > _WIDEST:
        return cell, one
    if "f" not in kinds:
        return batches.distinct(observations), one
    flat = np.hstack([leaf.astype(np.float64) for leaf in seen])
    deviation = flat.std(axis=0)
    varied = deviation > 0
    z = (flat[:, varied] - flat[:, varied].mean(axis=0)) / deviation[varied]
    z = np.clip(z, -_FAR, _FAR)
    return cell, np.hstack([one, z, np.tanh(z)])


def _scored(data: Trajectories, used: IntArray) -> tuple[dict[int, FinitePolicy], int]:
    """Return the policies that have a score, by number, and the number of actions."""
    actions, found = data.actions, dict[int, FinitePolicy]()
    if not (isinstance(actions, np.ndarray) and actions.shape == (data.n_steps,)):
        return found, 1
    if actions.dtype.kind not in "iub" or int(actions.min()) < 0:
        return found, 1
    first, size = batches.take(data.observations, slice(0, 1)), 0
    for p in used.tolist():
        policy = data.policies[p]
        if isinstance(policy, FinitePolicy):
            width = np.shape(policy.probs(first))[1]
            size = size or width
            if width == size > int(actions.max()):
                found[p] = policy
    return found, max(size, 1)


def _running(values: FloatArray, offsets: IntArray) -> FloatArray:
    """Return the running sums of (K, m) inside each trajectory."""
    from ope_gym import kernels

    result = np.empty(values.shape)
    for row, out in zip(values, result, strict=True):
        kernels.cumulate(np.ascontiguousarray(row), 0, offsets.size - 1, offsets, out)
    return result


def _shares(prefixes: FloatArray, log_rho: FloatArray) -> FloatArray:
    """Return (K, m) rho_k P_k / sum_j rho_j P_j."""
    logs = prefixes + log_rho[:, None]
    logs -= logs.max(axis=0)
    np.exp(logs, out=logs)
    logs /= logs.sum(axis=0)
    return logs
