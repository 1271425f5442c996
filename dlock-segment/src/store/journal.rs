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
    /// Damaged units came back: they are written off, and not available again.
    #[serde(rename = "refunded_damaged")]
    RefundedDamaged,
    Restocked,
    #[serde(rename = "written_off")]
    WrittenOff,
    Settled,
    Resized,
    Rebalanced,
    /// Units left for another home of the sale.
    Sent,
    /// Units came from another home of the sale.
    Received,
    /// Units were sold from memory, reported too late, and not available any more.
    Owed,
}

impl Effect {
    pub(crate) const ALL: [(Effect, char); 16] = [
        (Effect::Taken, 't'),
        (Effect::Reserved, 'h'),
        (Effect::Confirmed, 'c'),
        (Effect::Cancelled, 'x'),
        (Effect::Expired, 'e'),
        (Effect::Extended, 'm'),
        (Effect::Refunded, 'r'),
        (Effect::RefundedDamaged, 'g'),
        (Effect::Restocked, 's'),
        (Effect::WrittenOff, 'w'),
        (Effect::Settled, 'q'),
        (Effect::Resized, 'z'),
        (Effect::Rebalanced, 'b'),
        (Effect::Sent, 'o'),
        (Effect::Received, 'i'),
        (Effect::Owed, 'd'),
    ];

    /// The name of the effect, as it is serialized.
    pub fn name(self) -> &'static str {
        match self {
            Effect::Taken => "taken",
            Effect::Reserved => "reserved",
            Effect::Confirmed => "confirmed",
            Effect::Cancelled => "cancelled",
            Effect::Expired => "expired",
            Effect::Extended => "extended",
            Effect::Refunded => "refunded",
            Effect::RefundedDamaged => "refunded_damaged",
            Effect::Restocked => "restocked",
            Effect::WrittenOff => "written_off",
            Effect::Settled => "settled",
            Effect::Resized => "resized",
            Effect::Rebalanced => "rebalanced",
            Effect::Sent => "sent",
            Effect::Received => "received",
            Effect::Owed => "owed",
        }
    }
}

/// An entry of the journal: [`Inventory::journal`](crate::Inventory::journal).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct JournalEntry {
    /// The home of the inventory that wrote it; 0 if there is only one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub home: u32,
    /// The number of the entry. It rises by one from 1, in each home.
    pub sequence: u64,
    /// The effect that happened.
    pub effect: Effect,
    /// The operation id, if there is one.
    pub operation: Option<String>,
    /// The buyer; of a refund, the operation that it refunds; of a move, the other home.
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

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
pub(crate) fn is_zero(number: &u32) -> bool {
    *number == 0
}
