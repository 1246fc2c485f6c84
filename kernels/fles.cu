// FleS: phi(x) = kv * sigmoid(kh * x) * x with coefficients kv, kh of every sample and channel, and the statistic behind them.
//
//   fles_posmean<T>    sum and number of the non-negative responses of a channel
//   fles_fwd<T>        the gate
//   fles_bwd<T>        its gradients: for x element by element, for kv and kh summed over the positions in the same pass
//   fles_posmean_bwd<T>  adds the statistic's gradient, 1[x >= 0] * share, to that of x
//
// Layout: x [B, N, C], coefficients [B, C]. T is float, double, __half or __nv_bfloat16; sums and gates are float (double for
// double). Launch all of them with grid (B, ceil(C / 128)) and block (128, ROWS): neighbouring threads read neighbouring
// channels, the ROWS rows of a block walk over the positions in strides and are added up through shared memory.
#if defined(__has_include)
#if __has_include(<cuda_fp16.h>)
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#define FLES_HALF 1
#endif
#endif

#define TILE 128        // channels a block
#define ROWS 4          // positions at a time

template <class T> struct Wide { using type = float; };
template <> struct Wide<double> { using type = double; };

template <class T> __device__ __forceinline__ typename Wide<T>::type widen(T v) { return v; }
template <class T> __device__ __forceinline__ T narrow(typename Wide<T>::type v) { return v; }
#ifdef FLES_HALF
template <> __device__ __forceinline__ float widen<__half>(__half v) { return __half2float(v); }
template <> __device__ __forceinline__ __half narrow<__half>(float v) { return __float2half_rn(v); }
template <> __device__ __forceinline__ float widen<__nv_bfloat16>(__nv_bfloat16 v) { return __bfloat162float(v); }
template <> __device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }
#endif

__device__ __forceinline__ float exponential(float t) { return expf(t); }
__device__ __forceinline__ double exponential(double t) { return exp(t); }

// exp(-t) overflows to infinity for very negative t, and a quotient of 0 is what we want then; NaN stays NaN.
template <class A> __device__ __forceinline__ A denominator(A t) { return A(1) + exponential(-t); }

__device__ __forceinline__ float product_plus(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double product_plus(double a, double b, double c) { return fma(a, b, c); }

// v * r / (1 + exp(-t)), with an exponential that cannot overflow: for t < 0 both sides of the fraction are multiplied by exp(t).
// Products, sum and quotient are rounded; what each of them lost is known exactly and put back in one correction, so that little
// more than the error of exp remains. Where the quotient is not finite there is nothing to correct.
template <class A> __device__ __forceinline__ A gated(A v, A r, A t) {
    const A e = exponential(t < A(0) ? t : -t), m = t < A(0) ? e : A(1), d = A(1) + e;
    const A p = v * r, n = p * m, y = n / d;
    const A lost = product_plus(p, m, -n) + product_plus(v, r, -p) * m;
    const A rest = product_plus(-y, d, n) + lost;
    const A z = y + product_plus(-y, (A(1) - d) + e, rest) / d;
    return z - z == A(0) ? z : y;
}

// Adds up the rows of a block; the result is in row 0.
template <class A> __device__ __forceinline__ A over_rows(A v, A (*memory)[TILE]) {
    memory[threadIdx.y][threadIdx.x] = v;
    __syncthreads();
    if (threadIdx.y == 0)
        for (int r = 1; r < ROWS; ++r) v += memory[r][threadIdx.x];
    __syncthreads();
    return v;
}

template <class T> __global__ void __launch_bounds__(TILE * ROWS) fles_posmean(
    const T* __restrict__ x,                        // [B, N, C]
    typename Wide<T>::type* __restrict__ mean,      // [B, C] sum(max(x, 0)) / max(1, count)
    typename Wide<T>::type* __restrict__ count,     // [B, C] max(1, #{x >= 0})
    int N, int C)
{
    using A = typename Wide<T>::type;
    __shared__ A memory[ROWS][TILE];
    const int c = blockIdx.y * TILE + threadIdx.x;
    const T* mine = x + (long long)blockIdx.x * N * C + c;
    A total = 0, found = 0;
    if (c < C)
        for (int n = threadIdx.y; n < N; n += ROWS) {
            const A v = widen<T>(mine[(long long)n * C]);
            total += v < A(0) ? A(0) : v;           // NaN is not below 0: it stays visible
            found += v >= A(0) ? A(1) : A(0);
        }
    total = over_rows(total, memory);
    found = over_rows(found, memory);
    if (c < C && threadIdx.y == 0) {
        const A n = found < A(1) ? A(1) : found;
        mean[(long long)blockIdx.x * C + c] = total / n;
        count[(long long)blockIdx.x * C + c] = n;
    }
}

template <class T> __global__ void __launch_bounds__(TILE * ROWS) fles_fwd(
    const T* __restrict__ x,                            // [B, N, C]
    const typename Wide<T>::type* __restrict__ kv,      // [B, C] height
    const typename Wide<T>::type* __restrict__ kh,      // [B, C] steepness
    T* __restrict__ y,                                  // [B, N, C]
    int N, int C)
{
    using A = typename Wide<T>::type;
    const int c = blockIdx.y * TILE + threadIdx.x;
    if (c >= C) return;
    const long long first = (long long)blockIdx.x * N * C + c;
    const A v = kv[(long long)blockIdx.x * C + c], h = kh[(long long)blockIdx.x * C + c];
    for (int n = threadIdx.y; n < N; n += ROWS) {
        const A r = widen<T>(x[first + (long long)n * C]);
        y[first + (long long)n * C] = narrow<T>(gated<A>(v, r, h * r));
    }
}

template <class T> __global__ void __launch_bounds__(TILE * ROWS) fles_bwd(
    const T* __restrict__ x,                            // [B, N, C]
    const T* __restrict__ g,                            // [B, N, C] gradient of the output
    const typename Wide<T>::type* __restrict__ kv,      // [B, C]
    const typename Wide<T>::type* __restrict__ kh,      // [B, C]
    T* __restrict__ gx,                                 // [B, N, C]
    typename Wide<T>::type* __restrict__ gv,            // [B, C]
    typename Wide<T>::type* __restrict__ gh,            // [B, C]
    int N, int C)
{
    using A = typename Wide<T>::type;
    __shared__ A memory[ROWS][TILE];
    const int c = blockIdx.y * TILE + threadIdx.x;
    const long long first = (long long)blockIdx.x * N * C + c, at = (long long)blockIdx.x * C + c;
    A sv = 0, sh = 0;
    if (c < C) {
        const A v = kv[at], h = kh[at];
        for (int n = threadIdx.y; n < N; n += ROWS) {
            const A r = widen<T>(x[first + (long long)n * C]), u = widen<T>(g[first + (long long)n * C]);
            const A s = A(1) / denominator(h * r), slope = r * s * (A(1) - s);
            gx[first + (long long)n * C] = narrow<T>(u * v * (s + h * slope));
            sv += u * s * r;
            sh += u * v * slope * r;
        }
    }
    sv = over_rows(sv, memory);
    sh = over_rows(sh, memory);
    if (c < C && threadIdx.y == 0) gv[at] = sv, gh[at] = sh;
}

template <class T> __global__ void __launch_bounds__(TILE * ROWS) fles_posmean_bwd(
    const T* __restrict__ x,                            // [B, N, C]
    const typename Wide<T>::type* __restrict__ share,   // [B, C] gradient of the mean, divided by the count
    T* __restrict__ gx,                                 // [B, N, C] is added to
    int N, int C)
{
    using A = typename Wide<T>::type;
    const int c = blockIdx.y * TILE + threadIdx.x;
    if (c >= C) return;
    const long long first = (long long)blockIdx.x * N * C + c;
    const A each = share[(long long)blockIdx.x * C + c];
    for (int n = threadIdx.y; n < N; n += ROWS) {
        const long long i = first + (long long)n * C;
        if (widen<T>(x[i]) >= A(0)) gx[i] = narrow<T>(widen<T>(gx[i]) + each);
    }
}
