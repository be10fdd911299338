"""LoadReport: throughput, latencies and errors of a load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from load_generator.plan import LoadPlan
from load_generator.target import Target

PERCENTILES = (50, 95, 99)
OK = "200"


class Sample(NamedTuple):
    """One request.

    Attributes:
        due: When it was due, in seconds after the start; in a closed loop, when it was sent.
        sent: When the generator started it.
        done: When it was answered or given up.
        status: The HTTP status, ``timeout`` or ``connection``.
        tokens: Token count in the answer; 0 if the answer has none.
    """

    due: float
    sent: float
    done: float
    status: str
    tokens: int


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """The results of one load.

    Attributes:
        target: The endpoint.
        plan: The load.
        samples: Every request except those of the warm-up.
        messages: For each status other than 200, the content of the first answer.
        distinct: Number of distinct requests.
        cpu_seconds: CPU time of the generator.
    """

    target: Target
    plan: LoadPlan
    samples: Sequence[Sample] = field(repr=False)
    messages: dict[str, str]
    distinct: int
    cpu_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds from the start to the last answer."""
        return max((sample.done for sample in self.samples), default=0.0)

    @property
    def failed(self) -> int:
        """Number of requests answered with another status than 200, or not at all."""
        return sum(sample.status != OK for sample in self.samples)

    def as_dict(self) -> dict[str, Any]:
        """Everything for JSON, without the API key."""
        succeeded = [sample for sample in self.samples if sample.status == OK]
        seconds = self.seconds or float("inf")
        texts = len(succeeded) * self.plan.texts_per_request
        tokens = sum(sample.tokens for sample in succeeded)
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
            "requests_per_second": round(len(succeeded) / seconds, 2),
            "texts_per_second": round(texts / seconds, 2),
            "tokens_per_second": round(tokens / seconds, 1) if tokens else None,
            "latency_ms": latencies(succeeded),
            "statuses": {
                status: {"requests": len(samples), "latency_ms": latencies(samples)}
                for status in sorted({sample.status for sample in self.samples})
                if (samples := [sample for sample in self.samples if sample.status == status])
            },
            "messages": self.messages,
            "generator": {
                "cpu_seconds": round(self.cpu_seconds, 3),
                "share_of_a_core": round(self.cpu_seconds / seconds, 3),
                "cpu_us_per_request": round(1e6 * self.cpu_seconds / max(len(self.samples), 1), 1),
                # How late requests were started: the part of an open loop's latency that is not the server's.
                "late_p99_ms": percentile([sample.sent - sample.due for sample in self.samples], 99),
            },
        }

    def table(self) -> str:
        """The results as text."""
        results = self.as_dict()
        loop = f"{self.plan.connections} connections, each waiting for its answer"
        if self.plan.rate is not None:
            loop = f"{self.plan.rate:g} requests/s as a Poisson process, at most {self.plan.connections} connections"
        tokens = f"{results['tokens_per_second']:>12,.0f}" if results["tokens_per_second"] else " not counted"
        lines = [
            f"{results['endpoint']}" + (f" ({self.target.model})" if self.target.model else ""),
            f"{self.plan.texts_per_request} texts a request, {loop}",
            f"{results['requests']} requests in {results['seconds']:.1f} s, {results['failed']} failed",
            "",
            f"requests/s {results['requests_per_second']:>12,.1f}",
            f"texts/s    {results['texts_per_second']:>12,.1f}",
            f"tokens/s   {tokens}",
            "",
            f"{'status':<12}{'requests':>9}" + "".join(f"{name:>12}" for name in latencies(())),
        ]
        for status, row in results["statuses"].items():
            times = "".join(f"{value:>12,.1f}" for value in row["latency_ms"].values())
            lines.append(f"{status:<12}{row['requests']:>9}{times}")
        lines += [f"{status}: {message}" for status, message in self.messages.items()]
        if results["generator"]["share_of_a_core"] > 0.8:
            lines.append(
                f"the generator itself used {results['generator']['share_of_a_core']:.0%} of a core, and may be what "
                "limits these figures; ask with more texts a request, or at a lower rate"
            )
        return "\n".join(lines)


def latencies(samples: Sequence[Sample]) -> dict[str, float | None]:
    """Percentiles, mean and maximum of the milliseconds from when a request was due until its answer."""
    times = [sample.done - sample.due for sample in samples]
    percentiles = {f"p{percent}": percentile(times, percent) for percent in PERCENTILES}
    return {
        **percentiles,
        "mean": round(1000 * float(np.mean(times)), 3) if times else None,
        "max": round(1000 * max(times), 3) if times else None,
    }


def percentile(seconds: Sequence[float], percent: float) -> float | None:
    """A percentile in milliseconds; ``None`` for an empty sequence."""
    return round(1000 * float(np.percentile(seconds, percent)), 3) if seconds else None
