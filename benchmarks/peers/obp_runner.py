"""Time OBP's balanced IPW for several loggers: run with its environment's python on one-step data.

`MultiLoggersBalancedInverseProbabilityWeighting` is the one that divides by the average of the
loggers. `BalancedInverseProbabilityWeighting` is something else: a classifier makes its weights.
"""

import numpy as np
import obp
from obp.ope import MultiLoggersBalancedInverseProbabilityWeighting
from peer_log import Calls, PeerLog, run_peer


def prepare(log: PeerLog) -> Calls:
    """Logged bandit feedback with the average logger's probability of the chosen action.

    As for SCOPE-RL two actions are the cheapest form: column 0 is the chosen one.
    """
    if log.common_length("OBP") != 1:
        raise ValueError(
            f"OBP takes one-step data, these episodes have {log.lengths[0]} steps: write data "
            "with T = 1."
        )
    chosen = np.exp(log.target_log_probs)
    action_dist = np.stack([chosen, 1.0 - chosen], axis=1)[:, :, np.newaxis]  # (n, 2, 1)
    action = np.zeros(len(chosen), dtype=np.int64)
    reward, pscore_avg = log.rewards, log.shares @ np.exp(log.behaviour_log_probs)
    estimator = MultiLoggersBalancedInverseProbabilityWeighting()

    def balanced() -> float:
        return estimator.estimate_policy_value(
            reward=reward, action=action, action_dist=action_dist, pscore_avg=pscore_avg
        )

    return {"BalancedIPW": balanced}


if __name__ == "__main__":
    run_peer("obp", obp.__version__, prepare)
