// Posterior mean of a finite data set under Gaussian noise, by streaming log-sum-exp.
//
// For a query x and noise level sigma, with logits l_i = log w_i - |x - x_i|^2 / (2 sigma^2):
//     mean = sum_i softmax(l)_i x_i,   second = sum_i softmax(l)_i |x_i - x|^2,   lse = log sum_i exp(l_i).
// The trace of the posterior covariance is second - |mean - x|^2. The B x N matrix of logits is never stored: a block holds
// Q queries and walks over the data in tiles of 32 rows with a running maximum m, a running sum z and unnormalised moments.
// Distances are sums of squared differences, not differences of squares, so they keep their digits at small sigma.
//
//   posterior_partial   grid (ceil(B / Q), S): block (q, s) reduces rows [s, s + 1) * ceil(N / S) for Q queries
//   posterior_merge     grid B: joins the S partial results of a query
//
// A data row of weight 0 has log weight -inf; a query whose every weight is 0 gets mean 0, second 0, lse -inf.

#define THREADS 256
#define TILE 32         // data rows a tile: one a lane
#define WARPS (THREADS / 32)
#define SLAB 32         // dimensions of a tile that are in shared memory at once
#define PITCH (SLAB + 1)
#ifndef Q
#define Q 8             // queries a block: one a warp
#endif

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// exp(a - b) where both may be -inf: an empty sum has weight 0.
__device__ __forceinline__ float rescale(float a, float b) { return a == minus_infinity() ? 0.f : expf(a - b); }

__device__ __forceinline__ float warp_max(float v) {
    #pragma unroll
    for (int step = 16; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, step));
    return v;
}

__device__ __forceinline__ float warp_sum(float v) {
    #pragma unroll
    for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}

// Launch: block = THREADS, dynamic shared = 4 (2 Q d + TILE PITCH + Q TILE) bytes.
extern "C" __global__ void __launch_bounds__(THREADS) posterior_partial(
    const float* __restrict__ x,            // [B, d] queries, already divided by alpha
    const float* __restrict__ data,         // [N, d]
    const float* __restrict__ log_weights,  // [N] or null
    const float* __restrict__ half_snr,     // [B] 1 / (2 sigma^2)
    float* __restrict__ moments,            // [S, B, d] sum exp(l - m) x_i
    float* __restrict__ stats,              // [S, B, 3] m, sum exp(l - m), sum exp(l - m) |x_i - x|^2
    int B, int N, int d)
{
    extern __shared__ __align__(16) float memory[];
    float* query = memory;                  // [Q, d]
    float* sums = query + Q * d;            // [Q, d]
    float* slab = sums + Q * d;             // [TILE, PITCH]: neighbouring rows fall into different banks
    float* p = slab + TILE * PITCH;         // [Q, TILE]
    __shared__ float scale[Q];

    const int t = threadIdx.x, lane = t % 32, warp = t / 32, first = blockIdx.x * Q;
    const long long span = ((long long)N + gridDim.y - 1) / gridDim.y;
    const long long begin = blockIdx.y * span, end = begin + span < N ? begin + span : N;

    for (int i = t; i < Q * d; i += THREADS) {
        query[i] = first + i / d < B ? x[(long long)first * d + i] : 0.f;
        sums[i] = 0.f;
    }
    // Warp w serves query w (and w + WARPS, ... if Q > WARPS): its running statistics live in its registers.
    float m[(Q + WARPS - 1) / WARPS], z[(Q + WARPS - 1) / WARPS], second[(Q + WARPS - 1) / WARPS];
    #pragma unroll
    for (int k = 0; k < (Q + WARPS - 1) / WARPS; ++k) m[k] = minus_infinity(), z[k] = 0.f, second[k] = 0.f;

    for (long long row = begin; row < end; row += TILE) {
        // 1. Squared distances of Q queries to 32 rows, SLAB dimensions at a time.
        float d2[(Q + WARPS - 1) / WARPS];
        #pragma unroll
        for (int k = 0; k < (Q + WARPS - 1) / WARPS; ++k) d2[k] = 0.f;
        for (int from = 0; from < d; from += SLAB) {
            __syncthreads();                                    // the slab, and p and scale, have been read
            for (int i = t; i < TILE * SLAB; i += THREADS) {
                const int r = i / SLAB, j = i % SLAB;
                slab[r * PITCH + j] = row + r < end && from + j < d ? data[(row + r) * d + from + j] : 0.f;
            }
            __syncthreads();
            const int width = d - from < SLAB ? d - from : SLAB;
            #pragma unroll
            for (int k = 0; k < (Q + WARPS - 1) / WARPS; ++k) {
                const int q = warp + k * WARPS;
                if (q < Q)
                    for (int j = 0; j < width; ++j) {
                        const float difference = query[q * d + from + j] - slab[lane * PITCH + j];
                        d2[k] = fmaf(difference, difference, d2[k]);
                    }
            }
        }
        // 2. Running maximum and sums, one warp a query.
        #pragma unroll
        for (int k = 0; k < (Q + WARPS - 1) / WARPS; ++k) {
            const int q = warp + k * WARPS;
            if (q >= Q) continue;
            const bool live = row + lane < end && first + q < B;
            const float logit = live ? (log_weights ? log_weights[row + lane] : 0.f) - d2[k] * half_snr[first + q] : minus_infinity();
            const float top = fmaxf(m[k], warp_max(logit)), old = rescale(m[k], top);
            const float weight = rescale(logit, top);
            z[k] = z[k] * old + warp_sum(weight);
            second[k] = second[k] * old + warp_sum(weight > 0.f ? weight * d2[k] : 0.f);
            m[k] = top;
            p[q * TILE + lane] = weight;
            if (lane == 0) scale[q] = old;
        }
        __syncthreads();
        // 3. Moments: a thread owns columns t, t + THREADS, ... of all Q queries; rows come from the cache of step 1.
        const int rows = end - row < TILE ? (int)(end - row) : TILE;
        for (int j = t; j < d; j += THREADS) {
            float total[Q];
            #pragma unroll
            for (int q = 0; q < Q; ++q) total[q] = sums[q * d + j] * scale[q];
            for (int r = 0; r < rows; ++r) {
                const float value = data[(row + r) * d + j];
                #pragma unroll
                for (int q = 0; q < Q; ++q) total[q] = fmaf(p[q * TILE + r], value, total[q]);
            }
            #pragma unroll
            for (int q = 0; q < Q; ++q) sums[q * d + j] = total[q];
        }
    }
    __syncthreads();
    const long long out = (long long)blockIdx.y * B + first;
    for (int i = t; i < Q * d; i += THREADS)
        if (first + i / d < B) moments[out * d + i] = sums[i];
    #pragma unroll
    for (int k = 0; k < (Q + WARPS - 1) / WARPS; ++k) {
        const int q = warp + k * WARPS;
        if (lane == 0 && q < Q && first + q < B)
            stats[3 * (out + q)] = m[k], stats[3 * (out + q) + 1] = z[k], stats[3 * (out + q) + 2] = second[k];
    }
}

// Launch: grid = B, block = any. Every thread repeats the S-term sums, which is cheaper than a barrier for the few parts used.
extern "C" __global__ void posterior_merge(
    const float* __restrict__ moments,  // [S, B, d]
    const float* __restrict__ stats,    // [S, B, 3]
    float* __restrict__ mean,           // [B, d]
    float* __restrict__ second,         // [B] posterior mean of |x_i - x|^2
    float* __restrict__ lse,            // [B]
    int B, int S, int d)
{
    const int b = blockIdx.x;
    float top = minus_infinity(), z = 0.f, s2 = 0.f;
    for (int s = 0; s < S; ++s) top = fmaxf(top, stats[3 * ((long long)s * B + b)]);
    for (int s = 0; s < S; ++s) {
        const float* part = stats + 3 * ((long long)s * B + b);
        const float old = rescale(part[0], top);
        z = fmaf(part[1], old, z), s2 = fmaf(part[2], old, s2);
    }
    const float norm = z > 0.f ? 1.f / z : 0.f;
    for (int j = threadIdx.x; j < d; j += blockDim.x) {
        float total = 0.f;
        for (int s = 0; s < S; ++s) total = fmaf(moments[((long long)s * B + b) * d + j], rescale(stats[3 * ((long long)s * B + b)], top), total);
        mean[(long long)b * d + j] = total * norm;
    }
    if (threadIdx.x == 0) second[b] = s2 * norm, lse[b] = z > 0.f ? top + logf(z) : minus_infinity();
}
