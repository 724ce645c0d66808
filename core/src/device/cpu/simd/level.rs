//! The instructions of this processor.

use pulp::WithSimd;

/// A set of instructions: a proof that this processor has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Level(pub(super) Instructions);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Instructions {
    Plain,
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// AVX2, FMA and POPCNT.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F and BW.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// The same and VNNI.
    #[cfg(target_arch = "x86_64")]
    Vnni,
}

/// A proof that this processor has AVX2, and whether it has AVX-512 F.
#[derive(Debug, Clone, Copy)]
pub(in crate::device::cpu) struct WideSimd {
    #[cfg(target_arch = "x86_64")]
    has_avx512: bool,
}

#[cfg(target_arch = "x86_64")]
impl WideSimd {
    /// Whether it has AVX-512 F.
    pub fn has_avx512(self) -> bool {
        self.has_avx512
    }
}

impl Level {
    /// Every one that this processor has, the most capable first.
    pub fn all() -> Vec<Self> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let has_avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("popcnt");
            let has_avx512 = has_avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw");
            let has_vnni = has_avx512 && is_x86_feature_detected!("avx512vnni");
            all.extend(has_vnni.then_some(Self(Instructions::Vnni)));
            all.extend(has_avx512.then_some(Self(Instructions::Avx512)));
            all.extend(has_avx2.then_some(Self(Instructions::Avx2)));
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            all.push(Self(Instructions::Neon));
        }
        all.push(Self(Instructions::Plain));
        all
    }

    /// The most capable of this processor; or the level named by the environment variable `NEIGHBORS_SIMD`, if the
    /// processor has it: `vnni`, `avx512`, `avx2`, `neon` or `plain`.
    pub fn detect() -> Self {
        let (all, requested) = (Self::all(), std::env::var("NEIGHBORS_SIMD").unwrap_or_default());
        all.iter().find(|level| level.name() == requested).copied().unwrap_or(all[0])
    }

    /// The instructions of portable code: no more than AVX2 if this is it, otherwise all that this processor has.
    pub(in crate::device::cpu) fn arch(self) -> pulp::Arch {
        #[cfg(target_arch = "x86_64")]
        if let (Instructions::Avx2, Some(simd)) = (self.0, pulp::x86::V3::try_new()) {
            return pulp::Arch::V3(simd);
        }
        pulp::Arch::new()
    }

    /// Runs portable code.
    pub(in crate::device::cpu) fn dispatch<W: WithSimd>(self, work: W) -> W::Output {
        self.arch().dispatch(work)
    }

    /// Whether it has AVX-512 F.
    pub(in crate::device::cpu) fn has_avx512(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.0 >= Instructions::Avx512;
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// AVX2 or AVX-512 F, if it has them.
    pub(in crate::device::cpu) fn wide(self) -> Option<WideSimd> {
        #[cfg(target_arch = "x86_64")]
        if self.0 >= Instructions::Avx2 {
            return Some(WideSimd { has_avx512: self.has_avx512() });
        }
        None
    }

    /// The name that `NEIGHBORS_SIMD` takes.
    pub fn name(self) -> &'static str {
        match self.0 {
            Instructions::Plain => "plain",
            #[cfg(target_arch = "aarch64")]
            Instructions::Neon => "neon",
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Instructions::Vnni => "vnni",
        }
    }
}
