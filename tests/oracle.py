"""The oracle: stock SB3 in one process, with nothing of this package but the seed of each (group, step).

A serial loop collects each rollout with the parameters of the schedule, one policy forward per group; stock buffers, GAE and
``train()`` do the rest. What HTSPPO and HTSA2C do with worker processes must come out the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper, VecNormalize

from sb3_hts.seeding import stream_seed

Tensors = list[th.Tensor]


def clone(policy: th.nn.Module) -> Tensors:
    return [tensor.detach().clone() for tensor in [*policy.parameters(), *policy.buffers()]]


@th.no_grad()
def load(policy: th.nn.Module, tensors: Tensors) -> None:
    for target, source in zip([*policy.parameters(), *policy.buffers()], tensors, strict=True):
        target.copy_(source)


RETURNS = object()


class Feed(VecEnvWrapper):
    """A few of the environments below; returns what it is given."""

    def __init__(self, venv: VecEnv, n_envs: int) -> None:
        super().__init__(venv)
        self.num_envs = n_envs
        self.data: Any = None

    def step_wait(self) -> Any:
        return self.data

    def reset(self) -> Any:
        return self.data


class GroupedNormalize(VecNormalize):
    """The rule for ``VecNormalize`` over several groups: within a rollout each group has a stock ``VecNormalize`` of its own,
    which begins with the merged statistics; at the end the moments of what each has seen are merged in group order."""

    group_size = 0

    def begin(self) -> None:
        self.parts = []
        for first in range(0, self.num_envs, self.group_size):
            part = VecNormalize(Feed(self.venv, self.group_size))
            own = ("venv", "num_envs", "class_attributes", "parts", "seen")
            shared = {name: value for name, value in vars(self).items() if name not in own}
            vars(part).update(deepcopy(shared))
            part.returns = self.returns[first : first + self.group_size]
            self.parts.append(part)
        self.seen = [{name: RunningMeanStd(epsilon=0, shape=rms.mean.shape) for name, rms in self.named()} for _ in self.parts]

    def named(self) -> list[tuple[Any, RunningMeanStd]]:
        rms: Any = vars(self).get("obs_rms", {})
        return [*(rms.items() if isinstance(rms, dict) else [(None, rms)]), (RETURNS, self.ret_rms)]

    def step_wait(self) -> Any:
        if "parts" not in vars(self):
            return super().step_wait()
        obs, rewards, dones, infos = self.venv.step_wait()
        self.old_obs, self.old_reward = obs, rewards
        results = []
        for group, part in enumerate(self.parts):
            rows = slice(group * self.group_size, (group + 1) * self.group_size)
            part.venv.data = cut(obs, rows), rewards[rows], dones[rows], infos[rows]
            before = part.returns
            results.append(part.step_wait())
            if self.training:
                for name, rms in self.seen[group].items():
                    if name is RETURNS:
                        rms.update(before * self.gamma + rewards[rows])
                    else:
                        rms.update(cut(obs, rows) if name is None else obs[name][rows])  # type: ignore[index, call-overload]
        outputs = list(zip(*results, strict=True))
        self.returns = np.concatenate([part.returns for part in self.parts])
        return join(outputs[0]), np.concatenate(outputs[1]), dones, infos

    def end(self) -> None:
        for moments in self.seen:
            for name, rms in self.named():
                news = moments[name]
                if news.count:
                    rms.update_from_moments(news.mean, news.var, news.count)
        del self.parts


def cut(observations: Any, rows: slice) -> Any:
    if isinstance(observations, dict):
        return {key: array[rows] for key, array in observations.items()}
    return observations[rows]


def join(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], dict):
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    return np.concatenate(parts)


class Oracle:
    """Trains like HTS-RL, the slow and obvious way.

    :param algorithm: Stock ``PPO``, ``A2C`` or another on-policy algorithm.
    :param env_fns: The environments.
    :param batch: ``"group"``: one forward per group. ``"full"``: one of all environments, whose distributions' parameters are
        then divided among the groups.
    :param wrap: Puts vectorized wrappers over the ``DummyVecEnv``; ``GroupedNormalize`` instead of ``VecNormalize``, unless
        there is one group.
    """

    def __init__(
        self,
        algorithm: Any,
        policy: Any,
        env_fns: Sequence[Callable[[], Any]],
        *,
        group_size: int,
        lag: int,
        n_snapshots: int,
        correction: str,
        seed: int,
        batch: str = "group",
        wrap: Callable[[VecEnv], VecEnv] = lambda env: env,
        **kwargs: Any,
    ) -> None:
        self.model = algorithm(policy, wrap(DummyVecEnv(list(env_fns))), seed=seed, **kwargs)
        # A policy for acting, apart from the learner's; its own initial parameters are never used
        state = th.get_rng_state()
        self.actor = self.make_actor()
        th.set_rng_state(state)
        self.actor.set_training_mode(False)
        self.group_size, self.lag, self.n_snapshots = group_size, lag, n_snapshots
        self.correction, self.seed, self.batch = correction, seed, batch
        self.global_step = 0

    def make_actor(self) -> Any:
        model = self.model
        return model.policy_class(
            model.observation_space, model.action_space, model.lr_schedule, use_sde=model.use_sde, **model.policy_kwargs
        )

    # What other policies need besides observations

    def act(self, group: int, obs: Any) -> Any:
        return self.actor(obs)

    def terminal_value(self, i: int, obs: Any) -> th.Tensor:
        return self.actor.predict_values(obs)[0]

    def last_values(self, dones: np.ndarray) -> th.Tensor:
        size = self.model.n_envs if self.batch == "full" else self.group_size
        return th.cat([self.actor.predict_values(obs) for obs in self.groups(self.model._last_obs, size)])

    def stored(self) -> dict[str, Any]:
        return {}

    def evaluated(self, first: int) -> dict[str, Any]:
        return {}

    def evaluated_last(self) -> dict[str, Any]:
        return {}

    def learn(self, n_updates: int) -> Any:
        model = self.model
        assert model.env is not None
        total = n_updates * model.n_steps * model.env.num_envs
        model._setup_learn(total)
        snapshots = [clone(model.policy)]
        for k in range(n_updates):
            behaviour = snapshots
            self.collect(behaviour)
            model._update_current_progress_remaining(model.num_timesteps, total)
            on_policy = self.lag == 0 or k == 0
            snapshots = self.train(behaviour[0], on_policy)
            if self.lag == 0:
                snapshots = [clone(model.policy)]
        return model

    # --- collection -------------------------------------------------------------------------------------------------

    @th.no_grad()
    def collect(self, snapshots: list[Tensors]) -> None:
        model, env = self.model, self.model.env
        assert env is not None
        model.rollout_buffer.reset()
        state = th.get_rng_state()
        normalize = model.get_vec_normalize_env()
        if isinstance(normalize, GroupedNormalize):
            normalize.begin()
        exploration: dict[int, Any] = {}
        for t in range(model.n_steps):
            load(self.actor, snapshots[t * len(snapshots) // model.n_steps])
            actions, values, log_probs = self.forward(t, exploration)
            self.global_step += 1
            new_obs, rewards, dones, infos = env.step(self.env_actions(actions))
            model.num_timesteps += env.num_envs
            for i, done in enumerate(dones):
                if done and infos[i]["TimeLimit.truncated"]:
                    terminal_obs = self.actor.obs_to_tensor(infos[i]["terminal_observation"])[0]
                    rewards[i] += model.gamma * self.terminal_value(i, terminal_obs)
            if isinstance(model.action_space, spaces.Discrete):
                actions = actions.reshape(-1, 1)
            starts = model._last_episode_starts
            model.rollout_buffer.add(model._last_obs, actions, rewards, starts, values, log_probs, **self.stored())
            model._last_obs, model._last_episode_starts = new_obs, dones
        last_values = self.last_values(dones)
        model.rollout_buffer.compute_returns_and_advantage(last_values=last_values, dones=dones)
        if isinstance(normalize, GroupedNormalize):
            normalize.end()
        th.set_rng_state(state)

    def groups(self, observations: Any, size: int) -> list[Any]:
        """Observations of so many environments each, as freshly allocated tensors."""
        parts = [cut(observations, slice(first, first + size)) for first in range(0, self.model.n_envs, size)]
        if isinstance(observations, dict):
            return [{key: tensor.clone() for key, tensor in obs_as_tensor(part, "cpu").items()} for part in parts]
        return [obs_as_tensor(part, "cpu").clone() for part in parts]

    def forward(self, t: int, exploration: dict[int, Any]) -> tuple[np.ndarray, th.Tensor, th.Tensor]:
        if self.batch == "full":
            return self.full_forward()
        results = []
        for group, obs in enumerate(self.groups(self.model._last_obs, self.group_size)):
            seed = stream_seed(self.seed, group, self.global_step)
            if self.model.use_sde:
                frequency = self.model.sde_sample_freq
                if t == 0 or (frequency > 0 and t % frequency == 0):
                    th.manual_seed(seed)
                    self.actor.reset_noise(self.group_size)
                    dist: Any = self.actor.action_dist
                    exploration[group] = (dist.exploration_mat, dist.exploration_matrices)
                dist = self.actor.action_dist
                dist.exploration_mat, dist.exploration_matrices = exploration[group]
            th.manual_seed(seed)
            results.append(self.act(group, obs))
        actions, values, log_probs = zip(*results, strict=True)
        return th.cat(actions).numpy(), th.cat(values), th.cat(log_probs)

    def full_forward(self) -> tuple[np.ndarray, th.Tensor, th.Tensor]:
        policy = self.actor
        (obs,) = self.groups(self.model._last_obs, self.model.n_envs)
        features = policy.extract_features(obs)
        if policy.share_features_extractor:
            latent_pi, latent_vf = policy.mlp_extractor(features)
        else:
            latent_pi, latent_vf = (
                forward(part)
                for forward, part in zip(
                    (policy.mlp_extractor.forward_actor, policy.mlp_extractor.forward_critic), features, strict=True
                )
            )
        parameters, others = policy.action_net(latent_pi), [policy.log_std] if hasattr(policy, "log_std") else []
        actions, log_probs = [], []
        for group in range(self.model.n_envs // self.group_size):
            th.manual_seed(stream_seed(self.seed, group, self.global_step))
            rows = slice(group * self.group_size, (group + 1) * self.group_size)
            distribution = policy.action_dist.proba_distribution(parameters[rows], *others)
            actions.append(distribution.get_actions())
            log_probs.append(distribution.log_prob(actions[-1]))
        shape = self.model.action_space.shape
        return th.cat(actions).reshape((-1, *shape)).numpy(), policy.value_net(latent_vf), th.cat(log_probs)

    def env_actions(self, actions: np.ndarray) -> np.ndarray:
        space = self.model.action_space
        if not isinstance(space, spaces.Box):
            return actions
        if self.actor.squash_output:
            return self.actor.unscale_action(actions)
        return np.clip(actions, space.low, space.high)

    # --- update -----------------------------------------------------------------------------------------------------

    def train(self, behaviour: Tensors, on_policy: bool) -> list[Tensors]:
        """One update; returns the snapshots that the next rollout is collected with."""
        model = self.model
        if not on_policy:
            self.correct()
        delayed = self.correction == "delayed_gradient" and not on_policy
        gradient_steps = 1
        if hasattr(model, "n_epochs"):
            size = model.n_steps * model.n_envs
            gradient_steps = model.n_epochs * -(-size // (model.batch_size or size))
        due = [i * gradient_steps // self.n_snapshots for i in range(self.n_snapshots)]
        iterates = [clone(model.policy)]
        step = model.policy.optimizer.step
        target = [parameter.detach().clone() for parameter in model.policy.parameters()]

        def patched_step(*args: Any, **kwargs: Any) -> Any:
            if delayed:
                with th.no_grad():
                    for parameter, value in zip(model.policy.parameters(), target, strict=True):
                        parameter.copy_(value)
            result = step(*args, **kwargs)
            iterates.append(clone(model.policy))
            return result

        model.policy.optimizer.step = patched_step  # type: ignore[method-assign]
        if delayed:
            with th.no_grad():
                for parameter, value in zip(model.policy.parameters(), behaviour, strict=False):
                    parameter.copy_(value)
        model._logger.name_to_value.clear()
        model.train()
        del model.policy.optimizer.step
        final = clone(model.policy)
        return [iterates[step] if step < len(iterates) else final for step in due]

    def correct(self) -> None:
        if self.correction in ("behaviour", "none", "delayed_gradient"):
            return
        model, buffer = self.model, self.model.rollout_buffer
        model.policy.set_training_mode(False)
        values, log_probs = self.evaluate()
        ratio = np.exp(log_probs - buffer.log_probs)
        if self.correction == "truncated_is":
            buffer.advantages = buffer.advantages * np.minimum(ratio, np.float32(1))
            return
        buffer.values, buffer.log_probs = values, log_probs
        with th.no_grad():
            obs: Any = model._last_obs
            copies = obs if isinstance(obs, dict) else {None: obs}
            copies = {key: th.tensor(array.copy(order="C")) for key, array in copies.items()}
            obs = copies if isinstance(obs, dict) else copies[None]
            last_values = model.policy.predict_values(obs, **self.evaluated_last())
        buffer.compute_returns_and_advantage(last_values=last_values, dones=model._last_episode_starts)
        if self.correction == "decoupled":
            centred = buffer.advantages - buffer.advantages.mean()
            buffer.advantages = centred * np.minimum(ratio, np.float32(2))

    @th.no_grad()
    def evaluate(self) -> tuple[np.ndarray, np.ndarray]:
        """Values and log-probabilities under the learner's policy, small ones, at most 1024 rows at a time."""
        model, buffer = self.model, self.model.rollout_buffer
        n_rows = model.n_steps * model.n_envs

        def rows(array: np.ndarray, first: int) -> th.Tensor:
            return th.tensor(array.reshape(n_rows, *array.shape[2:])[first : first + 1024])

        values, log_probs = [], []
        for first in range(0, n_rows, 1024):
            stored: Any = buffer.observations
            if isinstance(stored, dict):
                obs: Any = {key: rows(array, first) for key, array in stored.items()}
            else:
                obs = rows(stored, first)
            actions = rows(buffer.actions.astype(np.float32), first)
            if isinstance(model.action_space, spaces.Discrete):
                actions = actions.long().flatten()
            value, log_prob, _ = model.policy.evaluate_actions(obs, actions, **self.evaluated(first))
            values.append(value.flatten())
            log_probs.append(log_prob)
        shape = (model.n_steps, model.n_envs)
        return th.cat(values).numpy().reshape(shape), th.cat(log_probs).numpy().reshape(shape)
