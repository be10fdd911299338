"""LoadReport: what became of a load's requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from millpond.bench.plan import LoadPlan
from millpond.bench.target import Target

PERCENTILES = (50, 95, 99)
OK = "200"


class Sample(NamedTuple):
    """One request.

    Attributes:
        due: When it was to be sent, in seconds after the start; of a closed loop, when it was sent.
        sent: When the generator set about it.
        done: When its answer was there, or it was given up.
        status: The HTTP status, ``timeout`` or ``connection``.
        tokens: What the answer counts; 0 where it counts none.
    """

    due: float
    sent: float
    done: float
    status: str
    tokens: int


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Figures of one load.

    Attributes:
        target: What was asked.
        plan: How.
        samples: Every request but those of the warm-up.
        messages: Of each status but 200, what the first such answer said.
        distinct: How many different requests there were.
        cpu_seconds: Processor time of the generator.
    """

    target: Target
    plan: LoadPlan
    samples: Sequence[Sample] = field(repr=False)
    messages: dict[str, str]
    distinct: int
    cpu_seconds: float

    @property
    def seconds(self) -> float:
        """From the start to the last answer."""
        return max((sample.done for sample in self.samples), default=0.0)

    @property
    def failed(self) -> int:
        """Requests that were answered with another status than 200, or not at all."""
        return sum(sample.status != OK for sample in self.samples)

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON has it; the key is left out."""
        served = [sample for sample in self.samples if sample.status == OK]
        seconds = self.seconds or float("inf")
        texts = len(served) * self.plan.texts_per_request
        tokens = sum(sample.tokens for sample in served)
        return {
            "endpoint": self.target.endpoint,
            "api": self.target.api,
            "model": self.target.model,
            "encoding_format": self.target.encoding_format,
            "loop": self.plan.loop,
            "connections": self.plan.connections,
            "offered_per_second": self.plan.rate,
            "texts_per_request": self.plan.texts_per_request,
            "distinct_requests": self.distinct,
            "seconds": round(self.seconds, 3),
            "requests": len(self.samples),
            "failed": self.failed,
            "requests_per_second": round(len(served) / seconds, 2),
            "texts_per_second": round(texts / seconds, 2),
            "tokens_per_second": round(tokens / seconds, 1) if tokens else None,
            "latency_ms": latencies(served),
            "statuses": {
                status: {"requests": len(of_it), "latency_ms": latencies(of_it)}
                for status in sorted({sample.status for sample in self.samples})
                if (of_it := [sample for sample in self.samples if sample.status == status])
            },
            "messages": self.messages,
            "generator": {
                "cpu_seconds": round(self.cpu_seconds, 3),
                "share_of_a_core": round(self.cpu_seconds / seconds, 3),
                "cpu_us_per_request": round(1e6 * self.cpu_seconds / max(len(self.samples), 1), 1),
                # How late it set about requests: what of an open loop's latency is not the server's.
                "late_p99_ms": percentile([sample.sent - sample.due for sample in self.samples], 99),
            },
        }

    def table(self) -> str:
        """The figures for people."""
        found = self.as_dict()
        loop = f"{self.plan.connections} connections, each waiting for its answer"
        if self.plan.rate is not None:
            loop = f"{self.plan.rate:g} requests/s as a Poisson process, at most {self.plan.connections} connections"
        tokens = f"{found['tokens_per_second']:>12,.0f}" if found["tokens_per_second"] else " not counted"
        lines = [
            f"{found['endpoint']}" + (f" ({self.target.model})" if self.target.model else ""),
            f"{self.plan.texts_per_request} texts a request, {loop}",
            f"{found['requests']} requests in {found['seconds']:.1f} s, {found['failed']} failed",
            "",
            f"requests/s {found['requests_per_second']:>12,.1f}",
            f"texts/s    {found['texts_per_second']:>12,.1f}",
            f"tokens/s   {tokens}",
            "",
            f"{'status':<12}{'requests':>9}" + "".join(f"{name:>12}" for name in latencies(())),
        ]
        for status, row in found["statuses"].items():
            times = "".join(f"{value:>12,.1f}" for value in row["latency_ms"].values())
            lines.append(f"{status:<12}{row['requests']:>9}{times}")
        lines += [f"{status}: {message}" for status, message in self.messages.items()]
        if found["generator"]["share_of_a_core"] > 0.8:
            lines.append(
                f"the generator itself used {found['generator']['share_of_a_core']:.0%} of a core, and may be what "
                "limits these figures; ask with more texts a request, or at a lower rate"
            )
        return "\n".join(lines)


def latencies(samples: Sequence[Sample]) -> dict[str, float | None]:
    """Percentiles, mean and most of the milliseconds from when a request was due until it was answered."""
    times = [sample.done - sample.due for sample in samples]
    found = {f"p{percent}": percentile(times, percent) for percent in PERCENTILES}
    return {
        **found,
        "mean": round(1000 * float(np.mean(times)), 3) if times else None,
        "max": round(1000 * max(times), 3) if times else None,
    }


def percentile(seconds: Sequence[float], percent: float) -> float | None:
    """In milliseconds; None of nothing."""
    return round(1000 * float(np.percentile(seconds, percent)), 3) if seconds else None
