"""Builds the agents of one engine, one after another: the first at the engine's start, a new one after each rest from a
fault.

The module owns what these agents share: the link, the engine's identity, and the facts from its tokenizer and chat
template. Runs on the engine-core thread, except `hello` and `prepare`, which the link calls on its own threads.
"""

from __future__ import annotations

import contextlib
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from meridian.v1 import agent_pb2

from meridian_agent.core.bad_settings import BadSettings
from meridian_agent.core.guard import MAX_FAULT, hook
from meridian_agent.core.hand_overs import SEVERAL_TOKENS, stops
from meridian_agent.core.phases import NO_MARKERS, Markers, no_markers
from meridian_agent.core.request_info import clean
from meridian_agent.core.sentences import NO_SENTENCES, SentenceTable
from meridian_agent.core.step_signals import OF_THE_START, expected_backend
from meridian_agent.engine.agent import Agent
from meridian_agent.engine.capabilities import EngineFacts, capabilities
from meridian_agent.engine.later_turns import LaterTurns
from meridian_agent.engine.start_facts import StartFacts
from meridian_agent.link import environment
from meridian_agent.link.control_stream import ControlStream
from meridian_agent.link.credentials import AgentCredentials
from meridian_agent.link.engine_name import EngineName
from meridian_agent.link.identity import identity_of_engine, rank_of, targets
from meridian_agent.link.settings_check import check
from meridian_agent.link.settings_file import StateFile, state_folder
from meridian_agent.vllm_adapter import (
    hand_over,
    kv_connectors,
    preemption_api,
    prefix_cache,
    premature_stops,
    probe_rows,
    reasoning_markers,
    scheduler_api,
    tokenizer,
)
from meridian_agent.vllm_adapter.core_error import core_fails
from meridian_agent.vllm_adapter.model_fingerprint import fingerprint
from meridian_agent.vllm_adapter.scheduler_limits import SchedulerLimits, limits_of
from meridian_agent.vllm_adapter.version import unfit_limit, unfit_preemption, vllm_version

if TYPE_CHECKING:
    from meridian_agent.core.guard import Guard
    from meridian_agent.vllm_types import Scheduler

    class NamedScheduler(Scheduler, Protocol):
        """A scheduler that has the agent in front, and so the engine's name."""

        engine_name: EngineName | None


logger = logging.getLogger("vllm.meridian")

# The variable with which vLLM serves HTTP by a program in Rust, in which no part of the agent runs.
RUST = "VLLM_USE_RUST_FRONTEND"


class Lifecycle:
    """Builds the agents of one engine core, from the environment and the engine's own configuration."""

    def __init__(self, scheduler: NamedScheduler, guard: Guard) -> None:
        self._scheduler, self._guard = scheduler, guard
        # The optional facts that are missing.
        self._start = StartFacts()
        self.limits = self._start.find(
            "scheduler limits", lambda: limits_of(scheduler, unfit_limit), SchedulerLimits({})
        )
        # The newest agent, also while it is off; None if no agent could be built.
        self.agent: Agent | None = None
        model = scheduler.vllm_config.model_config.served_model_name
        self._model = str(model[0] if isinstance(model, (list, tuple)) else model)
        folder = state_folder()
        self._name = EngineName(folder, rank_of(scheduler.vllm_config.parallel_config))
        # An agent that fails to start is reported under the same name.
        scheduler.engine_name = self._name
        self._identity = identity_of_engine(vllm_version(), self._name.name)
        self._state = StateFile(folder, self._name.file_name, self._model)
        self._targets = targets()
        self.link = ControlStream(
            self._targets,
            self.hello,
            self.prepare,
            self._took,
            credentials=AgentCredentials.from_environment(),
            rest_s=guard.rest_s,
            limits=self.limits.bounded,
            is_paused=lambda: scheduler_api.is_paused(scheduler),
        )
        self._later_turns = LaterTurns(self._read_template, self.link.restart)
        # The model's own chat template, and the markers with which it is rendered to see what it does with thinking.
        self._chat_template: str | None = None
        # The model's fingerprint, and the weights of which it is.
        self._fingerprint, self._fingerprint_of = "", OF_THE_START
        self._rendered_with = NO_MARKERS
        # What the newest Hello says that depends on the markers.
        self._in_hello = "", ""
        self._facts = EngineFacts(
            self._model, NO_SENTENCES, False, self._later_turns, guard.note, ("none", ""), self.limits
        )

    def start(self) -> Agent:
        """Build and return the first agent, which begins with the settings that are kept on disk, until a control plane
        sends others."""
        scheduler, find = self._scheduler, self._start.find
        config = scheduler.vllm_config
        words = find("tokenizer", lambda: tokenizer.tokenizer_of(config), None)
        markers = find("markers", lambda: reasoning_markers.resolve(config, agent_pb2.Settings()), None)
        self._markers = markers or no_markers(self._start.why("markers"))
        self._rendered_with = self._markers
        self._chat_template = tokenizer.chat_template_of(config)
        self._fingerprint = find("fingerprint", lambda: fingerprint(config, self._chat_template), "")
        self._later_turns.has_template = self._chat_template is not None
        self._later_turns.read_anew()
        self._log_markers()
        no_probes = find("hiding probes", self._hide_probes, "they cannot be hidden from vLLM")
        if no_probes:
            logger.warning("meridian: no EAT probes: %s", no_probes)
        no_probe_rows = find("probe rows", lambda: probe_rows.refusal(self._scheduler), "not known")
        if no_probe_rows:
            logger.info("meridian: each EAT probe is a request of its own: %s", no_probe_rows)
        if no_premature_stops := find("premature stops", lambda: premature_stops.refusal(scheduler), "not known"):
            self._start.note("premature stops", no_premature_stops)
        if environment.read(RUST) not in {"", "0"}:
            self._start.note("front end", f"{RUST} is set")
        self._facts = EngineFacts(
            self._model,
            find("sentence ends", lambda: self._sentences(words), NO_SENTENCES),
            find("shared blocks", lambda: prefix_cache.share_blocks(scheduler, self._shared_with, self._guard), False),
            self._later_turns,
            self._guard.note,
            find("entropy backend", lambda: expected_backend(str(config.device_config.device_type)), ("none", "")),
            self.limits,
            no_probes,
            no_probe_rows,
            no_preempt=find("preemption", lambda: preemption_api.refusal(scheduler, unfit_preemption()), "not known"),
            no_premature_stops=no_premature_stops,
            by_gateway=bool(self._identity["request_sources"]),
            **find("handover", lambda: hand_over.abilities(scheduler, self._guard), dict[str, Any]()),
        )
        agent = Agent(self._scheduler, self._markers, self.link, self._facts)
        find("settings on disk", lambda: self._start_from_file(agent), None)
        self._start.log()
        if environment.is_true("MERIDIAN_FREEZE", True, "the engine is frozen"):
            logger.warning("meridian: frozen by MERIDIAN_FREEZE: vLLM runs as stock")
            self.link.lease.freeze_for(math.inf)
        self.agent = agent
        self._guard.on_trip = self.link.step_aside
        logger.info(
            "meridian: agent %s governs %s as engine %s, control plane %s",
            self._identity["agent_version"],
            type(self._scheduler).__name__,
            self._name.name,
            ", ".join(self._targets),
        )
        self.link.start()
        return agent

    def _hide_probes(self) -> str:
        """Hide probes from vLLM's metrics, its KV cache events and its KV connector. Return why that cannot be done, so
        that there can be no probes; empty if it can."""
        scheduler = self._scheduler
        prefix_cache.hide_from_cache_stats(scheduler.kv_cache_manager)
        if scheduler.kv_cache_manager.block_pool.enable_kv_cache_events:
            kv_connectors.cache_nothing(scheduler.kv_cache_manager)
        if why := kv_connectors.hide_from_connector(scheduler, self._guard):
            return f"they cannot be hidden from the KV connector: {why}"
        if scheduler_api.captures_outputs(scheduler):
            return "the workers capture auxiliary outputs (enable_return_routed_experts)"
        return ""

    def _sentences(self, words: Any) -> SentenceTable:
        """Return the machine that finds the ends of sentences. words: the tokenizer, None if there is none."""
        if words is None:
            return NO_SENTENCES
        size = self._scheduler.vllm_config.model_config.get_vocab_size()
        table, failed = tokenizer.sentences_of(words, size)
        if failed:
            first = ", ".join(map(str, failed[:3]))
            self._start.note("texts of some tokens", f"{len(failed)} of {size} cannot be decoded, the first: {first}")
        return table

    def _start_from_file(self, agent: Agent) -> None:
        settings = self._state.load()
        if settings is None:
            return
        try:
            check(settings)
            markers = self.prepare(settings)
        except BadSettings as error:
            logger.warning("meridian: the settings in %s are ignored: %s", self._state.path, error)
            return
        except Exception:
            logger.exception("meridian: the settings in %s are ignored after an error of the agent", self._state.path)
            return
        agent.put_in_force(settings, markers)
        self.link.lease.hold(settings, markers)
        logger.info("meridian: starting from revision %d of %s", settings.revision, self._state.path)

    @hook(agent_pb2.FAULT_CAUSE_AGAIN)
    def again(self, steps_under_way: int) -> Agent:
        """Build and return another agent, with the settings that were in force last; it begins to track the engine's
        requests over the coming steps.

        No tokenizer and no file is read here, because the engine is serving requests; both were read at the start.
        """
        agent = Agent(self._scheduler, self._markers, self.link, self._facts)
        if self.link.lease.held is not None:
            agent.put_in_force(*self.link.lease.held)
        agent.adopt(list(self._scheduler.requests.values()), steps_under_way)
        if self.agent is not None:
            agent.follow(self.agent)
        self.link.come_back()
        self.agent = agent
        logger.warning("meridian: the agent is on again; the last fault was: %s", self._guard.last_fault)
        return agent

    def _shared_with(self, request_id: str) -> tuple[str, int] | None:
        return self.agent.probing.shared_with(request_id) if self.agent is not None else None

    @property
    def _no_entropy(self) -> str:
        return self.agent.measuring.no_entropy if self.agent is not None else "the agent could not be built"

    def _backend(self) -> tuple[str, str]:
        """Return the entropy backend of this engine (cpu, cuda, torch or none), and why it is not a faster one."""
        if self.agent is None or self._no_entropy:
            return "none", self._no_entropy
        return self.agent.measuring.backend

    def _model_fingerprint(self) -> str:
        """Return the fingerprint of the model with its present weights. Weights that did not come from files have a
        fingerprint that no other weights have."""
        weights = self.agent.measuring.weights if self.agent is not None else self._fingerprint_of
        if weights != self._fingerprint_of:
            number, folder = self._fingerprint_of = weights
            self._fingerprint = f"replaced-{self._identity['incarnation']}-{number}"
            if folder is not None and Path(folder).exists():
                with contextlib.suppress(OSError):
                    self._fingerprint = fingerprint(self._scheduler.vllm_config, self._chat_template, folder)
        return self._fingerprint

    def end_stream(self) -> None:
        self.link.stop(fails=core_fails())

    def stop(self) -> None:
        """End the stream and the threads, and let another engine have the name."""
        self.end_stream()
        self._state.close()
        self._name.release()

    def disarm(self) -> None:
        """Let all requests give their answers on this engine."""
        if self._facts.hand_over is not None:
            self._facts.hand_over.disarm_all()

    def _took(self, settings: agent_pb2.Settings) -> None:
        """Keep settings that have come into force; if their markers change what a Hello says, begin a new stream.
        Called on the engine's thread and on the link's."""
        self._state.keep(settings)
        if (facts := self._marker_facts) != self._in_hello:
            self._in_hello = facts
            self._log_markers()
            self.link.restart("other thinking markers are in force")

    @property
    def _in_force(self) -> Markers:
        held = self.link.lease.held
        markers: Markers = held[1] if held is not None else self._markers
        return markers

    @property
    def _marker_facts(self) -> tuple[str, str]:
        """Why no token counts as thinking, and why no request can be handed over; empty if there is no reason."""
        markers = self._in_force
        several = markers.known and not stops(markers)
        return markers.unknown, self._facts.no_hand_over or (SEVERAL_TOKENS if several else "")

    def _log_markers(self) -> None:
        if unknown := self._in_force.unknown:
            logger.warning("meridian: no token counts as thinking, the markers are not known: %s", unknown)
        else:
            logger.info("meridian: the thinking markers are known")

    # ------------------------------------------------------------------------------------------- on the link's thread

    def hello(self) -> agent_pb2.Hello:
        """Return the first message of a stream. An agent whose rest is over counts as on, because it comes back at the
        engine's next step."""
        config, lease, guard = self._scheduler.vllm_config, self.link.lease, self._guard
        self._in_hello = unknown, no_hand_over = self._marker_facts
        rest_s = guard.rest_s()
        backend, note = self._backend()
        hello = agent_pb2.Hello(
            **self._identity,
            model=self._model,
            block_size_tokens=self._scheduler.block_size,
            num_blocks=config.cache_config.num_gpu_blocks,
            max_num_seqs=self._scheduler.max_num_running_reqs,
            vocab_size=config.model_config.get_vocab_size(),
            capabilities=capabilities(self._scheduler, backend != "none", self._facts),
            revision=lease.revision,
            fault=guard.fault if rest_s else "",
            state=agent_pb2.AGENT_STATE_OFF if rest_s else lease.state,
            freeze=lease.freeze_status(),
            refused=self.link.refused,
            faults=guard.faults,
            last_fault=guard.last_fault,
            unknown_markers=clean(unknown, MAX_FAULT),
            entropy_backend=agent_pb2.EntropyBackend.Value(f"ENTROPY_BACKEND_{backend.upper()}"),
            entropy_note=note,
            engine_limits=self.limits.message(),
            reclaim_note=clean(self._later_turns.note, MAX_FAULT),
            missing_facts=self._start.missing,
            model_fingerprint=self._model_fingerprint(),
        )
        hello.kv_connector, hello.kv_role = kv_connectors.connector_and_role(config)
        hello.no_preempt = self._facts.no_preempt
        hello.no_hand_over, hello.no_answer_handed_over = no_hand_over, self._facts.no_answer_handed_over
        if 0 < rest_s < math.inf:
            hello.recover_ms = math.ceil(rest_s * 1e3)
        return hello

    def prepare(self, settings: agent_pb2.Settings) -> Markers:
        """Return the thinking markers under these settings, known or not. Raises BadSettings if this engine cannot obey
        the settings."""
        if self._guard.rest_s():
            raise BadSettings(f"the agent is off: {self._guard.fault}")
        markers, before = self._resolve(settings), self._rendered_with
        if markers.known and (markers.starts, markers.ends) != (before.starts, before.ends):
            self._rendered_with = markers
            self._later_turns.read_anew()
        return markers

    def _resolve(self, settings: agent_pb2.Settings) -> Markers:
        """Return the thinking markers under these settings. Raises BadSettings only for something that the settings
        name."""
        try:
            markers = reasoning_markers.resolve(self._scheduler.vllm_config, settings)
        except BadSettings:
            raise
        except Exception as error:
            self._start.note("markers", f"{type(error).__name__}: {error}")
            return no_markers(self._start.why("markers"))
        self._start.found("markers")
        return markers

    def _read_template(self, settings: str) -> tokenizer.Template:
        """Find out what the model's own chat template does with thinking under these settings. Runs on a thread of
        `LaterTurns`, too."""

        def read() -> tokenizer.Template:
            words = tokenizer.tokenizer_of(self._scheduler.vllm_config)
            return tokenizer.template_of(words, self._rendered_with, self._chat_template, settings)

        return self._start.find("chat template", read, tokenizer.Template())
