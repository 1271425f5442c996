//! The events and metrics of segmented locks and inventories, in the manner of
//! `dlock::observe`.
//!
//! | target | event | level | fields |
//! |---|---|---|---|
//! | `dlock::segment` | `dry` | debug | `key`, `segment` |
//! | `dlock::inventory` | `answered` | debug | `inventory`, `answer`, `available` |
//! | `dlock::inventory` | `failed` | debug | `inventory`, `error` |
//! | `dlock::inventory` | `unknown` | warn | `inventory`, `error` |
//! | `dlock::inventory` | `changed` | info | `inventory`, `change` |
//!
//! The feature `metrics` adds these counters:
//!
//! | counter | labels |
//! |---|---|
//! | `dlock_segment_dry_total` | `lock` |
//! | `dlock_inventory_answers_total` | `inventory`, `answer` |
//! | `dlock_inventory_units_total` | `inventory`, `effect` |
//! | `dlock_inventory_unknown_total` | `inventory` |
//! | `dlock_inventory_failed_total` | `inventory`, `kind` (as for a lock) |
//!
//! The answers `sold_out_cached` and `throttled` need no round trip, so their events
//! have no `available`. A request that is repeated under its id is counted again. Only
//! the template or the name of a key is shown, never its values.

use dlock::Key;

use crate::error::{Error, Result};
use crate::lock::Segment;
use crate::store::{Answer, Change, Snapshot, Status};

/// Reports that a segment of a lock was dry.
pub(crate) fn dry(key: &Key, name: Option<&'static str>, segment: &Segment) {
    tracing::debug!(
        target: "dlock::segment",
        key = name.unwrap_or(key.label()), segment = segment.index(), "dry"
    );
    #[cfg(feature = "metrics")]
    metrics::counter!("dlock_segment_dry_total", "lock" => name.unwrap_or(template(key)))
        .increment(1);
}

/// Reports the answer of the store, or the error. A request that only reads has no effect
/// to count.
pub(crate) fn answered(key: &Key, answered: &Result<(Snapshot, Answer)>, only_reads: bool) {
    match answered {
        Ok((snapshot, answer)) => {
            tracing::debug!(
                target: "dlock::inventory",
                inventory = key.label(), answer = word(answer), available = snapshot.available, "answered"
            );
        }
        Err(error @ Error::Unknown(_)) => {
            tracing::warn!(target: "dlock::inventory", inventory = key.label(), %error, "unknown");
        }
        Err(error) => {
            tracing::debug!(target: "dlock::inventory", inventory = key.label(), %error, "failed");
        }
    }
    #[cfg(feature = "metrics")]
    count(key, answered, only_reads);
    #[cfg(not(feature = "metrics"))]
    let _ = only_reads;
}

/// Reports an answer that was given without the store.
pub(crate) fn answered_locally(key: &Key, answer: &'static str) {
    tracing::debug!(target: "dlock::inventory", inventory = key.label(), answer, "answered");
    #[cfg(feature = "metrics")]
    count_answer(template(key), answer);
}

pub(crate) fn changed(key: &Key, change: &Change) {
    tracing::info!(target: "dlock::inventory", inventory = key.label(), ?change, "changed");
}

fn word(answer: &Answer) -> &'static str {
    match answer {
        Answer::Found(record) => match record.status {
            Status::Taken | Status::Confirmed if record.refunded > 0 => "already_refunded",
            Status::Taken => "taken",
            Status::Reserved => "reserved",
            Status::Confirmed => "confirmed",
            Status::Cancelled => "cancelled",
            Status::Expired => "expired",
            Status::Refund => "refunded",
            Status::Restock => "restocked",
            Status::Tombstone => "refused",
        },
        Answer::Absent => "absent",
        Answer::SoldOut { available: 0 } => "sold_out",
        Answer::SoldOut { .. } => "not_enough",
        Answer::LimitReached => "limit_reached",
        Answer::NotStarted => "not_started",
        Answer::Ended => "ended",
        Answer::Paused => "paused",
        Answer::Conflict => "conflict",
        Answer::BuyerMissing => "buyer_missing",
        Answer::TooMuch { .. } => "too_much",
        Answer::Overflow => "overflow",
        Answer::Again => "again",
        Answer::Unreadable => "unreadable",
    }
}

#[cfg(feature = "metrics")]
fn count_answer(inventory: &'static str, answer: &'static str) {
    metrics::counter!("dlock_inventory_answers_total", "inventory" => inventory, "answer" => answer).increment(1);
}

#[cfg(feature = "metrics")]
fn count(key: &Key, answered: &Result<(Snapshot, Answer)>, only_reads: bool) {
    use metrics::counter;

    let inventory = template(key);
    match answered {
        Ok((_, answer)) => {
            let word = word(answer);
            if let Answer::Found(record) = answer
                && !(only_reads || record.status != Status::Refund && record.refunded > 0)
            {
                counter!("dlock_inventory_units_total", "inventory" => inventory, "effect" => word)
                    .increment(record.quantity);
            }
            count_answer(inventory, word);
        }
        Err(Error::Unknown(_)) => {
            counter!("dlock_inventory_unknown_total", "inventory" => inventory).increment(1);
        }
        Err(Error::Store(error)) => {
            let kind = format!("{:?}", error.kind());
            counter!("dlock_inventory_failed_total", "inventory" => inventory, "kind" => kind)
                .increment(1);
        }
        Err(_) => {}
    }
}

/// The template or the name of a key. A plain string may be one of very many, so it is
/// not used as a label.
#[cfg(feature = "metrics")]
fn template(key: &Key) -> &'static str {
    match key.template() {
        "" => "unnamed",
        template => template,
    }
}
