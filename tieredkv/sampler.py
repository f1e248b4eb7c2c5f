"""From logits to the next token of each sequence. Knows no model and no pool.

The steps and their order are vLLM's: log-probabilities from the raw logits; logit bias and min_tokens; penalties;
temperature; min-p; top-k; top-p; draw. Drawing is an exponential race (the Gumbel-max trick): each token gets a number
hashed from seed, output position and token id, and the largest weight over number wins. Logits that differ by rounding,
as they do with the shape of the batch, change the winner only where two tokens all but tie; a draw by running sums would
shift every border between neighbours.

Invariants: a drawn token depends on the request's seed, its own logits and its output position only, never on what else
is in the batch or on a preemption; tokens of equal logit rank by their id. On a GPU nothing waits for the device but the
answers: one wait for a greedy batch, one more for each kind of sampling in it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch

from tieredkv.batch import SampledToken
from tieredkv.sequence import Sequence
from tieredkv.types import TokenLogprob

# Top-p alone looks at this many tokens first and sorts the vocabulary only where they do not hold enough mass.
_NUCLEUS_WIDTH = 256
# SplitMix64's finalizer (Steele, Lea and Flood, 2014), as signed 64-bit numbers.
_GOLDEN, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


class Sampler:
    """Chooses tokens. `default_seed` seeds requests that send none, together with their id; None: a random process seed."""

    def __init__(self, default_seed: int | None = None) -> None:
        self._base = os.urandom(16) if default_seed is None else default_seed.to_bytes(16, "little", signed=True)

    def start(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> Callable[[], list[SampledToken]]:
        """Begin to choose, without waiting for the device; what is returned waits and answers as `sample` does.

        `logits` must stay as they are until then.
        """
        if logits.device.type != "cpu" and all(_is_plain_greedy(s) and s.sampling.logprobs is None for s in sequences):
            best = logits.argmax(-1)
            return lambda: [SampledToken(token_id) for token_id in best.tolist()]
        return lambda: self.sample(logits, sequences)

    def sample(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> list[SampledToken]:
        """The next token of each of N sequences; logits [N, vocab] in any float type, left as they are."""
        if all(_is_plain_greedy(s) and s.sampling.logprobs is None for s in sequences):
            return [SampledToken(token_id) for token_id in _argmax(logits)]
        token_ids = self._choose(logits, sequences)
        logprobs = _logprobs(logits, sequences, token_ids)
        return [SampledToken(token_id, logprobs.get(row)) for row, token_id in enumerate(token_ids)]

    def _choose(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> list[int]:
        chosen = [0] * len(sequences)
        plain = [row for row, s in enumerate(sequences) if _is_plain_greedy(s)]
        if plain:
            _assign(chosen, plain, _argmax(_rows(logits, plain)))
        edited = [row for row, s in enumerate(sequences) if not _is_plain_greedy(s)]
        if not edited:
            return chosen
        work = _rows(logits, edited).float()
        if work.data_ptr() == logits.data_ptr():
            work = work.clone()
        for scores, row in zip(work, edited, strict=True):
            _edit(scores, sequences[row])
        greedy = [i for i, row in enumerate(edited) if sequences[row].sampling.greedy]
        if greedy:
            _assign(chosen, [edited[i] for i in greedy], _argmax(_rows(work, greedy)))
        drawn = [i for i, row in enumerate(edited) if not sequences[row].sampling.greedy]
        if drawn:
            rows = [edited[i] for i in drawn]
            self._draw_all(_rows(work, drawn), [sequences[row] for row in rows], rows, chosen)
        return chosen

    def _draw_all(self, scores: torch.Tensor, sequences: Seq[Sequence], rows: list[int], chosen: list[int]) -> None:
        """Draw for all rows of `scores` [R, vocab], grouped by how many of the best tokens have to be sorted."""
        vocab_size = scores.shape[1]
        params = [s.sampling for s in sequences]

        def column(values: Seq[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return _send(values, scores.device, dtype)[:, None]

        scores = (scores - scores.amax(-1, keepdim=True)) / column([p.temperature for p in params])
        if any(p.min_p > 0.0 for p in params):
            floor = column([p.min_p for p in params]).log()
            scores = scores.masked_fill(scores < floor, -torch.inf)
        seeds = column([self._seed(s) for s in sequences], torch.int64)
        top_p = column([p.top_p for p in params], torch.float64)
        top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        groups: dict[int, list[int]] = {}
        for i, p in enumerate(params):
            groups.setdefault(_sorted_width(top_k[i], p.top_p, vocab_size), []).append(i)
        for width, members in groups.items():
            part, own = _rows(scores, members), _rows(seeds, members)
            if width == 0:
                tokens = _draw(part.exp(), torch.arange(vocab_size, device=scores.device), own)
            else:
                limits = _send([top_k[i] for i in members], scores.device, torch.int64)[:, None]
                uncut = any(top_k[i] >= vocab_size for i in members)
                tokens = _draw_from_best(part, limits, _rows(top_p, members), own, width, uncut)
            _assign(chosen, [rows[i] for i in members], tokens.tolist())

    def _seed(self, sequence: Sequence) -> int:
        """The signed 64-bit number that decides this sequence's next token: a hash of its seed and its output position."""
        seed = sequence.sampling.seed
        state = hashlib.blake2b(digest_size=8, person=b"tkv.sample.2")
        if seed is None:
            request_id = sequence.request_id.encode("utf-8", "surrogatepass")
            state.update(b"r" + self._base + len(request_id).to_bytes(8, "little") + request_id)
        else:
            state.update(b"s" + (seed % 2**64).to_bytes(8, "little"))
        state.update(sequence.num_output_tokens.to_bytes(8, "little"))
        return int.from_bytes(state.digest(), "little", signed=True)


def _is_plain_greedy(sequence: Sequence) -> bool:
    """Whether the token is the largest raw logit."""
    params = sequence.sampling
    return (
        params.greedy
        and not params.needs_penalties
        and not params.logit_bias
        and sequence.num_output_tokens >= params.min_tokens
    )


def _rows(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some rows, in order; the tensor itself when that is all of them."""
    if len(rows) == tensor.shape[0]:
        return tensor
    return tensor.index_select(0, _send(rows, tensor.device, torch.int64))


def _send(values: Seq[float], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Some numbers on `device`, without waiting for what it is doing."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def _argmax(scores: torch.Tensor) -> list[int]:
    """The best token of each row, the first one of equals; scores [R, vocab]."""
    if scores.device.type == "cpu":
        # Eight rows of 49,152: 0.08 ms, where torch takes 0.34 in float32 and 0.72 in bfloat16.
        best: list[int] = scores.float().numpy().argmax(-1).tolist()
        return best
    return scores.argmax(-1).tolist()


def _assign(chosen: list[int], rows: list[int], tokens: list[int]) -> None:
    for row, token_id in zip(rows, tokens, strict=True):
        chosen[row] = token_id


def _edit(scores: torch.Tensor, sequence: Sequence) -> None:
    """Bias, minimum length and penalties, in place; scores [vocab] float32. Ids outside the vocabulary are passed over."""
    params, vocab_size = sequence.sampling, scores.shape[0]
    if bias := {i: value for i, value in params.logit_bias.items() if 0 <= i < vocab_size}:
        places = _send(list(bias), scores.device, torch.int64)
        scores[places] += _send(list(bias.values()), scores.device, torch.float32)
    if sequence.num_output_tokens < params.min_tokens:
        forbidden = [i for i in {*sequence.request.eos_token_ids, *params.stop_token_ids} if 0 <= i < vocab_size]
        # Where nothing else would be left, the wish cannot be granted.
        if len(forbidden) < vocab_size:
            scores.index_fill_(0, _send(forbidden, scores.device, torch.int64), -torch.inf)
    if params.repetition_penalty != 1.0:
        seen, _ = _count(sequence.token_ids, scores)
        values = scores[seen]
        factor = params.repetition_penalty
        scores[seen] = torch.where(values > 0, values / factor, values * factor)
    if params.presence_penalty or params.frequency_penalty:
        seen, counts = _count(sequence.output_token_ids, scores)
        scores[seen] -= params.frequency_penalty * counts + params.presence_penalty


def _count(token_ids: list[int], scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The different tokens of a list, and how often each occurs."""
    seen, counts = np.unique(np.asarray(token_ids, dtype=np.int64), return_counts=True)
    known = seen < scores.shape[0]
    device = scores.device
    return (
        torch.from_numpy(seen[known]).to(device, non_blocking=True),
        torch.from_numpy(counts[known]).to(device, non_blocking=True),
    )


def _sorted_width(top_k: int, top_p: float, vocab_size: int) -> int:
    """How many of the best tokens a row needs in order; 0 when the order of the vocabulary will do.

    It depends on the row's own settings only and is rounded up, so that rows of like settings share one pass.
    """
    if top_k < vocab_size:
        return min(max(64, 1 << (top_k - 1).bit_length()), vocab_size)
    return min(_NUCLEUS_WIDTH, vocab_size) if top_p < 1.0 else 0


def _best(scores: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` largest scores of each row and their ids, in order; equal scores rank by id, lowest first.

    Sorts unique integers: the bits of a float32, mapped so that integers compare as the floats do, above the inverted id.
    """
    bits = (scores + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(scores.shape[1], device=scores.device)
    keys = (ordered.long() << 32) | (0xFFFFFFFF - ids)
    keys = keys.topk(width, dim=-1).values
    best = 0xFFFFFFFF - (keys & 0xFFFFFFFF)
    return scores.gather(-1, best), best


def _draw_from_best(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, seeds: torch.Tensor, width: int, uncut: bool
) -> torch.Tensor:
    """Draw from the best `top_k` tokens, cut to the smallest set with a mass of `top_p`; all arguments [R, ...].

    `uncut` says whether some row's `top_k` is the whole vocabulary.
    """
    vocab_size = scores.shape[1]
    values, ids = _best(scores, width)
    weights = values.double().exp()
    weights = weights.masked_fill(torch.arange(width, device=scores.device) >= top_k, 0.0)
    total = weights.sum(-1, keepdim=True)
    everything = top_k >= vocab_size
    if width < vocab_size and uncut:
        total = torch.where(everything, scores.exp().sum(-1, keepdim=True, dtype=torch.float64), total)
    sums = weights.cumsum(-1)
    beyond = sums - weights >= top_p * total
    beyond[:, 0] = False
    tokens = ids.gather(-1, _draw(weights.masked_fill(beyond, 0.0).float(), ids, seeds)[:, None])[:, 0]
    short = (everything & (sums[:, -1:] < top_p * total))[:, 0]
    if width < vocab_size and uncut and bool(short.any()):
        tokens[short] = _draw_from_best(scores[short], top_k[short], top_p[short], seeds[short], vocab_size, True)
    return tokens


def _draw(weights: torch.Tensor, ids: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """The column that wins each row's race, with a chance in proportion to its weight; [R].

    weights [R, W] float32, not all zero; ids [W] or [R, W] the columns' token ids; seeds [R, 1] int64.
    """
    return (weights.nan_to_num(0.0) / _exponentials(ids, seeds)).argmax(-1)


def _exponentials(ids: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Exponential random numbers [R, W] float32, one for each seed and token id, above zero."""
    bits = ids * _GOLDEN + seeds
    bits = (bits ^ _shift(bits, 30)) * _MIX_1
    bits = (bits ^ _shift(bits, 27)) * _MIX_2
    bits = _shift(bits ^ _shift(bits, 31), 11)
    # Small numbers win, so it is near zero that they must be fine: log1p of a float32 keeps its relative precision there.
    uniforms = ((bits.double() + 0.5) * 2.0**-53).float()
    return -torch.log1p(-uniforms.clamp_(max=1 - 2.0**-24))


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Logical shift to the right of int64: torch's own copies the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _logprobs(logits: torch.Tensor, sequences: Seq[Sequence], token_ids: list[int]) -> dict[int, TokenLogprob]:
    """Log-probabilities from the raw logits, for the rows that asked for them."""
    rows = [row for row, s in enumerate(sequences) if s.sampling.logprobs is not None]
    if not rows:
        return {}
    raw = torch.log_softmax(_rows(logits, rows).float(), dim=-1)
    sampled = _send([token_ids[row] for row in rows], logits.device, torch.int64)[:, None]
    own = raw.gather(-1, sampled)
    ranks = (raw > own).sum(-1) + 1
    width = min(max(sequences[row].sampling.logprobs or 0 for row in rows), raw.shape[1])
    values, ids = _best(raw, width) if width else (raw[:, :0], sampled[:, :0])
    found = zip(rows, own[:, 0].tolist(), ranks.tolist(), ids.tolist(), values.tolist(), strict=True)
    return {
        row: TokenLogprob(
            token_id=token_ids[row],
            logprob=logprob,
            rank=rank,
            top=tuple(zip(best, best_values, strict=True))[: sequences[row].sampling.logprobs or 0],
        )
        for row, logprob, rank, best, best_values in found
    }
