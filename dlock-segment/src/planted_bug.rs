//! Bugs on purpose. A checker that never fails proves nothing, so the tests switch
//! on one of these in the embedded store and must find it.

/// One planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each is explained where it is planted")]
pub enum Bug {
    NoOperationId,
    IdCheckedAfterStock,
    DoubleRefund,
    ReadThenWrite,
    RememberedRefusal,
    /// A receipt of units that were received before adds them again.
    MoveTwice,
    /// A receipt counts the units as received and does not add them.
    MoveLost,
}

impl Bug {
    /// The ones that one home shows.
    pub const ALL: [Bug; 5] = [
        Bug::NoOperationId,
        Bug::IdCheckedAfterStock,
        Bug::DoubleRefund,
        Bug::ReadThenWrite,
        Bug::RememberedRefusal,
    ];

    /// The ones that only a sale with several homes shows.
    pub const OF_HOMES: [Bug; 2] = [Bug::MoveTwice, Bug::MoveLost];
}

/// The bug planted in an inventory. Without the feature `simulation` there is no way
/// to set one, and asking costs nothing.
pub type PlantedBug = dlock::machine::PlantedBug<Bug>;
