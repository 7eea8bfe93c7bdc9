"""What the HTTP front measures: requests, answers, time to the first token and between tokens, as a client waits."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

_TTFT_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000)
_ITL_MS = (0.5, 1, 2, 5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200, 300, 500, 1_000, 2_000, 5_000, 10_000)


class _Included(Collector):
    """Passes on what another registry collects."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        """At every scrape."""
        return self._registry.collect()


class FrontMetrics:
    """Metrics of the front in ``registry``, which may hold the engine's too. Event loop only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._requests = Counter("server_request_in", "Generation requests received.", registry=registry)
        self._responses = Counter(
            "server_responses", "Answers to generation requests.", ["endpoint", "code"], registry=registry
        )
        self._disconnects = Counter(
            "server_client_disconnects", "Generation requests whose client left early.", registry=registry
        )
        self._open = Gauge("server_open_requests", "Generation requests being answered.", registry=registry)
        self._prompt_tokens = Counter("server_prompt_tokens", "Prompt tokens of answered requests.", registry=registry)
        self._output_tokens = Counter("server_output_tokens", "Tokens sent to clients.", registry=registry)
        self._ttft = Histogram(
            "time_to_first_token_latency_milliseconds",
            "From the request's arrival to its first token, per choice.",
            buckets=_TTFT_MS,
            registry=registry,
        )
        self._itl = Histogram(
            "inter_token_latency_milliseconds",
            "Between two tokens of one choice; tokens that arrive together share the time.",
            buckets=_ITL_MS,
            registry=registry,
        )

    def include(self, registry: CollectorRegistry) -> None:
        """Show another registry's metrics too."""
        self.registry.register(_Included(registry))

    def request_arrived(self) -> None:
        """A generation request came in."""
        self._requests.inc()
        self._open.inc()

    def request_ended(self, endpoint: str, code: int) -> None:
        """It was answered."""
        self._open.dec()
        self._responses.labels(endpoint, str(code)).inc()

    def client_left(self) -> None:
        """The client closed the connection before the answer was whole."""
        self._disconnects.inc()

    def prompt_taken(self, num_tokens: int) -> None:
        """A prompt was handed to the engine."""
        self._prompt_tokens.inc(num_tokens)

    def first_token(self, waited_s: float, num_tokens: int) -> None:
        """A choice's first output arrived, ``waited_s`` after its request."""
        self._ttft.observe(waited_s * 1e3)
        self._output_tokens.inc(num_tokens)

    def next_tokens(self, waited_s: float, num_tokens: int) -> None:
        """Further tokens of a choice arrived, ``waited_s`` after those before."""
        each_ms = waited_s * 1e3 / num_tokens
        for _ in range(num_tokens):
            self._itl.observe(each_ms)
        self._output_tokens.inc(num_tokens)
