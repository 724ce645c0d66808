//! Vectors of f32 or f64 behind one name, so that each kernel is written once.

use pulp::Simd;

use super::ordered_sums::OrderedSums;

/// Element types of which a [`Simd`] register holds several.
pub(in crate::device::cpu) trait SimdReal: OrderedSums {
    /// A register.
    type Register<S: Simd>: Copy;

    /// 1, 2, 4 and so on.
    const POWERS: &'static [Self; 16];

    /// A whole number from 0 to 2²³ - 1, without a branch.
    fn whole(self) -> u32;

    /// The whole registers of a slice.
    fn vectors<S: Simd>(slice: &[Self]) -> &[Self::Register<S>];
    fn vectors_mut<S: Simd>(slice: &mut [Self]) -> &mut [Self::Register<S>];
    fn splat<S: Simd>(simd: S, x: Self) -> Self::Register<S>;
    fn plus<S: Simd>(simd: S, a: Self::Register<S>, b: Self::Register<S>) -> Self::Register<S>;
    fn minus<S: Simd>(simd: S, a: Self::Register<S>, b: Self::Register<S>) -> Self::Register<S>;
    fn times<S: Simd>(simd: S, a: Self::Register<S>, b: Self::Register<S>) -> Self::Register<S>;
    /// The sum of all lanes, in some order.
    fn total<S: Simd>(simd: S, a: Self::Register<S>) -> Self;
    /// The least of all lanes.
    fn least<S: Simd>(simd: S, a: Self::Register<S>) -> Self;
    fn magnitude<S: Simd>(simd: S, a: Self::Register<S>) -> Self::Register<S>;
    fn lesser<S: Simd>(simd: S, a: Self::Register<S>, b: Self::Register<S>) -> Self::Register<S>;
    /// `a · b + c`, rounded once.
    fn times_plus<S: Simd>(
        simd: S,
        a: Self::Register<S>,
        b: Self::Register<S>,
        c: Self::Register<S>,
    ) -> Self::Register<S>;
    /// `a · a + b`: f32 rounds once, f64 the square and the sum.
    fn squared_plus<S: Simd>(
        simd: S,
        a: Self::Register<S>,
        b: Self::Register<S>,
    ) -> Self::Register<S>;
    /// `x` in the lanes where `a < b`, and `y` elsewhere.
    fn where_less<S: Simd>(
        simd: S,
        a: Self::Register<S>,
        b: Self::Register<S>,
        x: Self::Register<S>,
        y: Self::Register<S>,
    ) -> Self::Register<S>;
    /// Whether any lane of `a` is at most the same lane of `b`.
    fn any_at_most<S: Simd>(simd: S, a: Self::Register<S>, b: Self::Register<S>) -> bool;
}

macro_rules! lanes {
    ($type:ident, $register:ident, $as_simd:ident, $as_mut_simd:ident, $splat:ident, $add:ident,
     $sub:ident, $mul:ident, $total:ident, $least:ident, $abs:ident, $min:ident, $mul_add:ident,
     $less:ident, $select:ident, $to_bits:ident, $from_bits:ident, $at_most:ident,
     $first_true:ident, $lanes:ident, $first_whole:literal,
     |$simd:ident, $a:ident, $b:ident| $square_plus:expr) => {
        impl SimdReal for $type {
            type Register<S: Simd> = S::$register;

            const POWERS: &'static [Self; 16] = &{
                let mut powers = [1.0; 16];
                let mut i = 1;
                while i < 16 {
                    powers[i] = 2.0 * powers[i - 1];
                    i += 1;
                }
                powers
            };

            #[inline(always)]
            fn whole(self) -> u32 {
                // From here on, neighbours are one apart, so that the last bits are the number.
                (self + $first_whole).to_bits() as u32 & 0x7f_ffff
            }
            #[inline(always)]
            fn vectors<S: Simd>(slice: &[Self]) -> &[S::$register] {
                S::$as_simd(slice).0
            }
            #[inline(always)]
            fn vectors_mut<S: Simd>(slice: &mut [Self]) -> &mut [S::$register] {
                S::$as_mut_simd(slice).0
            }
            #[inline(always)]
            fn splat<S: Simd>(simd: S, x: Self) -> S::$register {
                simd.$splat(x)
            }
            #[inline(always)]
            fn plus<S: Simd>(simd: S, a: S::$register, b: S::$register) -> S::$register {
                simd.$add(a, b)
            }
            #[inline(always)]
            fn minus<S: Simd>(simd: S, a: S::$register, b: S::$register) -> S::$register {
                simd.$sub(a, b)
            }
            #[inline(always)]
            fn times<S: Simd>(simd: S, a: S::$register, b: S::$register) -> S::$register {
                simd.$mul(a, b)
            }
            #[inline(always)]
            fn total<S: Simd>(simd: S, a: S::$register) -> Self {
                simd.$total(a)
            }
            #[inline(always)]
            fn least<S: Simd>(simd: S, a: S::$register) -> Self {
                simd.$least(a)
            }
            #[inline(always)]
            fn magnitude<S: Simd>(simd: S, a: S::$register) -> S::$register {
                simd.$abs(a)
            }
            #[inline(always)]
            fn lesser<S: Simd>(simd: S, a: S::$register, b: S::$register) -> S::$register {
                simd.$min(a, b)
            }
            #[inline(always)]
            fn times_plus<S: Simd>(
                simd: S,
                a: S::$register,
                b: S::$register,
                c: S::$register,
            ) -> S::$register {
                simd.$mul_add(a, b, c)
            }
            #[inline(always)]
            fn squared_plus<S: Simd>($simd: S, $a: S::$register, $b: S::$register) -> S::$register {
                $square_plus
            }
            #[inline(always)]
            fn where_less<S: Simd>(
                simd: S,
                a: S::$register,
                b: S::$register,
                x: S::$register,
                y: S::$register,
            ) -> S::$register {
                // `select_f32s` is not always inlined.
                let bits = simd.$select(simd.$less(a, b), simd.$to_bits(x), simd.$to_bits(y));
                simd.$from_bits(bits)
            }
            #[inline(always)]
            fn any_at_most<S: Simd>(simd: S, a: S::$register, b: S::$register) -> bool {
                simd.$first_true(simd.$at_most(a, b)) < S::$lanes
            }
        }
    };
}
lanes!(
    f32,
    f32s,
    as_simd_f32s,
    as_mut_simd_f32s,
    splat_f32s,
    add_f32s,
    sub_f32s,
    mul_f32s,
    reduce_sum_f32s,
    reduce_min_f32s,
    abs_f32s,
    min_f32s,
    mul_add_f32s,
    less_than_f32s,
    select_u32s,
    transmute_u32s_f32s,
    transmute_f32s_u32s,
    less_than_or_equal_f32s,
    first_true_m32s,
    F32_LANES,
    8_388_608.0,
    |simd, a, b| simd.mul_add_f32s(a, a, b)
);
lanes!(
    f64,
    f64s,
    as_simd_f64s,
    as_mut_simd_f64s,
    splat_f64s,
    add_f64s,
    sub_f64s,
    mul_f64s,
    reduce_sum_f64s,
    reduce_min_f64s,
    abs_f64s,
    min_f64s,
    mul_add_f64s,
    less_than_f64s,
    select_u64s,
    transmute_u64s_f64s,
    transmute_f64s_u64s,
    less_than_or_equal_f64s,
    first_true_m64s,
    F64_LANES,
    4_503_599_627_370_496.0,
    |simd, a, b| simd.add_f64s(simd.mul_f64s(a, a), b)
);
