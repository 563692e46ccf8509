"""Prompts: exact length, ids of the vocabulary, and no two that share a cache block."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.prompts import BLOCK_TOKENS, token_ids


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(1, 1024),
    seed=st.integers(0, 2**32 - 1),
    index=st.integers(0, 2**32 - 1),
    vocab_size=st.sampled_from([16, 512, 49152, 152064]),
)
def test_br13_a_prompt_has_exactly_the_asked_length_and_usable_ids(length, seed, index, vocab_size):
    prompt = token_ids(length, seed, index, vocab_size, forbidden_ids=(0, 2, 7))
    assert len(prompt) == length
    assert all(type(number) is int and 0 <= number < vocab_size for number in prompt)
    assert not {0, 2, 7} & set(prompt)


@pytest.mark.parametrize("vocab_size", [64, 49152])
def test_br15_ten_thousand_prompts_share_no_first_block(vocab_size):
    blocks = {
        tuple(token_ids(BLOCK_TOKENS, seed, index, vocab_size)) for seed in range(4) for index in range(2500)
    }
    assert len(blocks) == 10_000


def test_a_prompt_is_the_same_on_every_call_and_longer_ones_are_not_its_copies():
    assert token_ids(64, 7, 3, 512) == token_ids(64, 7, 3, 512)
    assert token_ids(64, 7, 3, 512) != token_ids(64, 7, 4, 512)
    assert token_ids(64, 7, 3, 512) != token_ids(64, 8, 3, 512)


def test_the_filling_spreads_over_the_whole_vocabulary():
    filling = token_ids(4000, 1, 1, 100)[BLOCK_TOKENS:]
    assert len(set(filling)) == 100


@pytest.mark.parametrize("wrong", [(0, 0, 0, 512), (8, -1, 0, 512), (8, 0, 2**32, 512), (8, 0, 0, 1)])
def test_an_impossible_prompt_is_refused(wrong):
    with pytest.raises(ValueError):
        token_ids(*wrong)
