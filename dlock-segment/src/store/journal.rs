//! The journal of an inventory: what happened to its units, in order.

use serde::{Deserialize, Serialize};

/// The effect that an entry of the journal describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
#[allow(missing_docs, reason = "each is named like what happened")]
pub enum Effect {
    Taken,
    Reserved,
    Confirmed,
    Cancelled,
    Expired,
    Extended,
    Refunded,
    Restocked,
    Settled,
    Resized,
    Rebalanced,
}

impl Effect {
    pub(crate) const ALL: [(Effect, char); 11] = [
        (Effect::Taken, 't'),
        (Effect::Reserved, 'h'),
        (Effect::Confirmed, 'c'),
        (Effect::Cancelled, 'x'),
        (Effect::Expired, 'e'),
        (Effect::Extended, 'm'),
        (Effect::Refunded, 'r'),
        (Effect::Restocked, 's'),
        (Effect::Settled, 'q'),
        (Effect::Resized, 'z'),
        (Effect::Rebalanced, 'b'),
    ];
}

/// An entry of the journal: [`Inventory::journal`](crate::Inventory::journal).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Entry {
    /// The number of the entry. It rises by one from 1.
    pub sequence: u64,
    /// The effect that happened.
    pub effect: Effect,
    /// The operation id, if there is one.
    pub operation: Option<String>,
    /// The buyer; of a refund, the operation that it refunds.
    pub whose: Option<String>,
    /// The number of units; of a resize, the number of segments.
    pub quantity: u64,
    /// The segments that the units are from, with the number of units of each.
    pub parts: Vec<(u32, u64)>,
    /// The epoch that the segment numbers belong to.
    pub epoch: u32,
    /// When it was written, in milliseconds of Unix time by the store's clock.
    pub at: u64,
}
