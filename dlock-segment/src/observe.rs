//! The events and metrics of segmented locks and inventories, in the manner of
//! `dlock::observe`.
//!
//! | target | event | level | fields |
//! |---|---|---|---|
//! | `dlock::segment` | `dry` | debug | `key`, `segment` |
//! | `dlock::inventory` | `answered` | debug | `inventory`, `answer`, `available` |
//! | `dlock::inventory` | `failed`, for each request | debug | `inventory`, `kind`, `error` |
//! | `dlock::inventory` | `requests fail`, when that begins | warn | `inventory`, `kind`, `error` |
//! | `dlock::inventory` | `requests still fail`, once a minute | warn | `inventory`, `kind`, `error`, `since_s`, `failed` |
//! | `dlock::inventory` | `requests are answered again` | warn | `inventory`, `lasted_s`, `failed` |
//! | `dlock::inventory` | `the inventory is lost`, at once and once a minute | error | `inventory`, `error`, `failed` |
//! | `dlock::inventory` | `changed` | info | `inventory`, `change` |
//! | `dlock::inventory` | the server does not write to disk | warn | - |
//!
//! The feature `metrics` adds these counters:
//!
//! | counter | labels |
//! |---|---|
//! | `dlock_segment_dry_total` | `lock` |
//! | `dlock_inventory_answers_total` | `inventory`, `answer` |
//! | `dlock_inventory_units_total` | `inventory`, `effect` |
//! | `dlock_inventory_unknown_total` | `inventory` |
//! | `dlock_inventory_failed_total` | `inventory`, `kind` (as for a lock; `Lost`, `OutOfReach`) |
//!
//! and the gauge `dlock_inventory_tombstones` with the labels `inventory` and `home`.
//!
//! The answers `sold_out_cached` and `throttled` need no round trip, so their events
//! have no `available`. A request that is repeated under its id is counted again. The
//! label `inventory` is the template or the name of the key, never its values; an
//! inventory that is made from a plain string is shown by that string.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use dlock::Key;
use dlock::extension::{Outage, OutageLine};
#[cfg(feature = "metrics")]
use metrics::SharedString;
use parking_lot::Mutex;

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

/// The failures of one inventory, as they are logged: a line when they begin, once a minute
/// while they go on, and when they end. A lost inventory does not hide behind an outage.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    is_open: AtomicBool,
    outages: Mutex<Outages>,
}

#[derive(Debug, Default)]
struct Outages {
    store: Outage,
    lost: Outage,
}

impl Failures {
    fn log(&self, key: &Key, answered: &Result<(Snapshot, Answer)>) {
        let error = match answered {
            Err(error) => error,
            Ok(_) if self.is_open.load(Ordering::Relaxed) => return self.succeeded(key),
            Ok(_) => return,
        };
        let (inventory, kind) = (key.label(), &*kind(error));
        tracing::debug!(target: "dlock::inventory", inventory, kind, %error, "failed");
        let mut outages = self.outages.lock();
        let is_lost = matches!(error, Error::Lost(_));
        let outage = match error {
            Error::Lost(_) => &mut outages.lost,
            Error::Unknown(_) | Error::OutOfReach { .. } | Error::Store(_) => &mut outages.store,
            _ => return,
        };
        let line = outage.failed(Instant::now());
        self.is_open.store(true, Ordering::Relaxed);
        drop(outages);
        match line {
            Some(OutageLine::Began) if is_lost => {
                tracing::error!(target: "dlock::inventory", inventory, %error, "the inventory is lost");
            }
            Some(OutageLine::GoesOn { counts, .. }) if is_lost => tracing::error!(
                target: "dlock::inventory", inventory, %error, failed = counts.failed,
                "the inventory is lost"
            ),
            Some(OutageLine::Began) => {
                tracing::warn!(target: "dlock::inventory", inventory, kind, %error, "requests fail");
            }
            Some(OutageLine::GoesOn { since, counts }) => tracing::warn!(
                target: "dlock::inventory", inventory, kind, %error, since_s = since.as_secs(),
                failed = counts.failed, "requests still fail"
            ),
            Some(OutageLine::Ended { .. }) | None => {}
        }
    }

    fn succeeded(&self, key: &Key) {
        let now = Instant::now();
        let mut outages = self.outages.lock();
        let lines = [outages.lost.succeeded(now), outages.store.succeeded(now)];
        let is_open = outages.lost.is_open() || outages.store.is_open();
        self.is_open.store(is_open, Ordering::Relaxed);
        drop(outages);
        for line in lines.into_iter().flatten() {
            let OutageLine::Ended { lasted, counts } = line else { continue };
            tracing::warn!(
                target: "dlock::inventory", inventory = key.label(), lasted_s = lasted.as_secs(),
                failed = counts.failed, "requests are answered again"
            );
        }
    }
}

/// The kind of an error, as a label of metrics.
fn kind(error: &Error) -> Cow<'static, str> {
    let kind = match error {
        Error::Invalid(_) => "Invalid",
        Error::NotFound(_) => "NotFound",
        Error::Lost(_) => "Lost",
        Error::Conflict(_) => "Conflict",
        Error::NotHeld(_) => "NotHeld",
        Error::Unknown(_) => "Unknown",
        Error::Throttled { .. } => "Throttled",
        Error::OutOfReach { .. } => "OutOfReach",
        Error::Store(error) => return format!("{:?}", error.kind()).into(),
    };
    kind.into()
}

/// Reports the answer of the store, or the error. A request that only reads has no effect
/// to count.
pub(crate) fn answered(
    key: &Key,
    failures: &Failures,
    answered: &Result<(Snapshot, Answer)>,
    only_reads: bool,
) {
    if let Ok((snapshot, answer)) = answered {
        tracing::debug!(
            target: "dlock::inventory",
            inventory = key.label(), answer = word(answer), available = snapshot.available, "answered"
        );
    }
    failures.log(key, answered);
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
        Answer::TooOld => "too_old",
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
        Err(error @ (Error::Store(_) | Error::Lost(_) | Error::OutOfReach { .. })) => {
            counter!("dlock_inventory_failed_total", "inventory" => inventory, "kind" => kind(error))
                .increment(1);
        }
        Err(_) => {}
    }
}

/// Reports how many ids a home refuses for good.
pub(crate) fn tombstones(key: &Key, home: u32, count: u64) {
    #[cfg(feature = "metrics")]
    {
        describe_once();
        let home = home.to_string();
        metrics::gauge!("dlock_inventory_tombstones", "inventory" => name(key), "home" => home)
            .set(count as f64);
    }
    #[cfg(not(feature = "metrics"))]
    let _ = (key, home, count);
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
    use metrics::{describe_counter, describe_gauge};

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
    describe_gauge!(
        "dlock_inventory_tombstones",
        "Ids that a home refuses for good, of 100,000 that are possible in a retention."
    );
}
