// The Python bindings. The objects hold weights and are called with arrays.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/tuple.h>

#include <mlx/version.h>

#include "attention_job.hpp"
#include "attention_ops.hpp"
#include "block_repack.hpp"
#include "blocks.hpp"
#include "isa_dispatch.hpp"
#include "heap.hpp"
#include "mamba2_ops.hpp"
#include "thread_pool.hpp"
#include "matmul_ops.hpp"
#include "rowwise.hpp"
#include "sample_ops.hpp"
#include "repack.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mlxrunner;

namespace {

void bind_rowwise(nb::module_& m) {
  m.def("rms_norm", &rms_norm, "x"_a, "weight"_a.none(), "eps"_a);
  m.def(
      "rope",
      [](const mx::array& x, const Offset& offset, const mx::array& periods, int dims,
         bool traditional, float magnitude) {
        return rope(x, offset, {periods, dims, traditional, magnitude});
      },
      "x"_a, "offset"_a, "periods"_a, "dims"_a, nb::kw_only(), "traditional"_a = false,
      "magnitude"_a = 1.0f);
  m.def("glu", &glu, "activation"_a, "gate"_a, "up"_a);
  m.def("softcap", &softcap, "x"_a, "cap"_a);
}

using Tokens = std::vector<std::int32_t>;

void bind_sampling(nb::module_& m) {
  nb::class_<SampleRow>(m, "SampleRow", "The settings of one row for `sample`.")
      .def(
          "__init__",
          [](SampleRow* self, std::int64_t vocab, float temperature, std::int64_t top_k,
             float top_p, float min_p, const std::array<std::uint32_t, 4>& seed_words,
             std::uint32_t num_drawn, std::vector<std::uint32_t> known, std::int64_t output_begin,
             std::vector<std::pair<std::int32_t, float>> bias, float repetition_penalty,
             float presence_penalty, float frequency_penalty, std::int64_t penalty_window,
             std::optional<Tokens> allowed_tokens,
             std::vector<std::vector<std::uint32_t>> bad_words, Tokens stop_tokens,
             std::int64_t min_tokens) {
            new (self) SampleRow({vocab, {temperature, top_k, top_p, min_p}, seed_words, num_drawn,
                                  std::move(known), output_begin, std::move(bias),
                                  repetition_penalty, presence_penalty, frequency_penalty,
                                  penalty_window, std::move(allowed_tokens), std::move(bad_words),
                                  std::move(stop_tokens), min_tokens});
          },
          nb::kw_only(), "vocab"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a,
          "seed_words"_a, "num_drawn"_a, "known"_a, "output_begin"_a, "bias"_a,
          "repetition_penalty"_a, "presence_penalty"_a, "frequency_penalty"_a, "penalty_window"_a,
          "allowed_tokens"_a.none(), "bad_words"_a, "stop_tokens"_a, "min_tokens"_a)
      .def_prop_ro("uses_history",
                   [](const SampleRow& row) { return row.settings()->uses_history(); });
  m.def("sample", &sample, "logits"_a, "rows"_a, "num_earlier"_a, "step"_a,
        "earlier"_a = nb::none(), "recent"_a = nb::none(), "bitmask"_a = nb::none());
  m.def("logprobs", &logprobs, "logits"_a, "tokens"_a, "count"_a);
}

using Ints = std::vector<int>;

std::vector<SlotMapping> make_slot_mappings(const Ints& slots, const Ints& lengths,
                                            const Ints& head_slots, const Ints& first_positions) {
  if (lengths.size() != slots.size() || head_slots.size() != slots.size() ||
      first_positions.size() != slots.size())
    throw std::invalid_argument(
        "each sequence needs a slot, a length, a head slot and a first position");
  std::vector<SlotMapping> slot_mappings;
  for (std::size_t b = 0; b < slots.size(); b++)
    slot_mappings.push_back({slots[b], lengths[b], head_slots[b], first_positions[b]});
  return slot_mappings;
}

std::vector<SlotMapping> add_rope_deltas(std::vector<SlotMapping> slot_mappings,
                                         const Ints& rope_deltas) {
  if (rope_deltas.size() != slot_mappings.size())
    throw std::invalid_argument("each sequence needs a rope delta");
  for (std::size_t b = 0; b < rope_deltas.size(); b++)
    slot_mappings[b].rope_delta = rope_deltas[b];
  return slot_mappings;
}

void bind_attention(nb::module_& m) {
  m.def("max_rows_per_task", &max_rows_per_task, "keys"_a,
        "The most queries whose scores a thread stores at the same time.");
  m.def(
      "attend",
      [](const mx::array& q, const mx::array& k, const mx::array& v,
         const std::vector<mx::array>& keys, const std::vector<mx::array>& values,
         const Ints& slots, const Ints& lengths, const Ints& head_slots,
         const Ints& first_positions, float scale, int window, std::optional<mx::array> sinks,
         float softcap) {
        const std::vector<SlotMapping> slot_mappings =
            make_slot_mappings(slots, lengths, head_slots, first_positions);
        return attend(q, k, v, keys, values, slot_mappings,
                      {scale, window, std::move(sinks), softcap});
      },
      "q"_a, "k"_a, "v"_a, "keys"_a, "values"_a, "slots"_a, "lengths"_a, "head_slots"_a,
      "first_positions"_a, nb::kw_only(), "scale"_a, "window"_a = 0, "sinks"_a = nb::none(), "softcap"_a = 0.0f);
  m.def(
      "attend_shared",
      [](const mx::array& q, const std::vector<mx::array>& keys,
         const std::vector<mx::array>& values, const Ints& lengths, const Ints& head_slots,
         const Ints& first_positions, float scale, int window) {
        const Ints slots(lengths.size());  // nothing is written
        return attend_shared(q, keys, values,
                             make_slot_mappings(slots, lengths, head_slots, first_positions),
                             {scale, window, std::nullopt, 0});
      },
      "q"_a, "keys"_a, "values"_a, "lengths"_a, "head_slots"_a, "first_positions"_a,
      nb::kw_only(), "scale"_a, "window"_a = 0);
  m.def(
      "attention",
      [](const mx::array& q, const mx::array& keys, const mx::array& values, float scale,
         bool causal, int window, std::optional<mx::array> sinks, float softcap) {
        return attention(q, keys, values, causal, {scale, window, std::move(sinks), softcap});
      },
      "q"_a, "keys"_a, "values"_a, nb::kw_only(), "scale"_a, "causal"_a = false, "window"_a = 0,
      "sinks"_a = nb::none(), "softcap"_a = 0.0f);
}

// A norm: its weight and epsilon.
using Norm = std::pair<mx::array, float>;

std::optional<RmsNorm> make_norm(const std::optional<Norm>& norm) {
  if (!norm) return std::nullopt;
  return RmsNorm{norm->first, norm->second};
}

std::optional<BoundMatmul> bind_optional(const Matmul* matmul) {
  if (!matmul) return std::nullopt;
  return BoundMatmul(*matmul);
}

void bind_blocks(nb::module_& m) {
  nb::class_<AttentionBlock>(m, "AttentionBlock", "The attention half of a decoder block.")
      .def(
          "__init__",
          [](AttentionBlock* self, const Norm& norm, const Matmul& q, const Matmul* k,
             const Matmul* v, const Matmul& o, int heads, int kv_heads, float scale,
             const std::optional<Norm>& q_norm, const std::optional<Norm>& k_norm,
             const std::optional<Norm>& v_norm, const std::optional<Norm>& post_norm,
             std::optional<mx::array> periods, int dims, bool traditional, float magnitude,
             std::optional<mx::array> sinks) {
            std::optional<RopeParams> rope;
            if (periods) rope = RopeParams{std::move(*periods), dims, traditional, magnitude};
            new (self) AttentionBlock({{norm.first, norm.second},
                                       BoundMatmul(q),
                                       bind_optional(k),
                                       bind_optional(v),
                                       BoundMatmul(o),
                                       make_norm(q_norm),
                                       make_norm(k_norm),
                                       make_norm(v_norm),
                                       make_norm(post_norm),
                                       std::move(rope),
                                       heads,
                                       kv_heads,
                                       {scale, 0, std::move(sinks), 0}});
          },
          "norm"_a, "q"_a, "k"_a.none(), "v"_a.none(), "o"_a, nb::kw_only(), "heads"_a,
          "kv_heads"_a, "scale"_a, "q_norm"_a = nb::none(), "k_norm"_a = nb::none(),
          "v_norm"_a = nb::none(), "post_norm"_a = nb::none(), "periods"_a = nb::none(), "dims"_a = 0,
          "traditional"_a = false, "magnitude"_a = 1.0f, "sinks"_a = nb::none())
      .def(
          "__call__",
          [](AttentionBlock& self, const mx::array& x, const Ints& rope_deltas,
             const std::vector<mx::array>& keys, const std::vector<mx::array>& values,
             const Ints& slots, const Ints& lengths, const Ints& head_slots,
             const Ints& first_positions, int window) {
            std::vector<SlotMapping> slot_mappings =
                make_slot_mappings(slots, lengths, head_slots, first_positions);
            return self(x, keys, values, add_rope_deltas(std::move(slot_mappings), rope_deltas),
                        window);
          },
          "x"_a, "rope_deltas"_a, "keys"_a, "values"_a, "slots"_a, "lengths"_a, "head_slots"_a,
          "first_positions"_a, "window"_a)
      .def(
          "attend_shared",
          [](AttentionBlock& self, const mx::array& x, const Ints& rope_deltas,
             const std::vector<mx::array>& keys, const std::vector<mx::array>& values,
             const Ints& lengths, const Ints& head_slots, const Ints& first_positions, int window) {
            const Ints slots(lengths.size());  // nothing is written
            std::vector<SlotMapping> slot_mappings =
                make_slot_mappings(slots, lengths, head_slots, first_positions);
            return self.attend_shared(
                x, keys, values, add_rope_deltas(std::move(slot_mappings), rope_deltas), window);
          },
          "x"_a, "rope_deltas"_a, "keys"_a, "values"_a, "lengths"_a, "head_slots"_a, "first_positions"_a,
          "window"_a);
  nb::class_<MlpBlock>(m, "MlpBlock", "The gated MLP half of a decoder block.")
      .def(
          "__init__",
          [](MlpBlock* self, const Norm& norm, const std::string& activation, const Matmul& gate,
             const Matmul& up, const Matmul& down, const std::optional<Norm>& post_norm,
             std::optional<mx::array> scale) {
            new (self) MlpBlock({{norm.first, norm.second},
                                 parse_activation(activation),
                                 BoundMatmul(gate),
                                 BoundMatmul(up),
                                 BoundMatmul(down),
                                 make_norm(post_norm),
                                 std::move(scale)});
          },
          "norm"_a, "activation"_a, "gate"_a, "up"_a, "down"_a, nb::kw_only(),
          "post_norm"_a = nb::none(), "scale"_a = nb::none())
      .def("__call__", &MlpBlock::operator(), "x"_a);
  nb::class_<DecoderLayers>(m, "DecoderLayers", "Consecutive decoder blocks.")
      .def(
          "__init__",
          [](DecoderLayers* self,
             const std::vector<std::pair<const AttentionBlock*, const MlpBlock*>>& blocks) {
            std::vector<std::pair<AttentionBlock, MlpBlock>> copies;
            for (const auto& [attention, mlp] : blocks) copies.emplace_back(*attention, *mlp);
            new (self) DecoderLayers(std::move(copies));
          },
          "blocks"_a)
      .def(
          "__call__",
          [](DecoderLayers& self, const mx::array& x, const Ints& rope_deltas,
             const std::vector<mx::array>& keys, const std::vector<mx::array>& values,
             const std::vector<std::array<int, 5>>& slots) {
            std::vector<SlotMapping> slot_mappings;
            Ints windows;
            for (const auto& [write_slot, length, head_slot, first_position, window] : slots) {
              slot_mappings.push_back({write_slot, length, head_slot, first_position});
              windows.push_back(window);
            }
            return self(x, keys, values, add_rope_deltas(std::move(slot_mappings), rope_deltas),
                        windows);
          },
          "x"_a, "rope_deltas"_a, "keys"_a, "values"_a, "slots"_a);
  nb::class_<InputGateBlock>(m, "InputGateBlock", "A gated input of a decoder block.")
      .def(
          "__init__",
          [](InputGateBlock* self, const std::string& activation, const Matmul& gate,
             const Matmul& projection, const Norm& post_norm, std::optional<mx::array> scale) {
            new (self) InputGateBlock({parse_activation(activation),
                                       BoundMatmul(gate),
                                       BoundMatmul(projection),
                                       {post_norm.first, post_norm.second},
                                       std::move(scale)});
          },
          "activation"_a, "gate"_a, "projection"_a, "post_norm"_a, nb::kw_only(),
          "scale"_a = nb::none())
      .def("__call__", &InputGateBlock::operator(), "x"_a, "input"_a);
}

void bind_mamba2(nb::module_& m) {
  m.def(
      "mamba2",
      [](const mx::array& projected, const std::vector<mx::array>& states,
         const std::vector<mx::array>& tails, const mx::array& conv_weight,
         const std::optional<mx::array>& conv_bias, const mx::array& dt_bias,
         const mx::array& a_log, const mx::array& d, const mx::array& norm_weight, float eps,
         float min_step, float max_step) {
        return mamba2(projected, states, tails,
                      {conv_weight, conv_bias, dt_bias, a_log, d, norm_weight},
                      {eps, min_step, max_step});
      },
      "projected"_a, "states"_a, "tails"_a, nb::kw_only(), "conv_weight"_a, "conv_bias"_a.none(),
      "dt_bias"_a, "a_log"_a, "d"_a, "norm_weight"_a, "eps"_a, "min_step"_a, "max_step"_a);
  nb::class_<Mamba2Block>(m, "Mamba2Block", "The Mamba-2 half of a decoder block.")
      .def(
          "__init__",
          [](Mamba2Block* self, const Norm& norm, const Matmul& in_proj, const Matmul& out_proj,
             const mx::array& conv_weight, const std::optional<mx::array>& conv_bias,
             const mx::array& dt_bias, const mx::array& a_log, const mx::array& d,
             const mx::array& norm_weight, float eps, float min_step, float max_step) {
            new (self) Mamba2Block({{norm.first, norm.second},
                                    BoundMatmul(in_proj),
                                    BoundMatmul(out_proj),
                                    {conv_weight, conv_bias, dt_bias, a_log, d, norm_weight},
                                    {eps, min_step, max_step}});
          },
          "norm"_a, "in_proj"_a, "out_proj"_a, nb::kw_only(), "conv_weight"_a, "conv_bias"_a.none(),
          "dt_bias"_a, "a_log"_a, "d"_a, "norm_weight"_a, "eps"_a, "min_step"_a, "max_step"_a)
      .def("__call__", &Mamba2Block::operator(), "x"_a, "states"_a, "tails"_a);
}

}  // namespace

NB_MODULE(_kernels, m) {
  nb::module_::import_("mlx.core");  // registers the array type that this module uses

  const auto number = [](int n) { return std::to_string(n); };
  m.attr("built_for") = number(MLX_VERSION_MAJOR) + "." + number(MLX_VERSION_MINOR) + "." +
                        number(MLX_VERSION_PATCH);
  m.attr("interface") = 12;  // models/kernels/__init__.py describes it
  m.def("isa", [] { return std::string(kernels().name); }, "The instruction set in use.");
  m.def("why_no_tiles", [] { return selection().why_no_tiles; }, "Why tiles are not used, or ''.");
  m.def("why_no_bf16_tiles", [] { return selection().why_no_bf16_tiles; },
        "Why products with bfloat16 matrices do not use tiles, or ''.");
  m.def(
      "num_threads", [] { return mlxrunner::ThreadPool::shared().num_threads(); },
      "The number of threads that share a matmul.");
  m.def(
      "set_num_threads", [](int count) { mlxrunner::ThreadPool::shared().set_num_threads(count); },
      "count"_a, "Set the number of threads. Must not be called while anything is evaluated.");

  m.def("retain_freed_memory", &retain_freed_memory, "Keep freed memory for later arrays.");
  m.def("trim_memory", &trim_memory, "Return free memory to the system.");

  nb::class_<Matmul>(m, "Matmul", "x @ W^T + bias with a repacked matrix W.")
      .def(nb::init<mx::array, std::optional<mx::array>, std::optional<mx::array>,
                    std::optional<mx::array>, int, int, int>(),
           "weight"_a, "scales"_a = nb::none(), "biases"_a = nb::none(), "bias"_a = nb::none(),
           nb::kw_only(), "group_size"_a = 0, "bits"_a = 0, "activations"_a = 24)
      .def_static("from_blocks", &Matmul::from_blocks, "panels"_a, nb::kw_only(), "type_id"_a,
                  "outputs"_a, "inputs"_a, "bias"_a = nb::none(), "activations"_a = 24)
      .def("__call__", &Matmul::operator(), "x"_a)
      .def("has_same_format", &Matmul::has_same_format, "other"_a)
      .def("multiply_by_reference", &Matmul::multiply_by_reference, "x"_a)
      .def("gather", &Matmul::gather, "x"_a, "indices"_a)
      .def("dequantize_rows", &Matmul::dequantize_rows, "ids"_a);
  m.def(
      "gate_up",
      [](const std::string& activation, const Matmul& gate, const Matmul& up, const mx::array& x) {
        return gate_up(gate, up, parse_activation(activation), x);
      },
      "activation"_a, "gate"_a, "up"_a, "x"_a);

  bind_sampling(m);
  m.def("repack_blocks", &repack_blocks, "raw"_a, "type_id"_a);
  m.def("repack", &repack, "a"_a, "bits"_a = 0, nb::kw_only(), "undo"_a = false);
  m.def("repack_scales", &repack_scales, "a"_a, nb::kw_only(), "undo"_a = false);
  bind_rowwise(m);
  bind_attention(m);
  bind_blocks(m);
  bind_mamba2(m);
}
