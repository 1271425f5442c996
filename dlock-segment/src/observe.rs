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
//! have no `available`. A request that is repeated under its id is counted again. The
//! label `inventory` is the template or the name of the key, never its values; an
//! inventory that is made from a plain string is shown by that string.

use dlock::Key;
#[cfg(feature = "metrics")]
use metrics::SharedString;

use crate::error::{Error, Result};
use crate::lock::Segment;
use crate::store::{Answer, Change, Snapshot, Status};

/// Reports that a segment of a lock was dry.
pub(crate) fn dry(key: &Key, name: Option<&'static str>, segment: &Segment) {
    #[cfg(feature = "metrics")]
    describe_once();
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
    {
        describe_once();
        count(key, answered, only_reads);
    }
    #[cfg(not(feature = "metrics"))]
    let _ = only_reads;
}

/// Reports an answer that was given without the store.
pub(crate) fn answered_locally(key: &Key, answer: &'static str) {
    tracing::debug!(target: "dlock::inventory", inventory = key.label(), answer, "answered");
    #[cfg(feature = "metrics")]
    count_answer(name(key), answer);
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
            Status::DamagedRefund => "refunded_damaged",
            Status::Restock => "restocked",
            Status::WriteOff => "written_off",
            Status::Tombstone => "refused",
            Status::Debt => "owed",
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
        Answer::Moved { .. } => "moved",
        Answer::NotSold => "not_sold",
        Answer::Full => "full",
        Answer::Overflow => "overflow",
        Answer::Again => "again",
        Answer::Unreadable => "unreadable",
    }
}

#[cfg(feature = "metrics")]
fn count_answer(inventory: SharedString, answer: &'static str) {
    metrics::counter!("dlock_inventory_answers_total", "inventory" => inventory, "answer" => answer).increment(1);
}

#[cfg(feature = "metrics")]
fn count(key: &Key, answered: &Result<(Snapshot, Answer)>, only_reads: bool) {
    use metrics::counter;

    let inventory = name(key);
    match answered {
        Ok((_, answer)) => {
            let word = word(answer);
            if let Answer::Found(record) = answer
                && !(only_reads || record.status != Status::Refund && record.refunded > 0)
            {
                counter!("dlock_inventory_units_total", "inventory" => inventory.clone(), "effect" => word)
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

/// The label of an inventory: its template or name, else the plain string that it was made
/// from. A program has few inventories, and one without its name cannot be told apart.
#[cfg(feature = "metrics")]
fn name(key: &Key) -> SharedString {
    match key.template() {
        "" => key.label().to_owned().into(),
        template => template.into(),
    }
}

/// Gives the recorder the help text of every metric, with the first event.
#[cfg(feature = "metrics")]
fn describe_once() {
    use metrics::describe_counter;

    static DESCRIBED: std::sync::Once = std::sync::Once::new();
    if DESCRIBED.is_completed() {
        return;
    }
    DESCRIBED.call_once(|| {});

    describe_counter!("dlock_segment_dry_total", "Segments that had nothing left when locked.");
    describe_counter!("dlock_inventory_answers_total", "Answers to requests on an inventory.");
    describe_counter!("dlock_inventory_units_total", "Units in the answers, by their effect.");
    describe_counter!(
        "dlock_inventory_unknown_total",
        "Requests on an inventory whose outcome is unknown."
    );
    describe_counter!(
        "dlock_inventory_failed_total",
        "Requests on an inventory that the store did not apply."
    );
}
