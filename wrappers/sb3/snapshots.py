"""Frozen snapshots of Stable-Baselines3 policies, and the reasons why some cannot be taken."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import FlattenExtractor, MlpExtractor
from stable_baselines3.common.vec_env import VecNormalize
from torch import nn

from ope_gym.policies import EpsilonGreedyMlp, GaussianMlp, Policy, SoftmaxMlp
from ope_gym.policies.mlp import ACTIVATIONS, Network, Standardiser
from ope_gym.policies.torch import TorchPolicy

__all__ = [
    "actor_module",
    "observation_normaliser",
    "snapshot",
    "why_no_snapshot",
    "why_not_fixed",
    "why_only_fresh",
]

_NOISE = "its policy is deterministic and explores by added noise, whose density is not known"
_REASONS = {
    "SAC": "its policy changes at every step, and its squashed densities are not recorded",
    "TD3": _NOISE,
    "DDPG": _NOISE,
}


def why_no_snapshot(model: Any) -> str:
    """Return why the probabilities of a model's actions cannot be computed; "" if they can."""
    name = type(model).__name__
    if not isinstance(model, OnPolicyAlgorithm | DQN):
        return _REASONS.get(name, "ope_gym does not know how it chooses its actions")
    if getattr(model, "use_sde", False):
        return (
            "gSDE (use_sde=True) keeps one noise matrix over many steps, so that actions depend on "
            "each other, and the product of their densities is not the density of the episode"
        )
    policy, seen, chosen = model.policy, model.observation_space, model.action_space
    if hasattr(policy, "lstm_actor"):
        return (
            "the actions of a recurrent policy depend on a hidden state that is not in the "
            "observation"
        )
    if isinstance(seen, spaces.Dict):
        return f"its observations are dicts, {seen}, which only MultiInput policies understand"
    if isinstance(model, OnPolicyAlgorithm) and not isinstance(policy, ActorCriticPolicy):
        return f"{type(policy).__name__} is not derived from ActorCriticPolicy"
    if not isinstance(chosen, spaces.Discrete | spaces.Box):
        return f"its action space is {chosen}, and only Discrete and Box are known"
    if isinstance(model, DQN) and _dqn_layers(model) is None:
        return f"for DQN only MlpPolicy is known, not {type(policy).__name__}"
    return ""


def why_only_fresh(model: Any) -> str:
    """Return why the steps of the training say nothing of a model's policy; "" if they do."""
    why = why_no_snapshot(model)
    if why or isinstance(model, OnPolicyAlgorithm):
        return why
    return "it changes its policy every few steps, and explores by another one"


def observation_normaliser(model: Any) -> VecNormalize | None:
    """Return the VecNormalize between the environment and the policy, if there is one."""
    env: VecNormalize | None = model.get_vec_normalize_env()
    if env is None or not env.norm_obs:
        return None
    outermost: object = model.get_env()
    if outermost is not None and outermost is not env:  # a loaded model has no environment
        raise ValueError(
            f"the training env is {type(outermost).__name__} around VecNormalize: a snapshot of "
            "the policy cannot contain what it does to normalised observations. Put VecNormalize "
            "outermost"
        )
    return env


def why_not_fixed(model: Any) -> str:
    """Return why a model's policy changes during a rollout; "" if it does not."""
    if isinstance(model, DQN):
        return "DQN changes its policy every few steps and its exploration rate at every step"
    env = observation_normaliser(model)
    if env is not None and env.training:
        return (
            "VecNormalize updates its statistics at every step, and with them the policy as a "
            "function of the observation"
        )
    return ""


def snapshot(model: Any, *, epsilon: float | None = None) -> Policy:
    """Return a model's policy as it is now, a function of the observations before VecNormalize.

    Networks of linear layers are kept as arrays, which a file holds completely. Others (images, own
    feature extractors) are copied as a torch module; see `actor_module` for reading their files.

    Args:
        model: PPO, A2C or DQN.
        epsilon: Exploration rate for DQN; by default its current one, 1 before it learns.
    """
    why = why_no_snapshot(model)
    if why:
        raise ValueError(f"no snapshot of {type(model).__name__}: {why}")
    if isinstance(model, DQN):
        layers = _dqn_layers(model)
        assert layers is not None  # an error has been raised otherwise
        if epsilon is None:
            warm_up = model.num_timesteps < model.learning_starts
            epsilon = 1.0 if warm_up else float(model.exploration_rate)
        return EpsilonGreedyMlp(_network(model, *layers), epsilon)
    policy: Any = model.policy
    found = _actor_layers(model)
    if found is None:
        return TorchPolicy(actor_module(model))
    network = _network(model, *found)
    if isinstance(model.action_space, spaces.Discrete):
        return SoftmaxMlp(network)
    return GaussianMlp(network, _array(policy.log_std))


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
    actor, kind = copy.copy(policy), type(policy)
    actor._modules = dict(policy._modules)  # copy.copy shares the dict
    overridden = any(
        getattr(kind, name) is not getattr(ActorCriticPolicy, name)
        for name in ("get_distribution", "_get_action_dist_from_latent")
    )
    if overridden:
        return actor
    for name in ("features_extractor", "vf_features_extractor", "value_net"):
        actor._modules.pop(name, None)
    extractor = policy.mlp_extractor
    if type(extractor).forward_actor is MlpExtractor.forward_actor:
        actor._modules["mlp_extractor"] = extractor = copy.copy(extractor)
        extractor._modules = {"policy_net": extractor._modules["policy_net"]}
    return actor


def _network(model: Any, linear: list[nn.Linear], activation: str) -> Network:
    space = model.observation_space
    return Network(
        tuple((_array(layer.weight), _array(layer.bias)) for layer in linear),
        activation,
        _standardiser(model),
        int(space.n) if isinstance(space, spaces.Discrete) else 0,
    )


def _standardiser(model: Any) -> Standardiser | None:
    env = observation_normaliser(model)
    if env is None:
        return None
    statistics: Any = env.obs_rms
    scale = np.sqrt(statistics.var + env.epsilon)
    return Standardiser(np.array(statistics.mean), np.array(scale), float(env.clip_obs))


def _actor_layers(model: Any) -> tuple[list[nn.Linear], str] | None:
    """Return the linear layers and the activation of an actor; None if it has other parts."""
    policy = model.policy
    parts = [*policy.mlp_extractor.policy_net, policy.action_net] if _is_plain(model) else None
    return None if parts is None else _layers(parts)


def _is_plain(model: Any) -> bool:
    """Return whether networks take the observation itself, by SB3's own classes."""
    policy = model.policy
    return (
        type(policy) is ActorCriticPolicy
        and type(policy.mlp_extractor) is MlpExtractor
        and _is_flat(policy.pi_features_extractor, model.observation_space)
    )


def _dqn_layers(model: Any) -> tuple[list[nn.Linear], str] | None:
    net = model.policy.q_net
    plain = _is_flat(net.features_extractor, model.observation_space)
    return _layers(list(net.q_net)) if plain else None


def _is_flat(extractor: nn.Module, space: Any) -> bool:
    """Return whether the features are the observation itself, or the one-hot code of a state."""
    known = isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiBinary)
    return type(extractor) is FlattenExtractor and known and not is_image_space(space)


def _layers(modules: list[nn.Module]) -> tuple[list[nn.Linear], str] | None:
    """Return modules as linear layers and the activation between them; None if they differ."""
    between = modules[1::2]
    linear = [x for x in modules[::2] if isinstance(x, nn.Linear) and x.bias is not None]
    names = {type(module).__name__ for module in between} or {"Tanh"}
    plain = len(linear) == len(modules[::2]) and all(map(_has_default_slope, between))
    name = names.pop()
    return (linear, name) if plain and not names and name in ACTIVATIONS else None


def _has_default_slope(activation: nn.Module) -> bool:
    """Return whether an activation has the slope that `ACTIVATIONS` assumes."""
    return getattr(activation, "alpha", 1.0) == 1.0 and (
        getattr(activation, "negative_slope", 0.01) == 0.01
    )


def _array(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().numpy()
