//! Rows cut into tiles, the work on tiles cut into parts, and the thresholds of tensor-core
//! products.

use super::kernels::{DbscanKernels, STAGED_THREADS, TILE};
use super::order::Order;
use super::structs::ProductsOnDevice;
use crate::device::contract::CertainSquares;
use crate::metric::power_of_two_near_inverse;

/// Tiles per part, which all warps visit at the same time in many dimensions, and the maximum
/// number of parts.
const TILES_OF_PART: usize = 256;
const MOST_PARTS: usize = 64;

/// The first tile of each group, then the number of tiles: groups have tiles of their own.
pub(super) fn first_tiles(ends: &[usize]) -> Vec<u32> {
    let starts = std::iter::once(0).chain(ends.iter().copied());
    let tiles = starts.zip(ends).map(|(start, end)| (end - start).div_ceil(TILE) as u32);
    let mut first = vec![0];
    for tiles in tiles {
        first.push(first[first.len() - 1] + tiles);
    }
    first
}

/// The number of parts into which the work of joining `tiles` tiles with all later ones is cut. A
/// few tiles are cut to give every warp items; in many dimensions, tiles are also cut so that one
/// part of them stays in the cache.
pub(super) fn parts(kernels: &DbscanKernels, tiles: usize) -> usize {
    let blocks = kernels.link_tiles.blocks;
    if kernels.spec.is_unrolled() {
        return if tiles < 8 * blocks { 4 } else { 1 };
    }
    let few = 2 * blocks * STAGED_THREADS / 32 / tiles;
    few.max(tiles.div_ceil(TILES_OF_PART)).clamp(1, MOST_PARTS)
}

/// The thresholds of products, in units of the widest dimension's spread; the buffers are set
/// elsewhere.
pub(super) fn products(order: &Order, squares: CertainSquares, slices: usize) -> ProductsOnDevice {
    let unit = power_of_two_near_inverse(order.spread);
    let surely = squares.inside.max(0.0).sqrt() * unit * (1.0 - 1e-6);
    let maybe = squares.outside.max(0.0).sqrt() * unit * (1.0 + 1e-6);
    // Rounding to the nearest f32 is covered by the factors, except for subnormal numbers and 0,
    // where no pair is certainly within eps.
    let is_normal = squares.inside >= 0.0 && surely >= f64::from(f32::MIN_POSITIVE);
    ProductsOnDevice {
        unit,
        surely: if is_normal { surely as f32 } else { -1.0 },
        maybe: (maybe as f32).max(f32::MIN_POSITIVE),
        count: slices as u32,
        ..ProductsOnDevice::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_less_than_a_normal_number_is_never_certain() {
        let of = |spread, inside, outside| {
            let order = Order {
                dims: Vec::new(),
                splitters: Vec::new(),
                bits: Vec::new(),
                centre: Vec::new(),
                spread,
            };
            let products = products(&order, CertainSquares { inside, outside }, 2);
            (products.surely, products.maybe)
        };
        let (surely, maybe) = of(4.0, 64.0, 64.0);
        assert!((1.9..2.0).contains(&surely) && (2.0..2.1).contains(&maybe));
        // eps in units is 100.6 times the least f32, which the nearest f32 exceeds; and less than any f32.
        let eps: f64 = 100.6 * 2f64.powi(-22);
        assert_eq!(of(2f64.powi(127), eps * eps, eps * eps), (-1.0, f32::MIN_POSITIVE));
        assert_eq!(of(2f64.powi(500), 1e-300, 1e-300), (-1.0, f32::MIN_POSITIVE));
        assert_eq!(of(1.0, -1e-9, 1e-9).0, -1.0);
    }

    #[test]
    fn groups_have_tiles_of_their_own() {
        assert_eq!(first_tiles(&[0, 1, 65, 65, 130]), [0, 0, 1, 2, 2, 4]);
        assert_eq!(first_tiles(&[64]), [0, 1]);
    }
}
