#include "in_flight.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "spin_wait.hpp"

namespace mlxrunner {

namespace {

// The maximum time that MLX may need to release the arrays of finished work. MLX releases them with
// its next task, and takes longer only if its thread was preempted.
constexpr auto kReleaseTimeout = std::chrono::microseconds(500);

// The time to poll for finished work before sleeping. The waiting thread is a step ahead of that
// work, so waiting delays nothing. Polling takes CPU time from the threads that compute.
constexpr auto kSpinTime = std::chrono::microseconds(50);

// The memory that work in flight uses. There is one entry per use.
struct InFlightRegistry {
  std::mutex mutex;
  std::condition_variable released;
  std::vector<const void*> in_use;
  std::atomic<std::uint32_t> num_releases{0};  // incremented when memory is released

  static InFlightRegistry& instance() {
    // never destroyed: MLX's threads outlive static objects
    static auto* one = new InFlightRegistry;
    return *one;
  }

  bool contains(const void* memory) const {
    return std::find(in_use.begin(), in_use.end(), memory) != in_use.end();
  }
};

// Returns a function that copies the old array, whose data may not be computed yet, to the new one.
template <class Number>
std::function<void()> make_copy(const mx::array& old, mx::array& out) {
  return [from = ArrayView<Number>(old), to = out.data<Number>(), size = old.nbytes()] {
    const Number* all = from.rows(to);
    if (all != to) std::memcpy(to, all, size);
  };
}

}  // namespace

struct InFlightArrays::Memory {
  std::vector<std::shared_ptr<mx::array::Data>> data;

  ~Memory() { release(); }

  void add(const mx::array& a) {
    InFlightRegistry& r = InFlightRegistry::instance();
    std::lock_guard lock(r.mutex);
    r.in_use.push_back(a.data_shared_ptr().get());
    data.push_back(a.data_shared_ptr());  // reserved by the constructor
  }

  void release() {
    if (data.empty()) return;
    InFlightRegistry& r = InFlightRegistry::instance();
    {
      std::lock_guard lock(r.mutex);
      for (const auto& one : data)
        r.in_use.erase(std::find(r.in_use.begin(), r.in_use.end(), one.get()));
    }
    data.clear();
    r.num_releases.fetch_add(1, std::memory_order_release);
    r.released.notify_all();
  }
};

InFlightArrays::InFlightArrays(std::size_t arrays) : memory_(std::make_shared<Memory>()) {
  memory_->data.reserve(arrays);
}

void InFlightArrays::add(const mx::array& a) { memory_->add(a); }

void InFlightArrays::release() { memory_->release(); }

bool wait_until_writable(const mx::array& a) {
  if (a.is_donatable()) return true;
  InFlightRegistry& r = InFlightRegistry::instance();
  const void* memory = a.data_shared_ptr().get();
  for (;;) {
    const std::uint32_t known_releases = r.num_releases.load(std::memory_order_acquire);
    std::unique_lock lock(r.mutex);
    if (!r.contains(memory)) break;
    lock.unlock();
    if (spin_until_changed(r.num_releases, known_releases, kSpinTime)) continue;
    lock.lock();
    r.released.wait(lock, [&] { return !r.contains(memory); });
    break;
  }
  for (const auto start = std::chrono::steady_clock::now(); !a.is_donatable();) {
    // only this array holds the data, and other references to the array itself are not work in
    // flight
    if (a.data_shared_ptr().use_count() == 1) return a.is_donatable();
    if (std::chrono::steady_clock::now() - start > kReleaseTimeout) return false;
    std::this_thread::yield();
  }
  return true;
}

WritableBuffers::WritableBuffers(const std::vector<mx::array>& in, std::size_t first,
                                 std::vector<mx::array>& outs)
    : in_flight_(outs.size()) {
  // Every output references all inputs until MLX clears these references later. Until then, no
  // input would be donatable.
  for (mx::array& out : outs)
    if (&out.inputs() != &in && !out.is_tracer()) out.inputs().clear();
  for (std::size_t i = 1; i < outs.size(); i++) {
    mx::array& out = outs[i];
    const mx::array& old = in[first + i - 1];
    if (old.flags().row_contiguous && wait_until_writable(old)) {
      out.copy_shared_buffer(old);
    } else {
      allocate(out);
      copies_.push_back(old.itemsize() == 2 ? make_copy<std::uint16_t>(old, out)
                                            : make_copy<float>(old, out));
    }
    in_flight_.add(out);
  }
  in_flight_.add(outs[0]);
}

ReadBuffers::ReadBuffers(const std::vector<mx::array>& in, std::size_t first)
    : in_flight_(in.size() - first) {
  for (std::size_t i = first; i < in.size(); i++) {
    if (!in[i].flags().row_contiguous)
      throw std::runtime_error("a buffer must be stored row after row");
    in_flight_.add(in[i]);
  }
}

void WritableBuffers::copy_shared() const {
  for (const auto& copy : copies_) copy();
}

}  // namespace mlxrunner
