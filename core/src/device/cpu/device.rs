//! The CPU as a device.

use super::simd::level::Level;

/// The CPU of this machine, with as many threads as rayon's current pool has.
#[derive(Debug, Clone, Copy)]
pub struct CpuDevice {
    pub(super) level: Level,
    /// Whether every search prefilters by 8- or 7-bit codes where it can, not only where an estimate says it pays.
    pub(super) force_prefilter: bool,
}

impl CpuDevice {
    /// The CPU.
    pub fn new() -> Self {
        Self { level: Level::detect(), force_prefilter: false }
    }

    /// One device for each instruction level of this processor, without and with a prefilter by 8- or 7-bit codes in
    /// every search, where the level has one. Each comes with the level's name and whether the prefilter is forced.
    pub fn test_variants() -> Vec<(&'static str, bool, Self)> {
        let levels = Level::all().into_iter();
        let variants = levels.flat_map(|level| [(level, false), (level, true)]);
        let variants = variants.filter(|(level, force_prefilter)| {
            !force_prefilter || level.prefilter_width().is_some()
        });
        let variants = variants.map(|(level, force_prefilter)| {
            (level.name(), force_prefilter, Self { level, force_prefilter })
        });
        variants.collect()
    }
}

impl Default for CpuDevice {
    fn default() -> Self {
        Self::new()
    }
}
