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

constexpr float kLowest = -__builtin_inff();

// Float order as signed integer order. There is no -0 among scores: sums that start at +0 give +0.
CEDAR_INLINE int32_t ordered(float score) {
  const int32_t bits = static_cast<int32_t>(bits_of_float(score));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

#ifdef CEDAR_AVX512

CEDAR_INLINE __m512i ordered(__m512 score) {
  const __m512i bits = _mm512_castps_si512(score);
  const __m512i flip = _mm512_and_si512(_mm512_srai_epi32(bits, 31), _mm512_set1_epi32(0x7fffffff));
  return _mm512_xor_si512(bits, flip);
}

// Values at two ranks (1 = largest) of 64 sampled integers, by bisection of the value range.
inline void ranks_of_sample(const __m512i x[4], int rank_high, int rank_low, int32_t* high,
                            int32_t* low) {
  uint32_t a = 0, b = 0;  // offset by 2^31, so that they grow from the smallest integer
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    const __m512i ta = _mm512_set1_epi32(static_cast<int32_t>((a | bit) ^ 0x80000000u));
    const __m512i tb = _mm512_set1_epi32(static_cast<int32_t>((b | bit) ^ 0x80000000u));
    uint64_t ma = 0, mb = 0;
    for (int i = 0; i < 4; ++i) {
      ma |= static_cast<uint64_t>(_mm512_cmpge_epi32_mask(x[i], ta)) << (16 * i);
      mb |= static_cast<uint64_t>(_mm512_cmpge_epi32_mask(x[i], tb)) << (16 * i);
    }
    if (__builtin_popcountll(ma) >= rank_high) a |= bit;
    if (__builtin_popcountll(mb) >= rank_low) b |= bit;
  }
  *high = static_cast<int32_t>(a ^ 0x80000000u);
  *low = static_cast<int32_t>(b ^ 0x80000000u);
}

inline int32_t bisect_rank(const int32_t* x, int n, int rank) {
  uint32_t found = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    const __m512i t = _mm512_set1_epi32(static_cast<int32_t>((found | bit) ^ 0x80000000u));
    int count = 0;
    for (int i = 0; i < n; i += 16) {
      const __mmask16 valid = F32::mask(n - i);
      count += __builtin_popcount(
          _mm512_mask_cmpge_epi32_mask(valid, _mm512_loadu_si512(x + i), t));
    }
    if (count >= rank) found |= bit;
  }
  return static_cast<int32_t>(found ^ 0x80000000u);
}

// The rank-th largest of x[0..n); x has room for 3 * (n + 16). A sample brackets the answer; one pass
// copies what lies inside behind the data; once more; then bisection.
inline int32_t value_at_rank(int32_t* x, int n, int rank) {
  constexpr int kSample = 64, kMargin = 8, kRounds = 2;
  for (int round = 0; round < kRounds && n > 2 * kSample; ++round) {
    __m512i sample[4];
    const int step = n / 4 / 16 * 16;  // four blocks of 16, spread over the data
    for (int i = 0; i < 4; ++i) sample[i] = _mm512_loadu_si512(x + i * step);
    const int expected = static_cast<int>(static_cast<int64_t>(kSample) * rank / n);
    const int rank_high = expected - kMargin, rank_low = expected + kMargin;
    int32_t high, low;
    ranks_of_sample(sample, rank_high < 1 ? 1 : rank_high, rank_low > kSample ? kSample : rank_low,
                    &high, &low);
    if (rank_high < 1) high = INT32_MAX;
    if (rank_low > kSample) low = INT32_MIN;
    const __m512i high_v = _mm512_set1_epi32(high), low_v = _mm512_set1_epi32(low);
    int above = 0, kept = 0;
    int32_t* const middle = x + n + 16;
    for (int i = 0; i < n; i += 16) {
      const __mmask16 valid = F32::mask(n - i);
      const __m512i v = _mm512_loadu_si512(x + i);
      const __mmask16 over = _mm512_mask_cmpgt_epi32_mask(valid, v, high_v);
      const __mmask16 in = _mm512_mask_cmpge_epi32_mask(
          static_cast<__mmask16>(valid & ~over), v, low_v);
      above += __builtin_popcount(over);
      _mm512_storeu_si512(middle + kept, _mm512_maskz_compress_epi32(in, v));
      kept += __builtin_popcount(in);
    }
    if (rank <= above || rank > above + kept || kept == n) break;  // missed, or all of it ties
    if (high == low) return high;
    x = middle;
    n = kept;
    rank -= above;
  }
  return bisect_rank(x, n, rank);
}

#else

// The rank-th largest of x[0..n), by bisection of the value range.
inline int32_t value_at_rank(int32_t* x, int n, int rank) {
  uint32_t found = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    const int32_t t = static_cast<int32_t>((found | bit) ^ 0x80000000u);
    int count = 0;
    for (int i = 0; i < n; ++i) count += x[i] >= t ? 1 : 0;
    if (count >= rank) found |= bit;
  }
  return static_cast<int32_t>(found ^ 0x80000000u);
}

#endif

struct TopK {
  float* scores;       // capacity + 16
  int32_t* positions;  // capacity + 16
  int32_t* work;       // work_size(capacity), shared by the buffers of a thread
  int size;
  int capacity;
  int k;
  float threshold;

  // Large enough that a cut, which costs a few passes over the buffer, is rare; small enough that
  // the threshold, which only a cut moves, stays useful.
  static int capacity_for(int k) {
    const int extra = 3 * k;
    return k + (extra < 192 ? 192 : extra > 3072 ? 3072 : extra);
  }
  static size_t work_size(int capacity) { return 3 * (static_cast<size_t>(capacity) + 32); }
  static size_t room(int capacity) { return static_cast<size_t>(capacity) + 16; }

  void reset(float* score_memory, int32_t* position_memory, int32_t* work_memory, int count,
             int limit) {
    scores = score_memory;
    positions = position_memory;
    work = work_memory;
    k = count;
    capacity = limit;
    size = 0;
    threshold = kLowest;
  }

  // Offers one entry. Entries must come in ascending position.
  CEDAR_INLINE void offer(float score, int32_t position) {
    if (!(score > threshold)) return;
    scores[size] = score;
    positions[size] = position;
    if (++size > capacity - 16) cut();
  }

  // Offers 16 entries, those with position < end.
  CEDAR_INLINE void offer16(const float* score, const int32_t* position, int32_t end) {
#ifdef CEDAR_AVX512
    const __m512 s = _mm512_loadu_ps(score);
    const __m512i p = _mm512_loadu_si512(position);
    __mmask16 take = _mm512_cmp_ps_mask(s, _mm512_set1_ps(threshold), _CMP_GT_OQ);
    take = _mm512_mask_cmplt_epi32_mask(take, p, _mm512_set1_epi32(end));
    if (take == 0) return;
    // Compress in registers: the form that writes to memory is microcoded on some processors.
    _mm512_storeu_ps(scores + size, _mm512_maskz_compress_ps(take, s));
    _mm512_storeu_si512(positions + size, _mm512_maskz_compress_epi32(take, p));
    size += __builtin_popcount(take);
    if (size > capacity - 16) cut();
#else
    for (int i = 0; i < 16; ++i) {
      if (position[i] < end) offer(score[i], position[i]);
    }
#endif
  }

  // Keeps exactly the k best (all, if there are no more than k).
  void cut() {
    if (size <= k) return;
    for (int i = 0; i < size; ++i) work[i] = ordered(scores[i]);
    const int32_t worst = value_at_rank(work, size, k);
    int better = 0;
    for (int i = 0; i < size; ++i) better += ordered(scores[i]) > worst ? 1 : 0;
    keep(worst, k - better);
  }

 private:
  // Keeps everything above `worst` and the first `ties` entries equal to it.
  void keep(int32_t worst, int ties) {
    int kept = 0;
#ifdef CEDAR_AVX512
    const __m512i worst_v = _mm512_set1_epi32(worst);
    int room_for_ties = ties;
    for (int i = 0; i < size; i += 16) {
      const __mmask16 valid = F32::mask(size - i);
      const __m512 s = _mm512_loadu_ps(scores + i);
      const __m512i p = _mm512_loadu_si512(positions + i);
      const __m512i o = ordered(s);
      __mmask16 take = _mm512_mask_cmpgt_epi32_mask(valid, o, worst_v);
      uint32_t equal = _mm512_mask_cmpeq_epi32_mask(valid, o, worst_v);
      if (equal != 0 && room_for_ties > 0) {
        const int count = __builtin_popcount(equal);
        if (count > room_for_ties) equal = lowest_bits(equal, room_for_ties);
        room_for_ties -= __builtin_popcount(equal);
        take = static_cast<__mmask16>(take | equal);
      }
      _mm512_storeu_ps(scores + kept, _mm512_maskz_compress_ps(take, s));
      _mm512_storeu_si512(positions + kept, _mm512_maskz_compress_epi32(take, p));
      kept += __builtin_popcount(take);
    }
#else
    for (int i = 0; i < size; ++i) {
      const int32_t o = ordered(scores[i]);
      if (o < worst || (o == worst && ties-- <= 0)) continue;
      scores[kept] = scores[i];
      positions[kept] = positions[i];
      ++kept;
    }
#endif
    size = kept;
    const int32_t bits = worst ^ ((worst >> 31) & 0x7fffffff);
    threshold = float_of_bits(static_cast<uint32_t>(bits));
  }

  static CEDAR_INLINE uint32_t lowest_bits(uint32_t mask, int count) {
    uint32_t kept = 0;
    for (; count > 0; --count) {
      kept |= mask & (0u - mask);
      mask &= mask - 1;
    }
    return kept;
  }
};

}  // namespace CEDAR_ISA
}  // namespace cedar
