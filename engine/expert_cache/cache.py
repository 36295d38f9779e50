"""`ExpertCache`: as many experts as a limit of memory allows, and the ones that a layer has chosen always among them.

Everything that every token reads stays in memory. Before a layer's experts run, `require` waits until those that its router
has chosen are in memory; a policy (policies.py) says which others leave for them. The kernels and torch read the weights at
addresses that never change (file_memory.py), so the results are those of a model that is in memory as a whole, to the bit.

While a layer computes, the experts that the next ones will probably choose are read ahead: their routers are applied to this
layer's input, which differs little from their own (Eliseev and Mazur, "Fast inference of Mixture-of-Experts language models
with offloading", 2023, section 3.2). A read often takes longer than a layer, so it has to begin some layers before.

With a miss threshold τ > 0, an expert that is not in memory gives its place to the best one that is, where less than τ of
the token's weights is lost by that (missing.py). The result then depends on what was in memory.

Shape suffixes: T tokens, S slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

import numpy as np

from engine.checkpoint.miss_costs import MissCost, cost_of
from engine.errors import OptionError
from engine.expert_cache.figures import LayerFigures
from engine.expert_cache.file_memory import most_mappings
from engine.expert_cache.missing import Changed, numbers_of, replace_absent
from engine.expert_cache.places import FileMemories, Part, bytes_of, largest_layer_bytes
from engine.expert_cache.policies import DEFAULT, POLICIES, Key
from engine.expert_cache.readers import AHEAD, NOW, Loading, Readers
from engine.kernels.expert_places import ABSENT, COMING, DISTANCES, PRESENT
from engine.passes.memory_budget import resident_memory_bytes

HEADROOM_BYTES = 48 << 20
"""Allowance for what a step needs beyond what was resident when it began, besides activations."""
LEAST_PRECISION = 0.5
"""Share of the predicted experts that must be chosen for reading ahead to go on: every other read takes the disk's time."""
READ_SECONDS = 1e-3
"""Time that a read costs a step even if the step does not wait for it: calls, memory bandwidth and processor time."""
LEAST_MISSES = 0.05
"""Experts that a step of a layer must lack on average for a prediction to be worth its time."""
_MAPPINGS_OF_PART = 3
"""Allowance of memory mappings for each part of an expert whose pages are moved, with room for all other mappings."""
_MEMORY = 0.95
"""Weight of the past in the averages of a layer: of its misses, and of the precision of the predictions for it."""


class ExpertCache:
    """The experts in memory. One thread calls `require`; a few others read."""

    def __init__(
        self,
        memories: FileMemories,
        limit: int,
        *,
        activation_bytes: int = 0,
        miss_threshold: float = 0.0,
        policy: str = DEFAULT,
        reads_ahead: bool = True,
        resident: Callable[[], int] = resident_memory_bytes,
    ) -> None:
        """limit: the most resident bytes of the process, which `resident` measures. activation_bytes: what a step's
        activations may take.

        Raises OptionError for a limit that does not hold the experts of one layer.
        """
        self._memories, self._places, self.limit = memories, memories.places, limit
        self._headroom = HEADROOM_BYTES + activation_bytes
        self.miss_threshold, self.reads_ahead = miss_threshold, reads_ahead
        self.miss_costs: Sequence[MissCost] = ()
        """The measured costs of thresholds, where the checkpoint has some."""
        self._measured = resident
        self._moves_pages = _MAPPINGS_OF_PART * sum(map(len, self._places.values())) < most_mappings()
        """Whether the memory of an expert that leaves may go to the next one: each part is then a mapping of its own."""
        self._policy = POLICIES[policy]()
        self._readers = Readers()
        self._resident: set[Key] = set()
        self._loading: dict[Key, Loading] = {}
        self._lenders: dict[Key, Loading] = {}
        """Experts that left memory, each with the loading that takes its pages. They cannot come back before it is done."""
        self._ahead: dict[int, set[Key]] = {}
        """Experts that were read ahead, by layer, until the layer is reached."""
        self._wanted: dict[Key, None] = {}
        """Experts that the running layer uses; they stay until the next one runs."""
        self._predicted: dict[tuple[int, int], list[Key]] = {}
        """Predicted experts that were not in memory, by layer and distance, whether or not they were read."""
        self._precision: dict[tuple[int, int], float] = {}
        self._misses: dict[int, float] = {}
        self._waits: dict[int, tuple[int, float]] = {}
        """(steps of a layer for which experts were read, seconds that they waited for one of them on average)."""
        self.first = min(layer for layer, _ in self._places)
        self._numbers: dict[int, list[int]] = {}
        """The experts of each layer."""
        for layer, number in self._places:
            self._numbers.setdefault(layer, []).append(number)
        self.places: dict[int, Any] = {layer: np.zeros(max(own) + 1, np.int64) for layer, own in self._numbers.items()}
        """Where the experts of each layer are, int64 [N], for kernels."""
        self.awaits: dict[int, Any] = {layer: np.array([int(reads_ahead)], np.int64) for layer in self._numbers}
        """Whether a prediction of the experts that a layer will use next is worth its time, int64 [1], for kernels."""
        self.figures: dict[int, LayerFigures] = {}
        self.count_anew()
        self.held_bytes = 0
        """Bytes of the experts that are in memory or on their way."""
        self._other = resident()
        """The most bytes of everything else so far."""
        self._check()

    def count_anew(self) -> None:
        """Set all figures to zero."""
        self.figures = {layer: LayerFigures(layer) for layer in dict.fromkeys(layer for layer, _ in self._places)}

    def _check(self) -> None:
        """Raise OptionError unless the experts of each layer fit together."""
        least, limit = largest_layer_bytes(self._places), self.limit
        if self.capacity < least:
            needed = self._other + self._headroom + least
            raise OptionError(
                f"memory-limit is {limit / 1e9:.2f}GB, and this needs {needed / 1e9 + 0.005:.2f}GB at least: "
                f"{self._other / 1e9:.2f} for what every token reads and for the program, {least / 1e9:.2f} for the experts "
                f"of one layer, {self._headroom / 1e9:.2f} for the values of a step; give that much, or quantize the model"
            )

    @property
    def capacity(self) -> int:
        """Bytes of experts that the limit allows now."""
        return self.limit - self._other - self._headroom

    @property
    def spare_bytes(self) -> int:
        """Bytes that the limit leaves beside everything else and the experts of one layer."""
        return max(0, self.capacity - largest_layer_bytes(self._places))

    @cached_property
    def expert_sizes(self) -> dict[Key, int]:
        """Bytes of each expert in the files."""
        return {key: bytes_of(parts) for key, parts in self._places.items()}

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts in the files."""
        return sum(self.expert_sizes.values())

    @property
    def miss_cost(self) -> MissCost | None:
        """The measured cost that is nearest to the threshold and to the share of experts in memory; None without one."""
        if self.miss_threshold == 0:
            return None
        return cost_of(self.miss_costs, self.miss_threshold, self.held_bytes / self.expert_bytes)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the weights that stay in memory."""
        return self._memories.fixed_bytes

    def reserve(self, size: int) -> None:
        """Make room for a cache of keys and values, or anything else of this size, which is allocated next.

        Raises OptionError if the experts of a layer do not fit beside it.
        """
        self._settle()
        self._other = max(self._other, self._measured() - self.held_bytes + size)
        self._check()
        self._shrink()

    def begin_step(self) -> None:
        """Begin a step of all layers: note which experts have arrived, and what everything else in memory takes."""
        self._settle()
        if not self._loading:  # pages of an expert on its way are not all there yet
            self._other = max(self._other, self._measured() - self.held_bytes)
            self._shrink()

    def require(self, layer: int, chosen_TS: Any, weights_TS: Any, probabilities: Callable[[], Any] | None = None) -> None:
        """Bring the chosen experts into memory.

        chosen_TS: int64, negative for empty slots. weights_TS: float32. With a miss threshold, `probabilities` returns the
        router's, float32 [T, N], and chosen_TS and weights_TS are changed in place; nothing else reads these two. Raises
        CheckpointError for a disk that fails, and OptionError if the experts do not fit.
        """
        self._settle()
        figures = self.figures[layer]
        if self.miss_threshold > 0:
            changed = self._replace_absent(layer, chosen_TS, weights_TS, probabilities)
            figures.replaced, figures.left_out = figures.replaced + changed.replaced, figures.left_out + changed.left_out
        self._wanted = wanted = {(layer, number): None for number in numbers_of(chosen_TS)}
        missing = [key for key in wanted if key not in self._resident]
        late = sum(key in self._loading for key in missing)
        came = self._account(layer, wanted, len(missing))
        figures.late, figures.read = figures.late + late, figures.read + len(missing) - late
        waited = self._bring(layer, missing) if missing else 0.0
        figures.waited_seconds += waited
        self._price(layer, came, waited)

    def note(self, layer: int, chosen_TS: Any) -> None:
        """Note the choices of a step that found all of them in memory."""
        self._price(layer, self._account(layer, {(layer, number): None for number in numbers_of(chosen_TS)}, 0), 0.0)

    def expect(self, layer: int, numbers: Iterable[int], distance: int = 1) -> None:
        """Read experts ahead that a layer will probably use next, where such predictions have been good enough.

        distance: how many layers with experts before it the prediction was made.
        """
        missing = [key for number in numbers if (key := (layer, number)) not in self._resident and key not in self._loading]
        self._predicted[layer, distance] = missing
        if not self.reads_ahead or self._precision.get((layer, distance), 1.0) < LEAST_PRECISION:
            return
        own = self._ahead.setdefault(layer, set())
        for key in missing:
            own.add(key)
            if not self._begin(key, AHEAD, self._expected(self._wanted)):
                own.discard(key)
                break
            self.figures[layer].read_ahead += 1

    def close(self) -> None:
        """End the reading threads and close the files."""
        self._readers.close()
        self._memories.close()

    def _replace_absent(
        self, layer: int, chosen_TS: Any, weights_TS: Any, probabilities: Callable[[], Any] | None
    ) -> Changed:
        """Let resident experts take the places of absent ones where the miss threshold allows it."""
        used = numbers_of(chosen_TS)
        absent = {
            number for number in used if (layer, number) not in self._resident and (layer, number) not in self._loading
        }
        if not absent:
            return Changed(0, 0)
        assert probabilities is not None, "a miss threshold needs the router's probabilities"
        resident = [number for number in self._numbers[layer] if (layer, number) in self._resident]
        return replace_absent(chosen_TS, weights_TS, probabilities(), resident, absent, self.miss_threshold)

    def _account(self, layer: int, wanted: dict[Key, None], missing: int) -> int:
        """Count a layer's uses, of which so many were not in memory, and judge what was predicted for it.

        Returns the number of experts that are read for this step: the missing ones, and those that were read ahead in time.
        """
        self._policy.visit(layer)
        for key in wanted:
            self._policy.use(key)
        figures = self.figures[layer]
        figures.uses, figures.hits = figures.uses + len(wanted), figures.hits + len(wanted) - missing
        self._misses[layer] = _MEMORY * self._misses.get(layer, 1.0) + (1 - _MEMORY) * missing
        self.awaits[layer][0] = self.reads_ahead and self._misses[layer] >= LEAST_MISSES
        for distance in range(1, 1 + DISTANCES):
            if predicted := self._predicted.pop((layer, distance), []):
                share, before = sum(key in wanted for key in predicted) / len(predicted), (layer, distance)
                self._precision[before] = _MEMORY * self._precision.get(before, 1.0) + (1 - _MEMORY) * share
        ahead = self._ahead.pop(layer, ())
        figures.wasted += sum(key not in wanted for key in ahead)
        return missing + sum(key in wanted and key in self._resident for key in ahead)

    def _price(self, layer: int, came: int, seconds: float) -> None:
        """Tell the policy how long a layer waits for an expert. Experts of the first layer can never be read ahead."""
        if came:
            count, average = self._waits.get(layer, (0, 0.0))
            average += max(1 - _MEMORY, 1 / (count + 1)) * (seconds / came - average)
            self._waits[layer] = count + 1, average
            self._policy.price(layer, 1.0 + average / READ_SECONDS)

    def _expected(self, wanted: Container[Key]) -> Container[Key]:
        """Return the experts that should not leave: those that are wanted, on their way, or were read for a later layer."""
        return _Either(wanted, *self._ahead.values(), self._loading)

    def _bring(self, layer: int, missing: Sequence[Key]) -> float:
        """Wait for experts of the running step that are not in memory. Returns how long that took, in seconds."""
        started, wanted = time.perf_counter(), self._wanted
        for key in missing:
            if key in self._loading:
                self._readers.hurry(self._loading[key])
        for key in missing:
            if key not in self._loading and not self._begin(key, NOW, self._expected(wanted), wanted):
                raise OptionError(
                    f"memory-limit is {self.limit / 1e9:.2f}GB, {max(0, self.capacity) / 1e9:.2f} of it are left for "
                    f"experts, and layer {layer} uses {len(wanted)} at once; give a higher limit, or read shorter prompts"
                )
        self._readers.wait([self._loading[key] for key in missing])
        self._settle()
        return time.perf_counter() - started

    def _begin(self, key: Key, urgency: int, *pinned: Container[Key]) -> bool:
        """Make room and begin to read an expert. Returns False if nothing may leave for it.

        pinned: containers of experts that stay. If no other expert can leave, the next container takes the place of the
        one before.
        """
        parts, size = self._places[key], self.expert_sizes[key]
        if key in self._lenders:
            self._readers.hurry(self._lenders[key])
            self._readers.finish(self._lenders[key])
        lender: Key | None = None
        while self.held_bytes + size > self.capacity:
            leaving = next((found for own in pinned if (found := self._policy.victim(own)) is not None), None)
            if leaving is None:
                for memory, extent in self._places[lender] if lender is not None else ():
                    memory.give_back(extent)
                return False
            lends = self._moves_pages and lender is None  # the memory of one other expert is enough, as a rule
            self._drop(leaving, lends=lends)
            lender = leaving if lends else lender
        self.held_bytes += sum(memory.hold(extent) for memory, extent in parts)
        self.figures[key[0]].read_bytes += size
        self._loading[key] = Loading(parts, None if lender is None else partial(_take_pages, parts, self._places[lender]))
        if lender is not None:
            self._lenders[lender] = self._loading[key]
        self.places[key[0]][key[1]] = COMING
        self._readers.start(self._loading[key], urgency)
        return True

    def _drop(self, key: Key, *, lends: bool = False) -> None:
        if key in self._resident:
            self._policy.remove(key)
            self._resident.remove(key)
        self.places[key[0]][key[1]] = ABSENT
        self.held_bytes -= sum(memory.drop(extent, lends=lends) for memory, extent in self._places[key])

    def _settle(self) -> None:
        """Note which experts have been read since the last time."""
        if not self._loading:
            return
        self._lenders = {key: loading for key, loading in self._lenders.items() if not loading.is_done}
        for key, loading in list(self._loading.items()):
            if not loading.is_done:
                continue
            del self._loading[key]
            if loading.error is not None:
                self._drop(key)  # whoever waits for it has the error
            else:
                self._resident.add(key)
                self._policy.add(key)
                self.places[key[0]][key[1]] = PRESENT

    def _shrink(self) -> None:
        while self.held_bytes > self.capacity and (leaving := self._policy.victim(self._loading)) is not None:
            self._drop(leaving)


def _take_pages(parts: Iterable[Part], given: Iterable[Part]) -> None:
    """Move the memory of an expert that has left to the parts of one that is read next."""
    for own, other in zip_longest(parts, given):
        if own is None:
            other.memory.give_back(other.extent)
        elif other is not None:
            own.memory.take_pages(own.extent, other.memory, other.extent)


class _Either:
    """The keys of several containers."""

    def __init__(self, *containers: Container[Key]) -> None:
        self._containers: Sequence[Container[Key]] = containers

    def __contains__(self, key: object) -> bool:
        return any(key in own for own in self._containers)
