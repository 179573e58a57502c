"""Central inference: the worker as executor, which steps environments with the actions that actors give it.

Each group asks for an action by a token, and is stepped when the token comes back; meanwhile the others go on. A token that
has been put always comes back, and what a group waits for otherwise, a snapshot, is waited for here: actors never wait for
the learner.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sb3_hts.exchange import Exchange, ExchangeLayout
from sb3_hts.protocol import Activity, Collect
from sb3_hts.rollout_runner import Host, RolloutRunner
from sb3_hts.shared_arrays import SharedBlock
from sb3_hts.storage import Half, RolloutStorage
from sb3_hts.tokens import TokenQueue
from sb3_hts.wrappers import Template


@dataclass(frozen=True)
class ExecutorProgram:
    """For workers that have somebody else act.

    :param layout: Of what is handed over.
    :param wrappers: Templates of the vectorized wrappers, from the innermost outwards.
    """

    layout: ExchangeLayout
    wrappers: tuple[Template, ...]

    def make_runner(self, blocks: Sequence[SharedBlock], queues: Sequence[TokenQueue], host: Host) -> RolloutRunner:
        """See :class:`~sb3_hts.rollout_runner.Program`; blocks: the storage's, the exchange's; queues: where to ask, where
        the answers are."""
        storage_block, exchange_block = blocks
        requests, answers = queues
        storage = RolloutStorage(self.layout.rollout, storage_block)
        return Executor(self.wrappers, storage, Exchange(self.layout, exchange_block), requests, answers, host)


class _Mailbox:
    """Has terminal observations valued by whoever acts next."""

    def __init__(self, exchange: Exchange, columns: slice) -> None:
        self._exchange = exchange
        self._first = columns.start

    def write_terminal_value(self, half: Half, t: int, row: int, observation: Any) -> None:
        for key, array in self._exchange.terminal.items():
            target = array[self._first + row, ...]  # an array even if it has one entry
            target[...] = np.reshape(observation if key is None else observation[key], target.shape)
        self._exchange.truncated[self._first + row] = True


class Executor(RolloutRunner):
    """See the module's docstring.

    :param wrappers: Templates of the vectorized wrappers.
    :param storage: Both halves; the observations in it are the state buffer.
    :param exchange: The action buffer, and what else is handed over.
    :param requests: Where to put the numbers of groups that need an action.
    :param answers: Where they come back.
    :param host: Of the worker.
    """

    def __init__(
        self,
        wrappers: Sequence[Template],
        storage: RolloutStorage,
        exchange: Exchange,
        requests: TokenQueue,
        answers: TokenQueue,
        host: Host,
    ) -> None:
        self._exchange = exchange
        self._requests = requests
        self._answers = answers
        self._n_asked: int
        self._held: list[int]
        self._n_published: int
        super().__init__(storage.layout, wrappers, storage, host)
        size = host.groups[0].num_envs
        self._first_group = host.groups[0].columns.start // size

    def _critic_of(self, columns: slice) -> _Mailbox:
        return _Mailbox(self._exchange, columns)

    def _run(self, request: Collect, half: Half) -> None:
        self._n_asked, self._held, self._n_published = 0, [], 1
        for index, member in enumerate(self._members):
            self._exchange.truncated[member.columns] = False  # a cancellation may have left some
            self._ask(index, request, half)
        while self._n_asked or self._held:
            for index in self._await_answers(request, half):
                self._go_on(index, request, half)

    def _ask(self, index: int, request: Collect, half: Half) -> None:
        """Ask for what the group needs next: an action, or the values of its last observations."""
        if self._host.channel.is_cancelled(request.rollout):
            return
        t = self._steps_done[index]
        if t < self._n_steps:
            if t * request.n_snapshots // self._n_steps >= self._n_published:
                self._held.append(index)
                return
            self._host.generators.enter(index)
            self._members[index].read_extras(half, t)
        self._exchange.steps[self._first_group + index] = t
        self._requests.put(self._first_group + index)
        self._n_asked += 1

    def _await_answers(self, request: Collect, half: Half) -> list[int]:
        """The groups whose tokens have come back; none if there is news from the learner."""
        channel = self._host.channel
        tokens = []
        if self._n_asked:
            channel.report(Activity.AWAITING_ACTION)
            tokens = self._answers.take(beside=channel.connection if self._held else None)
        if not tokens:
            channel.report(Activity.AWAITING_SNAPSHOT)
            published = channel.await_snapshot(request.rollout)
            self._n_published = self._n_published if published is None else published + 1
            held, self._held = self._held, []
            for index in held:
                self._ask(index, request, half)
        self._n_asked -= len(tokens)
        return [group - self._first_group for group in tokens]

    def _go_on(self, index: int, request: Collect, half: Half) -> None:
        """Step a group that has been given its actions."""
        t = self._steps_done[index]
        if t == self._n_steps or self._host.channel.is_cancelled(request.rollout):
            return
        started = time.monotonic()
        self._host.generators.enter(index)
        # Environments may keep their action
        self._step(index, half, t, self._exchange.env_actions[self._members[index].columns].copy())
        self._step_times.append(time.monotonic() - started)
        self._ask(index, request, half)
