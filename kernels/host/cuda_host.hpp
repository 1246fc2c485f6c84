// Runs the text of a CUDA kernel on a CPU: one fiber a CUDA thread, blocks one after another.
//
// A .cu file is included behind this header without a change. `iclr26.lab.kernels` writes the few lines around it (see
// the end of this file), compiles them with g++ and calls `cuda_host_launch` through ctypes.
// What is modelled: the thread hierarchy, barriers, warp collectives, atomics, shared memory that starts with poison.
// What is not: time, caches, memory ordering between blocks, inline PTX, textures, cooperative groups, tensor cores.
#pragma once
#include <cmath>
#include <csetjmp>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <limits>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

// [words] -------------------------------------------------------------------------------------------------------------
// The words that CUDA adds to C++. `thread_local` is the trick behind __shared__: inside a function it is static
// without saying so, `extern thread_local` is legal too, it works in templates, and the loader knows where all of a
// library's thread-local variables lie, so that they can be poisoned together before every block.
#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __shared__ thread_local
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define __CUDA_ARCH__ 800

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#define CUDA_HOST_VECTOR(T, name, align2, align4)                                                                      \
    struct name##1 { T x; };                                                                                           \
    struct alignas(align2) name##2 { T x, y; };                                                                        \
    struct name##3 { T x, y, z; };                                                                                     \
    struct alignas(align4) name##4 { T x, y, z, w; };                                                                  \
    inline name##1 make_##name##1(T x) { return {x}; }                                                                 \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                                         \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                                                 \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDA_HOST_VECTOR(signed char, char, 2, 4)
CUDA_HOST_VECTOR(unsigned char, uchar, 2, 4)
CUDA_HOST_VECTOR(short, short, 4, 8)
CUDA_HOST_VECTOR(unsigned short, ushort, 4, 8)
CUDA_HOST_VECTOR(int, int, 8, 16)
CUDA_HOST_VECTOR(unsigned, uint, 8, 16)
CUDA_HOST_VECTOR(long long, longlong, 16, 16)
CUDA_HOST_VECTOR(unsigned long long, ulonglong, 16, 16)
CUDA_HOST_VECTOR(float, float, 8, 16)
CUDA_HOST_VECTOR(double, double, 16, 16)

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
static constexpr int warpSize = 32;

// [fibers] ------------------------------------------------------------------------------------------------------------
// A fiber has a stack and a saved register set. ucontext makes it and starts it; afterwards _setjmp and _longjmp switch,
// which is the same exchange of registers without two system calls for the signal mask.
namespace cuda_host {

enum State { ready, at_barrier, at_warp, finished };
enum Kind { k_none, k_sync, k_count, k_and, k_or, k_shfl, k_up, k_down, k_xor, k_ballot, k_syncwarp, k_any, k_all,
            k_match, k_add, k_min, k_max, k_umin, k_umax, k_rand, k_ror, k_rxor };
static const char *const kind_names[] = {
    "nothing", "__syncthreads", "__syncthreads_count", "__syncthreads_and", "__syncthreads_or", "__shfl_sync",
    "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync", "__ballot_sync", "__syncwarp", "__any_sync", "__all_sync",
    "__match_any_sync", "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync", "__reduce_min_sync",
    "__reduce_max_sync", "__reduce_and_sync", "__reduce_or_sync", "__reduce_xor_sync"};

struct Fiber {
    ucontext_t context;
    jmp_buf registers;
    bool started;
    State state;
    uint3 index;
    Kind kind;              // what it waits for, and the operands it brought
    int line;
    unsigned mask, width, barriers;
    int operand;
    uint64_t value, result;
};

struct Report {             // mirrored by ctypes in iclr26.lab.kernels
    int error;              // 0 none, 1 divergence, 2 memory fault, 3 watchdog, 4 shared overrun, 5 bad launch
    unsigned long long barriers, warp_ops, switches;
    unsigned long long fault_address;
    char message[480];
};

constexpr size_t stack_bytes = 256 << 10, page = 64 << 10, guard_bytes = 4096;
constexpr size_t max_dynamic = 227 << 10;   // sm_90: 227 KiB of shared memory a block

static std::vector<Fiber> fibers;
static std::vector<char *> stacks;
static Fiber *self;
static unsigned self_index;
static jmp_buf scheduler;
static sigjmp_buf escape;
static Report *report;
static void (*body)(void **);
static void **arguments;
static pthread_t launcher;
static uint64_t lcg;

static void fail(int error, const char *message) {
    report->error = error;
    snprintf(report->message, sizeof report->message, "%s", message);
}

__attribute__((noinline)) static void yield() {
    if (!_setjmp(self->registers)) _longjmp(scheduler, 1);
}

static void warp_release(unsigned warp);

static void fiber_main() {
    for (;;) {
        body(arguments);
        self->state = finished;
        warp_release(self_index / warpSize);    // whoever waits for this lane need not wait any longer
        yield();                                // the next block wakes it up again
    }
}

__attribute__((noinline)) static void resume(unsigned i) {
    self = &fibers[i], self_index = i, threadIdx = self->index;
    ++report->switches;
    if (_setjmp(scheduler)) return;
    if (self->started) _longjmp(self->registers, 1);
    self->started = true;
    getcontext(&self->context);
    self->context.uc_stack.ss_sp = stacks[i] + page;
    self->context.uc_stack.ss_size = stack_bytes;
    self->context.uc_link = nullptr;
    makecontext(&self->context, fiber_main, 0);
    setcontext(&self->context);
}

static bool make_stacks(unsigned count) {       // with a page below each that faults when a stack overflows
    while (stacks.size() < count) {
        char *p = (char *)mmap(nullptr, page + stack_bytes, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == (char *)MAP_FAILED) return false;
        mprotect(p, page, PROT_NONE);
        stacks.push_back(p);
    }
    return true;
}

// [barriers] ----------------------------------------------------------------------------------------------------------
// Waiting for the block is a state, not a loop: the scheduler opens the barrier when no fiber can run any more and all of
// them stand at the same one.
static uint64_t wait_block(Kind kind, uint64_t value, int line) {
    self->kind = kind, self->value = value, self->line = line, self->state = at_barrier;
    yield();
    return self->result;
}

static void describe(char *text, size_t size, const Fiber &f) {
    char who[64];
    snprintf(who, sizeof who, "thread (%u,%u,%u)", f.index.x, f.index.y, f.index.z);
    if (f.state == finished) snprintf(text, size, "%s has finished after %u barriers", who, f.barriers);
    else if (f.state == at_barrier)
        snprintf(text, size, "%s waits at barrier %u (%s, line %d)", who, f.barriers + 1, kind_names[f.kind], f.line);
    else snprintf(text, size, "%s waits in %s with mask 0x%08x (line %d)", who, kind_names[f.kind], f.mask, f.line);
}

static void diverged(const Fiber &a, const Fiber &b) {
    char first[160], second[160], text[480];
    describe(first, sizeof first, a), describe(second, sizeof second, b);
    snprintf(text, sizeof text, "block (%u,%u,%u): %s, but %s", blockIdx.x, blockIdx.y, blockIdx.z, first, second);
    fail(1, text);
}

static bool open_barrier() {                    // false: the fibers do not stand at one barrier
    const Fiber *waiting = nullptr;
    for (auto &f : fibers) if (f.state == at_barrier) { waiting = &f; break; }
    if (!waiting) for (auto &f : fibers) if (f.state == at_warp) { waiting = &f; break; }
    uint64_t count = 0;
    for (auto &f : fibers) {
        if (f.state != waiting->state || f.state == at_warp || f.line != waiting->line || f.kind != waiting->kind) {
            const Fiber *other = &f;
            if (other == waiting)               // a warp collective: name a lane that it waits for
                for (auto &g : fibers) if (g.state != at_warp || g.mask != f.mask || g.kind != f.kind) other = &g;
            return diverged(*other, *waiting), false;
        }
        count += f.value;
    }
    for (auto &f : fibers) {
        f.result = f.kind == k_and ? count == fibers.size() : f.kind == k_or ? count > 0 : count;
        f.state = ready, ++f.barriers;
    }
    ++report->barriers;
    return true;
}

// [warps] -------------------------------------------------------------------------------------------------------------
// The lane that arrives last computes the result of every lane, so one wait does. CUDA asks all lanes of the mask that
// have not exited to arrive at the same collective with the same mask.
static uint64_t lane_result(const Fiber *lane0, unsigned lanes, unsigned lane) {
    const Fiber &f = lane0[lane];
    auto in = [&](unsigned i) { return i < lanes && (f.mask >> i & 1) && lane0[i].state != finished; };
    unsigned first = lane & ~(f.width - 1), last = first + f.width - 1;
    int source = lane;
    switch (f.kind) {
    case k_shfl: source = first + (f.operand & (f.width - 1)); break;
    case k_up: source = int(lane) - f.operand < int(first) ? int(lane) : int(lane) - f.operand; break;
    case k_down: source = lane + f.operand > last ? lane : lane + f.operand; break;
    case k_xor: source = (lane ^ f.operand) > last ? lane : lane ^ f.operand; break;
    default: {
        uint64_t acc = 0; bool begun = false, all = true, any = false; uint64_t votes = 0, match = 0;
        for (unsigned i = 0; i < lanes; ++i) if (in(i)) {
            uint64_t v = lane0[i].value;
            unsigned a = unsigned(acc), b = unsigned(v);
            votes |= uint64_t(v != 0) << i, match |= uint64_t(v == f.value) << i, all &= v != 0, any |= v != 0;
            acc = !begun ? v : f.kind == k_add ? unsigned(a + b) : f.kind == k_umin ? std::min(a, b) :
                  f.kind == k_umax ? std::max(a, b) : f.kind == k_min ? unsigned(std::min(int(a), int(b))) :
                  f.kind == k_max ? unsigned(std::max(int(a), int(b))) : f.kind == k_rand ? a & b :
                  f.kind == k_ror ? a | b : f.kind == k_rxor ? a ^ b : 0;
            begun = true;
        }
        return f.kind == k_ballot ? votes : f.kind == k_any ? any : f.kind == k_all ? all :
               f.kind == k_match ? match : f.kind == k_syncwarp ? 0 : acc;
    } }
    return in(source) ? lane0[source].value : 0x7f7f7f7f7f7f7f7full;     // an absent lane: undefined, so poison
}

static void warp_release(unsigned warp) {
    Fiber *lane0 = &fibers[warp * warpSize];
    unsigned lanes = std::min<size_t>(warpSize, fibers.size() - warp * warpSize);
    for (unsigned lane = 0; lane < lanes; ++lane) {
        const Fiber &f = lane0[lane];
        if (f.state != at_warp) continue;
        bool complete = true;
        for (unsigned i = 0; i < lanes && complete; ++i)
            if ((f.mask >> i & 1) && lane0[i].state != finished)
                complete = lane0[i].state == at_warp && lane0[i].kind == f.kind && lane0[i].mask == f.mask;
        if (!complete) continue;
        uint64_t results[warpSize];
        const unsigned mask = f.mask;
        for (unsigned i = 0; i < lanes; ++i)
            if ((mask >> i & 1) && lane0[i].state == at_warp) results[i] = lane_result(lane0, lanes, i);
        for (unsigned i = 0; i < lanes; ++i)
            if ((mask >> i & 1) && lane0[i].state == at_warp) lane0[i].result = results[i], lane0[i].state = ready;
        ++report->warp_ops;
    }
}

static uint64_t wait_warp(Kind kind, unsigned mask, uint64_t value, int operand, int width, int line) {
    self->kind = kind, self->mask = mask, self->value = value, self->operand = operand;
    self->width = width, self->line = line, self->state = at_warp;
    if (!(mask >> self_index % warpSize & 1)) {
        char text[160];
        snprintf(text, sizeof text, "block (%u,%u,%u): thread (%u,%u,%u) calls %s at line %d but is not in its mask 0x%08x",
                 blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z, kind_names[kind], line, mask);
        fail(1, text);
        siglongjmp(escape, 1);
    }
    warp_release(self_index / warpSize);
    if (self->state == at_warp) yield();
    return self->result;
}

template <class T> uint64_t to_bits(T v) {
    static_assert(sizeof(T) <= 8, "a lane exchanges at most eight bytes");
    uint64_t b = 0; memcpy(&b, &v, sizeof v); return b;
}
template <class T> T from_bits(uint64_t b) { T v; memcpy(&v, &b, sizeof v); return v; }

// [memory] ------------------------------------------------------------------------------------------------------------
static thread_local char anchor = 1;            // makes the loader allocate this library's thread-local block

struct Span { char *data; size_t size; };
static int find_tls(dl_phdr_info *info, size_t, void *out) {
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto &segment = info->dlpi_phdr[i];
        char *data = (char *)info->dlpi_tls_data;
        if (segment.p_type == PT_TLS && data && &anchor >= data && &anchor < data + segment.p_memsz) {
            *(Span *)out = {data, segment.p_memsz};
            return 1;
        }
    }
    return 0;
}
static Span shared_memory() {
    Span span{nullptr, 0};
    anchor = 1;
    dl_iterate_phdr(find_tls, &span);
    return span;
}

static void on_signal(int signal, siginfo_t *info, void *) {
    if (!pthread_equal(pthread_self(), launcher)) {             // the timer may interrupt any thread of the process
        if (signal == SIGVTALRM) pthread_kill(launcher, signal);
        else abort();
        return;
    }
    char text[240];
    const bool watchdog = signal == SIGVTALRM;
    snprintf(text, sizeof text, "block (%u,%u,%u), thread (%u,%u,%u), after %u barriers: %s", blockIdx.x, blockIdx.y,
             blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z, self->barriers,
             watchdog ? "still running when the time was over (an endless loop?)" :
             signal == SIGFPE ? "integer division by zero" :
             signal == SIGILL ? "index outside of a shared or local array, shift by too many bits, or __trap()" :
             "reads or writes outside of its arrays");
    report->fault_address = watchdog ? 0 : (unsigned long long)info->si_addr;
    fail(watchdog ? 3 : 2, text);
    siglongjmp(escape, 1);
}

// [blocks] ------------------------------------------------------------------------------------------------------------
static unsigned next_random(unsigned n) {
    lcg = lcg * 6364136223846793005ull + 1442695040888963407ull;
    return unsigned((lcg >> 33) % n);
}

static bool run_block(bool shuffle) {
    std::vector<unsigned> order(fibers.size());
    std::iota(order.begin(), order.end(), 0u);
    for (auto &f : fibers) f.state = ready, f.barriers = 0;
    for (;;) {
        bool ran = false, all_done = true;
        if (shuffle) for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[next_random(i)]);
        for (unsigned i : order) if (fibers[i].state == ready) resume(i), ran = true;
        for (auto &f : fibers) all_done &= f.state == finished;
        if (all_done) return true;
        if (!ran && !open_barrier()) return false;
    }
}

struct Launch {             // mirrored by ctypes
    unsigned grid[3], block[3];
    unsigned long long dynamic;             // bytes of dynamic shared memory
    int poison, shuffle;
    unsigned long long seed;
    double seconds;                         // of CPU time, then the watchdog barks
};

// The companion lines define this symbol, and every name of an `extern __shared__` array, at one address.
extern thread_local unsigned char cuda_host_dynamic[] asm("cuda_host_dynamic");

static void run_grid(const Launch &launch) {
    const Span shared = shared_memory();
    const unsigned char *guard = cuda_host_dynamic + launch.dynamic;
    for (unsigned z = 0; z < gridDim.z; ++z) for (unsigned y = 0; y < gridDim.y; ++y) for (unsigned x = 0; x < gridDim.x; ++x) {
        blockIdx = {x, y, z};
        memset(shared.data, launch.poison, shared.size);
        if (!run_block(launch.shuffle)) return;
        for (size_t i = guard_bytes; i-- > 0;) if (guard[i] != (unsigned char)launch.poison) {
            char text[160];
            snprintf(text, sizeof text, "block (%u,%u,%u) wrote up to %zu bytes past its %llu bytes of dynamic shared memory",
                     x, y, z, i + 1, launch.dynamic);
            return fail(4, text);
        }
    }
}

static int run(const Launch &launch, void (*kernel)(void **), void **args, Report *out) {
    static char alternate[64 << 10];
    const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGVTALRM};
    struct sigaction before[5], action {};
    *out = Report{}, report = out, body = kernel, arguments = args, launcher = pthread_self();
    gridDim = dim3(launch.grid[0], launch.grid[1], launch.grid[2]);
    blockDim = dim3(launch.block[0], launch.block[1], launch.block[2]);
    lcg = launch.seed * 2 + 1;
    const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    if (!make_stacks(threads)) return fail(5, "no memory for the stacks of the fibers"), out->error;
    fibers.assign(threads, Fiber{});
    for (unsigned i = 0; i < threads; ++i)
        fibers[i].index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
    self = &fibers[0], self_index = 0;

    stack_t stack{}, old_stack;
    stack.ss_sp = alternate, stack.ss_size = sizeof alternate;
    sigaltstack(&stack, &old_stack);
    action.sa_sigaction = on_signal, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 5; ++i) sigaction(signals[i], &action, &before[i]);
    itimerval timer{}, old_timer;
    timer.it_value.tv_sec = long(launch.seconds), timer.it_value.tv_usec = long(launch.seconds * 1e6) % 1000000;
    setitimer(ITIMER_VIRTUAL, &timer, &old_timer);
    if (!sigsetjmp(escape, 1)) run_grid(launch);
    setitimer(ITIMER_VIRTUAL, &old_timer, nullptr);
    for (int i = 0; i < 5; ++i) sigaction(signals[i], &before[i], nullptr);
    sigaltstack(&old_stack, nullptr);
    return out->error;
}

}  // namespace cuda_host

// An array argument lives alone in the middle of two gibibytes of forbidden addresses, pushed against the upper half.
// Forbidden pages cost address space, not memory.
constexpr size_t cuda_host_reach = size_t(1) << 30;
extern "C" char *cuda_host_map(unsigned long long bytes) {
    char *p = (char *)mmap(nullptr, bytes + 2 * cuda_host_reach, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == (char *)MAP_FAILED) return nullptr;
    p += cuda_host_reach;
    return mprotect(p, bytes, PROT_READ | PROT_WRITE) ? nullptr : p;
}
extern "C" void cuda_host_unmap(char *p, unsigned long long bytes) { munmap(p - cuda_host_reach, bytes + 2 * cuda_host_reach); }

// [intrinsics] --------------------------------------------------------------------------------------------------------
#define CUDA_HOST_LINE int line = __builtin_LINE()
template <class T> using cuda_host_same = typename std::common_type<T>::type;      // an operand that deduces nothing

inline void __syncthreads(CUDA_HOST_LINE) { cuda_host::wait_block(cuda_host::k_sync, 0, line); }
inline int __syncthreads_count(int p, CUDA_HOST_LINE) { return cuda_host::wait_block(cuda_host::k_count, p != 0, line); }
inline int __syncthreads_and(int p, CUDA_HOST_LINE) { return cuda_host::wait_block(cuda_host::k_and, p != 0, line); }
inline int __syncthreads_or(int p, CUDA_HOST_LINE) { return cuda_host::wait_block(cuda_host::k_or, p != 0, line); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

#define CUDA_HOST_SHUFFLE(name, kind, T2, operand)                                                                     \
    template <class T> T name(unsigned mask, T v, T2 operand, int width = 32, CUDA_HOST_LINE) {                        \
        return cuda_host::from_bits<T>(                                                                                \
            cuda_host::wait_warp(cuda_host::kind, mask, cuda_host::to_bits(v), int(operand), width, line));            \
    }
CUDA_HOST_SHUFFLE(__shfl_sync, k_shfl, int, source)
CUDA_HOST_SHUFFLE(__shfl_up_sync, k_up, unsigned, delta)
CUDA_HOST_SHUFFLE(__shfl_down_sync, k_down, unsigned, delta)
CUDA_HOST_SHUFFLE(__shfl_xor_sync, k_xor, int, lanes)

#define CUDA_HOST_VOTE(R, name, kind, V, value)                                                                        \
    inline R name(unsigned mask, V v, CUDA_HOST_LINE) {                                                                \
        return R(cuda_host::wait_warp(cuda_host::kind, mask, value, 0, 32, line));                                     \
    }
CUDA_HOST_VOTE(unsigned, __ballot_sync, k_ballot, int, v != 0)
CUDA_HOST_VOTE(int, __any_sync, k_any, int, v != 0)
CUDA_HOST_VOTE(int, __all_sync, k_all, int, v != 0)
CUDA_HOST_VOTE(unsigned, __reduce_add_sync, k_add, unsigned, v)
CUDA_HOST_VOTE(int, __reduce_add_sync, k_add, int, unsigned(v))
CUDA_HOST_VOTE(unsigned, __reduce_min_sync, k_umin, unsigned, v)
CUDA_HOST_VOTE(int, __reduce_min_sync, k_min, int, unsigned(v))
CUDA_HOST_VOTE(unsigned, __reduce_max_sync, k_umax, unsigned, v)
CUDA_HOST_VOTE(int, __reduce_max_sync, k_max, int, unsigned(v))
CUDA_HOST_VOTE(unsigned, __reduce_and_sync, k_rand, unsigned, v)
CUDA_HOST_VOTE(unsigned, __reduce_or_sync, k_ror, unsigned, v)
CUDA_HOST_VOTE(unsigned, __reduce_xor_sync, k_rxor, unsigned, v)
template <class T> unsigned __match_any_sync(unsigned mask, T v, CUDA_HOST_LINE) {
    return unsigned(cuda_host::wait_warp(cuda_host::k_match, mask, cuda_host::to_bits(v), 0, 32, line));
}
inline void __syncwarp(unsigned mask = 0xffffffffu, CUDA_HOST_LINE) {
    cuda_host::wait_warp(cuda_host::k_syncwarp, mask, 0, 0, 32, line);
}
inline unsigned __activemask() {
    unsigned mask = 0, first = cuda_host::self_index / 32 * 32;
    for (unsigned i = first; i < std::min<size_t>(first + 32, cuda_host::fibers.size()); ++i)
        mask |= unsigned(cuda_host::fibers[i].state != cuda_host::finished) << i % 32;
    return mask;
}

// Fibers switch only where they wait, so a plain read and write is atomic. Each returns the old value.
#define CUDA_HOST_ATOMIC(name, expression)                                                                             \
    template <class T> T name(T *at, cuda_host_same<T> v) { T old = *at; *at = T(expression); return old; }
CUDA_HOST_ATOMIC(atomicAdd, old + v)
CUDA_HOST_ATOMIC(atomicSub, old - v)
CUDA_HOST_ATOMIC(atomicExch, v)
CUDA_HOST_ATOMIC(atomicMin, v < old ? v : old)
CUDA_HOST_ATOMIC(atomicMax, old < v ? v : old)
CUDA_HOST_ATOMIC(atomicAnd, old & v)
CUDA_HOST_ATOMIC(atomicOr, old | v)
CUDA_HOST_ATOMIC(atomicXor, old ^ v)
CUDA_HOST_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
CUDA_HOST_ATOMIC(atomicDec, old == 0 || old > v ? v : old - 1)
template <class T> T atomicCAS(T *at, cuda_host_same<T> expected, cuda_host_same<T> v) {
    T old = *at; if (old == expected) *at = v; return old;
}

template <class T> T __ldg(const T *p) { return *p; }
template <class T> T __ldcg(const T *p) { return *p; }
template <class T> T __ldcs(const T *p) { return *p; }
template <class T> void __stcg(T *p, cuda_host_same<T> v) { *p = v; }
template <class T> void __stcs(T *p, cuda_host_same<T> v) { *p = v; }
template <class T> void __stwt(T *p, cuda_host_same<T> v) { *p = v; }

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll(v) : 64; }
inline unsigned __brev(unsigned v) {
    unsigned r = 0; for (int i = 0; i < 32; ++i) r |= (v >> i & 1) << (31 - i); return r;
}
inline unsigned long long __brevll(unsigned long long v) {
    return (unsigned long long)__brev(unsigned(v)) << 32 | __brev(unsigned(v >> 32));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned s = selector >> 4 * i & 15, byte = unsigned(bytes >> 8 * (s & 7)) & 255;
        r |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return r;
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n) {
    return unsigned(((unsigned long long)hi << 32 | lo) << (n & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) {
    return unsigned(((unsigned long long)hi << 32 | lo) >> (n & 31));
}
inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) c += int((signed char)(a >> 8 * i)) * int((signed char)(b >> 8 * i));
    return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 4; ++i) c += (a >> 8 * i & 255) * (b >> 8 * i & 255);
    return c;
}
inline void __nanosleep(unsigned) {}
inline long long clock64() { return cuda_host::report->switches; }
[[noreturn]] inline void __trap() { __builtin_trap(); }

// [numbers] -----------------------------------------------------------------------------------------------------------
#define CUDA_HOST_MINMAX(T)                                                                                            \
    inline T min(T a, T b) { return b < a ? b : a; }                                                                   \
    inline T max(T a, T b) { return a < b ? b : a; }
CUDA_HOST_MINMAX(int) CUDA_HOST_MINMAX(unsigned) CUDA_HOST_MINMAX(long) CUDA_HOST_MINMAX(unsigned long)
CUDA_HOST_MINMAX(long long) CUDA_HOST_MINMAX(unsigned long long)
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline unsigned min(int a, unsigned b) { return min(unsigned(a), b); }
inline unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }
inline unsigned max(int a, unsigned b) { return max(unsigned(a), b); }
inline unsigned max(unsigned a, int b) { return max(a, unsigned(b)); }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }
inline float sinpif(float x) { return float(sin(M_PI * x)); }
inline float cospif(float x) { return float(cos(M_PI * x)); }
inline void sincospif(float x, float *s, float *c) { *s = sinpif(x), *c = cospif(x); }
inline float normcdff(float x) { return float(0.5 * erfc(-x * M_SQRT1_2)); }
#define CUDA_HOST_FAST(name, call) inline float name(float x) { return call; }
CUDA_HOST_FAST(__expf, expf(x)) CUDA_HOST_FAST(__logf, logf(x)) CUDA_HOST_FAST(__log2f, log2f(x))
CUDA_HOST_FAST(__log10f, log10f(x)) CUDA_HOST_FAST(__sinf, sinf(x)) CUDA_HOST_FAST(__cosf, cosf(x))
CUDA_HOST_FAST(__tanf, tanf(x)) CUDA_HOST_FAST(__exp10f, float(pow(10.0, x))) CUDA_HOST_FAST(__frcp_rn, 1.0f / x)
CUDA_HOST_FAST(__fsqrt_rn, sqrtf(x)) CUDA_HOST_FAST(__frsqrt_rn, 1.0f / sqrtf(x)) CUDA_HOST_FAST(exp10f, float(pow(10.0, x)))
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }
inline void __sincosf(float x, float *s, float *c) { *s = sinf(x), *c = cosf(x); }

// Conversions saturate and turn NaN into 0, as the hardware's do.
template <class I, class F> I cuda_host_integer(F x) {
    if (x != x) return 0;
    if (x <= F(std::numeric_limits<I>::min())) return std::numeric_limits<I>::min();
    if (x >= F(std::numeric_limits<I>::max())) return std::numeric_limits<I>::max();
    return I(x);
}
#define CUDA_HOST_CONVERT(from, F, to, I)                                                                              \
    inline I __##from##2##to##_rn(F x) { return cuda_host_integer<I>(nearbyint(x)); }                                  \
    inline I __##from##2##to##_rz(F x) { return cuda_host_integer<I>(trunc(x)); }                                      \
    inline I __##from##2##to##_rd(F x) { return cuda_host_integer<I>(floor(x)); }                                      \
    inline I __##from##2##to##_ru(F x) { return cuda_host_integer<I>(ceil(x)); }
CUDA_HOST_CONVERT(float, float, int, int) CUDA_HOST_CONVERT(float, float, uint, unsigned)
CUDA_HOST_CONVERT(float, float, ll, long long) CUDA_HOST_CONVERT(float, float, ull, unsigned long long)
CUDA_HOST_CONVERT(double, double, int, int) CUDA_HOST_CONVERT(double, double, uint, unsigned)
CUDA_HOST_CONVERT(double, double, ll, long long)
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __double2float_rn(double x) { return float(x); }
inline int __float_as_int(float x) { return cuda_host::from_bits<int>(cuda_host::to_bits(x)); }
inline unsigned __float_as_uint(float x) { return cuda_host::from_bits<unsigned>(cuda_host::to_bits(x)); }
inline float __int_as_float(int x) { return cuda_host::from_bits<float>(cuda_host::to_bits(x)); }
inline float __uint_as_float(unsigned x) { return cuda_host::from_bits<float>(cuda_host::to_bits(x)); }
inline long long __double_as_longlong(double x) { return cuda_host::from_bits<long long>(cuda_host::to_bits(x)); }
inline double __longlong_as_double(long long x) { return cuda_host::from_bits<double>(cuda_host::to_bits(x)); }

// Sixteen-bit floats: stored in two bytes, computed in float, rounded to nearest even after every operation.
struct __half {
    _Float16 v;
    __half() = default;
    __half(float x) : v(_Float16(x)) {}
    __half(double x) : v(_Float16(x)) {}
    __half(int x) : v(_Float16(x)) {}
    operator float() const { return float(v); }
};
struct __nv_bfloat16 {
    unsigned short v;
    __nv_bfloat16() = default;
    __nv_bfloat16(float x) {
        unsigned b = __float_as_uint(x);
        v = (b & 0x7fffffffu) > 0x7f800000u ? 0x7fff : (unsigned short)((b + 0x7fff + (b >> 16 & 1)) >> 16);
    }
    __nv_bfloat16(double x) : __nv_bfloat16(float(x)) {}
    __nv_bfloat16(int x) : __nv_bfloat16(float(x)) {}
    operator float() const { return __uint_as_float(unsigned(v) << 16); }
};
using half = __half;
using nv_bfloat16 = __nv_bfloat16;
#define CUDA_HOST_SMALL_FLOAT(T)                                                                                       \
    inline T operator+(T a, T b) { return T(float(a) + float(b)); }                                                    \
    inline T operator-(T a, T b) { return T(float(a) - float(b)); }                                                    \
    inline T operator*(T a, T b) { return T(float(a) * float(b)); }                                                    \
    inline T operator/(T a, T b) { return T(float(a) / float(b)); }                                                    \
    inline T operator-(T a) { return T(-float(a)); }                                                                   \
    inline T &operator+=(T &a, T b) { return a = a + b; }                                                              \
    inline T &operator-=(T &a, T b) { return a = a - b; }                                                              \
    inline T &operator*=(T &a, T b) { return a = a * b; }                                                              \
    inline T __hadd(T a, T b) { return a + b; }                                                                        \
    inline T __hsub(T a, T b) { return a - b; }                                                                        \
    inline T __hmul(T a, T b) { return a * b; }                                                                        \
    inline T __hdiv(T a, T b) { return a / b; }                                                                        \
    inline T __hfma(T a, T b, T c) { return T(float(double(float(a)) * float(b) + float(c))); }                        \
    inline T __hneg(T a) { return -a; }                                                                                \
    inline T __habs(T a) { return T(fabsf(float(a))); }                                                                \
    inline T __hmax(T a, T b) { return T(fmaxf(float(a), float(b))); }                                                 \
    inline T __hmin(T a, T b) { return T(fminf(float(a), float(b))); }                                                 \
    inline bool __hlt(T a, T b) { return float(a) < float(b); }                                                        \
    inline bool __hgt(T a, T b) { return float(a) > float(b); }                                                        \
    inline bool __hisnan(T a) { return float(a) != float(a); }
CUDA_HOST_SMALL_FLOAT(__half)
CUDA_HOST_SMALL_FLOAT(__nv_bfloat16)
inline __half __float2half(float x) { return x; }
inline __half __float2half_rn(float x) { return x; }
inline float __half2float(__half x) { return x; }
inline unsigned short __half_as_ushort(__half x) { return cuda_host::from_bits<unsigned short>(cuda_host::to_bits(x)); }
inline __half __ushort_as_half(unsigned short x) { return cuda_host::from_bits<__half>(x); }
inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
struct alignas(4) __half2 { __half x, y; };
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
using half2 = __half2;
using nv_bfloat162 = __nv_bfloat162;
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline __half2 __float2half2_rn(float x) { return {__half(x), __half(x)}; }
inline float2 __half22float2(__half2 p) { return {float(p.x), float(p.y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 p) { return {float(p.x), float(p.y)}; }
inline __half2 __hadd2(__half2 a, __half2 b) { return {a.x + b.x, a.y + b.y}; }
inline __half2 __hmul2(__half2 a, __half2 b) { return {a.x * b.x, a.y * b.y}; }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
inline __half __low2half(__half2 p) { return p.x; }
inline __half __high2half(__half2 p) { return p.y; }
inline float __low2float(__half2 p) { return p.x; }
inline float __high2float(__half2 p) { return p.y; }

// [entry] -------------------------------------------------------------------------------------------------------------
// The C side of a launch: the kernel's parameter types as text, so that Python can check and convert what it was given
// ("*cf4" pointer to const float, "*u2" pointer to uint16, "i4" int, "x16" something of 16 bytes), and a function that
// takes the arguments as pointers.
namespace cuda_host {

template <class T> struct Name {
    static void write(char *&out) {
        using U = std::remove_cv_t<T>;
        const char kind = std::is_same_v<U, bool> ? 'b' : std::is_same_v<U, __half> ? 'f' : std::is_same_v<U, __nv_bfloat16> ? 'e' :
                          std::is_floating_point_v<U> ? 'f' : std::is_enum_v<U> ? 'i' : !std::is_integral_v<U> ? 'x' :
                          std::is_signed_v<U> ? 'i' : 'u';
        out += sprintf(out, "%c%zu", kind, sizeof(U));
    }
};
template <> struct Name<void> { static void write(char *&out) { out += sprintf(out, "x1"); } };
template <> struct Name<const void> : Name<void> {};
template <class T> struct Name<T *> {
    static void write(char *&out) {
        out += sprintf(out, std::is_const_v<T> ? "*c" : "*");
        Name<T>::write(out);
    }
};

template <class... A> const char *types(void (*)(A...)) {
    static char text[16 * (sizeof...(A) + 1)];
    char *out = text;
    ((Name<std::remove_cv_t<A>>::write(out), *out++ = ' '), ...);
    *out = 0;
    return text;
}
template <class... A, size_t... I> void unpack(void (*kernel)(A...), void **p, std::index_sequence<I...>) {
    kernel(*(std::remove_reference_t<A> *)p[I]...);
}
template <class... A> void call(void (*kernel)(A...), void **p) { unpack(kernel, p, std::index_sequence_for<A...>{}); }

}  // namespace cuda_host

#define CUDA_HOST_ENTRY(...)                                                                                           \
    static void cuda_host_body(void **p) { cuda_host::call(__VA_ARGS__, p); }                                          \
    extern "C" const char *cuda_host_types() { return cuda_host::types(__VA_ARGS__); }                                 \
    extern "C" int cuda_host_launch(const cuda_host::Launch *launch, void **p, cuda_host::Report *report) {            \
        return cuda_host::run(*launch, cuda_host_body, p, report);                                                     \
    }
