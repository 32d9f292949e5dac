// Computes the signals of logits rows and reads each row once. kernels/cuda_kernel.md explains the method.
//
// The 16-byte vectors of a row are divided into tiles of THREADS * VECTORS vectors. All tiles of all rows are divided
// evenly and in order among the blocks, and the tiles that one block has of one row are a piece. Each piece is reduced
// to one State. The block that finishes a row's last piece combines all pieces in order, so the result does not depend
// on which block finishes last.
//
// The file includes no header, so that NVRTC and the C++ compiler behind tests/cuda_host can both compile it.

// The compiler's options (see cuda.py) define THREADS per block, VECTORS of 16 bytes that a thread processes at a time,
// STAGES (the number of tiles in shared memory, of which one is processed while the others are loaded), and the number
// of BLOCKS_PER_SM.

#define WARPS (THREADS / 32)
#define TILE (THREADS * VECTORS)
#define ALL 0xffffffffu
#define NOWHERE 0xffffffffu
#define LOWEST (-3.402823466e38f)
#define FLOOR (-1e4f)  // exp(FLOOR) is 0 in float32
#define LOG2E 1.44269504f

typedef unsigned int u32;
typedef unsigned long long u64;

// The running result for some entries of a row. sum and weighted are relative to reference(best), which is finite.
struct State {
  float best;      // greatest entry; -inf before the first entry
  u32 at;          // index of the first element of the vector that holds best first, or of best if it was read alone
  float sum;       // sum of e^(x - reference)
  float weighted;  // sum of e^(x - reference) (x - reference)
  u32 above;       // number of entries strictly above the end marker's entry
};

// Instructions that have no name in C++; tests/cuda_host defines these functions for the host.
#ifdef __CUDACC__
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float half_value(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
// Returns the greater number in each of the two 16-bit halves. If only one of the two numbers is NaN, the result is the
// other one, as with fmaxf.
__device__ __forceinline__ u32 max_bf16x2(u32 a, u32 b) {
  u32 c;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
__device__ __forceinline__ u32 max_f16x2(u32 a, u32 b) {
  u32 c;
  asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
// Starts to copy 16 bytes from global to shared memory, bypassing the registers. The thread that calls fetch() may read
// the bytes after arrived().
__device__ __forceinline__ void fetch(uint4* to, const uint4* from) {
  u32 address = (u32)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
// Makes one group of all fetches since the last call of group().
__device__ __forceinline__ void group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all groups but the newest STAGES - 1 have arrived.
__device__ __forceinline__ void arrived() { asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory"); }
#endif

__device__ __forceinline__ u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Each struct describes one element type: the number of elements in 16 bytes (LANES), a word of -inf entries (NONE), an
// element's value, and the greatest element of a vector.
struct F32 {
  static const int LANES = 4;
  static const u32 NONE = 0xff800000u;  // -inf
  typedef u32 Word;
  static __device__ __forceinline__ float value(Word w) { return __uint_as_float(w); }
  static __device__ __forceinline__ float lane(const uint4& v, int i) { return value(word(v, i)); }
  static __device__ __forceinline__ float top(const uint4& v) {
    return fmaxf(fmaxf(value(v.x), value(v.y)), fmaxf(value(v.z), value(v.w)));
  }
};

struct BF16 {
  static const int LANES = 8;
  static const u32 NONE = 0xff80ff80u;
  typedef unsigned short Word;
  static __device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
  static __device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
  static __device__ __forceinline__ float value(Word w) { return low(w); }
  static __device__ __forceinline__ float lane(const uint4& v, int i) {
    return i & 1 ? high(word(v, i >> 1)) : low(word(v, i >> 1));
  }
  static __device__ __forceinline__ float top(const uint4& v) {
    u32 pair = max_bf16x2(max_bf16x2(v.x, v.y), max_bf16x2(v.z, v.w));
    return fmaxf(low(pair), high(pair));
  }
};

struct F16 {
  static const int LANES = 8;
  static const u32 NONE = 0xfc00fc00u;
  typedef unsigned short Word;
  static __device__ __forceinline__ float value(Word w) { return half_value(w); }
  static __device__ __forceinline__ float lane(const uint4& v, int i) {
    u32 pair = word(v, i >> 1);
    return half_value((Word)(i & 1 ? pair >> 16 : pair));
  }
  static __device__ __forceinline__ float top(const uint4& v) {
    u32 pair = max_f16x2(max_f16x2(v.x, v.y), max_f16x2(v.z, v.w));
    return fmaxf(half_value((Word)pair), half_value((Word)(pair >> 16)));
  }
};

__device__ __forceinline__ float exp_approx(float x) { return exp2_approx(x * LOG2E); }

__device__ __forceinline__ float reference(float best) { return fmaxf(best, LOWEST); }

__device__ __forceinline__ State nothing() {
  State s = {-__int_as_float(0x7f800000), NOWHERE, 0.0f, 0.0f, 0u};
  return s;
}

// Makes the sums of s relative to the reference `to`, which is not below their present reference `from`.
__device__ __forceinline__ void rescale(State& s, float from, float to) {
  float shift = fmaxf(from - to, FLOOR);
  float factor = exp_approx(shift);
  s.weighted = factor * (s.weighted + s.sum * shift);
  s.sum *= factor;
}

__device__ __forceinline__ State merged(State a, State b) {
  float ra = reference(a.best), rb = reference(b.best), r = fmaxf(ra, rb);
  rescale(a, ra, r);
  rescale(b, rb, r);
  bool second = b.best > a.best || (b.best == a.best && b.at < a.at);
  State s = {second ? b.best : a.best, second ? b.at : a.at, a.sum + b.sum, a.weighted + b.weighted, a.above + b.above};
  return s;
}

// Adds VECTORS vectors to s. The vectors are THREADS vectors apart, in shared memory and in the row; the first vector
// begins at element `at` of the row.
template <class T>
__device__ __forceinline__ void take(State& s, const uint4* stage, u32 at, float end) {
  float before = reference(s.best);
#pragma unroll
  for (int n = 0; n < VECTORS; n++) {
    float top = T::top(stage[n * THREADS]);
    if (top > s.best) {
      s.best = top;
      s.at = at + n * THREADS * T::LANES;
    }
  }
  float r = reference(s.best);
  rescale(s, before, r);
  float sum = 0.0f, weighted = 0.0f, above = 0.0f;
#pragma unroll
  for (int n = 0; n < VECTORS; n++) {
    uint4 v = stage[n * THREADS];
#pragma unroll
    for (int i = 0; i < T::LANES; i++) {
      float x = T::lane(v, i), d = x - r, e = exp_approx(d);
      sum += e;
      weighted = fmaf(e, d, weighted);
      above += x > end ? 1.0f : 0.0f;
    }
  }
  if (weighted != weighted) {
    // An entry of -inf has caused 0 * -inf = NaN, so compute the sum again with a floor, which replaces -inf but not
    // NaN.
    weighted = 0.0f;
#pragma unroll 1
    for (int n = 0; n < VECTORS; n++) {
      uint4 v = stage[n * THREADS];
#pragma unroll
      for (int i = 0; i < T::LANES; i++) {
        float d = T::lane(v, i) - r;
        d = d < FLOOR ? FLOOR : d;
        weighted = fmaf(exp_approx(d), d, weighted);
      }
    }
  }
  s.sum += sum;
  s.weighted += weighted;
  s.above += (u32)above;
}

// Returns the state of one entry that is in no whole aligned vector.
__device__ __forceinline__ State alone(float x, u32 at, float end) {
  State s = nothing();
  if (x > s.best) {
    s.best = x;
    s.at = at;
  }
  float d = x - reference(s.best);
  s.sum = exp_approx(d);
  d = d < FLOOR ? FLOOR : d;
  s.weighted = s.sum * d;
  s.above = x > end ? 1u : 0u;
  return s;
}

__device__ __forceinline__ State warp_merged(State s) {
#pragma unroll 1
  for (int mask = 16; mask > 0; mask >>= 1) {
    State other;
    other.best = __shfl_xor_sync(ALL, s.best, mask);
    other.at = __shfl_xor_sync(ALL, s.at, mask);
    other.sum = __shfl_xor_sync(ALL, s.sum, mask);
    other.weighted = __shfl_xor_sync(ALL, s.weighted, mask);
    other.above = __shfl_xor_sync(ALL, s.above, mask);
    s = merged(s, other);
  }
  return s;
}

// Returns the number of entries before the row's first 16-byte boundary.
template <class T>
__device__ __forceinline__ u32 head_of(const typename T::Word* row, u32 vocab) {
  u32 off = (u32)((u64)row & 15u) / sizeof(typename T::Word), head = off ? T::LANES - off : 0u;
  return head < vocab ? head : vocab;
}

// Starts to load this thread's vectors of a tile. `left` is the number of vectors from the thread's first one to the
// end of the row; vectors past the end are filled with -inf.
template <class T>
__device__ __forceinline__ void ask(uint4* stage, const uint4* from, int left) {
  if (left > (VECTORS - 1) * THREADS) {
#pragma unroll
    for (int n = 0; n < VECTORS; n++) fetch(stage + n * THREADS, from + n * THREADS);
    return;
  }
#pragma unroll 1
  for (int n = 0; n < VECTORS; n++) {
    if (left > n * THREADS) {
      fetch(stage + n * THREADS, from + n * THREADS);
    } else {
      stage[n * THREADS] = make_uint4(T::NONE, T::NONE, T::NONE, T::NONE);
    }
  }
}

// Returns the state of this thread's vectors in the tiles [tile, last) of a row.
template <class T>
__device__ __forceinline__ State measured(const typename T::Word* row, u32 vocab, u32 tile, u32 last, float end) {
  __shared__ uint4 stages[STAGES * TILE];
  u32 head = head_of<T>(row, vocab), first = tile * TILE + threadIdx.x;
  const uint4* from = (const uint4*)(row + head) + first;
  int left = (int)((vocab - head) / T::LANES) - (int)first;
  u32 at = head + first * T::LANES, here = threadIdx.x, there = here;

  State s = nothing();
  int asked = (int)tile - (STAGES - 1);
#pragma unroll 1
  for (; asked < (int)last; asked++) {
    // The load of a tile starts STAGES - 1 rounds before the tile is processed.
    if (asked + STAGES - 1 < (int)last) {
      ask<T>(stages + there, from, left);
      from += TILE;
      left -= TILE;
      there = there + TILE < STAGES * TILE ? there + TILE : threadIdx.x;
    }
    group();
    if (asked < (int)tile) continue;
    arrived();
    take<T>(s, stages + here, at, end);
    at += TILE * T::LANES;
    here = here + TILE < STAGES * TILE ? here + TILE : threadIdx.x;
  }
  return s;
}

// Returns the state of the entries before the first and after the last whole aligned vector, at most one entry per
// thread.
template <class T>
__device__ __forceinline__ State edges(const typename T::Word* row, u32 vocab, float end) {
  u32 head = head_of<T>(row, vocab);
  u32 tail = vocab - (vocab - head) % T::LANES, i = threadIdx.x;
  if (i >= head + (vocab - tail)) return nothing();
  u32 at = i < head ? i : tail + (i - head);
  return alone(T::value(__ldg(row + at)), at, end);
}

// Writes the signals of row `to` to the columns of `out`, each [rows]: entropy, log-sum-exp, top-1 log-probability and
// the end marker's log-probability (all in nats), then as integers the top-1 id and the rank of the end marker; in a
// row that cannot be measured they are -1 and 0.
template <class T>
__device__ __forceinline__ void finish(State s, const typename T::Word* row, u32 vocab, float end, u32 to, u32 rows, float* out) {
  u32 lane = threadIdx.x;
  u32 place = s.at + lane;
  bool here = lane < T::LANES && s.at < vocab && place < vocab && T::value(__ldcg(row + place)) == s.best;
  u32 found = __ballot_sync(ALL, here);
  if (lane != 0) return;
  float log_sum = logf(s.sum > 0.0f ? s.sum : s.sum / s.sum);
  float lse = reference(s.best) + log_sum;
  int top = -1;
  for (int i = T::LANES - 1; i >= 0; i--) top = found >> i & 1u ? (int)s.at + i : top;
  out[to] = log_sum - s.weighted / s.sum;
  out[rows + to] = lse;
  out[2 * rows + to] = -log_sum;
  out[3 * rows + to] = (end - reference(s.best)) - log_sum;
  out[4 * rows + to] = __int_as_float(lse == lse ? top : -1);
  out[5 * rows + to] = __int_as_float(lse == lse ? (int)s.above + 1 : 0);
}

// The distribution of tiles to blocks, in order: the first `more` blocks have least + 1 tiles, the others `least`.
struct Shares {
  u32 least, more;
  __device__ __forceinline__ u32 begin(u32 block) const { return block * least + (block < more ? block : more); }
  __device__ __forceinline__ u32 block_of(u32 tile) const {
    u32 edge = more * (least + 1);
    return tile < edge ? tile / (least + 1) : more + (tile - edge) / least;
  }
};

template <class T>
__device__ __forceinline__ void measure(const typename T::Word* logits, long long stride, const int* selected, u32 rows, u32 vocab,
                                        u32 tiles, const u32* ends, State* pieces, u32* tickets, float* out) {
  __shared__ State shared[WARPS];
  u32 lane = threadIdx.x & 31u, warp = threadIdx.x >> 5;
  Shares shares = {rows * tiles / gridDim.x, rows * tiles % gridDim.x};
  u32 at = shares.begin(blockIdx.x), stop = shares.begin(blockIdx.x + 1);
#pragma unroll 1
  while (at < stop) {
    u32 n = at / tiles, tile = at - n * tiles, last = stop - at < tiles - tile ? tile + (stop - at) : tiles;
    const typename T::Word* row = logits + (selected ? selected[n] : (int)n) * stride;
    float end = T::value(__ldcg(row + ends[0]));
    for (int i = 1; i < 4; i++) end = fmaxf(end, T::value(__ldcg(row + ends[i])));

    State s = measured<T>(row, vocab, tile, last, end);
    if (tile == 0) s = merged(s, edges<T>(row, vocab, end));
    s = warp_merged(s);
    __syncthreads();  // warp 0 has read the previous piece from `shared`
    if (lane == 0) shared[warp] = s;
    __syncthreads();
    if (warp == 0) {
      s = warp_merged(lane < WARPS ? shared[lane] : nothing());
      u32 first = shares.block_of(n * tiles), count = shares.block_of((n + 1) * tiles - 1) - first + 1;
      u32 brought = 0;
      if (count > 1) {
        // A block has at most one piece of a row, and from piece to piece the block or the row increases by one, so the
        // sum of the two is unique.
        if (lane == 0) {
          pieces[blockIdx.x + n] = s;
          __threadfence();
          brought = atomicAdd(tickets + n, 1u);
        }
        brought = __shfl_sync(ALL, brought, 0);
        if (brought == count - 1) {
          __threadfence();  // the lane that read the tickets sees the pieces that the other blocks wrote before them,
          __syncwarp();     // and now all lanes see these pieces
          s = nothing();
#pragma unroll 1
          for (u32 i = lane; i < count; i += 32) {
            const State* piece = pieces + first + n + i;
            State other = {__ldcg(&piece->best), __ldcg(&piece->at), __ldcg(&piece->sum), __ldcg(&piece->weighted),
                           __ldcg(&piece->above)};
            s = merged(s, other);
          }
          s = warp_merged(s);
          if (lane == 0) tickets[n] = 0;  // the next launch expects tickets of 0
        }
      }
      if (count == 1 || brought == count - 1) finish<T>(s, row, vocab, end, n, rows, out);
    }
    at += last - tile;
  }
}

#define KERNEL(name, T)                                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)                                               \
      name(const T::Word* logits, long long stride, const int* selected, long long rows, long long vocab,            \
           long long tiles, long long end0, long long end1, long long end2, long long end3, State* pieces,           \
           u32* tickets, float* out) {                                                                               \
    const u32 ends[4] = {(u32)end0, (u32)end1, (u32)end2, (u32)end3};                                                \
    measure<T>(logits, stride, selected, (u32)rows, (u32)vocab, (u32)tiles, ends, pieces, tickets, out);             \
  }

KERNEL(signals_f32, F32)
KERNEL(signals_bf16, BF16)
KERNEL(signals_f16, F16)
