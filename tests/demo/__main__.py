"""Run the demo: `python -m tests.demo`.

The exit status is 0 for a run without a failed request, 1 for a failed request or a process that ended, 2 for a busy
port or a bad flag, and 130 or 143 after SIGINT or SIGTERM. In every case the demo stops all that it started.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.demo.processes import HOST, Children, DemoError, check_ports

ROOT = Path(__file__).resolve().parents[2]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m tests.demo",
        description=__doc__.partition("\n")[0] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--control-port", type=_port, default=50051, help="gRPC port of the control plane")
    p.add_argument("--metrics-port", type=_port, default=9464, help="port of the control plane's /metrics")
    p.add_argument("--page-port", type=_port, default=9465, help="port of the control plane's status page")
    p.add_argument("--http-port", type=_port, default=8000, help="port of vLLM's OpenAI server")
    p.add_argument("--requests", type=_positive, default=150, help="requests under each of the two policies")
    p.add_argument("--concurrency", type=_positive, default=12, help="requests in flight")
    p.add_argument(
        "--step-ms", type=_milliseconds, default=10.0, help="least duration of an engine step, 0 for no least duration"
    )
    p.add_argument("--seed", type=int, default=0, help="seed of the prompts")
    p.add_argument("--model", type=Path, default=ROOT / "tests/data/maze-qwen3", help="folder of the model")
    p.add_argument("--output", type=Path, default=Path("build/demo"), help="folder for logs, picture and results")
    return p


def _port(text: str) -> int:
    if not 1 <= (port := int(text)) <= 65535:
        raise argparse.ArgumentTypeError(f"must be in [1, 65535]; got {text}")
    return port


def _milliseconds(text: str) -> float:
    if not 0 <= (number := float(text)) <= 1000:
        raise argparse.ArgumentTypeError(f"must be in [0, 1000]; got {text}")
    return number


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {text}")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    ports = {
        "--control-port": args.control_port,
        "--metrics-port": args.metrics_port,
        "--page-port": args.page_port,
        "--http-port": args.http_port,
    }
    try:
        check_ports(ports)
        args.control, args.http = f"{HOST}:{args.control_port}", f"http://{HOST}:{args.http_port}"
        return _run(args)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    # This import comes after the port check, because it takes seconds.
    from tests.demo.app import run

    options.output.mkdir(parents=True, exist_ok=True)
    children = Children()
    received: list[int] = []

    async def until_signal(store: Path) -> int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            received.append(number)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        try:
            return await run(options, children, store)
        finally:
            # Signals that come now wait in the loop, so that they do not interrupt the clean-up.
            children.stop()

    with tempfile.TemporaryDirectory(prefix="meridian-demo-") as folder:
        try:
            return asyncio.run(until_signal(Path(folder) / "store.db"))
        except asyncio.CancelledError:
            print(f"demo: stopped by {signal.Signals(received[0]).name}, nothing is left running", file=sys.stderr)
            return 128 + received[0]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("demo: stopped by SIGINT before anything was started", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
