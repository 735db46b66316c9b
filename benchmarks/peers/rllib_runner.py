"""Time RLlib's IS and WIS: run with the python of its environment on a data folder."""

from typing import Any

import numpy as np
import ray
from gymnasium.spaces import Box, Discrete
from peer_log import Calls, PeerLog, run_peer
from ray.rllib.offline.estimators import ImportanceSampling, WeightedImportanceSampling
from ray.rllib.policy.policy import Policy
from ray.rllib.policy.sample_batch import SampleBatch


class LoggedTarget(Policy):
    """A target policy whose log-probabilities are already known: they are the observations.

    RLlib asks a policy for them inside `estimate`; looking them up costs it next to nothing.
    """

    def __init__(self) -> None:
        super().__init__(Box(-np.inf, 0.0, (1,), np.float64), Discrete(2), {})

    def compute_actions(self, *args: Any, **kwargs: Any) -> Any:
        """Never called by the estimators."""
        raise NotImplementedError("LoggedTarget only evaluates recorded actions.")

    def compute_log_likelihoods(self, actions: Any, obs_batch: Any, **kwargs: Any) -> Any:
        """Return the log-probabilities stored in the observation column."""
        return obs_batch[:, 0]


def prepare(log: PeerLog) -> Calls:
    """One SampleBatch of all steps, with the episode number that RLlib splits it by."""
    batch = SampleBatch(
        {
            SampleBatch.OBS: log.target_log_probs[:, np.newaxis],
            SampleBatch.ACTIONS: np.zeros(len(log.rewards), dtype=np.int64),
            SampleBatch.ACTION_PROB: np.exp(log.own_log_probs),
            SampleBatch.REWARDS: log.rewards,
            SampleBatch.EPS_ID: np.repeat(np.arange(len(log.lengths)), log.lengths),
        }
    )
    # For one-step data RLlib has a vectorised path; longer episodes go through Python loops.
    split = bool(log.lengths.max() > 1)
    target = LoggedTarget()
    plain = ImportanceSampling(target, gamma=1.0)
    weighted = WeightedImportanceSampling(target, gamma=1.0)
    return {
        "IS": lambda: plain.estimate(batch, split_batch_by_episode=split)["v_target"],
        "WIS": lambda: weighted.estimate(batch, split_batch_by_episode=split)["v_target"],
    }


if __name__ == "__main__":
    run_peer("rllib", ray.__version__, prepare)
