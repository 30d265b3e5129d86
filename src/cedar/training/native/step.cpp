// Memory-bound parts of a training step, one pass over each row while it is in cache.
//
// Meaning: ../pieces.py and ../fused.py (tested against them). Called by ../native_step.py through
// ctypes. bfloat16 is passed as uint16_t. C = 4 hyper-connection copies; a row of mixes is
// [pre 4 | post 4 | comb 16], comb[i * 4 + j] carries copy i into copy j.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>

namespace {

constexpr int C = 4;
constexpr int MIXES = C * (C + 2);
constexpr int LANES = 16;
constexpr int MAX_WIDTH = 4096;

inline float widen(uint16_t x) {
    return __builtin_bit_cast(float, static_cast<uint32_t>(x) << 16);
}

inline uint16_t narrow(float x) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x);
    return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

struct Lanes {
    float v[LANES];
};

// One normalisation of the Sinkhorn iteration over 16 rows of the batch at once.
// axis 1: over j for each i (row sums); axis 0: over i for each j (column sums).
void normalise(Lanes* m, Lanes* sums, int axis, float eps) {
    for (int a = 0; a < C; ++a) {
        for (int l = 0; l < LANES; ++l) {
            float s = 0;
            for (int b = 0; b < C; ++b) s += (axis ? m[a * C + b] : m[b * C + a]).v[l];
            s += eps;
            sums[a].v[l] = s;
            for (int b = 0; b < C; ++b) (axis ? m[a * C + b] : m[b * C + a]).v[l] /= s;
        }
    }
}

// Adjoint: y = x / (sum x + eps), in place on the gradient.
void normalise_grad(Lanes* grad, const Lanes* y, const Lanes* sums, int axis) {
    for (int a = 0; a < C; ++a) {
        for (int l = 0; l < LANES; ++l) {
            float dot = 0;
            for (int b = 0; b < C; ++b) {
                int k = axis ? a * C + b : b * C + a;
                dot += grad[k].v[l] * y[k].v[l];
            }
            for (int b = 0; b < C; ++b) {
                int k = axis ? a * C + b : b * C + a;
                grad[k].v[l] = (grad[k].v[l] - dot) / sums[a].v[l];
            }
        }
    }
}

struct Sinkhorn {
    std::vector<Lanes> states;  // value after each normalisation
    std::vector<Lanes> sums;
    Lanes soft[C * C];
};

// raw mixes of 16 rows (already times rho, scale and plus base) to coefficients, in place.
void coefficients(Lanes* m, int iters, float eps, Sinkhorn* keep) {
    for (int k = 0; k < C; ++k)
        for (int l = 0; l < LANES; ++l) m[k].v[l] = 1.0f / (1.0f + std::exp(-m[k].v[l])) + eps;
    for (int k = C; k < 2 * C; ++k)
        for (int l = 0; l < LANES; ++l) m[k].v[l] = 2.0f / (1.0f + std::exp(-m[k].v[l]));
    Lanes* comb = m + 2 * C;
    for (int i = 0; i < C; ++i) {
        for (int l = 0; l < LANES; ++l) {
            float top = comb[i * C].v[l];
            for (int j = 1; j < C; ++j) top = comb[i * C + j].v[l] > top ? comb[i * C + j].v[l] : top;
            float s = 0;
            for (int j = 0; j < C; ++j) {
                comb[i * C + j].v[l] = std::exp(comb[i * C + j].v[l] - top);
                s += comb[i * C + j].v[l];
            }
            for (int j = 0; j < C; ++j) comb[i * C + j].v[l] /= s;
        }
    }
    if (keep) std::memcpy(keep->soft, comb, sizeof(keep->soft));
    for (int k = 0; k < C * C; ++k)
        for (int l = 0; l < LANES; ++l) comb[k].v[l] += eps;
    Lanes sums[C];
    int step = 0;
    for (int it = 0; it < iters; ++it) {
        for (int axis = it ? 1 : 0; axis >= 0; --axis, ++step) {
            normalise(comb, sums, axis, eps);
            if (keep) {
                std::memcpy(&keep->states[step * C * C], comb, sizeof(Lanes) * C * C);
                std::memcpy(&keep->sums[step * C], sums, sizeof(Lanes) * C);
            }
        }
    }
}

void load_mixes(const uint16_t* raw, const float* rho, const float* base, const float* scale,
                int64_t row, int count, Lanes* m) {
    for (int k = 0; k < MIXES; ++k) {
        float s = scale[k < C ? 0 : k < 2 * C ? 1 : 2];
        for (int l = 0; l < LANES; ++l) {
            int64_t n = row + (l < count ? l : 0);
            m[k].v[l] = widen(raw[n * MIXES + k]) * rho[n] * s + base[k];
        }
    }
}

}  // namespace

extern "C" {

// New stream, its inverse norm, and the normed input of the next sublayer.
// y [N, D], stream [N, 4, D], mix [N, 24] of the finished sublayer -> out [N, 4, D], u [N, D],
// rho [N] (of the whole new row), r [N] (of the collapsed row).
void seam_forward(const uint16_t* y, const uint16_t* stream, const float* mix, const float* norm,
                  uint16_t* out, uint16_t* u, float* rho, float* r, int64_t rows, int64_t width,
                  float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < rows; ++n) {
        const uint16_t* __restrict s = stream + n * C * width;
        const uint16_t* __restrict in = y + n * width;
        const float* m = mix + n * MIXES;
        uint16_t* __restrict o = out + n * C * width;
        float k[MIXES];
        std::memcpy(k, m, sizeof(k));
        float collapsed[MAX_WIDTH];
        float total = 0, square = 0;
#pragma omp simd reduction(+ : total, square)
        for (int64_t d = 0; d < width; ++d) {
            const float x = widen(in[d]);
            const float s0 = widen(s[d]), s1 = widen(s[width + d]), s2 = widen(s[2 * width + d]),
                        s3 = widen(s[3 * width + d]);
            const uint16_t b0 = narrow(k[4] * x + k[8] * s0 + k[12] * s1 + k[16] * s2 + k[20] * s3);
            const uint16_t b1 = narrow(k[5] * x + k[9] * s0 + k[13] * s1 + k[17] * s2 + k[21] * s3);
            const uint16_t b2 = narrow(k[6] * x + k[10] * s0 + k[14] * s1 + k[18] * s2 + k[22] * s3);
            const uint16_t b3 = narrow(k[7] * x + k[11] * s0 + k[15] * s1 + k[19] * s2 + k[23] * s3);
            o[d] = b0, o[width + d] = b1, o[2 * width + d] = b2, o[3 * width + d] = b3;
            const float v0 = widen(b0), v1 = widen(b1), v2 = widen(b2), v3 = widen(b3);
            total += v0 * v0 + v1 * v1 + v2 * v2 + v3 * v3;
            const float c = widen(narrow(k[0] * v0 + k[1] * v1 + k[2] * v2 + k[3] * v3));
            collapsed[d] = c;
            square += c * c;
        }
        rho[n] = 1.0f / std::sqrt(total / (C * width) + eps);
        float inverse = 1.0f / std::sqrt(square / width + eps);
        r[n] = inverse;
        for (int64_t d = 0; d < width; ++d)
            u[n * width + d] = narrow(collapsed[d] * inverse * norm[d]);
    }
}

// raw [N, 24] = new stream @ fn^T -> mixes [N, 24].
void mixes_forward(const uint16_t* raw, const float* rho, const float* base, const float* scale,
                   float* mix, int64_t rows, int iters, float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row += LANES) {
        int count = rows - row < LANES ? static_cast<int>(rows - row) : LANES;
        Lanes m[MIXES];
        load_mixes(raw, rho, base, scale, row, count, m);
        coefficients(m, iters, eps, nullptr);
        for (int l = 0; l < count; ++l)
            for (int k = 0; k < MIXES; ++k) mix[(row + l) * MIXES + k] = m[k].v[l];
    }
}

// grad [N, 24] of the mixes -> d_raw [N, 24], d_rho [N], d_base [24], d_scale [3].
void mixes_backward(const uint16_t* raw, const float* rho, const float* base, const float* scale,
                    const float* grad, uint16_t* d_raw, float* d_rho, float* d_base, float* d_scale,
                    int64_t rows, int iters, float eps) {
    int steps = 2 * iters - 1;
    std::vector<double> partial(static_cast<size_t>(omp_get_max_threads()) * (MIXES + 3), 0.0);
#pragma omp parallel
    {
        Sinkhorn keep;
        keep.states.resize(steps * C * C);
        keep.sums.resize(steps * C);
        double* my_base = &partial[static_cast<size_t>(omp_get_thread_num()) * (MIXES + 3)];
        double* my_scale = my_base + MIXES;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row += LANES) {
            int count = rows - row < LANES ? static_cast<int>(rows - row) : LANES;
            Lanes m[MIXES], g[MIXES];
            load_mixes(raw, rho, base, scale, row, count, m);
            coefficients(m, iters, eps, &keep);
            for (int k = 0; k < MIXES; ++k)
                for (int l = 0; l < LANES; ++l)
                    g[k].v[l] = l < count ? grad[(row + l) * MIXES + k] : 0.0f;
            for (int k = 0; k < C; ++k)
                for (int l = 0; l < LANES; ++l) {
                    float s = m[k].v[l] - eps;
                    g[k].v[l] *= s * (1 - s);
                }
            for (int k = C; k < 2 * C; ++k)
                for (int l = 0; l < LANES; ++l)
                    g[k].v[l] *= m[k].v[l] * (1 - 0.5f * m[k].v[l]);
            Lanes* gc = g + 2 * C;
            for (int step = steps - 1; step >= 0; --step)
                normalise_grad(gc, &keep.states[step * C * C], &keep.sums[step * C], step & 1);
            for (int i = 0; i < C; ++i)
                for (int l = 0; l < LANES; ++l) {
                    float dot = 0;
                    for (int j = 0; j < C; ++j) dot += gc[i * C + j].v[l] * keep.soft[i * C + j].v[l];
                    for (int j = 0; j < C; ++j)
                        gc[i * C + j].v[l] =
                            (gc[i * C + j].v[l] - dot) * keep.soft[i * C + j].v[l];
                }
            for (int l = 0; l < count; ++l) {
                int64_t n = row + l;
                float through = 0;
                for (int k = 0; k < MIXES; ++k) {
                    int part = k < C ? 0 : k < 2 * C ? 1 : 2;
                    float value = widen(raw[n * MIXES + k]), gk = g[k].v[l];
                    my_base[k] += gk;
                    my_scale[part] += gk * value * rho[n];
                    through += gk * scale[part] * value;
                    d_raw[n * MIXES + k] = narrow(gk * scale[part] * rho[n]);
                }
                d_rho[n] = through;
            }
        }
    }
    // Summed in thread order, so that a run is reproducible.
    for (int k = 0; k < MIXES + 3; ++k) {
        double sum = 0;
        for (size_t at = k; at < partial.size(); at += MIXES + 3) sum += partial[at];
        (k < MIXES ? d_base[k] : d_scale[k - MIXES]) = static_cast<float>(sum);
    }
}

// Adjoint of seam_forward.
// d_out [N, 4, D]: gradient of the new stream from its later uses; d_flat [N, 4 D]: from the mixes'
// product; d_rho [N]; d_u [N, D] -> d_y, d_stream, d_mix [N, 24], d_norm [D].
void seam_backward(const uint16_t* y, const uint16_t* stream, const float* mix, const float* norm,
                   const uint16_t* out, const float* rho, const float* r, const uint16_t* d_out,
                   const uint16_t* d_flat, const float* d_rho, const uint16_t* d_u, uint16_t* d_y,
                   uint16_t* d_stream, float* d_mix, float* d_norm, int64_t rows, int64_t width) {
    std::vector<float> partial(static_cast<size_t>(omp_get_max_threads()) * width, 0.0f);
#pragma omp parallel
    {
        float* my_norm = &partial[static_cast<size_t>(omp_get_thread_num()) * width];
#pragma omp for schedule(static)
        for (int64_t n = 0; n < rows; ++n) {
            const int64_t at = n * C * width;
            const uint16_t* __restrict s0 = stream + at;
            const uint16_t* __restrict o0 = out + at;
            const uint16_t* __restrict go = d_out + at;
            const uint16_t* __restrict gf = d_flat + at;
            const uint16_t* __restrict in = y + n * width;
            const uint16_t* __restrict gu = d_u + n * width;
            uint16_t* __restrict gs = d_stream + at;
            uint16_t* __restrict gy = d_y + n * width;
            float* __restrict mine = my_norm;
            const float* m = mix + n * MIXES;
            const float p0 = m[0], p1 = m[1], p2 = m[2], p3 = m[3];
            const float q0 = m[4], q1 = m[5], q2 = m[6], q3 = m[7];
            float k[C * C];
            std::memcpy(k, m + 2 * C, sizeof(k));
            float collapsed[MAX_WIDTH];
            float dot = 0;
#pragma omp simd reduction(+ : dot)
            for (int64_t d = 0; d < width; ++d) {
                float c = p0 * widen(o0[d]) + p1 * widen(o0[width + d]) +
                          p2 * widen(o0[2 * width + d]) + p3 * widen(o0[3 * width + d]);
                c = widen(narrow(c));
                collapsed[d] = c;
                dot += widen(gu[d]) * norm[d] * c;
            }
            const float inverse = r[n];
            const float pull = dot * inverse * inverse * inverse / width;
            const float shrink = -rho[n] * rho[n] * rho[n] * d_rho[n] / (C * width);
            float a0 = 0, a1 = 0, a2 = 0, a3 = 0, b0 = 0, b1 = 0, b2 = 0, b3 = 0;
            float c00 = 0, c01 = 0, c02 = 0, c03 = 0, c10 = 0, c11 = 0, c12 = 0, c13 = 0;
            float c20 = 0, c21 = 0, c22 = 0, c23 = 0, c30 = 0, c31 = 0, c32 = 0, c33 = 0;
#pragma omp simd reduction(+ : a0, a1, a2, a3, b0, b1, b2, b3, c00, c01, c02, c03, c10, c11, c12, \
                               c13, c20, c21, c22, c23, c30, c31, c32, c33)
            for (int64_t d = 0; d < width; ++d) {
                const float up = widen(gu[d]);
                mine[d] += up * collapsed[d] * inverse;
                const float dc = up * norm[d] * inverse - collapsed[d] * pull;
                const float v0 = widen(o0[d]), v1 = widen(o0[width + d]),
                            v2 = widen(o0[2 * width + d]), v3 = widen(o0[3 * width + d]);
                a0 += dc * v0, a1 += dc * v1, a2 += dc * v2, a3 += dc * v3;
                const float g0 = widen(go[d]) + widen(gf[d]) + p0 * dc + shrink * v0;
                const float g1 = widen(go[width + d]) + widen(gf[width + d]) + p1 * dc + shrink * v1;
                const float g2 =
                    widen(go[2 * width + d]) + widen(gf[2 * width + d]) + p2 * dc + shrink * v2;
                const float g3 =
                    widen(go[3 * width + d]) + widen(gf[3 * width + d]) + p3 * dc + shrink * v3;
                const float yd = widen(in[d]);
                gy[d] = narrow(q0 * g0 + q1 * g1 + q2 * g2 + q3 * g3);
                b0 += g0 * yd, b1 += g1 * yd, b2 += g2 * yd, b3 += g3 * yd;
                const float x0 = widen(s0[d]), x1 = widen(s0[width + d]),
                            x2 = widen(s0[2 * width + d]), x3 = widen(s0[3 * width + d]);
                gs[d] = narrow(k[0] * g0 + k[1] * g1 + k[2] * g2 + k[3] * g3);
                gs[width + d] = narrow(k[4] * g0 + k[5] * g1 + k[6] * g2 + k[7] * g3);
                gs[2 * width + d] = narrow(k[8] * g0 + k[9] * g1 + k[10] * g2 + k[11] * g3);
                gs[3 * width + d] = narrow(k[12] * g0 + k[13] * g1 + k[14] * g2 + k[15] * g3);
                c00 += x0 * g0, c01 += x0 * g1, c02 += x0 * g2, c03 += x0 * g3;
                c10 += x1 * g0, c11 += x1 * g1, c12 += x1 * g2, c13 += x1 * g3;
                c20 += x2 * g0, c21 += x2 * g1, c22 += x2 * g2, c23 += x2 * g3;
                c30 += x3 * g0, c31 += x3 * g1, c32 += x3 * g2, c33 += x3 * g3;
            }
            const float grads[MIXES] = {a0,  a1,  a2,  a3,  b0,  b1,  b2,  b3,
                                        c00, c01, c02, c03, c10, c11, c12, c13,
                                        c20, c21, c22, c23, c30, c31, c32, c33};
            std::memcpy(d_mix + n * MIXES, grads, sizeof(grads));
        }
    }
    for (int64_t d = 0; d < width; ++d) {
        float sum = 0;
        for (size_t at = d; at < partial.size(); at += width) sum += partial[at];
        d_norm[d] = sum;
    }
}

// One softmax per row over window scores, compressed scores and a sink, in place.
// Rows are in (query, head) order, queries consecutive within one sequence from block `first_block`
// on. near [queries * heads, 2 W], far [queries * heads, far_width] (far_width may be 0). Query t of
// its block sees columns t + 1 .. t + W of near (from W on in the first block of a sequence) and the
// columns of far where mask [queries, mask_stride] is set; seen [queries]: leading columns that can
// be. p_sink [queries * heads].
void softmax_forward(uint16_t* near, uint16_t* far, const uint8_t* mask, int64_t mask_stride,
                     const int32_t* seen, const float* sink, float* p_sink, int64_t queries,
                     int64_t heads, int64_t window, int64_t first_block, int64_t far_width,
                     float scale) {
    const int64_t a = 2 * window;
#pragma omp parallel
    {
        std::vector<float> buffer(a + far_width), gate(far_width);
        float *x = buffer.data(), *z = buffer.data() + a;
#pragma omp for schedule(dynamic, 16)
        for (int64_t q = 0; q < queries; ++q) {
            const int64_t t = q % window, block = first_block + q / window;
            const int64_t lo = block ? t + 1 : window, hi = t + window + 1;
            const int64_t b = far_width ? seen[q] : 0;
            if (b) {
                const uint8_t* row = mask + q * mask_stride;
                for (int64_t k = 0; k < b; ++k) gate[k] = row[k] ? 0.0f : -1e30f;
            }
            for (int64_t h = 0; h < heads; ++h) {
                const int64_t row = q * heads + h;
                uint16_t *pn = near + row * a, *pf = far + row * far_width;
                float top = sink[h];
                for (int64_t k = lo; k < hi; ++k) {
                    float v = widen(pn[k]) * scale;
                    x[k] = v;
                    top = v > top ? v : top;
                }
                for (int64_t k = 0; k < b; ++k) {
                    float v = widen(pf[k]) * scale + gate[k];
                    z[k] = v;
                    top = v > top ? v : top;
                }
                float sum = 0, sunk = std::exp(sink[h] - top);
                for (int64_t k = lo; k < hi; ++k) {
                    x[k] = std::exp(x[k] - top);
                    sum += x[k];
                }
                for (int64_t k = 0; k < b; ++k) {
                    z[k] = std::exp(z[k] - top);
                    sum += z[k];
                }
                const float inverse = 1.0f / (sum + sunk);
                p_sink[row] = sunk * inverse;
                for (int64_t k = 0; k < lo; ++k) pn[k] = 0;
                for (int64_t k = lo; k < hi; ++k) pn[k] = narrow(x[k] * inverse);
                for (int64_t k = hi; k < a; ++k) pn[k] = 0;
                for (int64_t k = 0; k < b; ++k) pf[k] = narrow(z[k] * inverse);
                for (int64_t k = b; k < far_width; ++k) pf[k] = 0;
            }
        }
    }
}

// grad = p * (grad - dot) * scale, in place; rows of `width`.
void softmax_backward(const uint16_t* p, uint16_t* grad, const float* dot, int64_t rows,
                      int64_t width, float scale) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < rows; ++n) {
        const float d = dot[n];
        for (int64_t k = 0; k < width; ++k) {
            const int64_t at = n * width + k;
            grad[at] = narrow(widen(p[at]) * (widen(grad[at]) - d) * scale);
        }
    }
}

}  // extern "C"
