"""Check the rows that the user gets against those that the environments produced.

Each transition is delivered once, in the order of its episode; a break in that order must be explained by a row that
reports a loss, an exception, a reset by the user, or a counter of dropped fragments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from simulation.world import Produced, World

__all__ = ["Ledger", "View"]

LOSS_IN_STREAM_UNREPORTED = True
"""A worker lost with a fragment of a stream that was left is reported by an event only, not by a row of `step`."""

SAME_STEP, NEXT_STEP = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP


@dataclass(slots=True)
class View:
    """What the user knows about a slot."""

    last: Produced | None = None
    """The observation last seen."""
    has_ended: bool = False
    is_broken: bool = False
    """The last row was invalid, or replaced by an exception: either the first row of another environment follows, or
    the user must reset."""
    may_skip: bool = False
    """Rows may be missing, as reported: dropped fragments, or a call that an exception ended."""
    was_streamed: bool = False
    """A stream has requested the slot since its last row of `step` or of a rollout."""
    declared: int = 0
    """Number of environments in the world when an event last declared a loss of this slot."""


class Ledger:
    def __init__(self, world: World, mode: AutoresetMode, num_envs: int, vectors: list[list[int]]) -> None:
        self._world = world
        self._vectors = vectors
        """The slots of each vector environment; empty if there is none."""
        self.mode = mode
        self._lacks_rows = bool(vectors) and mode is NEXT_STEP and not world.steps_rows
        """Each reset within a fragment leaves a row at the end of its column that is not played."""
        self.views = [View() for _ in range(num_envs)]

    # -- single rows ------------------------------------------------------------------------------------------

    def reset(self, slots: list[int], obs: Any, seeds: list[int | None] | None) -> None:
        """Check the rows `obs` of a reset of these slots."""
        for row, slot in enumerate(slots):
            view, first = self.views[slot], self._see(slot, obs[row], "reset")
            self._need(first.t == 0, slot, f"reset() returned step {first.t} of an episode")
            if seeds is not None and seeds[slot] is not None:
                seed = self._world.envs[first.env].seed
                self._need(seed == seeds[slot], slot, f"reset with seed {seed}, the user said {seeds[slot]}")
            self._deliver(first, slot)
            view.last, view.has_ended, view.is_broken, view.may_skip = first, False, False, False

    def untouched(self, slots: list[int], obs: Any) -> None:
        """Check that a masked reset returns the last observations of the other slots again."""
        for slot in slots:
            last = self.views[slot].last
            if last is not None and not self.views[slot].may_skip and not self.views[slot].is_broken:
                self._need(obs[slot][0] == last.number, slot, f"shows {obs[slot][0]}, delivered was {last.number}")

    def step(self, slots: list[int], actions: Any, result: Any) -> None:
        """Check rows of `step` or `recv`."""
        obs, rewards, terminations, truncations, infos = result
        valid = infos.get("transition_valid")
        for row, slot in enumerate(slots):
            ended = bool(terminations[row] or truncations[row])
            action = None if actions is None or actions[row] is None else int(actions[row])
            if valid is not None and not valid[row]:
                self._need(rewards[row] == 0.0 and not terminations[row] and bool(truncations[row]), slot, "loss row")
                self._loss_row(slot, obs[row], infos, row)
            else:
                flags = (bool(terminations[row]), bool(truncations[row]))
                self._row(slot, obs[row], float(rewards[row]), flags, action, infos, row)
            self.views[slot].has_ended = ended and self.mode is not SAME_STEP
        self._check_infos(infos, slots)

    def _check_infos(self, infos: dict[str, Any], slots: list[int]) -> None:
        """Check that the infos of a row belong to this row."""
        if "number" in infos:
            for row, slot in enumerate(slots):
                last = self.views[slot].last
                if infos["_number"][row] and last is not None:
                    self._need(infos["number"][row] == last.number, slot, "the info of another row")

    def _row(
        self,
        slot: int,
        obs: Any,
        reward: float,
        flags: tuple[bool, bool],
        action: int | None,
        infos: dict[str, Any],
        row: int,
    ) -> None:
        view = self.views[slot]
        new = self._see(slot, obs, "step")
        ended = flags[0] or flags[1]
        if view.has_ended and self.mode is NEXT_STEP and (new.t == 0 or not view.may_skip):
            self._need(new.t == 0, slot, f"step {new.t} of an episode after one that ended")
            self._need(reward == 0.0 and not ended, slot, "a first row with a reward, or that ends an episode")
            self._deliver(new, slot)
            view.last, view.is_broken, view.may_skip = new, False, False
            return
        is_unreported = LOSS_IN_STREAM_UNREPORTED and view.was_streamed and self._is_lost(view)
        if (view.may_skip or view.is_broken or is_unreported) and new.t == 0 and not ended and reward == 0.0:
            # An exception reported the loss, or a fragment did whose last rows are invalid.
            last = view.last
            may_begin = view.may_skip and self._lacks_rows  # a fragment that was dropped ended before a reset
            is_lost = last is None or not self._world.envs[last.env].is_alive
            self._need(is_lost or may_begin, slot, f"{_of(last)} was not lost")
            self._deliver(new, slot)
            view.last, view.is_broken, view.may_skip = new, False, False
            return
        self._need(not view.is_broken or view.may_skip, slot, "a row after one that was lost, which is no first row")
        done = new
        if ended and self.mode is SAME_STEP:
            self._need(bool(infos["_final_obs"][row]), slot, "no final_obs")
            done = self._see(slot, infos["final_obs"][row], "final_obs")
            self._need(new.t == 0 and new.env == done.env, slot, "the first row of another environment")
            self._deliver(new, slot)
        self._transition(slot, view, done, reward, flags, action)
        view.last = new
        view.may_skip = view.is_broken = view.was_streamed = False

    def _transition(
        self, slot: int, view: View, done: Produced, reward: float, flags: tuple[bool, bool], action: int | None
    ) -> None:
        last = view.last
        self._need(done.t > 0, slot, f"the first row of an episode instead of a step, after {_of(last)}")
        skipped = view.may_skip and (last is None or (done.env >= last.env and done.before > last.number))
        follows = skipped or (last is not None and done.before == last.number)
        self._need(follows, slot, f"{_of(done)} does not follow {_of(last)}, which was delivered before")
        self._need(reward == done.number, slot, f"reward {reward} of another row than {done.number}")
        self._need(flags == (done.terminated, done.truncated), slot, f"flags {flags} of another row")
        if action is not None:
            self._need(action == done.action, slot, f"stepped with action {done.action}, the user said {action}")
        self._deliver(done, slot)

    def _loss_row(self, slot: int, obs: Any, infos: dict[str, Any], row: int) -> None:
        view = self.views[slot]
        last = view.last
        if view.may_skip and (last is None or self.mode is not SAME_STEP):
            last = view.last = self._see(slot, infos["final_obs"][row] if self.mode is SAME_STEP else obs, "step")
        assert last is not None
        is_known = not view.may_skip and not view.is_broken
        self._need(self._may_be_lost(slot, last), slot, f"a loss is reported, but {_of(last)} is there still")
        self._need(bool(infos["loss_reason"][row]), slot, "a loss without a reason")
        if self.mode is SAME_STEP:
            new = self._see(slot, obs, "step")
            self._need(new.t == 0 and new.env > last.env, slot, f"a loss is followed by {_of(new)}")
            final = infos["final_obs"][row]
            is_last = final[0] == last.number or not is_known
            self._need(is_last, slot, f"final_obs {final[0]} is not the last that was delivered, {last.number}")
            self._deliver(new, slot)
            view.last, view.is_broken = new, False
        else:
            self._need(
                obs[0] == last.number or not is_known, slot, f"a loss shows {obs[0]}, the last was {last.number}"
            )
            view.is_broken = True
        view.may_skip = False

    def _may_be_lost(self, slot: int, last: Produced) -> bool:
        """Return whether its environment is gone, or a vector that was rebuilt while another slot was in an episode."""
        beside = [view.last for its in self._vectors if slot in its for view in map(self.views.__getitem__, its)]
        return any(each is None or not self._world.envs[each.env].is_alive for each in (last, *beside))

    # -- fragments --------------------------------------------------------------------------------------------

    def fragment(self, batch: Any, is_stream: bool, may_be_late: bool) -> None:
        """Check the columns of a rollout, or of one item of a stream. `may_be_late`: some may have no row."""
        finals = {(int(t), int(c)): batch.final_obs[i] for i, (t, c) in enumerate(batch.final_at)}
        for column, slot in enumerate(batch.slots.tolist()):
            if may_be_late and batch.versions[0, column] < 0 and not batch.truncations[0, column]:
                self._late(batch, column, slot)
            else:
                self._column(batch, column, slot, finals, is_stream)
        self._need(not finals, -1, f"final observations of rows that did not end: {list(finals)}")
        for slot, t, total, length in zip(
            batch.episodes.slots.tolist(),
            batch.episodes.t.tolist(),
            batch.episodes.returns.tolist(),
            batch.episodes.lengths.tolist(),
            strict=True,
        ):
            column = batch.slots.tolist().index(slot)
            end = self._world.of_number(batch.rewards[t, column])
            self._need((end.total, end.t) == (total, length), slot, f"episode of {length} steps, {total} in all")

    def _late(self, batch: Any, column: int, slot: int) -> None:
        flags = (batch.valid, batch.terminations, batch.truncations, batch.episode_starts, batch.rewards)
        self._need(not any(values[:, column].any() for values in flags), slot, "a late column has rows")
        self._need(bool((batch.obs[:, column] == batch.last_obs[column]).all()), slot, "a late column has observations")

    def _column(self, batch: Any, column: int, slot: int, finals: dict[tuple[int, int], Any], is_stream: bool) -> None:
        view, steps = self.views[slot], len(batch.rewards)
        valid = batch.valid[:, column]
        if self._lacks_rows and not valid[0] and not batch.truncations[0, column]:
            self._unplayed(batch, column, slot, 0, view.last, view.has_ended or view.is_broken or view.may_skip)
            view.was_streamed = is_stream
            return
        if not valid[0]:
            self._invalid(batch, column, slot, 0, finals)
            return
        now = self._see(slot, batch.obs[0, column], "fragment")
        self._first(slot, view, now, bool(batch.episode_starts[0, column]))
        incarnation = self._world.envs[now.env].incarnation
        told = int(batch.incarnations[column])
        self._need(told == incarnation, slot, f"incarnation {told}, the environment is of {incarnation}")
        ended = False
        for t in range(steps):
            if self._lacks_rows and not valid[t] and not batch.truncations[t, column]:
                self._unplayed(batch, column, slot, t, now, ended)
                view.was_streamed = is_stream
                return
            if not valid[t]:
                view.last = now
                self._invalid(batch, column, slot, t, finals)
                return
            if t:
                self._need(bool(batch.episode_starts[t, column]) == (now.t == 0), slot, f"episode_starts in row {t}")
            done = self._world.of_number(batch.rewards[t, column])
            after = batch.obs[t + 1, column] if t + 1 < steps else batch.last_obs[column]
            self._fragment_row(batch, slot, t, column, now, done)
            ended = bool(batch.terminations[t, column] or batch.truncations[t, column])
            if not ended:
                self._need(after[0] == done.number, slot, f"row {t} is followed by {after[0]}, not {done.number}")
                now = done
                continue
            final = finals.pop((t, column), None)
            self._need(final is not None and final[0] == done.number, slot, f"final_obs of row {t} is another")
            is_real = done.terminated or done.truncated
            if not is_real:  # truncated because the slot moves to another node, or its vector environment fails
                is_last = t + 1 == steps or (self._lacks_rows and not valid[t + 1])
                self._need(is_last and not batch.terminations[t, column], slot, "an end that was none")
                now, view.is_broken = done, True
                continue
            now = self._see(slot, after, "fragment") if t + 1 == steps or valid[t + 1] else done
            if now is done and t + 1 == steps and self._lacks_rows and self._world.envs[done.env].is_alive:
                break  # its reset is the first step of the next fragment
            if now is not done:
                self._need(now.t == 0 and now.env == done.env, slot, f"row {t} ended and is followed by {_of(now)}")
                self._deliver(now, slot)
            elif t + 1 == steps:  # the environment failed in its reset
                self._need(not self._world.envs[done.env].is_alive, slot, f"no first row after {_of(done)}")
                view.is_broken = True
        view.last, view.has_ended, view.was_streamed = now, ended and now.t > 0, is_stream

    def _unplayed(self, batch: Any, column: int, slot: int, t: int, last: Produced | None, has_ended: bool) -> None:
        """Check the rows from t on, which the resets of a column have left; its episode may have begun."""
        view = self.views[slot]
        flags = (batch.valid, batch.terminations, batch.truncations, batch.episode_starts, batch.rewards)
        self._need(not any(values[t:, column].any() for values in flags), slot, "rows after those that were played")
        self._need(bool((batch.obs[t:, column] == batch.last_obs[column]).all()), slot, "observations not played")
        now = self._see(slot, batch.last_obs[column], "fragment")
        if last is None or now.number != last.number:
            self._need(now.t == 0 and has_ended, slot, f"{_of(now)} follows {_of(last)}")
            self._deliver(now, slot)
            has_ended = view.may_skip = view.is_broken = False
        view.last, view.has_ended = now, has_ended

    def _first(self, slot: int, view: View, now: Produced, starts: bool) -> None:
        last = view.last
        self._need(starts == (now.t == 0), slot, f"episode_starts={starts} at {_of(now)}")
        if last is not None and now.number == last.number and not view.is_broken:
            view.has_ended = False
            return
        gone = last is not None and not self._world.envs[last.env].is_alive and last.env < view.declared
        may_begin = last is None or view.has_ended or view.is_broken or view.may_skip or gone
        if now.t == 0:
            self._need(may_begin, slot, f"{_of(now)} after {_of(last)}, which had not ended")
        else:
            self._need(view.may_skip, slot, f"{_of(now)} after {_of(last)}: rows between them were not reported lost")
        self._deliver(now, slot)
        view.is_broken = view.may_skip = view.has_ended = False

    def _fragment_row(self, batch: Any, slot: int, t: int, column: int, now: Produced, done: Produced) -> None:
        self._need(done.slot == slot and done.t > 0, slot, f"row {t} has the reward of {_of(done)}")
        self._need(done.before == now.number, slot, f"row {t}: {_of(done)} does not follow {_of(now)}")
        self._need(int(batch.actions[t, column]) == done.action, slot, f"row {t} has another action")
        flags = (bool(batch.terminations[t, column]), bool(batch.truncations[t, column]))
        real = (done.terminated, done.truncated)
        self._need(flags == real or flags == (False, True), slot, f"row {t} has flags {flags}")
        self._deliver(done, slot)

    def _invalid(self, batch: Any, column: int, slot: int, t: int, finals: dict[tuple[int, int], Any]) -> None:
        view, world = self.views[slot], self._world
        last = view.last
        self._need(not batch.valid[t:, column].any(), slot, "valid rows after one that is not")
        self._need(not batch.rewards[t:, column].any(), slot, "invalid rows with rewards")
        self._need(bool(batch.truncations[t, column]), slot, "invalid rows whose first is not truncated")
        finals.pop((t, column), None)
        if last is not None:
            alive = world.envs[last.env].is_alive
            self._need(not alive, slot, f"rows are invalid, but {_of(last)} is there still")
        view.is_broken = True

    def _is_lost(self, view: View) -> bool:
        last = view.last
        return last is not None and not self._world.envs[last.env].is_alive and last.env < view.declared

    # -- inside -----------------------------------------------------------------------------------------------

    def _see(self, slot: int, obs: Any, where: str) -> Produced:
        found, last = self._world.of_number(obs[0]), self.views[slot].last
        wrong = ""  # its text is expensive, and this is called for each observation
        if found.slot != slot:
            wrong = f"{_of(found)}, of another slot"
        elif self._world.envs[found.env].is_evaluating:
            wrong = "of an evaluation"
        elif obs[1] != found.number % 5:
            wrong = f"a torn observation {obs}"
        elif last is not None and found.env < last.env:
            wrong = f"{_of(found)} after {_of(last)}"
        self._need(not wrong, slot, f"{where}: {wrong}")
        return found

    def _deliver(self, record: Produced, slot: int) -> None:
        self._need(not record.is_delivered, slot, f"{_of(record)} was delivered before")
        world = self._world
        if world.marked_from is not None and record.number > world.marked_from:
            self._need(record.mark == world.mark, slot, f"mark is {record.mark}, the user set {world.mark}")
        record.is_delivered = True

    def _need(self, is_true: bool, slot: int, text: str) -> None:
        if not is_true:
            self._world.fail(f"{self._world.call}, slot {slot}: {text}")

    def begin_stream(self) -> None:
        for view in self.views:
            view.was_streamed = True

    def give_up(self, slots: list[int]) -> None:
        """Allow gaps in these slots, whose rows are unknown because an exception ended a call."""
        for slot in slots:
            self.views[slot].may_skip = True


def _of(record: Produced | None) -> str:
    if record is None:
        return "nothing"
    return f"{record.number} (slot {record.slot}, environment {record.env}, episode {record.episode}, step {record.t})"


def logits(weight: float, obs: Any) -> Any:
    """Return the simulated policy's logits for observations [B, 2]."""
    features = np.nan_to_num(np.asarray(obs, dtype=np.float64)[..., 1])
    zeros = np.zeros_like(features)
    return np.stack([zeros, zeros + weight, features * 0.25 * weight], axis=-1).astype(np.float32)


def logprob(weight: float, obs: Any, action: int) -> float:
    values = logits(weight, obs).astype(np.float64)
    return float(values[action] - np.log(np.exp(values).sum()))
