"""Prometheus metrics that the server returns at `/metrics`: its own counters and histograms, and the engine's load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.batching.request import Load, Timings
from engine.expert_cache.figures import LayerFigures

Figures = dict[str, tuple[str, Callable[[Load], float]]]
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Bucket bounds of every histogram, from one token of a small model to a long answer of a large model."""
RESIDENT, ON_DISK = "compress_process_resident_memory_bytes", "compress_kv_cache_disk_bytes"
OF_PROCESS = (RESIDENT, ON_DISK)
"""Gauges of the whole process, which all models of a server share."""
GAUGES: Figures = {
    "compress_num_requests_running": ("Requests that are being answered.", lambda load: load.running),
    "compress_num_requests_waiting": ("Requests in the queue.", lambda load: load.waiting),
    "compress_kv_cache_usage_perc": ("Share of the KV cache in use, 0 to 1.", lambda load: load.kv_cache_used_share),
    "compress_kv_cache_bytes": ("Bytes of the KV cache.", lambda load: load.kv_cache_bytes),
    "compress_weights_bytes": ("Bytes of the weights.", lambda load: load.weights_bytes),
    "compress_load_seconds": ("Seconds that loading the model took.", lambda load: load.load_seconds),
    RESIDENT: ("Bytes of the process in memory.", lambda load: load.resident_bytes),
    ON_DISK: ("Bytes of the KV cache on disk.", lambda load: load.kv_cache_disk_bytes),
}
COUNTERS: Figures = {
    "compress_prompt_tokens": ("Tokens of prompts.", lambda load: load.prompt_tokens),
    "compress_generation_tokens": ("Generated tokens.", lambda load: load.generated_tokens),
    "compress_cached_tokens": ("Tokens of prompts that were in the cache.", lambda load: load.cached_tokens),
    "compress_preemptions": ("Preemptions of requests.", lambda load: load.preemptions),
    "compress_kv_cache_disk_blocks_read": ("Blocks read from disk.", lambda load: load.kv_cache_disk_blocks_read),
    "compress_kv_cache_disk_blocks_written": ("Blocks written to disk.", lambda load: load.kv_cache_disk_blocks_written),
    "compress_kv_cache_disk_blocks_failed": (
        "Blocks not read or written.",
        lambda load: load.kv_cache_disk_blocks_failed,
    ),
    "compress_kv_cache_disk_hits": ("Requests that found blocks on disk.", lambda load: load.kv_cache_disk_hits),
}

EXPERT_COUNTERS: dict[str, tuple[str, Callable[[LayerFigures], float]]] = {
    "compress_experts_used": ("Experts that steps used.", lambda own: own.uses),
    "compress_experts_found": ("Experts among them that were in memory.", lambda own: own.hits),
    "compress_experts_left_out": ("Slots that the miss threshold emptied.", lambda own: own.left_out),
    "compress_experts_replaced": ("Slots that an expert in memory took over.", lambda own: own.replaced),
    "compress_expert_read_bytes": ("Bytes of experts read from disk.", lambda own: own.read_bytes),
    "compress_expert_wait_seconds": ("Seconds of waiting for experts.", lambda own: own.waited_seconds),
}
"""Counters of a model that is served within a memory limit."""


class Metrics:
    """The metrics of one server, in a separate registry."""

    def __init__(self, load: Callable[[], Load]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_LoadCollector(load))
        own = self.registry
        self._ended = Counter("compress_request_success", "Requests that ended.", ["finished_reason"], registry=own)
        self._first = Histogram(
            "compress_time_to_first_token_seconds", "From arrival to the first token.", buckets=SECONDS, registry=own
        )
        self._between = Histogram(
            "compress_inter_token_latency_seconds", "From one token to the next.", buckets=SECONDS, registry=own
        )
        self._whole = Histogram(
            "compress_e2e_request_latency_seconds", "From arrival to the end.", buckets=SECONDS, registry=own
        )
        self._queued = Histogram("compress_request_queue_time_seconds", "In the queue.", buckets=SECONDS, registry=own)

    def first_token(self, seconds: float) -> None:
        """Record a request's time to first token."""
        self._first.observe(seconds)

    def tokens(self, count: int, seconds: float) -> None:
        """Record `count` more tokens of a request, `seconds` after the previous ones."""
        for _ in range(count):
            self._between.observe(seconds / count)

    def ended(self, reason: str, timings: Timings | None) -> None:
        """Record the end of a request."""
        self._ended.labels(reason).inc()
        if timings is None or timings.finished is None:
            return
        self._whole.observe(timings.finished - timings.arrived)
        if timings.started is not None:
            self._queued.observe(timings.started - timings.arrived)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)


def text_of_several(metrics: Mapping[str, Metrics | None]) -> bytes:
    """Return the metrics of several models with a label `model`; None for a model that is not loaded."""
    registry = CollectorRegistry()
    registry.register(_ModelsCollector(metrics))
    return generate_latest(registry)


class _ModelsCollector(Collector):
    """Collects the metrics of several models. What they share, such as the memory of the process, has no label."""

    def __init__(self, metrics: Mapping[str, Metrics | None]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        loaded = GaugeMetricFamily("compress_model_loaded", "Whether the model is loaded, 0 or 1.", labels=["model"])
        families: dict[str, Metric] = {loaded.name: loaded}
        for name, own in self._metrics.items():
            loaded.add_metric([name], own is not None)
            for family in own.registry.collect() if own is not None else ():
                kept = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                label = {} if family.name in OF_PROCESS else {"model": name}
                if label or not kept.samples:
                    kept.samples += [each._replace(labels=label | each.labels) for each in family.samples]
        yield from families.values()


class _LoadCollector(Collector):
    """Collects the engine's load when the metrics are requested."""

    def __init__(self, load: Callable[[], Load]) -> None:
        self._load = load

    def collect(self) -> Iterator[Metric]:
        load = self._load()
        for name, (about, figure) in GAUGES.items():
            yield GaugeMetricFamily(name, about, value=figure(load))
        for name, (about, figure) in COUNTERS.items():
            yield CounterMetricFamily(name, about, value=figure(load))
        for name, (about, counted) in EXPERT_COUNTERS.items() if load.expert_cache else ():
            yield _by_layer(name, about, map(counted, load.expert_cache))
        yield from _of_draft(load)
        yield _by_layer("compress_experts_skipped", "Experts that tokens skipped.", load.experts_skipped_per_layer)


def _by_layer(name: str, about: str, counts: Iterable[float]) -> Metric:
    """Return a counter with a value for each MoE layer."""
    family = CounterMetricFamily(name, about, labels=["layer"])
    for layer, count in enumerate(counts):
        family.add_metric([str(layer)], count)
    return family


def _of_draft(load: Load) -> Iterator[Metric]:
    """Yield the metrics of a draft, if there is one."""
    if (draft := load.draft) is None:
        return
    drafted, kept = draft.drafted_tokens, draft.accepted_tokens
    yield CounterMetricFamily("compress_draft_tokens", "Tokens that the draft proposed.", value=drafted)
    yield CounterMetricFamily("compress_draft_accepted_tokens", "Proposed tokens that were kept.", value=kept)
    share = kept / drafted if drafted else 0.0
    yield GaugeMetricFamily("compress_draft_acceptance_rate", "Share of proposed tokens that were kept, 0..1.", value=share)
    yield GaugeMetricFamily("compress_draft_on", "Whether the last step was to have drafts, 0 or 1.", value=draft.is_on)
