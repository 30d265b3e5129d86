// Running selection of the k best of a stream of (score, position), positions ascending.
//
// A buffer takes every score above a threshold; when it is full it is cut back to exactly the k
// best and the threshold becomes the k-th best score. Everything keeps its order, so ties go to
// the lowest position (a later entry that only equals the threshold cannot enter) and the result
// comes out ascending. Which entries survive does not depend on when the cuts happen.
#pragma once

#include "simd.h"

namespace cedar {
namespace CEDAR_ISA {

constexpr int kStrip = 16;  // scores that are offered together
constexpr float kInfinity = __builtin_inff();

// Floats in the order of unsigned integers. There is no -0 among scores: a sum that starts at +0
// never becomes -0.
CEDAR_INLINE uint32_t to_order(float score) {
  const uint32_t bits = bits_of_float(score);
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

CEDAR_INLINE float from_order(uint32_t order) {
  return float_of_bits(order ^ ((order >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

// The value at a rank (1 = largest), and how many are larger.
struct Ranked {
  float value;
  int larger;
};

#ifdef CEDAR_AVX512

CEDAR_INLINE __m512i to_order(__m512 score) {
  const __m512i bits = _mm512_castps_si512(score);
  const __m512i flip = _mm512_or_si512(_mm512_srai_epi32(bits, 31), _mm512_set1_epi32(INT32_MIN));
  return _mm512_xor_si512(bits, flip);
}

// Brackets the values at two ranks of 64 samples: bisection of their upper 20 bits.
inline void bracket_of_sample(const __m512i x[4], int rank_high, int rank_low, uint32_t* high,
                              uint32_t* low) {
  constexpr uint32_t kLastBit = 1u << 12;
  uint32_t a = 0, b = 0;
  for (uint32_t bit = 1u << 31; bit >= kLastBit; bit >>= 1) {
    const __m512i ta = _mm512_set1_epi32(static_cast<int32_t>(a | bit));
    const __m512i tb = _mm512_set1_epi32(static_cast<int32_t>(b | bit));
    uint64_t ma = 0, mb = 0;
    for (int i = 0; i < 4; ++i) {
      ma |= static_cast<uint64_t>(_mm512_cmpge_epu32_mask(x[i], ta)) << (16 * i);
      mb |= static_cast<uint64_t>(_mm512_cmpge_epu32_mask(x[i], tb)) << (16 * i);
    }
    if (__builtin_popcountll(ma) >= rank_high) a |= bit;
    if (__builtin_popcountll(mb) >= rank_low) b |= bit;
  }
  *high = a | (kLastBit - 1);
  *low = b;
}

// The value at `rank`, known to lie in [low, high], by bisection. Overwrites x with its order.
inline Ranked bisect_rank(const float* x, int n, int rank, uint32_t low, uint32_t high,
                          uint32_t* order) {
  for (int i = 0; i < n; i += 16) {
    _mm512_storeu_si512(order + i, to_order(_mm512_loadu_ps(x + i)));
  }
  const auto count_from = [&](uint32_t least) {
    const __m512i t = _mm512_set1_epi32(static_cast<int32_t>(least));
    int count = 0;
    for (int i = 0; i < n; i += 16) {
      count += __builtin_popcount(_mm512_mask_cmpge_epu32_mask(
          F32::mask(n - i), _mm512_loadu_si512(order + i), t));
    }
    return count;
  };
  // Start below the bits the bounds share.
  uint32_t found = low;
  if (low != high) {
    uint32_t bit = 1u << (31 - __builtin_clz(low ^ high));
    found = low & ~(2 * bit - 1);
    for (; bit != 0; bit >>= 1) {
      if (count_from(found | bit) >= rank) found |= bit;
    }
  }
  return {from_order(found), found == 0xffffffffu ? 0 : count_from(found + 1)};
}

// The value at `rank` of x[0..n). `work` has room for work_size(n). A sample brackets the
// answer, one pass keeps what lies inside; once more; then bisection.
inline Ranked value_at_rank(const float* x, int n, int rank, float* work) {
  constexpr int kSample = 64, kMargin = 8, kRounds = 2;
  uint32_t low = 0, high = 0xffffffffu;
  int larger = 0;
  for (int round = 0; round < kRounds && n > 2 * kSample; ++round) {
    __m512i sample[4];
    const int step = n / 4 / 16 * 16;  // four blocks of 16, spread over the data
    for (int i = 0; i < 4; ++i) sample[i] = to_order(_mm512_loadu_ps(x + i * step));
    const int expected = static_cast<int>(static_cast<int64_t>(kSample) * rank / n);
    const int rank_high = expected - kMargin, rank_low = expected + kMargin;
    uint32_t sample_high, sample_low;
    bracket_of_sample(sample, rank_high < 1 ? 1 : rank_high,
                      rank_low > kSample ? kSample : rank_low, &sample_high, &sample_low);
    if (rank_high < 1) sample_high = to_order(kInfinity);
    if (rank_low > kSample) sample_low = to_order(-kInfinity);
    if (sample_high > to_order(kInfinity)) sample_high = to_order(kInfinity);
    if (sample_low < to_order(-kInfinity)) sample_low = to_order(-kInfinity);
    const __m512 high_v = _mm512_set1_ps(from_order(sample_high));
    const __m512 low_v = _mm512_set1_ps(from_order(sample_low));
    int over = 0, kept = 0;
    for (int i = 0; i < n; i += 16) {
      const __m512 v = _mm512_loadu_ps(x + i);
      const __mmask16 from_low = _mm512_mask_cmp_ps_mask(F32::mask(n - i), v, low_v, _CMP_GE_OQ);
      const __mmask16 above = _mm512_mask_cmp_ps_mask(from_low, v, high_v, _CMP_GT_OQ);
      const __mmask16 inside = static_cast<__mmask16>(from_low ^ above);
      over += __builtin_popcount(above);
      _mm512_storeu_ps(work + kept, _mm512_maskz_compress_ps(inside, v));
      kept += __builtin_popcount(inside);
    }
    if (rank <= over || rank > over + kept) break;  // the sample misled
    low = sample_low;
    high = sample_high;
    if (kept == n) break;  // ties
    x = work;
    work += kept + 16;
    n = kept;
    rank -= over;
    larger += over;
  }
  Ranked found = bisect_rank(x, n, rank, low, high, reinterpret_cast<uint32_t*>(work));
  found.larger += larger;
  return found;
}

#else

// The value at `rank` of x[0..n), by bisection. `work` has room for work_size(n).
inline Ranked value_at_rank(const float* x, int n, int rank, float* work) {
  uint32_t* order = reinterpret_cast<uint32_t*>(work);
  for (int i = 0; i < n; ++i) order[i] = to_order(x[i]);
  const auto count_from = [&](uint32_t least) {
    int count = 0;
    for (int i = 0; i < n; ++i) count += order[i] >= least ? 1 : 0;
    return count;
  };
  uint32_t found = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if (count_from(found | bit) >= rank) found |= bit;
  }
  return {from_order(found), found == 0xffffffffu ? 0 : count_from(found + 1)};
}

#endif

struct TopK {
  float* scores;       // room(capacity)
  int32_t* positions;  // room(capacity)
  float* work;         // work_size(capacity), shared by the buffers of a thread
  int size;
  int capacity;
  int k;
  float threshold;

  static constexpr int kMostOffered = 256;  // in one call

  // Large enough that a cut, which costs a few passes over the buffer, is rare; small enough that
  // the threshold, which only a cut moves, stays useful.
  static int capacity_for(int k) {
    const int extra = 3 * k;
    return k + (extra < kMostOffered ? kMostOffered : extra > 3072 ? 3072 : extra);
  }
  static size_t room(int capacity) { return static_cast<size_t>(capacity) + kStrip; }
  static size_t work_size(int capacity) { return 3 * (static_cast<size_t>(capacity) + 32); }

  // `limit`: capacity_for(k), or the number of entries that will be offered if that is less.
  void reset(float* score_memory, int32_t* position_memory, float* work_memory, int count,
             int limit) {
    scores = score_memory;
    positions = position_memory;
    work = work_memory;
    k = count;
    capacity = limit;
    size = 0;
    threshold = -kInfinity;
  }

  // Offers one entry. Entries must come in ascending position.
  CEDAR_INLINE void offer(float score, int32_t position) {
    if (!(score > threshold)) return;
    if (size == capacity) {
      cut();
      if (!(score > threshold)) return;
    }
    scores[size] = score;
    positions[size] = position;
    ++size;
  }

  // Offers strips of 16 entries, kMostOffered at most; only positions below `end` count.
  void offer_strips(const float* score, const int32_t* position, int strips, int32_t end) {
#ifdef CEDAR_AVX512
    uint16_t take[kMostOffered / kStrip];
    int total = admit(score, position, strips, end, take);
    if (size + total > capacity) {
      cut();
      total = admit(score, position, strips, end, take);
    }
    if (total == 0) return;
    // Compressed in registers: the form that writes to memory is microcoded on some processors.
    float* const to_scores = scores;
    int32_t* const to_positions = positions;
    int at = size;
    // A branch per strip pays only when it can be predicted.
    const bool always = total > strips / 4;
    for (int s = 0; s < strips; ++s) {
      if (!always && take[s] == 0) continue;
      const __m512 v = _mm512_loadu_ps(score + s * kStrip);
      const __m512i p = _mm512_loadu_si512(position + s * kStrip);
      _mm512_storeu_ps(to_scores + at, _mm512_maskz_compress_ps(take[s], v));
      _mm512_storeu_si512(to_positions + at, _mm512_maskz_compress_epi32(take[s], p));
      at += __builtin_popcount(take[s]);
    }
    size = at;
#else
    for (int i = 0; i < strips * kStrip; ++i) {
      if (position[i] < end) offer(score[i], position[i]);
    }
#endif
  }

  // Keeps exactly the k best (all, if there are no more than k).
  void cut() {
    if (size <= k) return;
    const Ranked worst = value_at_rank(scores, size, k, work);
    keep(worst.value, k - worst.larger);
    threshold = worst.value;
  }

 private:
#ifdef CEDAR_AVX512
  // Which entries pass the threshold, per strip; returns how many.
  CEDAR_INLINE int admit(const float* score, const int32_t* position, int strips, int32_t end,
                         uint16_t* take) const {
    const __m512 threshold_v = _mm512_set1_ps(threshold);
    const __m512i end_v = _mm512_set1_epi32(end);
    int total = 0;
    for (int s = 0; s < strips; ++s) {
      const __mmask16 seen =
          _mm512_cmplt_epi32_mask(_mm512_loadu_si512(position + s * kStrip), end_v);
      take[s] = _mm512_mask_cmp_ps_mask(seen, _mm512_loadu_ps(score + s * kStrip), threshold_v,
                                        _CMP_GT_OQ);
      total += __builtin_popcount(take[s]);
    }
    return total;
  }

  static CEDAR_INLINE uint32_t lowest_bits(uint32_t mask, int count) {
    uint32_t kept = 0;
    for (; count > 0; --count) {
      kept |= mask & (0u - mask);
      mask &= mask - 1;
    }
    return kept;
  }
#endif

  // Keeps everything above `worst` and the first `ties` entries equal to it.
  void keep(float worst, int ties) {
    int kept = 0;
#ifdef CEDAR_AVX512
    const __m512 worst_v = _mm512_set1_ps(worst);
    for (int i = 0; i < size; i += 16) {
      const __mmask16 valid = F32::mask(size - i);
      const __m512 s = _mm512_loadu_ps(scores + i);
      const __m512i p = _mm512_loadu_si512(positions + i);
      __mmask16 take = _mm512_mask_cmp_ps_mask(valid, s, worst_v, _CMP_GT_OQ);
      uint32_t equal = _mm512_mask_cmp_ps_mask(valid, s, worst_v, _CMP_EQ_OQ);
      if (equal != 0 && ties > 0) {
        if (__builtin_popcount(equal) > ties) equal = lowest_bits(equal, ties);
        ties -= __builtin_popcount(equal);
        take = static_cast<__mmask16>(take | equal);
      }
      _mm512_storeu_ps(scores + kept, _mm512_maskz_compress_ps(take, s));
      _mm512_storeu_si512(positions + kept, _mm512_maskz_compress_epi32(take, p));
      kept += __builtin_popcount(take);
    }
#else
    for (int i = 0; i < size; ++i) {
      if (scores[i] < worst || (scores[i] == worst && ties-- <= 0)) continue;
      scores[kept] = scores[i];
      positions[kept] = positions[i];
      ++kept;
    }
#endif
    size = kept;
  }
};

}  // namespace CEDAR_ISA
}  // namespace cedar
