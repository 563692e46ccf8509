"""Prompts as token ids: an exact length, reproducible, and no two alike from the first cache block on."""

from collections.abc import Iterable

import numpy

BLOCK_TOKENS = 16  # prefix caches share whole blocks; two prompts that differ here share nothing
NUMBER_BITS = 32  # seeds and indices below 2**32 are told apart


def token_ids(length: int, seed: int, index: int, vocab_size: int, forbidden_ids: Iterable[int] = ()) -> list[int]:
    """Return `length` token ids for prompt number `index` of `seed`, the same on every machine.

    The first tokens spell out index and seed, so two prompts differ within their first block; one too
    short to hold both numbers is unique only as far as its length allows. Raises ValueError if impossible.
    """
    forbidden = sorted({number for number in forbidden_ids if 0 <= number < vocab_size})
    usable = vocab_size - len(forbidden)
    if length < 1 or usable < 2:
        raise ValueError(f"a prompt needs a token and two usable ids: length {length}, ids {usable}")
    if not (0 <= index < 2**NUMBER_BITS and 0 <= seed < 2**NUMBER_BITS):
        raise ValueError(f"seed and index must lie in 0 ... 2**{NUMBER_BITS} - 1: seed {seed}, index {index}")
    name = (_digits(index, usable) + _digits(seed, usable))[: min(length, BLOCK_TOKENS)]
    filling = numpy.random.default_rng([seed, index]).integers(usable, size=length - len(name))
    numbers = numpy.concatenate([numpy.array(name, dtype=int), filling])
    for hole in forbidden:  # in ascending order: the n-th usable id
        numbers[numbers >= hole] += 1
    return numbers.tolist()


def _digits(number: int, base: int) -> list[int]:
    """Return the number's digits in this base, least significant first, as many as the largest number has."""
    digits = []
    largest = 2**NUMBER_BITS - 1
    while largest:
        digits.append(number % base)
        number, largest = number // base, largest // base
    return digits
