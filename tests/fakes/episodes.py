"""Traffic for self-calibration, in virtual time: requests whose trial answer settles at some place, as episodes."""

from __future__ import annotations

import random
from dataclasses import dataclass

from meridian_control.capabilities.self_calibration.episodes import Episode, Sample, name_of

GAP_TOKENS = 64


@dataclass(frozen=True)
class Traffic:
    """Requests of one kind. think_tokens: median. settles: range of the share of the thinking after which the trial
    answer stays. misled: share of the requests whose EAT is low although their answer still changes. undecided_nats:
    mean EAT before the answer has settled. differs: whether answers of different requests begin differently."""

    think_tokens: float = 1500.0
    settles: tuple[float, float] = (0.2, 0.8)
    misled: float = 0.0
    undecided_nats: float = 0.9
    differs: bool = True

    def episode(self, rng: random.Random, name: str) -> Episode:
        natural = max(2 * GAP_TOKENS, int(rng.lognormvariate(0, 0.4) * self.think_tokens))
        settled_at = rng.uniform(*self.settles) * natural
        misled_at = rng.uniform(0, settled_at) if rng.random() < self.misled else natural
        samples, same, before = list[Sample](), 0, -1
        for place in range(GAP_TOKENS, natural, GAP_TOKENS):
            settled = place >= settled_at
            low = settled or place >= misled_at
            eat = abs(rng.gauss(0.03, 0.02)) if low else max(0.2, rng.gauss(self.undecided_nats, 0.25))
            answer = 0 if settled else rng.randint(1, 3)
            same = same + 1 if answer == before else 1
            before = answer
            samples.append(Sample(place, place, round(eat, 4), 2, same, False, True, self.differs))
        return Episode(name_of(name), natural, tuple(samples))

    def episodes(self, rng: random.Random, count: int, prefix: str = "") -> list[Episode]:
        return [self.episode(rng, f"{prefix}{rng.getrandbits(64)}-{number}") for number in range(count)]
