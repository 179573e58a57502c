"""The pipeline: what ``HTSPPO`` and ``HTSA2C`` add to SB3's on-policy algorithms.

SB3's ``learn()`` alternates ``collect_rollouts()`` and ``train()``. Here ``collect_rollouts()`` waits for the rollout in
flight, replays it to the callbacks as if it were being collected now, launches the next one and returns; ``train()``
runs while that one is collected. Both halves of the design meet in two methods, :meth:`HTSOnPolicyAlgorithm.collect_rollouts`
and :meth:`HTSOnPolicyAlgorithm.train`; each ``learn()`` has a pipeline of its own (:class:`_Run`), which ends with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch as th
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, ConvertCallback, EvalCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.type_aliases import MaybeCallback
from stable_baselines3.common.vec_env import VecEnv

from sb3_hts.acting import Manner
from sb3_hts.arguments import check_arguments
from sb3_hts.collector import Collector, Plan, Position, Rollout, action_spec, as_observation, specs_of
from sb3_hts.collectors import make_collector
from sb3_hts.corrections import Collected, Correction, correct_rollout, gradient_at, noting_changes, shapes_of
from sb3_hts.errors import HTSError
from sb3_hts.heap import keeping_freed_memory
from sb3_hts.inference import Central, choose
from sb3_hts.lean_training import lean_training
from sb3_hts.policy_kinds import PolicyKind
from sb3_hts.publishing import publish_during
from sb3_hts.replay import Replay
from sb3_hts.seeding import draw_noise_key
from sb3_hts.storage import RolloutLayout
from sb3_hts.threads import beside_workers
from sb3_hts.vec_env import HTSVecEnv
from sb3_hts.wrappers import channels_last_keys, normalized_keys, unwrap

SAME_KIND_OF_ENV = (
    r"Training and eval env are not of the same type<sb3_hts\.vec_env\.HTSVecEnv object at \w+> "
    r"!= <stable_baselines3\.common\.vec_env\.(dummy|subproc)_vec_env"
)
"""What ``EvalCallback`` warns of if the environments to train with are an ``HTSVecEnv`` and those to evaluate with are not."""


@dataclass
class _Run:
    """The pipeline of one ``learn()``.

    :param collector: ``None`` if rollouts are collected by SB3's own loop.
    :param parameters: The policy's, listed once: walking through the modules takes longer than copying them.
    :param scope: What holds for the main process as long as the run lasts.
    :param behaviour: Values of the parameters that the rollout replayed last was collected with.
    :param end: Where its last step led; callbacks may let the model begin elsewhere.
    :param lag: Measured lag of that rollout, in updates.
    :param changed: Arrays of the buffer that a callback has changed at the end of that rollout.
    :param rewards: The buffer's rewards before returns were computed from them.
    :param observations: What was collected, for buffers that store something else; valid as long as ``behaviour``.
    :param shapes: Of the buffer's arrays.
    :param corrected: Whether the buffer has been corrected; some call ``train()`` more than once.
    :param n_gradient_steps: Optimizer steps of one update.
    :param n_rollouts: Rollouts replayed so far.
    """

    collector: Collector | None
    parameters: list[th.nn.Parameter]
    scope: ExitStack = field(default_factory=ExitStack)
    behaviour: Sequence[th.Tensor] = ()
    end: Position | None = None
    lag: float = 0.0
    changed: frozenset[str] = frozenset()
    rewards: Any = None
    observations: Any = None
    shapes: dict[str, Any] = field(default_factory=dict)
    corrected: bool = False
    n_gradient_steps: int = 1
    n_rollouts: int = 0


class HTSOnPolicyAlgorithm(OnPolicyAlgorithm):
    """Mixin over SB3's on-policy algorithms; to be named before the algorithm among the bases.

    Attributes saved with the model, all of plain types: ``policy_lag``, ``n_snapshots``, ``correction``, ``inference``,
    ``n_actors``, ``actor_device``, ``central_batch``, and the position in the noise stream.
    """

    corrections: ClassVar[dict[str, Correction]] = {}
    kind: ClassVar[PolicyKind] = PolicyKind()

    policy_lag: int
    n_snapshots: int
    correction: str
    # Those of files saved by earlier versions
    inference: str = "auto"
    n_actors: int = 1
    actor_device: str | None = None
    central_batch: str = "auto"

    _default_snapshots: int | None = None
    _noise_key: int | None = None
    _global_step: int = 0
    _n_trained: int = 0
    _run: _Run | None = None

    # --- arguments --------------------------------------------------------------------------------------------------

    def _setup_model(self) -> None:
        self._check_arguments()
        super()._setup_model()
        if self._noise_key is None:
            self._noise_key = draw_noise_key(None)

    def set_random_seed(self, seed: int | None = None) -> None:
        """Seed everything, the action noise included; as in SB3."""
        super().set_random_seed(seed)
        if seed is not None:
            self._noise_key = draw_noise_key(seed)

    def _check_arguments(self) -> None:
        # Here and not in __init__, because load(**kwargs) sets attributes without it
        check_arguments(self)

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_run"]

    # --- learn ------------------------------------------------------------------------------------------------------

    def _init_callback(self, callback: MaybeCallback, progress_bar: bool = False) -> BaseCallback:
        if type(self.env) is not HTSVecEnv or not _evaluates(callback):
            # Any change of filters makes Python show warnings again that it has shown
            return super()._init_callback(callback, progress_bar)
        with warnings.catch_warnings():
            # An HTSVecEnv takes the place of either, so that is no mistake
            warnings.filterwarnings("ignore", message=SAME_KIND_OF_ENV)
            return super()._init_callback(callback, progress_bar)

    def predict(self, observation: Any, *args: Any, **kwargs: Any) -> Any:
        """Act, as in SB3; an environment that does so while a thread collects gets the behaviour policy."""
        run = self._run
        result = None if run is None or run.collector is None else run.collector.predict_here(observation, *args, **kwargs)
        return super().predict(observation, *args, **kwargs) if result is None else result

    @contextmanager
    def _pipeline(self) -> Iterator[None]:
        """The scope of one ``learn()``: nothing that it started outlives it, whatever way it ends."""
        grad_enabled = th.is_grad_enabled()
        try:
            yield
        finally:
            # An interrupt may have hit the middle of a "no_grad" block
            th.set_grad_enabled(grad_enabled)
            run, self._run = self._run, None
            if run is not None:
                with run.scope:
                    self._end(run.collector)

    def _end(self, collector: Collector | None) -> None:
        if collector is None:
            return
        try:
            # A worker that failed has been reported already, or will be at the next use of the environments
            with suppress(HTSError):
                unfinished = collector.cancel()
                if unfinished is not None:
                    self._go_to(unfinished.end())
                    infos = unfinished.load_infos()
                    collector.note_episodes({place: info for place, info in infos.items() if unfinished.half.dones[place]})
        finally:
            collector.release()

    def _start_run(self, env: VecEnv, n_steps: int) -> _Run:
        plan = self._plan(env, n_steps)
        collector = make_collector(env, self.policy, plan, self.policy_lag > 0, self.inference)
        if collector is None:
            return _Run(None, [])
        if self.verbose >= 1:
            print(f"HTS: {collector.description}, policy lag {self.policy_lag}, correction {self.correction!r}.")
        with ExitStack() as scope:
            scope.enter_context(keeping_freed_memory())
            if self.policy_lag > 0:
                scope.enter_context(beside_workers(self.policy))
            return _Run(collector, list(self.policy.parameters()), scope.pop_all())

    def _plan(self, env: VecEnv, n_steps: int) -> Plan:
        assert self._noise_key is not None
        position = self._position()
        if len(position.episode_starts) != env.num_envs:
            raise ValueError(
                f"The model stopped in {len(position.episode_starts)} environments, but now there are {env.num_envs}: "
                "load it with force_reset=True, or learn() with reset_num_timesteps=True."
            )
        observations: Any = position.observations
        wrappers = unwrap(env)[0]
        # Not those of the space: VecNormalize gives other dtypes than it says
        by_key = observations if isinstance(observations, dict) else {None: observations}
        specs = specs_of(by_key, normalized_keys(wrappers))
        manner = Manner(
            actor_class=self.kind.actor_class,
            observations=specs,
            action_space=env.action_space,
            channels_last=channels_last_keys(wrappers),
            sde_sample_freq=self.sde_sample_freq if self.use_sde else None,
        )
        layout = RolloutLayout(
            n_steps=n_steps,
            n_envs=env.num_envs,
            observations=specs,
            action=action_spec(env.action_space, self.kind.integral),
            extras=self.kind.extras(self),
            memory=specs_of(position.memory),
        )
        return Plan(layout, manner, self.n_snapshots, self._noise_key, self._choose_inference())

    def _choose_inference(self) -> Central | None:
        """Who acts for the workers; ``None``: they do themselves."""
        actor_class = self.kind.actor_class
        return choose(self.inference, self.policy, actor_class, self.n_actors, self.actor_device, self.central_batch)

    def _position(self) -> Position:
        """Where the environments are, as far as the model knows."""
        assert self._last_obs is not None, "No previous observation was provided"
        assert self._last_episode_starts is not None
        return Position(self._last_obs, self._last_episode_starts, self.kind.recall(self))

    def _go_to(self, position: Position) -> None:
        """Counterpart of :meth:`_position`."""
        self._last_obs, self._last_episode_starts = position.observations, position.episode_starts
        self.kind.remember(self, position.memory)

    # --- collect ----------------------------------------------------------------------------------------------------

    def collect_rollouts(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        """Wait for the rollout in flight, replay it, launch the next one; arguments and result as in SB3.

        :raises WorkerError: If a worker failed.
        :raises ValueError: If ``n_rollout_steps`` is not ``n_steps`` of the model, whose workers collect whole rollouts.
        """
        if self._run is None:
            self._run = self._start_run(env, n_rollout_steps)
        run, collector = self._run, self._run.collector
        if collector is None:
            others = self.kind.loop_arguments(self)
            return super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps, **others)
        if n_rollout_steps != self.n_steps:
            raise ValueError(f"n_rollout_steps={n_rollout_steps} must be the model's n_steps={self.n_steps}.")
        self.policy.set_training_mode(False)
        rollout_buffer.reset()
        if not collector.in_flight:
            self._launch(run, collector, callback, n_rollout_steps, n_snapshots=1)
        rollout = collector.wait()
        run.end = rollout.end()
        completed = False
        try:
            completed = self._process(rollout, run, collector, env, callback, rollout_buffer)
        finally:
            if not completed:
                # The environments have finished the rollout, whatever the callbacks made of it
                self._go_to(run.end)
        return completed

    def _process(
        self,
        rollout: Rollout,
        run: _Run,
        collector: Collector,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: RolloutBuffer,
    ) -> bool:
        """Replay a rollout and launch the next; false if a callback stopped the training."""
        run.behaviour = rollout.parameters
        run.observations = as_observation({key: array[:-1] for key, array in rollout.half.observations.items()})
        run.lag = self._lag(run, rollout)
        if run.n_rollouts == 0 and self.verbose >= 1 and collector.advice is not None:
            print(f"HTS: {collector.advice}.")
        run.n_rollouts += 1
        n_steps = len(rollout.half.dones)
        ahead = self.policy_lag > 0 and self.num_timesteps + n_steps * env.num_envs < self._total_timesteps
        # Callbacks have their say before the next rollout starts. If there are none, the replay can wait instead
        replay_later = ahead and _is_silent(callback)
        if _is_silent(callback):
            assert run.end is not None
            self._go_to(run.end)
        if replay_later:
            self._launch(run, collector, callback, n_steps, self.n_snapshots)
        replay = Replay(rollout, self.policy, self.action_space, self.gamma, self.kind)
        collector.note_episodes({place: info for place, info in replay.telling_infos.items() if replay.dones[place]})
        # Logged at the end of the replay, so that what callbacks dump in between leaves it to the rollout's own row
        statistics = {
            "hts/policy_lag": run.lag,
            "hts/rollout_time": rollout.collect_time,
            "hts/wait_time": rollout.wait_time,
            "hts/overlap": max(0.0, 1 - rollout.wait_time / max(rollout.collect_time, 1e-9)),
        }
        completed = self._replay(run, replay, env, callback, rollout_buffer, statistics)
        if self._run is not run:  # a callback has called learn(), which ends this pipeline; the next rollout begins another
            return completed
        if completed and ahead and not replay_later:
            self._launch(run, collector, callback, n_steps, self.n_snapshots)
        return completed

    def _launch(self, run: _Run, collector: Collector, callback: BaseCallback, n_rollout_steps: int, n_snapshots: int) -> None:
        """Start the next rollout with the current parameters."""
        callback.on_rollout_start()
        collector.start(self._position(), self._global_step, n_snapshots, (self._n_trained, 0))
        self._global_step += n_rollout_steps

    def _lag(self, run: _Run, rollout: Rollout) -> float:
        """How old the policy was that collected a rollout, in updates, on average over its steps."""
        # A snapshot after g of G gradient steps is g / G of an update newer
        updates, gradient_steps = rollout.half.versions.reshape(-1, 2).mean(axis=0).tolist()
        return float(self._n_trained - updates - gradient_steps / max(run.n_gradient_steps, 1))

    def _replay(
        self,
        run: _Run,
        replay: Replay,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: RolloutBuffer,
        statistics: dict[str, float],
    ) -> bool:
        """Go through a rollout as SB3's ``collect_rollouts()`` does, with the same ``locals`` for callbacks.

        :param statistics: What to log at the end.
        :return: False if a callback stopped the training.
        """
        silent = _is_silent(callback)
        # Callbacks may look at the buffer, and change in place what goes into it
        filled = silent and replay.fill(rollout_buffer)
        note_all = type(self)._update_info_buffer is not BaseAlgorithm._update_info_buffer
        variables: dict[str, Any] = {
            "self": self,
            "env": env,
            "callback": callback,
            "rollout_buffer": rollout_buffer,
            "n_rollout_steps": replay.n_steps,
        }
        for t in range(replay.n_steps):
            self.num_timesteps += env.num_envs
            if filled:
                if note_all or t in replay.telling_steps:
                    self._update_info_buffer(replay.infos(t), replay.dones[t])
                rollout_buffer.pos += 1
                continue
            step = replay.variables(t)
            if not silent:
                variables.update(step)
                callback.update_locals(variables)
                if not callback.on_step():
                    return False
            self._update_info_buffer(step["infos"], replay.dones[t])
            replay.add_to(rollout_buffer, t, step)
            if not silent:
                self._go_to(replay.position(t + 1))
        for key, value in statistics.items():
            self.logger.record(key, value)
        run.rewards = rollout_buffer.rewards.copy()
        rollout_buffer.full = True
        rollout_buffer.compute_returns_and_advantage(last_values=replay.value_tensor(replay.n_steps), dones=replay.dones[-1])
        run.shapes, run.corrected = shapes_of(rollout_buffer), False
        if silent:
            run.changed = frozenset()
            return True
        if self.kind.tells_end:
            variables.update(replay.final_variables())
            callback.update_locals(variables)
        with noting_changes(rollout_buffer, self.kind) as changed:
            callback.on_rollout_end()
        run.changed = frozenset(changed)
        # As callbacks have left it
        run.end = replay.position(replay.n_steps)
        return True

    # --- train ------------------------------------------------------------------------------------------------------

    @property
    def _correction(self) -> Correction:
        return self.corrections[self.correction]

    def _n_gradient_steps(self) -> int:
        """Optimizer steps that one ``train()`` takes if nothing stops it."""
        return 1

    def train(self) -> None:
        """SB3's own update, on the rollout as corrected, while the next rollout is collected and fed with snapshots."""
        run = self._run
        if run is None or run.collector is None:
            super().train()
            return
        with lean_training(self.policy), self._publishing(run, run.collector):
            if run.lag > 0 and not run.corrected:
                assert run.end is not None
                run.corrected = True
                collected = Collected(run.observations, run.rewards, run.end, run.shapes)
                correct_rollout(self._correction, self.policy, self.rollout_buffer, collected, self.kind, run.changed)
            if run.lag > 0 and self._correction.gradient == "behaviour":
                with gradient_at(run.behaviour, run.parameters, self.policy):
                    super().train()
            else:
                super().train()

    @contextmanager
    def _publishing(self, run: _Run, collector: Collector) -> Iterator[None]:
        """Publish snapshots while the block takes its gradient steps, and what is left at its end."""
        run.n_gradient_steps = self._n_gradient_steps()
        with publish_during(self.policy.optimizer, collector, self._n_trained, run.n_gradient_steps):
            yield
        self._n_trained += 1
        collector.publish_rest((self._n_trained, 0))


def _evaluates(callback: Any) -> bool:
    """Whether an ``EvalCallback`` is among the given callbacks."""
    if isinstance(callback, (list, CallbackList)):
        return any(map(_evaluates, callback if isinstance(callback, list) else callback.callbacks))
    return isinstance(callback, EvalCallback) or _evaluates(getattr(callback, "callback", []))


def _is_silent(callback: BaseCallback) -> bool:
    """Whether the callback is the empty one that SB3 makes of ``callback=None``."""
    return type(callback) is ConvertCallback and callback.callback is None
