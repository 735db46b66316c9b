"""Time SCOPE-RL's PDIS and SNPDIS: run with the python of its environment on a data folder."""

import numpy as np
import scope_rl
from peer_log import Calls, PeerLog, run_peer
from scope_rl.ope.discrete import PerDecisionImportanceSampling, SelfNormalizedPDIS


def prepare(log: PeerLog) -> Calls:
    """Flat arrays of equal episodes, with the target's distribution over all actions.

    The estimators look only at the chosen action, so two actions, the fewest that make a
    distribution, are the cheapest form: column 0 is the chosen action, column 1 all others.
    """
    length = log.common_length("SCOPE-RL")
    chosen = np.exp(log.target_log_probs)
    action_dist = np.stack([chosen, 1.0 - chosen], axis=1)  # (S, 2)
    action = np.zeros(len(chosen), dtype=np.int64)
    reward, pscore = log.rewards, np.exp(log.own_log_probs)

    def call(estimator: PerDecisionImportanceSampling) -> float:
        return estimator.estimate_policy_value(
            step_per_trajectory=length,
            action=action,
            reward=reward,
            pscore=pscore,
            evaluation_policy_action_dist=action_dist,
            gamma=1.0,
        )

    pdis, snpdis = PerDecisionImportanceSampling(), SelfNormalizedPDIS()
    return {"PDIS": lambda: call(pdis), "SNPDIS": lambda: call(snpdis)}


if __name__ == "__main__":
    run_peer("scope-rl", scope_rl.__version__, prepare)
