"""The conversations of a proof cover the sampler, and depend on the seed alone."""

from app.prove.conversations import TURNS, generate_conversations


def test_a_seed_gives_the_same_conversations() -> None:
    assert generate_conversations(4, 12) == generate_conversations(4, 12)
    assert generate_conversations(4, 12) != generate_conversations(5, 12)


def test_the_first_conversations_do_not_depend_on_their_number() -> None:
    """A slow model runs fewer of them."""
    assert generate_conversations(0, 12)[:3] == generate_conversations(0, 3)


def test_conversations_cover_the_stages_of_the_sampler() -> None:
    specs = generate_conversations(0, 12)
    names = {name for spec in specs for name, value in spec.sampling.items() if value}
    assert names >= {
        *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "repeat_last_n"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    }
    assert any(spec.grammar for spec in specs)
    assert any(spec.cancel_after for spec in specs)
    assert specs[0].long_text
    assert all(len(spec.questions) == TURNS for spec in specs)


def test_every_sampled_conversation_has_a_seed() -> None:
    for spec in generate_conversations(0, 24):
        assert bool(spec.sampling.get("temperature")) == ("seed" in spec.sampling)
