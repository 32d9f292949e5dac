"""Measure the time that probes cost.

Protocol: the recommended policy in shadow, with an EAT level that no sample is below, so that it probes until thinking
ends by itself, is compared with the same policy with a floor so high that no probe is requested. Both policies run the
same requests and so generate the same tokens. The policies alternate, each order as often as the other, after one pair
to warm up. At last the recommended policy itself runs in force. Times are decode times as in `driver.Batch`.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.bench import arms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.bench.driver import Batch, Engine, Sample

ENFORCED_REPETITIONS = 3


@dataclass(frozen=True)
class ProbeCost:
    """Medians over the repetitions.

    throughput_ratios: throughput with probes divided by throughput without, of each pair. time_share: the share of
    decode time that probes take under the policy in force.
    """

    repetitions: int
    requests: int
    tokens_per_s_with: float
    tokens_per_s_without: float
    throughput_ratio: float
    throughput_ratios: list[float]
    probes_with: float
    us_per_probe: float
    us_per_token: float
    enforced_s: float
    enforced_probes: float
    time_share: float


def measure(engine: Engine, samples: Sequence[Sample], policy: dict[str, Any], repetitions: int) -> ProbeCost:
    """Measure the time that probes cost on this engine. Raises BenchError."""
    probing, silent = arms.with_all_probes(policy), arms.without_probes(policy)
    pairs: list[tuple[Batch, Batch]] = []
    for repetition in range(repetitions + 1):
        # The order within a pair alternates.
        if repetition % 2:
            plain = engine.run(samples, silent)
            probed = engine.run(samples, probing)
        else:
            probed = engine.run(samples, probing)
            plain = engine.run(samples, silent)
        pairs.append((probed, plain))
    pairs = pairs[1:]
    enforced = [engine.run(samples, policy) for _ in range(ENFORCED_REPETITIONS)]
    generated = pairs[0][1].generated_tokens()
    seconds_with, seconds_without = (statistics.median(pair[side].decode_s for pair in pairs) for side in (0, 1))
    ratios = [plain.decode_s / probed.decode_s for probed, plain in pairs]
    per_probe_s = statistics.median((probed.decode_s - plain.decode_s) / probed.probes for probed, plain in pairs)
    enforced_s = statistics.median(batch.decode_s for batch in enforced)
    enforced_probes = statistics.median(batch.probes for batch in enforced)
    return ProbeCost(
        repetitions=repetitions,
        requests=len(samples),
        tokens_per_s_with=generated / seconds_with,
        tokens_per_s_without=generated / seconds_without,
        throughput_ratio=statistics.median(ratios),
        throughput_ratios=ratios,
        probes_with=statistics.median(probed.probes for probed, _ in pairs),
        us_per_probe=per_probe_s * 1e6,
        us_per_token=seconds_without / generated * 1e6,
        enforced_s=enforced_s,
        enforced_probes=enforced_probes,
        time_share=enforced_probes * per_probe_s / enforced_s,
    )
