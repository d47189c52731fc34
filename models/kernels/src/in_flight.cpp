#include "held.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "waiting.hpp"

namespace mlxrunner {

namespace {

// How long MLX may take, after the work is done, to let go of what it used for it: it does so with
// its next task, and takes longer only where its thread has lost the CPU.
constexpr auto kBehind = std::chrono::microseconds(500);

// How long to look whether work is done before sleeping until it is. Who waits here is a step ahead
// of it, and so late for nothing; who looks takes time from threads that compute.
constexpr auto kLooking = std::chrono::microseconds(50);

// What all work under way holds, each as often as it is held.
struct Register {
  std::mutex mutex;
  std::condition_variable less;
  std::vector<const void*> held;
  std::atomic<std::uint32_t> turn{0};  // changes when less is held

  static Register& only() {
    // never destroyed: threads of MLX's outlive static objects
    static auto* one = new Register;
    return *one;
  }

  bool holds(const void* memory) const {
    return std::find(held.begin(), held.end(), memory) != held.end();
  }
};

}  // namespace

struct Held::Memory {
  std::vector<std::shared_ptr<mx::array::Data>> all;

  ~Memory() { release(); }

  void add(const mx::array& a) {
    Register& r = Register::only();
    std::lock_guard lock(r.mutex);
    r.held.push_back(a.data_shared_ptr().get());
    all.push_back(a.data_shared_ptr());  // there is room
  }

  void release() {
    if (all.empty()) return;
    Register& r = Register::only();
    {
      std::lock_guard lock(r.mutex);
      for (const auto& one : all) r.held.erase(std::find(r.held.begin(), r.held.end(), one.get()));
    }
    all.clear();
    r.turn.fetch_add(1, std::memory_order_release);
    r.less.notify_all();
  }
};

Held::Held(std::size_t arrays) : memory_(std::make_shared<Memory>()) {
  memory_->all.reserve(arrays);
}

void Held::add(const mx::array& a) { memory_->add(a); }

void Held::release() { memory_->release(); }

bool released(const mx::array& a) {
  if (a.is_donatable()) return true;
  Register& r = Register::only();
  const void* memory = a.data_shared_ptr().get();
  for (;;) {
    const std::uint32_t seen = r.turn.load(std::memory_order_acquire);
    std::unique_lock lock(r.mutex);
    if (!r.holds(memory)) break;
    lock.unlock();
    if (changed(r.turn, seen, kLooking)) continue;
    lock.lock();
    r.less.wait(lock, [&] { return !r.holds(memory); });
    break;
  }
  for (const auto start = std::chrono::steady_clock::now(); !a.is_donatable();) {
    // what one array holds that several know is no work under way
    if (a.data_shared_ptr().use_count() == 1) return a.is_donatable();
    if (std::chrono::steady_clock::now() - start > kBehind) return false;
    std::this_thread::yield();
  }
  return true;
}

Lent::Lent(const std::vector<mx::array>& in, std::size_t first, std::vector<mx::array>& outs)
    : held_(outs.size()) {
  // every output holds all inputs, until MLX clears them behind us; so long nothing is anybody's
  for (mx::array& out : outs)
    if (&out.inputs() != &in && !out.is_tracer()) out.inputs().clear();
  for (std::size_t i = 1; i < outs.size(); i++) {
    mx::array& out = outs[i];
    const mx::array& old = in[first + i - 1];
    if (old.flags().row_contiguous && released(old)) {
      out.copy_shared_buffer(old);
    } else {
      allocate(out);
      copies_.emplace_back(View(old), out.data<float>());
    }
    held_.add(out);
  }
  held_.add(outs[0]);
}

void Lent::begin() const {
  for (const auto& [from, to] : copies_) {
    const float* all = from.rows(to);
    std::size_t size = sizeof(float);
    for (int n : from.shape) size *= static_cast<std::size_t>(n);
    if (all != to) std::memcpy(to, all, size);
  }
}

}  // namespace mlxrunner
