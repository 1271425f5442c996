//! Bugs on purpose: a checker that never fails proves nothing. The tests switch
//! on one of these in the embedded store and must find it.

/// One planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each is explained where it is planted")]
pub enum Plant {
    NoOperationId,
    IdCheckedAfterStock,
    DoubleRefund,
    ReadThenWrite,
    RememberedRefusal,
}

impl Plant {
    /// All of them.
    pub const ALL: [Plant; 5] = [
        Plant::NoOperationId,
        Plant::IdCheckedAfterStock,
        Plant::DoubleRefund,
        Plant::ReadThenWrite,
        Plant::RememberedRefusal,
    ];
}

/// The bug planted in a store. Outside the tests there is no way to set one, and
/// asking costs nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Planted {
    #[cfg(feature = "simulation")]
    bug: Option<Plant>,
}

impl Planted {
    /// A store with this bug.
    #[cfg(feature = "simulation")]
    pub fn with(bug: Option<Plant>) -> Self {
        Planted { bug }
    }

    #[cfg(feature = "simulation")]
    pub(crate) fn is(self, bug: Plant) -> bool {
        self.bug == Some(bug)
    }

    #[cfg(not(feature = "simulation"))]
    pub(crate) const fn is(self, _: Plant) -> bool {
        false
    }
}
