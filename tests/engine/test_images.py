"""Images in prompts: bits do not depend on batches, chunks, caches and restarts; the vision tower
runs between decode steps, once per image."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_unflatten

from app.core.images import ImagePixels
from app.core.jobs import Token
from app.core.requests import EmbedJob
from app.engine import sequence
from app.engine.loop import Loop
from app.engine.memory_profile import profile_memory
from models import architectures
from models.base import select_all
from models.cpu_layout import apply_cpu_layout
from models.image_inputs import ImageInputs
from models.mrope import ImageRange, make_positions
from models.vision.tower import ImageFeatures
from tests import tiny
from tests.engine import hybrid
from tests.engine.harness import Outcome, assert_same, job, make_loop, token_bits
from tests.engine.images import (
    BEGIN,
    END,
    FakeEncoding,
    FakeTower,
    Part,
    build_prompt,
    drive,
    image_job,
    picture,
)

pytestmark = pytest.mark.recorded

NONE = frozenset[int]()
CAT, DOG, BIRD = picture(1), picture(2, 3, 3), picture(3, 1, 5)
PICTURES = (CAT, DOG, BIRD)
POLICIES = ("single", "radix", "slots", "multi_user")

# one model of each kind: ordinary positions, M-RoPE, M-RoPE with recurrent layers, and images whose
# rows attend to each other in both directions
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny.CONFIG,
    "qwen3_vl": {
        **tiny.CONFIG,
        "model_type": "qwen3_vl",
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "head_dim": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_scaling": {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
    },
    "gemma3": {
        **tiny.CONFIG,
        "model_type": "gemma3_text",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "tie_word_embeddings": True,
    },
}


@cache
def build(name: str) -> Any:
    """A model with random weights and a tower of this size."""
    if name == "hybrid":
        return hybrid.Model()
    config = CONFIGS[name]
    architecture = architectures._find_architecture(config, config)
    drawn: Any = architecture.Model(architecture.Config.from_dict(config))
    rng = np.random.default_rng(0)
    model: Any = tree_flatten(drawn.parameters())
    drawn.update(
        tree_unflatten([(key, mx.array(_draw(rng, key, array.shape))) for key, array in model])
    )
    apply_cpu_layout(drawn)
    drawn.eval()
    return drawn


def _draw(rng: np.random.Generator, name: str, shape: Sequence[int]) -> np.ndarray:
    scale = 0.1 if len(shape) == 1 else (4.0 if "lm_head" in name else 1.0) / shape[-1] ** 0.5
    shift = 1.0 if len(shape) == 1 else 0.0
    return (shift + scale * rng.standard_normal(shape)).astype(np.float32)


@pytest.fixture(params=[*CONFIGS, "hybrid"])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The model with a fresh tower."""
    built = build(request.param)
    deepstack = 2 if request.param == "qwen3_vl" else 0
    hidden = CONFIGS.get(request.param, {"hidden_size": hybrid.WIDTH})["hidden_size"]
    built.vision = FakeTower(hidden, deepstack=deepstack)
    yield built
    built.vision = None


@pytest.fixture
def llama() -> Iterator[Any]:
    built = build("llama")
    built.vision = FakeTower(tiny.CONFIG["hidden_size"])
    yield built
    built.vision = None


def solve(model: Any, *parts: Part, **options: Any) -> Outcome:
    """The output alone, without caches."""
    return drive(make_loop(model, **options), *PICTURES).run(image_job("a", *parts))["a"]


def assert_equal(loop: Loop, a: Outcome, b: Outcome) -> None:
    assert a.reason == b.reason in ("stop", "length"), (a.error, b.error)
    if loop.batch_invariant:
        assert token_bits(a) == token_bits(b)
    else:
        assert_same(a, b)


PROMPTS: Sequence[Sequence[Part]] = (
    (b"What is this? ", CAT, b" Tell me."),
    (CAT, DOG),
    (b"first ", DOG, b" then ", CAT, CAT, b"."),
    (BIRD,),
    (b"no image at all",),
)


def test_the_engine_computes_what_the_model_computes(model: Any) -> None:
    """The whole prompt in one pass, and then each token in a pass of the whole sequence."""
    parts = (b"see ", CAT, b" and ", DOG, b"!")
    ids, spans = build_prompt(*parts)
    one = image_job("a", *parts, max_tokens=4, stop_token_ids=NONE)
    outcome = drive(make_loop(model), *PICTURES).run(one)["a"]
    features = [encode(model.vision, image) for image in (CAT, DOG)]
    known = list(ids)
    for token in outcome.tokens:
        rows = [i for i, id in enumerate(known) if id < 0]
        ranges = [ImageRange(span.start, *span.grid) for span in spans]
        rules = model.image_rules
        images = ImageInputs(
            rows=mx.array(rows, dtype=mx.int32),
            features=mx.concatenate([f.rows for f in features]),
            deepstack=[
                mx.concatenate(list(level))
                for level in zip(*(f.deepstack for f in features), strict=True)
            ],
            positions=make_positions(ranges, 0, len(known)) if rules.positions == "mrope" else None,
            groups=[(span.start, span.end) for span in spans] if rules.atomic else [],
        )
        tokens = mx.array([[max(id, 0) for id in known]])
        hidden = model(tokens, model.make_kv(), select_all, images)
        logits = model.logits(hidden[:, -1])[0]
        best: Any = mx.sort(logits)[-2:].tolist()
        if best[1] - best[0] > 1e-3:
            assert mx.argmax(logits).item() == token.id
        known.append(token.id)


def encode(tower: FakeTower, image: ImagePixels) -> ImageFeatures:
    encoding = tower.begin(
        [
            mx.array(np.frombuffer(t.data, np.uint8).reshape(t.height, t.width, 3))
            for t in image.tiles
        ]
    )
    while encoding.num_done < encoding.num_steps:
        encoding.run_step()
    return encoding.finish()


@pytest.mark.parametrize("policy", ["radix", "slots"])
def test_batched_prompts_give_the_bits_of_each_alone(model: Any, policy: str) -> None:
    alone = [solve(model, *parts) for parts in PROMPTS]
    loop = make_loop(model, running=3, policy=policy)
    jobs = [image_job(str(i), *parts) for i, parts in enumerate(PROMPTS)]
    outcomes = drive(loop, *PICTURES).run(*jobs)
    for i, expected in enumerate(alone):
        assert_equal(loop, outcomes[str(i)], expected)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 13, 64])
def test_every_chunk_size_gives_the_same_bits(model: Any, chunk: int) -> None:
    parts = (b"look: ", DOG, b" and ", CAT, b"!")
    loop = make_loop(model, chunk=chunk)
    assert_equal(loop, solve(model, *parts, chunk=chunk), solve(model, *parts, chunk=8))


def test_an_atomic_image_is_computed_in_one_chunk() -> None:
    model = build("gemma3")
    model.vision = FakeTower(32)
    driver = drive(make_loop(model, chunk=4), *PICTURES)
    outcome = driver.run(image_job("a", b"123456", DOG, b"abcdefg"))["a"]
    ends = sorted(set(outcome.progress))
    assert 7 in ends  # text, and the mark
    assert not any(7 < end < 16 for end in ends)
    assert 16 in ends


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("exact", [False, True])
def test_a_cached_prefix_with_an_image_gives_the_same_bits(
    model: Any, policy: str, exact: bool
) -> None:
    first = (b"a picture: ", CAT, b" What is it? ")
    second = (*first, b"It is a cat. And this one? ", DOG, b" Hm.")
    expected = solve(model, *second, exact=exact)
    loop = make_loop(model, running=2, policy=policy, exact=exact)
    driver = drive(loop, *PICTURES)
    driver.run(image_job("first", *first))
    tower: FakeTower = model.vision
    before = tower.begun
    outcome = driver.run(image_job("second", *second))["second"]
    assert_equal(loop, outcome, expected)
    if policy == "radix":  # the others cannot trim a sliding window
        assert outcome.cached >= 16, "the image is cached"
        assert tower.begun == before + 1
        assert [key for name, key in driver.requests if name == "second"] == [DOG.key]


def test_text_after_a_conversation_with_an_image_has_its_own_positions(model: Any) -> None:
    """The layer caches of the conversation are continued from before the image."""
    text = b"a common beginning of some length, "
    loop = make_loop(model, policy="radix")
    driver = drive(loop, *PICTURES)
    driver.run(image_job("image", text, DOG, b" end"))
    outcome = driver.run(image_job("text", text, b"and words only"))["text"]
    assert_equal(loop, outcome, solve(model, text, b"and words only"))


texts = st.binary(min_size=0, max_size=6)
pictures = st.builds(picture, st.integers(10, 14), st.integers(1, 3), st.integers(1, 4))
prompts = st.lists(texts | pictures, min_size=1, max_size=6)


@given(common=prompts, image=pictures, other=pictures, rest=texts)
@examples(max_examples=40, deadline=None)
def test_the_same_text_with_another_image_never_hits(
    common: list[Part], image: ImagePixels, other: ImagePixels, rest: bytes
) -> None:
    model = build("llama")
    model.vision = FakeTower(tiny.CONFIG["hidden_size"])
    shared, _ = build_prompt(*common)
    known = [part for part in (*common, image, other) if isinstance(part, ImagePixels)]
    for policy in POLICIES:
        driver = drive(make_loop(model, policy=policy, running=2), *known)
        driver.run(image_job("a", *common, image, rest, max_tokens=2))
        outcome = driver.run(image_job("b", *common, other, rest, max_tokens=2))["b"]
        if image.key != other.key:
            assert outcome.cached <= len(shared) + 1
        alone = drive(make_loop(model), *known)
        expected = alone.run(image_job("b", *common, other, rest, max_tokens=2))["b"]
        assert_equal(alone.loop, outcome, expected)


@pytest.mark.parametrize("policy", ["radix", "slots"])
def test_preempted_sequences_give_the_same_bits(model: Any, policy: str) -> None:
    footprint = profile_memory(
        model, budget=0, weights=0, chunk=8, max_batch_size=1, heads=0, context=512
    ).kv_footprint
    options: dict[str, Any] = {"max_tokens": 300, "stop_token_ids": NONE}
    parts = [(b"%d " % i, image, b" " * 220, DOG, b"?") for i, image in enumerate(PICTURES)]
    expected = [
        drive(make_loop(model, context=1024), *PICTURES).run(image_job("a", *part, **options))["a"]
        for part in parts
    ]
    loop = make_loop(
        model, running=3, policy=policy, budget=3 * footprint(512) + 30_000, context=1024, chunk=32
    )
    driver = drive(loop, *PICTURES)
    jobs = [image_job(str(i), *part, **options) for i, part in enumerate(parts)]
    outcomes = driver.run(*jobs)
    assert driver.stats.preemptions > 0
    for i, outcome in enumerate(expected):
        assert_equal(loop, outcomes[str(i)], outcome)


def test_an_image_is_encoded_once(llama: Any) -> None:
    """Twice in a prompt, in a batch, and in a later prompt."""
    tower: FakeTower = llama.vision
    driver = drive(make_loop(llama, running=3, policy="slots"), *PICTURES)
    driver.run(*(image_job(str(i), b"%d" % i, CAT, b" and ", CAT) for i in range(3)))
    assert tower.begun == 1
    assert len(driver.requests) == 1
    driver.run(image_job("later", b"later", CAT))
    assert tower.begun == driver.stats.images_encoded == len(driver.requests) == 1
    assert driver.stats.image_cache_hits > 0


def test_a_prompt_that_is_cached_needs_no_pixels(llama: Any) -> None:
    loop = make_loop(llama, policy="radix", image_cache_bytes=0)
    driver = drive(loop, *PICTURES)
    driver.run(image_job("a", b"see ", CAT, b" what?"))
    before = len(driver.requests)
    driver.run(image_job("b", b"see ", CAT, b" what? really?"))
    assert len(driver.requests) == before


def test_evicted_features_are_encoded_again(llama: Any) -> None:
    tower: FakeTower = llama.vision
    loop = make_loop(llama, policy="slots", image_cache_bytes=0)
    driver = drive(loop, *PICTURES)
    driver.run(image_job("a", b"a", CAT))
    driver.run(image_job("b", b"b", CAT))
    assert tower.begun == len(driver.requests) == 2


def test_pixels_are_requested_two_images_ahead(llama: Any) -> None:
    driver = drive(make_loop(llama), *PICTURES)
    driver.submit(image_job("a", b"x", CAT, b"y", DOG, b"z", BIRD))
    seen: list[int] = []
    while not driver.loop.idle:
        driver.step()
        seen.append(len(driver.requests))
    assert [key for _, key in driver.requests] == [CAT.key, DOG.key, BIRD.key]
    assert 2 in seen, "the third image is requested later"


def test_few_images_are_in_memory_however_many_sequences_wait(llama: Any) -> None:
    """The ledger counts their pixels before any are requested."""
    images = [picture(20 + n, 2, 2 + n % 3) for n in range(24)]
    loop = make_loop(llama, running=8, policy="slots")
    driver = drive(loop, *images, provides=lambda _: False)
    jobs = [
        image_job(
            str(n), b"%d" % n, *(p for i in images[3 * n : 3 * n + 3] for p in (i, b"x" * 20))
        )
        for n in range(8)
    ]
    driver.submit(*jobs)
    answered = 0
    for _ in range(2000):
        driver.step()
        running = loop._scheduler.running
        keys = {key for s in running for key in (*s.pixels, *s.requested_images)}
        assert len(keys) <= 4
        borrowed = driver.stats.ledger.kv - sum(s.reserved_bytes for s in running)
        sizes = {i.key: sum(len(t.data) for t in i.tiles) for i in images}
        assert borrowed >= sum(sizes[key] for key in keys)
        if loop.idle:
            if answered == len(driver.requests):
                break
            for name, key in driver.requests[answered:]:
                driver.provide(name, [key])
            answered = len(driver.requests)
    assert all(outcome.reason in ("stop", "length") for outcome in driver.outcomes.values())
    assert driver.stats.images_encoded == len(driver.requests) == len(images)
    driver.step()
    assert driver.stats.ledger.kv == 0


def test_a_preempted_sequence_keeps_no_pixels(llama: Any) -> None:
    """Late pixels are ignored, and requested again when the sequence runs again."""
    loop = make_loop(llama, running=2, policy="slots")
    driver = drive(loop, *PICTURES, provides=lambda _: False)
    driver.submit(image_job("a", b"see ", CAT, b" and ", DOG))
    while not loop.idle:
        driver.step()
    driver.provide("a", [DOG.key])
    [sequence] = loop._scheduler.running
    loop._scheduler.preempt(sequence)
    driver.provide("a", [CAT.key])
    assert not sequence.pixels
    while not loop.idle:
        driver.step()
    assert driver.requests == 2 * [("a", CAT.key), ("a", DOG.key)]
    driver.provide("a", [CAT.key, DOG.key])
    while not loop.idle:
        driver.step()
    assert_equal(loop, driver.outcomes["a"], solve(llama, b"see ", CAT, b" and ", DOG))


def test_a_loop_that_waits_for_pixels_is_idle(llama: Any) -> None:
    driver = drive(make_loop(llama, running=2), *PICTURES, provides=lambda _: False)
    driver.submit(image_job("a", b"see ", CAT))
    for _ in range(20):
        if driver.loop.idle:
            break
        driver.step()
    assert driver.loop.idle
    assert driver.requests == [("a", CAT.key)]
    driver.submit(job("text", b"hello"))
    assert not driver.loop.idle
    while not driver.loop.idle:
        driver.step()
    assert driver.outcomes["text"].reason
    driver.provide("a", [CAT.key])
    assert not driver.loop.idle
    while not driver.loop.idle:
        driver.step()
    assert_equal(driver.loop, driver.outcomes["a"], solve(llama, b"see ", CAT))


@pytest.mark.parametrize("steps", range(8))
def test_a_cancelled_job_frees_everything(llama: Any, steps: int) -> None:
    """While it waits for pixels, and while its image is encoded."""
    for provides in (lambda _: True, lambda _: False):
        loop = make_loop(llama, image_cache_bytes=0)
        driver = drive(loop, *PICTURES, provides=provides)
        driver.submit(image_job("a", b"see ", CAT, b" and ", DOG))
        for _ in range(steps):
            driver.step()
        loop.cancel("a")
        while not loop.idle:
            driver.step()
        driver.step()
        assert driver.outcomes["a"].reason in ("cancelled", "stop", "length")
        assert driver.stats.ledger.kv == 0
        loop.provide_images("a", [CAT])  # arrives late


def test_another_sequence_takes_over_the_request_of_a_cancelled_one(llama: Any) -> None:
    driver = drive(
        make_loop(llama, running=2, policy="slots"), *PICTURES, provides=lambda name: name == "b"
    )
    driver.submit(image_job("a", b"a", CAT), image_job("b", b"b", CAT))
    while not driver.loop.idle:
        driver.step()
    assert driver.requests == [("a", CAT.key)]
    driver.loop.cancel("a")
    while not driver.loop.idle:
        driver.step()
    assert driver.requests == [("a", CAT.key), ("b", CAT.key)]
    assert driver.outcomes["b"].tokens


def test_other_streams_decode_while_an_image_is_encoded(llama: Any) -> None:
    llama.vision = FakeTower(tiny.CONFIG["hidden_size"], steps=40)
    driver = drive(make_loop(llama, running=2), *PICTURES)
    driver.submit(job("text", b"hello", max_tokens=200, stop_token_ids=NONE))
    for _ in range(5):
        driver.step()
    driver.submit(image_job("image", CAT, b"?"))
    steps = tokens = 0
    while not driver.outcomes["image"].tokens:
        output = driver.step()
        steps += 1
        tokens += sum(isinstance(u, Token) and u.job_id == "text" for u in output.updates)
    assert steps >= 40
    assert tokens >= steps - 1, "a token in each step"
    assert len(driver.outcomes["image"].progress) >= 40, "clients see that it advances"


@pytest.mark.parametrize("streams", [True, False])
def test_slow_steps_of_the_tower_delay_few_tokens(
    llama: Any, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    """Most steps only decode while a stream runs, so the median delay of its tokens is the duration
    of a decode step."""
    now, slow_steps = 0.0, 0
    run_step = FakeEncoding.run_step

    def run_slowly(encoding: FakeEncoding) -> None:
        nonlocal now, slow_steps
        now, slow_steps = now + 0.3, slow_steps + 1
        run_step(encoding)

    monkeypatch.setattr(FakeEncoding, "run_step", run_slowly)
    llama.vision = FakeTower(tiny.CONFIG["hidden_size"], steps=20)
    driver = drive(make_loop(llama, running=2, step_seconds=0.1, clock=lambda: now), *PICTURES)
    if streams:
        driver.submit(job("text", b"hello", max_tokens=200, stop_token_ids=NONE))
        for _ in range(5):
            driver.step()
    driver.submit(image_job("image", CAT, b"?"))
    steps = 0
    while slow_steps < 20:
        driver.step()
        steps += 1
    assert steps >= 55 if streams else steps < 30


def test_the_clock_decides_how_many_steps_of_the_tower_an_engine_step_has(llama: Any) -> None:
    llama.vision = FakeTower(tiny.CONFIG["hidden_size"], steps=40)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.01
        return now

    driver = drive(make_loop(llama, step_seconds=0.1, clock=clock), *PICTURES)
    outcome = driver.run(image_job("a", CAT, b"?"))["a"]
    assert len(outcome.progress) < 15


def test_images_embeddings_and_prompts_take_turns(llama: Any) -> None:
    llama.vision = FakeTower(tiny.CONFIG["hidden_size"], steps=30)
    loop = make_loop(llama, running=2)
    driver = drive(loop, *PICTURES)
    driver.submit(image_job("image", CAT, b"?"))
    for _ in range(4):
        driver.step()
    loop.embed(EmbedJob(id="e", inputs=tuple((1, 2, 3) for _ in range(400)), pooling="mean"))
    driver.submit(job("text", bytes(range(200))))
    while not loop.idle:
        output = driver.step()
        for result in output.embed_results:
            assert result.error is None
            assert driver.outcomes["image"].reason, "the image is not behind all embeddings"
            assert driver.outcomes["text"].tokens


@pytest.mark.parametrize("kind", ["fault", "invalid"])
def test_a_failure_of_the_tower_fails_only_the_sequences_that_need_the_image(
    llama: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    tower: FakeTower = llama.vision
    expected = solve(llama, b"see ", CAT)
    if kind == "fault":
        tower.fault = ValueError("planted")
    else:
        tower.invalid = True
    driver = drive(make_loop(llama, running=3), *PICTURES)
    outcomes = driver.run(
        job("text", b"hello", stop_token_ids=NONE),
        image_job("a", b"see ", CAT),
        image_job("b", b"b ", CAT),
    )
    assert outcomes["a"].reason == outcomes["b"].reason == "error"
    assert "image" in (outcomes["a"].error or "")
    assert outcomes["text"].reason == "length"
    assert driver.stats.failures == 2
    tower.fault, tower.invalid = None, False
    again = driver.run(image_job("again", b"see ", CAT))["again"]
    assert_equal(driver.loop, again, expected)
    assert driver.stats.ledger.kv == 0


def test_pixels_of_another_size_fail_the_sequence(llama: Any) -> None:
    wrong = ImagePixels(key=CAT.key, tiles=DOG.tiles)
    outcome = drive(make_loop(llama), wrong).run(image_job("a", b"see ", CAT))["a"]
    assert outcome.reason == "error"


def test_an_image_that_can_never_be_encoded_fails_with_its_size(llama: Any) -> None:
    class Large(FakeTower):
        def estimate_bytes(self, sizes: Sequence[tuple[int, int]]) -> int:
            return 1 << 30

    llama.vision = Large(tiny.CONFIG["hidden_size"])
    driver = drive(make_loop(llama, budget=1 << 20, running=2), *PICTURES)
    outcomes = driver.run(image_job("a", b"see ", CAT), job("text", b"hello"))
    assert outcomes["a"].reason == "error"
    assert "1.00 GiB" in (outcomes["a"].error or "")
    assert outcomes["text"].reason in ("stop", "length")


@given(data=st.data())
@examples(max_examples=40, deadline=None)
def test_the_ledger_is_never_overdrawn(data: st.DataObject) -> None:
    """Any schedule of jobs, cancellations and late pixels in little memory."""
    model = build("llama")

    class Wide(FakeTower):
        def estimate_bytes(self, sizes: Sequence[tuple[int, int]]) -> int:
            return 40_000 + super().estimate_bytes(sizes)

    model.vision = Wide(tiny.CONFIG["hidden_size"], steps=5)
    footprint = profile_memory(
        model, budget=0, weights=0, chunk=8, max_batch_size=1, heads=0, context=512
    ).kv_footprint
    budget = footprint(512) + data.draw(st.integers(40_000, 120_000))
    loop = make_loop(model, running=3, policy="radix", budget=budget, image_cache_bytes=500)
    driver = drive(loop, *PICTURES, provides=lambda _: False)
    answered = 0
    for step in range(60):
        if step < 6:
            parts = data.draw(st.lists(texts | st.sampled_from(PICTURES), min_size=1, max_size=4))
            if build_prompt(*parts)[0]:
                driver.submit(
                    image_job(str(step), *parts, max_tokens=data.draw(st.integers(1, 30)))
                )
        if data.draw(st.integers(0, 9)) == 0:
            loop.cancel(str(data.draw(st.integers(0, 5))))
        driver.step()
        if data.draw(st.booleans()):
            for name, key in driver.requests[answered:]:
                driver.provide(name, [key])
            answered = len(driver.requests)
    while not loop.idle or answered < len(driver.requests):
        for name, key in driver.requests[answered:]:
            driver.provide(name, [key])
        answered = len(driver.requests)
        driver.step()
    assert all(outcome.reason for outcome in driver.outcomes.values())
    assert all(outcome.reason != "error" for outcome in driver.outcomes.values())
    driver.step()
    assert driver.stats.ledger.kv == 0


def test_a_job_with_images_does_not_shift_its_context(llama: Any) -> None:
    loop = make_loop(llama, policy="slots", context=64, shift=True)
    outcome = drive(loop, *PICTURES).run(
        image_job("a", b"see ", CAT, max_tokens=500, stop_token_ids=NONE)
    )["a"]
    ids, _ = build_prompt(b"see ", CAT)
    assert outcome.reason == "length"
    assert len(ids) + len(outcome.tokens) == 64


def test_penalties_do_not_count_image_rows(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The IDs of rows are beyond any table of tokens."""
    prompts: list[list[int]] = []
    state = sequence.SamplerState

    def record_prompt(*args: Any, **options: Any) -> Any:
        prompts.append(options["prompt"])
        return state(*args, **options)

    monkeypatch.setattr(sequence, "SamplerState", record_prompt)
    one = image_job("a", b"see ", CAT, b" it", repetition_penalty=1.3, presence_penalty=0.5)
    outcome = drive(make_loop(llama), *PICTURES).run(one)["a"]
    assert outcome.reason in ("stop", "length")
    assert prompts == [[*b"see ", BEGIN, END, *b" it"]]


def test_a_model_without_a_tower_has_no_vision() -> None:
    model = build("llama")
    model.vision = None
    assert not make_loop(model).capacity.vision
    model.vision = FakeTower(16)
    assert make_loop(model).capacity.vision
