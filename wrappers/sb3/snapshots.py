"""Freeze the policies of Stable-Baselines3 models, as functions of the environment's observations.

A snapshot contains the statistics of a VecNormalize. Those of PPO, A2C and DQN know the probability
of every action, so that episodes can be recorded and weighed with them; those of SAC, TD3, DDPG and
TQC say how they act, which is all that a free evaluation asks for.
"""

from __future__ import annotations

import copy
import math
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.noise import NormalActionNoise, VectorizedActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import FlattenExtractor, MlpExtractor
from stable_baselines3.common.vec_env import VecNormalize
from torch import nn

from ope_gym.arrays import FloatArray
from ope_gym.policies import EpsilonGreedyMlp, GaussianMlp, Policy, SoftmaxMlp
from ope_gym.policies.acting import ActingPolicy, Argmax, Mean, Squashed
from ope_gym.policies.mlp import ACTIVATIONS, Layer, Network, Standardiser
from ope_gym.policies.torch import TorchPolicy

__all__ = [
    "actor_module",
    "known_policy",
    "observation_normaliser",
    "snapshot",
    "why_no_snapshot",
    "why_not_fixed",
    "why_not_recorded",
]

Layers: TypeAlias = tuple[list[Layer], str]
"""Weights and biases, and the activation between them."""


# What can be known ---------------------------------------------------------------------------


def why_no_snapshot(model: Any) -> str:
    """Return why nothing but returns is known of how a model acts; "" if it can be frozen."""
    policy, seen, chosen = model.policy, model.observation_space, model.action_space
    if getattr(model, "use_sde", False):
        return (
            "gSDE (use_sde=True) keeps one noise matrix over many steps, so that actions depend on "
            "each other"
        )
    if hasattr(policy, "lstm_actor"):
        return (
            "the actions of a recurrent policy depend on a hidden state that is not in the "
            "observation"
        )
    if isinstance(seen, spaces.Dict):
        return "its observations are dicts"
    if not isinstance(chosen, spaces.Discrete | spaces.Box):
        return f"its action space is {chosen}, and only Discrete and Box are known"
    normaliser = model.get_vec_normalize_env()
    if normaliser is not None and model.get_env() not in (None, normaliser):
        return (
            f"the training env is {type(model.get_env()).__name__} around VecNormalize, and what "
            "it does to normalised observations is not known: put VecNormalize outermost"
        )
    if isinstance(model, OnPolicyAlgorithm):
        derived = isinstance(policy, ActorCriticPolicy)
        return "" if derived else f"{type(policy).__name__} is not derived from ActorCriticPolicy"
    if not isinstance(model, OffPolicyAlgorithm):
        return "ope_gym does not know how it chooses its actions"
    if _off_policy_layers(model) is None:
        return f"{type(policy).__name__} has other networks than SB3's MlpPolicy"
    noise = _noise(model)
    if noise is None or (hasattr(getattr(policy, "actor", None), "latent_pi") and noise.any()):
        return f"the noise of {model.action_noise!r} is not independent from step to step"
    return ""


def why_not_recorded(model: Any) -> str:
    """Return why episodes cannot be recorded with the probabilities of actions; "" if they can."""
    why = why_no_snapshot(model)
    if not why and not isinstance(snapshot(model), Policy):
        why = f"{type(model).__name__} does not tell how probable its actions are"
    return why


def why_not_fixed(model: Any) -> str:
    """Return why a model's policy changes during a rollout; "" if it does not."""
    if not isinstance(model, OnPolicyAlgorithm):
        return f"{type(model).__name__} changes its policy every few steps"
    env = observation_normaliser(model)
    if env is not None and env.training:
        return (
            "VecNormalize updates its statistics at every step, and with them the policy as a "
            "function of the observation"
        )
    return ""


def observation_normaliser(model: Any) -> VecNormalize | None:
    """Return the VecNormalize between the environment and the policy, if there is one."""
    env: VecNormalize | None = model.get_vec_normalize_env()
    return env if env is not None and env.norm_obs else None


# Snapshots -----------------------------------------------------------------------------------


def snapshot(model: Any, *, deterministic: bool = False) -> ActingPolicy:
    """Return a model's policy as it is now, a function of the observations before VecNormalize.

    Networks of linear layers are kept as arrays, which a file holds completely. Others (images, own
    feature extractors) are copied as a torch module; see `actor_module` for reading their files.

    Args:
        model: Any algorithm of Stable-Baselines3 or sb3-contrib for which `why_no_snapshot` is "".
        deterministic: Whether to take its most probable action, or the mean.
    """
    why = why_no_snapshot(model)
    if why:
        raise ValueError(f"no snapshot of {type(model).__name__}: {why}")
    finite = isinstance(model.action_space, spaces.Discrete)
    if isinstance(model, OnPolicyAlgorithm):
        policy = _on_policy(model)
        if not deterministic:
            return policy
        return Argmax(policy) if finite else Mean(policy)
    layers = _off_policy_layers(model)
    assert layers is not None  # an error has been raised otherwise
    network = _network(model, layers)
    if finite:
        warm_up = model.num_timesteps < model.learning_starts
        epsilon = 1.0 if warm_up else float(model.exploration_rate)
        return EpsilonGreedyMlp(network, 0.0 if deterministic else epsilon)
    low, high = (np.float64(getattr(model.action_space, x)).ravel() for x in ("low", "high"))
    gaussian = hasattr(model.policy.actor, "latent_pi")
    return Squashed(network, low, high, None if gaussian else _noise(model), deterministic)


def known_policy(model: Any) -> Policy:
    """Return a snapshot that tells the probability of every action, or raise."""
    policy = snapshot(model)
    if isinstance(policy, Policy):
        return policy
    raise ValueError(
        f"{why_not_recorded(model)}, so recorded episodes cannot be weighed for it: OPECallback() "
        "values it while it trains"
    )


# On-policy -----------------------------------------------------------------------------------


def _on_policy(model: Any) -> SoftmaxMlp | GaussianMlp | TorchPolicy:
    layers = _actor_layers(model)
    if layers is None:
        return TorchPolicy(actor_module(model))
    network = _network(model, layers)
    if isinstance(model.action_space, spaces.Discrete):
        return SoftmaxMlp(network)
    return GaussianMlp(network, _array(model.policy.log_std))


def actor_module(model: Any) -> nn.Module:
    """Return the module that `snapshot` copies where it cannot take single layers.

    `TorchPolicy.restore(stored, actor_module(model))` restores a policy from a file, with any model
    of that architecture.
    """
    return _Actor(model.policy, _standardiser(model))


class _Actor(nn.Module):
    """Maps observations before VecNormalize to the distribution of actions."""

    def __init__(self, policy: Any, standardiser: Standardiser | None) -> None:
        super().__init__()
        actor = _without_critic(policy)
        actor.__dict__.pop("optimizer", None)
        actor.action_dist = copy.copy(actor.action_dist)
        actor.action_dist.distribution = None  # tensors of the last training step, not copyable
        self.actor = actor
        self.standardised = standardiser is not None
        if standardiser is not None:
            self.clip = standardiser.clip
            self.register_buffer("mean", torch.tensor(standardiser.mean))
            self.register_buffer("scale", torch.tensor(standardiser.scale))

    def forward(self, observations: torch.Tensor) -> Any:
        actor: Any = self.actor
        if self.standardised:
            scaled = (observations - self.mean) / self.scale  # type: ignore[operator]
            observations = scaled.clamp(-self.clip, self.clip).float()
        return actor.get_distribution(observations).distribution


def _without_critic(policy: Any) -> Any:
    """Return a shallow copy with only the modules that `get_distribution` needs, once each.

    A policy class that overrides these methods may need any module, and keeps all.
    """
    actor, names = copy.copy(policy), ("get_distribution", "_get_action_dist_from_latent")
    actor._modules = dict(policy._modules)  # copy.copy shares the dict
    if all(getattr(type(policy), x) is getattr(ActorCriticPolicy, x) for x in names):
        for name in ("features_extractor", "vf_features_extractor", "value_net"):
            actor._modules.pop(name, None)
    return actor


def _actor_layers(model: Any) -> Layers | None:
    """Return the layers of an actor whose networks take the observation itself, else None."""
    policy = model.policy
    plain = (
        type(policy) is ActorCriticPolicy
        and type(policy.mlp_extractor) is MlpExtractor
        and _is_flat(policy.pi_features_extractor, model.observation_space)
    )
    return _layers([*policy.mlp_extractor.policy_net, policy.action_net]) if plain else None


# Off-policy ----------------------------------------------------------------------------------


def _off_policy_layers(model: Any) -> Layers | None:
    """Return the layers that choose an off-policy model's actions; None if there are other parts.

    Networks are told apart by their parts, so that sb3-contrib need not be installed.
    """
    names = [x for x in ("q_net", "quantile_net", "actor") if hasattr(model.policy, x)]
    parts: Any = getattr(model.policy, names[0], None) if names else None
    ours = type(parts).__module__.startswith(("stable_baselines3.", "sb3_contrib."))
    if not ours or not _is_flat(parts.features_extractor, model.observation_space):
        return None
    if hasattr(parts, "q_net"):  # DQN
        return _layers(parts.q_net)
    if hasattr(parts, "quantile_net"):  # QR-DQN: its last layer can take the mean of the quantiles
        found = _layers(parts.quantile_net)
        if found is None:
            return None
        weights, bias = found[0].pop()
        shape = (parts.n_quantiles, int(model.action_space.n), -1)
        mean = (weights.reshape(shape).mean(axis=0), bias.reshape(shape[:2]).mean(axis=0))
        return [*found[0], mean], found[1]
    if not hasattr(parts, "latent_pi"):  # TD3, DDPG: the last module is the tanh
        return _layers(parts.mu[:-1])
    mean_, spread = (_layers([*parts.latent_pi, x]) for x in (parts.mu, parts.log_std))  # SAC, TQC
    if mean_ is None or spread is None:
        return None
    both = tuple(np.concatenate(x) for x in zip(mean_[0][-1], spread[0][-1], strict=True))
    return [*mean_[0][:-1], both], mean_[1]  # type: ignore[list-item]


def _noise(model: Any) -> FloatArray | None:
    """Return the deviation of normal noise on squashed actions; None for noise of another kind."""
    size = math.prod(model.action_space.shape or ())
    noise = getattr(model, "action_noise", None)
    if isinstance(noise, VectorizedActionNoise):
        noise = noise.base_noise
    if noise is None:
        return np.zeros(size)
    if type(noise) is not NormalActionNoise or np.any(noise._mu):
        return None
    return np.broadcast_to(np.asarray(noise._sigma, dtype=np.float64), (size,))


# Networks ------------------------------------------------------------------------------------


def _network(model: Any, layers: Layers) -> Network:
    space = model.observation_space
    n_states = int(space.n) if isinstance(space, spaces.Discrete) else 0
    return Network(tuple(layers[0]), layers[1], _standardiser(model), n_states)


def _standardiser(model: Any) -> Standardiser | None:
    env = observation_normaliser(model)
    if env is None:
        return None
    statistics: Any = env.obs_rms
    scale = np.sqrt(statistics.var + env.epsilon)
    return Standardiser(np.array(statistics.mean), np.array(scale), float(env.clip_obs))


def _is_flat(extractor: nn.Module, space: Any) -> bool:
    """Return whether the features are the observation itself, or the one-hot code of a state."""
    known = isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiBinary)
    return type(extractor) is FlattenExtractor and known and not is_image_space(space)


def _layers(modules: Any) -> Layers | None:
    """Return linear layers and the activation between them; None if there is anything else."""
    modules = list(modules)
    linear = [x for x in modules[::2] if isinstance(x, nn.Linear) and x.bias is not None]
    between = modules[1::2]
    names = {type(module).__name__ for module in between} or {"Tanh"}
    plain = len(linear) == len(modules[::2]) and all(map(_has_default_slope, between))
    name = names.pop()
    if not plain or names or name not in ACTIVATIONS:
        return None
    return [(_array(layer.weight), _array(layer.bias)) for layer in linear], name


def _has_default_slope(activation: nn.Module) -> bool:
    """Return whether an activation has the slope that `ACTIVATIONS` assumes."""
    return getattr(activation, "alpha", 1.0) == 1.0 and (
        getattr(activation, "negative_slope", 0.01) == 0.01
    )


def _array(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().numpy()
