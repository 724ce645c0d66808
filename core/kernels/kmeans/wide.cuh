// Exact sums of terms, each an element times its row's weight, rounded to float64, or the weight itself.
//
// Wide sums hold the terms that are no multiple of a step or part: BINS of 32 bits each, in multiples of
// 2^-LEAST. They hold every number and, with the carry out of the last bin, every sum of 2^31 numbers.

#include "kmeans/rounds.cuh"

// Whether terms are float64, whose sums have parts of steps, or float32.
constexpr bool HAS_PARTS = ELEMENT == F64 || WEIGHTED;
template <bool> struct Numbers;
template <> struct Numbers<false> { typedef float Number; };
template <> struct Numbers<true> { typedef double Number; };
typedef Numbers<HAS_PARTS>::Number Number;
// The lowest bit of the smallest term is 2^-LEAST.
constexpr int LEAST = HAS_PARTS ? 1074 : 149;
constexpr u32 BINS = HAS_PARTS ? DOUBLE_BINS : SINGLE_BINS;
// Terms of a row.
constexpr u32 WIDTH = DIM + WEIGHTED;
// Whether rounding may change the mean of equal rows.
constexpr bool HAS_SINGLES = ELEMENT == F64 || METRIC == COSINE;

// A number: mantissa * 2^exponent.
struct Scaled {
    double mantissa;
    int exponent;
};

// The exponent of a power of two.
__device__ __forceinline__ int exponent_of(double power) { return (int)(__double_as_longlong(power) >> 52) - 1023; }
__device__ __forceinline__ double power_of_two(int exponent) {
    return __longlong_as_double((long long)(exponent + 1023) << 52);
}

// A magnitude: mantissa * 2^(position - LEAST).
struct Magnitude {
    u64 mantissa;
    u32 position;
};

__device__ __forceinline__ Magnitude magnitude_of(u64 fraction, u32 exponent, u64 hidden_bit) {
    return exponent > 0 ? Magnitude{fraction | hidden_bit, exponent - 1} : Magnitude{fraction, 0};
}
__device__ __forceinline__ Magnitude magnitude_of(float x) {
    const u32 bits = __float_as_uint(x);
    return magnitude_of(bits & 0x7fffff, bits >> 23 & 0xff, 0x800000);
}
__device__ __forceinline__ Magnitude magnitude_of(double x) {
    const u64 bits = (u64)__double_as_longlong(x);
    return magnitude_of(bits & 0xfffffffffffff, (u32)(bits >> 52) & 0x7ff, 0x10000000000000);
}

// The three 32-bit digits of a 64-bit number that is shifted by less than 32.
struct Digits {
    u64 digits[3];

    __device__ __forceinline__ Digits(u64 number, u32 shift) {
        const u64 low = number << shift;
        digits[0] = low & 0xffffffff, digits[1] = low >> 32, digits[2] = shift == 0 ? 0 : number >> (64 - shift);
    }
};

// Adds a number to the BINS of a sum, or subtracts it.
__device__ __noinline__ void add_to_bins(u64* bins, Number x, bool is_minus) {
    const Magnitude magnitude = magnitude_of(x);
    const Digits shifted(magnitude.mantissa, magnitude.position % 32);
    const bool is_negative = (x < 0) != is_minus;
#pragma unroll
    for (u32 i = 0; i < 3; i++) {
        if (shifted.digits[i] == 0) continue;
        atomicAdd(&bins[magnitude.position / 32 + i], is_negative ? 0 - shifted.digits[i] : shifted.digits[i]);
    }
}

// The highest 64 bits of a 128-bit number, from the highest set bit down, as a float64, rounded once: the
// last bit is sticky, it stands for all lower ones.
__device__ __forceinline__ Scaled round_number(u64 high, u64 low, bool is_more, int exponent) {
    if (high == 0 && !is_more) return {__ull2double_rn(low), exponent};
    const u32 zeros = __clzll(high);
    const u64 top = zeros == 0 ? high : high << zeros | low >> (64 - zeros);
    is_more |= (low << zeros) != 0;
    return {__ull2double_rn(top | (is_more ? 1 : 0)), exponent + 64 - (int)zeros};
}

// A total before carrying: digits of 32 bits, from 2^-LEAST on.
struct WideTotal {
    static constexpr u32 DIGITS = BINS + 2;
    long long digits[DIGITS];

    // Adds a number times 2^(position - LEAST).
    __device__ __forceinline__ void add(long long number, u32 position) {
        const Digits shifted(number < 0 ? 0 - (u64)number : (u64)number, position % 32);
        for (u32 i = 0; i < 3; i++) {
            if (position / 32 + i >= DIGITS) break;
            digits[position / 32 + i] += number < 0 ? -(long long)shifted.digits[i] : (long long)shifted.digits[i];
        }
    }

    // Carries, and leaves the magnitude; returns whether the number is negative.
    __device__ __forceinline__ bool carry() {
        long long carry = 0;
        for (u32 i = 0; i < DIGITS; i++) {
            const long long sum = digits[i] + carry;
            digits[i] = sum & 0xffffffff;
            carry = sum >> 32;
        }
        if (carry >= 0) return false;
        bool is_carried = true;
        for (u32 i = 0; i < DIGITS; i++) {
            digits[i] = (~digits[i] & 0xffffffff) + (is_carried ? 1 : 0);
            is_carried = digits[i] >> 32 != 0;
            digits[i] &= 0xffffffff;
        }
        return true;
    }
};

// The total of steps, parts and a wide sum, rounded once, as `Wide::rounded` in src/device/sums.rs.
__device__ __noinline__ Scaled wide_total(const Sums& sums, u64 place, int exponent) {
    WideTotal total;
    for (u32 i = 0; i < WideTotal::DIGITS; i++) total.digits[i] = i < BINS ? sums.wide[place * BINS + i] : 0;
    total.add(sums.sums[place], (u32)(exponent + LEAST));
    if (HAS_PARTS) total.add(sums.parts[place], (u32)(exponent - exponent_of(sums.limit) + LEAST));
    const bool is_negative = total.carry();
    u32 top = WideTotal::DIGITS;
    while (top > 0 && total.digits[top - 1] == 0) top--;
    if (top == 0) return {0, 0};
    // Four digits, the highest of which is not 0; `is_more` if any lower digit is not 0.
    const auto digit = [&](u32 i) { return top > i ? (u64)total.digits[top - 1 - i] : 0; };
    bool is_more = false;
    for (u32 i = 0; i + 4 < top; i++) is_more |= total.digits[i] != 0;
    const Scaled rounded = round_number(digit(0) << 32 | digit(1), digit(2) << 32 | digit(3), is_more,
                                        32 * ((int)top - 4) - LEAST);
    return {is_negative ? -rounded.mantissa : rounded.mantissa, rounded.exponent};
}

// The total of steps and parts, rounded once.
__device__ __forceinline__ Scaled total_of(const Sums& sums, u64 place, int exponent) {
    const long long whole = sums.sums[place];
    if constexpr (!HAS_PARTS) {
        return {__ll2double_rn(whole), exponent};
    } else {
        const long long parts = sums.parts[place];
        const u32 bits = (u32)exponent_of(sums.limit);
        u64 low = (u64)whole << bits, high = (u64)(whole >> (64 - bits));
        low += (u64)parts;
        high += (u64)(parts >> 63) + (low < (u64)parts ? 1 : 0);
        const bool is_negative = high >> 63 != 0;
        if (is_negative) low = 0 - low, high = ~high + (low == 0 ? 1 : 0);
        const Scaled rounded = round_number(high, low, false, exponent - (int)bits);
        return {is_negative ? -rounded.mantissa : rounded.mantissa, rounded.exponent};
    }
}

// A total over a weight, rounded once more, as `Scaled::over` in src/device/sums.rs.
__device__ __forceinline__ double over(Scaled total, Scaled weight) {
    double quotient = __ddiv_rn(total.mantissa, weight.mantissa);
    int exponent = total.exponent - weight.exponent;
    // Scales in steps whose results, except the last, lose no bits.
    while (exponent != 0 && quotient != 0) {
        const int step = exponent < -800 ? -800 : exponent > 800 ? 800 : exponent;
        quotient = multiply(quotient, power_of_two(step));
        exponent -= step;
    }
    return quotient;
}
