"""The route of attention is MLX's own choice of kernels on every device. Pieces are bounded."""

from itertools import product

import pytest

from models import attention_route
from models.attention_route import (
    AttentionDevice,
    AttentionMask,
    AttentionRoute,
    AttentionShape,
    choose_route,
    expansion_step,
    longest_query,
    plan_attention,
    workspace_bytes,
)
from tests.models.mlx_attention import Call, ask_mlx
from tests.rows import rows

MASKS = {AttentionMask.NONE: "", AttentionMask.CAUSAL: "causal", AttentionMask.ARRAY: "array"}
DIMS = [(d, d) for d in (32, 64, 72, 80, 96, 112, 128, 192, 256, 512)] + [(192, 128), (128, 64)]


def make_shape(**changed: object) -> AttentionShape:
    plain = {"heads": 8, "kv_heads": 2, "key_dim": 256, "value_dim": 256, "itemsize": 2}
    return AttentionShape(**{**plain, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize("device", [d for d in AttentionDevice if d is not AttentionDevice.KERNELS])
@pytest.mark.parametrize("mask", AttentionMask)
def test_the_route_is_the_choice_of_mlx(device: AttentionDevice, mask: AttentionMask) -> None:
    """A forced call never raises, a call that counts as fused never falls back, and attention that
    MLX would fuse is never computed in pieces, except for single queries with head size 512."""
    seen: set[AttentionRoute] = set()
    for (key_dim, value_dim), length, total, heads, itemsize in product(
        DIMS, (1, 2, 3, 4, 5, 8, 9, 128, 1024), (1, 8, 300, 40_000), (1, 4, 16), (2, 4)
    ):
        shape = make_shape(heads=2 * heads, key_dim=key_dim, value_dim=value_dim, itemsize=itemsize)
        call = Call(
            query_length=length,
            key_length=total,
            query_heads=2 * heads,
            kv_heads=2,
            query_dim=key_dim,
            value_dim=value_dim,
            itemsize=itemsize,
            mask=MASKS[mask],
        )
        answer = ask_mlx(device, call)
        route = choose_route(device, shape, length=length, total=total, mask=mask)
        seen.add(route)
        match route:
            case AttentionRoute.FUSED:
                assert not answer.falls_back, call
            case AttentionRoute.FORCED:
                assert answer.has_fused, call
            case AttentionRoute.PIECES:
                assert answer.falls_back or key_dim == 512, call
    expected = {
        AttentionDevice.CPU: {AttentionRoute.PIECES},
        AttentionDevice.CUDA: {AttentionRoute.PIECES, AttentionRoute.FUSED},
        AttentionDevice.METAL: set(AttentionRoute),
    }
    assert seen == expected[device]


@rows(
    ("device", "changed", "length", "total", "route"),
    [
        # Llama, Qwen3, Mistral
        ("metal", {"key_dim": 128, "value_dim": 128}, 512, 131072, "FUSED"),
        ("cuda", {"key_dim": 128, "value_dim": 128}, 512, 131072, "FUSED"),
        ("cuda", {"key_dim": 128, "value_dim": 128, "itemsize": 4}, 512, 131072, "PIECES"),
        ("cpu", {"key_dim": 128, "value_dim": 128}, 512, 131072, "PIECES"),
        ("kernels", {"key_dim": 128, "value_dim": 128}, 512, 131072, "FUSED"),
        # Qwen3-Next, Qwen3.5, Gemma 3: slow, but forced when the scores are large
        ("metal", {}, 512, 1024, "PIECES"),
        ("metal", {}, 512, 131072, "FORCED"),
        ("cuda", {}, 512, 131072, "PIECES"),
        # few queries with many heads per key: no kernel, and force_fused would raise
        ("metal", {"heads": 12}, 6, 131072, "PIECES"),
        ("metal", {}, 6, 131072, "FUSED"),
        # Gemma 2
        ("metal", {"softcap": True}, 512, 131072, "PIECES"),
        ("kernels", {"softcap": True}, 512, 131072, "FUSED"),
        # latent attention
        ("metal", {"absorbed": True, "kv_heads": 1}, 1, 4096, "PIECES"),
        ("kernels", {"absorbed": True, "kv_heads": 1}, 1, 4096, "PIECES"),
        # mlx-lm computes it: we cannot force a kernel
        ("metal", {"splittable": False}, 512, 131072, "PIECES"),
    ],
)
def test_routes_of_known_families(
    device: str, changed: dict[str, object], length: int, total: int, route: str
) -> None:
    found = choose_route(
        AttentionDevice(device),
        make_shape(**changed),
        length=length,
        total=total,
        mask=AttentionMask.CAUSAL,
    )
    assert found.name == route


@rows("heads", [1, 2, 6, 8, 32])
@rows("kv_heads", [1, 2])
@rows("length", [1, 7, 512, 2048])
@rows("total", [2048, 8191, 131072, 1_000_000])
def test_pieces_cover_every_query_of_every_head_once_and_are_bounded(
    heads: int, kv_heads: int, length: int, total: int
) -> None:
    if heads % kv_heads:
        pytest.skip("not a grouping")
    shape = make_shape(heads=heads, kv_heads=kv_heads)
    device = AttentionDevice.CPU
    plan = plan_attention(device, shape, length=length, total=total, mask=AttentionMask.CAUSAL)
    group, covered = heads // kv_heads, 0
    for piece in plan.pieces(shape, length=length, total=total, causal=True):
        rows = piece.queries.stop - piece.queries.start
        covered += rows * (piece.heads.stop - piece.heads.start)
        assert piece.visible == total - length + piece.queries.stop
        # the heads of a piece use exactly its keys, and each of its keys equally often
        used = {head // group for head in range(piece.heads.start, piece.heads.stop)}
        assert used == set(range(piece.kv_heads.start, piece.kv_heads.stop))
        assert (piece.heads.stop - piece.heads.start) % len(used) == 0
    assert covered == heads * length
    assert plan.piece_bytes <= attention_route.PIECE_BYTES
    # at most two pieces are counted, unless several small ones are
    counted = workspace_bytes(device, shape, length=length, total=total)
    assert 2 * plan.piece_bytes <= counted <= 2 * attention_route.PIECE_BYTES


@rows("device", AttentionDevice)
@rows(
    "changed",
    [
        {},
        {"key_dim": 128, "value_dim": 128},
        {"softcap": True},
        {"expanded_dims": 700},
        {"splittable": False},
        {"windowed": True},
        {"absorbed": True, "kv_heads": 1},
    ],
)
def test_the_workspace_grows_with_the_context(
    device: AttentionDevice, changed: dict[str, object]
) -> None:
    """Otherwise, the search for the longest context that fits would fail."""
    sizes = [
        workspace_bytes(device, make_shape(**changed), length=512, total=total)
        for total in range(512, 200_000, 777)
    ]
    assert sizes == sorted(sizes)


def test_attention_that_is_not_split_is_computed_for_fewer_queries() -> None:
    """For mlx-lm's classes: a chunk shrinks as the context grows."""
    shape = make_shape(heads=16, splittable=False)
    lengths = [
        longest_query(AttentionDevice.METAL, shape, total, 512)
        for total in (512, 4096, 32768, 131072)
    ]
    assert lengths[0] == 512
    assert lengths == sorted(lengths, reverse=True)
    assert 0 < lengths[-1] < 64
    fused = make_shape(heads=16, key_dim=128, value_dim=128, splittable=False)
    assert longest_query(AttentionDevice.METAL, fused, 131072, 512) == 512


def test_heads_are_expanded_in_pieces() -> None:
    shape = make_shape(heads=20, kv_heads=20, expanded_dims=704)  # GLM-4.7-Flash
    assert expansion_step(shape, 512) == 20
    step = expansion_step(shape, 32768)
    assert 1 <= step < 20
    assert step * 32768 * 704 * 2 <= attention_route.PIECE_BYTES
    assert expansion_step(shape, 10_000_000) == 1
