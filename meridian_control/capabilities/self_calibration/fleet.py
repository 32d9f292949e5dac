"""Records, calibrates, rolls out, watches and withdraws over all engines and replicas; the replica that leads decides.

All code runs on the server's event loop; the calibration runs in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections import Counter, deque
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from meridian.v1 import fleet_pb2

from meridian_control.capabilities.self_calibration import rule as rules
from meridian_control.capabilities.self_calibration import shown
from meridian_control.capabilities.self_calibration.episodes import Episode, LeftOut, Newest, can_be_kept
from meridian_control.capabilities.self_calibration.in_order import InOrder
from meridian_control.capabilities.self_calibration.learner import MAX_EPISODES, Learner, Rule, State
from meridian_control.capabilities.self_calibration.stream import Recorder, drop
from meridian_control.capabilities.self_calibration.watch import Watch
from meridian_control.common.errors import (
    EtagMismatch,
    MeridianError,
    NotLeading,
    PolicyError,
    RolloutActive,
    StoreUnavailable,
)
from meridian_control.common.look import percent
from meridian_control.common.metric_entry import gauge
from meridian_control.fleet.left_behind import LeftBehind
from meridian_control.fleet.part import FleetPart, Shown
from meridian_control.policy.effects import any_self_calibrates, self_calibrates
from meridian_control.policy.model import Who
from meridian_control.rollout.state import By
from meridian_control.rollout.state import State as RolloutState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from meridian_control.capabilities.self_calibration.store import EpisodeStore
    from meridian_control.engine.part import Stream
    from meridian_control.engine.totals import Totals
    from meridian_control.fleet.connection import Connection
    from meridian_control.fleet.fleet import Fleet
    from meridian_control.fleet.part import Beside, Metric
    from meridian_control.policy.model import Policy
    from meridian_control.policy.store import StoredRevision
    from meridian_control.rollout.driver import Rollouts

logger = logging.getLogger(__name__)

# Most episodes that wait for the store, and most bytes of them, because one may have a hundred thousand.
MAX_WAITING, MAX_WAITING_BYTES = 10_000, 64 << 20
# Most traffics that are kept, those that came last, because clients may choose SLO classes.
MAX_TRAFFICS = 64
# Number of new episodes of a traffic after which its rule in force is judged again.
JUDGED_EVERY = 20
# Time without a recorded request after which a rule is withdrawn, because nothing shows its harm, or no engine serves
# the model any more.
UNUSED = timedelta(days=30)
# Most bytes of episodes that a calibration reads, unless a proof needs more of them, because each byte takes some fifty
# in its process.
MAX_READ_BYTES = 8 << 20
# Seconds after which a calibration is given up, and those between one that has failed and the next.
PATIENCE_S = REST_S = 600.0
# Seconds for which the end of a replica waits for the store, and for which the page shows the same rows.
END_S, SHOWN_S = 2.0, 5.0
# How the process ends if `end` ends it, or if systemd or Ctrl-C ends all processes of the control plane at once.
TOLD_TO_END = -signal.SIGTERM, -signal.SIGINT
WORKER = "meridian_control.offline.self_calibration"
# Each thread of numpy's linear algebra takes memory of its own.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
STATES = "meridian_self_calibrations"
CONNECTED = fleet_pb2.CONNECTION_STATE_CONNECTED
ENTRIES = (
    gauge(
        STATES,
        ("state",),
        "Models and SLO classes for which the control plane looks for a rule by itself, by state: recording, "
        "nothing_is_safe, rolling_out, in_force, withdrawn. It comes from the replica that leads.",
        "`withdrawn`: `meridianctl savings` says why. Always `recording`: too few requests; raise "
        "`telemetry.shadow_sample_ratio`.",
    ),
)


class CalibrationError(MeridianError):
    """The process that calibrates has failed."""


class CalibrationEndedError(CalibrationError):
    """The process that calibrates was told to end, as the control plane is."""


class SelfCalibration(FleetPart):
    """Self-calibration on one replica: what it records, and while it leads, what it decides for the fleet.

    calibrate: runs a task of `meridian_control.offline.self_calibration` and returns its result.
    """

    failure = "self-calibration does not go on"
    tick_s = 5.0

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self._clock = fleet, fleet.clock
        self.calibrate: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]] = self._calibrate
        self._in_order = InOrder(self.record, fleet.clock)
        self._left = LeftBehind(
            fleet, lambda session: session.part(Recorder).left(), lambda left: drop(self._in_order, left)
        )
        # Episodes as JSON, each with the name of its traffic, and the bytes of all.
        self._new: deque[tuple[str, str]] = deque()
        self._new_bytes = 0
        # By traffic, those of the newest requests last, how many requests this replica has recorded under the policy in
        # force, and left out for each reason.
        self._seen: dict[str, Counter[LeftOut | None]] = {}
        self._store: EpisodeStore | None = None
        self._process: asyncio.subprocess.Process | None = None
        # Whether the replica ends, so that no process may begin.
        self._ends = False
        # By traffic, the tests of its rule in force.
        self._watches: dict[str, Watch] = {}
        # By traffic, its state as of the newest tick; empty on a replica that does not lead.
        self._states: dict[str, State] = {}
        # Whether the store may have rules although no policy asks for self-calibration.
        self._is_known = True
        # By traffic whose calibration has failed, the time until which none is tried again.
        self._rests_until: dict[str, datetime] = {}
        # Whether the tick has made an attempt, whose calibration may take minutes.
        self._has_tried = False
        # The newest rows of the page, and the time until which they are shown.
        self._rows: list[dict[str, Any]] = []
        self._shown_until = datetime.min.replace(tzinfo=UTC)

    def attach(self, beside: Beside) -> None:
        # `meridianctl` replays recordings with the capabilities, and needs no database.
        from meridian_control.capabilities.self_calibration.store import EpisodeStore

        self._store, self._leads, self._time_of_day = EpisodeStore(beside.database), beside.leads, beside.clock
        self._rollouts: Rollouts = beside.rollouts

    def stream(self, stream: Stream) -> Recorder:
        return Recorder(stream, self._in_order)

    def joined(self, connection: Connection) -> None:
        """Go on with the requests of the stream before."""
        connection.session.part(Recorder).expect(self._left.taken_by(connection))

    def left(self, connection: Connection, replaced: bool) -> None:
        self._left.left_by(connection, replaced)

    def record(self, traffic: str, found: Episode | LeftOut) -> None:
        """Take in a request that nothing shortened, once it has closed and its turn has come; the next tick stores its
        episode."""
        if not can_be_kept(traffic):
            found = LeftOut.UNNAMED
        self._seen[traffic] = seen = self._seen.pop(traffic, Counter())
        seen[found if isinstance(found, LeftOut) else None] += 1
        if len(self._seen) > MAX_TRAFFICS:
            del self._seen[next(iter(self._seen))]
        if not isinstance(found, LeftOut):
            self._wait([(traffic, found.to_json())])

    def _wait(self, rows: Sequence[tuple[str, str]]) -> None:
        """Let episodes wait for the store. If too many wait, the oldest ones go."""
        self._new.extend(rows)
        self._new_bytes += sum(len(episode) for _, episode in rows)
        while len(self._new) > MAX_WAITING or self._new_bytes > MAX_WAITING_BYTES:
            self._new_bytes -= len(self._new.popleft()[1])

    def policy_came(self, stored: StoredRevision) -> None:
        self._seen.clear()

    async def end(self) -> None:
        self._ends = True
        self._end_process()
        if self.ticking is not None:
            # The end of the event loop cancels it, and then leaves its process behind, or waits for ever for one that
            # is being started.
            await asyncio.wait([self.ticking], timeout=END_S)
        with suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(END_S):
                await self._record()

    def _end_process(self) -> None:
        if self._ends and self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    # ------------------------------------------------------------------------------------------------------- decisions

    async def tick(self) -> None:
        """Store what was recorded, and if this replica leads, take the next step for each traffic.

        Raises StoreUnavailable, StoredPolicyUnreadable, CalibrationError.
        """
        self._left.forget()
        try:
            await self._record()
        finally:
            # An episode that cannot be stored must not keep rules from being withdrawn.
            await self._lead()

    async def _lead(self) -> None:
        if self._store is None or not self._leads():
            # Another leader may store rules meanwhile.
            self._watches, self._states, self._is_known = {}, {}, True
            return
        concerns = (any_self_calibrates(policy) or rules.ruled(policy) for policy in self.fleet.policies)
        if not (self._is_known or any(concerns)):
            return
        newest, learners = await self._store.newest(), await self._store.learners()
        self._is_known = bool(newest or learners)
        self._states = {traffic: learner.state for traffic, learner in learners.items()}
        kept = sorted(filter(can_be_kept, newest), key=lambda traffic: -newest[traffic].number)[:MAX_TRAFFICS]
        for traffic in (newest.keys() | learners.keys()) - {*kept}:
            if traffic not in learners or learners[traffic].rule is None:
                await self._store.forget(traffic)
                learners.pop(traffic, None)
                self._rests_until.pop(traffic, None)
        policies, failures = self._rollouts.store.policies, list[Exception]()
        current = await policies.current()
        # An attempt takes so long that all rules are looked at first.
        ruled = [traffic for traffic, learner in learners.items() if learner.rule is not None]
        ruled += rules.ruled(current.policy) if current is not None else []
        self._has_tried = False
        for traffic in dict.fromkeys([*ruled, *learners, *kept]):
            try:
                self._check_leads()
                # To read a stored policy takes time, so it is read again only if another one has come into force.
                if current is None or current.revision < self.fleet.revision:
                    current = await policies.current()
                if current is not None:
                    await self._step(traffic, learners.get(traffic), newest.get(traffic, Newest()), current)
            except Exception as error:
                # An error for one traffic must not keep the rules of the others from being withdrawn.
                failures.append(error)
        if failures:
            raise failures[0]

    async def _record(self) -> None:
        if self._store is not None and self._new:
            rows = self._take()
            try:
                await self._store.add(rows, self._clock(), MAX_EPISODES)
            except StoreUnavailable:
                self._wait([*rows, *self._take()])
                raise

    def _take(self) -> list[tuple[str, str]]:
        rows = list(self._new)
        self._new.clear()
        self._new_bytes = 0
        return rows

    async def _step(self, traffic: str, learner: Learner | None, newest: Newest, current: StoredRevision) -> None:
        assert self._store is not None
        who, now = Who.of_traffic(traffic), self._clock()
        own = rules.with_override(current.policy, traffic, None).of(who)
        is_on, has_rule = self_calibrates(own), traffic in rules.ruled(current.policy)
        if not (is_on or has_rule) and (learner is None or learner.rule is None):
            return
        before, learner = learner, learner or Learner.new(traffic, now)
        conflicts = rules.conflicts(own, who)
        obstacle, probing = rules.obstacle(own, conflicts), rules.probing(current.policy, own, who, conflicts)
        if not is_on:
            learner = await self._withdraw(learner, newest, current, "entropy.self_calibration is false")
        elif learner.state is State.ROLLING_OUT:
            learner = await self._follow(learner, newest)
        elif learner.state is State.IN_FORCE and (why := obstacle or learner.unproved(probing, own.entropy.max_loss)):
            learner = await self._withdraw(learner, newest, current, why)
        elif learner.state is State.IN_FORCE:
            learner = await self._watch(learner, own, newest, current)
        elif has_rule:
            why = f"{_told(current)} has it, but self-calibration has withdrawn it, or has not proved it here"
            learner = await self._withdraw(learner, newest, current, why)
        else:
            learner = learner.probed(probing, newest.number)
            recorded = await self._store.count(traffic, learner.after)
            if not (obstacle or self._has_tried) and learner.is_due(recorded, own.entropy.max_loss, now):
                learner = await self._attempt(learner, own, current)
        if learner != before:
            await self._store.save(learner, self._rollouts.fence)
            self._states[traffic], self._is_known = learner.state, True

    async def _attempt(self, learner: Learner, own: Policy, current: StoredRevision) -> Learner:
        """Calibrate, and begin the rollout of the rule that is proved."""
        assert self._store is not None
        store, max_loss = self._rollouts.store, own.entropy.max_loss
        if (
            self._rests(learner.traffic)
            or await store.active() is not None
            or (engines := await self._connected()) is None
        ):
            return learner
        last, episodes = await self._store.read(learner.traffic, learner.after, learner.reads(max_loss), MAX_READ_BYTES)
        goal = {"max_loss": max_loss, "attempt": learner.attempts + 1}
        self._has_tried = True
        found = await self._result(learner, _task(own, episodes) | goal)
        now = self._clock()
        if "missing" in found:
            return learner.short(found["requests"], len(episodes), found["missing"], last, now)
        if "rule" not in found:
            logger.info("no rule is safe for %s: %s", learner.traffic, found["why"])
            anew = bool(found.get("anew"))
            return learner.refused(found["requests"], found["why"], last, now, anew=anew)
        rule = Rule.model_validate(found["rule"])
        override = rules.override_of(learner.traffic, rule)
        candidate = rules.with_override(current.policy, learner.traffic, override)
        reason = f"{rule.text} for {learner.traffic}: saves {percent(rule.saved)} of the thinking, loses at "
        reason += f"most {percent(rule.bound, 2)} of the answers, on {found['requests']} requests"
        try:
            plan = rules.plan_for(engines)
            rollout, _ = await store.start(plan, candidate, current.etag, By(now, rules.AUTHOR, reason))
        except (EtagMismatch, RolloutActive):
            # Somebody else has changed the policy in the meantime, so the next tick calibrates for that one.
            return learner
        except PolicyError as error:
            return learner.refused(found["requests"], f"the rule cannot be stored: {error}", last, now)
        logger.info("rollout %d begins: %s", rollout.rollout_id, reason)
        learner = learner.proved(rule, found["requests"], rollout.rollout_id, now)
        # A rollout that no learner knew of would have nobody who withdraws its rule.
        await self._store.save(learner, self._rollouts.fence)
        await self._rollouts.look()
        return learner

    async def _connected(self) -> int | None:
        """Return the number of connected engines of all replicas, None while a replica has not said its own yet."""
        engines = await self._rollouts.engines()
        return None if engines is None else len({engine.engine_id for engine in engines if engine.state == CONNECTED})

    async def _follow(self, learner: Learner, newest: Newest) -> Learner:
        rollout = await self._rollouts.store.get(learner.rollout_id)
        if rollout.state is RolloutState.COMPLETED:
            return learner.rolled_out(newest.number, self._clock())
        if rollout.active:
            return learner
        reason = rollout.events[-1].reason
        why = f"rollout {rollout.rollout_id} was {rollout.state.word.replace('_', ' ')}" + f": {reason}" * bool(reason)
        return learner.withdrawn(why, newest.number, self._clock())

    async def _watch(self, learner: Learner, own: Policy, newest: Newest, current: StoredRevision) -> Learner:
        """Withdraw the rule if it harms, or if the traffic has drifted or has ceased."""
        assert self._store is not None
        assert learner.rule is not None
        max_loss, traffic = own.entropy.max_loss, learner.traffic
        if not rules.has(current.policy, rules.override_of(traffic, learner.rule)):
            has = "has changed it" if traffic in rules.ruled(current.policy) else "does not have it"
            why = f"{_told(current)} {has}" + f": {current.reason}" * bool(current.reason)
            return await self._withdraw(learner, newest, current, why)
        watch = self._watches.get(traffic)
        if watch is None or (watch.rule, watch.max_loss) != (learner.rule, max_loss):
            watch = self._watches[traffic] = Watch(learner.rule, max_loss, learner.after)
        judges = not (watch.why or self._rests(traffic))
        if judges and await self._store.count(traffic, watch.after) >= JUDGED_EVERY:
            last, episodes = await self._store.read(traffic, watch.after, JUDGED_EVERY, MAX_READ_BYTES)
            task = _task(own, episodes) | {"rule": learner.rule.model_dump(mode="json")}
            judged = await self._result(learner, task)
            learner = learner.failed("")
            watch.after = last
            watch.add(judged["requests"], judged["harmful"], judged["first"])
        has_ceased = newest.time is not None and self._clock() > newest.time + UNUSED
        why = f"no request of it was recorded for {UNUSED.days} days" if has_ceased else watch.why
        return await self._withdraw(learner, newest, current, why) if why else learner

    async def _withdraw(self, learner: Learner, newest: Newest, current: StoredRevision, why: str) -> Learner:
        """Take the rule out of the policy. While a rollout keeps the policy from being changed, the next tick tries."""
        policy, policies = rules.with_override(current.policy, learner.traffic, None), self._rollouts.store.policies
        if policy != current.policy:
            reason = f"withdraws the rule for {learner.traffic}: {why}"
            try:
                stored = await policies.append(
                    policy, etag=current.etag, author=rules.AUTHOR, reason=reason, now=self._time_of_day()
                )
            except (EtagMismatch, RolloutActive):
                return learner
            logger.warning("revision %d %s", stored.revision, reason)
            self.fleet.set_policy(stored)
        return learner.withdrawn(why, newest.number, self._clock())

    def _rests(self, traffic: str) -> bool:
        """Whether a calibration of the traffic has failed a short time ago."""
        return traffic in self._rests_until and self._clock() < self._rests_until[traffic]

    async def _result(self, learner: Learner, task: dict[str, Any]) -> dict[str, Any]:
        """Run a task for a traffic. If the task fails, its error is stored, and the traffic rests for REST_S. Raises
        CalibrationError, StoreUnavailable, and NotLeading if another replica decides by now."""
        assert self._store is not None
        try:
            found = await self.calibrate(task)
            self._check_leads()
            return found
        except (CalibrationEndedError, NotLeading):
            raise
        except Exception as error:
            self._check_leads()
            self._rests_until[learner.traffic] = self._clock() + timedelta(seconds=REST_S)
            is_known = isinstance(error, CalibrationError)
            why = str(error) if is_known else f"the calibration failed: {error!r}"
            await self._store.save(learner.failed(why), self._rollouts.fence)
            raise

    def _check_leads(self) -> None:
        if not self._leads():
            raise NotLeading("this replica no longer leads")

    async def _calibrate(self, task: dict[str, Any]) -> dict[str, Any]:
        """Run a task in a process of its own. Raises CalibrationError.

        The episodes follow the rest of the task a line each, because to write JSON within JSON takes so long that
        streams would wait.
        """
        if self._ends:
            raise CalibrationEndedError("the control plane ends")
        rest = {name: value for name, value in task.items() if name != "episodes"}
        text = "\n".join([json.dumps(rest), *task["episodes"]])
        pipe = asyncio.subprocess.PIPE
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", WORKER, stdin=pipe, stdout=pipe, stderr=pipe, env=os.environ | ONE_THREAD
        )
        self._end_process()
        try:
            async with asyncio.timeout(PATIENCE_S):
                out, complaint = await process.communicate(text.encode())
        except TimeoutError:
            process.kill()
            raise CalibrationError(f"the calibration took more than {PATIENCE_S:g} s") from None
        finally:
            self._process = None
        if process.returncode in TOLD_TO_END:
            raise CalibrationEndedError("the calibration was told to end")
        if process.returncode:
            lines = complaint.decode(errors="replace").strip().splitlines() or ["no error"]
            raise CalibrationError(f"the calibration ended with {process.returncode}: {lines[-1]}")
        result: dict[str, Any] = json.loads(out)
        return result

    # ----------------------------------------------------------------------------------------------- messages and page

    def calls(self) -> Mapping[str, Callable[[Any], Awaitable[Any]]]:
        return {"ListSelfCalibrations": self.listed}

    async def listed(self, request: fleet_pb2.ListSelfCalibrationsRequest) -> fleet_pb2.ListSelfCalibrationsResponse:
        """Return what was found for each traffic, and how many requests are recorded for the next attempt. Raises
        StoreUnavailable."""
        answer, store, stored = fleet_pb2.ListSelfCalibrationsResponse(), self._store, self.fleet.policy
        if store is None or stored is None:
            return answer
        learners = await store.learners()
        for traffic in sorted(learners.keys() | self._seen.keys()):
            own = rules.with_override(stored.policy, traffic, None).of(Who.of_traffic(traffic))
            learner = learners.get(traffic) or Learner.new(traffic, self._clock())
            recorded = await store.count(traffic, learner.after) if can_be_kept(traffic) else 0
            seen = self._seen.get(traffic, Counter())
            answer.self_calibrations.append(shown.message(learner, own, recorded, seen))
        return answer

    def metrics(self, totals: Totals) -> Iterator[Metric]:
        counted = Counter(self._states.values())
        yield STATES, [((state.value.replace(" ", "_"),), counted[state]) for state in State if counted]

    async def show(self) -> Shown:
        if not (self._is_known or any(map(any_self_calibrates, self.fleet.policies))):
            return Shown({}, {"self_calibrations": []})
        if self._clock() >= self._shown_until:
            found = (await self.listed(fleet_pb2.ListSelfCalibrationsRequest())).self_calibrations
            self._rows = list(map(shown.row, found))
            self._shown_until = self._clock() + timedelta(seconds=SHOWN_S)
        return Shown({}, {"self_calibrations": self._rows})


def _told(stored: StoredRevision) -> str:
    return f"revision {stored.revision} by {stored.author or 'nobody'}"


def _task(own: Policy, episodes: list[str]) -> dict[str, Any]:
    return {"base": own.model_dump_json(), "episodes": episodes}
