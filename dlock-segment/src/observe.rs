//! What can be seen of segments and sales, as in `dlock::observe`.
//!
//! | target | event | level | fields |
//! |---|---|---|---|
//! | `dlock::segment` | `dry` | debug | `key`, `segment` |
//! | `dlock::stock` | `answered` | debug | `sale`, `answer`, `available` |
//! | `dlock::stock` | `failed` | debug | `sale`, `error` |
//! | `dlock::stock` | `unknown` | warn | `sale`, `error` |
//! | `dlock::stock` | `changed` | info | `sale`, `change` |
//!
//! With the feature `metrics` the counters `dlock_segment_dry_total` (with `lock`),
//! `dlock_stock_answers_total` (with `sale` and `answer`), `dlock_stock_units_total`
//! (with `sale` and `effect`), `dlock_stock_unknown_total` (with `sale`) and
//! `dlock_stock_failed_total` (with `sale` and `kind`, as of a lock). Answers
//! without a round trip are `sold_out_in_front` and `throttled`, which have no
//! `available`. A request that is repeated under its id counts again. What is shown
//! of a key is as there: never its values.

use dlock::Key;

use crate::error::{Error, Result};
use crate::lock::Segment;
use crate::store::{Answer, Change, Fate, Glance};

/// A segment of a lock had nothing.
pub(crate) fn dry(key: &Key, name: Option<&'static str>, segment: &Segment) {
    tracing::debug!(
        target: "dlock::segment",
        key = name.unwrap_or(key.label()), segment = segment.index(), "dry"
    );
    #[cfg(feature = "metrics")]
    metrics::counter!("dlock_segment_dry_total", "lock" => name.unwrap_or(template(key)))
        .increment(1);
}

/// The store answered, or did not. Who only looks has no effect that counts.
pub(crate) fn answered(key: &Key, answered: &Result<(Glance, Answer)>, only_looks: bool) {
    match answered {
        Ok((glance, answer)) => {
            tracing::debug!(
                target: "dlock::stock",
                sale = key.label(), answer = word(answer), available = glance.available, "answered"
            );
        }
        Err(error @ Error::Unknown(_)) => {
            tracing::warn!(target: "dlock::stock", sale = key.label(), %error, "unknown");
        }
        Err(error) => {
            tracing::debug!(target: "dlock::stock", sale = key.label(), %error, "failed");
        }
    }
    #[cfg(feature = "metrics")]
    count(key, answered, only_looks);
    #[cfg(not(feature = "metrics"))]
    let _ = only_looks;
}

/// Answered without asking the store.
pub(crate) fn in_front(key: &Key, answer: &'static str) {
    tracing::debug!(target: "dlock::stock", sale = key.label(), answer, "answered");
    #[cfg(feature = "metrics")]
    count_answer(template(key), answer);
}

pub(crate) fn changed(key: &Key, change: &Change) {
    tracing::info!(target: "dlock::stock", sale = key.label(), ?change, "changed");
}

fn word(answer: &Answer) -> &'static str {
    match answer {
        Answer::Found(record) => match record.fate {
            Fate::Taken => "taken",
            Fate::Reserved => "reserved",
            Fate::Confirmed => "confirmed",
            Fate::Cancelled => "cancelled",
            Fate::Expired => "expired",
            Fate::Refund => "refunded",
            Fate::Restock => "restocked",
            Fate::Tombstone => "refused",
        },
        Answer::Absent => "absent",
        Answer::SoldOut => "sold_out",
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
fn count_answer(sale: &'static str, answer: &'static str) {
    metrics::counter!("dlock_stock_answers_total", "sale" => sale, "answer" => answer).increment(1);
}

#[cfg(feature = "metrics")]
fn count(key: &Key, answered: &Result<(Glance, Answer)>, only_looks: bool) {
    use metrics::counter;

    let sale = template(key);
    match answered {
        Ok((_, answer)) => {
            let word = word(answer);
            if let Answer::Found(record) = answer
                && !only_looks
            {
                counter!("dlock_stock_units_total", "sale" => sale, "effect" => word)
                    .increment(record.quantity);
            }
            count_answer(sale, word);
        }
        Err(Error::Unknown(_)) => {
            counter!("dlock_stock_unknown_total", "sale" => sale).increment(1);
        }
        Err(Error::Store(error)) => {
            let kind = format!("{:?}", error.kind());
            counter!("dlock_stock_failed_total", "sale" => sale, "kind" => kind).increment(1);
        }
        Err(_) => {}
    }
}

/// The template or the name; a plain text may be one of very many.
#[cfg(feature = "metrics")]
fn template(key: &Key) -> &'static str {
    match key.template() {
        "" => "unnamed",
        template => template,
    }
}
