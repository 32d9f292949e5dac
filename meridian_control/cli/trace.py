"""Implements `meridianctl record`, `calibrate` and `replay`, which record traces and apply other rules to them.

The module uses the control plane only through its gRPC API, and shares with it the policy schema and, for replays, the
rules. The module uses one thread and blocking calls.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import grpc
import typer
from meridian.v1 import fleet_pb2, fleet_pb2_grpc

from meridian_control.cli.completion import engine_ids
from meridian_control.cli.console import (
    FAILED,
    RECONNECT_S,
    RETRY_S,
    Output,
    OutputOption,
    PlainConsole,
    add,
    connect,
    console,
    ended_by_signals,
    fail,
    finite,
    new_table,
    not_empty,
    reported,
    say,
    show_value,
    warn_unreachable,
)
from meridian_control.common.look import counted
from meridian_control.offline.trace_file import TraceWriter
from meridian_control.policy import formats as forms
from meridian_control.policy import model as schema

if TYPE_CHECKING:
    from meridian_control.offline.calibration import Calibration, Goal
    from meridian_control.offline.rule_replay import Replay


def record(
    context: typer.Context,
    out: Annotated[Path, typer.Argument(metavar="TRACE", help="Trace file to write; must not exist yet.")],
    engine: Annotated[
        str, typer.Option(help="Record only this engine.", autocompletion=engine_ids, callback=not_empty)
    ] = "",
    duration: Annotated[
        float, typer.Option(min=0, help="Seconds to record; 0 for until Ctrl-C.", callback=finite)
    ] = 0.0,
    requests: Annotated[int, typer.Option(min=0, help="Number of finished requests to record; 0 for no limit.")] = 0,
) -> None:
    """Write a trace of the messages between engines and control plane: signals and decisions, no text."""
    progress = PlainConsole(stderr=True)
    with connect(context) as client:
        writer, status = TraceWriter(out), progress.status("waiting")
        deadline = time.monotonic() + duration if duration else None

        def progressed(written: TraceWriter) -> None:
            status.update(_recorded(written, requests))

        recorder = _Recorder(client.fleet, writer, engine, deadline, requests, progressed)
        try:
            with writer, status:
                recorder.run()
        finally:
            if writer.records:
                breaks = f", {recorder.breaks} interruptions" if recorder.breaks else ""
                say(f"{out}: {_recorded(writer)}{breaks}")
            else:
                out.unlink()
            warn_unreachable(recorder.unreachable)
        if not writer.records:
            fail(FAILED, f"{out} was not written, because no message of an engine arrived")


@dataclass
class _Recorder:
    """Records one trace, and tries again after the stream breaks off.

    deadline: monotonic time at which the recording ends, None for none. requests: number of finished requests after
    which it ends, 0 for no limit. breaks: how often the stream broke off; requests live at such a time are not in the
    trace. unreachable: replicas that did not answer at least once.
    """

    fleet: fleet_pb2_grpc.FleetServiceStub
    out: TraceWriter
    engine_id: str
    deadline: float | None
    requests: int
    progress: Callable[[TraceWriter], None]
    breaks: int = 0
    unreachable: set[str] = field(default_factory=set)
    _writing: bool = False
    _stopped: bool = False

    def run(self) -> None:
        """Record until a limit is reached or a signal arrives. Raises grpc.RpcError, and FileError if the disk is full.

        After an error the file still holds a complete trace of the records written before, of a full disk without the
        newest ones.
        """
        retry_until = 0.0
        with ended_by_signals(self._on_signal), suppress(KeyboardInterrupt):
            while not self._done():
                before = self.out.records
                try:
                    self._stream()
                except grpc.RpcError as error:
                    if self.deadline is not None and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                        return
                    worked = self.out.records > before or time.monotonic() < retry_until
                    if error.code() is not grpc.StatusCode.UNAVAILABLE or not worked:
                        raise
                if self._done():
                    return
                if self.out.records > before:
                    self.breaks += 1
                    retry_until = time.monotonic() + RECONNECT_S
                time.sleep(RETRY_S)

    def _done(self) -> bool:
        late = self.deadline is not None and time.monotonic() >= self.deadline
        return late or self._stopped or 0 < self.requests <= self.out.requests

    def _stream(self) -> None:
        timeout = max(0.0, self.deadline - time.monotonic()) if self.deadline is not None else None
        call = self.fleet.RecordTrace(fleet_pb2.RecordTraceRequest(engine_id=self.engine_id), timeout=timeout)
        try:
            for response in call:
                self._writing = True
                self.out.write(response.record)
                self._writing = False
                self.unreachable.update(response.unreachable_replicas)
                if self._done():
                    return
                self.progress(self.out)
        finally:
            call.cancel()

    def _on_signal(self, *_: Any) -> None:
        """End the recording, but never in the middle of writing a record."""
        self._stopped = True
        if not self._writing:
            raise KeyboardInterrupt


def _recorded(writer: TraceWriter, wanted: int = 0) -> str:
    of = f" of {wanted}" if wanted else ""
    return f"{writer.requests}{of} requests, {writer.steps} steps, {writer.size_bytes} bytes"


def _plot_is_gone(value: str) -> None:
    if value:
        raise typer.BadParameter("is gone: draw the points of `families` that --report writes")


def calibrate(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE", help="Trace files of `record`.")],
    *,
    labels: Annotated[
        Path | None,
        typer.Option(help='File of JSON lines {"request_id", "think_tokens", "correct", "group"}.'),
    ] = None,
    max_loss: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Loss of accuracy, a fraction, that a rule provably does not exceed.", callback=finite
        ),
    ] = 0.01,
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.999, help="Confidence level of intervals and bounds.", callback=finite)
    ] = 0.95,
    attempt: Annotated[
        int,
        typer.Option(
            min=0, max=1000, help="Number of this calibration in a series, from 1 on; 0 for one that is not repeated."
        ),
    ] = 0,
    delay_tokens: Annotated[
        int,
        typer.Option(
            min=1, max=10**6, help="Tokens from a sentence end to the end forced there, unless its probe is held."
        ),
    ] = 2,
    model: Annotated[str, typer.Option(help="Use only requests of this model.", callback=not_empty)] = "",
    base: Annotated[
        Path | None, typer.Option(help="Policy file for all other fields.", show_default="the trace's policy")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write the recommended policy to, in TOML.")] = None,
    plot: Annotated[str, typer.Option(hidden=True, callback=_plot_is_gone)] = "",
    report: Annotated[Path | None, typer.Option(help="File to write all figures to, in JSON.")] = None,
    table: Annotated[bool, typer.Option("--table", help="Print each rule that was tried, too.")] = False,
) -> None:
    """Replay traces, print the rules that save most thinking for a proved loss of accuracy, and write a policy."""
    try:
        import_module("scipy")
    except ImportError as error:
        fail(FAILED, f"calibrate needs {error.name}: pip install 'meridian-llm[calibrate]'")
    from meridian_control.offline import calibration, calibration_report

    with reported():
        replay = _replay(traces, labels, base, model, delay_tokens)
    goal = calibration.Goal(max_loss, confidence, attempt)
    result, terminal = _search(replay, goal), console()
    # The files come first, because the output may end early, as before `| head`.
    figures = json.dumps(calibration_report.report(result, replay, goal), indent=2) + "\n"
    _write(out, lambda path: path.write_text(forms.to_toml(result.policy), encoding="utf-8"))
    _write(report, lambda path: path.write_text(figures, encoding="utf-8"))
    for sentence in calibration_report.sentences(result, replay, goal):
        terminal.say(sentence)
        terminal.say()
    if table:
        terminal.print(calibration_report.table(result, goal))
    if result.recommended is None and not (result.second and result.second.in_force):
        raise typer.Exit(FAILED)


def _replay(traces: list[Path], labels: Path | None, base: Path | None, model: str, delay_tokens: int) -> "Replay":
    """Read the traces, and return the replay that calibration searches. Raises FileError or PolicyError."""
    from meridian_control.offline.correctness import check_once, from_labels, from_probes
    from meridian_control.offline.episodes import collect
    from meridian_control.offline.rule_replay import Replay

    episodes = collect(traces, model)
    check_once(traces[-1], episodes)
    judge = from_labels(labels, episodes) if labels is not None else from_probes(episodes)
    recorded = forms.from_older_proto(episodes.policy)[0] if episodes.policy is not None else schema.Policy()
    return Replay(episodes, judge, forms.load_to_apply(base) if base is not None else recorded, delay_tokens)


def _search(replay: "Replay", goal: "Goal") -> "Calibration":
    """Search the replay for rules. Requests that cannot show any end the command."""
    from meridian_control.offline.calibration import calibrate as search
    from meridian_control.offline.correctness import AnswersAlikeError, check_answers_differ
    from meridian_control.offline.halves import TooFewRequests

    try:
        if replay.judge.is_proxy:
            check_answers_differ(replay.episodes)
        return search(replay, goal)
    except AnswersAlikeError as error:
        fail(FAILED, f"{error}, or give --labels")
    except TooFewRequests as error:
        left_out = [f"{count} {reason}" for reason, count in replay.episodes.left_out.items()]
        fail(FAILED, str(error), *left_out)


def _write(path: Path | None, write: Callable[[Path], object]) -> None:
    if path is not None:
        try:
            write(path)
        except (OSError, ValueError) as error:
            fail(FAILED, f"{path}: cannot be written: {error}")


def replay(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE", help="Trace files of `record`.")],
    policy: Annotated[Path, typer.Option(help="Policy file to replay the traces under.")],
    output: OutputOption = Output.table,
) -> None:
    """Replay traces under another policy without a control plane, and print what the policy would have changed."""
    from meridian_control.offline.policy_replay import changes

    with reported():
        figures = changes(traces, forms.load_to_apply(policy))
    if not output.is_table:
        show_value(figures, output)
        return
    (recorded, new), tokens, terminal = figures["ends"].values(), figures["think_tokens"], console()
    table = new_table("", "recorded", "new policy")
    for reason in sorted({*recorded, *new}):
        add(table, f"thinking ends: {reason}", recorded.get(reason, 0), new.get(reason, 0))
    add(table, "thinking tokens, where both are known", tokens["recorded"], tokens["new"])
    left_out = ", ".join(f"{count} {why}" for why, count in figures["left_out"].items())
    terminal.say(f"{counted(figures['requests'], 'request')}{f', left out: {left_out}' if left_out else ''}")
    terminal.print(table)
    terminal.say(f"The new policy changes {figures['changed']} ends of thinking; -o json lists each request.")
    if missing := figures["probes_without_sample"]:
        text = f"{missing} probes of the new policy have no recorded sample, so its entropy rules may end less"
        terminal.say(f"{text}, and caps that it extends for empty answers more.")
    for engine_id, why in figures["refused"].items():
        terminal.say(f"{engine_id} would not accept the new policy: {why}")
