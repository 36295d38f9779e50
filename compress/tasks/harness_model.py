"""An engine as a model of lm-evaluation-harness (its class `LM`), so that tasks measure what this project runs.

Every family, artifact and export is evaluated as it is generated from: with low-bit weights as stored, and with adaptive
expert skipping. Token handling follows the harness's own `hf` model, so both give the same numbers where both can run.

Shape suffixes: B sequences, L positions, D hidden, C tokens of a continuation, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from engine.batching.loop import PREFILL_CHUNK
from engine.batching.request import Request, Update
from engine.batching.request_state import RequestState, Surroundings
from engine.batching.scheduler import Scheduler
from engine.checkpoint.tokenizer import load_transformers_tokenizer
from engine.decoder.model import Decoder
from engine.decoder.paged_cache import BLOCK_SIZE
from engine.errors import CheckpointError, OptionError
from engine.generation.generate import Engine
from engine.generation.options import SamplingOptions
from engine.generation.text_stream import plain_text
from engine.progress import Progress, no_progress

TOKENS_PER_BATCH = 2048
"""Number of tokens, padding included, that are read together for log-likelihoods; at least one sequence is."""
SEQUENCES = 16
"""Maximum number of sequences that generate at the same time."""
MAX_NEW_TOKENS = 256
"""Number of new tokens of a request that names none, as in the harness's own models."""

Scored = tuple[float, bool]
"""The log-probability of a continuation, and whether greedy decoding would generate it."""


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A model of lm-evaluation-harness that computes with an Engine."""

    def __init__(self, engine: Engine, progress: Progress = no_progress) -> None:
        """Raises OptionError for a tokenizer without a token that texts begin or end with."""
        super().__init__()
        self._engine, self._progress = engine, progress
        self.tokenizer = load_transformers_tokenizer(engine.checkpoint)
        own = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if own == (None, None):
            raise OptionError(
                f"{engine.checkpoint.directory}: the tokenizer has no begin token and no end token, and tasks need one"
            )
        self._begin: int = own[1] if own[0] is None else own[0]
        self._max_length = engine.checkpoint.config.max_positions
        engine.prepare()

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        end = self.tokenizer.eos_token_id
        return self._begin if end is None else int(end)

    @property
    def prefix_token_id(self) -> int:
        """The token before the first token of a text without context."""
        return self._begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text. None adds special tokens by the tokenizer's own rule, but no second begin token."""
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self._begin)):
            add_special_tokens = False
        asked = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        tokens: list[int] = self.tokenizer.encode(string, **asked)
        return tokens

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[Scored]:
        """Return log-probability and greediness of each continuation, given its context.

        Contexts that are too long lose tokens at the left. Requests with equal inputs are computed once: answers of one
        token differ only in the token that is looked up.
        """
        wanted: dict[tuple[int, ...], list[int]] = {}
        for number, (_pair, context, continuation) in enumerate(requests):
            if not context or not 0 < len(continuation) <= self._max_length:
                raise OptionError(
                    f"an answer of {len(continuation)} tokens cannot be scored; the model has {self._max_length} positions"
                )
            read = tuple([*context, *continuation][-(self._max_length + 1) :][:-1])
            wanted.setdefault(read, []).append(number)
        scored: dict[int, Scored] = {}
        with torch.inference_mode():
            for batch in self._progress(list(_batches(list(wanted))), "log-likelihoods (batches)"):
                for read, last_logits in zip(batch, self._forward(batch), strict=True):
                    for number in wanted[read]:
                        continuation = requests[number][2]
                        scored[number] = _scored(last_logits(len(continuation)), continuation)
        return [scored[number] for number in range(len(requests))]

    def _forward(self, batch: Sequence[tuple[int, ...]]) -> Iterator[Callable[[int], Tensor]]:
        """Read sequences together; yield for each a function from C to the logits [C, V] of its last C positions.

        Sequences are padded at the right, where causal attention never looks.
        """
        decoder, lengths = self._engine.decoder, [len(read) for read in batch]
        if not isinstance(decoder, Decoder):
            for read in batch:
                logits_LV = decoder(torch.tensor([read]))[0]
                yield partial(_last_rows, logits_LV)
            return
        choice, longest = self._engine.prompt_kernels, max(lengths)
        tokens_BL = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, read in enumerate(batch):
            tokens_BL[row, : len(read)] = torch.tensor(read)
        if self._engine.skip_counter is not None:
            real_BL = torch.arange(longest) < torch.tensor(lengths)[:, None]
            self._engine.skip_counter.counted_T = real_BL.flatten().to(self._engine.device)
        hidden_BLD = decoder.hidden_states(tokens_BL.to(self._engine.device), None, None, choice)
        for hidden_LD, length in zip(hidden_BLD, lengths, strict=True):
            yield partial(_last_logits, decoder, hidden_LD[:length])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, in windows of the model's length that follow each other."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            (text,) = request.args
            made = get_rolling_token_windows(self.tok_encode(text), self._begin, self._max_length, context_len=1)
            for context, continuation in map(make_disjoint_window, made):
                windows.append((None, context, continuation))
                owners.append(number)
        sums = [0.0] * len(requests)
        for number, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += value
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each prompt, up to its first stop string, its end token, or its limit."""
        asked = [self._generation_request(*request.args) for request in requests]
        if not asked:
            return []
        engine = self._engine
        position, state = engine.cache_sizes
        longest = max(len(each.prompt) + each.max_new_tokens for each in asked)
        sequences = min(SEQUENCES, len(asked))
        blocks = -(-longest // BLOCK_SIZE) + 1  # every running sequence may need one more block
        scheduler = Scheduler(
            engine,
            kv_cache_bytes=sequences * (blocks * BLOCK_SIZE * position + state),
            max_batch_size=sequences,
            max_model_length=longest,
            prefill_chunk=PREFILL_CHUNK,
        )
        surroundings = Surroundings(engine.end_tokens, partial(plain_text, engine.tokenizer))
        texts: list[list[str]] = [[] for _ in asked]
        states = []
        for number, request in enumerate(asked):
            scheduler.check(request)
            states.append(RequestState(number, request, partial(_take, texts[number]), surroundings))
            scheduler.add(states[-1])
        for state in self._progress(states, "generating (requests)"):
            while not state.finished:
                scheduler.step()
        return ["".join(pieces) for pieces in texts]

    def _generation_request(self, context: str, options: dict[str, Any]) -> Request:
        """Return a request of the harness as one of ours. Raises OptionError for options that leave no room for a prompt."""
        asked: dict[str, Any] = dict(normalize_gen_kwargs(options, MAX_NEW_TOKENS))
        stop, new = asked.get("until") or [], int(asked["max_gen_toks"])
        if not 0 < new < self._max_length:
            raise OptionError(f"a task asks for {new} new tokens; the model has {self._max_length} positions")
        sampling = SamplingOptions(
            temperature=float(asked.get("temperature") or 0.0) if asked.get("do_sample") else 0.0,
            top_p=float(asked.get("top_p") or 1.0),
            top_k=int(asked.get("top_k") or 0),
        )
        prompt = self.tok_encode(context)[-(self._max_length - new) :] or [self._begin]
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        return Request(tuple(prompt), new, sampling, tuple(filter(None, stops)))


def _batches(inputs: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Yield sequences of similar length, longest first, up to TOKENS_PER_BATCH with their padding."""
    ordered = sorted(inputs, key=len, reverse=True)
    while ordered:
        size = max(1, TOKENS_PER_BATCH // max(1, len(ordered[0])))
        yield ordered[:size]
        del ordered[:size]


def _last_rows(logits_LV: Tensor, count: int) -> Tensor:
    return logits_LV[-count:]


def _last_logits(decoder: Decoder, hidden_LD: Tensor, count: int) -> Tensor:
    return decoder.logits(hidden_LD[-count:])


def _scored(logits_CV: Tensor, continuation: Sequence[int]) -> Scored:
    """Return Σ log p of the continuation's tokens, and whether each is the most probable one."""
    tokens_C = torch.tensor(continuation, device=logits_CV.device)
    logs_CV = logits_CV.float().log_softmax(-1)
    if not bool(logs_CV.isfinite().any(-1).all()):
        raise CheckpointError("the logits of a task's text are not finite; activations overflow, try --dtype float32")
    chosen_C = logs_CV.gather(-1, tokens_C[:, None])[:, 0]
    return float(chosen_C.sum()), bool((logs_CV.argmax(-1) == tokens_C).all())


def _take(pieces: list[str], update: Update) -> None:
    """Keep the new text of a request. Raises CheckpointError for a request that failed."""
    if update.finish_reason == "error":
        raise CheckpointError(update.error)
    pieces.append(update.text)
