// ECF8: decode a Huffman-coded stream of 4-bit FP8 exponents and merge it with the sign and mantissa nibbles.
//
// One thread owns one chunk of the stream. Codes may cross chunk borders; the four-bit gap of a chunk says how many of its
// leading bits belong to the code before. A thread decodes the codes that START in its chunk. It does so twice: once to
// count them, so that a prefix sum over the block tells it where its elements go, and once to write them.
//
//   ecf8_decode_v1   the paper's layout: 8 bytes a thread, cascaded byte tables, codes of up to 16 bits
//   ecf8_decode_v2   16 bytes a thread, 256 threads, one table of 4096 entries in shared memory, codes of up to 12 bits
//
// Neither loops for ever or writes outside of `out`, whatever the stream, the tables and the gaps hold.
// `positions` must not ask for more elements a block than the dynamic shared memory was sized for.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 gap_of(const u8* gaps, u64 chunk) {  // two a byte, the first in the high half
    return (gaps[chunk >> 1] >> ((chunk & 1) ? 0 : 4)) & 15;
}

__device__ __forceinline__ u8 with_nibble(u32 exponent_bits, const u8* sm, u64 element) {
    const u32 o = sm[element >> 1] >> ((element & 1) ? 0 : 4);
    return (u8)(exponent_bits | (o & 8) << 4 | (o & 7));
}

// v1 -----------------------------------------------------------------------------------------------------------------

// The 16 bits at bit `at` (0..63) of an 80-bit string.
__device__ __forceinline__ u32 window16(u64 bits, u32 ahead, u32 at) {
    const u32 from_bits = (u32)(bits << at >> 48);
    return at > 48 ? from_bits | ahead >> (64 - at) : from_bits;
}

// Symbol at the front of a window, and its length: 0 where the tables know no code. That happens behind the last element,
// where the stream is filled up with bits of no symbol.
__device__ __forceinline__ u32 cascade(const u8* luts, int n_luts, u32 window, u32& length) {
    u32 entry = __ldg(luts + (window >> 8));
    if (entry >= 240) {
        const int row = 256 - (int)entry;
        entry = row < n_luts - 1 ? __ldg(luts + row * 256 + (window & 255)) : 255;
    }
    length = entry < 240 ? __ldg(luts + (n_luts - 1) * 256 + entry) : 0;
    return entry;
}

// Launch: grid = ceil(n_bytes / (8 T)), block = T (a power of two), dynamic shared = 4 T + 4 + most elements of any block.
extern "C" __global__ void ecf8_decode_v1(
    const u8* __restrict__ luts,        // [n_luts, 256]: rows of symbols (below 240) or pointers 256 - row; last row: lengths
    const u8* __restrict__ enc,         // [n_bytes] codes, most significant bit first
    const u8* __restrict__ sm,          // [ceil(n_elements / 2)] sign and mantissa, the first element in the high half
    const u64* __restrict__ positions,  // [blocks + 1] first element of each block
    const u8* __restrict__ gaps,        // [ceil(blocks T / 2)]
    u8* __restrict__ out,               // [n_elements] FP8 bytes
    int n_luts, int n_bytes, int n_elements)
{
    extern __shared__ __align__(16) u8 memory[];
    u32* sums = (u32*)memory;           // [T], and the total in sums[T]
    const u32 T = blockDim.x, t = threadIdx.x;
    u8* stage = memory + 4 * T + 4;
    const u64 chunk = (u64)blockIdx.x * T + t, start = 8 * chunk;

    u64 bits = 0;
    u32 ahead = 0, first = 64;          // a thread behind the end of the stream has no code
    if (start < (u64)n_bytes) {
        for (u32 i = 0; i < 8; ++i) bits = bits << 8 | (start + i < (u64)n_bytes ? enc[start + i] : 0);
        for (u32 i = 8; i < 10; ++i) ahead = ahead << 8 | (start + i < (u64)n_bytes ? enc[start + i] : 0);
        first = gap_of(gaps, chunk);
    }

    u32 count = 0, length;
    for (u32 at = first; at < 64; at += length, ++count) {
        cascade(luts, n_luts, window16(bits, ahead, at), length);
        if (length == 0) break;
    }

    // Exclusive prefix sum in shared memory: up the tree, then down.
    sums[t] = count;
    __syncthreads();
    for (u32 step = 1; step < T; step *= 2) {
        if ((t & (2 * step - 1)) == 2 * step - 1) sums[t] += sums[t - step];
        __syncthreads();
    }
    if (t == 0) sums[T] = sums[T - 1], sums[T - 1] = 0;
    __syncthreads();
    for (u32 step = T / 2; step > 0; step /= 2) {
        if ((t & (2 * step - 1)) == 2 * step - 1) {
            const u32 left = sums[t - step];
            sums[t - step] = sums[t], sums[t] += left;
        }
        __syncthreads();
    }

    const u64 base = positions[blockIdx.x], next = positions[blockIdx.x + 1];
    const u64 stop = next < (u64)n_elements ? next : (u64)n_elements;
    const u32 here = base < stop ? (u32)(stop - base) : 0;
    u32 o = sums[t];
    for (u32 at = first; at < 64 && o < here; at += length, ++o) {
        const u32 symbol = cascade(luts, n_luts, window16(bits, ahead, at), length);
        if (length == 0) break;
        stage[o] = with_nibble((symbol & 15) << 3, sm, base + o);
    }
    __syncthreads();
    const u32 written = sums[T] < here ? sums[T] : here;     // less than `here` only if the stream is damaged
    for (u32 i = t; i < written; i += T) out[base + i] = stage[i];
}

// v2 -----------------------------------------------------------------------------------------------------------------

#define V2_T 256        // threads a block
#define V2_BITS 128     // bits a thread: 16 bytes
#define V2_K 12         // bits that index the table

__device__ __forceinline__ u64 big_endian(u32 first, u32 second) {
    return (u64)__byte_perm(first, 0, 0x0123) << 32 | __byte_perm(second, 0, 0x0123);
}

// Visits the codes that start in [first, limit). A window of 64 bits serves all codes that start in its first 52, so the
// chunk takes three windows whose places are known at compile time; only the shift inside a window is not.
template <class Visit>
__device__ __forceinline__ void walk(const u16* lut, u64 w0, u64 w1, u64 w2, u32 first, u32 limit, Visit visit) {
    const u64 w[3] = {w0, w1, w2};
    u32 at = first;
    #pragma unroll
    for (u32 j = 0; j < 3; ++j) {
        const u32 from = 52 * j, word = from / 64, shift = from % 64;
        const u32 to = min(limit, j < 2 ? from + 52 : (u32)V2_BITS);
        u64 window = shift ? w[word] << shift | w[word + 1] >> (64 - shift) : w[word];
        window <<= (at - from) & 63;       // below 16, unless the chunk has ended before
        while (at < to) {
            const u32 entry = lut[window >> (64 - V2_K)], length = entry >> 8;
            visit(entry);
            window <<= length, at += length;
        }
    }
}

// Four exponents (already in place, bits 3..6 of each byte) and four nibbles (bits 0..3 of each byte).
__device__ __forceinline__ u32 merge4(u32 exponents, u32 nibbles) {
    return exponents | (nibbles & 0x08080808u) << 4 | (nibbles & 0x07070707u);
}

// Launch: grid = ceil(n_bytes / 4096), block = 256, dynamic shared = (2 << 12) + 144 + most elements of any block.
extern "C" __global__ void __launch_bounds__(V2_T) ecf8_decode_v2(
    const u16* __restrict__ lut,        // [4096]: symbol | length << 8
    const u8* __restrict__ enc,         // [n_bytes] codes, most significant bit first
    const u8* __restrict__ gaps,        // [blocks * 128]
    const u64* __restrict__ positions,  // [blocks + 1] first element of each block
    const u8* __restrict__ sm,          // [ceil(n_elements / 2)]
    u8* __restrict__ out,               // [n_elements]
    u64 n_bytes, u64 n_elements)
{
    extern __shared__ __align__(16) u8 memory[];
    u16* table = (u16*)memory;                              // 8192 bytes
    u32* warps = (u32*)(memory + (2 << V2_K));              // 128 bytes, one sum a warp
    const u32 t = threadIdx.x, lane = t % 32, warp = t / 32;

    // 1. The table, with every length forced into 1..12, and this thread's 24 bytes.
    for (u32 i = t; i < 1u << V2_K; i += V2_T) {
        const u32 entry = lut[i], length = entry >> 8;
        table[i] = (u16)(length - 1 < V2_K ? entry : (entry & 255) | V2_K << 8);
    }
    const u64 chunk = (u64)blockIdx.x * V2_T + t, start = 16 * chunk;
    u64 w0 = 0, w1 = 0, w2 = 0;
    u32 first = 0, limit = 0;
    if (start < n_bytes) {
        if (start + 24 <= n_bytes && ((u64)enc & 15) == 0) {
            const uint4 own = __ldg((const uint4*)(enc + start));
            const uint2 ahead = __ldg((const uint2*)(enc + start + 16));
            w0 = big_endian(own.x, own.y), w1 = big_endian(own.z, own.w), w2 = big_endian(ahead.x, ahead.y);
        } else {
            for (u32 i = 0; i < 8; ++i) {
                w0 = w0 << 8 | (start + i < n_bytes ? enc[start + i] : 0);
                w1 = w1 << 8 | (start + 8 + i < n_bytes ? enc[start + 8 + i] : 0);
                w2 = w2 << 8 | (start + 16 + i < n_bytes ? enc[start + 16 + i] : 0);
            }
        }
        first = gap_of(gaps, chunk);
        limit = n_bytes - start < 16 ? 8 * (u32)(n_bytes - start) : V2_BITS;
    }
    __syncthreads();

    // 2. Count.
    u32 count = 0;
    walk(table, w0, w1, w2, first, limit, [&](u32) { ++count; });

    // 3. Inclusive sum over the warp by shuffles, then the sums of the warps before.
    u32 o = count;
    #pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 left = __shfl_up_sync(0xffffffffu, o, step);
        if (lane >= step) o += left;
    }
    if (lane == 31) warps[warp] = o;
    __syncthreads();
    o -= count;
    #pragma unroll
    for (u32 i = 0; i < V2_T / 32 - 1; ++i) o += i < warp ? warps[i] : 0;

    // 4. Decode into shared memory. The stage begins where the output does modulo 16, so that both are aligned together.
    const u64 base = positions[blockIdx.x], stop = min(positions[blockIdx.x + 1], n_elements);
    const u32 here = base < stop ? (u32)(stop - base) : 0, lead = (u32)base & 15;
    u8* stage = memory + (2 << V2_K) + 128;                 // 16 bytes of lead, then the elements
    walk(table, w0, w1, w2, first, limit, [&](u32 entry) {
        if (o < here) stage[lead + o] = (u8)((entry & 15) << 3);
        ++o;
    });
    if (t == V2_T - 1) warps[V2_T / 32] = o;                // all that the block has decoded
    __syncthreads();

    // 5. Merge and store: single bytes up to the first multiple of 16, sixteen at a time, single bytes at the end.
    const u32 end = lead + min(here, warps[V2_T / 32]);     // less than `here` only if the stream is damaged
    const u64 origin = base - lead;                         // element of stage[0], a multiple of 16
    const bool wide = ((u64)out & 15) == 0 && ((u64)sm & 7) == 0;
    const u32 head = wide ? min((lead + 15) & ~15u, end) : end, tail = wide ? max(end & ~15u, head) : end;
    for (u32 i = lead + t; i < head; i += V2_T) out[origin + i] = with_nibble(stage[i], sm, origin + i);
    for (u32 i = head + 16 * t; i < tail; i += 16 * V2_T) {
        const uint2 s = __ldg((const uint2*)(sm + ((origin + i) >> 1)));
        uint4 v = *(const uint4*)(stage + i);
        const u32 high0 = s.x >> 4 & 0x0f0f0f0fu, low0 = s.x & 0x0f0f0f0fu;
        const u32 high1 = s.y >> 4 & 0x0f0f0f0fu, low1 = s.y & 0x0f0f0f0fu;
        v.x = merge4(v.x, __byte_perm(high0, low0, 0x5140)), v.y = merge4(v.y, __byte_perm(high0, low0, 0x7362));
        v.z = merge4(v.z, __byte_perm(high1, low1, 0x5140)), v.w = merge4(v.w, __byte_perm(high1, low1, 0x7362));
        *(uint4*)(out + origin + i) = v;
    }
    for (u32 i = tail + t; i < end; i += V2_T) out[origin + i] = with_nibble(stage[i], sm, origin + i);
}
