"""Snapshots of Stable-Baselines3 policies, and the reasons why some cannot be had."""

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

from ope_gym.policies.closed_form import Policy
from ope_gym.policies.mlp import EpsilonGreedyMlp, GaussianMlp, SoftmaxMlp
from ope_gym.policies.network import ACTIVATIONS, Network, Standardiser
from ope_gym.policies.torch import TorchPolicy

__all__ = ["actor_module", "normaliser", "refuse", "snapshot"]

_NOISE = "its policy is deterministic and explores by added noise, whose density is not known"
_REASONS = {
    "SAC": "its policy changes at every step, and its squashed densities are not recorded",
    "TD3": _NOISE,
    "DDPG": _NOISE,
}


def refuse(model: Any) -> None:
    """Raise for a model of which the probabilities of actions cannot be had, with the reason."""
    name = type(model).__name__
    if not isinstance(model, OnPolicyAlgorithm | DQN):
        why = _REASONS.get(name, "how it chooses its actions is not known here")
        raise TypeError(f"OPECallback with {name}: {why}. PPO, A2C and DQN can be evaluated")
    if getattr(model, "use_sde", False):
        raise ValueError(
            f"OPECallback with {name}(use_sde=True): gSDE keeps one noise matrix over many steps, "
            "so that actions depend on each other, and the product of their densities is not the "
            "density of the episode. Train with use_sde=False"
        )
    policy, seen, chosen = model.policy, model.observation_space, model.action_space
    if hasattr(policy, "lstm_actor"):
        raise ValueError(
            f"OPECallback with {name}: the actions of a recurrent policy depend on a hidden state "
            "that is not in the observation. Use a policy without memory, or stack frames"
        )
    if isinstance(seen, spaces.Dict):
        raise ValueError(
            f"OPECallback with the observation space {seen}: MultiInput policies are not "
            "supported. Flatten it with gymnasium.wrappers.FlattenObservation"
        )
    if isinstance(model, OnPolicyAlgorithm) and not isinstance(policy, ActorCriticPolicy):
        raise TypeError(f"OPECallback with the policy {type(policy).__name__}: not known here")
    if not isinstance(chosen, spaces.Discrete | spaces.Box):
        raise ValueError(
            f"OPECallback with the action space {chosen}: only Discrete and Box are supported"
        )
    if isinstance(model, DQN) and _dqn_layers(model) is None:
        raise ValueError(
            f"OPECallback with DQN and {type(policy).__name__}: of DQN only MlpPolicy is supported"
        )


def normaliser(model: Any) -> VecNormalize | None:
    """The VecNormalize that stands between the environment and the policy, if any does."""
    env: VecNormalize | None = model.get_vec_normalize_env()
    if env is None or not env.norm_obs:
        return None
    outermost: object = model.get_env()
    if outermost is not env:
        raise ValueError(
            f"the training env is {type(outermost).__name__} around VecNormalize: what it "
            "does to normalised observations would have to be part of the policy. Put "
            "VecNormalize outermost"
        )
    return env


def snapshot(model: Any, *, epsilon: float | None = None) -> Policy:
    """The policy of a model as it is now, a function of the observations before VecNormalize.

    Networks of linear layers are kept as numbers that a file holds completely. Others (images, own
    feature extractors) are copied as a torch module; see `actor_module` for reading their files.

    Args:
        model: PPO, A2C or DQN.
        epsilon: Of DQN; by default its exploration rate, 1 before it learns.
    """
    refuse(model)
    if isinstance(model, DQN):
        layers = _dqn_layers(model)
        assert layers is not None  # else refused
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
    return GaussianMlp(network, _numbers(policy.log_std))


def actor_module(model: Any) -> nn.Module:
    """The module of which `snapshot` copies the numbers where it cannot take single layers.

    `TorchPolicy.restore(stored, actor_module(model))` brings a policy back from a file, with any
    model of that architecture.
    """
    return _Actor(model.policy, _standardiser(model))


class _Actor(nn.Module):
    """Observations before VecNormalize to the distribution of actions."""

    def __init__(self, policy: Any, standardiser: Standardiser | None) -> None:
        super().__init__()
        actor = _without_critic(policy)  # modules are shared until TorchPolicy copies them
        actor.__dict__.pop("optimizer", None)
        actor.action_dist = copy.copy(policy.action_dist)
        actor.action_dist.distribution = None  # tensors of the last training step, not copyable
        self.actor = actor
        self.standardised = standardiser is not None
        if standardiser is not None:
            self.clip = standardiser.clip
            self.register_buffer("mean", torch.tensor(standardiser.mean))
            self.register_buffer("scale", torch.tensor(standardiser.scale))

    def forward(self, observations: torch.Tensor) -> Any:
        if self.standardised:
            scaled = (observations - self.mean) / self.scale  # type: ignore[operator]
            observations = scaled.clamp(-self.clip, self.clip).float()
        return self.actor.get_distribution(observations).distribution


def _without_critic(policy: Any) -> Any:
    """A shallow copy with the modules that `get_distribution` needs, each under one name.

    A policy with methods of its own may need any of them, and keeps all.
    """
    actor, kind = copy.copy(policy), type(policy)
    actor._modules = dict(policy._modules)  # the copy shares the one of the policy
    own = any(
        getattr(kind, name) is not getattr(ActorCriticPolicy, name)
        for name in ("get_distribution", "_get_action_dist_from_latent")
    )
    if own:
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
        tuple((_numbers(layer.weight), _numbers(layer.bias)) for layer in linear),
        activation,
        _standardiser(model),
        int(space.n) if isinstance(space, spaces.Discrete) else 0,
    )


def _standardiser(model: Any) -> Standardiser | None:
    env = normaliser(model)
    if env is None:
        return None
    statistics: Any = env.obs_rms
    scale = np.sqrt(statistics.var + env.epsilon)
    return Standardiser(np.array(statistics.mean), np.array(scale), float(env.clip_obs))


def _actor_layers(model: Any) -> tuple[list[nn.Linear], str] | None:
    """Linear layers and activation of an actor that has nothing else; None if it has."""
    policy = model.policy
    plain = (
        type(policy) is ActorCriticPolicy
        and type(policy.mlp_extractor) is MlpExtractor
        and _is_flat(policy.pi_features_extractor, model.observation_space)
    )
    return _layers([*policy.mlp_extractor.policy_net, policy.action_net]) if plain else None


def _dqn_layers(model: Any) -> tuple[list[nn.Linear], str] | None:
    net = model.policy.q_net
    plain = _is_flat(net.features_extractor, model.observation_space)
    return _layers(list(net.q_net)) if plain else None


def _is_flat(extractor: nn.Module, space: Any) -> bool:
    """Whether the features are the numbers of the observation, or the one-hot code of a state."""
    known = isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiBinary)
    return type(extractor) is FlattenExtractor and known and not is_image_space(space)


def _layers(modules: list[nn.Module]) -> tuple[list[nn.Linear], str] | None:
    """The modules as linear layers with one activation between them; None if they are not."""
    between = modules[1::2]
    linear = [x for x in modules[::2] if isinstance(x, nn.Linear) and x.bias is not None]
    names = {type(module).__name__ for module in between} or {"Tanh"}
    plain = len(linear) == len(modules[::2]) and all(map(_is_default, between))
    name = names.pop()
    return (linear, name) if plain and not names and name in ACTIVATIONS else None


def _is_default(activation: nn.Module) -> bool:
    """Activations with a slope of their own are not those of the table."""
    return getattr(activation, "alpha", 1.0) == 1.0 and (
        getattr(activation, "negative_slope", 0.01) == 0.01
    )


def _numbers(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().numpy()
