//! What can be seen of a sale, as in `dlock_core::observe`: events of the target
//! `dlock::stock`, and with the feature `metrics` the counters
//! `dlock_stock_answers_total` (with `sale` and `answer`), `dlock_stock_units_total`
//! (with `sale` and `effect`) and `dlock_stock_unknown_total`.

use dlock_core::Key;

use crate::error::{Error, Result};
use crate::store::{Answer, Change, Fate, View};

pub(super) fn answered(key: &Key, answered: &Result<(View, Answer)>) {
    match answered {
        Ok((view, answer)) => {
            tracing::debug!(
                target: "dlock::stock",
                sale = key.label(), answer = word(answer), available = view.available, "answered"
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
    count(key, answered);
}

pub(super) fn changed(key: &Key, change: &Change) {
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
    }
}

#[cfg(feature = "metrics")]
fn count(key: &Key, answered: &Result<(View, Answer)>) {
    use metrics::counter;

    // The template or the name; a plain text may be one of very many.
    let sale = if key.label() == key.as_str() { "unnamed" } else { key.label() }.to_owned();
    match answered {
        Ok((_, answer)) => {
            let word = word(answer);
            if let Answer::Found(record) = answer {
                counter!("dlock_stock_units_total", "sale" => sale.clone(), "effect" => word)
                    .increment(record.quantity);
            }
            counter!("dlock_stock_answers_total", "sale" => sale, "answer" => word).increment(1);
        }
        Err(Error::Unknown(_)) => {
            counter!("dlock_stock_unknown_total", "sale" => sale).increment(1);
        }
        Err(_) => {}
    }
}
