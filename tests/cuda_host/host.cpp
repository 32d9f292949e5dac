// Runs the CUDA source on the host, one block after another, each CUDA thread a fiber, so that every index it computes
// can be checked: a barrier or shuffle that not all threads reach is a deadlock, shared memory is poison until what was
// fetched has arrived, and every read of a row's entries is counted and must lie inside the allowed range.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct uint3 { unsigned x, y, z; };
struct uint4 { unsigned x, y, z, w; };
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

static uint3 threadIdx, blockIdx, gridDim;

namespace host {

struct Barrier { unsigned arrived = 0, generation = 0; };
struct Fetch { void* to; const void* from; };
struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
  bool done = false;
  std::deque<std::vector<Fetch>> groups;
  std::vector<Fetch> open;
};

static std::vector<Fiber> fibers(THREADS);
static Barrier block, warps[THREADS / 32];
static uint32_t exchanged[THREADS / 32][2][32];
static ucontext_t scheduler;
static bool progress;
static const char* complaint;

// Entries that may be read, and how often each byte of them was.
static const char *low, *high;
static uint8_t* reads;

static void fail(const char* what) { if (!complaint) complaint = what; }

static void yield() { swapcontext(&fibers[threadIdx.x].context, &scheduler); }

static void wait(Barrier& barrier, unsigned threads) {
  unsigned generation = barrier.generation;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    barrier.generation++;
    progress = true;
    return;
  }
  while (barrier.generation == generation) yield();
}

static uint32_t exchange(uint32_t bits, unsigned source) {
  unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, side = warps[warp].generation & 1;
  exchanged[warp][side][lane] = bits;
  wait(warps[warp], 32);
  return exchanged[warp][side][source];
}

static bool inside(const void* p, size_t size) { return (const char*)p >= low && (const char*)p + size <= high; }

static void count(const void* p, size_t size) {
  if (!inside(p, size)) return fail("an entry outside the tensor was read");
  if ((uintptr_t)p % size) fail("a read is not aligned");
  for (size_t i = 0; i < size; i++) reads[(const char*)p - low + i]++;
}

template <class T> static T shuffled(unsigned mask, T value, unsigned source) {
  if (mask != 0xffffffffu) fail("a shuffle without all lanes");
  uint32_t bits;
  memcpy(&bits, &value, 4);
  bits = exchange(bits, source);
  memcpy(&value, &bits, 4);
  return value;
}

}  // namespace host

template <class T> static T __shfl_xor_sync(unsigned mask, T value, int with) {
  return host::shuffled(mask, value, (threadIdx.x % 32) ^ with);
}
template <class T> static T __shfl_sync(unsigned mask, T value, int source) { return host::shuffled(mask, value, source); }
static unsigned __ballot_sync(unsigned, bool yes) {
  unsigned warp = threadIdx.x / 32, side = host::warps[warp].generation & 1, all = 0;
  host::exchange(yes, 0);
  for (int i = 0; i < 32; i++) all |= host::exchanged[warp][side][i] << i;
  return all;
}
static void __syncthreads() { host::wait(host::block, THREADS); }
static void __syncwarp() { host::wait(host::warps[threadIdx.x / 32], 32); }
static void __threadfence() {}
static unsigned atomicAdd(unsigned* at, unsigned more) { unsigned old = *at; *at += more; return old; }

template <class T> static T __ldg(const T* p) {
  host::count(p, sizeof(T));
  return host::inside(p, sizeof(T)) ? *p : T();
}
template <class T> static T __ldcg(const T* p) { return *p; }
static unsigned short __ldcg(const unsigned short* p) {
  if (!host::inside(p, 2)) { host::fail("an entry outside the tensor was looked at"); return 0; }
  return *p;
}

static float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
static float __int_as_float(int bits) { float x; memcpy(&x, &bits, 4); return x; }
// How far the GPU's may be off, relative, and where the sign of it changes: above `turn` more, below it less.
static float exp2_error = 0, exp2_turn = 0;
static float exp2_approx(float x) { return exp2f(x) * (1 + (x > exp2_turn ? exp2_error : -exp2_error)); }
extern "C" __attribute__((visibility("default"))) void set_exp2_error(float error, float turn) {
  exp2_error = error, exp2_turn = turn;
}
static float half_value(unsigned short bits) { _Float16 x; memcpy(&x, &bits, 2); return (float)x; }
static float bf16_value(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }
template <class Value> static unsigned max_pair(unsigned a, unsigned b, Value value) {
  unsigned out = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    unsigned short p = a >> shift, q = b >> shift;
    bool second = std::isnan(value(p)) || value(q) > value(p);
    out |= (unsigned)(second ? q : p) << shift;
  }
  return out;
}
static unsigned max_bf16x2(unsigned a, unsigned b) { return max_pair(a, b, bf16_value); }
static unsigned max_f16x2(unsigned a, unsigned b) { return max_pair(a, b, half_value); }

static void fetch(uint4* to, const uint4* from) {
  memset(to, 0xff, 16);
  host::fibers[threadIdx.x].open.push_back({to, from});
}
static void group() {
  host::Fiber& fiber = host::fibers[threadIdx.x];
  fiber.groups.push_back(fiber.open);
  fiber.open.clear();
}
static void arrived() {
  host::Fiber& fiber = host::fibers[threadIdx.x];
  for (; fiber.groups.size() > STAGES - 1; fiber.groups.pop_front())
    for (const host::Fetch& f : fiber.groups.front()) {
      host::count(f.from, 16);
      if (host::inside(f.from, 16)) memcpy(f.to, f.from, 16);
    }
}

#include SOURCE

namespace host {

typedef void (*Kernel)();
static struct {
  int kind;
  const void* logits;
  long long stride;
  const int* selected;
  long long rows, vocab, tiles;
  const long long* ends;
  State* pieces;
  unsigned* tickets;
  float* out;
} call;

static void thread_main() {
  auto& c = call;
#define CALL(name, T)                                                                                             \
  name((const T*)c.logits, c.stride, c.selected, c.rows, c.vocab, c.tiles, c.ends[0], c.ends[1], c.ends[2],       \
       c.ends[3], c.pieces, c.tickets, c.out)
  if (c.kind == 0) CALL(signals_f32, F32::Word);
  if (c.kind == 1) CALL(signals_bf16, BF16::Word);
  if (c.kind == 2) CALL(signals_f16, F16::Word);
  Fiber& fiber = fibers[threadIdx.x];
  if (!fiber.open.empty()) fail("a thread ended with fetches in no group");
  for (const std::vector<Fetch>& group : fiber.groups)
    if (!group.empty()) fail("a thread ended with fetches that it did not wait for");
  fiber.done = true;
  progress = true;
  yield();
}

static void run_block() {
  block = Barrier();
  for (Barrier& warp : warps) warp = Barrier();
  for (Fiber& fiber : fibers) {
    fiber.done = false;
    fiber.groups.clear();
    fiber.open.clear();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    makecontext(&fiber.context, thread_main, 0);
  }
  // One warp runs until it waits for the others, then one drawn by chance: what warps share without a barrier shows.
  const unsigned count = THREADS / 32;
  unsigned done = 0, stuck = 0, warp = 0;
  while (done < THREADS && !complaint) {
    progress = false;
    for (unsigned i = 32 * warp; i < 32 * warp + 32 && !complaint; i++) {
      if (fibers[i].done) continue;
      threadIdx.x = i;
      swapcontext(&scheduler, &fibers[i].context);
      done += fibers[i].done;
    }
    stuck = progress ? 0 : stuck + 1;
    if (stuck > 64 * count) fail("deadlock: not all threads reach the same barrier");
    if (!progress) warp = stuck > 32 * count ? (warp + 1) % count : rand() % count;
  }
}

}  // namespace host

// Launch a kernel with blocks in the order given. Returns what went wrong, or null.
extern "C" __attribute__((visibility("default"))) const char* launch(int kind, const void* logits, long long stride, const int* selected, long long rows,
                              long long vocab, long long tiles, const long long* ends, void* pieces, unsigned* tickets,
                              float* out, unsigned blocks, const unsigned* order, const char* low, const char* high,
                              uint8_t* reads) {
  host::call = {kind, logits, stride, selected, rows, vocab, tiles, ends, (State*)pieces, tickets, out};
  host::low = low, host::high = high, host::reads = reads, host::complaint = nullptr;
  gridDim = {blocks, 1, 1};
  for (unsigned i = 0; i < blocks && !host::complaint; i++) {
    blockIdx = {order[i], 0, 0};
    host::run_block();
  }
  return host::complaint;
}
