"""Batches of text for each way of learning from it: the next token, masked tokens and pairs, corrupted spans.

Where a way needs tokens that are not text, they are the last ids of the vocabulary, as in T5. In a vocabulary of 256
those are bytes which text in UTF-8 never has (0xF5 to 0xFF) or seldom has; ByT5 does the same (Xue et al. 2021,
arXiv:2105.13626, section 3.1).

Of a batch, any examples can be made: random numbers are drawn for all of them, text is read only for these.
"""

import numpy as np

from autoshard.errors import ConfigError
from autoshard.train.data.batches import ALL, Batch, Examples

MASKED_SHARE = 0.15
"""Share of the tokens to predict (Devlin et al. 2018, arXiv:1810.04805, section 3.1; Raffel et al. 2019,
arXiv:1910.10683, section 3.3.4)."""

SPAN_LENGTH = 3
"""Mean length of a corrupted span, in tokens (Raffel et al. 2019, section 3.3.4)."""

MIN_PAIR_LENGTH = 5
"""Three special tokens, and one of each piece."""


def windows(
    corpus: np.ndarray, rng: np.random.Generator, batch_size: int, length: int, examples: Examples = ALL
) -> np.ndarray:
    """Random pieces of a corpus of at least `length` bytes: int32 (examples, length)."""
    first = rng.integers(corpus.size - length + 1, size=(batch_size, 1))[examples]
    return corpus[first + np.arange(length)].astype(np.int32)


def next_token(
    corpus: np.ndarray, rng: np.random.Generator, batch_size: int, length: int, examples: Examples = ALL
) -> Batch:
    """Pieces of text, each with itself one byte later to predict.

    Args:
        corpus: uint8, at least length + 1 bytes.
        rng: picks the pieces.
        batch_size: pieces.
        length: tokens of a piece.
        examples: which of the pieces to read.

    Returns:
        `inputs` and `targets`, int32 (examples, length).
    """
    pieces = windows(corpus, rng, batch_size, length + 1, examples)
    return {"inputs": pieces[:, :-1], "targets": pieces[:, 1:]}


def masked_pairs(
    corpus: np.ndarray,
    rng: np.random.Generator,
    batch_size: int,
    length: int,
    vocab_size: int,
    examples: Examples = ALL,
) -> Batch:
    """Pairs of pieces of text with some tokens masked; half of the second pieces follow the first ones in the text.

    Pairs and masks are those of BERT (Devlin et al. 2018, section 3.1): of the tokens to predict, 80 % are replaced by
    the mask, 10 % by a random token, and the rest stay.

    Args:
        corpus: uint8, at least length - 3 bytes.
        rng: picks the pieces and the tokens to predict.
        batch_size: pairs.
        length: tokens of a pair, at least `MIN_PAIR_LENGTH`: a start token, and a separator behind each piece.
        vocab_size: at least 256; its last three ids are mask, start and separator.
        examples: which of the pairs to read.

    Returns:
        The batch of `autoshard_models.encoder.batch_shapes`, without padding.
    """
    mask, start, separator = range(vocab_size - 1, vocab_size - 4, -1)
    first = (length - 3) // 2
    second = length - 3 - first
    text = windows(corpus, rng, batch_size, first + second, examples)
    follows = rng.random(batch_size)[examples] < 0.5
    behind = np.where(follows[:, None], text[:, first:], windows(corpus, rng, batch_size, second, examples))
    column = lambda token: np.full((len(text), 1), token, np.int32)
    tokens = np.concatenate(
        [column(start), text[:, :first], column(separator), behind, column(separator)], axis=1, dtype=np.int32
    )
    is_text = np.ones(length, np.bool_)
    is_text[[0, first + 1, length - 1]] = False
    is_masked = (rng.random((batch_size, length))[examples] < MASKED_SHARE) & is_text
    fate = rng.random((batch_size, length))[examples]
    replaced = np.where(fate < 0.8, mask, rng.integers(256, size=(batch_size, length))[examples])
    segments = (np.arange(length) > first + 1).astype(np.int32)
    return {
        "inputs": np.where(is_masked & (fate < 0.9), replaced, tokens).astype(np.int32),
        "segments": np.broadcast_to(segments, tokens.shape).copy(),
        "is_token": np.ones(tokens.shape, np.bool_),
        "is_masked": is_masked,
        "targets": tokens,
        "follows": follows.astype(np.int32),
    }


def corrupted_length(input_length: int, target_length: int) -> int:
    """Longest piece of text that, with its spans corrupted, fits inputs and targets of these lengths, in tokens.

    Raises:
        ConfigError: none does.
    """
    for length in range(2 * input_length, 1, -1):
        num_masked, num_spans = _num_corrupted(length)
        if length - num_masked + num_spans <= input_length and num_masked + num_spans + 1 <= target_length:
            return length
    raise ConfigError(
        "data.sequence_length: inputs must have at least 2 tokens and targets at least 3; received "
        f"{input_length} and {target_length}. Raise data.sequence_length or the model's lengths."
    )


def corrupted_spans(
    corpus: np.ndarray,
    rng: np.random.Generator,
    batch_size: int,
    input_length: int,
    target_length: int,
    vocab_size: int,
    examples: Examples = ALL,
) -> Batch:
    """Pieces of text with spans cut out, to be told from what is left.

    Each span is replaced by a sentinel of its own; the target lists, behind each sentinel, what it stands for, and ends
    with one more sentinel (Raffel et al. 2019, section 3.1.4). Sentinels count down from the last id.

    Args:
        corpus: uint8, at least `corrupted_length` bytes.
        rng: picks the pieces and the spans.
        batch_size: pieces.
        input_length: tokens of an input, at least 2.
        target_length: tokens of a target, at least 3.
        vocab_size: at least 256.
        examples: which of the pieces to read.

    Returns:
        The batch of `autoshard_models.encoder_decoder.batch_shapes`; padding and the start token are 0.
    """
    length = corrupted_length(input_length, target_length)
    num_masked, num_spans = _num_corrupted(length)
    text = windows(corpus, rng, batch_size, length, examples)
    kept = _random_lengths(rng, batch_size, length - num_masked, num_spans, examples)
    cut = _random_lengths(rng, batch_size, num_masked, num_spans, examples)
    runs = np.stack([kept, cut], axis=-1).reshape(len(text), 2 * num_spans)
    run = np.repeat(np.tile(np.arange(2 * num_spans), len(text)), runs.ravel()).reshape(text.shape)
    is_cut = run % 2 == 1
    is_first = np.diff(run, axis=1, prepend=-1) > 0
    with_sentinels = np.where(is_first, vocab_size - 1 - run // 2, text).astype(np.int32)
    inputs = np.where(is_cut, with_sentinels, text)[~is_cut | is_first].reshape(len(text), -1)
    # A span stands behind its sentinel, which takes the place of the last kept token before it.
    before = np.roll(is_cut & is_first, -1, axis=1)
    sentinels = np.where(before, vocab_size - 1 - run // 2, text)
    targets = sentinels[is_cut | before].reshape(len(text), -1)
    targets = np.concatenate([targets, np.full((len(text), 1), vocab_size - 1 - num_spans)], axis=1)
    padded = _padded(targets, target_length)
    return {
        "inputs": _padded(inputs, input_length),
        "is_input": _is_within(inputs, input_length),
        "shifted_targets": np.pad(padded[:, :-1], ((0, 0), (1, 0))),
        "targets": padded,
        "is_target": _is_within(targets, target_length),
    }


def _num_corrupted(length: int) -> tuple[int, int]:
    """Tokens to cut out of a piece of text, and spans that they form."""
    num_masked = max(round(length * MASKED_SHARE), 1)
    return num_masked, max(round(num_masked / SPAN_LENGTH), 1)


def _random_lengths(
    rng: np.random.Generator, batch_size: int, total: int, num_parts: int, examples: Examples
) -> np.ndarray:
    """Lengths of at least 1 that add up to `total`, all such sequences alike likely: (examples, num_parts)."""
    cuts = np.argsort(rng.random((batch_size, total - 1))[examples], axis=1)[:, : num_parts - 1] + 1
    return np.diff(np.sort(cuts, axis=1), axis=1, prepend=0, append=total)


def _padded(tokens: np.ndarray, length: int) -> np.ndarray:
    return np.pad(tokens, ((0, 0), (0, length - tokens.shape[1]))).astype(np.int32)


def _is_within(tokens: np.ndarray, length: int) -> np.ndarray:
    return np.broadcast_to(np.arange(length) < tokens.shape[1], (tokens.shape[0], length)).copy()
