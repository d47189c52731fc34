"""Rotary position embeddings and their scaling methods.

Knows: the keys of `rope_scaling` and `rope_parameters` in config.json. Must not know: layers.

Sources of the formulas: Su et al. 2021 (RoPE); position interpolation, Chen et al. 2023 (linear);
Peng et al. 2023 (yarn); Ding et al. 2024 (longrope); Llama 3.1's released config (llama3); Wang et
al. 2024 (mrope). Parameter names and defaults follow Hugging Face transformers
(`modeling_rope_utils.py`), because checkpoints are written for this library.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from models import kernels
from models.base import ModelError
from models.kv import Positions
from models.mrope import assign_axes

Scaling = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Applies rope to the first `dims` dimensions of each head. Pairs of dimensions half a head
    apart are rotated, as in Hugging Face's Llama, or adjacent dimensions if `traditional` is True,
    as in the paper.

    periods: [dims / 2], positions per radian, 1 / inv_freq. magnitude: the factor of cosine and
    sine in yarn and longrope. axes: the axis of each period, [dims / 2], for M-RoPE.
    """

    dims: int
    periods: mx.array
    magnitude: float = 1.0
    traditional: bool = False
    axes: mx.array | None = None

    def __call__(self, x: mx.array, positions: Positions) -> mx.array:
        """Rotates x [B, H, L, D]. positions: see `models.kv.Positions`."""
        if isinstance(positions, mx.array) and positions.ndim == 2:
            return self._rotate_by_axis(x, positions)
        return self._rotate(x, positions, self.magnitude)

    def rerotate(self, x: mx.array, positions: int) -> mx.array:
        """Rotates x [B, H, L, D], which is already rotated, as if each position were higher by
        `positions`."""
        # each position becomes a separate sequence that begins at `positions`
        each = x.reshape(-1, 1, 1, x.shape[-1])
        return self._rotate(each, positions, 1.0).reshape(x.shape)

    def _rotate_by_axis(self, x: mx.array, positions: mx.array) -> mx.array:
        """Rotates x [1, H, L, D] with the positions [3, L]. Each axis rotates all dimensions like
        ordinary rope, so equal positions on all axes give the same bits as one position."""
        assert self.axes is not None, "this rope has one axis"
        each = x.transpose(2, 1, 0, 3)
        time, *others = (self._rotate(each, axis, self.magnitude) for axis in positions)
        pairs = [self.axes[:, None]] * 2
        axes = mx.concatenate(pairs, axis=1 if self.traditional else 0).reshape(-1)
        axes = mx.pad(axes, (0, x.shape[-1] - self.dims))
        for number, rotated in enumerate(others, start=1):
            time = mx.where(axes == number, rotated, time)
        return time.transpose(2, 1, 0, 3)

    def _rotate(self, x: mx.array, offset: int | mx.array, magnitude: float) -> mx.array:
        ops = kernels.ops(x)
        if ops is not None:
            return ops.rope(
                x,
                offset,
                self.periods,
                self.dims,
                traditional=self.traditional,
                magnitude=magnitude,
            )
        if magnitude != 1.0 and self.dims == x.shape[-1]:
            x = x * magnitude
        elif magnitude != 1.0:
            head, tail = x[..., : self.dims], x[..., self.dims :]
            x = mx.concatenate([head * magnitude, tail], axis=-1)
        return mx.fast.rope(
            x,
            self.dims,
            traditional=self.traditional,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self.periods,
        )


class NoRope:
    """Replaces `Rope` in layers without rotary positions (Kazemnejad et al. 2023)."""

    def __call__(self, x: mx.array, positions: Positions) -> mx.array:
        return x

    def rerotate(self, x: mx.array, positions: int) -> mx.array:
        return x


def make_rope(
    *,
    dims: int,
    theta: float,
    max_positions: int,
    scaling: Scaling | None = None,
    traditional: bool = False,
) -> Rope:
    """Returns the rope for a config. dims: the number of rotated dimensions per head.
    scaling: the object in config.json, or None. Raises ModelError for an unsupported scaling type,
    or for a scaling object with missing keys."""
    if dims < 2 or dims % 2:
        raise ModelError(
            f"cannot rotate {dims} dimensions of a head: the number must be even and positive"
        )
    scaling = scaling or {}
    kind = _get_rope_type(scaling)
    if not isinstance(kind, str) or kind not in _ROPE_TYPES:
        raise ModelError(
            f"rope scaling {kind!r} is not supported; "
            f"supported values: {', '.join(sorted(_ROPE_TYPES))}"
        )
    try:
        inverse, magnitude = _ROPE_TYPES[kind](
            _inverse_frequencies(dims, theta), dims, theta, max_positions, scaling
        )
        # only proportional rope has dimensions that are not rotated
        still = math.inf if kind == "proportional" else None
        periods = mx.array([still if still and not f else 1.0 / f for f in inverse])
        axes = _read_axes(scaling, len(inverse))
    except KeyError as missing:
        raise ModelError(f"rope scaling {kind!r} lacks {missing}") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"rope scaling {kind!r} is invalid: {error}") from error
    return Rope(dims=dims, periods=periods, magnitude=magnitude, traditional=traditional, axes=axes)


def _read_axes(scaling: Scaling, frequencies: int) -> mx.array | None:
    section = scaling.get("mrope_section")
    if section is None:
        return None
    interleaved = bool(scaling.get("mrope_interleaved"))
    return mx.array(assign_axes(section, frequencies, interleaved=interleaved))


def is_proportional(scaling: Scaling | None) -> bool:
    """Returns whether `partial_rotary_factor` is the share of the frequencies of a whole head, and
    not the share of the head that is rotated."""
    return _get_rope_type(scaling or {}) == "proportional"


def _get_rope_type(scaling: Scaling) -> Any:
    return scaling.get("rope_type") or scaling.get("type") or "default"


def rope_settings(config: Any, layer_type: str | None = None) -> tuple[float, Scaling | None]:
    """Returns (theta, scaling) from either config format: the older keys `rope_theta` and
    `rope_scaling`, or the newer `rope_parameters`, which contains both, or one such object per
    layer type.

    layer_type: for example "full_attention"; None for a model whose layers are all of one type.
    Raises ModelError if `rope_parameters` has no entry for that type.
    """
    parameters = config.rope_parameters or {}
    if any(isinstance(own, Mapping) for own in parameters.values()):
        own = parameters.get(layer_type)
        if not isinstance(own, Mapping):
            raise ModelError(f"rope_parameters lacks {layer_type or 'a setting for all layers'}")
        parameters = cast(Scaling, own)
    scaling = config.rope_scaling or parameters
    theta = parameters.get("rope_theta", config.rope_theta)
    return scaling.get("rope_theta", theta), scaling or None


InverseFrequencies = list[float]
ScaledFrequencies = tuple[InverseFrequencies, float]


def _inverse_frequencies(dims: int, theta: float) -> InverseFrequencies:
    if not theta > 0:
        raise ValueError(f"rope_theta is {theta!r}")
    return [theta ** (-i / dims) for i in range(0, dims, 2)]


def _default(inverse: InverseFrequencies, *_: Any) -> ScaledFrequencies:
    return inverse, 1.0


def _linear(
    inverse: InverseFrequencies, _d: int, _t: float, _m: int, scaling: Scaling
) -> ScaledFrequencies:
    return [f / scaling["factor"] for f in inverse], 1.0


def _dynamic(
    inverse: InverseFrequencies, _d: int, _t: float, _m: int, scaling: Scaling
) -> ScaledFrequencies:
    """Returns unscaled frequencies. Dynamic NTK does not change positions below
    max_position_embeddings, and changes all angles with each position above it. The server never
    exceeds the context length in the config, so dynamic NTK never applies. Otherwise keys that were
    rotated for different lengths would not be comparable (docs/decisions/models.md). Hunyuan's
    `alpha` changes all positions."""
    if scaling.get("alpha") not in (None, 1):
        raise ModelError("rope scaling 'dynamic' with 'alpha' is not supported")
    return inverse, 1.0


def _proportional(
    inverse: InverseFrequencies, dims: int, _t: float, _m: int, scaling: Scaling
) -> ScaledFrequencies:
    """Keeps the highest frequencies of the head, and does not rotate the other dimensions. A
    partial rotation instead spreads all frequencies over fewer dimensions."""
    share, factor = scaling.get("partial_rotary_factor"), scaling.get("factor")
    share, factor = 1.0 if share is None else share, 1.0 if factor is None else factor
    if not 0 < share <= 1:
        raise ValueError(f"partial_rotary_factor is {share!r}")
    if not 0 < factor < math.inf:
        raise ValueError(f"factor is {factor!r}")
    kept = int(share * dims // 2)
    return [f / factor if i < kept else 0.0 for i, f in enumerate(inverse)], 1.0


def _llama3(
    inverse: InverseFrequencies, _d: int, _t: float, _m: int, scaling: Scaling
) -> ScaledFrequencies:
    """Divides low frequencies by the factor, keeps high frequencies, and interpolates between
    them."""
    factor = scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]

    def scaled(f: float) -> float:
        turns = original * f / (2 * math.pi)
        if turns < low:
            return f / factor
        if turns > high:
            return f
        blend = (turns - low) / (high - low)
        return (1 - blend) * f / factor + blend * f

    return [scaled(f) for f in inverse], 1.0


def _yarn(
    inverse: InverseFrequencies, dims: int, theta: float, max_positions: int, scaling: Scaling
) -> ScaledFrequencies:
    """Interpolates the dimensions that turn less than beta_slow times over the original context,
    and keeps the dimensions that turn more than beta_fast times. Between them, a linear ramp is
    used."""
    factor = scaling["factor"]
    original = scaling.get("original_max_position_embeddings") or max_positions

    def dimension(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(scaling.get("beta_fast") or 32)
    high = dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    span = (high - low) or 0.001
    ramp = [min(max((i - low) / span, 0.0), 1.0) for i in range(len(inverse))]
    return [f / factor * r + f * (1 - r) for f, r in zip(inverse, ramp, strict=True)], _magnitude(
        factor, scaling
    )


def _magnitude(factor: float, scaling: Scaling) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


def _longrope(
    inverse: InverseFrequencies, _d: int, _t: float, max_positions: int, scaling: Scaling
) -> ScaledFrequencies:
    """Scales each dimension by its own factor. There is one list of factors for contexts up to the
    original length, and another list for longer contexts. Like mlx-lm, this function uses the long
    list for all lengths. Cached keys that were rotated with one list could not be compared with
    queries that were rotated with the other. transformers selects the list by the current length in
    each forward pass, so results differ while a sequence is short (docs/decisions/models.md)."""
    stretches, original = scaling["long_factor"], scaling["original_max_position_embeddings"]
    if len(stretches) != len(inverse):
        raise ValueError(
            f"long_factor has {len(stretches)} numbers, but {len(inverse)} are required"
        )
    factor = scaling.get("factor") or max_positions / original
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return [f / stretch for f, stretch in zip(inverse, stretches, strict=True)], float(magnitude)


_ROPE_TYPES: Mapping[
    str, Callable[[InverseFrequencies, int, float, int, Scaling], ScaledFrequencies]
] = {
    "default": _default,
    "mrope": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "proportional": _proportional,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}
