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
