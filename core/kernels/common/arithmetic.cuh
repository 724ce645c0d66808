// The arithmetic of src/metric.rs, bit for bit: the terms summed for a pair of rows, the distance of
// a sum, and the bound on sums that lets a scan skip distances.
//
// Compile-time parameters, all given as -D: ELEMENT (an Element), METRIC (a Metric), DIM (elements in
// a row, or 0 when known only at run time; rows are then padded with zeros to a multiple of 32 bytes,
// which changes no sum except -0). Every rounding is spelled out as an intrinsic and -fmad is off, so
// the compiler cannot fuse or reorder.

typedef unsigned int u32;
typedef unsigned long long u64;

enum Element { F32, F64, BITS };
enum Metric { L2, SQEUCLIDEAN, COSINE, INNER_PRODUCT, L1, PEARSON, HAMMING, JACCARD };
enum Sum { SQUARES, ABSOLUTE, PRODUCTS, DIFFERENT_BITS, SHARED_BITS };

constexpr __device__ Sum sum_of(Metric metric) {
    return metric == L2 || metric == SQEUCLIDEAN ? SQUARES
         : metric == L1                          ? ABSOLUTE
         : metric == HAMMING                     ? DIFFERENT_BITS
         : metric == JACCARD                     ? SHARED_BITS
                                                 : PRODUCTS;
}
constexpr Sum SUM = sum_of(METRIC);

// Scalar: an element of a row. Total: a sum over elements. Real: a distance. Threshold: an upper bound on totals.
template <Element> struct Types;
template <> struct Types<F32> { typedef float Scalar, Total, Real, Threshold; };
template <> struct Types<F64> { typedef double Scalar, Total, Real, Threshold; };
template <> struct Types<BITS> { typedef u32 Scalar, Total; typedef float Real, Threshold; };
typedef Types<ELEMENT>::Scalar Scalar;
typedef Types<ELEMENT>::Total Total;
typedef Types<ELEMENT>::Real Real;
typedef Types<ELEMENT>::Threshold Threshold;

__device__ __forceinline__ float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ double fused(double a, double b, double c) { return __fma_rn(a, b, c); }
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double multiply(double a, double b) { return __dmul_rn(a, b); }
// a * a + b: f32 rounds once, f64 the square and the sum.
__device__ __forceinline__ float square_plus(float a, float b) { return fused(a, a, b); }
__device__ __forceinline__ double square_plus(double a, double b) { return add(multiply(a, a), b); }
__device__ __forceinline__ float root(float a) { return __fsqrt_rn(a); }
__device__ __forceinline__ double root(double a) { return __dsqrt_rn(a); }
__device__ __forceinline__ float magnitude(float a) { return fabsf(a); }
__device__ __forceinline__ double magnitude(double a) { return fabs(a); }

template <typename T> struct Limits;
template <> struct Limits<float> {
    static __device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
    static __device__ __forceinline__ float epsilon() { return 1.1920929e-7f; }
    static __device__ __forceinline__ float smallest() { return 1.17549435e-38f; }
};
template <> struct Limits<double> {
    static __device__ __forceinline__ double infinity() {
        return __longlong_as_double(0x7ff0000000000000ll);
    }
    static __device__ __forceinline__ double epsilon() { return 2.2204460492503131e-16; }
    static __device__ __forceinline__ double smallest() { return 2.2250738585072014e-308; }
};

// One more element of a pair. Query elements arrive negated under PRODUCTS: fma(-q, x, s).
template <Sum> struct Step;
template <> struct Step<SQUARES> {
    template <typename T> static __device__ __forceinline__ T of(T q, T x, T s) {
        const T difference = add(q, -x);
        return square_plus(difference, s);
    }
};
template <> struct Step<ABSOLUTE> {
    template <typename T> static __device__ __forceinline__ T of(T q, T x, T s) {
        return add(s, magnitude(add(q, -x)));
    }
};
template <> struct Step<PRODUCTS> {
    template <typename T> static __device__ __forceinline__ T of(T q, T x, T s) {
        return fused(q, x, s);
    }
};
template <> struct Step<DIFFERENT_BITS> {
    static __device__ __forceinline__ u32 of(u32 q, u32 x, u32 s) { return s + __popc(q ^ x); }
};
template <> struct Step<SHARED_BITS> {
    static __device__ __forceinline__ u32 of(u32 q, u32 x, u32 s) { return s + __popc(q & x); }
};

// Distances between rows of numbers. Adding 0 turns -0 into 0.
template <Metric> struct Finish {
    template <typename T> static __device__ __forceinline__ T distance(T total) {
        return add(total, T(0));
    }
    template <typename T> static __device__ __forceinline__ T threshold(T distance) { return distance; }
};
template <> struct Finish<L2> {
    template <typename T> static __device__ __forceinline__ T distance(T total) { return root(total); }
    template <typename T> static __device__ __forceinline__ T threshold(T distance) {
        const T widened = multiply(multiply(distance, distance), add(T(1), 4 * Limits<T>::epsilon()));
        return add(widened, Limits<T>::smallest());
    }
};
// Cosine and Pearson: 1 + s, clamped, so that at distance 2 the sum is no longer bounded.
struct FinishDirection {
    template <typename T> static __device__ __forceinline__ T distance(T total) {
        const T raw = add(T(1), total);
        const T low = raw > T(0) ? raw : T(0);
        return low < T(2) ? low : T(2);
    }
    template <typename T> static __device__ __forceinline__ T threshold(T distance) {
        const T bound = add(add(distance, T(-1)), 4 * Limits<T>::epsilon());
        return distance < T(2) ? bound : Limits<T>::infinity();
    }
};
template <> struct Finish<COSINE> : FinishDirection {};
template <> struct Finish<PEARSON> : FinishDirection {};

// The number of set bits in each row of a pair; only Jaccard's distance reads it.
struct Bits {
    u32 query, row;
};

__device__ __forceinline__ Real distance_of(Total total, Bits bits) {
    if constexpr (SUM == DIFFERENT_BITS) {
        return __uint2float_rn(total);
    } else if constexpr (SUM == SHARED_BITS) {
        const u32 either = bits.query + bits.row - total;
        return either == 0 ? 0.0f
                           : __fdiv_rn(__uint2float_rn(either - total), __uint2float_rn(either));
    } else {
        return Finish<METRIC>::distance(total);
    }
}

// Thresholds of a list that accepts every row, and of padding, which accepts none. Distances of bits are
// finite, and a finite threshold keeps 0 * threshold defined.
__device__ __forceinline__ Threshold threshold_of_all() {
    return ELEMENT == BITS ? Threshold(1.0e30f) : Limits<Threshold>::infinity();
}
__device__ __forceinline__ Threshold threshold_of_none() {
    return ELEMENT == BITS ? Threshold(-1) : -Limits<Threshold>::infinity();
}

// An upper bound on the totals of pairs up to this distance; it may exceed the least bound by a few units in
// the last place.
__device__ __forceinline__ Threshold threshold_of(Real distance) {
    if constexpr (ELEMENT == BITS) {
        return add(multiply(distance, Real(1.000001)), Limits<Real>::smallest());
    } else {
        return Finish<METRIC>::threshold(distance);
    }
}

// Whether a pair may be within the threshold; true for every pair that is.
__device__ __forceinline__ bool within(Total total, Bits bits, Threshold threshold) {
    if constexpr (SUM == SHARED_BITS) {
        const u32 either = bits.query + bits.row - total;
        return __uint2float_rn(either - total) <= multiply(threshold, Threshold(__uint2float_rn(either)));
    } else if constexpr (SUM == DIFFERENT_BITS) {
        return __uint2float_rn(total) <= threshold;
    } else {
        return total <= threshold;
    }
}

// The smaller total. Sums of squares and magnitudes are never negative, so their bits compare like
// integers, and sm_90 has a minimum of three integers in one instruction.
__device__ __forceinline__ u32 least(u32 a, u32 b) { return min(a, b); }
__device__ __forceinline__ float least(float a, float b) {
    if constexpr (SUM == PRODUCTS) {
        return fminf(a, b);
    } else {
        return __int_as_float(min(__float_as_int(a), __float_as_int(b)));
    }
}
__device__ __forceinline__ double least(double a, double b) { return b < a ? b : a; }
